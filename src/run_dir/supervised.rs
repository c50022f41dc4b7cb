//! Word of a run's directory to the process that supervises the job.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The environment variable with the path of a file into which a trainer writes the directory of its run.
pub const SUPERVISED: &str = "HPCTRAIN_SUPERVISED";

/// Writes the directory of a run, if the job is supervised.
pub(super) fn tell(run: &Path) -> Result<()> {
    let Some(place) = std::env::var_os(SUPERVISED).map(PathBuf::from) else { return Ok(()) };
    let run = std::path::absolute(run).unwrap_or_else(|_| run.to_path_buf());
    std::fs::write(&place, format!("{}\n", run.display())).map_err(|e| Error::io("write", &place, e))
}
