//! From NumPy's arrays of features and labels to shards.

use std::path::PathBuf;

use super::npy::{Array, open_archive, read_member};
use super::row_writer::{ImportOptions, Imported, Inputs, Rows};
use super::spool::Elements;
use hpctrain_base::error::{Error, Result};

/// Input and options of an import.
#[derive(Debug, Clone)]
pub struct ImportNumpy {
    /// The arrays.
    pub arrays: Arrays,
    /// Treats labels as numbers even if they could be classes.
    pub regression: bool,
    /// Validation split, shards and destination of the rows.
    pub options: ImportOptions,
}

/// Location of the arrays: features with a row for each sample, and as many labels.
#[derive(Debug, Clone)]
pub enum Arrays {
    /// NPY files.
    Files {
        /// Path of the features.
        features: PathBuf,
        /// Path of the labels; without, rows are to be predicted.
        labels: Option<PathBuf>,
        /// Path of the weights, if there are any.
        weights: Option<PathBuf>,
    },
    /// Arrays of one NPZ archive.
    Archive {
        /// The archive.
        path: PathBuf,
        /// Name of the features in it.
        features: String,
        /// Name of the labels in it; without, rows are to be predicted.
        labels: Option<String>,
        /// Name of the weights in it, if there are any.
        weights: Option<String>,
    },
}

/// Imports every row as a sample. Features of rows × height × width are images of one channel.
/// Labels are classes if there is one per row and all are integers from 0 on, of any type;
/// otherwise they are numbers. Weights, if given, are one per row.
///
/// # Errors
/// Returns an error if a file is missing or malformed, if the arrays do not have equally many rows,
/// or if the shards cannot be written.
pub fn import_numpy(import: &ImportNumpy) -> Result<Imported> {
    let out = &import.options.out;
    let (path, features, labels, weights, places) = match &import.arrays {
        Arrays::Files { features, labels, weights } => {
            let names = [Some(features), labels.as_ref(), weights.as_ref()];
            let places =
                names.map(|path| path.map_or(String::new(), |path| path.display().to_string()));
            let array = |path: &Option<PathBuf>| path.as_deref().map(Array::open).transpose();
            let labels = array(labels)?;
            let weights = array(weights)?;
            (features, Array::open(features)?, labels, weights, places)
        }
        Arrays::Archive { path, features, labels, weights } => {
            let mut archive = open_archive(path)?;
            let names = [Some(features), labels.as_ref(), weights.as_ref()];
            let places = names.map(|name| {
                name.map_or(String::new(), |name| format!("{}: {name}", path.display()))
            });
            let mut member = |name: &Option<String>| {
                name.as_deref().map(|name| read_member(&mut archive, path, name, out)).transpose()
            };
            let labels = member(labels)?;
            let weights = member(weights)?;
            (path, read_member(&mut archive, path, features, out)?, labels, weights, places)
        }
    };
    let refused = |place: &str, what: String| {
        Err(Error::input(format!("{place} {what}")).hint(
            "give features with a row for each sample, as many labels, and as many weights if any",
        ))
    };
    let shape = match &features.shape[..] {
        [] => return refused(&places[0], "is a single number".into()),
        [_] => vec![1],
        [_, height, width] => vec![*height, *width, 1],
        [_, rest @ ..] => rest.to_vec(),
    };
    let samples = features.shape[0];
    let of_labels = labels.as_ref().map(|labels| &labels.shape[..]);
    if shape.contains(&0) || of_labels == Some(&[samples, 0]) {
        let labels =
            of_labels.map_or(String::new(), |shape| format!(", the labels have {shape:?}"));
        return refused(&places[0], format!("has shape {:?}{labels}", features.shape));
    }
    let width = match of_labels {
        None => 0,
        Some([rows]) if *rows == samples => 1,
        Some([rows, columns]) if *rows == samples => *columns,
        Some(shape) => {
            return refused(
                &places[1],
                format!("has shape {shape:?}, but there are {samples} rows"),
            );
        }
    };
    if let Some(weights) = &weights
        && weights.shape[..] != [samples]
        && weights.shape[..] != [samples, 1]
    {
        return refused(
            &places[2],
            format!("has shape {:?}, but there are {samples} rows", weights.shape),
        );
    }
    let inputs = if features.is_u8() {
        Inputs::Bytes(features.into_bytes(out)?)
    } else {
        Inputs::Numbers(features.numbers(out, |x| x as f32)?)
    };
    let source = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let numbers = |array: Option<Array>| {
        array.map_or(Ok(Elements::Memory(vec![])), |array| array.numbers(out, |x| x))
    };
    let targets = numbers(labels)?;
    let weights = numbers(weights)?;
    let count = samples;
    let regression = import.regression;
    let table = None;
    let files = None;
    let classes = vec![];
    Rows {
        inputs,
        count,
        shape,
        targets,
        width,
        weights,
        regression,
        classes,
        skipped: 0,
        source,
        places,
        table,
        files,
    }
    .write(&import.options)
}
