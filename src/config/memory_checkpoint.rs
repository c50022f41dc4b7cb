//! Values and checks of `[memory_checkpoint]`.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::range::out_of_range;
use super::{Config, MemoryCheckpoint};
use hpctrain_base::error::{Error, Result};

/// The steps between in-memory checkpoints: `memory_checkpoint.every`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum CopyInterval {
    /// A number of steps; 0 means never.
    Steps(u64),
    /// The smallest number of steps for which the copies take at most 1 % of the time.
    Auto,
}

/// The forms of the value in a file.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "a number of steps, or \"auto\"")]
enum Written {
    Text(String),
    Steps(u64),
}

impl TryFrom<Written> for CopyInterval {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Steps(steps) => Ok(Self::Steps(steps)),
            Written::Text(text) if text == "auto" => Ok(Self::Auto),
            Written::Text(text) => {
                Err(format!("{text:?} is neither a number of steps nor \"auto\""))
            }
        }
    }
}

impl From<CopyInterval> for Written {
    fn from(every: CopyInterval) -> Self {
        match every {
            CopyInterval::Steps(steps) => Self::Steps(steps),
            CopyInterval::Auto => Self::Text("auto".into()),
        }
    }
}

impl CopyInterval {
    /// Returns true if in-memory checkpoints are taken.
    pub fn is_on(self) -> bool {
        self != Self::Steps(0)
    }
}

impl MemoryCheckpoint {
    /// Returns the number of slots of a rank: those that are kept, one that is written, and one
    /// that is being written to the disk.
    pub fn slots(&self) -> usize {
        self.keep + 1 + usize::from(self.disk_dir.is_some())
    }
}

/// Checks the keys of `[memory_checkpoint]`.
///
/// # Errors
/// Returns an error if a key is out of range, or has no effect.
pub fn check(config: &Config) -> Result<()> {
    let MemoryCheckpoint { every, keep, dir, disk_dir, disk_every } = &config.memory_checkpoint;
    let default = MemoryCheckpoint::default();
    if !every.is_on() {
        let set = [
            ("keep", (*keep != default.keep).then(|| keep.to_string())),
            ("dir", (*dir != default.dir).then(|| dir.clone())),
            ("disk_dir", disk_dir.clone()),
            ("disk_every", (*disk_every != default.disk_every).then(|| disk_every.to_string())),
        ];
        let set: Vec<(&str, String)> =
            set.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
        let Some((key, value)) = set.first() else { return Ok(()) };
        let keys: Vec<&str> = set.iter().map(|(key, _)| *key).collect();
        return Err(Error::input(format!(
            "memory_checkpoint.{key} = {value} does nothing with memory_checkpoint.every = 0"
        ))
        .hint(format!(
            "set memory_checkpoint.every=1 or another number of steps, or remove {}",
            keys.join(", ")
        )));
    }
    if !(1..=MOST_KEPT).contains(keep) {
        return Err(out_of_range("memory_checkpoint.keep", keep, "from 1 to 16"));
    }
    if !Path::new(dir).is_absolute() {
        return Err(out_of_range("memory_checkpoint.dir", dir, "an absolute path"));
    }
    if *disk_every == 0 {
        return Err(out_of_range("memory_checkpoint.disk_every", disk_every, "at least 1"));
    }
    match disk_dir {
        Some(dir) if !Path::new(dir).is_absolute() => {
            Err(out_of_range("memory_checkpoint.disk_dir", dir, "an absolute path"))
        }
        None if *disk_every != default.disk_every => Err(Error::input(format!(
            "memory_checkpoint.disk_every = {disk_every} does nothing without \
             memory_checkpoint.disk_dir"
        ))
        .hint(
            "set memory_checkpoint.disk_dir to a directory on a local disk, or remove disk_every",
        )),
        _ => Ok(()),
    }
}

/// The largest value of `memory_checkpoint.keep`: each costs a copy of the state of a rank.
const MOST_KEPT: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sources, load};

    fn checked(settings: &[&str]) -> Result<Config> {
        let overrides: Vec<String> = settings.iter().map(ToString::to_string).collect();
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() })?;
        check(&config).map(|()| config)
    }

    #[test]
    fn intervals_are_steps_or_auto() {
        let every = |text: &str| {
            let config = checked(&[&format!("memory_checkpoint.every={text}")])?;
            Ok::<_, Error>(config.memory_checkpoint.every)
        };
        assert_eq!(every("3").unwrap(), CopyInterval::Steps(3));
        assert_eq!(every("auto").unwrap(), CopyInterval::Auto);
        assert!(CopyInterval::Auto.is_on() && !CopyInterval::Steps(0).is_on());
        let error = every("often").unwrap_err().to_string();
        assert!(error.contains("memory_checkpoint.every") && error.contains("auto"), "{error}");
    }

    #[test]
    fn keys_without_effect_are_refused() {
        for (settings, message) in [
            (
                &["memory_checkpoint.keep=2"][..],
                "memory_checkpoint.keep = 2 does nothing with memory_checkpoint.every = 0",
            ),
            (&["memory_checkpoint.dir='/tmp'"], "memory_checkpoint.dir = /tmp does nothing"),
            (
                &["memory_checkpoint.every=1", "memory_checkpoint.keep=0"],
                "memory_checkpoint.keep = 0 is out of range",
            ),
            (
                &["memory_checkpoint.every=1", "memory_checkpoint.dir='shm'"],
                "memory_checkpoint.dir must be an absolute path",
            ),
            (
                &["memory_checkpoint.every=1", "memory_checkpoint.disk_every=7"],
                "memory_checkpoint.disk_every = 7 does nothing without memory_checkpoint.disk_dir",
            ),
            (
                &["memory_checkpoint.every=1", "memory_checkpoint.disk_dir='disk'"],
                "memory_checkpoint.disk_dir must be an absolute path",
            ),
        ] {
            let error = checked(settings).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
            assert!(error.advice().is_some() && error.exit_code() == 2, "{error}");
        }
        checked(&["memory_checkpoint.every=auto", "memory_checkpoint.keep=2"]).unwrap();
        let all = ["memory_checkpoint.keep=2", "memory_checkpoint.disk_dir='/tmp'"];
        let error = checked(&all).unwrap_err();
        assert!(error.advice().unwrap().ends_with("remove keep, disk_dir"), "{error}");
    }
}
