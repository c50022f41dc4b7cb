//! Host-staged communication: device memory goes through pinned host memory.
//!
//! A collective is divided into chunks of one [`Slot`]. While the ranks exchange one chunk on the
//! host, the device copies the next one to its slot and the previous one from its slot. All ranks
//! make the same chunks.
//!
//! Sums do not depend on the chunks. Algorithms that add in a tree have the same order for every
//! element. In a ring, where the order follows from the owner of an element, every element of a
//! chunk keeps the owner that it has in the whole buffer.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::algorithms;
use crate::algorithms::{Algorithm, Call, Operation, UnequalCollective};
use crate::polling;
use crate::reduce_buffer::{HostBuffer, Scratch};
use crate::shared::Shared;
use crate::transport::{GroupRanks, P2pBuffer, Payload, Peer, Transport};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{DeviceCopies, DeviceSpan, Slot, SpanAtOffset};

/// Words of a slot, 4 MiB: enough for copies to and from a GPU to reach full bandwidth, without
/// flushing all of the host's caches.
pub const WORDS: usize = 1 << 20;

/// Chunks in flight in a collective: one is filled, one exchanged, one emptied.
const DEPTH: usize = 3;

/// Bytes of pinned memory that a collective needs.
pub const BYTES: usize = DEPTH * WORDS * size_of::<f32>();

/// A pool of pinned slots for one device. Messages in flight hold slots, so the pool grows to as
/// many as were ever in use at once.
pub struct Slots {
    free: Mutex<Vec<(usize, Slot)>>,
    shared: Arc<Shared>,
}

impl Slots {
    /// Creates an empty pool. `shared` counts its growth.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { free: Mutex::default(), shared }
    }

    /// Takes a slot of `words` words from the pool, or allocates it.
    fn take(self: &Arc<Self>, copies: &dyn DeviceCopies, words: usize) -> Result<SlotGuard> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let found = free.iter().position(|(len, _)| *len == words).map(|i| free.swap_remove(i).1);
        drop(free);
        let slot = match found {
            Some(slot) => slot,
            None => {
                let slot = Slot::new(copies, words)?;
                self.shared.add_staging(words * size_of::<f32>());
                slot
            }
        };
        Ok(SlotGuard { slot: Some(slot), words, home: self.clone() })
    }
}

/// A slot in use. It returns to the pool when dropped.
pub struct SlotGuard {
    /// The slot; taken only by `drop` and `leak`.
    slot: Option<Slot>,
    words: usize,
    home: Arc<Slots>,
}

impl SlotGuard {
    fn slot(&mut self) -> Result<&mut Slot> {
        self.slot.as_mut().ok_or_else(|| Error::internal("use of a slot that was returned"))
    }

    /// Waits for the slot's copy, while progressing messages.
    fn settle(&mut self, transport: &mut dyn Transport) -> Result<()> {
        match self.slot.as_ref().and_then(Slot::copy) {
            Some(copy) => polling::wait_for_event(copy, transport, &self.home.shared),
            None => Ok(()),
        }
    }

    /// Waits for the slot's copy and returns its first `words` words.
    pub fn memory(&mut self, words: usize) -> Result<&mut [f32]> {
        Ok(&mut self.slot()?.memory()?[..words])
    }

    /// Copies the slot's first words to the device and waits for the copy.
    pub fn upload(&mut self, copies: &dyn DeviceCopies, to: DeviceSpan<'_>) -> Result<()> {
        self.slot()?.upload(copies, &[(to, 0)])?;
        self.memory(0).map(drop)
    }

    /// Leaks the memory, because the network may still use it.
    pub fn leak(&mut self) {
        std::mem::forget(self.slot.take());
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        // After an error a copy may still be in flight, to memory that is about to be returned.
        if let Some(mut slot) = self.slot.take()
            && slot.memory().is_ok()
        {
            self.home.free.lock().unwrap_or_else(PoisonError::into_inner).push((self.words, slot));
        }
    }
}

/// The part of a buffer that goes through one slot: ranges of words, in the order of the slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunk(pub Vec<Range<usize>>);

impl Chunk {
    /// Returns the number of words.
    pub fn words(&self) -> usize {
        self.0.iter().map(Range::len).sum()
    }

    /// Returns the chosen ranges and their offsets in the slot. Adjacent ranges are merged.
    fn pieces<'a>(
        &self,
        memory: DeviceSpan<'a>,
        chosen: impl Fn(usize) -> bool,
    ) -> Vec<SpanAtOffset<'a>> {
        let mut found: Vec<(Range<usize>, usize)> = Vec::with_capacity(self.0.len());
        let mut at = 0;
        for (i, range) in self.0.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
            if chosen(i) {
                match found.last_mut() {
                    Some((last, start)) if last.end == range.start && *start + last.len() == at => {
                        last.end = range.end
                    }
                    _ => found.push((range.clone(), at)),
                }
            }
            at += range.len();
        }
        found.into_iter().map(|(range, at)| (memory.part(range), at)).collect()
    }
}

/// Divides a buffer into consecutive chunks.
fn consecutive(words: usize, slot: usize) -> Vec<Chunk> {
    (0..words)
        .step_by(slot)
        .map(|start| Chunk(std::iter::once(start..words.min(start + slot)).collect()))
        .collect()
}

/// Returns the chunks of a collective on `words` words.
pub(super) fn cut(call: Call, words: usize, ranks: usize, slot: usize) -> Vec<Chunk> {
    match (call.operation, call.algorithm) {
        (Operation::ReduceScatter | Operation::AllGather, _) => {
            windows(vec![algorithms::Shares::even(&(0..words), ranks)], ranks, slot)
        }
        // The order of an element's additions depends on the rank that owns it in its block.
        (Operation::AllReduce | Operation::Reduce, Algorithm::Ring) => {
            let blocks = algorithms::blocks(0..words, ranks).map(|(_, shares)| shares);
            windows(blocks.collect(), ranks, slot)
        }
        (Operation::AllReduce | Operation::Reduce | Operation::Broadcast, _) => {
            consecutive(words, slot)
        }
    }
}

/// Divides blocks into chunks that have an equal window of every rank's share.
fn windows(blocks: Vec<algorithms::Shares>, ranks: usize, slot: usize) -> Vec<Chunk> {
    let window = slot / ranks;
    let windows = blocks.into_iter().flat_map(|shares| {
        let longest = shares.longest();
        (0..longest)
            .step_by(window)
            .map(move |start| shares.window(&(start..longest.min(start + window))))
    });
    windows
        .map(|shares| Chunk((0..ranks).flat_map(|rank| shares.ranges(rank).to_vec()).collect()))
        .collect()
}

/// Returns true if a collective reads a rank's own memory in the share of rank `part`.
fn is_input(call: Call, rank: usize, part: usize) -> bool {
    match call.operation {
        Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter => true,
        Operation::AllGather => part == rank,
        Operation::Broadcast => rank == call.root,
    }
}

/// Returns true if a collective changes a rank's own memory in the share of rank `part`.
fn is_output(call: Call, rank: usize, part: usize) -> bool {
    match call.operation {
        Operation::AllReduce => true,
        Operation::Reduce => rank == 0,
        Operation::ReduceScatter => part == rank,
        Operation::AllGather => part != rank,
        Operation::Broadcast => rank != call.root,
    }
}

/// The resources of host-staged communication.
pub struct PinnedStaging<'a> {
    pub copies: &'a dyn DeviceCopies,
    pub slots: &'a Arc<Slots>,
    /// Words of a slot.
    pub words: usize,
}

impl PinnedStaging<'_> {
    /// Runs a collective on device memory.
    pub fn collective(
        &self,
        call: Call,
        memory: DeviceSpan<'_>,
        transport: &mut dyn Transport,
        scratch: &mut Scratch,
        group: &GroupRanks,
    ) -> Result<()> {
        let words = self.words.max(group.size());
        let chunks = cut(call, memory.words(), group.size(), words);
        let rank = group.rank;
        self.chunk_by_chunk(
            &chunks,
            memory,
            transport,
            (|part| is_input(call, rank, part), |part| is_output(call, rank, part)),
            |_, transport, memory| {
                algorithms::run(call, &mut HostBuffer { memory, scratch }, transport, group)
            },
        )
    }

    /// Runs a collective of unequal parts on device memory.
    pub fn unequal(
        &self,
        collective: &UnequalCollective,
        memory: DeviceSpan<'_>,
        transport: &mut dyn Transport,
        scratch: &mut Scratch,
        group: &GroupRanks,
    ) -> Result<()> {
        let rank = group.rank;
        let ranks = group.size();
        let (chunks, windows): (Vec<_>, Vec<_>) = collective
            .windows(rank, self.words)
            .into_iter()
            .map(|(ranges, window)| (Chunk(ranges), window))
            .unzip();
        let adds = collective.terms.is_some();
        let gathered = collective.gathered(rank);
        let is_output =
            |index: usize| index < ranks && gathered.contains(&index) && (adds || index != rank);
        self.chunk_by_chunk(
            &chunks,
            memory,
            transport,
            (|index| adds || index == rank, is_output),
            |chunk, transport, memory| {
                windows[chunk].run(&mut HostBuffer { memory, scratch }, transport, group)
            },
        )
    }

    /// Copies each chunk of device memory to a slot, where `run(chunk, transport, slot)` exchanges
    /// it, and back, overlapped. `copied` says which ranges of a chunk, by their indices, are copied
    /// to the slot and which from it.
    fn chunk_by_chunk(
        &self,
        chunks: &[Chunk],
        memory: DeviceSpan<'_>,
        transport: &mut dyn Transport,
        copied: (impl Fn(usize) -> bool, impl Fn(usize) -> bool),
        mut run: impl FnMut(usize, &mut dyn Transport, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let words = chunks.iter().map(Chunk::words).max().unwrap_or(0).max(self.words);
        let inputs = |chunk: &Chunk| chunk.pieces(memory, &copied.0);
        let mut slots = (0..chunks.len().min(DEPTH))
            .map(|_| self.slots.take(self.copies, words))
            .collect::<Result<Vec<_>>>()?;
        if let (Some(first), Some(chunk)) = (slots.first_mut(), chunks.first()) {
            first.slot()?.download(self.copies, &inputs(chunk))?;
        }
        for (k, chunk) in chunks.iter().enumerate() {
            if let Some(following) = chunks.get(k + 1) {
                let next = &mut slots[(k + 1) % DEPTH];
                next.settle(transport)?;
                next.slot()?.download(self.copies, &inputs(following))?;
            }
            let here = &mut slots[k % DEPTH];
            here.settle(transport)?;
            run(k, transport, here.memory(chunk.words())?)?;
            here.slot()?.upload(self.copies, &chunk.pieces(memory, &copied.1))?;
        }
        slots.iter_mut().try_for_each(|slot| slot.settle(transport))
    }

    /// Starts to send device memory. Returns when the memory may be written again.
    pub fn send(
        &self,
        memory: DeviceSpan<'_>,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        to: usize,
    ) -> Result<()> {
        let chunks = consecutive(memory.words(), self.words);
        let mut slots = Vec::with_capacity(chunks.len());
        for chunk in &chunks {
            let mut slot = self.slots.take(self.copies, self.words)?;
            slot.slot()?.download(self.copies, &chunk.pieces(memory, |_| true))?;
            slots.push(slot);
        }
        for (mut slot, chunk) in slots.into_iter().zip(&chunks) {
            slot.settle(transport)?;
            transport.post(
                group,
                Peer::To(to),
                Box::new(StagedSend { slot, words: chunk.words() }),
            )?;
        }
        Ok(())
    }

    /// Returns slots to receive a message of [`PinnedStaging::send`], each with its range of the
    /// memory.
    pub fn chunks_to_fill(&self, memory: DeviceSpan<'_>) -> Result<Vec<(SlotGuard, Range<usize>)>> {
        let words = memory.words();
        let chunks = (0..words).step_by(self.words).map(|start| {
            let slot = self.slots.take(self.copies, self.words)?;
            Ok((slot, start..words.min(start + self.words)))
        });
        chunks.collect()
    }
}

/// A slot that is being sent to another rank.
struct StagedSend {
    slot: SlotGuard,
    words: usize,
}

impl P2pBuffer for StagedSend {
    fn payload(&mut self) -> Result<Payload<'_>> {
        Ok(Payload::Host(bytemuck::cast_slice_mut(self.slot.memory(self.words)?)))
    }

    fn finish(self: Box<Self>, _: Result<()>) {
        // The sender already has its buffer; after a failure its next request fails.
    }

    fn abandon(mut self: Box<Self>, _: Error) {
        self.slot.leak();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(operation: Operation, algorithm: Algorithm) -> Call {
        Call { operation, algorithm, root: 0 }
    }

    fn chunks(call: Call, words: usize, ranks: usize, slot: usize) -> Vec<Vec<Range<usize>>> {
        cut(call, words, ranks, slot).into_iter().map(|chunk| chunk.0).collect()
    }

    #[test]
    fn chunks_keep_every_rank_its_part() {
        let gather = call(Operation::AllGather, Algorithm::HalvingDoubling);
        assert_eq!(chunks(gather, 10, 2, 7), [vec![0..3, 5..8], vec![3..5, 8..10]]);
        let ring = call(Operation::AllReduce, Algorithm::Ring);
        assert_eq!(chunks(ring, 8, 3, 6), [vec![0..2, 3..5, 6..8], vec![2..3, 5..6, 8..8]]);
        let tree = call(Operation::AllReduce, Algorithm::HalvingDoubling);
        assert_eq!(chunks(tree, 10, 2, 6).concat(), [0..6, 6..10]);
        assert!(chunks(tree, 0, 2, 6).is_empty() && chunks(gather, 0, 2, 6).is_empty());
    }

    /// The host divides a chunk evenly: the parts must be those of the whole buffer.
    #[test]
    fn a_chunk_is_an_even_cut_of_itself() {
        for (words, ranks, slot) in [(8, 3, 6), (1000, 7, 50), (999, 4, 4), (5, 4, 100)] {
            for chunk in chunks(call(Operation::AllReduce, Algorithm::Ring), words, ranks, slot) {
                let lens: Vec<_> = chunk.iter().map(Range::len).collect();
                let total: usize = chunk.iter().map(Range::len).sum();
                let even = algorithms::Shares::even(&(0..total), ranks);
                assert_eq!(
                    lens,
                    (0..ranks).map(|rank| even.ranges(rank)[0].len()).collect::<Vec<_>>()
                );
                assert!(total <= slot);
            }
        }
    }
}
