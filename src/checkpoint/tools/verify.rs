//! Reading all of a checkpoint to verify that it is as it was written.

use std::path::Path;

use crate::checkpoint::{Reader, manifest};
use crate::telemetry::bytes;

/// Counts of a verification.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verified {
    /// Files looked at, the manifest among them.
    pub files: usize,
    /// Files that are missing or damaged.
    pub damaged: usize,
}

/// Reads everything in the checkpoint in `dir`; `tell` gets a line for every file.
pub fn verify(dir: &Path, tell: &mut dyn FnMut(String)) -> Verified {
    let mut reader = match Reader::open(dir) {
        Ok(reader) => reader,
        Err(e) => {
            tell(e.message().to_string());
            return Verified { files: 1, damaged: 1 };
        }
    };
    let ok = |path: &Path, size: u64| format!("{}: ok, {}", path.display(), bytes(size as usize));
    let path = dir.join(manifest::FILE);
    tell(ok(&path, path.metadata().map_or(0, |file| file.len())));
    let files = reader.manifest().files.clone();
    let mut verified = Verified { files: 1 + files.len(), damaged: 0 };
    for (name, entry) in files {
        match reader.verify(&name) {
            Ok(()) => tell(ok(&dir.join(name), entry.bytes)),
            Err(e) => {
                verified.damaged += 1;
                tell(e.message().to_string());
            }
        }
    }
    verified
}
