//! From files in the IDX format of MNIST, plain or gzipped, to shards.
//!
//! Two zero bytes, the type of the elements, the number of axes; the extent of every axis as big-endian u32; the elements.

use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use super::content;
use super::samples::{Imported, Inputs, Kept, Rows};
use super::spool::Elements;
use crate::data::bounded::{self, extent};
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
    let mut stored = content(path, "give the path of an IDX file, such as t10k-images-idx3-ubyte.gz")?;
    let parsed = if stored.starts_with(&[0x1f, 0x8b]) {
        let mut plain = GzDecoder::new(&stored[..]);
        shape(&mut plain).and_then(|shape| {
            let elements = bounded::read(plain, count(&shape)? as u64, stored.len() as u64)?;
            Ok((shape, elements))
        })
    } else {
        let mut rest = &stored[..];
        let shape = shape(&mut rest);
        let header = stored.len() - rest.len();
        stored.drain(..header);
        shape.map(|shape| (shape, stored))
    };
    let parsed = parsed.and_then(|(shape, elements)| match count(&shape)? == elements.len() {
        true => Ok((shape, elements)),
        false => Err(format!("{} elements for shape {shape:?}", elements.len())),
    });
    parsed.map_err(|what| {
        Error::input(format!("{}: not an IDX file of bytes: {what}", path.display()))
            .hint("download it again; gunzip it first if it is all right")
    })
}

/// The shape that the header of a file gives; the elements follow.
fn shape(from: &mut impl Read) -> Result<Vec<usize>, String> {
    let mut bytes = |most: usize| {
        let mut bytes = Vec::new();
        from.take(most as u64).read_to_end(&mut bytes).map_err(|e| e.to_string()).map(|_| bytes)
    };
    let (kind, axes) = match bytes(4)?[..] {
        [0, 0, kind, axes] => (kind, axes),
        ref other => return Err(format!("it begins with {other:02x?}")),
    };
    if kind != BYTES {
        return Err(format!("elements of type {kind:#04x}"));
    }
    let extents = bytes(usize::from(axes) * 4)?;
    if extents.len() < usize::from(axes) * 4 {
        return Err(format!("{} bytes for {axes} axes", extents.len()));
    }
    Ok(extents.as_chunks::<4>().0.iter().map(|extent| u32::from_be_bytes(*extent) as usize).collect())
}

/// Elements of a shape.
fn count(shape: &[usize]) -> Result<usize, String> {
    extent(shape).ok_or_else(|| format!("shape {shape:?} is too large for any memory"))
}
