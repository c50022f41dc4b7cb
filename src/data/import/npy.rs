//! Arrays in NumPy's NPY format, and archives of them.
//!
//! `\x93NUMPY`, two bytes of version, the length of the header (u16 in version 1, u32 later, little-endian); the header, a
//! Python dictionary with the keys `descr`, `fortran_order` and `shape`; the elements. An NPZ archive is a ZIP file of such
//! files, stored or deflated.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use half::f16;
use zip::ZipArchive;
use zip::result::ZipError;

use super::content;
use crate::data::bounded::{self, extent};
use crate::error::{Error, Result};

const MAGIC: &[u8] = b"\x93NUMPY";

/// An array of numbers in memory.
#[derive(Debug, PartialEq)]
pub(super) struct Array {
    pub shape: Vec<usize>,
    kind: Kind,
    /// Elements as the file has them, the last axis varying fastest.
    bytes: Vec<u8>,
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
    /// Parses NumPy's name for it, such as `<f4`.
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

    /// The value of an element's bytes.
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
    /// The array of a file.
    ///
    /// # Errors
    /// The file is missing or malformed, or its elements are no numbers.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = content(path, "give the path of an array as numpy.save writes it")?;
        Self::parse(bytes).map_err(|what| malformed(path.display().to_string(), &what))
    }

    /// Parses the content of a file; the error names the fault.
    fn parse(mut bytes: Vec<u8>) -> Result<Self, String> {
        let Some(rest) = bytes.strip_prefix(MAGIC) else {
            return Err(format!("it begins with {:02x?}", &bytes[..bytes.len().min(MAGIC.len())]));
        };
        let (header_len, rest) = match rest {
            [1, _, a, b, rest @ ..] => (usize::from(u16::from_le_bytes([*a, *b])), rest),
            [2 | 3, _, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, rest),
            [major, ..] if *major > 3 => return Err(format!("version {major} of the format")),
            _ => return Err(format!("it ends after {} bytes", bytes.len())),
        };
        let Some((header, elements)) = rest.split_at_checked(header_len) else {
            return Err(format!("a header of {header_len} bytes in {}", rest.len()));
        };
        let header = String::from_utf8_lossy(header).into_owned();
        let lacks = |key: &str| format!("its header has no {key}: {}", header.trim());
        let descr = value(&header, "descr").ok_or_else(|| lacks("descr"))?;
        let name = descr.strip_prefix(['\'', '"']).and_then(|text| text.split(['\'', '"']).next());
        let kind = name.and_then(Kind::parse).ok_or_else(|| {
            let end = descr.find(']').map_or_else(|| descr.find(',').unwrap_or(descr.len()), |at| at + 1);
            format!("elements of type {}, which is none of f2 to f8, i1 to i8, u1 to u8, b1", &descr[..end])
        })?;
        let order = value(&header, "fortran_order").ok_or_else(|| lacks("fortran_order"))?;
        let extents = value(&header, "shape").and_then(|text| text.strip_prefix('(')?.split(')').next());
        let shape: Option<Vec<usize>> = extents.and_then(|extents| {
            let extents = extents.split(',').map(str::trim).filter(|extent| !extent.is_empty());
            extents.map(|extent| extent.parse().ok()).collect()
        });
        let shape = shape.ok_or_else(|| lacks("shape"))?;
        let expected = extent(&shape).map(|elements| elements * kind.width);
        if expected != Some(elements.len()) {
            return Err(format!(
                "{} bytes of elements for shape {shape:?} of {} bytes each",
                elements.len(),
                kind.width
            ));
        }
        let elements_at = bytes.len() - elements.len();
        bytes.drain(..elements_at);
        if order.starts_with("True") {
            bytes = last_axis_fastest(&bytes, &shape, kind.width);
        }
        Ok(Self { shape, kind, bytes })
    }

    /// All elements, the last axis varying fastest. Integers beyond 2⁵³ are rounded.
    pub fn numbers(&self) -> impl Iterator<Item = f64> {
        self.bytes.chunks_exact(self.kind.width).map(|element| self.kind.number(element))
    }

    /// The elements themselves if they are unsigned bytes, else the array.
    pub fn into_bytes(self) -> Result<Vec<u8>, Self> {
        if self.kind.class == Class::Unsigned && self.kind.width == 1 { Ok(self.bytes) } else { Err(self) }
    }
}

/// Opens an archive of arrays.
///
/// # Errors
/// The file is missing, or no ZIP archive.
pub(super) fn open_archive(path: &Path) -> Result<ZipArchive<BufReader<File>>> {
    let file = File::open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::input(format!("{} does not exist", path.display()))
            .hint("give the path of an archive as numpy.savez writes it"),
        _ => Error::io("read", path, e),
    })?;
    ZipArchive::new(BufReader::new(file)).map_err(|e| {
        Error::input(format!("{}: not an NPZ archive: {e}", path.display())).hint("save it again with numpy.savez")
    })
}

/// The array `name` of the archive at `path`.
///
/// # Errors
/// It is missing or malformed, or its elements are no numbers.
pub(super) fn read_member(archive: &mut ZipArchive<BufReader<File>>, path: &Path, name: &str) -> Result<Array> {
    let place = format!("{}: {name}", path.display());
    let mut names: Vec<String> =
        archive.file_names().filter_map(|file| Some(file.ok()?.strip_suffix(".npy")?.to_owned())).collect();
    names.sort();
    // The archive says how many bytes are compressed, too: not more than there are.
    let length = std::fs::metadata(path).map_err(|e| Error::io("read", path, e))?.len();
    match archive.by_name(&format!("{name}.npy")) {
        Ok(member) => {
            let (declared, stored) = (member.size(), member.compressed_size().min(length));
            let parsed = bounded::read(member, declared, stored).and_then(Array::parse);
            parsed.map_err(|what| malformed(place, &what))
        }
        Err(ZipError::FileNotFound) => Err(Error::input(format!("{}: holds no array {name:?}", path.display()))
            .hint(format!("it holds {}; name two of them with --features and --labels", names.join(", ")))),
        Err(e) => Err(malformed(place, &e.to_string())),
    }
}

fn malformed(place: String, what: &str) -> Error {
    Error::input(format!("{place}: not a NumPy array of numbers: {what}"))
        .hint("save it again with numpy.save or numpy.savez, as an array of floats or integers")
}

/// The rest of the header after a key.
fn value<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let quoted = [format!("'{key}'"), format!("\"{key}\"")];
    let after = quoted.iter().find_map(|key| header.split_once(&key[..])).map(|(_, after)| after)?;
    Some(after.trim_start().strip_prefix(':')?.trim_start())
}

/// Elements of `width` bytes whose first axis varies fastest, the other way round.
fn last_axis_fastest(bytes: &[u8], shape: &[usize], width: usize) -> Vec<u8> {
    let mut strides = Vec::with_capacity(shape.len());
    let mut stride = width;
    for extent in shape {
        strides.push(stride);
        stride *= extent;
    }
    let (mut index, mut from) = (vec![0; shape.len()], 0);
    let mut out = Vec::with_capacity(bytes.len());
    while out.len() < bytes.len() {
        out.extend_from_slice(&bytes[from..from + width]);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            from += strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            from -= strides[axis] * shape[axis];
            index[axis] = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn npy(header: &str, elements: &[u8]) -> Vec<u8> {
        let length = (header.len() as u16).to_le_bytes();
        [MAGIC, &[1, 0], &length, header.as_bytes(), elements].concat()
    }

    #[test]
    fn every_type_in_both_byte_orders() {
        let header = |descr: &str| format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (1,), }}\n");
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
            let array = Array::parse(npy(&header(descr), element)).unwrap();
            assert_eq!(array.numbers().collect::<Vec<_>>(), [wanted], "{descr}");
        }
    }

    #[test]
    fn columns_become_rows() {
        // Element (i, j, k) is 100 i + 10 j + k.
        let [a, b, c] = [2usize, 3, 4];
        let in_order = |fortran: bool| {
            let all = if fortran {
                (0..a * b * c).map(|n| [n % a, n / a % b, n / a / b]).collect::<Vec<_>>()
            } else {
                (0..a * b * c).map(|n| [n / c / b, n / c % b, n % c]).collect()
            };
            all.iter().map(|[i, j, k]| (100 * i + 10 * j + k) as u8).collect::<Vec<u8>>()
        };
        let header = "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3, 4), }";
        let array = Array::parse(npy(header, &in_order(true))).unwrap();
        assert_eq!(array.into_bytes().unwrap(), in_order(false));
    }

    #[test]
    fn what_is_no_array_is_told() {
        let good = "{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }";
        let cases = [
            (b"PK\x03\x04".to_vec(), "it begins with [50, 4b, 03, 04]"),
            (MAGIC.to_vec(), "it ends after 6 bytes"),
            ([MAGIC, &[9, 0, 0, 0]].concat(), "version 9"),
            ([MAGIC, &[1, 0, 200, 0]].concat(), "a header of 200 bytes in 0"),
            (npy(good, &[0; 7]), "7 bytes of elements for shape [2] of 4 bytes each"),
            (npy(&good.replace("<i4", "<c8"), &[0; 16]), "elements of type '<c8'"),
            (npy(&good.replace("'<i4'", "[('a', '<i4')]"), &[0; 8]), "elements of type [('a', '<i4')]"),
            (npy(&good.replace("shape", "form"), &[0; 8]), "no shape"),
            (npy(&good.replace("(2,)", "(-2,)"), &[0; 8]), "no shape"),
            (npy(&good.replace("(2,)", "(9999999999, 9999999999)"), &[0; 8]), "shape [9999999999, 9999999999]"),
        ];
        for (bytes, wanted) in cases {
            let error = Array::parse(bytes).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
