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
    /// NPY files.
    Files {
        /// That of the features.
        features: PathBuf,
        /// That of the labels.
        labels: PathBuf,
        /// That of the weights, if there are any.
        weights: Option<PathBuf>,
    },
    /// Arrays of one NPZ archive.
    Archive {
        /// The archive.
        path: PathBuf,
        /// Name of the features in it.
        features: String,
        /// Name of the labels in it.
        labels: String,
        /// Name of the weights in it, if there are any.
        weights: Option<String>,
    },
}

/// Writes every row as a sample. Features of rows × height × width are images of one channel. Labels are classes if there is one
/// a row and all are integers from 0 on, whatever their type; else numbers. Weights, if there are any, are one for each row.
///
/// # Errors
/// A file is missing or malformed, the two do not fit, or as for every import.
pub fn import_numpy(import: &ImportNumpy) -> Result<Imported> {
    let (path, features, labels, weights, places) = match &import.arrays {
        Arrays::Files { features, labels, weights } => {
            let places = [features, labels, weights.as_ref().unwrap_or(labels)].map(|path| path.display().to_string());
            let weights = weights.as_deref().map(Array::read).transpose()?;
            (features, Array::read(features)?, Array::read(labels)?, weights, places)
        }
        Arrays::Archive { path, features, labels, weights } => {
            let mut archive = open_archive(path)?;
            let names = [features, labels, weights.as_ref().unwrap_or(labels)];
            let places = names.map(|name| format!("{}: {name}", path.display()));
            let mut member = |name| read_member(&mut archive, path, name);
            let weights = weights.as_deref().map(&mut member).transpose()?;
            (path, member(features)?, member(labels)?, weights, places)
        }
    };
    let refused = |place: &str, what: String| {
        Err(Error::input(format!("{place} {what}"))
            .hint("give features with a row for each sample, as many labels, and as many weights if any"))
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
    if let Some(weights) = &weights
        && weights.shape[..] != [samples]
        && weights.shape[..] != [samples, 1]
    {
        return refused(&places[2], format!("has shape {:?}, but there are {samples} rows", weights.shape));
    }
    let inputs = match features.into_bytes() {
        Ok(bytes) => Inputs::Bytes(bytes),
        Err(features) => Inputs::Numbers(features.numbers().map(|x| x as f32).collect()),
    };
    let source = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let targets = labels.numbers().collect();
    let weights = weights.map_or(vec![], |weights| weights.numbers().collect());
    let regression = import.regression;
    Rows { inputs, shape, targets, width, weights, regression, source, places, table: None, files: None }
        .write(&import.kept)
}
