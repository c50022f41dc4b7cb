//! From files in the IDX format of MNIST, plain or gzipped, to shards.
//!
//! Two zero bytes, the type of the elements, the number of axes; the extent of every axis as big-endian u32; the elements.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use super::content;
use super::samples::{Imported, Inputs, Kept, Rows};
use super::spool::Elements;
use crate::error::{Error, Result};

/// The type of unsigned bytes, the only one that images and labels come in.
const BYTES: u8 = 0x08;

/// Input and options of an import.
#[derive(Debug, Clone)]
pub struct ImportIdx {
    /// Images: samples × height × width, or more axes.
    pub images: PathBuf,
    /// Their classes.
    pub labels: PathBuf,
    /// Validation split, shards and destination of the samples.
    pub kept: Kept,
}

/// Writes images as samples of height × width × 1, and their classes.
///
/// # Errors
/// A file is missing or malformed, the two do not fit, or as for every import.
pub fn import_idx(import: &ImportIdx) -> Result<Imported> {
    let (shape, images) = read(&import.images)?;
    let (of_labels, labels) = read(&import.labels)?;
    let refused =
        |path: &Path, what: String, hint: &str| Err(Error::input(format!("{}: {what}", path.display())).hint(hint));
    let [samples, rest @ ..] = &shape[..] else {
        return refused(&import.images, "has no axes".into(), "give the file with images first");
    };
    if rest.is_empty() {
        return refused(
            &import.images,
            "has one axis".into(),
            "give the file with images first, then that with labels",
        );
    }
    if of_labels != [*samples] {
        let message = format!("has shape {of_labels:?}, but there are {samples} images");
        return refused(&import.labels, message, "give images and labels of the same samples");
    }
    // Grey images have one channel.
    let shape = if rest.len() == 2 { [rest, &[1]].concat() } else { rest.to_vec() };
    let source = import.images.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (count, targets) = (labels.len(), Elements::Memory(labels.into_iter().map(f64::from).collect()));
    let places = [&import.images, &import.labels, &import.labels].map(|path| path.display().to_string());
    let (inputs, weights) = (Inputs::Bytes(Elements::Memory(images)), Elements::Memory(vec![]));
    let (regression, table, files) = (false, None, None);
    Rows { inputs, count, shape, targets, width: 1, weights, regression, source, places, table, files }
        .write(&import.kept)
}

/// Shape and elements of a file.
fn read(path: &Path) -> Result<(Vec<usize>, Vec<u8>)> {
    let mut bytes = content(path, "give the path of an IDX file, such as t10k-images-idx3-ubyte.gz")?;
    let malformed = |what: String| {
        Error::input(format!("{}: not an IDX file of bytes: {what}", path.display())).hint("download it again")
    };
    if bytes.starts_with(&[0x1f, 0x8b]) {
        let mut plain = Vec::new();
        GzDecoder::new(&bytes[..]).read_to_end(&mut plain).map_err(|e| malformed(e.to_string()))?;
        bytes = plain;
    }
    let [0, 0, kind, axes, rest @ ..] = &bytes[..] else {
        return Err(malformed(format!("it begins with {:02x?}", &bytes[..bytes.len().min(4)])));
    };
    if *kind != BYTES {
        return Err(malformed(format!("elements of type {kind:#04x}")));
    }
    let header = usize::from(*axes) * 4;
    if rest.len() < header {
        return Err(malformed(format!("{} bytes for {axes} axes", rest.len())));
    }
    let (extents, elements) = rest.split_at(header);
    let shape: Vec<usize> =
        extents.as_chunks::<4>().0.iter().map(|extent| u32::from_be_bytes(*extent) as usize).collect();
    let expected = shape.iter().try_fold(1usize, |all, extent| all.checked_mul(*extent));
    if expected != Some(elements.len()) {
        return Err(malformed(format!("{} elements for shape {shape:?}", elements.len())));
    }
    let header = bytes.len() - elements.len();
    bytes.drain(..header);
    Ok((shape, bytes))
}
