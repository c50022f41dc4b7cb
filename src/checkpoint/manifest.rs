//! The manifest: everything about a checkpoint but the numbers.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Progress;
use crate::config::Config;
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::layout::UnitLayout;

/// Version of the format that this program writes.
pub const VERSION: u32 = 1;

/// File name of the manifest.
pub const FILE: &str = "manifest.json";

/// `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format.
    pub version: u32,
    /// Steps finished.
    pub step: u64,
    /// Optimizer updates done: steps less the skipped ones.
    pub updates: u64,
    /// Samples consumed: the loader's whole state.
    pub position: u64,
    /// Names every random stream; with `step` and `position`, the generators' whole state.
    pub seed: u64,
    /// The resolved configuration.
    pub config: Config,
    /// How text becomes token ids, when the data says.
    pub tokenizer: Option<Tokenizer>,
    /// Names of the optimizer's buffers: groups beside `params` in the files.
    pub state: Vec<String>,
    /// Every tensor, by name.
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// One tensor and where its pieces are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Extent of every dimension, row-major.
    pub shape: Vec<usize>,
    /// Pieces in order; together they cover the tensor once.
    pub pieces: Vec<Piece>,
}

/// A range of a tensor in one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// File in the checkpoint's directory.
    pub file: String,
    /// First flat element of the tensor.
    pub start: usize,
    /// Elements.
    pub len: usize,
    /// CRC-32 of the little-endian f32 bytes: of the parameters, then of each buffer in [`Manifest::state`].
    pub crc32: Vec<u32>,
}

impl Manifest {
    /// Reads the manifest of the checkpoint in `dir`.
    ///
    /// # Errors
    /// It is missing, malformed, or of a later version.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(FILE);
        let text = std::fs::read_to_string(&path).map_err(|e| {
            Error::io("read the manifest", &path, e)
                .hint("a checkpoint is a directory such as runs/<name>/checkpoints/latest")
        })?;
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let malformed = |e: serde_json::Error| {
            Error::input(format!("{}: malformed manifest: {e}", path.display()))
                .hint("the checkpoint is damaged: resume from an older one")
        };
        let Version { version } = serde_json::from_str(&text).map_err(malformed)?;
        if version > VERSION {
            return Err(Error::input(format!("{}: format version {version} is newer than {VERSION}", path.display()))
                .hint("use the version of hpctrain that wrote it, or a later one"));
        }
        serde_json::from_str(&text).map_err(malformed)
    }

    /// How far the run was.
    pub fn progress(&self) -> Progress {
        Progress { step: self.step, updates: self.updates, position: self.position }
    }

    /// Checks that the tensors are those of a model.
    ///
    /// # Errors
    /// The first tensor that differs, with both shapes.
    pub fn check<'a>(&self, dir: &Path, layouts: impl Iterator<Item = &'a UnitLayout>, state: &[&str]) -> Result<()> {
        let other = |what: String| {
            Err(Error::input(format!("{}: checkpoint of another model: {what}", dir.display()))
                .hint("resume with the configuration it was saved with"))
        };
        let mut expected = 0;
        for (tensor, _) in layouts.flat_map(|layout| &layout.tensors) {
            expected += 1;
            match self.tensors.get(&tensor.name) {
                None => return other(format!("it has no tensor {}", tensor.name)),
                Some(entry) if entry.shape != tensor.shape => {
                    return other(format!("{} is {:?} there, {:?} here", tensor.name, entry.shape, tensor.shape));
                }
                Some(_) => {}
            }
        }
        if expected != self.tensors.len() {
            return other(format!("it has {} tensors, the model {expected}", self.tensors.len()));
        }
        if self.state != state {
            return other(format!("its optimizer state is {:?}, here it is {state:?}", self.state));
        }
        Ok(())
    }
}
