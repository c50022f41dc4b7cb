//! Sums in the order of the tree by messages of all ranks at once, for a library that carries many of them in one go (NCCL).
//!
//! Of each chunk of the buffer a rank owns an even share. It receives the share's terms from all other ranks in one group of messages,
//! adds them by one kernel in the order of [`Algorithm::Tree`], and sends the sum to all others in the next group, which also carries
//! the terms of the next chunk. So k chunks take k + 1 groups, and each rank sends 2·(n−1)/n of the buffer, the least possible. The
//! device has all of it in order in one stream: the host waits for messages to be queued, and for the device only at the end.
//!
//! The sum of an element is that of [`algorithms`](crate::comm::algorithms) bit for bit: the same terms in the same tree.

use std::ops::Range;

use super::comms::GroupComm;
use super::direct::Places;
use crate::backend::{DeviceCopies, FOLDED, Span};
use crate::comm::algorithms::{Algorithm, Call, Operation, Shares};
use crate::comm::wire::{Members, Wire};
use crate::error::{Error, Result};

/// Slots of staged messages in a chunk, which so has 32 MiB: that long, groups of messages reach their speed.
const SLOTS: usize = 8;

/// Words of a chunk.
pub fn chunk(slot: usize, ranks: usize) -> usize {
    (SLOTS * slot).max(ranks)
}

/// Whether a call of so many ranks goes this way.
pub fn takes(call: Call, ranks: usize) -> bool {
    call.algorithm == Algorithm::Tree && call.operation != Operation::Broadcast && (2..=FOLDED).contains(&ranks)
}

/// Words of the terms that a rank receives of a chunk, at most.
pub fn terms(words: usize, chunk: usize, ranks: usize) -> usize {
    (ranks - 1) * words.min(chunk).div_ceil(ranks)
}

/// The shares of all chunks, each of one range a rank, in order.
fn chunks(operation: Operation, words: usize, chunk: usize, ranks: usize) -> Vec<Shares> {
    if matches!(operation, Operation::AllReduce | Operation::Reduce) {
        let cut = (0..words).step_by(chunk).map(|start| Shares::even(&(start..words.min(start + chunk)), ranks));
        return cut.collect();
    }
    let (shares, window) = (Shares::even(&(0..words), ranks), chunk / ranks);
    (0..shares.longest()).step_by(window).map(|start| shares.window(&(start..start + window))).collect()
}

/// The range of a rank in a chunk.
fn share(shares: &Shares, rank: usize) -> Result<Range<usize>> {
    match shares.of(rank) {
        [one] => Ok(one.clone()),
        other => Err(Error::internal(format!("a share of {} ranges", other.len()))),
    }
}

/// A message: the other rank, and its words.
type Message<'a> = (usize, Span<'a>);

/// Device memory of one collective.
pub struct Grouped<'a> {
    pub memory: Span<'a>,
    pub device_comm: GroupComm<'a>,
    pub copies: &'a dyn DeviceCopies,
    pub places: &'a mut Places,
    /// Words of a chunk.
    pub chunk: usize,
}

impl Grouped<'_> {
    /// Runs a collective that [`takes`] holds for.
    pub fn run(self, call: Call, wire: &mut dyn Wire, group: &Members) -> Result<()> {
        let Self { memory, device_comm, copies, places, chunk } = self;
        let (operation, words, size, rank) = (call.operation, memory.words(), group.size(), group.rank);
        let terms = terms(words, chunk, size);
        let room = if operation.adds() && terms > 0 {
            places.hold(copies, 0, terms)?;
            places.span(0, 0..terms)
        } else {
            None
        };
        let stride = terms / (size - 1);
        let others = || (0..size).filter(|&other| other != rank);
        let gathers = operation != Operation::ReduceScatter;
        // Ranks that take the sums, or the parts that are gathered.
        let has_all = |one: usize| operation != Operation::Reduce || one == 0;
        let mut before: Option<Shares> = None;
        let chunks = chunks(operation, words, chunk, size);
        for shares in chunks.into_iter().map(Some).chain(std::iter::once(None)) {
            let (mut sends, mut receives): (Vec<Message<'_>>, Vec<Message<'_>>) = Default::default();
            if let (true, Some(before)) = (gathers, &before) {
                for other in others() {
                    if has_all(other) {
                        sends.push((other, memory.part(share(before, rank)?)));
                    }
                    if has_all(rank) {
                        receives.push((other, memory.part(share(before, other)?)));
                    }
                }
            }
            if let (Some(room), Some(shares)) = (room, &shares) {
                let own = share(shares, rank)?.len();
                for (place, other) in others().enumerate() {
                    sends.push((other, memory.part(share(shares, other)?)));
                    receives.push((other, room.part(place * stride..place * stride + own)));
                }
            }
            // Sender and receiver leave out the same.
            for side in [&mut sends, &mut receives] {
                side.retain(|(_, span)| span.words() > 0);
            }
            if !(sends.is_empty() && receives.is_empty()) {
                device_comm.queue(wire, group, &sends, &receives)?;
            }
            if let (Some(room), Some(shares)) = (room, &shares) {
                let own = memory.part(share(shares, rank)?);
                if own.words() > 0 {
                    device_comm.fold(room, own)?;
                }
            }
            before = shares;
        }
        device_comm.finish(wire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(operation: Operation, words: usize, chunk: usize, ranks: usize) -> Vec<Vec<Range<usize>>> {
        let shares = chunks(operation, words, chunk, ranks);
        shares.iter().map(|shares| (0..ranks).map(|rank| share(shares, rank).unwrap()).collect()).collect()
    }

    #[test]
    fn chunks_cover_and_shares_fit_their_places() {
        assert_eq!(ranges(Operation::AllReduce, 10, 6, 2), [vec![0..3, 3..6], vec![6..8, 8..10]]);
        assert_eq!(ranges(Operation::ReduceScatter, 10, 7, 2), [vec![0..3, 5..8], vec![3..5, 8..10]]);
        for (words, chunk, ranks) in [(0, 8, 3), (1, 8, 3), (1000, 50, 7), (999, 4, 4), (5, 100, 5)] {
            for operation in [Operation::AllReduce, Operation::ReduceScatter] {
                let ranges = ranges(operation, words, chunk, ranks);
                assert_eq!(ranges.iter().flatten().map(Range::len).sum::<usize>(), words);
                let stride = terms(words, chunk, ranks) / (ranks - 1);
                assert!(ranges.iter().flatten().all(|range| range.len() <= stride));
            }
        }
    }
}
