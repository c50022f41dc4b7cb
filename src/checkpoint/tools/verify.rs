//! Reading all of a checkpoint to verify that it is as it was written.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::{Reader, manifest};
use hpctrain_config::telemetry::bytes;

/// Counts of a verification.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verified {
    /// Files looked at, the manifest among them.
    pub files: usize,
    /// Files that are missing or damaged.
    pub damaged: usize,
}

/// A file of a checkpoint that was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct File {
    /// Its path; of a checkpoint that cannot be opened, its directory.
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// Its fault, if it is not as it was written.
    pub fault: Option<String>,
}

impl fmt::Display for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fault {
            None => write!(f, "{}: ok, {}", self.path.display(), bytes(self.bytes as usize)),
            Some(fault) => f.write_str(fault),
        }
    }
}

/// Reads everything in the checkpoint in `dir`; `tell` gets every file.
pub fn verify(dir: &Path, tell: &mut dyn FnMut(File)) -> Verified {
    let mut reader = match Reader::open(dir) {
        Ok(reader) => reader,
        Err(e) => {
            tell(File { path: dir.to_path_buf(), bytes: 0, fault: Some(e.message().to_string()) });
            return Verified { files: 1, damaged: 1 };
        }
    };
    let path = dir.join(manifest::FILE);
    tell(File { bytes: path.metadata().map_or(0, |file| file.len()), path, fault: None });
    let files = reader.manifest().files.clone();
    let mut verified = Verified { files: 1 + files.len(), damaged: 0 };
    for (name, entry) in files {
        let fault = reader.verify(&name).err().map(|e| e.message().to_string());
        verified.damaged += usize::from(fault.is_some());
        tell(File { path: dir.join(name), bytes: entry.bytes, fault });
    }
    verified
}
