//! Arrays in NumPy's NPY format, and archives of them.
//!
//! `\x93NUMPY`, two bytes of version, the length of the header (u16 in version 1, u32 later,
//! little-endian); the header, a Python dictionary with the keys `descr`, `fortran_order` and
//! `shape`; the elements. An NPZ archive is a ZIP file of such files, stored or deflated. The crate
//! `zip` is built without encryption and without compressions that NumPy does not write.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufReader, Read, Seek as _};
use std::ops::Range;
use std::path::Path;

use bytemuck::Pod;
use half::f16;
use zip::ZipArchive;
use zip::result::{ZipError, ZipResult};

use super::open;
use super::spool::{Elements, Spooler};
use crate::decompression_limit::{self, Fault, extent};
use hpctrain_base::error::{Error, Result};

const MAGIC: &[u8] = b"\x93NUMPY";

/// The most bytes of a header. NumPy itself accepts at most 10,000 characters.
const HEADER: usize = 1 << 20;

/// The most bytes of rows that are reordered at once.
const ROWS: usize = 16 << 20;

/// An array of numbers in a file.
pub(super) struct Array {
    pub shape: Vec<usize>,
    kind: Kind,
    /// The first axis varies fastest, not the last one.
    columns_first: bool,
    /// The elements in the order of the file.
    bytes: Elements<u8>,
}

/// The type of an array's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    class: Class,
    /// Bytes of an element.
    width: usize,
    big_endian: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Float,
    Signed,
    /// Booleans too.
    Unsigned,
}

impl Kind {
    /// Parses NumPy's name of a type, such as `<f4`.
    fn parse(name: &str) -> Option<Self> {
        let (order, rest) = name.split_at_checked(1)?;
        let (class, width) = rest.split_at_checked(1)?;
        let width: usize = width.parse().ok()?;
        let (class, widths): (_, &[usize]) = match class {
            "f" => (Class::Float, &[2, 4, 8]),
            "i" => (Class::Signed, &[1, 2, 4, 8]),
            "u" => (Class::Unsigned, &[1, 2, 4, 8]),
            "b" => (Class::Unsigned, &[1]),
            _ => return None,
        };
        let big_endian = match order {
            "<" | "|" => false,
            ">" => true,
            _ => return None,
        };
        widths.contains(&width).then_some(Self { class, width, big_endian })
    }

    /// Returns the value of an element, given its bytes.
    fn number(self, bytes: &[u8]) -> f64 {
        let mut word = [0; 8];
        word[..self.width].copy_from_slice(bytes);
        if self.big_endian {
            word[..self.width].reverse();
        }
        let word = u64::from_le_bytes(word);
        match (self.class, self.width) {
            (Class::Float, 2) => f16::from_bits(word as u16).to_f64(),
            (Class::Float, 4) => f64::from(f32::from_bits(word as u32)),
            (Class::Float, _) => f64::from_bits(word),
            (Class::Signed, 1) => f64::from(word as u8 as i8),
            (Class::Signed, 2) => f64::from(word as u16 as i16),
            (Class::Signed, 4) => f64::from(word as u32 as i32),
            (Class::Signed, _) => word as i64 as f64,
            (Class::Unsigned, _) => word as f64,
        }
    }
}

impl Array {
    /// Opens the array of a file.
    ///
    /// # Errors
    /// Returns an error if the file is missing or malformed, or if its elements are not numbers.
    pub fn open(path: &Path) -> Result<Self> {
        let file = open(path, "give the path of an array as numpy.save writes it")?;
        Self::from_file(file, path).map_err(|fault| malformed(path.display().to_string(), fault))
    }

    fn from_file(mut file: File, path: &Path) -> Result<Self, Fault> {
        let failed = |e| Error::io("read", path, e);
        let header = Header::read(&mut file)?;
        let start = file.stream_position().map_err(failed)?;
        let len = header.complete(file.metadata().map_err(failed)?.len() - start)?;
        Ok(header.with(Elements::of_file(file, path, start, len)))
    }

    /// Converts all elements with `convert`, in order, the last axis varying fastest. The result is
    /// in a temporary file in the directory of `out`. Integers beyond 2⁵³ are rounded.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or written.
    pub fn numbers<T: Pod>(&self, out: &Path, convert: impl Fn(f64) -> T) -> Result<Elements<T>> {
        let mut numbers = Vec::new();
        self.spooled(out, |bytes, to| {
            numbers.clear();
            numbers.extend(
                bytes
                    .chunks_exact(self.kind.width)
                    .map(|element| convert(self.kind.number(element))),
            );
            to.push(&numbers)
        })
    }

    /// Returns whether the elements are unsigned bytes.
    pub fn is_u8(&self) -> bool {
        self.kind.class == Class::Unsigned && self.kind.width == 1
    }

    /// Returns the bytes of all elements in order.
    ///
    /// # Errors
    /// Returns an error under the conditions of [`Self::numbers`].
    pub fn into_bytes(self, out: &Path) -> Result<Elements<u8>> {
        if self.columns_first {
            self.spooled(out, |bytes, to| to.push(bytes))
        } else {
            Ok(self.bytes)
        }
    }

    /// Passes the bytes of all elements in order to `push`, which writes to a temporary file.
    fn spooled<T: Pod>(
        &self,
        out: &Path,
        mut push: impl FnMut(&[u8], &mut Spooler<T>) -> Result<()>,
    ) -> Result<Elements<T>> {
        let mut spooler = Spooler::create(out)?;
        let row = self.shape.iter().skip(1).product::<usize>() * self.kind.width;
        let rows = self.shape.first().copied().unwrap_or(1);
        // Rows without elements are not read.
        if let Some(at_once) = ROWS.checked_div(row) {
            for first in (0..rows).step_by(at_once.max(1)) {
                push(&self.rows(first..rows.min(first + at_once.max(1)))?, &mut spooler)?;
            }
        }
        spooler.finish()
    }

    /// Returns the bytes of some rows, elements in order.
    fn rows(&self, rows: Range<usize>) -> Result<Vec<u8>> {
        let (width, [all, axes @ ..]) = (self.kind.width, &self.shape[..]) else {
            return self.bytes.get(0, self.bytes.len());
        };
        let columns = axes.iter().product::<usize>();
        if !self.columns_first {
            return self.bytes.get(rows.start * columns * width, rows.len() * columns * width);
        }
        let mut ordered = vec![0; rows.len() * columns * width];
        let mut run = vec![0; rows.len() * width];
        let mut index = vec![0; axes.len()];
        for column in 0..columns {
            // The elements of one place in these rows lie side by side.
            let place = index
                .iter()
                .zip(axes)
                .rev()
                .fold(0, |place, (index, extent)| place * extent + index);
            self.bytes.read((place * all + rows.start) * width, &mut run)?;
            for (row, element) in run.chunks_exact(width).enumerate() {
                ordered[(row * columns + column) * width..][..width].copy_from_slice(element);
            }
            for (index, extent) in index.iter_mut().zip(axes).rev() {
                *index += 1;
                if *index < *extent {
                    break;
                }
                *index = 0;
            }
        }
        Ok(ordered)
    }
}

/// The part of a file before the elements.
struct Header {
    shape: Vec<usize>,
    kind: Kind,
    columns_first: bool,
}

impl Header {
    /// Reads the header, after which the elements follow. The error describes the fault.
    fn read(from: &mut impl Read) -> Result<Self, String> {
        let magic = read_up_to(from, MAGIC.len())?;
        if magic != MAGIC {
            return Err(format!("it begins with {magic:02x?}"));
        }
        let ends = |count: usize| Err(format!("it ends after {count} bytes"));
        let version = read_up_to(from, 2)?;
        let length = match version[..] {
            [1, _] => 2,
            [2 | 3, _] => 4,
            [major, _] => return Err(format!("version {major} of the format")),
            _ => return ends(magic.len() + version.len()),
        };
        let mut word = read_up_to(from, length)?;
        if word.len() < length {
            return ends(magic.len() + version.len() + word.len());
        }
        word.resize(4, 0);
        let length = word.iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte));
        let header = read_up_to(from, length.min(HEADER))?;
        if header.len() < length {
            return Err(format!("a header of {length} bytes in {}", header.len()));
        }
        let header = String::from_utf8_lossy(&header).into_owned();
        let lacks = |key: &str| format!("its header has no {key}: {}", header.trim());
        let descr = value(&header, "descr").ok_or_else(|| lacks("descr"))?;
        let name = descr.strip_prefix(['\'', '"']).and_then(|text| text.split(['\'', '"']).next());
        let kind = name.and_then(Kind::parse).ok_or_else(|| {
            let end =
                descr.find(']').map_or_else(|| descr.find(',').unwrap_or(descr.len()), |at| at + 1);
            format!(
                "elements of type {}, not one of f2 to f8, i1 to i8, u1 to u8, b1",
                &descr[..end]
            )
        })?;
        let order = value(&header, "fortran_order").ok_or_else(|| lacks("fortran_order"))?;
        let extents =
            value(&header, "shape").and_then(|text| text.strip_prefix('(')?.split(')').next());
        let shape: Option<Vec<usize>> = extents.and_then(|extents| {
            let extents = extents.split(',').map(str::trim).filter(|extent| !extent.is_empty());
            extents.map(|extent| extent.parse().ok()).collect()
        });
        let shape = shape.ok_or_else(|| lacks("shape"))?;
        Ok(Self { shape, kind, columns_first: order.starts_with("True") })
    }

    /// Returns the number of bytes of all elements, if the file has that many.
    fn complete(&self, found: u64) -> Result<usize, String> {
        match extent(&self.shape).map(|elements| elements * self.kind.width) {
            Some(bytes) if bytes as u64 == found => Ok(bytes),
            _ => {
                let shape = &self.shape;
                let width = self.kind.width;
                Err(format!("{found} bytes of elements for shape {shape:?} of {width} bytes each"))
            }
        }
    }

    fn with(self, bytes: Elements<u8>) -> Array {
        let Self { shape, kind, columns_first } = self;
        Array { shape, kind, columns_first, bytes }
    }
}

/// Returns the next bytes: `most` of them, or fewer at the end.
fn read_up_to(from: &mut impl Read, most: usize) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    from.take(most as u64).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    Ok(bytes)
}

/// Opens an archive of arrays.
///
/// # Errors
/// Returns an error if the file is missing or is not a ZIP archive.
pub(super) fn open_archive(path: &Path) -> Result<ZipArchive<BufReader<File>>> {
    let file = open(path, "give the path of an archive as numpy.savez writes it")?;
    ZipArchive::new(BufReader::new(file)).map_err(|e| {
        Error::input(format!("{}: not an NPZ archive: {e}", path.display()))
            .hint("save it again with numpy.savez")
    })
}

/// Reads the array `name` of the archive at `path`. Its elements are in a temporary file in the
/// directory of `out`.
///
/// # Errors
/// Returns an error if the array is missing or malformed, if its elements are not numbers, or if
/// the temporary file cannot be written.
pub(super) fn read_member(
    archive: &mut ZipArchive<BufReader<File>>,
    path: &Path,
    name: &str,
    out: &Path,
) -> Result<Array> {
    let named = |file: ZipResult<Cow<'_, str>>| match file {
        Ok(file) => file.strip_suffix(".npy").map(str::to_owned),
        Err(e) => Some(format!("an entry whose name cannot be read ({e})")),
    };
    let mut names: Vec<String> = archive.file_names().filter_map(named).collect();
    names.sort();
    // The archive says how many bytes are compressed, too: not more than there are.
    let length = std::fs::metadata(path).map_err(|e| Error::io("read", path, e))?.len();
    let unpacked = match archive.by_name(&format!("{name}.npy")) {
        Ok(member) => {
            let declared = member.size();
            let stored = member.compressed_size().min(length);
            unpacked(member, declared, stored, out)
        }
        Err(ZipError::FileNotFound) => {
            return Err(Error::input(format!("{}: holds no array {name:?}", path.display())).hint(
                format!(
                    "it holds {}; name two of them with --features and --labels",
                    names.join(", ")
                ),
            ));
        }
        Err(e) => Err(Fault::Content(e.to_string())),
    };
    unpacked.map_err(|fault| malformed(format!("{}: {name}", path.display()), fault))
}

fn unpacked(mut member: impl Read, declared: u64, stored: u64, out: &Path) -> Result<Array, Fault> {
    decompression_limit::check(declared, stored)?;
    let header = Header::read(&mut member)?;
    let mut spooler = Spooler::create(out)?;
    let decoded =
        decompression_limit::decode(member, declared, stored, |piece| spooler.push(piece))?;
    header.complete(decoded)?;
    Ok(header.with(spooler.finish()?))
}

fn malformed(place: String, fault: Fault) -> Error {
    match fault {
        Fault::Content(what) => Error::input(format!(
            "{place}: not a NumPy array of numbers: {what}"
        ))
        .hint("save it again with numpy.save or numpy.savez, as an array of floats or integers"),
        Fault::Other(error) => error,
    }
}

/// Returns the rest of the header after a key.
fn value<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let quoted = [format!("'{key}'"), format!("\"{key}\"")];
    let after =
        quoted.iter().find_map(|key| header.split_once(&key[..])).map(|(_, after)| after)?;
    Some(after.trim_start().strip_prefix(':')?.trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn npy(header: &str, elements: &[u8]) -> Vec<u8> {
        let length = (header.len() as u16).to_le_bytes();
        [MAGIC, &[1, 0], &length, header.as_bytes(), elements].concat()
    }

    /// The array of a file with this content.
    fn array(content: Vec<u8>) -> Result<Array> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.npy");
        std::fs::write(&path, content).unwrap();
        Array::open(&path)
    }

    fn all<T: Pod>(elements: Result<Elements<T>>) -> Vec<T> {
        let elements = elements.unwrap();
        elements.get(0, elements.len()).unwrap()
    }

    #[test]
    fn every_type_in_both_byte_orders() {
        for (descr, element, wanted) in [
            ("<f8", &(-1.5f64).to_le_bytes()[..], -1.5),
            (">f8", &(-1.5f64).to_be_bytes(), -1.5),
            (">f4", &2.5f32.to_be_bytes(), 2.5),
            ("<f2", &[0, 0x3c], 1.0),
            ("|i1", &[0xff], -1.0),
            ("<i2", &[0xfe, 0xff], -2.0),
            (">i4", &[0xff, 0xff, 0xff, 0xfd], -3.0),
            ("<i8", &(-4i64).to_le_bytes(), -4.0),
            (">u2", &[1, 0], 256.0),
            ("<u4", &[0, 0, 0, 0x80], 2_147_483_648.0),
            ("<u8", &[5, 0, 0, 0, 0, 0, 0, 0], 5.0),
            ("|b1", &[1], 1.0),
        ] {
            let header =
                format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (1,), }}\n");
            let array = array(npy(&header, element)).unwrap();
            assert_eq!(all(array.numbers(&std::env::temp_dir(), |x| x)), [wanted], "{descr}");
        }
    }

    /// Returns the elements of an array of shape (2, 3, 4) in an order; element (i, j, k) is
    /// 100 i + 10 j + k.
    fn in_order(fortran: bool) -> Vec<u8> {
        let [a, b, c] = [2usize, 3, 4];
        let all = if fortran {
            (0..a * b * c).map(|n| [n % a, n / a % b, n / a / b]).collect::<Vec<_>>()
        } else {
            (0..a * b * c).map(|n| [n / c / b, n / c % b, n % c]).collect()
        };
        all.iter().map(|[i, j, k]| (100 * i + 10 * j + k) as u8).collect()
    }

    #[test]
    fn columns_become_rows() {
        let header = "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3, 4), }";
        let array = array(npy(header, &in_order(true))).unwrap();
        assert_eq!(array.rows(1..2).unwrap(), in_order(false)[12..]);
        assert_eq!(all(array.into_bytes(&std::env::temp_dir())), in_order(false));
    }

    #[test]
    fn malformed_arrays_are_refused() {
        let good = "{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }";
        let cases = [
            (b"PK\x03\x04".to_vec(), "it begins with [50, 4b, 03, 04]"),
            (MAGIC.to_vec(), "it ends after 6 bytes"),
            ([MAGIC, &[9, 0, 0, 0]].concat(), "version 9"),
            ([MAGIC, &[1, 0, 200, 0]].concat(), "a header of 200 bytes in 0"),
            (npy(good, &[0; 7]), "7 bytes of elements for shape [2] of 4 bytes each"),
            (npy(&good.replace("<i4", "<c8"), &[0; 16]), "elements of type '<c8'"),
            (
                npy(&good.replace("'<i4'", "[('a', '<i4')]"), &[0; 8]),
                "elements of type [('a', '<i4')]",
            ),
            (npy(&good.replace("shape", "form"), &[0; 8]), "no shape"),
            (npy(&good.replace("(2,)", "(-2,)"), &[0; 8]), "no shape"),
            (
                npy(&good.replace("(2,)", "(9999999999, 9999999999)"), &[0; 8]),
                "shape [9999999999, 9999999999]",
            ),
        ];
        for (bytes, wanted) in cases {
            let error = array(bytes).err().unwrap().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
