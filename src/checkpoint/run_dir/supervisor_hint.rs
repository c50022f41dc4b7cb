//! Reports a run's directory to the process that supervises the job.

use std::path::{Path, PathBuf};

use hpctrain_base::error::Error;

/// The environment variable with the path of the file into which a trainer writes the directory of
/// its run.
pub const SUPERVISED: &str = "HPCTRAIN_SUPERVISED";

/// Writes the directory of a run to the supervisor's file, if the job is supervised.
pub(super) fn write(run: &Path) {
    let Some(path) = std::env::var_os(SUPERVISED).map(PathBuf::from) else { return };
    let run = std::path::absolute(run).unwrap_or_else(|_| run.to_path_buf());
    let temporary = path.with_extension("new");
    let written = std::fs::write(&temporary, format!("{}\n", run.display()))
        .and_then(|()| std::fs::rename(&temporary, &path));
    // On failure the supervisor keeps what an earlier start has reported.
    if let Err(e) = written {
        log::warn!("{}", Error::io("write", &path, e));
    }
}
