//! Rows with targets on their way to shards: which of them are kept for validation, and the scale of their numbers.

use std::fmt;
use std::path::{Path, PathBuf};

use hdf5::File;
use hdf5::types::VarLenUnicode;

use super::{Staged, part, refuse_shards, shard_name};
use crate::data::h5::{one_line, var_len};
use crate::data::shard::{MEAN, STD};
use crate::data::{DataSpec, Split};
use crate::error::{Error, Result};

const FORMAT: &str = "hpctrain-samples";
const FORMAT_VERSION: u32 = 1;

/// Which rows are kept for validation, and where the others go.
#[derive(Debug, Clone)]
pub struct Kept {
    /// Of so many rows in a row the last is kept for validation; 0 keeps none.
    pub every: usize,
    /// The number of training shards.
    pub shards: usize,
    /// Bring numbers to mean 0 and standard deviation 1, by those of the training rows.
    pub normalize: bool,
    /// The directory to write into; it is made if missing and may hold no shards yet.
    pub out: PathBuf,
}

/// Inputs of all rows.
pub(super) enum Inputs {
    /// As pixels are.
    Bytes(Vec<u8>),
    Numbers(Vec<f32>),
}

/// Targets of all rows.
pub(super) enum Targets {
    Classes(Vec<u32>),
    /// Row after row, so many a row.
    Values(Vec<f32>, usize),
}

/// Rows in memory.
pub(super) struct Rows {
    pub inputs: Inputs,
    /// Shape of a row of inputs.
    pub shape: Vec<usize>,
    pub targets: Targets,
    /// The imported file's name, without its directory.
    pub source: String,
}

/// What an import has written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// The shards with their numbers of rows, training first.
    pub shards: Vec<(PathBuf, usize)>,
    /// Shape of a row of inputs.
    pub shape: Vec<usize>,
    /// Classes that occur, counted from 0, if targets are classes.
    pub classes: Option<usize>,
}

impl fmt::Display for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, rows) in &self.shards {
            writeln!(f, "{}: {rows} samples", path.display())?;
        }
        let rows: usize = self.shards.iter().map(|(_, rows)| rows).sum();
        write!(f, "{rows} samples; model.input = {:?}", self.shape)?;
        self.classes.map_or(Ok(()), |classes| write!(f, ", {classes} classes"))
    }
}

/// Mean and deviation of every place.
type Scale = (Vec<f32>, Vec<f32>);

impl Rows {
    fn len(&self) -> usize {
        match &self.targets {
            Targets::Classes(classes) => classes.len(),
            Targets::Values(values, width) => values.len() / width,
        }
    }

    fn row_len(&self) -> usize {
        self.shape.iter().product()
    }

    fn numbers(&self, row: usize) -> Vec<f32> {
        let range = row * self.row_len()..(row + 1) * self.row_len();
        match &self.inputs {
            Inputs::Bytes(bytes) => bytes[range].iter().map(|byte| f32::from(*byte)).collect(),
            Inputs::Numbers(numbers) => numbers[range].to_vec(),
        }
    }

    /// Mean and standard deviation of some rows, in one pass: of every channel of images, of every column of tables. What
    /// does not vary keeps its scale.
    fn scale(&self, rows: &[usize]) -> Scale {
        let places = *self.shape.last().unwrap_or(&1);
        let (mut sums, mut squares) = (vec![0.0f64; places], vec![0.0f64; places]);
        // Against the first row: far from zero the squares would swallow the deviations.
        let first: Vec<f64> = rows
            .first()
            .map_or(vec![0.0; places], |row| self.numbers(*row)[..places].iter().map(|x| f64::from(*x)).collect());
        for row in rows {
            for (i, x) in self.numbers(*row).into_iter().enumerate() {
                let apart = f64::from(x) - first[i % places];
                sums[i % places] += apart;
                squares[i % places] += apart * apart;
            }
        }
        let count = (rows.len() * self.row_len() / places).max(1) as f64;
        let mean = sums.iter().zip(&first).map(|(sum, first)| (first + sum / count) as f32).collect();
        let deviation = |(sum, square): (&f64, &f64)| {
            let variance = (square / count - (sum / count).powi(2)).max(0.0);
            if variance > 1e-12 * square / count { variance.sqrt() as f32 } else { 1.0 }
        };
        (mean, sums.iter().zip(&squares).map(deviation).collect())
    }

    /// Writes all rows as shards.
    ///
    /// # Errors
    /// There are too few rows, shards in the directory already, or the file system refused.
    pub fn write(&self, kept: &Kept) -> Result<Imported> {
        refuse_shards(&kept.out)?;
        if kept.shards == 0 {
            return Err(Error::input("0 shards hold nothing").hint("ask for 1 shard or more"));
        }
        if kept.every == 1 {
            return Err(Error::input("every row would be kept for validation").hint("--val-every 5 keeps a fifth"));
        }
        let is_validation = |row: &usize| kept.every > 0 && row % kept.every == kept.every - 1;
        let (validation, train): (Vec<usize>, Vec<usize>) = (0..self.len()).partition(is_validation);
        if train.len() < kept.shards {
            return Err(Error::input(format!("{} training rows do not fill {} shards", train.len(), kept.shards))
                .hint("ask for fewer shards"));
        }
        let scale = kept.normalize.then(|| self.scale(&train));
        std::fs::create_dir_all(&kept.out).map_err(|e| Error::io("create", &kept.out, e))?;
        let parts = (0..kept.shards).map(|shard| (Split::Train, shard, &train[part(train.len(), kept.shards, shard)]));
        let validation = (!validation.is_empty()).then_some((Split::Validation, 0, &validation[..]));
        let (mut staged, mut shards) = (Staged::default(), Vec::new());
        for (split, shard, rows) in parts.chain(validation) {
            let path = kept.out.join(shard_name(split, shard));
            shards.push((path.clone(), rows.len()));
            self.write_shard(staged.add(path), split, rows, scale.as_ref())?;
        }
        staged.publish()?;
        let classes = match &self.targets {
            Targets::Classes(classes) => classes.iter().max().map(|largest| *largest as usize + 1),
            Targets::Values(..) => None,
        };
        Ok(Imported { shards, shape: self.shape.clone(), classes })
    }

    fn write_shard(&self, path: &Path, split: Split, rows: &[usize], scale: Option<&Scale>) -> Result<()> {
        let texts =
            [("format", var_len(FORMAT)?), ("source", var_len(&self.source)?), ("split", var_len(split.name())?)];
        self.write_objects(path, &texts, rows, scale).map_err(|e| Error::io("write", path, one_line(&e)))?;
        // The name must never outlive the content.
        std::fs::File::open(path).and_then(|file| file.sync_all()).map_err(|e| Error::io("write", path, e))
    }

    fn write_objects(
        &self,
        path: &Path,
        texts: &[(&str, VarLenUnicode)],
        rows: &[usize],
        scale: Option<&Scale>,
    ) -> hdf5::Result<()> {
        let names = DataSpec::new("");
        let file = File::create(path)?;
        for (name, text) in texts {
            file.new_attr::<VarLenUnicode>().create(*name)?.write_scalar(text)?;
        }
        file.new_attr::<u32>().create("format_version")?.write_scalar(&FORMAT_VERSION)?;
        let shape: Vec<usize> = std::iter::once(rows.len()).chain(self.shape.iter().copied()).collect();
        let inputs = match &self.inputs {
            Inputs::Bytes(bytes) => {
                let of_row = |row: &usize| &bytes[row * self.row_len()..(row + 1) * self.row_len()];
                let inputs = file.new_dataset::<u8>().shape(shape).create(&names.inputs[..])?;
                inputs.write_raw(&rows.iter().flat_map(of_row).copied().collect::<Vec<u8>>())?;
                inputs
            }
            Inputs::Numbers(numbers) => {
                let of_row = |row: &usize| &numbers[row * self.row_len()..(row + 1) * self.row_len()];
                let inputs = file.new_dataset::<f32>().shape(shape).create(&names.inputs[..])?;
                inputs.write_raw(&rows.iter().flat_map(of_row).copied().collect::<Vec<f32>>())?;
                inputs
            }
        };
        for (name, numbers) in scale.iter().flat_map(|(mean, std)| [(MEAN, mean), (STD, std)]) {
            inputs.new_attr::<f32>().shape(numbers.len()).create(name)?.write_raw(numbers)?;
        }
        match &self.targets {
            Targets::Classes(classes) => {
                let of_rows: Vec<u32> = rows.iter().map(|row| classes[*row]).collect();
                file.new_dataset::<u32>().shape(rows.len()).create(&names.targets[..])?.write_raw(&of_rows)?;
            }
            Targets::Values(values, width) => {
                let of_row = |row: &usize| &values[row * width..(row + 1) * width];
                let of_rows: Vec<f32> = rows.iter().flat_map(of_row).copied().collect();
                let shape = [rows.len(), *width];
                file.new_dataset::<f32>().shape(shape).create(&names.targets[..])?.write_raw(&of_rows)?;
            }
        }
        file.close()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_that_of_every_channel() {
        let numbers = vec![1000.0, 5.0, 1002.0, 5.0, 1004.0, 5.0, 1006.0, 5.0, 9.0, 9.0, 9.0, 9.0];
        let targets = Targets::Classes(vec![0; 3]);
        let rows = Rows { inputs: Inputs::Numbers(numbers), shape: vec![2, 2], targets, source: String::new() };
        let (mean, std) = rows.scale(&[0, 1]);
        assert_eq!((mean, std), (vec![1003.0, 5.0], vec![5f32.sqrt(), 1.0]));
    }
}
