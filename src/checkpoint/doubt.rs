//! Doubt: an audit finds replicas that differ some steps after they began to, and the checkpoints
//! of these steps may hold wrong numbers.
//!
//! The mark belongs to the run: `checkpoints/doubtful-<job>` says that no save of the job `<job>`
//! after a step is trusted, also one that is published after the mark was written. Besides, each
//! checkpoint that is there gets a file `doubt`, which goes with its copies. A mark that cannot be
//! read counts as doubt.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// Name of the file in the directory of a checkpoint that an audit has put in doubt.
pub(super) const FILE: &str = "doubt";

/// Prefix of the names of a run's marks; the name of the job follows.
pub(super) const MARK: &str = "doubtful-";

/// The content of a run's mark.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Mark {
    /// The last step that is trusted.
    pub after: u64,
    /// The finding of the audit.
    pub why: String,
}

/// Refuses a checkpoint that is in doubt: the save `id` of step `step` in `dir`.
///
/// # Errors
/// Returns an error ([`hpctrain_base::error::Kind::Damaged`]) if an audit has put it in doubt, or
/// one of another kind if the file system does not say whether there is a mark.
pub(super) fn check(dir: &Path, step: u64, id: &str) -> Result<()> {
    let own = dir.join(FILE);
    if let Some(why) = content(&own)? {
        return Err(doubtful(dir, &own, why.as_deref().unwrap_or_else(|unread| unread)));
    }
    // The name of a save is that of its job and its step.
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
            Ok(Mark { why, .. }) => return Err(doubtful(dir, &mark, &why)),
            Err(e) => format!("{} is not a mark: {e}", mark.display()),
        },
    };
    Err(doubtful(dir, &mark, &unread))
}

fn doubtful(dir: &Path, mark: &Path, why: &str) -> Error {
    Error::damaged(format!("{} is doubtful: {}", dir.display(), why.trim())).hint(format!(
        "resume from an older checkpoint; to use it all the same, remove {}",
        mark.display()
    ))
}

/// The text of a mark, or the reason that it cannot be read; none if there is no mark.
///
/// # Errors
/// Returns an error if the file system does not say whether it exists.
fn content(path: &Path) -> Result<Option<Result<String, String>>> {
    match fs::symlink_metadata(path) {
        Ok(_) => {}
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io("look for", path, e)),
    }
    let text = safe_open::read_to_string(path);
    Ok(Some(text.map_err(|e| format!("{} cannot be read: {e}", path.display()))))
}

/// Whether a save is one of a job.
pub(super) fn belongs(id: &str, job: &str) -> bool {
    id.rsplit_once('-').is_some_and(|(of, _)| of == job)
}
