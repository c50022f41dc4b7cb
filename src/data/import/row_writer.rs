//! Writing of rows with targets to shards: the validation split, and the scale of the numbers.

use std::fmt;
use std::path::{Path, PathBuf};

use hdf5::File;
use hdf5::types::{TypeDescriptor, VarLenUnicode};

use super::spool::Elements;
use super::unknown_values::{UnknownValues, unknown_note};
use super::{Staged, part, refuse_shards, shard_name};
use crate::Tokenizer;
use crate::columns::{COLUMNS, Columns};
use crate::format::{Format, IMPORT, SKIPPED_ROWS, TOKENIZER, write_rows_by};
use crate::h5::{one_line, read_all, var_len};
use crate::hdf5_open;
use crate::normalization::{MEAN, STD};
use crate::spec::{DataSpec, Split, WEIGHTS};
use hpctrain_base::error::{Error, Result};

/// The dataset of the file names of rows that were files.
const FILES: &str = "/files";

/// The largest number of columns whose means fit into an attribute of HDF5, which has less than 64
/// KiB.
const MOST_SCALED: usize = 16_000;

/// The dataset of the names of classes in the order of their numbers.
pub(crate) const CLASSES: &str = "/classes";

/// Returns whether a file holds rows that this module wrote.
pub(crate) fn is_of_samples(file: &File) -> bool {
    let format = file.attr("format").and_then(|format| format.read_scalar::<VarLenUnicode>());
    format.is_ok_and(|format| format.as_str() == Format::Rows.name())
}

/// Returns the names of classes in the order of their numbers, if a file has any.
pub(crate) fn class_names(file: &File) -> hdf5::Result<Option<Vec<String>>> {
    if !file.link_exists(CLASSES) {
        return Ok(None);
    }
    let dataset = file.dataset(CLASSES)?;
    if dataset.dtype()?.to_descriptor()? != TypeDescriptor::VarLenUnicode {
        return Ok(None);
    }
    let names: Vec<VarLenUnicode> = read_all(&dataset)?;
    Ok(Some(names.iter().map(ToString::to_string).collect()))
}

/// The treatment of rows with a number that is not finite: NaN or an infinity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum NotFinite {
    /// The import fails and names the place.
    #[default]
    Error,
    /// Rows with such a number are skipped before anything is split, and counted. Empty cells of
    /// tables are such numbers, too.
    Skip,
}

/// The validation split, the training shards and the destination of rows.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// The treatment of rows with a number that is not finite.
    pub not_finite: NotFinite,
    /// The last row of each group of this many is kept for validation; 0 keeps none. Rows without
    /// targets are not split.
    pub every: usize,
    /// The number of training shards.
    pub shards: usize,
    /// Whether numbers are scaled to mean 0 and standard deviation 1, as computed from the training
    /// rows.
    pub normalize: bool,
    /// The directory to write into, which is created if missing and must not hold shards.
    pub out: PathBuf,
}

/// The inputs of all rows.
pub(super) enum Inputs {
    /// Unsigned bytes, such as pixels.
    Bytes(Elements<u8>),
    Numbers(Elements<f32>),
    /// Token ids of text.
    Ids(Elements<u32>),
}

/// The rows of an import.
pub(super) struct Rows {
    pub inputs: Inputs,
    /// The number of rows.
    pub count: usize,
    /// The shape of a row of inputs.
    pub shape: Vec<usize>,
    /// Targets, row after row.
    pub targets: Elements<f64>,
    /// The number of targets of a row; 0 for rows that are to be predicted.
    pub width: usize,
    /// The factor of the loss for each row; empty if all rows have the same weight.
    pub weights: Elements<f64>,
    /// Whether targets are numbers. Otherwise, if there is one per row and all are integers from 0
    /// on, they are classes.
    pub regression: bool,
    /// The imported file's name, without its directory.
    pub source: String,
    /// The origins of inputs, targets and weights, for messages.
    pub places: [String; 3],
    /// The names of the classes in the order of their numbers; empty if they have none. A part of
    /// each named class is kept for validation.
    pub classes: Vec<String>,
    /// The number of rows that were already skipped.
    pub skipped: usize,
    /// The columns and categories of a table, if the rows come from one.
    pub table: Option<Table>,
    /// The names of the rows' files, below the imported folder, if each was a file.
    pub files: Option<Vec<String>>,
}

/// The parts of a table besides numbers.
pub(super) struct Table {
    pub columns: Columns,
    /// The ids of categories, row after row.
    pub ids: Elements<u32>,
    /// The scale of the inputs, if it is not to be computed from them.
    pub scale: Option<Scale>,
    /// Whether NaN among the inputs stands for a missing value, which gets the mean of its column
    /// over the training rows.
    pub is_filled_later: bool,
    /// The tokenizer of the inputs and their summary, if they are text.
    pub text: Option<(Tokenizer, ImportedText)>,
    /// The unknown values of its columns.
    pub unknown: Vec<UnknownValues>,
}

/// A summary of the texts of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedText {
    /// The number of different ids, which is the number of rows of the embedding.
    pub vocabulary: usize,
    /// The number of ids of a text.
    pub length: usize,
    /// The number of texts.
    pub texts: usize,
    /// The number of texts that were longer and are truncated.
    pub truncated: usize,
    /// The number of tokens of the longest text.
    pub longest: usize,
}

/// The result of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// The shards with their numbers of rows, training first.
    pub shards: Vec<(PathBuf, usize)>,
    /// The shape of a row of inputs.
    pub shape: Vec<usize>,
    /// The number of classes, counted up to the largest that occurs, if targets are classes.
    pub classes: Option<usize>,
    /// The names of the classes in the order of their numbers; empty if they have none.
    pub class_names: Vec<String>,
    /// The number of rows that were skipped because a number was not finite.
    pub skipped: usize,
    /// The number of ids of each category, which is the number of rows of its embedding table.
    pub tables: Vec<usize>,
    /// Whether rows have targets; those without can be predicted, not learned from.
    pub has_targets: bool,
    /// The summary of the texts, if rows are text.
    pub text: Option<ImportedText>,
    /// The unknown values of a table's categories and texts.
    pub unknown: Vec<UnknownValues>,
}

impl fmt::Display for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, rows) in &self.shards {
            writeln!(f, "{}: {rows} samples", path.display())?;
        }
        let rows: usize = self.shards.iter().map(|(_, rows)| rows).sum();
        write!(f, "{rows} samples; model.input = {:?}", self.shape)?;
        self.classes.map_or(Ok(()), |classes| write!(f, ", {classes} classes"))?;
        if !self.has_targets {
            write!(f, ", without targets: for hpctrain predict")?;
        }
        if !self.tables.is_empty() {
            write!(f, "; embedding_tables: ids = {:?}", self.tables)?;
        }
        if let Some(text) = &self.text {
            let ImportedText { vocabulary, length, texts, truncated, longest } = text;
            write!(f, "; embedding: ids = {vocabulary}\ntexts of up to {longest} tokens")?;
            write!(f, ", {truncated} of {texts} truncated to {length}")?;
        }
        if !self.class_names.is_empty() {
            write!(f, "\nclasses: {}", numbered(&self.class_names))?;
        }
        if self.skipped > 0 {
            write!(f, "\n{}", skipped_note(self.skipped as u64))?;
        }
        unknown_note(&self.unknown).map_or(Ok(()), |note| write!(f, "\n{note}"))
    }
}

/// One shard to be written.
struct ShardOf<'a> {
    split: Split,
    /// The shard's number among those of its split, and their total.
    shard: usize,
    num_shards: usize,
    /// Identifies the import.
    import: &'a str,
    rows: RowRange<'a>,
    /// The scale that is applied to inputs when they are read.
    scale: Option<&'a Scale>,
    /// Whether targets are classes.
    is_class: bool,
    /// The number of rows that the whole import has skipped.
    skipped: usize,
}

/// A set of rows, with a bit for each row.
struct RowSet {
    bits: Vec<u64>,
    len: usize,
}

impl RowSet {
    fn none_of(rows: usize) -> Self {
        Self { bits: vec![0; rows.div_ceil(64)], len: 0 }
    }

    /// Adds a row that is not in the set.
    fn add(&mut self, row: usize) {
        self.bits[row / 64] |= 1 << (row % 64);
        self.len += 1;
    }

    fn len(&self) -> usize {
        self.len
    }

    /// Returns the rows, ascending.
    fn iter(&self) -> impl Iterator<Item = usize> {
        self.bits.iter().copied().enumerate().flat_map(|(word, bits)| {
            (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| 64 * word + bit)
        })
    }
}

/// A range of the rows of a set.
struct RowRange<'a> {
    of: &'a RowSet,
    range: std::ops::Range<usize>,
}

impl RowRange<'_> {
    fn len(&self) -> usize {
        self.range.len()
    }

    fn iter(&self) -> impl Iterator<Item = usize> {
        self.of.iter().skip(self.range.start).take(self.range.len())
    }
}

/// Wraps `read` for HDF5, which passes on its own errors only: another error is stored in
/// `refused`.
fn kept_in<T>(
    refused: &mut Option<Error>,
    read: impl Fn(usize, &mut Vec<T>) -> Result<()>,
) -> impl FnMut(usize, &mut Vec<T>) -> hdf5::Result<()> {
    move |row, to| {
        read(row, to).map_err(|e| {
            let message = e.message().to_string();
            *refused = Some(e);
            message.into()
        })
    }
}

/// Lists the names of classes with their numbers, for display.
pub(crate) fn numbered(names: &[String]) -> String {
    let all: Vec<String> =
        names.iter().enumerate().map(|(number, name)| format!("{number} {name}")).collect();
    all.join(", ")
}

/// Returns the note on rows that an import has skipped.
pub(crate) fn skipped_note(rows: u64) -> String {
    let (noun, verb) = if rows == 1 { ("row", "was") } else { ("rows", "were") };
    format!(
        "{rows} {noun} with numbers that are missing or not finite {verb} skipped when the data was imported"
    )
}

/// Returns whether a target can be a class. Ids are read as 31 bits.
fn is_class(target: f64) -> bool {
    target >= 0.0 && target.fract() == 0.0 && target < f64::from(i32::MAX)
}

/// The mean and the standard deviation of every channel or column.
pub(super) type Scale = (Vec<f32>, Vec<f32>);

impl Rows {
    fn len(&self) -> usize {
        self.count
    }

    fn targets_of(&self, row: usize) -> Result<Vec<f64>> {
        self.targets.get(row * self.width, self.width)
    }

    /// Returns the weight of a row, if rows have weights.
    fn weight_of(&self, row: usize) -> Result<Option<f64>> {
        if self.weights.len() == 0 {
            Ok(None)
        } else {
            Ok(self.weights.get(row, 1)?.first().copied())
        }
    }

    fn row_len(&self) -> usize {
        // Without rows, the shape is arbitrary.
        if self.count == 0 { 0 } else { self.shape.iter().product() }
    }

    fn numbers(&self, row: usize) -> Result<Vec<f32>> {
        let first = row * self.row_len();
        let count = self.row_len();
        match &self.inputs {
            Inputs::Bytes(bytes) => {
                Ok(bytes.get(first, count)?.into_iter().map(f32::from).collect())
            }
            Inputs::Numbers(numbers) => {
                let mut found = numbers.get(first, count)?;
                self.fill(&mut found);
                Ok(found)
            }
            Inputs::Ids(_) => Ok(vec![]),
        }
    }

    /// Returns the columns whose missing values are to be filled, if any.
    fn filled_later(&self) -> Option<&Columns> {
        self.table.as_ref().filter(|table| table.is_filled_later).map(|table| &table.columns)
    }

    /// Replaces a row's missing values by the means, once these are known.
    fn fill(&self, row: &mut [f32]) {
        if let Some(columns) = self.filled_later() {
            row.iter_mut()
                .zip(&columns.fill)
                .filter(|(x, _)| x.is_nan())
                .for_each(|(x, mean)| *x = *mean);
        }
    }

    /// Returns the mean of each column over those of the given rows that have a value.
    fn means(&self, rows: &RowSet, columns: &Columns) -> Result<Vec<f32>> {
        let mut sums = vec![(0.0f64, 0usize); self.row_len()];
        for row in rows.iter() {
            for ((sum, count), x) in
                sums.iter_mut().zip(self.numbers(row)?).filter(|(_, x)| !x.is_nan())
            {
                *sum += f64::from(x);
                *count += 1;
            }
        }
        let means = sums.into_iter().zip(&columns.inputs).map(|((sum, count), name)| match count {
            0 => Err(Error::input(format!(
                "{}: column {name:?} has no value in any training row",
                self.places[0]
            ))
            .hint("drop it with --drop")),
            count => Ok((sum / count as f64) as f32),
        });
        means.collect()
    }

    /// Returns the position and value of the first of a row's numbers that is not finite.
    fn not_finite(&self, row: usize) -> Result<Option<String>> {
        let numbers = match &self.inputs {
            Inputs::Bytes(_) | Inputs::Ids(_) => vec![],
            Inputs::Numbers(_) => self.numbers(row)?,
        };
        // Compared as f32, the type that is written.
        let targets = self.targets_of(row)?.into_iter().map(|x| x as f32);
        let is_filled = self.filled_later().is_some();
        let found = numbers.iter().position(|x| !(x.is_finite() || is_filled && x.is_nan()));
        let found = found.map(|at| (0, at, numbers[at]));
        let mut of_targets = targets.enumerate().filter(|(_, x)| !x.is_finite());
        let found = found.or_else(|| of_targets.next().map(|(at, x)| (1, at, x)));
        let weight =
            self.weight_of(row)?.map(|weight| weight as f32).filter(|weight| !weight.is_finite());
        let found = found.or_else(|| weight.map(|weight| (2, 0, weight)));
        Ok(found.map(|(place, at, x)| {
            format!("{}: row {row}, element {at} is {x}", self.places[place])
        }))
    }

    /// Returns the mean and the standard deviation of some rows, in one pass: for every channel of
    /// images, or every column of tables. Constant columns get standard deviation 1.
    fn scale(&self, rows: &RowSet) -> Result<Scale> {
        let places = *self.shape.last().unwrap_or(&1);
        let mut sums = vec![0.0f64; places];
        let mut squares = vec![0.0f64; places];
        // Relative to the first row: far from zero, the squares would lose the deviations to
        // rounding.
        let first: Vec<f64> = match rows.iter().next() {
            None => vec![0.0; places],
            Some(row) => self.numbers(row)?[..places].iter().map(|x| f64::from(*x)).collect(),
        };
        for row in rows.iter() {
            for (i, x) in self.numbers(row)?.into_iter().enumerate() {
                let difference = f64::from(x) - first[i % places];
                sums[i % places] += difference;
                squares[i % places] += difference * difference;
            }
        }
        let count = (rows.len() * self.row_len() / places).max(1) as f64;
        let mean =
            sums.iter().zip(&first).map(|(sum, first)| (first + sum / count) as f32).collect();
        let deviations = sums.iter().zip(&squares).map(|(sum, square)| {
            let variance = (square / count - (sum / count).powi(2)).max(0.0);
            if variance > 1e-12 * square / count { variance.sqrt() as f32 } else { 1.0 }
        });
        Ok((mean, deviations.collect()))
    }

    /// Writes all rows as shards.
    ///
    /// # Errors
    /// Returns an error if a number is not finite, there are too few rows, the directory holds
    /// shards, or a file cannot be written.
    pub fn write(mut self, kept: &ImportOptions) -> Result<Imported> {
        refuse_shards(&kept.out)?;
        if kept.shards == 0 {
            return Err(Error::input("0 shards hold nothing").hint("ask for 1 shard or more"));
        }
        if kept.every == 1 {
            return Err(Error::input("every row would be kept for validation")
                .hint("--val-every 5 keeps a fifth"));
        }
        let mut rows = RowSet::none_of(self.len());
        for row in 0..self.len() {
            match self.not_finite(row)? {
                None => rows.add(row),
                Some(_) if kept.not_finite == NotFinite::Skip => {}
                Some(found) => {
                    return Err(Error::input(found)
                        .hint("mend the data, or skip such rows with --not-finite skip"));
                }
            }
        }
        let mut all_classes = !self.regression && self.width == 1;
        let mut classes = None;
        for row in rows.iter() {
            if let Some(weight) = self.weight_of(row)?.filter(|weight| *weight < 0.0) {
                return Err(Error::input(format!(
                    "{}: row {row} has a weight of {weight}",
                    self.places[2]
                ))
                .hint("mend the data: a weight is a factor of the loss, 0 or more"));
            }
            if all_classes {
                let target = self.targets_of(row)?[0];
                all_classes = is_class(target);
                if all_classes {
                    classes = classes.max(Some(target as usize + 1));
                }
            }
        }
        let skipped = self.skipped + self.len() - rows.len();
        let is_class = all_classes;
        let class_names = self.classes.clone();
        // Classes with names are known, whether they occur or not.
        let classes =
            classes.filter(|_| is_class).max(Some(class_names.len()).filter(|known| *known > 0));
        // Counted for each named class, or for all rows together.
        let mut places = vec![0usize; class_names.len().max(1)];
        // Rows without targets are to be predicted and are not split.
        let every = if self.width > 0 { kept.every } else { 0 };
        let mut validation = RowSet::none_of(self.len());
        let mut train = RowSet::none_of(self.len());
        for row in rows.iter() {
            let place = &mut places
                [if class_names.is_empty() { 0 } else { self.targets_of(row)?[0] as usize }];
            *place += 1;
            let is_kept = every > 0 && (*place).is_multiple_of(every);
            if is_kept { validation.add(row) } else { train.add(row) }
        }
        if train.len() == 0 {
            let hint = if every > 0 {
                "give more rows, or keep fewer for validation"
            } else {
                "give one row or more"
            };
            return Err(Error::input("there are no rows to train on or to predict").hint(hint));
        }
        if train.len() < kept.shards {
            return Err(Error::input(format!(
                "{} training rows do not fill {} shards",
                train.len(),
                kept.shards
            ))
            .hint("ask for fewer shards"));
        }
        let fill = self.filled_later().map(|columns| self.means(&train, columns)).transpose()?;
        if let (Some(table), Some(means)) = (&mut self.table, fill) {
            table.columns.fill = means;
        }
        let of_table = self.table.as_ref().and_then(|table| table.scale.clone());
        let scale = match of_table {
            _ if !kept.normalize || self.row_len() == 0 => None,
            _ if matches!(self.inputs, Inputs::Ids(_)) => None,
            Some(scale) => Some(scale),
            None => Some(self.scale(&train)?),
        };
        if let Some((mean, _)) = scale.as_ref().filter(|(mean, _)| mean.len() > MOST_SCALED) {
            let message = format!(
                "rows have {} columns, and a shard keeps the scale of {MOST_SCALED} at most",
                mean.len()
            );
            return Err(
                Error::input(message).hint("import them with --raw, and scale them beforehand")
            );
        }
        std::fs::create_dir_all(&kept.out).map_err(|e| Error::io("create", &kept.out, e))?;
        let parts = (0..kept.shards).map(|shard| {
            let range = part(train.len(), kept.shards, shard);
            (Split::Train, shard, RowRange { of: &train, range })
        });
        let whole = RowRange { of: &validation, range: 0..validation.len() };
        let validation = (validation.len() > 0).then_some((Split::Validation, 0, whole));
        let import = self.name(kept)?;
        let mut staged = Staged::default();
        let mut shards = Vec::new();
        for (split, shard, rows) in parts.chain(validation) {
            let path = kept.out.join(shard_name(split, shard as u64));
            shards.push((path.clone(), rows.len()));
            let num_shards = if split == Split::Train { kept.shards } else { 1 };
            let import = &import[..];
            let scale = scale.as_ref();
            let shard =
                ShardOf { split, shard, num_shards, import, rows, scale, is_class, skipped };
            self.write_shard(staged.add(path), &shard)?;
        }
        staged.publish()?;
        let categories = self.table.iter().flat_map(|table| &table.columns.categories);
        let tables = categories.map(|category| category.coding.ids()).collect();
        let shape = self.shape.clone();
        let has_targets = self.width > 0;
        let (text, unknown) = match self.table {
            Some(Table { text, unknown, .. }) => (text.map(|(_, summary)| summary), unknown),
            None => (None, vec![]),
        };
        Ok(Imported {
            shards,
            shape,
            classes,
            class_names,
            skipped,
            tables,
            has_targets,
            text,
            unknown,
        })
    }

    /// Returns eight hexadecimal digits that distinguish this import from others: a checksum of the
    /// rows, their shape and the settings of their selection.
    fn name(&self, kept: &ImportOptions) -> Result<String> {
        let mut hasher = crc32fast::Hasher::new();
        match &self.inputs {
            Inputs::Bytes(bytes) => bytes.blocks(|some| hasher.update(some))?,
            Inputs::Numbers(numbers) => {
                numbers.blocks(|some| hasher.update(bytemuck::cast_slice(some)))?
            }
            Inputs::Ids(ids) => ids.blocks(|some| hasher.update(bytemuck::cast_slice(some)))?,
        }
        for numbers in [&self.targets, &self.weights] {
            numbers.blocks(|some| hasher.update(bytemuck::cast_slice(some)))?;
        }
        if let Some(table) = &self.table {
            table.ids.blocks(|some| hasher.update(bytemuck::cast_slice(some)))?;
        }
        hasher.update(format!("{:?} {} {:?}", kept.not_finite, kept.every, self.shape).as_bytes());
        Ok(format!("{:08x}", hasher.finalize()))
    }

    fn write_shard(&self, path: &Path, shard: &ShardOf) -> Result<()> {
        let texts = [
            ("format", var_len(Format::Rows.name())?),
            ("source", var_len(&self.source)?),
            (IMPORT, var_len(shard.import)?),
            ("split", var_len(shard.split.name())?),
        ];
        let mut descriptions = Vec::new();
        if let Some(table) = &self.table {
            descriptions.push((COLUMNS, table.columns.stored()?));
            if let Some((tokenizer, _)) = &table.text {
                descriptions.push((TOKENIZER, var_len(&tokenizer.to_json()?)?));
            }
        }
        let mut refused = None;
        let written = self.write_objects(path, &texts, &descriptions, shard, &mut refused);
        if let Some(e) = refused {
            return Err(e);
        }
        written.map_err(|e| Error::io("write", path, one_line(&e)))?;
        // The file must not get its name before its content is on disk.
        std::fs::File::open(path)
            .and_then(|file| file.sync_all())
            .map_err(|e| Error::io("write", path, e))
    }

    fn write_objects(
        &self,
        path: &Path,
        texts: &[(&str, VarLenUnicode)],
        descriptions: &[(&str, VarLenUnicode)],
        shard: &ShardOf,
        refused: &mut Option<Error>,
    ) -> hdf5::Result<()> {
        let ShardOf { ref rows, scale, is_class, skipped, shard, num_shards, .. } = *shard;
        let names = DataSpec::new("");
        let file = hdf5_open::create(path)?;
        for (name, text) in texts {
            file.new_attr::<VarLenUnicode>().create(*name)?.write_scalar(text)?;
        }
        file.new_attr::<u32>().create("format_version")?.write_scalar(&Format::Rows.version())?;
        for (name, n) in [("shard", shard), ("num_shards", num_shards)] {
            file.new_attr::<u64>().create(name)?.write_scalar(&(n as u64))?;
        }
        if skipped > 0 {
            file.new_attr::<u64>().create(SKIPPED_ROWS)?.write_scalar(&(skipped as u64))?;
        }
        let shape: Vec<usize> =
            std::iter::once(rows.len()).chain(self.shape.iter().copied()).collect();
        let inputs = match &self.inputs {
            _ if self.row_len() == 0 => None,
            Inputs::Bytes(bytes) => {
                let of_row = kept_in(refused, |row, to: &mut Vec<u8>| {
                    bytes.append(row * self.row_len(), self.row_len(), to)
                });
                Some(write_rows_by(&file, &names.inputs, &shape, rows.iter(), of_row)?)
            }
            Inputs::Numbers(numbers) => {
                let of_row = kept_in(refused, |row, to: &mut Vec<f32>| {
                    let first = to.len();
                    numbers.append(row * self.row_len(), self.row_len(), to)?;
                    self.fill(&mut to[first..]);
                    Ok(())
                });
                Some(write_rows_by(&file, &names.inputs, &shape, rows.iter(), of_row)?)
            }
            Inputs::Ids(ids) => {
                let of_row = kept_in(refused, |row, to: &mut Vec<u32>| {
                    ids.append(row * self.row_len(), self.row_len(), to)
                });
                Some(write_rows_by(&file, &names.inputs, &shape, rows.iter(), of_row)?)
            }
        };
        if let (Some(inputs), Some((mean, std))) = (inputs, scale) {
            for (name, numbers) in [(MEAN, mean), (STD, std)] {
                inputs.new_attr::<f32>().shape(numbers.len()).create(name)?.write_raw(numbers)?;
            }
        }
        for (name, description) in descriptions {
            file.new_dataset::<VarLenUnicode>().create(*name)?.write_scalar(description)?;
        }
        if let Some(table) = &self.table {
            let width = table.columns.categories.len();
            if width > 0 {
                write_rows_by(
                    &file,
                    &names.categories,
                    &[rows.len(), width],
                    rows.iter(),
                    kept_in(refused, |row, to: &mut Vec<u32>| {
                        table.ids.append(row * width, width, to)
                    }),
                )?;
            }
        }
        if is_class {
            write_rows_by(
                &file,
                &names.targets,
                &[rows.len()],
                rows.iter(),
                kept_in(refused, |row, to: &mut Vec<u32>| {
                    to.extend(self.targets_of(row)?.into_iter().map(|x| x as u32));
                    Ok(())
                }),
            )?;
        } else if self.width > 0 {
            write_rows_by(
                &file,
                &names.targets,
                &[rows.len(), self.width],
                rows.iter(),
                kept_in(refused, |row, to: &mut Vec<f32>| {
                    to.extend(self.targets_of(row)?.into_iter().map(|x| x as f32));
                    Ok(())
                }),
            )?;
        }
        if self.weights.len() > 0 {
            write_rows_by(
                &file,
                WEIGHTS,
                &[rows.len()],
                rows.iter(),
                kept_in(refused, |row, to: &mut Vec<f32>| {
                    to.extend(self.weight_of(row)?.map(|x| x as f32));
                    Ok(())
                }),
            )?;
        }
        if let Some(files) = &self.files {
            let names = var_len_texts(rows.iter().map(|row| &files[row]))?;
            file.new_dataset::<VarLenUnicode>()
                .shape(names.len())
                .create(FILES)?
                .write_raw(&names)?;
        }
        if !self.classes.is_empty() {
            let classes = var_len_texts(self.classes.iter())?;
            file.new_dataset::<VarLenUnicode>()
                .shape(classes.len())
                .create(CLASSES)?
                .write_raw(&classes)?;
        }
        file.close()
    }
}

/// Returns texts as HDF5 stores them.
fn var_len_texts<'a>(texts: impl Iterator<Item = &'a String>) -> hdf5::Result<Vec<VarLenUnicode>> {
    let parsed = texts
        .map(|text| text.parse().map_err(|_| format!("{text:?} cannot be stored as text").into()));
    parsed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_that_of_every_channel() {
        let numbers = vec![1000.0, 5.0, 1002.0, 5.0, 1004.0, 5.0, 1006.0, 5.0, 9.0, 9.0, 9.0, 9.0];
        let source = String::new();
        let places = [const { String::new() }; 3];
        let inputs = Inputs::Numbers(Elements::Memory(numbers));
        let targets = Elements::Memory(vec![0.0; 3]);
        let weights = Elements::Memory(vec![]);
        let rows = Rows {
            inputs,
            count: 3,
            shape: vec![2, 2],
            targets,
            width: 1,
            weights,
            regression: false,
            source,
            places,
            classes: vec![],
            skipped: 0,
            table: None,
            files: None,
        };
        let mut first = RowSet::none_of(3);
        [0, 1].into_iter().for_each(|row| first.add(row));
        let (mean, std) = rows.scale(&first).unwrap();
        assert_eq!((mean, std), (vec![1003.0, 5.0], vec![5f32.sqrt(), 1.0]));
    }
}
