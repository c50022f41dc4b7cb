//! The arguments of a replay.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::recorder::StopAt;
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
    /// Whether to print one JSON object instead of lines.
    pub json: bool,
}
