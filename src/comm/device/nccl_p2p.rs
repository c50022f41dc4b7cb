//! Sums in the order of the tree by messages of all ranks at once, for a library that carries many
//! of them in one go (NCCL).
//!
//! Of each chunk of the buffer a rank owns an even share. It receives the share's terms from all
//! other ranks in one group of messages, adds them by one kernel in the order of
//! [`Algorithm::HalvingDoubling`](crate::algorithms::Algorithm), and sends the sum to all others in
//! a later group, which also carries the terms of another chunk. `hierarchical` does so twice,
//! inside the node and between the nodes ([`stages`]). Each rank sends 2·(n−1)/n of the buffer, the
//! least possible.
//!
//! The kernels have a stream of their own: while one adds the terms of a chunk, the next group of
//! messages is under way, whose terms have another place. So k chunks take k + 1 groups, or k + 3
//! of `hierarchical`. The device keeps all of it in order; the host waits for messages to be
//! queued, and for the device only at the end.
//!
//! The sum of an element is that of [`algorithms`](crate::algorithms) bit for bit: the same terms
//! in the same tree.

use std::ops::Range;

use super::chunk_pipeline::{Level, Stage, chunks, levels, schedule};
use super::comms::GroupComm;
use super::cuda_aware::Places;
use crate::algorithms::{Call, Operation, Shares};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{DeviceCopies, DeviceSpan, OrderedSum};

/// Slots of staged messages in a chunk, which so has 32 MiB: that long, groups of messages reach
/// their speed.
const SLOTS: usize = 8;

/// Places for the terms of a chunk: one is added up while the next are received.
pub const PLACES: usize = 2;

/// Words of a chunk.
pub fn chunk(slot: usize, ranks: usize) -> usize {
    (SLOTS * slot).max(ranks)
}

/// The levels of a call that goes this way.
pub fn takes(call: Call, group: &GroupRanks) -> Option<Vec<Level>> {
    if call.operation == Operation::Broadcast { None } else { levels(call.algorithm, group) }
}

/// Words of the terms that a rank receives of a chunk on all levels, at most.
pub fn terms(words: usize, chunk: usize, ranks: usize) -> usize {
    (ranks - 1) * words.min(chunk).div_ceil(ranks)
}

/// A message: the other rank, and its words.
type Message<'a> = (usize, DeviceSpan<'a>);

/// Device memory of one collective.
pub struct NcclP2pCollective<'a> {
    pub memory: DeviceSpan<'a>,
    pub device_comm: GroupComm<'a>,
    pub copies: &'a dyn DeviceCopies,
    pub places: &'a mut Places,
    /// Words of a chunk.
    pub chunk: usize,
}

/// The work of one group.
#[derive(Default)]
struct Exchange<'a> {
    sends: Vec<Message<'a>>,
    receives: Vec<Message<'a>>,
    folds: Vec<OrderedSum<'a>>,
}

impl<'a> Exchange<'a> {
    /// Terms to those who own them. Mine come to `room`, piece by piece, and are added up.
    fn terms(
        &mut self,
        memory: DeviceSpan<'a>,
        level: &Level,
        shares: &Shares,
        mut room: DeviceSpan<'a>,
    ) {
        for place in level.others() {
            let theirs = level.of(place, shares);
            self.sends
                .extend(theirs.into_iter().map(|range| (level.ranks[place], memory.part(range))));
        }
        for range in level.of(level.mine, shares) {
            let words = range.len();
            let own = memory.part(range);
            let others = room.part(0..(level.ranks.len() - 1) * words);
            let places = level.others().enumerate();
            self.receives.extend(
                places.map(|(k, place)| {
                    (level.ranks[place], others.part(k * words..(k + 1) * words))
                }),
            );
            self.folds.push(OrderedSum { own, number: level.mine, others });
            room = room.part(others.words()..room.words());
        }
    }

    /// Sums from those who own them, to the first rank of the level or to all.
    fn sums(&mut self, memory: DeviceSpan<'a>, level: &Level, shares: &Shares, to_first: bool) {
        let takes = |place: usize| !to_first || place == 0;
        for place in level.others() {
            let message = |range| (level.ranks[place], memory.part(range));
            if takes(place) {
                self.sends.extend(level.of(level.mine, shares).into_iter().map(message));
            }
            if takes(level.mine) {
                self.receives.extend(level.of(place, shares).into_iter().map(message));
            }
        }
    }
}

impl NcclP2pCollective<'_> {
    /// Runs a collective that [`takes`] gives levels for.
    pub fn run(
        self,
        call: Call,
        levels: &[Level],
        wire: &mut dyn Transport,
        group: &GroupRanks,
    ) -> Result<()> {
        let Self { memory, device_comm, copies, places, chunk } = self;
        let adds = call.operation.adds();
        let to_first = call.operation == Operation::Reduce;
        let chunks = chunks(call.operation, memory.words(), chunk, levels);
        let terms = if adds { terms(memory.words(), chunk, group.size()) } else { 0 };
        let rooms = (0..chunks.len().min(PLACES)).map(|place| places.hold(copies, place, terms));
        rooms.collect::<Result<()>>()?;
        for (number, stages) in
            schedule(call.operation, chunks.len(), levels.len()).into_iter().enumerate()
        {
            let mut exchange = Exchange::default();
            for (chunk, stage) in stages {
                let shares = &chunks[chunk];
                match stage {
                    Stage::Terms(level) => {
                        let room =
                            places.span(chunk % PLACES, room(levels, level, terms, group.size()));
                        let room = room.ok_or_else(|| Error::internal("terms without a place"))?;
                        exchange.terms(memory, &levels[level], shares, room);
                    }
                    // Sums for the first rank alone go to its lane, and from there to itself.
                    Stage::Sums(level)
                        if to_first && levels[level + 1..].iter().any(|above| above.mine > 0) => {}
                    Stage::Sums(level) => exchange.sums(memory, &levels[level], shares, to_first),
                }
            }
            let Exchange { sends, receives, folds } = exchange;
            if adds {
                // When no more chunks come, nothing is put off.
                device_comm.after_folds(usize::from(number < chunks.len()))?;
            }
            if !(sends.is_empty() && receives.is_empty()) {
                device_comm.queue(wire, group, &sends, &receives)?;
            }
            // An empty call counts among those that may be put off.
            if adds && (number < chunks.len() || !folds.is_empty()) {
                device_comm.fold(&folds)?;
            }
        }
        device_comm.finish(wire)
    }
}

/// Where the terms of a level are among `terms` words for all levels.
fn room(levels: &[Level], level: usize, terms: usize, ranks: usize) -> Range<usize> {
    // Words of the longest share, as often as it is received.
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
                let levels = takes(call, &GroupRanks::world(rank, nodes.into())).unwrap();
                let terms = terms(words, chunk, ranks);
                let rooms: Vec<_> =
                    (0..levels.len()).map(|level| room(&levels, level, terms, ranks)).collect();
                assert!(
                    rooms[0].start == 0 && rooms.windows(2).all(|two| two[0].end == two[1].start)
                );
                assert_eq!(rooms.last().unwrap().end, terms, "{nodes:?}");
                for shares in chunks(operation, words, chunk, &levels) {
                    for (level, room) in levels.iter().zip(&rooms) {
                        let own: usize = level.of(level.mine, &shares).iter().map(Range::len).sum();
                        assert!((level.ranks.len() - 1) * own <= room.len());
                    }
                }
            }
        }
        let broadcast = Call {
            operation: Operation::Broadcast,
            algorithm: Algorithm::HalvingDoubling,
            root: 0,
        };
        assert_eq!(takes(broadcast, &GroupRanks::world(0, [0, 0].into())), None);
    }
}
