//! From NumPy's arrays of features and labels to shards.

use std::path::PathBuf;

use super::npy::{Array, open_archive, read_member};
use super::samples::{Imported, Inputs, Kept, Rows};
use crate::error::{Error, Result};

/// What to import, and how.
#[derive(Debug, Clone)]
pub struct ImportNumpy {
    /// The arrays.
    pub arrays: Arrays,
    /// Labels are numbers, even where they look like classes.
    pub regression: bool,
    /// Where the rows go.
    pub kept: Kept,
}

/// Where the arrays are: features with a row for each sample, and as many labels.
#[derive(Debug, Clone)]
pub enum Arrays {
    /// Two NPY files.
    Files {
        /// That of the features.
        features: PathBuf,
        /// That of the labels.
        labels: PathBuf,
    },
    /// Two arrays of one NPZ archive.
    Archive {
        /// The archive.
        path: PathBuf,
        /// Name of the features in it.
        features: String,
        /// Name of the labels in it.
        labels: String,
    },
}

/// Writes every row as a sample. Features of rows × height × width are images of one channel. Labels are classes if there is one
/// a row and all are integers from 0 on, whatever their type; else numbers.
///
/// # Errors
/// A file is missing or malformed, the two do not fit, or as for every import.
pub fn import_numpy(import: &ImportNumpy) -> Result<Imported> {
    let (path, features, labels, places) = match &import.arrays {
        Arrays::Files { features, labels } => {
            let places = [features, labels].map(|path| path.display().to_string());
            (features, Array::read(features)?, Array::read(labels)?, places)
        }
        Arrays::Archive { path, features, labels } => {
            let mut archive = open_archive(path)?;
            let places = [features, labels].map(|name| format!("{}: {name}", path.display()));
            let mut member = |name| read_member(&mut archive, path, name);
            (path, member(features)?, member(labels)?, places)
        }
    };
    let refused = |place: &str, what: String| {
        Err(Error::input(format!("{place} {what}"))
            .hint("give features with a row for each sample, and as many labels"))
    };
    let shape = match &features.shape[..] {
        [] => return refused(&places[0], "is a single number".into()),
        [_] => vec![1],
        [_, height, width] => vec![*height, *width, 1],
        [_, rest @ ..] => rest.to_vec(),
    };
    let samples = features.shape[0];
    if shape.contains(&0) || labels.shape[..] == [samples, 0] {
        return refused(&places[0], format!("has shape {:?}, the labels have {:?}", features.shape, labels.shape));
    }
    let width = match labels.shape[..] {
        [rows] if rows == samples => 1,
        [rows, columns] if rows == samples => columns,
        _ => return refused(&places[1], format!("has shape {:?}, but there are {samples} rows", labels.shape)),
    };
    let inputs = match features.into_bytes() {
        Ok(bytes) => Inputs::Bytes(bytes),
        Err(features) => Inputs::Numbers(features.numbers().map(|x| x as f32).collect()),
    };
    let source = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let targets = labels.numbers().collect();
    Rows { inputs, shape, targets, width, regression: import.regression, source, places, table: None }
        .write(&import.kept)
}
