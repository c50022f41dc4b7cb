//! Checks of the file system of runs: its type, its free space, renames and locks, and whether all
//! nodes mount it.

use std::path::{Path, PathBuf, absolute};

use rustix::fs::statvfs;
use tempfile::{Builder, NamedTempFile, TempDir};

use super::probe::ProbeReporter;
use super::{Check, Finding};
use crate::checkpoint::filesystem;
use crate::error::{Error, Result};
use crate::telemetry::bytes;

/// With less free space than this a warning is given; checkpoints of small models still fit.
const LITTLE: u64 = 1 << 30;

/// Returns the run root, or its nearest ancestor that exists.
pub(super) fn nearest(run_root: &Path) -> PathBuf {
    let full = absolute(run_root).unwrap_or_else(|_| run_root.to_owned());
    let found = full.ancestors().find(|dir| dir.is_dir());
    found.map_or_else(|| PathBuf::from("/"), Path::to_owned)
}

/// Creates a temporary directory in `dir`, which is removed when it is dropped.
pub(super) fn scratch(dir: &Path) -> Result<TempDir> {
    let made = Builder::new().prefix(".doctor-").tempdir_in(dir);
    made.map_err(|e| {
        Error::io("create a directory in", dir, e)
            .hint("choose another --run-root, and run.root to train")
    })
}

pub(super) fn probe(reporter: &ProbeReporter, run_root: &Path) {
    let dir = nearest(run_root);
    let name = match dir.ends_with(run_root.strip_prefix(".").unwrap_or(run_root)) {
        true => run_root.display().to_string(),
        false => {
            format!("{} (for {}, which does not exist yet)", dir.display(), run_root.display())
        }
    };
    reporter.attempt("run root", || match filesystem::probe(&dir) {
        Err(error) => Err(error).into(),
        Ok(found) => {
            let kind = found.kind.unwrap_or_else(|| "unknown".into());
            let links =
                if found.links { "" } else { ", no symbolic links (latest and best are files)" };
            match found.locks {
                Ok(()) => Finding::ok(format!("{name}: {kind}, atomic renames, file locks{links}")),
                Err(e) => Finding::warning(
                    format!("{name}: {kind}, atomic renames, no file locks ({e}){links}"),
                    "let only one evaluator at a time write eval.jsonl",
                ),
            }
        }
    });
    reporter.attempt("free space", || match statvfs(&dir) {
        Err(e) => Err(Error::io("query the free space of", &dir, e)).into(),
        Ok(space) => {
            let free = space.f_bavail * space.f_frsize;
            let all = space.f_blocks * space.f_frsize;
            let found = format!("{} of {}", bytes(free as usize), bytes(all as usize));
            match free < LITTLE {
                true => Finding::warning(
                    found,
                    "a checkpoint takes 12 bytes per parameter (AdamW in f32), and two are kept by default",
                ),
                false => Finding::ok(found),
            }
        }
    });
}

/// Creates a temporary file in the run root, for which other nodes look.
pub(super) fn marker(run_root: &Path) -> Option<NamedTempFile> {
    Builder::new().prefix(".doctor-").tempfile_in(nearest(run_root)).ok()
}

/// Checks whether this node sees the file that rank 0 has created in the run root.
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
    fn the_nearest_ancestor_of_a_missing_run_root_is_checked() {
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
