//! Timing of checkpoints: saves and restores, compared with plain writes, copies and reads of the
//! same number of bytes.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::time::Instant;

use serde::Serialize;

use crate::backend::Kernels;
use crate::checkpoint::{Origin, Progress, SaveContext, Saver};
use crate::comm::{Comm, Group};
use crate::config::{Config, Environment, ResolvedConfig, resolve};
use crate::engine::engine;
use crate::error::{Error, Result};
use crate::run_dir::{RestoreOptions, Resume, RunDirectory, resume};

/// Name of the directory that is created and removed.
const NAME: &str = "hpctrain-bench.tmp";

/// The number of bytes in one plain write.
const CHUNK: usize = 8 << 20;

/// The times of one round, in seconds on the slowest rank.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct SaveTimes {
    /// Every rank writes its part of the bytes into a file and syncs it.
    pub raw_write: f64,
    /// A checkpoint is saved, from the copy to the publication.
    pub save: f64,
    /// Every rank copies its part of the bytes in memory.
    pub raw_copy: f64,
    /// The state is copied, which is the part of a save for which training waits.
    pub copy: f64,
    /// The files of the checkpoint are read, one by each rank.
    pub raw_read: f64,
    /// The checkpoint is verified and loaded.
    pub restore: f64,
}

impl SaveTimes {
    /// Returns the median of every time.
    pub fn median(rounds: &[Self]) -> Self {
        let median = |time: fn(&Self) -> f64| Self::ratio(rounds, time);
        Self {
            raw_write: median(|one| one.raw_write),
            save: median(|one| one.save),
            raw_copy: median(|one| one.raw_copy),
            copy: median(|one| one.copy),
            raw_read: median(|one| one.raw_read),
            restore: median(|one| one.restore),
        }
    }

    /// Returns the median of `value` over the rounds, such as the ratio of two times of one round.
    pub fn ratio(rounds: &[Self], value: impl Fn(&Self) -> f64) -> f64 {
        let mut all: Vec<f64> = rounds.iter().map(value).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// Times saves of the network of a configuration, sharded over all ranks, in `dir`. Collective over
/// the world of `comm`. Returns the size of a checkpoint in bytes and the times of every round.
///
/// # Errors
/// Returns an error if a file operation or a message between ranks fails.
pub fn time<B: Kernels>(
    comm: &Comm<B>,
    config: &Config,
    dir: &Path,
    rounds: usize,
    backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
) -> Result<(u64, Vec<SaveTimes>)> {
    let world = comm.world();
    let root = world.rank() == 0;
    let mut config = config.clone();
    config.parallel.zero =
        if comm.size() > 1 { crate::parallel::Zero::One } else { config.parallel.zero };
    // Retention must not remove any: removing is not timed.
    config.checkpoint.keep = rounds + 1;
    config.run.root = dir.to_string_lossy().into_owned();
    config.run.name = Some(NAME.into());
    let facts =
        Environment { ranks: comm.size(), threads: 1, vocabulary: None, on_gpu: !B::ON_HOST };
    let plan = world.all_ok(resolve(config, &facts))?;
    let directory = RunDirectory::at(dir.join(NAME));
    let checkpoints = directory.checkpoints();
    world.all_ok(match root {
        true => clear(directory.path()).and_then(|()| checkpoints.prepare()),
        false => Ok(()),
    })?;

    let (mut engine, _) = engine(comm, &plan, backend(&plan)?, None)?;
    let job = SaveContext {
        checkpoints: checkpoints.clone(),
        config: plan.config.clone(),
        preprocessing: None,
        data: None,
        origin: Origin::default(),
        id: "bench".into(),
        records: vec![],
        state: engine.model.sharded.state_names(),
    };
    let mut saver =
        Saver::new(job, world.clone(), &engine.model.backend, &mut engine.model.sharded, true)?;
    let mut measured = Vec::with_capacity(rounds);
    let mut bytes = 0;
    // The first round is a warm-up.
    for round in 0..=rounds as u64 {
        let mut times = SaveTimes::default();
        let progress = Progress { step: round + 1, ..Progress::default() };
        let begun = begin(&world)?;
        saver.save(&mut engine.model.sharded, progress)?;
        times.copy = slowest(&world, begun)?;
        let published = saver.finish()?;
        times.save = published.map_or(f64::NAN, |published| published.took.as_secs_f64());

        let path = checkpoints.path(progress.step);
        let manifest = world.all_ok(checkpoints.open(progress.step))?.manifest().clone();
        bytes = manifest.bytes();
        // Every rank reads its file into memory that is already mapped, as a restore does.
        let name = manifest.files.keys().nth(world.rank());
        let name = name.ok_or_else(|| Error::internal("a rank wrote no file"))?;
        let mut mine = vec![1; manifest.files[name].bytes as usize];
        let begun = begin(&world)?;
        world.all_ok(read(&path.join(name), &mut mine))?;
        times.raw_read = slowest(&world, begun)?;

        // The same bytes: disks may treat zeros specially.
        let file = directory.path().join(format!("raw-{}", world.rank()));
        let begun = begin(&world)?;
        world.all_ok(write(&file, &mine))?;
        times.raw_write = slowest(&world, begun)?;

        let mut copy = vec![2; mine.len()];
        let begun = begin(&world)?;
        copy.copy_from_slice(&mine);
        times.raw_copy = slowest(&world, begun)?;
        drop(std::hint::black_box(copy));

        let from = Resume::From(path);
        let begun = begin(&world)?;
        resume(
            &world,
            &mut engine.model.sharded,
            &plan,
            &directory,
            &from,
            &RestoreOptions::all(),
            &mut |_| Ok(()),
        )?;
        times.restore = slowest(&world, begun)?;
        world.all_ok(std::fs::remove_file(&file).map_err(|e| Error::io("remove", &file, e)))?;
        world.all_ok(if root {
            checkpoints.discard_all(&[progress.step]).map(drop)
        } else {
            Ok(())
        })?;
        if round > 0 {
            measured.push(times);
        }
    }
    world.all_ok(if root { clear(directory.path()) } else { Ok(()) })?;
    Ok((bytes, measured))
}

/// Removes a directory, if there is one.
fn clear(directory: &Path) -> Result<()> {
    match std::fs::remove_dir_all(directory) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io("remove", directory, e))
        }
        _ => Ok(()),
    }
}

/// Synchronizes all ranks and returns the current time.
fn begin<B: Kernels>(world: &Group<B>) -> Result<Instant> {
    world.barrier().wait()?;
    Ok(Instant::now())
}

/// Returns the seconds until the last rank is done.
fn slowest<B: Kernels>(world: &Group<B>, begun: Instant) -> Result<f64> {
    let mine = begun.elapsed().as_secs_f64();
    let all = world.gather_bytes(mine.to_le_bytes().to_vec()).wait()?;
    Ok(all
        .iter()
        .flat_map(|bytes| bytes.as_chunks().0)
        .map(|bytes| f64::from_le_bytes(*bytes))
        .fold(0.0, f64::max))
}

/// Writes a file and syncs it.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    File::create(path)
        .and_then(|mut file| {
            bytes.chunks(CHUNK).try_for_each(|chunk| file.write_all(chunk))?;
            file.sync_all()
        })
        .map_err(|e| Error::io("write", path, e))
}

/// Reads a file into mapped memory.
fn read(path: &Path, into: &mut [u8]) -> Result<()> {
    File::open(path)
        .and_then(|mut file| file.read_exact(into))
        .map_err(|e| Error::io("read", path, e))
}
