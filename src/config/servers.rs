//! Values of keys of `[parameter_server]`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Size;

/// The size of the ranges into which units are cut: `parameter_server.partition`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Partition {
    /// Each unit has this many ranges.
    Fixed(usize),
    /// Each unit has one range per server, but none with fewer bytes than this.
    Min(Size),
    /// Each unit has as few ranges as possible, none with more bytes than this.
    Max(Size),
}

impl TryFrom<String> for Partition {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Partition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text).ok_or_else(|| {
            format!(
                "{text:?} is not a partition such as \"fixed:2\", \"min:256KiB\" or \"max:64MiB\""
            )
        })
    }
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(count) => write!(f, "fixed:{count}"),
            Self::Min(size) => write!(f, "min:{size}"),
            Self::Max(size) => write!(f, "max:{size}"),
        }
    }
}

impl From<Partition> for String {
    fn from(partition: Partition) -> Self {
        partition.to_string()
    }
}

impl Partition {
    /// Returns the partition that a text describes, if any.
    fn parse(text: &str) -> Option<Self> {
        let (kind, number) = text.split_once(':')?;
        let size = || number.parse().ok().filter(|size: &Size| size.0 > 0);
        match kind {
            "fixed" => number.parse().ok().filter(|count| *count > 0).map(Self::Fixed),
            "min" => size().map(Self::Min),
            "max" => size().map(Self::Max),
            _ => None,
        }
    }

    /// Returns the number of ranges of a unit of `bytes` bytes, on `servers` servers.
    pub fn count(self, bytes: usize, servers: usize) -> usize {
        match self {
            Self::Fixed(count) => count,
            Self::Min(size) => (bytes / size.0).clamp(1, servers),
            Self::Max(size) => bytes.div_ceil(size.0),
        }
    }
}

/// Steps that a worker may be ahead of the slowest: `parameter_server.staleness`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WrittenBound", into = "WrittenBound")]
pub enum Staleness {
    /// A number of steps; with 0 all workers take each step together.
    Bound(u64),
    /// No limit applies.
    None,
}

/// The forms of the value in a file.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "a number of steps, or \"none\"")]
enum WrittenBound {
    Text(String),
    Steps(u64),
}

impl TryFrom<WrittenBound> for Staleness {
    type Error = String;

    fn try_from(written: WrittenBound) -> Result<Self, String> {
        match written {
            WrittenBound::Steps(steps) => Ok(Self::Bound(steps)),
            WrittenBound::Text(text) if text == "none" => Ok(Self::None),
            WrittenBound::Text(text) => {
                Err(format!("{text:?} is neither a number of steps nor \"none\""))
            }
        }
    }
}

impl From<Staleness> for WrittenBound {
    fn from(staleness: Staleness) -> Self {
        match staleness {
            Staleness::Bound(steps) => Self::Steps(steps),
            Staleness::None => Self::Text("none".into()),
        }
    }
}

impl fmt::Display for Staleness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bound(steps) => write!(f, "{steps}"),
            Self::None => f.write_str("none"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_read_and_written() {
        for text in ["fixed:3", "min:256KiB", "max:1GiB"] {
            assert_eq!(text.parse::<Partition>().unwrap().to_string(), text);
        }
        for wrong in ["", "fixed", "fixed:0", "fixed:x", "min:0", "max:-1", "most:3"] {
            assert!(
                wrong.parse::<Partition>().unwrap_err().contains("is not a partition such as"),
                "{wrong}"
            );
        }
    }
}
