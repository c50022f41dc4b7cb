//! Import of files in the IDX format of MNIST, plain or gzipped, into shards.
//!
//! A file has two zero bytes, the type of the elements and the number of axes, then the extent of
//! every axis as big-endian u32, then the elements.

use std::fs::File;
use std::io::{BufReader, Read, Seek as _};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use super::open;
use super::row_writer::{ImportOptions, Imported, Inputs, Rows};
use super::spool::{Elements, Spooler};
use crate::decompression_limit::{self, Fault, extent};
use hpctrain_base::error::{Error, Result};

/// The type code of unsigned bytes, the only one used for images and labels.
const BYTES: u8 = 0x08;

/// The input and options of an import.
#[derive(Debug, Clone)]
pub struct ImportIdx {
    /// Images: samples × height × width, or more axes.
    pub images: PathBuf,
    /// The classes of the images.
    pub labels: PathBuf,
    /// The validation split, the shards and the destination of the samples.
    pub options: ImportOptions,
}

/// Imports images as samples of height × width × 1, and their classes.
///
/// # Errors
/// Returns an error if a file is missing or malformed, the two do not have the same number of
/// samples, or the shards cannot be written.
pub fn import_idx(import: &ImportIdx) -> Result<Imported> {
    let (shape, images) = read(&import.images, &import.options.out)?;
    let (of_labels, labels) = read(&import.labels, &import.options.out)?;
    let refused = |path: &Path, what: String, hint: &str| {
        Err(Error::input(format!("{}: {what}", path.display())).hint(hint))
    };
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
    let count = labels.len();
    let mut targets = Vec::with_capacity(count);
    labels.blocks(|some| targets.extend(some.iter().copied().map(f64::from)))?;
    let targets = Elements::Memory(targets);
    let places =
        [&import.images, &import.labels, &import.labels].map(|path| path.display().to_string());
    let inputs = Inputs::Bytes(images);
    let weights = Elements::Memory(vec![]);
    let regression = false;
    let classes = vec![];
    let table = None;
    let files = None;
    Rows {
        inputs,
        count,
        shape,
        targets,
        width: 1,
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

/// Returns the shape and the elements of a file. The elements of a compressed file are stored in a
/// temporary file in `out`, or in its closest existing parent directory.
fn read(path: &Path, out: &Path) -> Result<(Vec<usize>, Elements<u8>)> {
    let hint = "give the path of an IDX file, such as t10k-images-idx3-ubyte.gz";
    let mut file = open(path, hint)?;
    let failed = |e| Error::io("read", path, e);
    let stored = file.metadata().map_err(failed)?.len();
    let mut magic = Vec::new();
    (&file).take(2).read_to_end(&mut magic).and_then(|_| file.rewind()).map_err(failed)?;
    let parsed =
        if magic == [0x1f, 0x8b] { unpacked(file, stored, out) } else { plain(file, path, stored) };
    parsed.map_err(|fault| match fault {
        Fault::Content(what) => {
            Error::input(format!("{}: not an IDX file of bytes: {what}", path.display()))
                .hint("download it again; gunzip it first if it is all right")
        }
        Fault::Other(error) => error,
    })
}

/// Returns the shape and the elements of an uncompressed file of `stored` bytes.
fn plain(mut file: File, path: &Path, stored: u64) -> Result<(Vec<usize>, Elements<u8>), Fault> {
    let shape = shape(&mut file)?;
    let start = file.stream_position().map_err(|e| Error::io("read", path, e))?;
    let count = complete(&shape, stored - start)?;
    Ok((shape, Elements::of_file(file, path, start, count)))
}

/// Returns the shape and the elements of a compressed file of `stored` bytes.
fn unpacked(file: File, stored: u64, out: &Path) -> Result<(Vec<usize>, Elements<u8>), Fault> {
    let mut decoder = GzDecoder::new(BufReader::new(file));
    let shape = shape(&mut decoder)?;
    let mut spooler = Spooler::create(out)?;
    let decoded = decompression_limit::decode(decoder, count(&shape)? as u64, stored, |piece| {
        spooler.push(piece)
    })?;
    complete(&shape, decoded)?;
    Ok((shape, spooler.finish()?))
}

/// Returns the number of elements of a shape, or an error if `found` is another number.
fn complete(shape: &[usize], found: u64) -> Result<usize, String> {
    match count(shape)? {
        count if count as u64 == found => Ok(count),
        _ => Err(format!("{found} elements for shape {shape:?}")),
    }
}

/// Reads the shape from the header of a file; the elements follow.
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
    Ok(extents
        .as_chunks::<4>()
        .0
        .iter()
        .map(|extent| u32::from_be_bytes(*extent) as usize)
        .collect())
}

/// Returns the number of elements of a shape.
fn count(shape: &[usize]) -> Result<usize, String> {
    extent(shape).ok_or_else(|| format!("shape {shape:?} is too large for any memory"))
}
