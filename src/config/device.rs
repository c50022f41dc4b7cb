//! `run.device`: the device that ranks compute on.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The device that ranks compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// GPUs where there are any, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPUs of the node, distributed among its ranks.
    Cuda,
    /// The GPUs of the node with these numbers, distributed among its ranks.
    CudaAt(Numbers),
    /// A GPU for each rank while there are free ones on its node, the CPU for the others.
    Mixed,
}

/// A set of GPU numbers below 64; at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers(u64);

impl Numbers {
    /// Returns the numbers in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..64).filter(move |number| self.0 >> number & 1 == 1)
    }

    /// Parses numbers separated by commas; none may occur twice.
    fn read(text: &str) -> Option<Self> {
        text.split(',').try_fold(Self(0), |Self(so_far), number| {
            let bit = 1u64.checked_shl(number.parse().ok()?)?;
            (so_far & bit == 0).then_some(Self(so_far | bit))
        })
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda => f.write_str("cuda"),
            Self::CudaAt(numbers) => {
                let numbers: Vec<String> =
                    numbers.iter().map(|number| number.to_string()).collect();
                write!(f, "cuda:{}", numbers.join(","))
            }
            Self::Mixed => f.write_str("mixed"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            "mixed" => Ok(Self::Mixed),
            _ => match text.strip_prefix("cuda:").and_then(Numbers::read) {
                Some(numbers) => Ok(Self::CudaAt(numbers)),
                None => Err(format!(
                    "`{text}` is not a device: use auto, cpu, cuda, cuda:0,2 for some of several, or mixed"
                )),
            },
        }
    }
}

impl Serialize for DeviceChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DeviceChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_and_written() {
        for text in ["auto", "cpu", "cuda", "cuda:3", "cuda:0,2,63"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        for text in
            ["gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:64", "cuda:1,1", "cuda:1,", "cuda:0 1"]
        {
            assert!(text.parse::<DeviceChoice>().unwrap_err().contains("is not a device"));
        }
    }
}
