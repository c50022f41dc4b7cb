//! The interval between averages, in steps or epochs.

use serde::{Deserialize, Serialize};

/// An interval: a number of steps, or `epoch`, a pass over the training data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum Interval {
    /// A number of steps; 0 means never.
    Steps(u64),
    /// The number of steps in which every training sample is seen, rounded up.
    Epoch,
}

/// The forms of the value in a file.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "a number of steps, or \"epoch\"")]
enum Written {
    Text(String),
    Steps(u64),
}

impl TryFrom<Written> for Interval {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Steps(steps) => Ok(Self::Steps(steps)),
            Written::Text(text) if text == "epoch" => Ok(Self::Epoch),
            Written::Text(text) => {
                Err(format!("{text:?} is neither a number of steps nor \"epoch\""))
            }
        }
    }
}

impl From<Interval> for Written {
    fn from(every: Interval) -> Self {
        match every {
            Interval::Steps(steps) => Self::Steps(steps),
            Interval::Epoch => Self::Text("epoch".into()),
        }
    }
}

impl Interval {
    /// Converts the interval to steps, for data with `samples` samples and steps of `batch`.
    #[must_use]
    pub fn over(self, samples: u64, batch: u64) -> Self {
        match self {
            Self::Steps(steps) => Self::Steps(steps),
            Self::Epoch => Self::Steps(samples.div_ceil(batch.max(1))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_all_samples() {
        assert_eq!(Interval::Epoch.over(100, 16), Interval::Steps(7));
        assert_eq!(Interval::Epoch.over(96, 16), Interval::Steps(6));
        assert_eq!(Interval::Steps(3).over(96, 16), Interval::Steps(3));
    }
}
