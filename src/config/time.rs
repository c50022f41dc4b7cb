//! Spans of time, such as `3h 50m`.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A span of time: `90m`, `3h 50m`, `1day`, or a number of seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "String")]
pub struct Time(pub Duration);

/// The forms of the value in a file.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a time such as \"3h 50m\"")]
enum Written {
    Text(String),
    Seconds(u64),
}

impl TryFrom<Written> for Time {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Seconds(seconds) => Ok(Self(Duration::from_secs(seconds))),
            Written::Text(text) => text.parse(),
        }
    }
}

impl std::str::FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let span = humantime::parse_duration(text.trim())
            .ok()
            .or_else(|| text.trim().parse().ok().map(Duration::from_secs));
        span.map(Self).ok_or_else(|| format!("{text:?} is not a time such as \"3h 50m\""))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl From<Time> for String {
    fn from(time: Time) -> String {
        time.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_written() {
        let read =
            |text: &str| Time::try_from(Written::Text(text.into())).map(|time| time.0.as_secs());
        assert_eq!(
            (read("3h 50m"), read(" 90m "), read("17"), read("0s")),
            (Ok(13_800), Ok(5400), Ok(17), Ok(0))
        );
        for wrong in ["", "soon", "-1s", "3 fortnights", "nan"] {
            assert!(read(wrong).unwrap_err().contains("is not a time such as"), "{wrong}");
        }
        for seconds in [0, 1, 59, 3600, 100_000] {
            assert_eq!(read(&Time(Duration::from_secs(seconds)).to_string()), Ok(seconds));
        }
    }
}
