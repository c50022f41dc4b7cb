//! A checkpoint that is used rather than trained on, and the data it is given: what `predict` and `eval --checkpoint` share.

use std::path::{Path, PathBuf};

use clap::ValueEnum;

use crate::backend::Backend;
use crate::checkpoint::Reader;
use crate::checkpoint::lease::Lease;
use crate::checkpoint::tools::find;
use crate::comm::Group;
use crate::config::{Config, overlay};
use crate::data::Split;
use crate::error::Result;
use crate::train::feed;

/// Part of a directory of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Those for training.
    Train,
    /// Those for validation.
    Validation,
}

/// Opens the checkpoint at `path`, or the newest of the run there: collective over `world`. Rank 0 holds a lease on it, so
/// that a trainer beside does not remove it meanwhile.
///
/// # Errors
/// There is none, or its manifest is damaged: the same on all ranks.
pub fn open<B: Backend>(world: &Group<B>, path: &Path) -> Result<(Reader, Option<Lease>)> {
    // One rank looks: a link such as `latest` may move meanwhile.
    let found = if world.rank() == 0 { find::checkpoint(path).map(Some) } else { Ok(None) };
    let found = world.agree(found)?;
    let lease = found.as_deref().and_then(find::hold);
    let mine = found.map(|path| path.into_os_string().into_encoded_bytes()).unwrap_or_default();
    let told = world.gather_bytes(mine).wait()?;
    let path = PathBuf::from(String::from_utf8_lossy(&told[0]).into_owned());
    Ok((world.agree(Reader::open(&path))?, lease))
}

/// The configuration of a checkpoint with `overrides`, and with the data at `data` in the place of its own.
///
/// # Errors
/// A key or value is not known.
pub fn config(reader: &Reader, overrides: &[String], data: Option<&Path>) -> Result<Config> {
    let mut config = overlay(&reader.manifest().config, overrides)?;
    if let Some(data) = data {
        config.data.path = data.display().to_string();
        config.data.mix.clear();
        // All of it: the fraction is one of the run's own data.
        config.data.val_fraction = 0.0;
        // So is its scale, which the checkpoint keeps for any data; bytes and floats of the same numbers are the same to it.
        if reader.manifest().preprocessing.is_some() {
            config.data.scale = None;
        }
    }
    Ok(config)
}

/// Which shards are meant: those asked for, else those for validation where there are any.
///
/// # Errors
/// The data of the configuration cannot be looked for.
pub fn split(config: &Config, asked: Option<Part>) -> Result<Split> {
    Ok(match asked {
        // One file is one part, whatever it is called, unless a fraction of it was kept.
        _ if config.data.mix.is_empty()
            && config.data.val_fraction == 0.0
            && Path::new(&config.data.path).is_file() =>
        {
            Split::Train
        }
        Some(Part::Train) => Split::Train,
        Some(Part::Validation) => Split::Validation,
        None if feed::has(config, Split::Validation)? => Split::Validation,
        None => Split::Train,
    })
}

/// Tells people what is converted of the data.
pub fn warn(notes: &[String], rank: usize) {
    if rank == 0 {
        notes.iter().for_each(|note| log::warn!("data: {note}"));
    }
}
