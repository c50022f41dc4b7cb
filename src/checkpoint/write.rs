//! Writing: every rank its owned ranges, rank 0 the manifest, then one rename.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::manifest::{FILE, VERSION};
use super::{Checkpoints, Manifest, PARAMS, Piece, TensorEntry};
use crate::backend::Kernels;
use crate::comm::Group;
use crate::config::Config;
use crate::data::{Tokenizer, one_line};
use crate::error::{Error, Result};
use crate::parallel::{Owned, Sharded};

/// How far a run is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Steps finished.
    pub step: u64,
    /// Updates done.
    pub updates: u64,
    /// Samples consumed.
    pub position: u64,
}

/// A piece with the tensor it belongs to, as ranks tell each other.
#[derive(Serialize, Deserialize)]
struct Written {
    tensor: String,
    shape: Vec<usize>,
    piece: Piece,
}

/// Saves a checkpoint: collective over `world`. On an error nothing is published and nothing published is lost.
///
/// # Errors
/// The file system refused on some rank; all ranks return the same error.
pub fn save<B: Kernels>(
    checkpoints: &Checkpoints,
    world: &Group<B>,
    sharded: &mut Sharded<B>,
    progress: Progress,
    config: &Config,
    tokenizer: Option<&Tokenizer>,
) -> Result<()> {
    let state = sharded.state_names();
    let step = progress.step;
    let root = world.rank() == 0;
    world.agree(if root { checkpoints.begin(step).map(drop) } else { Ok(()) })?;
    let written = world.agree(write_rank(&checkpoints.staging(step), world.rank(), sharded, state));
    let written = match written {
        Ok(written) => written,
        Err(e) => {
            if root {
                checkpoints.abandon(step);
            }
            return Err(e);
        }
    };
    let message = serde_json::to_vec(&written).map_err(|e| Error::internal(e.to_string()))?;
    let everyone = world.gather_bytes(message).wait()?;
    let published = || -> Result<()> {
        let mut manifest = Manifest {
            version: VERSION,
            step,
            updates: progress.updates,
            position: progress.position,
            seed: config.run.seed,
            config: config.clone(),
            tokenizer: tokenizer.cloned(),
            state: state.iter().map(|name| name.to_string()).collect(),
            tensors: BTreeMap::new(),
        };
        for message in &everyone {
            let written: Vec<Written> =
                serde_json::from_slice(message).map_err(|e| Error::internal(format!("a rank's table: {e}")))?;
            for Written { tensor, shape, piece } in written {
                let entry = manifest.tensors.entry(tensor).or_insert(TensorEntry { shape, pieces: vec![] });
                entry.pieces.push(piece);
            }
        }
        manifest.tensors.values_mut().for_each(|entry| entry.pieces.sort_by_key(|piece| piece.start));
        write_manifest(&checkpoints.staging(step), &manifest)?;
        checkpoints.publish(step, config.checkpoint.keep).map(drop)
    };
    let published = if root { published() } else { Ok(()) };
    if published.is_err() {
        checkpoints.abandon(step);
    }
    world.agree(published)
}

/// Writes this rank's file.
fn write_rank<B: Kernels>(dir: &Path, rank: usize, sharded: &mut Sharded<B>, state: &[&str]) -> Result<Vec<Written>> {
    let name = format!("rank-{rank:05}.h5");
    let path = dir.join(&name);
    let mut written = Vec::new();
    let mut write = || -> Result<(), WriteError> {
        let file = hdf5::File::create(&path)?;
        let groups: Vec<hdf5::Group> =
            std::iter::once(&PARAMS).chain(state).map(|part| file.create_group(part)).collect::<Result<_, _>>()?;
        for unit in sharded.owned()? {
            write_unit::<B>(&unit, &name, &groups, &mut written)?;
        }
        drop(groups);
        file.flush()?;
        file.close()?;
        Ok(())
    };
    write().map_err(|e| match e {
        WriteError::Ours(e) => e,
        WriteError::Hdf5(e) => Error::io("write the checkpoint", &path, one_line(&e))
            .hint("check the free space and permissions there; the last published checkpoint is kept"),
    })?;
    fs::File::open(&path).and_then(|file| file.sync_all()).map_err(|e| Error::io("sync", &path, e))?;
    Ok(written)
}

/// Either side of a write can fail.
enum WriteError {
    Ours(Error),
    Hdf5(hdf5::Error),
}

impl From<Error> for WriteError {
    fn from(e: Error) -> Self {
        Self::Ours(e)
    }
}

impl From<hdf5::Error> for WriteError {
    fn from(e: hdf5::Error) -> Self {
        Self::Hdf5(e)
    }
}

/// Writes the owned part of one unit: a dataset for each tensor and part.
fn write_unit<B: Kernels>(
    unit: &Owned<'_, B>,
    file: &str,
    groups: &[hdf5::Group],
    written: &mut Vec<Written>,
) -> Result<(), WriteError> {
    let parts: Vec<B::View<'_>> = std::iter::once(unit.params).chain(unit.state.iter().copied()).collect();
    let mut host = vec![0.0; unit.range.len()];
    let first = written.len();
    for (group, part) in groups.iter().zip(parts) {
        unit.backend.download(part, &mut host)?;
        for (i, piece) in unit.layout.pieces(unit.range.clone()).enumerate() {
            let values = &host[piece.of_owned.clone()];
            let dataset = group.new_dataset::<f32>().shape(values.len()).create(piece.tensor.name.as_str())?;
            dataset.write_raw(values)?;
            dataset.new_attr::<u64>().create("start")?.write_scalar(&(piece.of_tensor.start as u64))?;
            if written.len() <= first + i {
                let (start, len) = (piece.of_tensor.start, values.len());
                let piece_entry = Piece { file: file.to_string(), start, len, crc32: vec![] };
                let (tensor, shape) = (piece.tensor.name.clone(), piece.tensor.shape.clone());
                written.push(Written { tensor, shape, piece: piece_entry });
            }
            written[first + i].piece.crc32.push(crc32fast::hash(bytemuck::cast_slice(values)));
        }
    }
    Ok(())
}

/// Writes the manifest durably.
fn write_manifest(dir: &Path, manifest: &Manifest) -> Result<()> {
    use std::io::Write as _;
    let path = dir.join(FILE);
    let text = serde_json::to_string_pretty(manifest).map_err(|e| Error::internal(format!("manifest: {e}")))?;
    let write = || {
        let mut file = fs::File::create(&path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    write().map_err(|e| Error::io("write", &path, e))
}
