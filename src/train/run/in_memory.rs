//! The in-memory checkpoints of a run: their places, when they are taken, and their part in a step.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::shared_ids::{fresh_id, share};
use hpctrain_base::error::{Error, Result};
use hpctrain_checkpoint::memory::{
    MemoryCheckpoints, MemoryJob, NodeDirectory, NodeSlots, foreign_ranks, is_same_directory,
    partners,
};
use hpctrain_checkpoint::run_dir::{MemoryNote, Resume, RunDirectory};
use hpctrain_checkpoint::{Progress, SaveContext};
use hpctrain_comm::{Comm, Group};
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, CopyInterval, MemoryCheckpoint, ResolvedConfig};
use hpctrain_device::Kernels;
use hpctrain_engine::RoundObserver;
use hpctrain_parallel::{AllFlags, ControlFlags, Owned, Sharded};

/// The largest part of the time that copies take with `memory_checkpoint.every = auto`.
const AUTO_SHARE: f64 = 0.01;

/// The number of rounds after which the interval is measured for the first time, and after which it
/// is measured again.
const FIRST_ROUNDS: u64 = 8;
const ROUNDS: u64 = 256;

/// The in-memory checkpoints of a run on one rank.
pub(super) struct InMemory<B: Kernels> {
    checkpoints: MemoryCheckpoints<B>,
    /// The steps between copies.
    every: u64,
    is_auto: bool,
    /// Whether the flags of this round were received.
    has_received: bool,
    /// Rounds and their time since the interval was last measured.
    rounds: u64,
    time: Duration,
    /// The number of rounds after which it is measured.
    measured_after: u64,
    /// Whether the note has the directories of this start only.
    is_noted: bool,
}

/// The in-memory checkpoints of the run so far, as noted in its directory.
struct Noted {
    note: MemoryNote,
    /// The absolute path of the run.
    path: PathBuf,
}

impl Noted {
    /// Reads the note on rank 0. Collective over `world`.
    fn read<B: Kernels>(world: &Group<B>, directory: &RunDirectory) -> Result<Option<Self>> {
        let note = || {
            let Some(note) = directory.memory_note()? else { return Ok(String::new()) };
            serde_json::to_string(&(note, absolute(directory)?))
                .map_err(|e| Error::internal(format!("in-memory checkpoints: {e}")))
        };
        let text = share(world, (world.rank() == 0).then(note))?;
        if text.is_empty() {
            return Ok(None);
        }
        let (note, path): (MemoryNote, String) = serde_json::from_str(&text)
            .map_err(|e| Error::comm(format!("rank 0 sent a malformed note: {e}")))?;
        Ok(Some(Self { note, path: path.into() }))
    }
}

/// Returns the absolute path of a run.
fn absolute(directory: &RunDirectory) -> Result<String> {
    let path = directory.path();
    let path = std::fs::canonicalize(path).map_err(|e| Error::io("find", path, e))?;
    Ok(path.to_string_lossy().into_owned())
}

/// Returns the step and the configuration of the newest in-memory checkpoint of the run on this
/// node, whole or not; `None` if there is none. Collective over `world`.
///
/// # Errors
/// Returns an error, the same on all ranks, if the note in the directory cannot be read.
pub(super) fn config_before<B: Kernels>(
    world: &Group<B>,
    directory: &RunDirectory,
) -> Result<Option<(u64, Config)>> {
    let Some(Noted { note, path }) = Noted::read(world, directory)? else { return Ok(None) };
    let outlines = note
        .directories
        .iter()
        .filter_map(|root| NodeDirectory::new(Path::new(root), &path).newest_outline(&note.id));
    let newest = outlines.max_by_key(|outline| outline.step);
    Ok(newest.map(|outline| (outline.step, outline.config)))
}

/// Returns the bytes of the run's in-memory checkpoints in the memory of this node, which those of
/// this start replace. Collective over `world`.
///
/// # Errors
/// Returns an error, the same on all ranks, if the note in the directory cannot be read.
pub(crate) fn bytes_before<B: Kernels>(
    world: &Group<B>,
    settings: &MemoryCheckpoint,
    run: &Path,
) -> Result<usize> {
    if !settings.every.is_on() {
        return Ok(0);
    }
    let (noted, run) = match Noted::read(world, &RunDirectory::at(run))? {
        Some(Noted { note, path }) => (note.directories, path),
        // Slots of a run whose directory was removed.
        None => (vec![], std::fs::canonicalize(run).unwrap_or_default()),
    };
    let node = NodeDirectory::new(Path::new(&settings.dir), &run);
    let all = others(settings, &noted, &run);
    let in_memory = std::iter::once(&node).chain(&all).filter(|one| one.is_in_memory());
    Ok(in_memory.map(NodeDirectory::bytes).sum::<u64>() as usize)
}

/// Returns the directories of these settings.
fn directories_now(settings: &MemoryCheckpoint) -> Vec<&str> {
    std::iter::once(&settings.dir).chain(&settings.disk_dir).map(|dir| &dir[..]).collect()
}

/// Checks that copies on the disk do not replace the slots in memory.
fn check_disk(settings: &MemoryCheckpoint) -> Result<()> {
    let MemoryCheckpoint { dir, disk_dir: Some(disk), .. } = settings else { return Ok(()) };
    if !is_same_directory(Path::new(dir), Path::new(disk)) {
        return Ok(());
    }
    Err(Error::input(format!(
        "memory_checkpoint.disk_dir = {disk} is the same directory as memory_checkpoint.dir = {dir}"
    ))
    .hint("set memory_checkpoint.disk_dir to a directory on a local disk, or remove it"))
}

/// Returns the noted directories that are not those of these settings on this node.
fn others(settings: &MemoryCheckpoint, noted: &[String], run: &Path) -> Vec<NodeDirectory> {
    let node = |dir: &str| NodeDirectory::new(Path::new(dir), run);
    let now: Vec<NodeDirectory> = directories_now(settings).into_iter().map(node).collect();
    NodeDirectory::others(noted.iter().map(|dir| node(dir)).collect(), &now)
}

/// Returns the place of the run's in-memory checkpoints: those it takes, and if it resumes also
/// those it has taken so far. A run that does not resume removes those of earlier runs in its
/// directory. Collective over `world`.
///
/// # Errors
/// Returns an error, the same on all ranks, if the run has no absolute path or no id, or the
/// directory on the disk is the one in memory.
pub(super) fn node_slots<B: Kernels>(
    world: &Group<B>,
    plan: &ResolvedConfig,
    topology: &Topology,
    directory: &RunDirectory,
    resume: &Resume,
) -> Result<Option<NodeSlots>> {
    let MemoryCheckpoint { every, dir, disk_dir, .. } = &plan.config.memory_checkpoint;
    let is_on = every.is_on();
    world.all_ok(check_disk(&plan.config.memory_checkpoint))?;
    let is_fresh = *resume != Resume::Auto;
    let before = Noted::read(world, directory)?;
    let noted = before.as_ref().map_or(vec![], |noted| noted.note.directories.clone());
    let now = directories_now(&plan.config.memory_checkpoint);
    let (path, run) = if is_on {
        let root = world.rank() == 0;
        let path = share(world, root.then(|| absolute(directory)))?;
        let note = || Ok(directory.note_memory(is_fresh, &fresh_id(), &now)?.id);
        (PathBuf::from(path), share(world, root.then(note))?)
    } else if let Some(Noted { note, path }) = before {
        (path, note.id)
    } else {
        return Ok(None);
    };
    let node = |dir: &str| NodeDirectory::new(Path::new(dir), &path);
    let (earlier, earlier_on_disk) = others(&plan.config.memory_checkpoint, &noted, &path)
        .into_iter()
        .partition(|one| disk_dir.is_none() || one.is_in_memory());
    let host = topology.here().host.clone();
    let index = (0..world.rank()).filter(|rank| topology.host(*rank) == host).count();
    let here = NodeSlots {
        node: node(dir),
        disk: disk_dir.as_deref().map(node),
        earlier,
        earlier_on_disk,
        run,
        host,
        share: [index, topology.ranks_here()],
    };
    if is_fresh {
        remove(world, directory, &here, !is_on);
    }
    Ok(Some(here).filter(|_| is_on || !is_fresh))
}

/// Removes the in-memory checkpoints in all directories, and if `is_last` the note of them. Called
/// on every rank.
pub(super) fn remove<B: Kernels>(
    world: &Group<B>,
    directory: &RunDirectory,
    here: &NodeSlots,
    is_last: bool,
) {
    if here.share[0] == 0 {
        here.remove();
    }
    if is_last && world.rank() == 0 {
        let removed = directory.without_memory_checkpoints();
        // The next start looks for them once more.
        removed.unwrap_or_else(|e| log::warn!("{}", e.message()));
    }
}

impl<B: Kernels> InMemory<B> {
    /// Begins to take in-memory checkpoints. Collective over the world of `comm`.
    ///
    /// # Errors
    /// Returns an error, the same on all ranks, if the memory of a node does not suffice.
    pub fn start(
        here: NodeSlots,
        comm: &Comm<B>,
        plan: &ResolvedConfig,
        topology: &Topology,
        job: &SaveContext,
        backend: &B,
        sharded: &mut Sharded<B>,
    ) -> Result<Self> {
        let [index, ranks_here] = here.share;
        let settings = &plan.config.memory_checkpoint;
        let world = comm.world();
        // The time in it, and keys of single ranks, differ between ranks.
        let outline = world.all_ok(job.outline(sharded.layouts()))?;
        let outline = world.broadcast_bytes(outline).wait()?;
        let job = MemoryJob {
            node: here.node,
            earlier: here.earlier,
            earlier_on_disk: here.earlier_on_disk,
            run: here.run,
            job: job.id.clone(),
            outline,
            ranks_here,
            is_first_of_node: index == 0,
            keep: settings.keep,
            partners: partners(&topology.hosts()),
            foreign_ranks_here: foreign_ranks(&topology.hosts(), &topology.here().host),
            disk: here.disk.map(|disk| (disk, settings.disk_every)),
        };
        let group = comm.split(&vec![0; comm.size()])?.named("memory checkpoints");
        let checkpoints = MemoryCheckpoints::start(job, group, backend, sharded)?;
        let (every, is_auto) = match settings.every {
            CopyInterval::Steps(steps) => (steps, false),
            CopyInterval::Auto => (1, true),
        };
        Ok(Self {
            checkpoints,
            every,
            is_auto,
            has_received: false,
            rounds: 0,
            time: Duration::ZERO,
            measured_after: FIRST_ROUNDS,
            is_noted: false,
        })
    }

    /// Returns the flags of this rank.
    pub fn flags(&mut self) -> ControlFlags {
        self.checkpoints.flags()
    }

    /// Receives the flags of all ranks, and begins a copy of the state after step `step` if one is
    /// due. Returns whether it has begun.
    pub fn begin(&mut self, plan: &ResolvedConfig, step: u64, flags: &AllFlags) -> bool {
        self.checkpoints.receive(flags);
        self.has_received = true;
        // Processes that join begin with a copy of the step after which they do.
        let is_due = plan.is_due(self.every, step) || flags.any(ControlFlags::JOIN);
        is_due && self.checkpoints.begin()
    }

    /// Copies the next part of the state.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn copy(&mut self, owned: &Owned<'_, B>) -> Result<()> {
        self.checkpoints.copy(owned)
    }

    /// Completes the copy of a round. If the update of the round was not observed, because it was
    /// followed by an average, all of the state is copied now. A round that ends with a skipped
    /// update is not copied: a run that only skips would otherwise continue from such a round.
    ///
    /// # Errors
    /// Returns an error if the device fails, or an all-gather in flight does.
    pub fn end_round(
        &mut self,
        plan: &ResolvedConfig,
        sharded: &mut Sharded<B>,
        progress: Progress,
        flags: &AllFlags,
        is_skipped: bool,
    ) -> Result<()> {
        let has_received = std::mem::take(&mut self.has_received);
        if self.checkpoints.is_writing() {
            self.checkpoints.finish(progress);
            return Ok(());
        }
        // Flags that count twice would commit a copy that has begun with them.
        if !has_received {
            self.checkpoints.receive(flags);
        }
        if !is_skipped && plan.is_due(self.every, progress.step) {
            self.checkpoints.copy_all(sharded, progress)?;
        }
        Ok(())
    }

    /// Removes directories whose slots are gone from the note, so that the next start does not look
    /// there. Called on rank 0.
    pub fn update_note(&mut self, plan: &ResolvedConfig, directory: &RunDirectory) {
        if self.is_noted || !self.checkpoints.has_replaced_earlier() {
            return;
        }
        self.is_noted = true;
        let now = directories_now(&plan.config.memory_checkpoint);
        let noted = directory.note_memory_only(&now);
        noted.unwrap_or_else(|e| log::warn!("{}", e.message()));
    }

    /// Notes that a round took this long; with `every = auto` all ranks agree on the interval from
    /// time to time. Collective over `world`.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn note_round(&mut self, world: &Group<B>, steps: u64, time: Duration) -> Result<()> {
        if !self.is_auto {
            return Ok(());
        }
        self.rounds += 1;
        self.time += time;
        if self.rounds < self.measured_after {
            return Ok(());
        }
        let (copying, copies) = self.checkpoints.take_times();
        let copy = copying.as_secs_f64() / f64::from(copies.max(1));
        let others = self.time.saturating_sub(copying).as_secs_f64();
        let needed = interval(copy, others / (self.rounds * steps.max(1)) as f64, AUTO_SHARE);
        (self.rounds, self.time, self.measured_after) = (0, Duration::ZERO, ROUNDS);
        let all = world.all_gather_u64(&[needed])?;
        let every = all.into_iter().flatten().max().unwrap_or(1);
        if every != self.every && world.rank() == 0 {
            log::info!("an in-memory checkpoint is taken every {every} steps");
        }
        self.every = every;
        Ok(())
    }

    /// Waits until no thread writes a copy.
    pub fn abandon(&mut self) {
        self.checkpoints.abandon();
    }

    /// Removes all in-memory checkpoints of the run. Called on every rank.
    pub fn remove(&mut self) {
        self.checkpoints.remove();
    }
}

/// Returns the smallest number of steps of `step` seconds each, to which a copy of `copy` seconds
/// adds at most the part `share`.
fn interval(copy: f64, step: f64, share: f64) -> u64 {
    let steps = copy / (share * step).max(f64::MIN_POSITIVE);
    (steps.ceil() as u64).clamp(1, 10_000)
}

/// The part of a rank in a round: its flags, and the copies for in-memory checkpoints.
pub(super) struct RunObserver<'a, B: Kernels> {
    pub plan: &'a ResolvedConfig,
    /// The flags of this rank but for those of in-memory checkpoints.
    pub flags: &'a mut dyn FnMut() -> ControlFlags,
    pub in_memory: Option<&'a mut InMemory<B>>,
}

impl<B: Kernels> RoundObserver<B> for RunObserver<'_, B> {
    fn flags(&mut self) -> ControlFlags {
        let of_copies = self.in_memory.as_mut().map_or(ControlFlags::empty(), |one| one.flags());
        (self.flags)() | of_copies
    }

    fn observes(&mut self, step: u64, flags: &AllFlags) -> bool {
        self.in_memory.as_mut().is_some_and(|one| one.begin(self.plan, step, flags))
    }

    fn updated(&mut self, owned: Owned<'_, B>) -> Result<()> {
        self.in_memory.as_mut().map_or(Ok(()), |one| one.copy(&owned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_keeps_copies_below_their_share() {
        // A step of 100 ms with a copy of 5 ms, and one with a copy that takes nearly no time.
        assert_eq!(interval(0.005, 0.1, 0.01), 5);
        assert_eq!(interval(0.0, 0.1, 0.01), 1);
        assert_eq!(interval(0.0009, 0.1, 0.01), 1);
        assert_eq!(interval(1.0, 0.5, 0.01), 200);
        assert_eq!(interval(1.0, 0.001, 0.01), 10_000);
    }
}
