//! Word of a run's directory to the process that supervises the job.

use std::path::{Path, PathBuf};

use hpctrain_base::error::Error;

/// The environment variable with the path of a file into which a trainer writes the directory of
/// its run.
pub const SUPERVISED: &str = "HPCTRAIN_SUPERVISED";

/// Writes the directory of a run, if the job is supervised.
pub(super) fn tell(run: &Path) {
    let Some(place) = std::env::var_os(SUPERVISED).map(PathBuf::from) else { return };
    let run = std::path::absolute(run).unwrap_or_else(|_| run.to_path_buf());
    let whole = place.with_extension("new");
    let written = std::fs::write(&whole, format!("{}\n", run.display()))
        .and_then(|()| std::fs::rename(&whole, &place));
    // The supervisor keeps what an earlier start has told.
    if let Err(e) = written {
        log::warn!("{}", Error::io("write", &place, e));
    }
}
