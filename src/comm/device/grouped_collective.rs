//! Deterministic collectives from groups of messages: many point-to-point messages that are in flight
//! together, by NCCL or by CUDA-aware MPI ([`message_groups`](super::message_groups)).
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
//! `hierarchical`. Chunks have 32 MiB, so a rank holds less than 64 MiB of terms.
//!
//! With NCCL the device keeps the order, and orders the whole with compute; the host waits only until
//! messages are queued. With MPI the host waits for each group.
//!
//! Sums have the same bits as those of [`algorithms`](crate::algorithms): the same terms are added
//! in the same tree. Sums of bf16 elements are added in f32 on each level and rounded to bf16 after
//! it, so `hierarchical` has other bits than `halving-doubling` there.

use std::ops::Range;

use super::chunk_pipeline::{Level, Stage, chunks, levels, schedule};
use super::message_groups::MessageGroups;
use crate::algorithms::{Call, Operation, Shares};
use crate::transport::{DeviceMessage, GroupRanks, Transport};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{DeviceSpan, Element, OrderedSum};

/// The length of a chunk in host-staged slots. 32 MiB are long enough for groups to reach full
/// bandwidth.
const SLOTS: usize = 8;

/// Scratch slots for the terms of a chunk: those in one are added while the next are received.
pub const SCRATCH_SLOTS: usize = 2;

/// Returns the words of a chunk.
pub fn chunk(slot: usize, ranks: usize) -> usize {
    (SLOTS * slot).max(ranks)
}

/// Returns the levels of a call, or `None` if it cannot run in groups of messages.
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

/// A collective on device memory.
pub struct GroupedCollective<'a> {
    pub memory: DeviceSpan<'a>,
    /// The format of its elements.
    pub element: Element,
    /// The [`scratch_slots`] of the call.
    pub slots: &'a [DeviceSpan<'a>],
    /// Words of a chunk.
    pub chunk: usize,
}

/// The messages of one group, and the sums of the terms that it brings.
#[derive(Default)]
struct Exchange<'a> {
    sends: Vec<DeviceMessage<'a>>,
    receives: Vec<DeviceMessage<'a>>,
    sums: Vec<OrderedSum<'a>>,
}

impl<'a> Exchange<'a> {
    /// Adds messages that send terms to their owners. Those of this rank are received in `scratch`,
    /// piece by piece, and summed.
    fn terms(
        &mut self,
        (memory, element): (DeviceSpan<'a>, Element),
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
            self.sums.push(OrderedSum { element, own, number: level.mine, others });
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

impl<'a> GroupedCollective<'a> {
    /// Runs a collective that has `levels` by `groups`.
    pub fn run<G: MessageGroups>(
        self,
        mut groups: G,
        call: Call,
        levels: &[Level],
        transport: &mut dyn Transport,
        group: &GroupRanks,
    ) -> Result<G::Outcome> {
        let adds = call.operation.adds();
        let chunks = chunks(call.operation, self.memory.words(), self.chunk, levels);
        for (number, stages) in
            schedule(call.operation, chunks.len(), levels.len()).into_iter().enumerate()
        {
            let Exchange { sends, receives, sums } =
                self.exchange(call.operation, levels, group.size(), &chunks, &stages)?;
            if adds {
                // When no more chunks come, nothing is deferred.
                groups.wait_for_sums(transport, usize::from(number < chunks.len()))?;
            }
            if !(sends.is_empty() && receives.is_empty()) {
                groups.exchange_group(transport, group, &sends, &receives)?;
            }
            // An empty call counts among those that may be deferred.
            if adds && (number < chunks.len() || !sums.is_empty()) {
                groups.sum_in_order(&sums)?;
            }
        }
        groups.finish(transport)
    }

    /// Returns the messages of some stages of `chunks`, and the sums that they need, in a group of
    /// `ranks` ranks.
    fn exchange(
        &self,
        operation: Operation,
        levels: &[Level],
        ranks: usize,
        chunks: &[Shares],
        stages: &[(usize, Stage)],
    ) -> Result<Exchange<'a>> {
        let to_first = operation == Operation::Reduce;
        let terms = terms(self.memory.words(), self.chunk, ranks);
        let mut exchange = Exchange::default();
        for &(chunk, stage) in stages {
            let shares = &chunks[chunk];
            match stage {
                Stage::Terms(level) => {
                    let slot = self.slots.get(chunk % SCRATCH_SLOTS);
                    let slot =
                        slot.ok_or_else(|| Error::internal("no scratch memory for terms"))?;
                    let scratch = slot.part(scratch_range(levels, level, terms, ranks));
                    exchange.terms((self.memory, self.element), &levels[level], shares, scratch);
                }
                // Sums for the first rank alone go to its rail, and from there to it.
                Stage::Sums(level)
                    if to_first && levels[level + 1..].iter().any(|above| above.mine > 0) => {}
                Stage::Sums(level) => {
                    exchange.sums(self.memory, &levels[level], shares, to_first);
                }
            }
        }
        Ok(exchange)
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
    use std::sync::Arc;

    use super::*;
    use crate::algorithms::Algorithm;
    use crate::transport::in_process;

    /// A call of [`MessageGroups`]. Messages are their other rank and their words.
    #[derive(Debug, Clone, PartialEq)]
    enum Step {
        Exchange { sends: Vec<(usize, usize)>, receives: Vec<(usize, usize)> },
        Sums(usize),
        Wait(usize),
    }

    /// Records the calls of a collective.
    #[derive(Default)]
    struct Recorder(Vec<Step>);

    impl MessageGroups for Recorder {
        type Outcome = Vec<Step>;

        fn exchange_group(
            &mut self,
            _: &mut dyn Transport,
            _: &GroupRanks,
            sends: &[DeviceMessage<'_>],
            receives: &[DeviceMessage<'_>],
        ) -> Result<()> {
            let [sends, receives] = [sends, receives]
                .map(|side| side.iter().map(|(rank, span)| (*rank, span.words())).collect());
            self.0.push(Step::Exchange { sends, receives });
            Ok(())
        }

        fn sum_in_order(&mut self, sums: &[OrderedSum<'_>]) -> Result<()> {
            self.0.push(Step::Sums(sums.len()));
            Ok(())
        }

        fn wait_for_sums(&mut self, _: &mut dyn Transport, but: usize) -> Result<()> {
            self.0.push(Step::Wait(but));
            Ok(())
        }

        fn finish(self, _: &mut dyn Transport) -> Result<Vec<Step>> {
            Ok(self.0)
        }
    }

    /// Returns the steps of a collective on `words` words in chunks of `chunk` words, as one of the
    /// ranks on `nodes` takes them.
    fn steps(
        nodes: &[usize],
        rank: usize,
        (algorithm, operation): (Algorithm, Operation),
        words: usize,
        chunk: usize,
    ) -> Vec<Step> {
        let group = GroupRanks::world(rank, nodes.into());
        let call = Call { operation, algorithm, root: 0 };
        let mut memory = vec![0.0; words];
        let (terms, slots) = scratch_slots(call, words, chunk, nodes.len());
        let mut scratch = vec![0.0; slots * terms];
        let slots: Vec<_> = scratch.chunks_mut(terms.max(1)).map(DeviceSpan::from).collect();
        let shared: Vec<_> = nodes.iter().map(|_| Arc::default()).collect();
        let mut transport = in_process::open(nodes, &shared).swap_remove(rank).0;
        let levels = group_levels(call, &group).unwrap();
        let memory = DeviceSpan::from(&mut memory[..]);
        GroupedCollective { memory, element: Element::F32, slots: &slots, chunk }
            .run(Recorder::default(), call, &levels, &mut *transport, &group)
            .unwrap()
    }

    /// An all-reduce of 8 MiB on four ranks, with the default chunks.
    #[test]
    fn a_chunk_takes_two_groups_of_all_its_messages() {
        const WORDS: usize = 2 << 20;
        for rank in 0..4 {
            let tree = (Algorithm::HalvingDoubling, Operation::AllReduce);
            let steps = steps(&[0; 4], rank, tree, WORDS, chunk(1 << 20, 4));
            let others: Vec<_> =
                (0..4).filter(|&other| other != rank).map(|other| (other, WORDS / 4)).collect();
            let exchange = Step::Exchange { sends: others.clone(), receives: others };
            let expected =
                [Step::Wait(1), exchange.clone(), Step::Sums(1), Step::Wait(0), exchange];
            assert_eq!(steps, expected);
        }
    }

    /// While chunks come, the sums of the one before need not have finished.
    #[test]
    fn sums_run_while_the_next_group_is_exchanged() {
        let tree = (Algorithm::HalvingDoubling, Operation::AllReduce);
        let steps = steps(&[0; 2], 1, tree, 30, 10);
        let order: Vec<_> = steps
            .iter()
            .map(|step| match step {
                Step::Exchange { sends, .. } => format!("exchange {}", sends.len()),
                step => format!("{step:?}"),
            })
            .collect();
        let expected = [
            ["Wait(1)", "exchange 1", "Sums(1)"],
            ["Wait(1)", "exchange 1", "Sums(1)"],
            ["Wait(1)", "exchange 2", "Sums(1)"],
        ];
        assert_eq!(order, [expected.as_flattened(), &["Wait(0)", "exchange 2"]].concat());
    }

    /// In each group a rank receives from another one what that one sends to it, in the same order.
    #[test]
    fn messages_of_a_group_fit_together() {
        for (algorithm, nodes, levels) in [
            (Algorithm::HalvingDoubling, &[0; 4][..], 1),
            (Algorithm::HalvingDoubling, &[0; 5], 1),
            (Algorithm::Hierarchical, &[0, 0, 1, 1], 2),
            (Algorithm::Hierarchical, &[0, 1, 0, 1, 0, 1], 2),
        ] {
            let operations = [Operation::AllReduce, Operation::ReduceScatter, Operation::AllGather];
            for (operation, chunks) in
                operations.into_iter().flat_map(|one| [1, 2, 10].map(|chunks| (one, chunks)))
            {
                let chunk = 60 * nodes.len();
                let of_rank = |rank: usize| {
                    let call = (algorithm, operation);
                    let all = steps(nodes, rank, call, chunks * chunk, chunk).into_iter();
                    let exchanges = all.filter_map(|step| match step {
                        Step::Exchange { sends, receives } => Some([sends, receives]),
                        _ => None,
                    });
                    exchanges.collect::<Vec<_>>()
                };
                let all: Vec<_> = (0..nodes.len()).map(of_rank).collect();
                let name = format!("{algorithm} {operation} of {chunks} chunks on {nodes:?}");
                let more = if operation == Operation::AllReduce { 2 * levels } else { levels };
                for (rank, exchanges) in all.iter().enumerate() {
                    assert_eq!(exchanges.len(), chunks + more - 1, "{name}, rank {rank}");
                    for (number, [sends, _]) in exchanges.iter().enumerate() {
                        for (other, exchanges) in all.iter().enumerate() {
                            let of = |side: &[(usize, usize)], rank: usize| -> Vec<usize> {
                                let messages = side.iter().filter(|(other, _)| *other == rank);
                                messages.map(|(_, words)| *words).collect()
                            };
                            let received = of(&exchanges[number][1], rank);
                            assert_eq!(of(sends, other), received, "{name}, {rank} to {other}");
                        }
                    }
                }
            }
        }
    }

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
