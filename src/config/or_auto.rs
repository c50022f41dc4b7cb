//! A number that may be left to the program.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A number, or `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum OrAuto {
    /// The program chooses the number from measurements.
    Auto,
    /// This number.
    Number(u64),
}

/// The forms of the value in a file.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, or \"auto\"")]
enum Written {
    Text(String),
    Number(u64),
    Negative(i64),
}

impl TryFrom<Written> for OrAuto {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Number(number) => Ok(Self::Number(number)),
            Written::Text(text) if text == "auto" => Ok(Self::Auto),
            Written::Negative(number) => {
                Err(format!("{number} is neither a number from 0 on nor \"auto\""))
            }
            Written::Text(text) => Err(format!("{text:?} is neither a number nor \"auto\"")),
        }
    }
}

impl From<OrAuto> for Written {
    fn from(value: OrAuto) -> Self {
        match value {
            OrAuto::Number(number) => Self::Number(number),
            OrAuto::Auto => Self::Text("auto".into()),
        }
    }
}

impl OrAuto {
    /// Returns the number, if one is given.
    pub fn number(self) -> Option<u64> {
        match self {
            Self::Auto => None,
            Self::Number(number) => Some(number),
        }
    }
}

impl fmt::Display for OrAuto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Number(number) => number.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Sources, load, overlay};

    fn loaded(setting: &str) -> hpctrain_base::error::Result<Config> {
        let overrides = [setting.to_owned()];
        load(&Sources { overrides: &overrides, ..Sources::default() }).map(|(config, _)| config)
    }

    #[test]
    fn numbers_and_auto_are_read_and_written() {
        for (setting, timeout, every) in [
            ("comm.timeout=5", OrAuto::Number(5), OrAuto::Number(500)),
            ("comm.timeout=auto", OrAuto::Auto, OrAuto::Number(500)),
            ("checkpoint.every=auto", OrAuto::Auto, OrAuto::Auto),
        ] {
            let config = loaded(setting).unwrap();
            assert_eq!((config.comm.timeout, config.checkpoint.every), (timeout, every));
            let back = overlay(&config, &[]).unwrap();
            assert_eq!((back.comm.timeout, back.checkpoint.every), (timeout, every), "{setting}");
        }
        for setting in ["comm.timeout=soon", "checkpoint.every=often", "checkpoint.every=-1"] {
            let error = loaded(setting).unwrap_err().to_string();
            assert!(error.contains(setting) && error.contains("\"auto\""), "{error}");
        }
    }

    #[test]
    fn auto_counts_as_given_beside_epochs() {
        let error = overlay(
            &Config::default(),
            &["checkpoint.every=auto".into(), "checkpoint.every_epochs=1".into()],
        );
        let error = error.unwrap_err().to_string();
        assert!(error.contains("checkpoint.every and checkpoint.every_epochs are both"), "{error}");
        let config = loaded("checkpoint.every_epochs=1").unwrap();
        assert_eq!(config.checkpoint.every, OrAuto::Number(0));
        let back = overlay(&config, &["checkpoint.every=auto".into()]).unwrap();
        assert_eq!((back.checkpoint.every, back.checkpoint.every_epochs), (OrAuto::Auto, 0));
    }
}
