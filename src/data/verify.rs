//! Verification of data: reads all of it and compares it with checksums and declared ranges.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::Serialize;

use super::block_checksums::Scratch;
use super::element_convert::{ElementType, ReadAs};
use super::format::{BlockSums, Checksums};
use super::h5;
use super::import::skipped_note;
use super::inspect::h5_files;
use super::rows::RowReader;
use super::sandbox::Sandbox;
use super::shard::{Shard, first_invalid};
use super::shard_schema::Field;
use super::shard_set_check;
use super::spec::Verify;
use super::{DataSpec, SampleSpec, is_weight};
use hpctrain_base::error::{Error, Result};

/// The number of ids read at a time if no checksum gives the block.
const BLOCK: usize = 1 << 16;
/// Chunks of a few MiB are decompressed once even if blocks straddle them.
const CACHE_BYTES: usize = 32 << 20;

/// The counts of a successful verification.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// The number of files read.
    pub files: usize,
    /// The number of ids read; inputs and targets are counted separately.
    pub ids: u64,
    /// The number of numbers read; inputs and targets are counted separately.
    pub numbers: u64,
    /// The number of blocks whose checksum was compared.
    pub checksums: u64,
    /// The checks that were not possible, each with the reason.
    pub notes: Vec<String>,
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = count(self.files, "file");
        write!(f, "{files} in order: {} ids, ", self.ids)?;
        if self.numbers > 0 {
            write!(f, "{} numbers, ", self.numbers)?;
        }
        write!(f, "{} checksums", self.checksums)?;
        self.notes.iter().try_for_each(|note| write!(f, "\nnote: {note}"))
    }
}

fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// Checks the checksums and ids of one file, or all `.h5` files of a directory, and that they match
/// each other.
///
/// All problems are collected; the error lists them below a summary.
pub fn verify(path: &Path) -> Result<VerifyReport> {
    let files = h5_files(path)?;
    let mut check = Check::default();
    let mut shards: Vec<Shard> = Vec::new();
    let spec = DataSpec { samples: SampleSpec::Anything, ..DataSpec::new(path) };
    let mut sandbox = Sandbox::default();
    for file in &files {
        match sandbox.shard(file, &spec) {
            Ok(shard) => {
                let sibling = shards.first().map_or(Ok(()), |first| shard.check_sibling(first));
                check.note_failure(sibling);
                // Validation shards need no weights.
                let of_split =
                    shards.iter().find(|other| is_train(other, &spec) == is_train(&shard, &spec));
                check.note_failure(of_split.map_or(Ok(()), |first| shard.check_weights(first)));
                check.note_failure(shard.check_written());
                check.content(&shard);
                shards.push(shard);
            }
            Err(e) => check.problem(e),
        }
    }
    if path.is_dir() && shards.len() == files.len() {
        for problem in shard_set_check::problems(&shards, |_| true) {
            check.problem(format!("{}: {problem}", path.display()));
        }
    }
    // Every shard describes the whole import.
    if let Some(rows) = shards.iter().filter_map(|shard| shard.header.skipped_rows).max() {
        check.report.notes.push(skipped_note(rows));
    }
    check.report.files = files.len();
    match check.problems.len() {
        0 => Ok(check.report),
        n => Err(Error::input(format!(
            "{} in {} of {}\n{}",
            count(n, "problem"),
            count(files.len(), "file"),
            path.display(),
            check.problems.join("\n")
        ))
        .hint("copy or import the damaged files again")),
    }
}

/// Returns whether the name of a shard is that of a shard for training.
fn is_train(shard: &Shard, spec: &DataSpec) -> bool {
    shard.path.file_name().is_some_and(|name| spec.train.matches(&name.to_string_lossy()))
}

#[derive(Default)]
struct Check {
    report: VerifyReport,
    problems: Vec<String>,
}

impl Check {
    fn problem(&mut self, problem: impl fmt::Display) {
        // Hints of single problems would make the list hard to read.
        let text = problem.to_string();
        self.problems.push(format!("  {}", text.lines().next().unwrap_or_default()));
    }

    fn note_failure(&mut self, result: Result<()>) {
        if let Err(e) = result {
            self.problem(e);
        }
    }

    /// Reads all datasets of a shard.
    fn content(&mut self, shard: &Shard) {
        let path = shard.path.display();
        let checksums = shard
            .header
            .has_checksums()
            .then(|| Checksums::read(&h5::open_file(&shard.path, None)?))
            .transpose();
        let checksums = match checksums {
            Ok(checksums) => checksums.flatten(),
            Err(e) => return self.problem(e.at(path)),
        };
        match (&checksums, &shard.header.format) {
            (None, _) if shard.header.has_checksums() => {
                self.problem(format!("{path}: has no checksums"))
            }
            (None, Some(_)) => self.report.notes.push(format!("{path} has no checksums")),
            (None, None) => self.report.notes.push(format!("{path} has no checksums")),
            (Some(_), _) => {}
        }
        let vocabulary = shard.header.vocabulary_size.map(|size| size as usize);
        let has_ids = shard.content.datasets().iter().any(|field| field.kind == ReadAs::Ids);
        if vocabulary.is_none() && has_ids {
            self.report
                .notes
                .push(format!("{path} has no vocabulary_size: only negative ids are found"));
        }
        // All blocks are compared below, so that a wrong one does not end the verification.
        let result =
            shard.readers(CACHE_BYTES, Verify::Off, &Scratch::default()).map(|mut readers| {
                for (field, reader) in shard.content.datasets().into_iter().zip(&mut readers) {
                    let sums = checksums.as_ref().and_then(|checksums| checksums.get(&field.name));
                    if sums.is_some() && !field.is_native() {
                        self.report.notes.push(format!(
                            "{path}: {} was converted, so its checksums are not compared",
                            field.name
                        ));
                    }
                    let sums = sums.filter(|_| field.is_native());
                    match (sums, &checksums) {
                        (Some(sums), _) if sums.crc32.len() != sums.needed(field.rows()) => {
                            let has = sums.crc32.len();
                            let needs = sums.needed(field.rows());
                            self.problem(format!(
                                "{path}: {} has {has} checksums for {needs} blocks",
                                field.name
                            ));
                        }
                        (None, Some(_)) if field.is_native() => {
                            self.problem(format!("{path}: {} has no checksums", field.name));
                        }
                        _ => {}
                    }
                    match field.kind {
                        ReadAs::Ids => {
                            let below = vocabulary.unwrap_or(i32::MAX as usize);
                            self.ids(shard, field, reader, sums, below);
                        }
                        ReadAs::Numbers => {
                            let of_weights = shard
                                .content
                                .weights()
                                .is_some_and(|weights| weights.name == field.name);
                            self.numbers(
                                shard,
                                field,
                                reader,
                                sums,
                                if of_weights { is_weight } else { f32::is_finite },
                            );
                        }
                    }
                }
            });
        self.note_failure(result);
    }

    /// Reads a dataset of ids block by block. A block that cannot be read is one problem, and the
    /// verification continues.
    fn ids(
        &mut self,
        shard: &Shard,
        ids: &Field,
        reader: &mut RowReader,
        sums: Option<&BlockSums>,
        vocabulary: usize,
    ) {
        let path = shard.path.display();
        let mut buffer = Vec::new();
        let mut invalid = 0;
        for rows in blocks(ids, sums) {
            let Some((stored, bytes)) = self.block(shard, ids, reader, sums, rows.clone()) else {
                continue;
            };
            let absent = missing_in(ids, stored, bytes, &rows);
            buffer.resize(rows.len() * ids.row_len(), 0);
            stored.to_ids(bytes, &mut buffer);
            if let Some(absent) = absent {
                self.problem(format!("{path}: {absent}"));
            }
            self.report.ids += buffer.len() as u64;
            if let Some(at) = first_invalid(&buffer, vocabulary) {
                if invalid == 0 {
                    let element = ids.element(rows.start * ids.row_len() + at);
                    let id = buffer[at] as i32;
                    self.problem(format!(
                        "{path}: {element} is token id {id}, outside the vocabulary of {vocabulary}"
                    ));
                }
                invalid += buffer.iter().filter(|&&id| id as usize >= vocabulary).count();
            }
        }
        if invalid > 1 {
            self.problem(format!(
                "{path}: {} has {invalid} ids outside the vocabulary in all",
                ids.name
            ));
        }
    }

    /// Reads a dataset of numbers block by block. Numbers that are not `right` are counted, and the
    /// first is named.
    fn numbers(
        &mut self,
        shard: &Shard,
        field: &Field,
        reader: &mut RowReader,
        sums: Option<&BlockSums>,
        right: fn(f32) -> bool,
    ) {
        let path = shard.path.display();
        let mut buffer = Vec::new();
        let mut wrong = 0;
        for rows in blocks(field, sums) {
            let Some((stored, bytes)) = self.block(shard, field, reader, sums, rows.clone()) else {
                continue;
            };
            let absent = missing_in(field, stored, bytes, &rows);
            buffer.resize(rows.len() * field.row_len(), 0.0);
            match &field.packing {
                Some(packing) => packing.unpack_all(stored, bytes, &mut buffer),
                None => stored.to_numbers(bytes, &mut buffer),
            }
            if let Some(absent) = absent {
                self.problem(format!("{path}: {absent}"));
            }
            self.report.numbers += buffer.len() as u64;
            for (at, x) in buffer.iter().enumerate().filter(|(_, x)| !right(**x)) {
                if wrong == 0 {
                    self.problem(format!(
                        "{path}: {} is {x}",
                        field.element(rows.start * field.row_len() + at)
                    ));
                }
                wrong += 1;
            }
        }
        if wrong > 1 {
            let what = if right(-1.0) { "finite numbers" } else { "valid weights" };
            self.problem(format!(
                "{path}: {} has {wrong} elements in all that are not {what}",
                field.name
            ));
        }
    }

    /// Returns the bytes of a block of rows, compared with their checksum if there is one; `None`
    /// if they cannot be read.
    fn block<'r>(
        &mut self,
        shard: &Shard,
        field: &Field,
        reader: &'r mut RowReader,
        sums: Option<&BlockSums>,
        rows: Range<usize>,
    ) -> Option<(ElementType, &'r [u8])> {
        let place =
            format!("{}: {}[{}..{}]", shard.path.display(), field.name, rows.start, rows.end);
        match reader.read_bytes(rows.start as u64, rows.len()) {
            Err(e) => {
                self.problem(format!("{place} cannot be read: {e}"));
                None
            }
            Ok((stored, bytes)) => {
                if let Some(&written) =
                    sums.and_then(|sums| sums.crc32.get(rows.start / sums.block))
                {
                    self.report.checksums += 1;
                    let found = crc32fast::hash(bytes);
                    if found != written {
                        self.problem(format!(
                            "{place} has checksum {found:08x}, but {written:08x} was written"
                        ));
                    }
                }
                Some((stored, bytes))
            }
        }
    }
}

/// Names the first missing element of a block of rows, if there is one.
fn missing_in(
    field: &Field,
    stored: ElementType,
    bytes: &[u8],
    rows: &Range<usize>,
) -> Option<String> {
    let packing = field.packing.as_ref()?;
    let (place, missing) = packing.first_missing(stored.doubles(bytes))?;
    let first = rows.start * field.row_len() + place;
    Some(format!("{} {missing}", field.element(first)))
}

/// Returns the rows of a dataset in the blocks of its checksums, if it has any.
fn blocks(field: &Field, sums: Option<&BlockSums>) -> impl Iterator<Item = Range<usize>> + use<> {
    let all = field.rows();
    let rows = sums.map_or(BLOCK.div_ceil(field.row_len().max(1)), |sums| sums.block);
    (0..all).step_by(rows).map(move |first| first..(first + rows).min(all))
}
