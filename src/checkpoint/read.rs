//! Reading: any range of any tensor, from the files that hold it.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::manifest::BLOCK;
use super::shard::rest_crc32;
use super::{Manifest, PARAMS, Piece};
use crate::error::{Error, Kind, Result};
use crate::optim::AVERAGE;

/// An open checkpoint. HDF5 is not needed to read one: the manifest says where everything is.
pub struct Reader {
    manifest: Manifest,
    files: Files,
    /// A block of which only a part was asked for.
    block: Vec<f32>,
}

/// Files that are open at once: a checkpoint may have more than a process may open.
const OPEN: usize = 128;

/// The files of a checkpoint, opened when they are needed.
struct Files {
    dir: PathBuf,
    open: HashMap<String, File>,
}

impl Reader {
    /// Opens the checkpoint in `dir`.
    ///
    /// # Errors
    /// The manifest is missing or damaged.
    pub fn open(dir: &Path) -> Result<Self> {
        let files = Files { dir: dir.to_path_buf(), open: HashMap::new() };
        Ok(Self { manifest: Manifest::read(dir)?, files, block: Vec::new() })
    }

    /// The manifest of the checkpoint.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.files.dir
    }

    /// The part that is used rather than trained: the running average of the parameters, if there is one, else themselves.
    pub fn used(&self) -> usize {
        self.manifest.state.iter().position(|name| name == AVERAGE).map_or(0, |k| k + 1)
    }

    /// Reads elements `range` of a tensor: part 0 is the parameters, part k the k-th state buffer.
    /// Every block touched is checked against its checksum.
    ///
    /// # Errors
    /// A file is missing or damaged, or there is no such tensor: which tensor, which file.
    pub fn read(&mut self, tensor: &str, part: usize, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let Self { manifest, files, block } = self;
        let absent = || Error::input(format!("{} has no tensor {tensor}", files.dir.display()));
        let entry = manifest.tensors.get(tensor).ok_or_else(absent)?;
        let group = part.checked_sub(1).map_or(PARAMS, |k| &manifest.state[k]);
        for piece in &entry.pieces {
            let wanted = range.start.max(piece.start)..range.end.min(piece.start + piece.len);
            if wanted.is_empty() {
                continue;
            }
            let name = format!("/{group}/{tensor}");
            let within = wanted.start - piece.start..wanted.end - piece.start;
            let out = &mut out[wanted.start - range.start..wanted.end - range.start];
            for index in within.start / BLOCK..within.end.div_ceil(BLOCK) {
                let whole = index * BLOCK..((index + 1) * BLOCK).min(piece.len);
                let asked = whole.start.max(within.start)..whole.end.min(within.end);
                let into = &mut out[asked.start - within.start..asked.end - within.start];
                if asked == whole {
                    files.read_block(piece, part, index, &name, into)?;
                } else {
                    block.resize(whole.len(), 0.0);
                    files.read_block(piece, part, index, &name, block)?;
                    into.copy_from_slice(&block[asked.start - whole.start..asked.end - whole.start]);
                }
            }
        }
        Ok(())
    }

    /// Checks the lengths of all files, and the bytes that belong to no tensor, of every `of`-th file from `first` on.
    ///
    /// # Errors
    /// The first that is missing or damaged.
    pub fn check_files(&mut self, first: usize, of: usize) -> Result<()> {
        let names: Vec<String> = self.manifest.files.keys().cloned().collect();
        names.iter().skip(first).step_by(of).try_for_each(|name| self.check_file(name))
    }

    /// Checks a file but for the numbers in it.
    fn check_file(&mut self, name: &str) -> Result<()> {
        let entry = &self.manifest.files[name];
        let pieces = self.manifest.tensors.values().flat_map(|tensor| &tensor.pieces);
        let pieces: Vec<&Piece> = pieces.filter(|piece| piece.file == *name).collect();
        let path = self.files.dir.join(name);
        let file = self.files.get(name)?;
        let length = file.metadata().map_err(|e| unread("read", &path, &e))?.len();
        if length != entry.bytes {
            return Err(damaged(&path, format!("{length} bytes where the manifest says {}", entry.bytes)));
        }
        let found = rest_crc32(file, length, &pieces).map_err(|e| unread("read", &path, &e))?;
        if found != entry.rest_crc32 {
            return Err(damaged(&path, format!("HDF5 structure: checksum {found:08x} is not the manifest's")));
        }
        Ok(())
    }

    /// Reads and checks everything in the file `name`.
    ///
    /// # Errors
    /// The first thing that is damaged.
    pub fn verify(&mut self, name: &str) -> Result<()> {
        self.check_file(name)?;
        let Self { manifest, files, block } = self;
        for (tensor, entry) in &manifest.tensors {
            for piece in entry.pieces.iter().filter(|piece| piece.file == name) {
                for part in 0..piece.parts.len() {
                    let group = part.checked_sub(1).map_or(PARAMS, |k| &manifest.state[k]);
                    for index in 0..piece.len.div_ceil(BLOCK) {
                        block.resize(BLOCK.min(piece.len - index * BLOCK), 0.0);
                        files.read_block(piece, part, index, &format!("/{group}/{tensor}"), block)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Files {
    /// Reads a whole block of a piece and checks it.
    fn read_block(&mut self, piece: &Piece, part: usize, index: usize, name: &str, out: &mut [f32]) -> Result<()> {
        let stored = &piece.parts[part];
        let path = self.dir.join(&piece.file);
        let offset = stored.offset + (index * BLOCK * size_of::<f32>()) as u64;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(out);
        let file = self.get(&piece.file)?;
        file.read_exact_at(bytes, offset).map_err(|e| unread(&format!("read {name} in"), &path, &e))?;
        let found = crc32fast::hash(bytes);
        if found != stored.crc32[index] {
            return Err(damaged(&path, format!("{name}: checksum {found:08x} is not the manifest's")));
        }
        Ok(())
    }

    fn get(&mut self, name: &str) -> Result<&File> {
        if !self.open.contains_key(name) {
            let path = self.dir.join(name);
            let file = File::open(&path).map_err(|e| unread("open", &path, &e))?;
            if self.open.len() == OPEN {
                self.open.clear();
            }
            self.open.insert(name.to_string(), file);
        }
        Ok(&self.open[name])
    }
}

/// The hint of errors about damaged files.
const HINT: &str = "the file is damaged: resume from an older checkpoint";

fn damaged(path: &Path, what: String) -> Error {
    Error::damaged(format!("{}: {what}", path.display())).hint(HINT)
}

/// A file that cannot be read: it is damaged, or the file system refused.
fn unread(action: &str, path: &Path, e: &std::io::Error) -> Error {
    let error = Error::unread(action, path, e);
    match error.kind() {
        Kind::Damaged => error.hint(HINT),
        _ => error.hint("the checkpoint may well be whole: see why it cannot be read"),
    }
}
