//! Reads all of a checkpoint to verify that it is undamaged.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::{Reader, manifest};
use hpctrain_config::telemetry::bytes;

/// The counts of a verification.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verified {
    /// The number of files checked, including the manifest.
    pub files: usize,
    /// The number of missing or damaged files.
    pub damaged: usize,
}

/// The result for one file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VerifiedFile {
    /// The path of the file, or the checkpoint's directory if it cannot be opened.
    pub path: PathBuf,
    /// The length of the file.
    pub bytes: u64,
    /// The fault of the file, if it is missing or damaged.
    pub fault: Option<String>,
}

impl fmt::Display for VerifiedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fault {
            None => write!(f, "{}: ok, {}", self.path.display(), bytes(self.bytes as usize)),
            Some(fault) => f.write_str(fault),
        }
    }
}

/// Reads everything in the checkpoint in `dir`, and calls `report` for every file.
pub fn verify(dir: &Path, report: &mut dyn FnMut(VerifiedFile)) -> Verified {
    let mut reader = match Reader::open(dir) {
        Ok(reader) => reader,
        Err(e) => {
            report(VerifiedFile {
                path: dir.to_path_buf(),
                bytes: 0,
                fault: Some(e.message().to_string()),
            });
            return Verified { files: 1, damaged: 1 };
        }
    };
    let path = dir.join(manifest::FILE);
    report(VerifiedFile { bytes: path.metadata().map_or(0, |file| file.len()), path, fault: None });
    let files = reader.manifest().files.clone();
    let mut verified = Verified { files: 1 + files.len(), damaged: 0 };
    for (name, entry) in files {
        let fault = reader.verify(&name).err().map(|e| e.message().to_string());
        verified.damaged += usize::from(fault.is_some());
        report(VerifiedFile { path: dir.join(name), bytes: entry.bytes, fault });
    }
    verified
}
