//! Reads everything and compares it with what the files promise.

use std::fmt;
use std::path::Path;

use super::format::{Checksums, checksum};
use super::h5;
use super::import::left_out;
use super::inspect::h5_files;
use super::rows::RowReader;
use super::shard::{Content, Field, Shard, first_invalid};
use super::stored::As;
use super::{DataSpec, Split, Wants, is_weight};
use crate::error::{Error, Result};
use crate::pattern::matches;

/// Ids read at a time where no checksum gives the block.
const BLOCK: usize = 1 << 16;
/// Stored chunks of a few MiB are decompressed once even if blocks straddle them.
const CACHE_BYTES: usize = 32 << 20;

/// What was found in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Files read.
    pub files: usize,
    /// Ids read, inputs and targets counted apart.
    pub ids: u64,
    /// Numbers read, likewise.
    pub numbers: u64,
    /// Blocks whose checksum was compared.
    pub checksums: u64,
    /// What could not be checked, and why.
    pub notes: Vec<String>,
}

impl fmt::Display for Report {
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

/// Checks one file, or all `.h5` files of a directory: checksums, ids, agreement with each other.
///
/// All problems are collected; the error lists them below a summary.
pub fn verify(path: &Path) -> Result<Report> {
    let files = h5_files(path)?;
    let mut check = Check::default();
    let mut shards: Vec<Shard> = Vec::new();
    let spec = DataSpec { wants: Wants::Anything, ..DataSpec::new(path) };
    for file in &files {
        match Shard::open(file, &spec) {
            Ok(shard) => {
                let sibling = shards.first().map_or(Ok(()), |first| shard.check_sibling(first));
                check.note_failure(sibling);
                // Evaluations go without.
                let is_train = |shard: &Shard| {
                    shard.path.file_name().is_some_and(|name| matches(&spec.train, &name.to_string_lossy()))
                };
                let of_split = shards.iter().find(|other| is_train(other) == is_train(&shard));
                check.note_failure(of_split.map_or(Ok(()), |first| shard.check_weights(first)));
                check.content(&shard);
                shards.push(shard);
            }
            Err(e) => check.problem(e),
        }
    }
    if path.is_dir() && shards.len() == files.len() {
        check.completeness(path, &shards);
    }
    // Every shard tells of the whole import.
    if let Some(rows) = shards.iter().filter_map(|shard| shard.header.skipped_rows).max() {
        check.report.notes.push(left_out(rows));
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

#[derive(Default)]
struct Check {
    report: Report,
    problems: Vec<String>,
}

impl Check {
    fn problem(&mut self, problem: impl fmt::Display) {
        // The hints of single problems would drown the list.
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
        let checksums = match (&shard.content, shard.header.format_version) {
            (Content::Tokens(_), Some(_)) => {
                match h5::open_file(&shard.path, None).and_then(|file| Checksums::read(&file)) {
                    Ok(checksums) => checksums,
                    Err(e) => return self.problem(e.at(path)),
                }
            }
            _ => None,
        };
        match (&checksums, shard.header.format_version) {
            (None, Some(_)) => self.problem(format!("{path}: has no checksums")),
            (None, None) => self.report.notes.push(format!("{path} has no checksums")),
            (Some(_), _) => {}
        }
        let vocabulary = shard.header.vocabulary_size.map(|size| size as usize);
        let has_ids = shard.content.datasets().iter().any(|field| field.kind == As::Ids);
        if vocabulary.is_none() && has_ids {
            self.report.notes.push(format!("{path} has no vocabulary_size: only negative ids are found"));
        }
        let result = shard.readers(CACHE_BYTES).map(|mut readers| {
            for (ids, reader) in shard.content.datasets().into_iter().zip(&mut readers) {
                match ids.kind {
                    As::Ids => {
                        let below = vocabulary.unwrap_or(i32::MAX as usize);
                        self.dataset(shard, ids, reader, checksums.as_ref(), below);
                    }
                    As::Numbers => {
                        let of_weights = shard.content.weights().is_some_and(|weights| weights.name == ids.name);
                        self.numbers(shard, ids, reader, if of_weights { is_weight } else { f32::is_finite });
                    }
                }
            }
        });
        self.note_failure(result);
    }

    /// Reads a dataset block by block. A block that cannot be read is one problem, not the end.
    fn dataset(
        &mut self,
        shard: &Shard,
        ids: &Field,
        reader: &mut RowReader,
        checksums: Option<&Checksums>,
        vocabulary: usize,
    ) {
        let path = shard.path.display();
        let rows_a_block = checksums.map_or(BLOCK, |checksums| checksums.block).div_ceil(ids.row_len().max(1));
        if let Some(Checksums { crc32, .. }) = checksums
            && crc32.len() != ids.rows().div_ceil(rows_a_block)
        {
            let (has, wants) = (crc32.len(), ids.rows().div_ceil(rows_a_block));
            self.problem(format!("{path}: {} has {has} checksums for {wants} blocks", ids.name));
        }
        let mut buffer = Vec::new();
        let mut invalid = 0;
        for (block, first) in (0..ids.rows()).step_by(rows_a_block).enumerate() {
            let rows = rows_a_block.min(ids.rows() - first);
            let offset = first * ids.row_len();
            buffer.resize(rows * ids.row_len(), 0);
            let place = format!("{path}: {}[{first}..{}]", ids.name, first + rows);
            if let Err(e) = reader.read(first as u64, &mut buffer) {
                self.problem(format!("{place} cannot be read: {}", h5::one_line(&e)));
                continue;
            }
            self.report.ids += buffer.len() as u64;
            if let Some(&stored) = checksums.and_then(|checksums| checksums.crc32.get(block)) {
                self.report.checksums += 1;
                let actual = checksum(&buffer, ids.dtype.size());
                if actual != stored {
                    self.problem(format!("{place} has checksum {actual:08x}, but {stored:08x} was written"));
                }
            }
            if let Some(at) = first_invalid(&buffer, vocabulary) {
                if invalid == 0 {
                    let (element, id) = (ids.element(offset + at), buffer[at] as i32);
                    self.problem(format!("{path}: {element} is token id {id}, outside the vocabulary of {vocabulary}"));
                }
                invalid += buffer.iter().filter(|&&id| id as usize >= vocabulary).count();
            }
        }
        if invalid > 1 {
            self.problem(format!("{path}: {} has {invalid} ids outside the vocabulary in all", ids.name));
        }
    }

    /// Reads a dataset of numbers block by block. What is not `right` counts, and the first is named.
    fn numbers(&mut self, shard: &Shard, field: &Field, reader: &mut RowReader, right: fn(f32) -> bool) {
        let path = shard.path.display();
        let (row_len, mut wrong) = (field.row_len().max(1), 0);
        let rows_a_block = BLOCK.div_ceil(row_len);
        let mut buffer = Vec::new();
        for first in (0..field.rows()).step_by(rows_a_block) {
            let rows = rows_a_block.min(field.rows() - first);
            buffer.resize(rows * row_len, 0.0);
            if let Err(e) = reader.read_numbers(first as u64, &mut buffer) {
                let place = format!("{path}: {}[{first}..{}]", field.name, first + rows);
                self.problem(format!("{place} cannot be read: {}", h5::one_line(&e)));
                continue;
            }
            self.report.numbers += buffer.len() as u64;
            for (at, x) in buffer.iter().enumerate().filter(|(_, x)| !right(**x)) {
                if wrong == 0 {
                    self.problem(format!("{path}: {} is {x}", field.element(first * row_len + at)));
                }
                wrong += 1;
            }
        }
        if wrong > 1 {
            let what = if right(-1.0) { "no numbers" } else { "no weights" };
            self.problem(format!("{path}: {} has {wrong} elements that are {what} in all", field.name));
        }
    }

    /// Every shard of a split knows how many there should be.
    fn completeness(&mut self, path: &Path, shards: &[Shard]) {
        for split in [Split::Train, Split::Validation] {
            let members = || {
                let headers = shards.iter().map(|shard| &shard.header);
                headers.filter(|header| header.split.as_deref() == Some(split.name()))
            };
            let Some(expected) = members().find_map(|header| header.num_shards) else {
                continue;
            };
            let mut numbers: Vec<u64> = members().filter_map(|header| header.shard).collect();
            numbers.sort_unstable();
            if numbers.len() as u64 != expected || numbers.iter().zip(0..).any(|(&number, place)| number != place) {
                let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
                let numbers = numbers.join(", ");
                self.problem(format!("{}: {split} has shards {numbers} of {expected}", path.display()));
            }
        }
    }
}
