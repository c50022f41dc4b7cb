//! The in-memory checkpoints that a rank writes while it trains.
//!
//! Each rank copies the ranges that it would write to a checkpoint into one of its slots, unit by
//! unit, right after their update: they are in the cache then, and no message waits. A copy is
//! committed once all ranks have reported with the flags of a later step that theirs is whole. Only
//! then is a slot of an older step written again, so there is always a step of which every rank has
//! a whole copy.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::statvfs;

use super::node_directory::NodeDirectory;
use super::partner::PartnerCopies;
use super::slot::{BLOCK, Header, SlotPiece, SlotWriter};
use crate::Progress;
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_device::{Kernels, MemoryKind, format_bytes};
use hpctrain_parallel::{AllFlags, ControlFlags, Owned, Sharded, Values};

/// The job that takes in-memory checkpoints.
#[derive(Debug, Clone)]
pub struct MemoryJob {
    /// The directory on this node.
    pub node: NodeDirectory,
    /// The id of the run.
    pub run: String,
    /// The id of the job.
    pub job: String,
    /// What all slots share, as a manifest without pieces.
    pub outline: Vec<u8>,
    /// The number of ranks on this node.
    pub ranks_here: usize,
    /// Whether this rank is the first one on its node.
    pub is_first_of_node: bool,
    /// The number of in-memory checkpoints that are kept.
    pub keep: usize,
    /// The partner of every rank, if there are several nodes.
    pub partners: Option<Vec<usize>>,
}

/// The in-memory checkpoints of a rank.
pub struct MemoryCheckpoints<B: Kernels> {
    backend: B,
    node: NodeDirectory,
    path: PathBuf,
    header: Header,
    is_first_of_node: bool,
    /// The slots so far, at most `most`.
    slots: Vec<SlotWriter>,
    most: usize,
    /// The slot of the next copy.
    next: usize,
    /// Whether a copy is being written.
    is_writing: bool,
    /// The step of the last copy, until all ranks have reported that theirs is whole.
    pending: Option<u64>,
    /// The step of the newest committed copy.
    committed: Option<u64>,
    /// Set once this rank could not write a copy.
    has_failed: bool,
    /// The exchange with partners, if there are several nodes.
    partner: Option<PartnerCopies<B>>,
    block: Vec<f32>,
    spent: Duration,
    copies: u32,
}

impl<B: Kernels> MemoryCheckpoints<B> {
    /// Creates the directory and the first slot of this rank, and writes the outline. Collective
    /// over `group`, which has all ranks and is used for nothing else.
    ///
    /// # Errors
    /// Returns an error, the same on all ranks, if the memory of a node does not suffice, or a file
    /// cannot be written.
    pub fn start(
        job: MemoryJob,
        group: Group<B>,
        backend: &B,
        sharded: &mut Sharded<B>,
    ) -> Result<Self> {
        let header = header(&job, &group, sharded);
        let header = header.and_then(|header| check_room(&job, &header).map(|()| header));
        // No rank allocates before all have measured the free memory.
        let header = group.all_ok(header)?;
        let partners = job.partners.clone();
        let mut started = group.all_ok(Self::create(job, header, backend))?;
        if let Some(partners) = partners {
            let len = started.slots[0].elements();
            let copies = PartnerCopies::new(group, backend, &started.path, &partners, len)?;
            started.partner = Some(copies);
        }
        Ok(started)
    }

    fn create(job: MemoryJob, header: Header, backend: &B) -> Result<Self> {
        let path = job.node.create_job(&job.job)?;
        if job.is_first_of_node {
            job.node.write_outline(&job.job, &job.outline)?;
        }
        let mut checkpoints = Self {
            backend: backend.clone(),
            node: job.node,
            path,
            is_first_of_node: job.is_first_of_node,
            slots: Vec::new(),
            most: job.keep + 1,
            next: 0,
            is_writing: false,
            pending: None,
            committed: None,
            has_failed: false,
            partner: None,
            block: vec![0.0; header.arrays.iter().copied().max().unwrap_or(0).min(BLOCK)],
            header,
            spent: Duration::ZERO,
            copies: 0,
        };
        checkpoints.add_slot()?;
        Ok(checkpoints)
    }

    /// Returns the flag that the last copy of this rank is whole, here and on its partner's node, if
    /// it is.
    pub fn flags(&mut self) -> ControlFlags {
        let begun = Instant::now();
        let exchanged = self.partner.as_mut().map_or(Ok(true), PartnerCopies::is_done);
        let is_done = exchanged.unwrap_or_else(|e| {
            self.keep_error(Err(e));
            false
        });
        self.spent += begun.elapsed();
        ControlFlags::MEMORY_CHECKPOINT.when(self.pending.is_some() && is_done && !self.has_failed)
    }

    /// Receives the flags of all ranks.
    pub fn receive(&mut self, flags: &AllFlags) {
        if let Some(step) = self.pending
            && flags.all(ControlFlags::MEMORY_CHECKPOINT)
        {
            self.pending = None;
            self.next = (self.next + 1) % self.most;
            if self.committed.replace(step).is_none() && self.is_first_of_node {
                self.node.remove_others(&self.header.job);
            }
        }
    }

    /// Begins a copy, unless the one before is not committed yet, which would leave no whole step.
    /// Returns whether it has begun.
    pub fn begin(&mut self) -> bool {
        if self.pending.is_some() || self.has_failed {
            return false;
        }
        let ready = if self.next == self.slots.len() { self.add_slot() } else { Ok(()) };
        let ready = ready.and_then(|()| self.slots[self.next].begin());
        self.keep_error(ready);
        // After an error the partners exchange slots all the same, since they do not know of it.
        self.is_writing = true;
        true
    }

    /// Copies the next part of the state. The order is that of [`Sharded::owned`].
    ///
    /// # Errors
    /// Returns an error if the device fails. A failure to write ends the in-memory checkpoints, not
    /// the run.
    pub fn copy(&mut self, owned: &Owned<'_, B>) -> Result<()> {
        let begun = Instant::now();
        for values in std::iter::once(&owned.params).chain(&owned.state) {
            self.copy_values(values, owned.range.len())?;
        }
        self.spent += begun.elapsed();
        Ok(())
    }

    fn copy_values(&mut self, values: &Values<'_, B>, len: usize) -> Result<()> {
        for first in (0..len).step_by(BLOCK) {
            if self.has_failed {
                return Ok(());
            }
            let range = first..len.min(first + BLOCK);
            let block = &mut self.block[..range.len()];
            values.slice(range).read(block)?;
            let written = self.slots[self.next].append(block);
            self.keep_error(written);
        }
        Ok(())
    }

    /// Returns true if a copy is being written.
    pub fn is_writing(&self) -> bool {
        self.is_writing
    }

    /// Completes the copy, which is that of the state after `progress`.
    pub fn finish(&mut self, progress: Progress) {
        let begun = Instant::now();
        self.is_writing = false;
        self.pending = Some(progress.step);
        if !self.has_failed {
            let finished = self.slots[self.next].finish(progress);
            self.keep_error(finished);
        }
        if let Some(partner) = &mut self.partner {
            let slot = self.slots.get(self.next).filter(|_| !self.has_failed);
            let started = partner.start(self.next, slot);
            self.keep_error(started);
        }
        self.spent += begun.elapsed();
        self.copies += 1;
    }

    /// Copies the whole state between two steps.
    ///
    /// # Errors
    /// Returns an error if the device fails, or an all-gather in flight does.
    pub fn copy_all(&mut self, sharded: &mut Sharded<B>, progress: Progress) -> Result<()> {
        if self.begin() {
            for owned in sharded.owned()? {
                self.copy(&owned)?;
            }
            self.finish(progress);
        }
        Ok(())
    }

    /// Returns the time of the copies since the last call, and their number.
    pub fn take_times(&mut self) -> (Duration, u32) {
        (std::mem::take(&mut self.spent), std::mem::take(&mut self.copies))
    }

    /// Returns the step of the newest copy that is known to be whole on all ranks.
    pub fn committed(&self) -> Option<u64> {
        self.committed
    }

    /// Removes all in-memory checkpoints of the run from this node. Called on every rank.
    pub fn remove(&mut self) {
        self.has_failed = true;
        if self.is_first_of_node {
            self.node.remove();
        }
    }

    /// Adds a slot.
    fn add_slot(&mut self) -> Result<()> {
        let name = format!("rank-{:05}.own.{}", self.header.rank, self.slots.len());
        self.slots.push(SlotWriter::create(&self.path.join(name), &self.header)?);
        self.backend.memory_stats().record_alloc(MemoryKind::MemoryCheckpoint, self.bytes());
        Ok(())
    }

    /// Returns the bytes of the elements of a slot.
    fn bytes(&self) -> usize {
        bytes(&self.header)
    }

    /// Gives up in-memory checkpoints after an error.
    fn keep_error(&mut self, done: Result<()>) {
        if let Err(e) = done {
            log::warn!(
                "rank {}: no more in-memory checkpoints are taken: {}",
                self.header.rank,
                e.to_string().replace('\n', "; ")
            );
            self.has_failed = true;
        }
    }
}

impl<B: Kernels> Drop for MemoryCheckpoints<B> {
    fn drop(&mut self) {
        let bytes = self.slots.len() * self.bytes();
        self.backend.memory_stats().record_free(MemoryKind::MemoryCheckpoint, bytes);
    }
}

fn bytes(header: &Header) -> usize {
    header.arrays.iter().sum::<usize>() * size_of::<f32>()
}

/// Returns the header of the slots of this rank.
fn header<B: Kernels>(
    job: &MemoryJob,
    group: &Group<B>,
    sharded: &mut Sharded<B>,
) -> Result<Header> {
    let state = sharded.state_names().into_iter().map(String::from).collect();
    let mut arrays = Vec::new();
    let mut pieces = Vec::new();
    let mut first = 0;
    for Owned { layout, range, state, .. } in sharded.owned()? {
        let parts = 1 + state.len();
        for piece in layout.pieces(range.clone()) {
            let Range { start, end } = piece.of_tensor;
            pieces.push(SlotPiece {
                tensor: piece.tensor.name.clone(),
                shape: piece.tensor.shape.clone(),
                columns: piece.columns,
                start,
                len: end - start,
                parts: (0..parts)
                    .map(|part| first + part * range.len() + piece.of_owned.start)
                    .collect(),
            });
        }
        arrays.extend(std::iter::repeat_n(range.len(), parts));
        first += parts * range.len();
    }
    Ok(Header {
        run: job.run.clone(),
        job: job.job.clone(),
        rank: group.rank(),
        ranks: group.size(),
        outline_crc32: crc32fast::hash(&job.outline),
        state,
        arrays,
        pieces,
    })
}

/// Checks that the file system has room for the slots of all ranks of this node, as if all had
/// those of this one. Slots of earlier jobs are removed in time.
fn check_room(job: &MemoryJob, header: &Header) -> Result<()> {
    let root = job.node.root();
    let free = statvfs(root)
        .map(|found| found.f_bavail.saturating_mul(found.f_frsize))
        .map_err(|e| Error::io("find the free space of", root, std::io::Error::from(e)))?;
    let removed: u64 = job
        .node
        .jobs()?
        .iter()
        .flat_map(|job_before| job.node.slots(job_before).unwrap_or_default())
        .filter_map(|slot| Some(slot.metadata().ok()?.len()))
        .sum();
    let copies = if job.partners.is_some() { 2 } else { 1 };
    let needed = (job.ranks_here * (job.keep + 1) * copies * bytes(header)) as u64;
    if needed <= free + removed {
        return Ok(());
    }
    let format = |bytes: u64| format_bytes(bytes as usize);
    Err(Error::input(format!(
        "{} has {} free, but the in-memory checkpoints of {} ranks need {}",
        root.display(),
        format(free + removed),
        job.ranks_here,
        format(needed)
    ))
    .hint(
        "set memory_checkpoint.keep=1, or memory_checkpoint.dir to a larger file system, or \
         memory_checkpoint.every=0",
    ))
}
