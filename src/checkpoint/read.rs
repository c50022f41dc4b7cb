//! Reading: any range of any tensor, from whatever files hold it.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::{Manifest, PARAMS, Piece};
use crate::data::one_line;
use crate::error::{Error, Result};

/// An open checkpoint.
pub struct Reader {
    dir: PathBuf,
    manifest: Manifest,
    files: HashMap<String, hdf5::File>,
}

impl Reader {
    /// Opens the checkpoint in `dir`.
    ///
    /// # Errors
    /// The manifest is missing or malformed.
    pub fn open(dir: &Path) -> Result<Self> {
        Ok(Self { manifest: Manifest::read(dir)?, dir: dir.to_path_buf(), files: HashMap::new() })
    }

    /// What the checkpoint says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Reads elements `range` of a tensor: part 0 is the parameters, part k the k-th state buffer.
    /// Every piece touched is checked against its checksum.
    ///
    /// # Errors
    /// A file is missing or damaged, or the pieces leave a hole: which tensor, which file.
    pub fn read(&mut self, tensor: &str, part: usize, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let group = match part.checked_sub(1) {
            None => PARAMS.to_string(),
            Some(k) => self.manifest.state[k].clone(),
        };
        let pieces = self.manifest.tensors.get(tensor).map(|entry| entry.pieces.clone()).unwrap_or_default();
        let mut next = range.start;
        for piece in pieces {
            let overlap = range.start.max(piece.start)..range.end.min(piece.start + piece.len);
            if overlap.is_empty() {
                continue;
            }
            if overlap.start != next {
                break;
            }
            let values = self.piece(tensor, &group, part, &piece)?;
            out[overlap.start - range.start..overlap.end - range.start]
                .copy_from_slice(&values[overlap.start - piece.start..overlap.end - piece.start]);
            next = overlap.end;
        }
        if next < range.end {
            return Err(Error::input(format!(
                "{}: no piece holds element {next} of tensor {tensor}",
                self.dir.display()
            ))
            .hint("the manifest is damaged: resume from an older checkpoint"));
        }
        Ok(())
    }

    /// One whole piece, verified.
    fn piece(&mut self, tensor: &str, group: &str, part: usize, piece: &Piece) -> Result<Vec<f32>> {
        let path = self.dir.join(&piece.file);
        let damaged = |what: String| {
            Error::input(format!("{}: /{group}/{tensor}: {what}", path.display()))
                .hint("the file is damaged: resume from an older checkpoint")
        };
        let values: Vec<f32> = {
            let file = match self.files.get(&piece.file) {
                Some(file) => file,
                None => {
                    let file = hdf5::File::open(&path).map_err(|e| {
                        Error::io("open", &path, one_line(&e))
                            .hint("resume from an older checkpoint, which has all files")
                    })?;
                    self.files.entry(piece.file.clone()).or_insert(file)
                }
            };
            file.dataset(&format!("{group}/{tensor}"))
                .and_then(|dataset| dataset.read_raw())
                .map_err(|e| damaged(one_line(&e)))?
        };
        if values.len() != piece.len {
            return Err(damaged(format!("{} elements where the manifest says {}", values.len(), piece.len)));
        }
        let found = crc32fast::hash(bytemuck::cast_slice(&values));
        if piece.crc32.get(part) != Some(&found) {
            return Err(damaged(format!("checksum {found:08x} is not the manifest's")));
        }
        Ok(values)
    }
}
