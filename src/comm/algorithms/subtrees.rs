//! Tree sums over many ranks whose number is not a power of two.
//!
//! The tree over n ranks consists of full subtrees, whose sizes are the powers of two that n is the
//! sum of, the largest first: for 13 ranks T₀ + (T₁ + T₂) with ranks 0–7, 8–11 and 12. Each subtree
//! runs recursive halving by itself. Then, from the last subtree to the first, every rank sends its
//! partial sums by a binomial tree to the ranks of the subtree before it that hold the same
//! elements, and these add them to their own. Finally the ranks of the first subtree send the
//! shares of the other ranks to their owners.
//!
//! Let 2^a be the size of the first subtree. The halving takes a steps, the final sends take 1, and
//! the sends between subtrees take at most a + 1 more: each waits for the larger of two subtrees,
//! so by induction the one into a subtree of 2^a ranks is over after at most 2a + 1 steps. All of
//! it takes at most 2⌈log₂ n⌉ rounds.

use std::ops::Range;

use super::partition::Shares;
use super::power_of_two::halve;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// Elements of all shares of a block together.
const BLOCK: usize = 1 << 20;

/// Returns the elements of one share in a block.
fn window(ranks: usize) -> usize {
    (BLOCK / ranks).max(1)
}

/// Returns the most elements that a rank keeps in scratch: a rank of a subtree of two has every
/// second share.
pub fn scratch_elements(ranks: usize) -> usize {
    ranks.div_ceil(2) * window(ranks)
}

/// Returns the ranks of each full subtree of the tree over `ranks` ranks.
fn trees(ranks: usize) -> Vec<Range<usize>> {
    let mut trees = Vec::new();
    let mut first = 0;
    while first < ranks {
        let size = 1 << (ranks - first).ilog2();
        trees.push(first..first + size);
        first += size;
    }
    trees
}

/// Leaves this rank's share of the sum in its memory.
pub fn reduce_scatter(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let window = window(group.size());
    let windows = (0..shares.longest()).step_by(window);
    windows
        .map(|start| shares.window(&(start..start + window)))
        .try_for_each(|block| reduce_scatter_block(x, transport, group, &block))
}

fn reduce_scatter_block(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let rank = group.rank;
    let trees = trees(size);
    // Rank i of a tree of t ranks has the shares whose numbers are i modulo t.
    let class = |like: usize, count: usize| shares.ranges_of((like..size).step_by(count));
    let Some(mine) = trees.iter().position(|tree| tree.contains(&rank)) else { return Ok(()) };
    let tree = &trees[mine];
    let members: Vec<usize> = tree.clone().collect();
    if let Some(alone) = group.subset(&members) {
        let tree_shares =
            Shares::new((0..tree.len()).map(|like| class(like, tree.len())).collect());
        halve(x, transport, &alone, &tree_shares)?;
    }
    let local = rank - tree.start;
    if let Some(next) = trees.get(mine + 1) {
        // Partial sums come from the rank of the next subtree whose elements include this rank's.
        let own = class(local, tree.len());
        x.set_aside(0, &own)?;
        let hand = HandOut { from: next.start + local % next.len(), tree, stride: next.len() };
        hand.receive(x, transport, group, shares, local / next.len())?;
        x.fold(&own, 1, &[(0, 1)])?;
    }
    if let Some(before) = mine.checked_sub(1) {
        HandOut { from: rank, tree: &trees[before], stride: tree.len() }
            .send(x, transport, group, shares, local)?;
    }
    let first = &trees[0];
    let other = rank.checked_sub(first.len());
    let owner = rank + first.len();
    if mine == 0 && owner < size {
        x.exchange(transport, group, Combine::Replace, Some((owner, shares.ranges(owner))), None)?;
    } else if let Some(other) = other {
        x.exchange(transport, group, Combine::Replace, None, Some((other, shares.ranges(rank))))?;
    }
    Ok(())
}

/// Distributes the elements of one rank to those ranks of the subtree before its own that hold
/// them, by a binomial tree whose root is the sender, which keeps none.
struct HandOut<'a> {
    from: usize,
    /// The subtree of the receivers. Every `stride`th of its ranks is one.
    tree: &'a Range<usize>,
    stride: usize,
}

impl HandOut<'_> {
    fn receivers(&self) -> usize {
        self.tree.len() / self.stride
    }

    /// Returns the elements of receivers `of`. Receiver 0 is rank `like` of its subtree.
    fn elements(
        &self,
        shares: &Shares,
        like: usize,
        of: Range<usize>,
        size: usize,
    ) -> Vec<Range<usize>> {
        let classes = of.map(|number| like + number * self.stride);
        shares.ranges_of(classes.flat_map(|class| (class..size).step_by(self.tree.len())))
    }

    /// Runs the root's side: sends the elements of the second half of the receivers to the first
    /// of that half, and so on, and finally receiver 0 its own. `like` is the root's index in its
    /// subtree.
    fn send(
        &self,
        x: &mut dyn ReduceBuffer,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        shares: &Shares,
        like: usize,
    ) -> Result<()> {
        let mut width = self.receivers();
        while width > 0 {
            let of = width / 2..width;
            let elements = self.elements(shares, like, of.clone(), group.size());
            let to = self.tree.start + like + of.start * self.stride;
            x.exchange(transport, group, Combine::Replace, Some((to, &elements)), None)?;
            width /= 2;
        }
        Ok(())
    }

    /// Runs the side of receiver `number`: receives its own elements and those of the receivers
    /// below it in the binomial tree, and sends these on.
    fn receive(
        &self,
        x: &mut dyn ReduceBuffer,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        shares: &Shares,
        number: usize,
    ) -> Result<()> {
        let like = self.from - self.tree.end;
        let rank = |number: usize| self.tree.start + like + number * self.stride;
        // The lowest set bit is the size of its subtree of receivers.
        let mut width = if number == 0 { 1 } else { 1 << number.trailing_zeros() };
        let from = match number.saturating_sub(width) {
            0 => self.from,
            leader => rank(leader),
        };
        let elements = self.elements(shares, like, number..number + width, group.size());
        x.exchange(transport, group, Combine::Replace, None, Some((from, &elements)))?;
        while width > 1 {
            width /= 2;
            let of = number + width..number + 2 * width;
            let elements = self.elements(shares, like, of.clone(), group.size());
            x.exchange(
                transport,
                group,
                Combine::Replace,
                Some((rank(of.start), &elements)),
                None,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_the_powers_of_two() {
        assert_eq!(trees(13), [0..8, 8..12, 12..13]);
        assert_eq!(trees(8), vec![0..8; 1]);
        assert_eq!(trees(1), vec![0..1; 1]);
    }

    #[test]
    fn memory_aside_does_not_grow_with_the_ranks() {
        assert!((12..5000).all(|ranks| scratch_elements(ranks) <= BLOCK / 2 + BLOCK / 16));
    }
}
