//! The schedule of a collective's chunks over groups of messages.
//!
//! A sum has one or more **levels**: all ranks for [`Algorithm::HalvingDoubling`]; the ranks of a
//! node, then those of a rail for [`Algorithm::Hierarchical`]. On each level a rank receives the
//! terms of the elements that it owns there and adds them; afterwards the sums go back through the
//! levels. Each of these exchanges of a chunk is a **stage**, and one group carries stages of
//! several chunks.

use std::ops::Range;

use crate::algorithms::{Algorithm, Operation, Shares, equal_nodes};
use crate::transport::GroupRanks;
use hpctrain_device::MAX_SUM_TERMS;

/// Ranks that exchange terms and sums with each other.
#[derive(Debug, PartialEq, Eq)]
pub struct Level {
    /// The numbers of the ranks in the group.
    pub ranks: Vec<usize>,
    /// This rank's index among them.
    pub mine: usize,
    /// For each of them, the ranks whose shares it owns on this level.
    pub owned: Vec<Vec<usize>>,
}

impl Level {
    /// Returns the elements that the rank at index `place` owns on this level, in memory order.
    /// Adjacent ranges are merged.
    pub fn owned_ranges(&self, place: usize, shares: &Shares) -> Vec<Range<usize>> {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in shares.ranges_of(self.owned[place].iter().copied()) {
            match joined.last_mut() {
                _ if range.is_empty() => {}
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        joined
    }

    /// Iterates over the indices of the other ranks.
    pub fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks.len()).filter(|&place| place != self.mine)
    }
}

/// Returns the levels of an algorithm that have more than one rank, or `None` if it cannot run in
/// groups of messages.
pub fn levels(algorithm: Algorithm, group: &GroupRanks) -> Option<Vec<Level>> {
    let me = group.rank;
    let size = group.size();
    let levels = match algorithm {
        Algorithm::HalvingDoubling => {
            vec![Level {
                ranks: (0..size).collect(),
                mine: me,
                owned: (0..size).map(|rank| vec![rank]).collect(),
            }]
        }
        Algorithm::Hierarchical => {
            let nodes = equal_nodes(group)?;
            let (node, local) = nodes.iter().enumerate().find_map(|(node, ranks)| {
                Some((node, ranks.iter().position(|&rank| rank == me)?))
            })?;
            let rail = |local: usize| nodes.iter().map(|ranks| ranks[local]).collect::<Vec<_>>();
            let inside = Level {
                ranks: nodes[node].clone(),
                mine: local,
                owned: (0..nodes[node].len()).map(rail).collect(),
            };
            let owned = rail(local).into_iter().map(|rank| vec![rank]).collect();
            vec![inside, Level { ranks: rail(local), mine: node, owned }]
        }
        Algorithm::Vendor | Algorithm::Ring | Algorithm::ReduceToOne => return None,
    };
    let levels: Vec<_> = levels.into_iter().filter(|level| level.ranks.len() > 1).collect();
    (!levels.is_empty() && levels.iter().all(|level| level.ranks.len() <= MAX_SUM_TERMS))
        .then_some(levels)
}

/// Returns the shares of each chunk, in order. Where the operation allows any shares, those that a
/// rank owns on the first level are contiguous.
pub fn chunks(operation: Operation, words: usize, chunk: usize, levels: &[Level]) -> Vec<Shares> {
    let ranks: usize = levels.iter().map(|level| level.ranks.len()).product();
    if matches!(operation, Operation::AllReduce | Operation::Reduce) {
        let order = levels[0].owned.iter().flatten();
        let mut part = vec![0; ranks];
        order.enumerate().for_each(|(number, &rank)| part[rank] = number);
        let chunks = (0..words).step_by(chunk).map(|start| {
            let even = Shares::even(&(start..words.min(start + chunk)), ranks);
            Shares::new(part.iter().map(|&number| even.ranges(number).to_vec()).collect())
        });
        return chunks.collect();
    }
    let shares = Shares::even(&(0..words), ranks);
    let window = chunk / ranks;
    (0..shares.longest())
        .step_by(window)
        .map(|start| shares.window(&(start..start + window)))
        .collect()
}

/// An exchange between the ranks of a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Ranks send each other the terms of the elements that the receiver owns on this level.
    Terms(usize),
    /// Ranks send the sums that they own on this level.
    Sums(usize),
}

/// Returns the stages of a chunk, in order.
fn stages(operation: Operation, levels: usize) -> Vec<Stage> {
    let terms = (0..levels).filter(|_| operation.adds()).map(Stage::Terms);
    let sums = (0..levels).rev().filter(|_| operation != Operation::ReduceScatter).map(Stage::Sums);
    terms.chain(sums).collect()
}

/// Returns the chunks and stages of each group, in order.
///
/// Group g carries the first stage of chunk g. Terms are added during the next group, and their
/// sums go in the one after it. When no more chunks come, nothing is deferred, and sums go in the
/// next group.
pub fn schedule(operation: Operation, chunks: usize, levels: usize) -> Vec<Vec<(usize, Stage)>> {
    let stages = stages(operation, levels);
    let mut groups: Vec<Vec<(usize, Stage)>> = Vec::new();
    for chunk in 0..chunks {
        let mut group = chunk;
        for (number, &stage) in stages.iter().enumerate() {
            group = match number.checked_sub(1).map(|before| stages[before]) {
                None => group,
                Some(Stage::Terms(_)) => (group + 2).min(chunks.max(group + 1)),
                Some(Stage::Sums(_)) => group + 1,
            };
            if groups.len() <= group {
                groups.resize_with(group + 1, Vec::new);
            }
            groups[group].push((chunk, stage));
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(nodes: &[usize], rank: usize) -> GroupRanks {
        GroupRanks::world(rank, nodes.into())
    }

    fn levels_of(algorithm: Algorithm, nodes: &[usize], rank: usize) -> Vec<Level> {
        levels(algorithm, &group(nodes, rank)).unwrap()
    }

    #[test]
    fn levels_are_those_of_the_algorithms() {
        let tree = levels_of(Algorithm::HalvingDoubling, &[0, 0, 1], 2);
        assert_eq!(
            tree,
            [Level { ranks: vec![0, 1, 2], mine: 2, owned: vec![vec![0], vec![1], vec![2]] }]
        );
        let inside = Level { ranks: vec![2, 3], mine: 1, owned: vec![vec![0, 2], vec![1, 3]] };
        let between = Level { ranks: vec![1, 3], mine: 1, owned: vec![vec![1], vec![3]] };
        assert_eq!(levels_of(Algorithm::Hierarchical, &[0, 0, 1, 1], 3), [inside, between]);
        // One node, or one rank per node: the levels of halving-doubling.
        for nodes in [[0; 3], [0, 1, 2]] {
            assert_eq!(
                levels_of(Algorithm::Hierarchical, &nodes, 2),
                levels_of(Algorithm::HalvingDoubling, &nodes, 2)
            );
        }
        assert_eq!(
            levels(Algorithm::Hierarchical, &group(&[0, 0, 1], 0)),
            None,
            "nodes of other sizes"
        );
        assert_eq!(
            (
                levels(Algorithm::Ring, &group(&[0; 2], 0)),
                levels(Algorithm::HalvingDoubling, &group(&[0], 0))
            ),
            (None, None)
        );
        assert!(levels(Algorithm::HalvingDoubling, &group(&vec![0; MAX_SUM_TERMS], 0)).is_some());
        assert_eq!(
            levels(Algorithm::HalvingDoubling, &group(&vec![0; MAX_SUM_TERMS + 1], 0)),
            None
        );
        let two_of_many: Vec<usize> = (0..2 * MAX_SUM_TERMS).map(|rank| rank / 2).collect();
        assert!(levels(Algorithm::Hierarchical, &group(&two_of_many, 5)).is_some());
    }

    /// Describes the elements of each chunk of 20 words that one of four ranks on two nodes owns on
    /// a level.
    fn describe_owned(rank: usize, operation: Operation, level: usize) -> Vec<String> {
        let levels = levels_of(Algorithm::Hierarchical, &[0, 0, 1, 1], rank);
        let chunks = chunks(operation, 20, 12, &levels);
        let texts = chunks.iter().map(|shares| {
            let ranges = levels[level].owned_ranges(levels[level].mine, shares);
            ranges.iter().map(|range| format!("{range:?}")).collect::<Vec<_>>().join(" ")
        });
        texts.collect()
    }

    #[test]
    fn chunks_cover_and_what_is_owned_first_is_in_one_piece() {
        assert_eq!(
            [0, 3].map(|rank| describe_owned(rank, Operation::AllReduce, 0)),
            [["0..6", "12..16"], ["6..12", "16..20"]]
        );
        assert_eq!(
            [0, 2].map(|rank| describe_owned(rank, Operation::AllReduce, 1)),
            [["0..3", "12..14"], ["3..6", "14..16"]]
        );
        assert_eq!(describe_owned(0, Operation::ReduceScatter, 0), ["0..3 10..13", "3..5 13..15"]);
        assert_eq!(describe_owned(2, Operation::ReduceScatter, 1), ["10..13", "13..15"]);
        for (words, chunk, nodes) in [
            (0, 8, &[0, 0, 0][..]),
            (1, 8, &[0, 0, 0]),
            (1000, 50, &[0; 7]),
            (999, 6, &[0, 0, 1, 1, 2, 2]),
        ] {
            for operation in [Operation::AllReduce, Operation::ReduceScatter] {
                let levels = levels_of(Algorithm::Hierarchical, nodes, 0);
                let mut all: Vec<_> =
                    chunks(operation, words, chunk, &levels).iter().flat_map(Shares::all).collect();
                all.sort_by_key(|range| (range.start, range.end));
                assert_eq!(
                    all.iter().fold(0, |end, range| if range.start == end {
                        range.end
                    } else {
                        end
                    }),
                    words
                );
                assert_eq!(all.iter().map(Range::len).sum::<usize>(), words);
            }
        }
    }

    #[test]
    fn sums_wait_for_one_group_while_chunks_come() {
        use Stage::{Sums, Terms};
        let all = |chunks, levels| schedule(Operation::AllReduce, chunks, levels);
        assert_eq!(all(1, 1), [[(0, Terms(0))], [(0, Sums(0))]]);
        let three = [
            vec![(0, Terms(0))],
            vec![(1, Terms(0))],
            vec![(0, Sums(0)), (2, Terms(0))],
            vec![(1, Sums(0)), (2, Sums(0))],
        ];
        assert_eq!(all(3, 1), three);
        assert_eq!(all(1, 2), [[(0, Terms(0))], [(0, Terms(1))], [(0, Sums(1))], [(0, Sums(0))]]);
        let groups = |operation, levels| {
            [1, 2, 5, 40].map(|chunks| schedule(operation, chunks, levels).len() - chunks)
        };
        for operation in [Operation::AllReduce, Operation::Reduce] {
            assert_eq!((groups(operation, 1), groups(operation, 2)), ([1; 4], [3; 4]));
        }
        for operation in [Operation::ReduceScatter, Operation::AllGather] {
            assert_eq!((groups(operation, 1), groups(operation, 2)), ([0; 4], [1; 4]));
        }
        assert!(all(0, 1).is_empty());
    }

    /// Terms of a chunk do not overwrite those of the chunk two before it while these may still be
    /// added, and no group is empty.
    #[test]
    fn two_places_are_enough() {
        for (chunks, levels) in (1..12).flat_map(|chunks| [(chunks, 1), (chunks, 2)]) {
            let groups = schedule(Operation::AllReduce, chunks, levels);
            let at = |chunk, stage| {
                groups.iter().position(|group| group.contains(&(chunk, stage))).unwrap()
            };
            for (chunk, level) in
                (2..chunks).flat_map(|chunk| (0..levels).map(move |level| (chunk, level)))
            {
                let before = at(chunk - 2, Stage::Terms(level));
                let now = at(chunk, Stage::Terms(level));
                assert!(
                    before + 2 <= now || before < now && now >= chunks,
                    "chunk {chunk} of {chunks}"
                );
            }
            assert!(groups.iter().all(|group| !group.is_empty()));
        }
    }
}
