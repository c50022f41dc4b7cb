//! Deterministic collectives from NCCL groups: many point-to-point messages that NCCL runs in one
//! call.
//!
//! A rank owns an even share of each chunk of the buffer. It receives the share's terms from all
//! other ranks in one group, adds them in one kernel in the order of
//! [`Algorithm::HalvingDoubling`](crate::algorithms::Algorithm), and sends the sum to all others in
//! a later group, which also carries the terms of another chunk. `hierarchical` does so twice,
//! inside the node and between the nodes ([`chunk_pipeline`](super::chunk_pipeline)). Each rank
//! sends 2·(n−1)/n of the buffer, which is bandwidth-optimal.
//!
//! The kernels run on a separate stream: while one adds the terms of a chunk, the next group is in
//! flight, whose terms go to another scratch slot. So k chunks take k + 1 groups, or k + 3 with
//! `hierarchical`. The device keeps the order, and orders the whole with compute; the host waits only
//! until messages are queued. Chunks have 32 MiB, so a rank holds less than 64 MiB of terms.
//!
//! Sums have the same bits as those of [`algorithms`](crate::algorithms): the same terms are added
//! in the same tree.

use std::ops::Range;
use std::sync::Arc;

use super::chunk_pipeline::{Level, Stage, chunks, levels, schedule};
use super::comms::GroupComm;
use super::cuda_aware::ScratchSlots;
use crate::algorithms::{Call, Operation, Shares};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{DeviceEvent, DeviceOperation, DeviceSpan, OrderedSum};

/// The length of a chunk in host-staged slots. 32 MiB are long enough for groups to reach full
/// bandwidth.
const SLOTS: usize = 8;

/// Scratch slots for the terms of a chunk: those in one are added while the next are received.
pub const SCRATCH_SLOTS: usize = 2;

/// Returns the words of a chunk.
pub fn chunk(slot: usize, ranks: usize) -> usize {
    (SLOTS * slot).max(ranks)
}

/// Returns the levels of a call, or `None` if it cannot run in NCCL groups.
pub fn group_levels(call: Call, group: &GroupRanks) -> Option<Vec<Level>> {
    if call.operation == Operation::Broadcast { None } else { levels(call.algorithm, group) }
}

/// Returns the most words of terms that a rank receives for a chunk on all levels.
pub fn terms(words: usize, chunk: usize, ranks: usize) -> usize {
    (ranks - 1) * words.min(chunk).div_ceil(ranks)
}

/// Returns the words of each scratch slot that a call on `words` words needs, and the number of slots.
pub fn scratch_slots(call: Call, words: usize, chunk: usize, ranks: usize) -> (usize, usize) {
    if !call.operation.adds() || words == 0 {
        return (0, 0);
    }
    (terms(words, chunk, ranks), words.div_ceil(chunk).min(SCRATCH_SLOTS))
}

/// A message: the other rank, and the memory.
type Message<'a> = (usize, DeviceSpan<'a>);

/// A collective on device memory.
pub struct NcclP2pCollective<'a> {
    pub memory: DeviceSpan<'a>,
    pub device_comm: GroupComm<'a>,
    pub slots: &'a ScratchSlots,
    /// Words of a chunk.
    pub chunk: usize,
}

/// The messages and sums of one NCCL group.
#[derive(Default)]
struct Exchange<'a> {
    sends: Vec<Message<'a>>,
    receives: Vec<Message<'a>>,
    folds: Vec<OrderedSum<'a>>,
}

impl<'a> Exchange<'a> {
    /// Adds messages that send terms to their owners. Those of this rank are received in `scratch`,
    /// piece by piece, and summed.
    fn terms(
        &mut self,
        memory: DeviceSpan<'a>,
        level: &Level,
        shares: &Shares,
        mut scratch: DeviceSpan<'a>,
    ) {
        for place in level.others() {
            let theirs = level.owned_ranges(place, shares);
            self.sends
                .extend(theirs.into_iter().map(|range| (level.ranks[place], memory.part(range))));
        }
        for range in level.owned_ranges(level.mine, shares) {
            let words = range.len();
            let own = memory.part(range);
            let others = scratch.part(0..(level.ranks.len() - 1) * words);
            let places = level.others().enumerate();
            self.receives.extend(
                places.map(|(k, place)| {
                    (level.ranks[place], others.part(k * words..(k + 1) * words))
                }),
            );
            self.folds.push(OrderedSum { own, number: level.mine, others });
            scratch = scratch.part(others.words()..scratch.words());
        }
    }

    /// Adds messages that send sums from their owners to the first rank of the level, or to all.
    fn sums(&mut self, memory: DeviceSpan<'a>, level: &Level, shares: &Shares, to_first: bool) {
        let takes = |place: usize| !to_first || place == 0;
        for place in level.others() {
            let message = |range| (level.ranks[place], memory.part(range));
            if takes(place) {
                self.sends.extend(level.owned_ranges(level.mine, shares).into_iter().map(message));
            }
            if takes(level.mine) {
                self.receives.extend(level.owned_ranges(place, shares).into_iter().map(message));
            }
        }
    }
}

impl NcclP2pCollective<'_> {
    /// Starts a collective that has `levels`, after the event `ready` of compute. Scratch memory
    /// must be [reserved](scratch_slots).
    pub fn start(
        self,
        call: Call,
        levels: &[Level],
        transport: &mut dyn Transport,
        group: &GroupRanks,
        ready: Option<&dyn DeviceEvent>,
    ) -> Result<Arc<dyn DeviceOperation>> {
        let Self { memory, device_comm, slots: places, chunk } = self;
        let adds = call.operation.adds();
        let to_first = call.operation == Operation::Reduce;
        let chunks = chunks(call.operation, memory.words(), chunk, levels);
        let terms = if adds { terms(memory.words(), chunk, group.size()) } else { 0 };
        device_comm.begin(ready)?;
        for (number, stages) in
            schedule(call.operation, chunks.len(), levels.len()).into_iter().enumerate()
        {
            let mut exchange = Exchange::default();
            for (chunk, stage) in stages {
                let shares = &chunks[chunk];
                match stage {
                    Stage::Terms(level) => {
                        let scratch = places.span(
                            chunk % SCRATCH_SLOTS,
                            scratch_range(levels, level, terms, group.size()),
                        );
                        let scratch = scratch
                            .ok_or_else(|| Error::internal("no scratch memory for terms"))?;
                        exchange.terms(memory, &levels[level], shares, scratch);
                    }
                    // Sums for the first rank alone go to its rail, and from there to it.
                    Stage::Sums(level)
                        if to_first && levels[level + 1..].iter().any(|above| above.mine > 0) => {}
                    Stage::Sums(level) => exchange.sums(memory, &levels[level], shares, to_first),
                }
            }
            let Exchange { sends, receives, folds } = exchange;
            if adds {
                // When no more chunks come, nothing is deferred.
                device_comm.after_folds(usize::from(number < chunks.len()))?;
            }
            if !(sends.is_empty() && receives.is_empty()) {
                device_comm.queue(transport, group, &sends, &receives)?;
            }
            // An empty call counts among those that may be deferred.
            if adds && (number < chunks.len() || !folds.is_empty()) {
                device_comm.fold(&folds)?;
            }
        }
        device_comm.end()
    }
}

/// Returns the range of a level's terms among the `terms` words of all levels.
fn scratch_range(levels: &[Level], level: usize, terms: usize, ranks: usize) -> Range<usize> {
    // Words of the longest share, times the number of ranks that send it.
    let of = |level: &Level| {
        (level.ranks.len() - 1) * level.owned[level.mine].len() * (terms / (ranks - 1))
    };
    let start: usize = levels[..level].iter().map(of).sum();
    start..start + of(&levels[level])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::Algorithm;

    #[test]
    fn terms_of_all_levels_have_room() {
        for (nodes, words, chunk) in [
            (&[0, 0, 0][..], 1, 8),
            (&[0; 7], 1000, 50),
            (&[0, 0, 1, 1], 1000, 47),
            (&[0, 1, 0, 1, 0, 1], 999, 6),
            (&[0, 0, 1, 1, 2, 2], 100, 1000),
        ] {
            let ranks = nodes.len();
            for (rank, operation) in (0..ranks)
                .flat_map(|rank| [(rank, Operation::AllReduce), (rank, Operation::ReduceScatter)])
            {
                let call = Call { operation, algorithm: Algorithm::Hierarchical, root: 0 };
                let levels = group_levels(call, &GroupRanks::world(rank, nodes.into())).unwrap();
                let terms = terms(words, chunk, ranks);
                let scratches: Vec<_> = (0..levels.len())
                    .map(|level| scratch_range(&levels, level, terms, ranks))
                    .collect();
                assert!(
                    scratches[0].start == 0
                        && scratches.windows(2).all(|two| two[0].end == two[1].start)
                );
                assert_eq!(scratches.last().unwrap().end, terms, "{nodes:?}");
                for shares in chunks(operation, words, chunk, &levels) {
                    for (level, scratch) in levels.iter().zip(&scratches) {
                        let own: usize =
                            level.owned_ranges(level.mine, &shares).iter().map(Range::len).sum();
                        assert!((level.ranks.len() - 1) * own <= scratch.len());
                    }
                }
            }
        }
        let broadcast = Call {
            operation: Operation::Broadcast,
            algorithm: Algorithm::HalvingDoubling,
            root: 0,
        };
        assert_eq!(group_levels(broadcast, &GroupRanks::world(0, [0, 0].into())), None);
    }
}
