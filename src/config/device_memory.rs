//! `device.memory`: the memory that a rank takes of its GPU.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Size;
use super::range::out_of_range;
use hpctrain_base::error::Result;

/// The memory that ranks take of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum DeviceMemory {
    /// Memory is allocated in blocks as they are needed.
    Grow,
    /// This fraction of the memory is allocated at the start, for all ranks that share the GPU.
    Fraction(f64),
    /// This many bytes are allocated at the start, for each rank.
    Bytes(Size),
}

/// The default fraction of a GPU's memory that ranks take, and the largest fraction that growing
/// pools take: the rest is for CUDA itself, NCCL and other programs.
pub const DEFAULT_FRACTION: f64 = 0.9;

/// The forms of the value in a file.
#[derive(Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "\"grow\", a part of the GPU's memory such as 0.9, or a size such as \"40GiB\""
)]
enum Written {
    Whole(u64),
    Fraction(f64),
    Text(String),
}

impl DeviceMemory {
    /// # Errors
    /// Returns an error if a fraction is not more than 0 and at most 1, or a size is 0.
    pub(super) fn check(self) -> Result<()> {
        let is_some = match self {
            DeviceMemory::Grow => true,
            DeviceMemory::Fraction(fraction) => fraction > 0.0 && fraction <= 1.0,
            DeviceMemory::Bytes(bytes) => bytes.0 > 0,
        };
        let wanted = "\"grow\", a part of the GPU's memory that is more than 0 and at most 1, or a size such as \"40GiB\"";
        if is_some { Ok(()) } else { Err(out_of_range("device.memory", self, wanted)) }
    }
}

impl FromStr for DeviceMemory {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let text = text.trim();
        if text == "grow" {
            return Ok(DeviceMemory::Grow);
        }
        if let Ok(bytes @ 2..) = text.parse() {
            return Ok(DeviceMemory::Bytes(Size(bytes)));
        }
        if let Ok(fraction) = text.parse() {
            return Ok(DeviceMemory::Fraction(fraction));
        }
        text.parse().map(DeviceMemory::Bytes).map_err(|_| {
            format!(
                "{text:?} is not \"grow\", a part of the GPU's memory such as 0.9, or a size such as \"40GiB\""
            )
        })
    }
}

impl TryFrom<Written> for DeviceMemory {
    type Error = String;

    fn try_from(written: Written) -> std::result::Result<Self, String> {
        match written {
            // A whole number is a size in bytes, as in other keys; 0 and 1 are fractions.
            Written::Whole(bytes @ 2..) => {
                let bytes =
                    usize::try_from(bytes).map_err(|_| format!("{bytes} bytes are too many"))?;
                Ok(DeviceMemory::Bytes(Size(bytes)))
            }
            Written::Whole(fraction) => Ok(DeviceMemory::Fraction(fraction as f64)),
            Written::Fraction(fraction) => Ok(DeviceMemory::Fraction(fraction)),
            Written::Text(text) => text.parse(),
        }
    }
}

impl From<DeviceMemory> for Written {
    fn from(memory: DeviceMemory) -> Self {
        match memory {
            DeviceMemory::Fraction(fraction) => Written::Fraction(fraction),
            other => Written::Text(other.to_string()),
        }
    }
}

impl fmt::Display for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceMemory::Grow => f.write_str("grow"),
            DeviceMemory::Fraction(fraction) => fraction.fmt(f),
            DeviceMemory::Bytes(bytes) => bytes.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct File {
        memory: DeviceMemory,
    }

    fn read(value: &str) -> std::result::Result<DeviceMemory, String> {
        let file = toml::from_str::<File>(&format!("memory = {value}\n"));
        file.map(|file| file.memory).map_err(|e| e.message().to_owned())
    }

    #[test]
    fn all_forms_are_read_and_written() {
        let sized = |bytes| DeviceMemory::Bytes(Size(bytes));
        for (value, memory, text) in [
            ("\"grow\"", DeviceMemory::Grow, "\"grow\""),
            ("0.9", DeviceMemory::Fraction(0.9), "0.9"),
            ("\"0.25\"", DeviceMemory::Fraction(0.25), "0.25"),
            ("1", DeviceMemory::Fraction(1.0), "1.0"),
            ("\"40GiB\"", sized(40 << 30), "\"40GiB\""),
            ("\" 1.5 GiB \"", sized(3 << 29), "\"1536MiB\""),
            ("67108864", sized(64 << 20), "\"64MiB\""),
        ] {
            assert_eq!(read(value), Ok(memory), "{value}");
            let written = toml::to_string(&File { memory }).unwrap();
            assert_eq!(written, format!("memory = {text}\n"));
            assert_eq!(read(text), Ok(memory), "{text}");
        }
        for value in ["\"grows\"", "\"40 gigs\"", "\"-1GiB\"", "\"\""] {
            assert!(
                read(value)
                    .unwrap_err()
                    .contains("is not \"grow\", a part of the GPU's memory such as 0.9")
            );
        }
        for value in ["true", "[]"] {
            assert!(
                read(value).unwrap_err().contains("a size such as \"40GiB\""),
                "{value}: {:?}",
                read(value)
            );
        }
    }

    #[test]
    fn parts_are_parts() {
        for text in ["grow", "1", "0.001", "1B", "2"] {
            text.parse::<DeviceMemory>().unwrap().check().unwrap();
        }
        for text in ["0", "1.5", "-0.5", "-3", "NaN", "inf", "0B"] {
            let error = text.parse::<DeviceMemory>().unwrap().check().unwrap_err().to_string();
            assert!(
                error.contains("device.memory = ") && error.contains("is out of range\nhint: "),
                "{error}"
            );
        }
    }
}
