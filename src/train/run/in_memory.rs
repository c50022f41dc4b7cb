//! The in-memory checkpoints of a run: their places, when they are taken, and their part in a step.

use std::path::Path;
use std::time::Duration;

use super::shared_ids::{fresh_id, share};
use hpctrain_base::error::{Error, Result};
use hpctrain_checkpoint::memory::{
    MemoryCheckpoints, MemoryJob, NodeDirectory, NodeSlots, partners,
};
use hpctrain_checkpoint::run_dir::{Resume, RunDirectory};
use hpctrain_checkpoint::{Progress, SaveContext};
use hpctrain_comm::{Comm, Group};
use hpctrain_config::topology::Topology;
use hpctrain_config::{CopyInterval, ResolvedConfig};
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
    /// Rounds and their time since the interval was last measured.
    rounds: u64,
    time: Duration,
    /// The number of rounds after which it is measured.
    measured_after: u64,
}

/// Returns the place of the run's in-memory checkpoints, if it takes some. A run that does not
/// resume removes those of earlier runs in its directory. Collective over `world`.
///
/// # Errors
/// Returns an error, the same on all ranks, if the run has no absolute path or no id.
pub(super) fn node_slots<B: Kernels>(
    world: &Group<B>,
    plan: &ResolvedConfig,
    topology: &Topology,
    directory: &RunDirectory,
    resume: &Resume,
) -> Result<Option<NodeSlots>> {
    let settings = &plan.config.memory_checkpoint;
    let root = world.rank() == 0;
    if !settings.every.is_on() {
        let noted = if root { directory.without_memory_checkpoints() } else { Ok(()) };
        return world.all_ok(noted).map(|()| None);
    }
    let path = || {
        let path = directory.path();
        let path = std::fs::canonicalize(path).map_err(|e| Error::io("find", path, e))?;
        Ok(path.to_string_lossy().into_owned())
    };
    let path = share(world, root.then(path))?;
    let is_fresh = *resume != Resume::Auto;
    let run = share(world, root.then(|| directory.memory_id(is_fresh, &fresh_id())))?;
    let host = topology.here().host.clone();
    let before = (0..world.rank()).filter(|rank| topology.host(*rank) == host).count();
    let node = |dir: &String| NodeDirectory::new(Path::new(dir), Path::new(&path));
    let here = NodeSlots {
        node: node(&settings.dir),
        disk: settings.disk_dir.as_ref().map(node),
        run,
        host,
        share: [before, topology.ranks_here()],
    };
    if is_fresh && before == 0 {
        here.remove();
    }
    Ok(Some(here))
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
            run: here.run,
            job: job.id.clone(),
            outline,
            ranks_here,
            is_first_of_node: index == 0,
            keep: settings.keep,
            partners: partners(&topology.hosts()),
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
            rounds: 0,
            time: Duration::ZERO,
            measured_after: FIRST_ROUNDS,
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
        plan.is_due(self.every, step) && self.checkpoints.begin()
    }

    /// Copies the next part of the state.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn copy(&mut self, owned: &Owned<'_, B>) -> Result<()> {
        self.checkpoints.copy(owned)
    }

    /// Completes the copy of a round. If the update of the round was not observed, because it was
    /// skipped or followed by an average, all of the state is copied now.
    ///
    /// # Errors
    /// Returns an error if the device fails, or an all-gather in flight does.
    pub fn end_round(
        &mut self,
        plan: &ResolvedConfig,
        sharded: &mut Sharded<B>,
        progress: Progress,
        flags: &AllFlags,
    ) -> Result<()> {
        if self.checkpoints.is_writing() {
            self.checkpoints.finish(progress);
            return Ok(());
        }
        self.checkpoints.receive(flags);
        if plan.is_due(self.every, progress.step) {
            self.checkpoints.copy_all(sharded, progress)?;
        }
        Ok(())
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
