//! The in-memory checkpoints that a rank writes while it trains.
//!
//! Each rank copies the ranges that it would write to a checkpoint into one of its slots, unit by
//! unit, right after their update: they are in the cache then, and no message waits. A copy is
//! committed once all ranks have reported with the flags of a later step that theirs is whole. Only
//! then is a slot of an older step written again, so there is always a step of which every rank has
//! a whole copy.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::statvfs;

use super::disk::DiskCopies;
use super::node_directory::NodeDirectory;
use super::partner::PartnerCopies;
use super::slot::{BLOCK, Header, SlotPiece, SlotWriter};
use crate::Progress;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::fault;
use hpctrain_comm::Group;
use hpctrain_device::{Kernels, MemoryKind, format_bytes};
use hpctrain_parallel::{AllFlags, ControlFlags, Owned, Sharded, Values};

/// The most elements that a device copies to the host at once, a multiple of [`BLOCK`]: 4 MiB.
const DOWNLOAD: usize = 32 * BLOCK;

/// The job that takes in-memory checkpoints.
#[derive(Debug, Clone)]
pub struct MemoryJob {
    /// The directory on this node.
    pub node: NodeDirectory,
    /// Other directories on this node that earlier jobs of the run have used.
    pub earlier: Vec<NodeDirectory>,
    /// Directories on disks that earlier jobs have used, if `disk` is another one.
    pub earlier_on_disk: Vec<NodeDirectory>,
    /// The id of the run.
    pub run: String,
    /// The id of the job.
    pub job: String,
    /// The common part of all slots: a manifest without pieces.
    pub outline: Vec<u8>,
    /// The number of ranks on this node.
    pub ranks_here: usize,
    /// Whether this rank is the first one on its node.
    pub is_first_of_node: bool,
    /// The number of in-memory checkpoints that are kept.
    pub keep: usize,
    /// The partner of every rank, if there are several nodes.
    pub partners: Option<Vec<usize>>,
    /// The number of ranks of other nodes whose partners are on this node.
    pub foreign_ranks_here: usize,
    /// The directory on a disk of this node, and the steps between copies there.
    pub disk: Option<(NodeDirectory, u64)>,
}

impl MemoryJob {
    /// Returns the number of slots of a rank: one is written while others are kept and one is
    /// copied to the disk.
    fn slots(&self) -> usize {
        self.keep + 1 + usize::from(self.disk.is_some())
    }
}

/// The in-memory checkpoints of a rank.
pub struct MemoryCheckpoints<B: Kernels> {
    backend: B,
    node: NodeDirectory,
    /// Other directories on this node that earlier jobs of the run have used.
    earlier: Vec<NodeDirectory>,
    path: PathBuf,
    header: Header,
    is_first_of_node: bool,
    /// The slots so far.
    slots: Vec<SlotWriter>,
    /// The slots of the newest committed copies, oldest first, and how many are kept.
    kept: VecDeque<usize>,
    keep: usize,
    /// The slot of the copy that is written or pending.
    current: usize,
    /// Whether a copy is being written.
    is_writing: bool,
    /// The step of the last copy, until all ranks have reported that theirs is whole.
    pending: Option<u64>,
    /// Whether a copy was committed.
    has_committed: bool,
    /// Whether the first copy was committed in this round, so that another rank may not yet have
    /// removed the slots of earlier jobs.
    is_first_commit: bool,
    /// Whether the slots of earlier jobs in other directories are gone on all nodes.
    has_replaced_earlier: bool,
    /// Set once this rank could not write a copy.
    has_failed: bool,
    /// The copies on a disk, if there are some.
    disk: Option<DiskCopies>,
    /// Set once this rank could not write to the disk.
    has_failed_on_disk: bool,
    /// The exchange with partners, if there are several nodes.
    partner: Option<PartnerCopies<B>>,
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
        let place = (header.rank, job.is_first_of_node);
        let disk = job
            .disk
            .map(|(node, every)| {
                DiskCopies::new(node, &job.job, &job.outline, place, every, job.earlier_on_disk)
            })
            .transpose()?;
        let mut checkpoints = Self {
            backend: backend.clone(),
            node: job.node,
            earlier: job.earlier,
            path,
            is_first_of_node: job.is_first_of_node,
            slots: Vec::new(),
            kept: VecDeque::new(),
            keep: job.keep,
            current: 0,
            is_writing: false,
            pending: None,
            has_committed: false,
            is_first_commit: false,
            has_replaced_earlier: false,
            has_failed: false,
            has_failed_on_disk: false,
            partner: None,
            disk,
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
        let written = self.disk.as_mut().map_or(Ok(false), DiskCopies::is_written);
        let is_on_disk = written.unwrap_or_else(|e| {
            log::warn!(
                "rank {}: no more in-memory checkpoints are written to the disk: {}",
                self.header.rank,
                e.to_string().replace('\n', "; ")
            );
            // Without the flag of this rank the others begin no other copy there.
            self.has_failed_on_disk = true;
            false
        });
        let is_whole = self.pending.is_some() && is_done && !self.has_failed;
        ControlFlags::MEMORY_CHECKPOINT.when(is_whole)
            | ControlFlags::ON_DISK.when(is_on_disk && !self.has_failed_on_disk)
    }

    /// Receives the flags of all ranks. Called once per round.
    pub fn receive(&mut self, flags: &AllFlags) {
        let keeps_earlier = self.disk.as_ref().is_some_and(DiskCopies::has_earlier);
        if let Some(disk) = &mut self.disk
            && flags.all(ControlFlags::ON_DISK)
        {
            disk.commit();
        }
        self.is_first_commit = false;
        let Some(step) = self.pending else { return };
        if !flags.all(ControlFlags::MEMORY_CHECKPOINT) {
            return;
        }
        self.pending = None;
        self.kept.push_back(self.current);
        if self.kept.len() > self.keep {
            self.kept.pop_front();
        }
        // All nodes have removed slots with the flags of an earlier round.
        self.has_replaced_earlier |= self.has_committed && !keeps_earlier;
        self.is_first_commit = !std::mem::replace(&mut self.has_committed, true);
        if self.is_first_commit && self.is_first_of_node {
            self.node.remove_others(&self.header.job);
            self.earlier.iter().for_each(NodeDirectory::remove);
        }
        if let (Some(disk), Some(slot)) = (&mut self.disk, self.slots.get(self.current)) {
            disk.begin_if_due(step, self.current, slot.path());
        }
    }

    /// Begins a copy, unless the one before is not committed yet, which would leave no whole step,
    /// or the slots of earlier jobs may still take the memory of the next one. Returns whether it
    /// has begun.
    pub fn begin(&mut self) -> bool {
        if self.pending.is_some() || self.has_failed || self.is_first_commit {
            return false;
        }
        let locked = self.disk.as_ref().and_then(DiskCopies::locked);
        let is_free = |slot: &usize| !self.kept.contains(slot) && Some(*slot) != locked;
        // There is always a free one among the first `MemoryJob::slots`.
        self.current = (0..).find(is_free).unwrap_or(0);
        let ready = if self.current == self.slots.len() { self.add_slot() } else { Ok(()) };
        let ready = ready.and_then(|()| self.slots[self.current].begin());
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
        fault::point("copy");
        for values in std::iter::once(&owned.params).chain(&owned.state) {
            self.copy_values(values, owned.range.len())?;
        }
        self.spent += begun.elapsed();
        Ok(())
    }

    fn copy_values(&mut self, values: &Values<'_, B>, len: usize) -> Result<()> {
        let longest = if B::ON_HOST { BLOCK } else { DOWNLOAD };
        for first in (0..len).step_by(longest) {
            if self.has_failed {
                return Ok(());
            }
            let range = first..len.min(first + longest);
            let len = range.len();
            let slot = &mut self.slots[self.current];
            let values = values.slice(range);
            let appended = match values.on_host() {
                Some(elements) => slot.append_from(elements),
                None => {
                    values.read(slot.next(len))?;
                    slot.append(len)
                }
            };
            self.keep_error(appended);
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
        fault::point("copied");
        self.is_writing = false;
        self.pending = Some(progress.step);
        if !self.has_failed {
            let finished = self.slots[self.current].finish(progress);
            self.keep_error(finished);
        }
        if let Some(partner) = &mut self.partner {
            let slot = self.slots.get(self.current).filter(|_| !self.has_failed);
            let started = partner.start(self.current, slot);
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

    /// Returns true once the slots of earlier jobs in other directories are gone on all nodes.
    pub fn has_replaced_earlier(&self) -> bool {
        self.has_replaced_earlier
    }

    /// Returns the time of the copies since the last call, and their number.
    pub fn take_times(&mut self) -> (Duration, u32) {
        (std::mem::take(&mut self.spent), std::mem::take(&mut self.copies))
    }

    /// Waits until no thread writes a copy.
    pub fn abandon(&mut self) {
        self.disk.iter_mut().for_each(DiskCopies::abandon);
    }

    /// Removes all in-memory checkpoints of the run from this node. Called on every rank.
    pub fn remove(&mut self) {
        self.has_failed = true;
        if self.is_first_of_node {
            self.node.remove();
            self.earlier.iter().for_each(NodeDirectory::remove);
            self.disk.iter().for_each(DiskCopies::remove);
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
/// those of this one. Slots of earlier jobs are removed in time, in all directories.
fn check_room(job: &MemoryJob, header: &Header) -> Result<()> {
    let root = job.node.root();
    let free =
        statvfs(root).map(|found| found.f_bavail.saturating_mul(found.f_frsize)).map_err(|e| {
            let reason = std::io::Error::from(e);
            Error::input(format!("cannot find the free space of {}: {reason}", root.display()))
                .hint("set memory_checkpoint.dir to a directory that exists on every node")
        })?;
    let removed = job.node.bytes_with(&job.earlier);
    let needed = bytes_here(job, bytes(header));
    if needed <= free + removed {
        return Ok(());
    }
    let format = |bytes: u64| format_bytes(bytes as usize);
    let fewer = if job.keep > 1 { "memory_checkpoint.keep=1, or " } else { "" };
    Err(Error::input(format!(
        "{} has {} free, but the in-memory checkpoints of {} ranks need {}",
        root.display(),
        format(free + removed),
        job.ranks_here + job.foreign_ranks_here,
        format(needed)
    ))
    .hint(format!(
        "set {fewer}memory_checkpoint.dir to a larger file system, or remove [memory_checkpoint]"
    )))
}

/// Returns the bytes of all slots on this node, each of `bytes`: those of its ranks and of the
/// ranks of other nodes whose partners are here.
fn bytes_here(job: &MemoryJob, bytes: usize) -> u64 {
    ((job.ranks_here + job.foreign_ranks_here) * job.slots() * bytes) as u64
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn job(keep: usize, foreign_ranks_here: usize) -> MemoryJob {
        MemoryJob {
            node: NodeDirectory::new(&std::env::temp_dir(), Path::new("/runs/none")),
            earlier: vec![],
            earlier_on_disk: vec![],
            run: "run".into(),
            job: "job".into(),
            outline: vec![],
            ranks_here: 1,
            is_first_of_node: true,
            keep,
            partners: None,
            foreign_ranks_here,
            disk: None,
        }
    }

    #[test]
    fn slots_of_other_nodes_count_where_their_partners_are() {
        // Of two nodes with one and three ranks, the first keeps the slots of three others.
        assert_eq!(bytes_here(&job(1, 3), 10), (1 + 3) * 2 * 10);
        assert_eq!(bytes_here(&job(1, 0), 10), 2 * 10);
    }

    #[test]
    fn fewer_are_suggested_only_if_there_are_more_than_one() {
        let header = Header {
            run: "run".into(),
            job: "job".into(),
            rank: 0,
            ranks: 1,
            outline_crc32: 0,
            state: vec![],
            arrays: vec![1 << 50],
            pieces: vec![],
        };
        let advice = |keep| {
            let error = check_room(&job(keep, 0), &header).unwrap_err();
            error.advice().unwrap().to_string()
        };
        assert!(advice(2).contains("memory_checkpoint.keep=1"), "{}", advice(2));
        assert!(!advice(1).contains("keep=1"), "{}", advice(1));
    }
}
