//! The file system that runs are on: its type, its space, renames and locks, and whether all nodes
//! see it.

use std::path::{Path, PathBuf, absolute};

use rustix::fs::statvfs;
use tempfile::{Builder, NamedTempFile, TempDir};

use super::probe::ProbeReporter;
use super::{Check, Finding};
use crate::checkpoint::filesystem;
use crate::error::{Error, Result};
use crate::telemetry::bytes;

/// Little free space: the checkpoints of a small model would still fit.
const LITTLE: u64 = 1 << 30;

/// The run root, or the nearest directory above it that exists.
pub(super) fn nearest(run_root: &Path) -> PathBuf {
    let full = absolute(run_root).unwrap_or_else(|_| run_root.to_owned());
    let found = full.ancestors().find(|dir| dir.is_dir());
    found.map_or_else(|| PathBuf::from("/"), Path::to_owned)
}

/// A directory of our own below `dir`, removed when it is dropped.
pub(super) fn scratch(dir: &Path) -> Result<TempDir> {
    let made = Builder::new().prefix(".doctor-").tempdir_in(dir);
    made.map_err(|e| {
        Error::io("create a directory in", dir, e)
            .hint("choose another --run-root, and run.root to train")
    })
}

pub(super) fn probe(tell: &ProbeReporter, run_root: &Path) {
    let dir = nearest(run_root);
    let name = match dir.ends_with(run_root.strip_prefix(".").unwrap_or(run_root)) {
        true => run_root.display().to_string(),
        false => format!("{} (for {}, which is not there yet)", dir.display(), run_root.display()),
    };
    tell.attempt("run root", || match filesystem::probe(&dir) {
        Err(error) => Err(error).into(),
        Ok(found) => {
            let kind = found.kind.unwrap_or_else(|| "unknown".into());
            let links = if found.links {
                ""
            } else {
                ", has no symbolic links (latest and best are files)"
            };
            match found.locks {
                Ok(()) => {
                    Finding::ok(format!("{name}: {kind}, renames at once, locks files{links}"))
                }
                Err(e) => Finding::warning(
                    format!("{name}: {kind}, renames at once, has no file locks ({e}){links}"),
                    "let one evaluator at a time write eval.jsonl",
                ),
            }
        }
    });
    tell.attempt("free space", || match statvfs(&dir) {
        Err(e) => Err(Error::io("ask for the space of", &dir, e)).into(),
        Ok(space) => {
            let free = space.f_bavail * space.f_frsize;
            let all = space.f_blocks * space.f_frsize;
            let found = format!("{} of {}", bytes(free as usize), bytes(all as usize));
            match free < LITTLE {
                true => Finding::warning(
                    found,
                    "a checkpoint takes 12 bytes a parameter, and two are kept",
                ),
                false => Finding::ok(found),
            }
        }
    });
}

/// A file in the run root for the other nodes to find.
pub(super) fn marker(run_root: &Path) -> Option<NamedTempFile> {
    Builder::new().prefix(".doctor-").tempfile_in(nearest(run_root)).ok()
}

/// Whether this node sees the file that rank 0 has made in the run root.
pub(super) fn is_shared(marker: &Path) -> Check {
    let place = marker.parent().unwrap_or(marker).display();
    let finding = match marker.exists() {
        true => Finding::ok(format!("this node sees what rank 0 writes in {place}")),
        false => Finding::failure(
            format!("this node does not see what rank 0 writes in {place}"),
            "choose a --run-root, and run.root to train, on a file system that all nodes mount",
        ),
    };
    finding.named("run root shared")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_root_to_come_is_looked_at_above() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(nearest(&root.path().join("a/b")), root.path());
        assert_eq!(nearest(root.path()), root.path());
    }

    #[test]
    fn a_marker_is_seen_where_it_is() {
        let root = tempfile::tempdir().unwrap();
        let file = marker(root.path()).unwrap();
        let path = file.path().to_owned();
        assert_eq!(is_shared(&path).finding.status, super::super::CheckStatus::Ok);
        drop(file);
        assert_eq!(is_shared(&path).finding.status, super::super::CheckStatus::Failure);
    }
}
