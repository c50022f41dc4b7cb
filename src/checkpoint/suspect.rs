//! Suspect checkpoints: a silent-data-corruption (SDC) check finds that replicas differ some steps
//! after they began to, so the checkpoints of these steps may be wrong.
//!
//! The mark belongs to the run: `checkpoints/suspect-<job>` says that no save of the job `<job>`
//! after a step is trusted, including those published after the mark was written. In addition, each
//! existing checkpoint gets a file `suspect`, which is copied with it. An unreadable mark counts as a
//! mark.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// Name of the file that marks a checkpoint as suspect, in its directory.
pub(super) const FILE: &str = "suspect";

/// Prefix of the file names of a run's marks, before the id of the job.
pub(super) const MARK: &str = "suspect-";

/// The content of a run's mark.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Mark {
    /// The last trusted step.
    pub after: u64,
    /// The finding of the SDC check.
    pub reason: String,
}

/// Checks that no SDC check has marked the save `id` of step `step` in `dir` as suspect.
///
/// # Errors
/// Returns an error ([`hpctrain_base::error::Kind::Damaged`]) if the save is marked, or an I/O
/// error if it cannot be determined whether there is a mark.
pub(super) fn check(dir: &Path, step: u64, id: &str) -> Result<()> {
    let own = dir.join(FILE);
    if let Some(why) = content(&own)? {
        return Err(suspect(dir, &own, why.as_deref().unwrap_or_else(|unread| unread)));
    }
    // The id of a save consists of its job and its step.
    let Some((job, _)) = id.rsplit_once('-').filter(|(job, _)| safe_open::is_plain_name(job))
    else {
        return Ok(());
    };
    let mark = dir.join("..").join(format!("{MARK}{job}"));
    let unread = match content(&mark)? {
        None => return Ok(()),
        Some(Err(unread)) => unread,
        Some(Ok(text)) => match serde_json::from_str::<Mark>(&text) {
            Ok(Mark { after, .. }) if step <= after => return Ok(()),
            Ok(Mark { reason: why, .. }) => return Err(suspect(dir, &mark, &why)),
            Err(e) => format!("{} is not a mark: {e}", mark.display()),
        },
    };
    Err(suspect(dir, &mark, &unread))
}

fn suspect(dir: &Path, mark: &Path, why: &str) -> Error {
    Error::damaged(format!("{} is suspect: {}", dir.display(), why.trim())).hint(format!(
        "resume from an older checkpoint; to use it all the same, remove {}",
        mark.display()
    ))
}

/// Returns the text of a mark, or the reason why it cannot be read; `None` if there is no mark.
///
/// # Errors
/// Returns an error if it cannot be determined whether the mark exists.
fn content(path: &Path) -> Result<Option<Result<String, String>>> {
    match fs::symlink_metadata(path) {
        Ok(_) => {}
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io("look for", path, e)),
    }
    let text = safe_open::read_to_string(path);
    Ok(Some(text.map_err(|e| format!("{} cannot be read: {e}", path.display()))))
}

/// Returns true if a save belongs to a job.
pub(super) fn belongs(id: &str, job: &str) -> bool {
    id.rsplit_once('-').is_some_and(|(of_save, _)| of_save == job)
}
