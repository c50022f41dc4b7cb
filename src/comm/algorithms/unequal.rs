//! Collectives of unequal ranks: each owns a part of the buffer of any length, and has one
//! or several terms of a sum.
//!
//! A rank with three virtual ranks has two terms: the sum of two neighbours, and a single one. Their
//! sum would change the order of additions, so it sends both, and the owner of a part adds the terms
//! of all ranks in the order of the tree over virtual ranks ([`TermOrder`]). Parts are exchanged
//! directly, in (n−1) rounds for each term of the rank that has the most.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use super::halving_doubling;
use super::partition::Shares;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;
use hpctrain_base::tree_sum::Tree;
use hpctrain_device::Element;

/// Elements of scratch for the terms of one block of parts.
const SCRATCH: usize = 1 << 20;

/// The most bytes of scratch memory of a sum of unequal parts.
pub const UNEQUAL_SCRATCH: usize = SCRATCH * size_of::<f32>();

/// The most elements of a term in one direct message.
const BLOCK: usize = 1 << 14;

/// The number of no term, for a rank whose memory has none of the sum.
const NO_TERM: usize = usize::MAX;

/// The most elements of a part in one message of an all-gather.
const GATHERED: usize = 1 << 18;

/// The order in which the terms of all ranks are added.
#[derive(Debug, PartialEq, Eq)]
pub struct TermOrder {
    /// The numbers of each rank's terms in the order of the sum.
    of_ranks: Vec<Vec<usize>>,
    /// The additions (into, from) by these numbers. The sum ends in term 0.
    additions: Vec<(usize, usize)>,
}

impl TermOrder {
    /// Returns the order for the terms of each rank, each the sum of some consecutive leaves of one
    /// binary tree that adds neighbours first. The terms cover all leaves; each is a full subtree,
    /// so it has a power of two of leaves and begins at a multiple of it. The terms of a rank are in
    /// the order of their leaves.
    pub fn new(leaves: &[Vec<Range<usize>>]) -> Self {
        let mut terms: Vec<(&Range<usize>, usize)> = leaves
            .iter()
            .enumerate()
            .flat_map(|(rank, terms)| terms.iter().map(move |term| (term, rank)))
            .collect();
        terms.sort_unstable_by_key(|(term, _)| term.start);
        let mut of_ranks = vec![Vec::new(); leaves.len()];
        let mut additions = Vec::new();
        let mut add = |into: &mut usize, from: usize| {
            additions.push((*into, from));
            Ok::<_, Infallible>(())
        };
        let mut tree = Tree::default();
        for (number, (term, rank)) in terms.into_iter().enumerate() {
            of_ranks[rank].push(number);
            let Ok(()) = tree.push_subtree(term.len().ilog2(), number, &mut add);
        }
        let Ok(_) = tree.finish(add);
        Self { of_ranks, additions }
    }

    /// Returns the number of terms of all ranks.
    fn len(&self) -> usize {
        self.of_ranks.iter().map(Vec::len).sum()
    }

    /// Returns the number of terms of a rank.
    pub fn terms_of(&self, rank: usize) -> usize {
        self.of_ranks[rank].len()
    }

    /// Returns the elements of a term in one message.
    fn block(&self) -> usize {
        (SCRATCH / self.len().max(1)).clamp(1, BLOCK)
    }
}

/// A sum, an all-gather, or both on unequal parts of a buffer.
#[derive(Debug, Clone)]
pub struct UnequalCollective {
    /// The number of elements of a term. The terms of a rank are one behind the other in its buffer;
    /// the sum replaces the first. A rank without terms has the room of one.
    pub len: usize,
    /// The elements of the sum that each rank owns.
    pub parts: Vec<Range<usize>>,
    /// The terms to add; with `None` nothing is added.
    pub terms: Option<Arc<TermOrder>>,
    /// Sets of ranks whose parts are brought to each of the set.
    pub all_gathers: Vec<Vec<usize>>,
}

impl UnequalCollective {
    /// Returns the number of terms in the buffer of a rank.
    pub fn terms_of(&self, rank: usize) -> usize {
        self.terms.as_ref().map_or(1, |terms| terms.terms_of(rank))
    }

    /// Returns the number of terms that a rank's buffer has room for.
    pub fn slots_of(&self, rank: usize) -> usize {
        self.terms_of(rank).max(1)
    }

    /// Returns the ranks whose parts this rank has afterwards.
    pub fn gathered(&self, rank: usize) -> Vec<usize> {
        let set = self.all_gathers.iter().find(|set| set.contains(&rank));
        set.map_or_else(|| Vec::from([rank]), Clone::clone)
    }

    /// Returns the collective on the words of memory whose elements have this format.
    pub fn in_words(&self, element: Element) -> Self {
        let per_word = size_of::<f32>() / element.size();
        let parts = self.parts.iter().map(|part| part.start / per_word..part.end / per_word);
        Self { len: self.len / per_word, parts: parts.collect(), ..self.clone() }
    }

    /// Runs the collective.
    pub fn run(
        &self,
        x: &mut dyn ReduceBuffer,
        transport: &mut dyn Transport,
        group: &GroupRanks,
    ) -> Result<()> {
        let shares =
            Shares::new(self.parts.iter().cloned().map(|part| Vec::from([part])).collect());
        if let Some(terms) = &self.terms {
            for start in (0..shares.longest()).step_by(terms.block()) {
                let block = shares.window(&(start..start + terms.block()));
                self.reduce_scatter(terms, x, transport, group, &block)?;
            }
        }
        let set = self.gathered(group.rank);
        let Some(among) = group.subset(&set).filter(|among| among.size() > 1) else {
            return Ok(());
        };
        let shares = Shares::new(set.iter().map(|&rank| shares.ranges(rank).to_vec()).collect());
        (0..shares.longest()).step_by(GATHERED).try_for_each(|start| {
            let block = shares.window(&(start..start + GATHERED));
            halving_doubling::all_gather(x, transport, &among, &block)
        })
    }

    /// Sends the terms of each part in `block` to its owner, which adds them.
    fn reduce_scatter(
        &self,
        terms: &TermOrder,
        x: &mut dyn ReduceBuffer,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        block: &Shares,
    ) -> Result<()> {
        let TermOrder { of_ranks, additions } = terms;
        let (rank, size) = (group.rank, group.size());
        let own = block.ranges(rank);
        let most = of_ranks.iter().map(Vec::len).max().unwrap_or(0);
        for (index, number) in of_ranks[rank].iter().enumerate().skip(1) {
            x.set_aside(*number, &self.of_term(index, own))?;
        }
        for step in 1..size {
            let to = (rank + step) % size;
            let from = (rank + size - step) % size;
            for index in 0..most {
                let send =
                    (index < of_ranks[rank].len()).then(|| self.of_term(index, block.ranges(to)));
                let send = send.as_ref().map(|ranges| (to, &ranges[..]));
                let (how, receive) = match of_ranks[from].get(index) {
                    Some(number) => (Combine::Aside(*number), Some((from, own))),
                    // The receiver of the other message keeps it for a sum.
                    None => (Combine::Add, None),
                };
                if send.is_some() || receive.is_some() {
                    x.exchange(transport, group, how, send, receive)?;
                }
            }
        }
        let first = of_ranks[rank].first().copied().unwrap_or(NO_TERM);
        x.fold(own, first, additions)
    }

    /// Returns these ranges of the sum in this rank's term `index`.
    fn of_term(&self, index: usize, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
        let shift = index * self.len;
        ranges.iter().map(|range| range.start + shift..range.end + shift).collect()
    }

    /// Cuts the collective of rank `rank` into those of consecutive windows of all parts, of which
    /// the terms of all ranks have at most `words` elements each. For each, the ranges of the rank's buffer, term after
    /// term and in the order of the parts, and the collective on the buffer that has these ranges
    /// one behind the other.
    pub fn windows(&self, rank: usize, words: usize) -> Vec<(Vec<Range<usize>>, Self)> {
        let most = (0..self.parts.len()).map(|rank| self.slots_of(rank)).max().unwrap_or(1);
        let window = (words / (self.parts.len() * most).max(1)).max(1);
        let longest = self.parts.iter().map(Range::len).max().unwrap_or(0);
        let cut = (0..longest).step_by(window).map(|start| {
            let parts: Vec<Range<usize>> = self
                .parts
                .iter()
                .map(|part| {
                    part.end.min(part.start + start)..part.end.min(part.start + start + window)
                })
                .collect();
            let ranges = (0..self.slots_of(rank)).flat_map(|term| self.of_term(term, &parts));
            let mut len = 0;
            let consecutive = parts.iter().map(|part| {
                len += part.len();
                len - part.len()..len
            });
            let consecutive: Vec<Range<usize>> = consecutive.collect();
            let here = Self {
                len,
                parts: consecutive,
                terms: self.terms.clone(),
                all_gathers: self.all_gathers.clone(),
            };
            (ranges.collect(), here)
        });
        cut.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_added_in_the_order_of_the_tree() {
        let pair = |start: usize| start..start + 2;
        let single = |start: usize| start..start + 1;
        // Nine virtual ranks on three ranks.
        let order = TermOrder::new(&[
            vec![pair(0), single(6)],
            vec![pair(2), single(7)],
            vec![pair(4), single(8)],
        ]);
        assert_eq!(order.of_ranks, [[0, 3], [1, 4], [2, 5]]);
        assert_eq!(order.additions, [(0, 1), (3, 4), (2, 3), (0, 2), (0, 5)]);
        let two = TermOrder::new(&[one(0..4), one(4..8)]);
        assert_eq!((two.terms_of(1), &two.additions[..]), (1, &[(0, 1)][..]));
    }

    /// Returns the terms of a rank that has one.
    fn one(term: Range<usize>) -> Vec<Range<usize>> {
        std::iter::once(term).collect()
    }

    #[test]
    fn windows_have_every_part() {
        let order = TermOrder::new(&[vec![0..2, 4..5], one(2..4)]);
        let whole = UnequalCollective {
            len: 10,
            parts: vec![0..7, 7..10],
            terms: Some(Arc::new(order)),
            all_gathers: vec![],
        };
        let windows = whole.windows(0, 16);
        let ranges: Vec<_> = windows.iter().map(|(ranges, _)| ranges.clone()).collect();
        assert_eq!(ranges[0], [0..4, 7..10, 10..14, 17..20]);
        assert_eq!(ranges[1], [4..7, 10..10, 14..17, 20..20]);
        assert_eq!((windows[1].1.len, &windows[1].1.parts[..]), (3, &[0..3, 3..3][..]));
    }
}
