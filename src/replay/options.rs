//! The arguments of a replay.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::recorder::StopAt;
use crate::config::{Config, overlay, with_data_path};
use crate::error::{Error, Result};
use crate::verify::Launcher;

/// The arguments of a replay.
#[derive(Debug, Clone)]
pub struct ReplayOptions {
    /// The directory of the run.
    pub run: PathBuf,
    /// The steps to compare, counted from 1; default: those around the bad step of the records.
    pub steps: Option<RangeInclusive<u64>>,
    /// The number of ranks.
    pub ranks: usize,
    /// How the ranks are launched.
    pub launcher: Launcher,
    /// Whether to begin where the run began, instead of at a checkpoint.
    pub from_start: bool,
    /// The values at which to stop, if any.
    pub stop: Option<StopAt>,
    /// The place of the run's data, if it was moved.
    pub data: Option<PathBuf>,
    /// Overridden keys of the section `data`, and `run.device`, each as `section.key=value`.
    pub overrides: Vec<String>,
    /// Whether to print one JSON object instead of lines.
    pub json: bool,
}

impl ReplayOptions {
    /// Returns a configuration of the run with the data and the overrides of the options.
    ///
    /// # Errors
    /// Returns an error if an override is not allowed or invalid.
    pub fn overlay(&self, config: &Config) -> Result<Config> {
        let is_allowed = |key: &str| key.starts_with("data.") || key.starts_with("run.device=");
        if let Some(other) = self.overrides.iter().find(|key| !is_allowed(key)) {
            return Err(Error::input(format!(
                "--set {other}: only keys of [data] and run.device can be set"
            ))
            .hint("a replay takes all other keys from the run"));
        }
        let config = overlay(config, &self.overrides)?;
        match &self.data {
            Some(path) => with_data_path(config, path),
            None => Ok(config),
        }
    }
}
