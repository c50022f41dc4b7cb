//! Sizes in bytes, such as `8GiB`.

use std::fmt;
use std::str::FromStr;

use parse_size::parse_size;
use serde::{Deserialize, Serialize};

/// A size in bytes: `8GiB`, `512 MiB`, `1.5GB` or a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "String")]
pub struct Size(pub usize);

/// The forms of the value in a file.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a size such as \"8GiB\"")]
enum Written {
    Text(String),
    Bytes(usize),
}

/// Units that sizes are written in.
const UNITS: [(&str, usize); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

impl TryFrom<Written> for Size {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let text = match written {
            Written::Bytes(bytes) => return Ok(Self(bytes)),
            Written::Text(text) => text,
        };
        text.parse()
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = parse_size(text.trim()).ok().and_then(|bytes| usize::try_from(bytes).ok());
        bytes.map(Self).ok_or_else(|| format!("{text:?} is not a size such as \"8GiB\""))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = UNITS.iter().filter(|(_, bytes)| self.0 > 0 && self.0.is_multiple_of(*bytes));
        let exact = exact.max_by_key(|(_, bytes)| *bytes);
        let (unit, bytes) = exact.copied().unwrap_or(("B", 1));
        write!(f, "{}{unit}", self.0 / bytes)
    }
}

impl From<Size> for String {
    fn from(size: Size) -> String {
        size.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        let read = |text: &str| Size::try_from(Written::Text(text.into())).map(|size| size.0);
        assert_eq!(read("8GiB"), Ok(8 << 30));
        assert_eq!(read(" 1.5 MiB "), Ok(3 << 19));
        assert_eq!((read("2GB"), read("17"), read("17B")), (Ok(2_000_000_000), Ok(17), Ok(17)));
        for wrong in ["", "GiB", "many", "-1GiB", "8 gigs", "nan", "1e30GiB"] {
            assert!(read(wrong).unwrap_err().contains("is not a size such as"), "{wrong}");
        }
        for (bytes, text) in [
            (8 << 30, "8GiB"),
            (3 << 19, "1536KiB"),
            (0, "0B"),
            (2_000_000_000, "2GB"),
            (17, "17B"),
        ] {
            assert_eq!((Size(bytes).to_string().as_str(), read(text)), (text, Ok(bytes)));
        }
    }
}
