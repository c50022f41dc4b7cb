//! Sums of the tree over many ranks that are no power of two.
//!
//! The tree over n ranks is one of full trees, of the powers of two of which n is the sum, the
//! largest first: for 13 ranks T₀ + (T₁ + T₂) of ranks 0–7, 8–11 and 12. Each of them halves by
//! itself. Then, from the last to the first, every rank of a tree hands its part out to those ranks
//! of the tree before it that hold the same elements, by a binomial tree, and they add it to their
//! own; at last the ranks of the first tree send the shares of the others to their owners.
//!
//! With 2^a the size of the first tree the first part of this takes a steps, the last one 1, and
//! the hand-outs at most a + 1 more: each waits for the larger of two trees, so it takes at most
//! 2a + 1 steps until the one into a tree of 2^a ranks is over, by induction. So all takes at most
//! 2⌈log₂ n⌉ rounds.

use std::ops::Range;

use super::partition::Shares;
use super::power_of_two::halve;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// Elements that the shares of a block have together.
const BLOCK: usize = 1 << 20;

/// Elements of a share in a block.
fn window(ranks: usize) -> usize {
    (BLOCK / ranks).max(1)
}

/// Elements that a rank keeps aside, at most: a rank of a tree of two has every second share.
pub fn aside(ranks: usize) -> usize {
    ranks.div_ceil(2) * window(ranks)
}

/// The full trees over `ranks` ranks.
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

/// My share of the sum.
pub fn reduce_scatter(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let window = window(group.size());
    let windows = (0..shares.longest()).step_by(window);
    windows
        .map(|start| shares.window(&(start..start + window)))
        .try_for_each(|block| of_block(x, wire, group, &block))
}

fn of_block(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let rank = group.rank;
    let trees = trees(size);
    // Rank i of a tree of t ranks has the shares whose numbers are i modulo t.
    let class = |like: usize, count: usize| shares.of_all((like..size).step_by(count));
    let Some(mine) = trees.iter().position(|tree| tree.contains(&rank)) else { return Ok(()) };
    let tree = &trees[mine];
    let members: Vec<usize> = tree.clone().collect();
    if let Some(alone) = group.subset(&members) {
        let of_tree = Shares::new((0..tree.len()).map(|like| class(like, tree.len())).collect());
        halve(x, wire, &alone, &of_tree)?;
    }
    let local = rank - tree.start;
    if let Some(next) = trees.get(mine + 1) {
        // A part comes from the rank of the next tree that has my elements among its own.
        let own = class(local, tree.len());
        x.set_aside(0, &own)?;
        let hand = HandOut { from: next.start + local % next.len(), tree, apart: next.len() };
        hand.receive(x, wire, group, shares, local / next.len())?;
        x.fold(&own, 1, &[(0, 1)])?;
    }
    if let Some(before) = mine.checked_sub(1) {
        HandOut { from: rank, tree: &trees[before], apart: tree.len() }
            .send(x, wire, group, shares, local)?;
    }
    let first = &trees[0];
    let other = rank.checked_sub(first.len());
    let owner = rank + first.len();
    if mine == 0 && owner < size {
        x.exchange(wire, group, Combine::Replace, Some((owner, shares.of(owner))), None)?;
    } else if let Some(other) = other {
        x.exchange(wire, group, Combine::Replace, None, Some((other, shares.of(rank))))?;
    }
    Ok(())
}

/// The way of the elements of one rank to those ranks of the tree before its own that hold them: by
/// a binomial tree, in which it is the root and holds none itself.
struct HandOut<'a> {
    from: usize,
    /// The tree of the receivers, every `apart`th of which is one.
    tree: &'a Range<usize>,
    apart: usize,
}

impl HandOut<'_> {
    fn receivers(&self) -> usize {
        self.tree.len() / self.apart
    }

    /// The elements of receivers `of`, the first of which are those of rank `like` of their tree.
    fn elements(
        &self,
        shares: &Shares,
        like: usize,
        of: Range<usize>,
        size: usize,
    ) -> Vec<Range<usize>> {
        let classes = of.map(|number| like + number * self.apart);
        shares.of_all(classes.flat_map(|class| (class..size).step_by(self.tree.len())))
    }

    /// The root's part: half of what is left to receiver width/2, and so on; at last receiver 0 its
    /// own. `like` is its number in its tree.
    fn send(
        &self,
        x: &mut dyn ReduceBuffer,
        wire: &mut dyn Transport,
        group: &GroupRanks,
        shares: &Shares,
        like: usize,
    ) -> Result<()> {
        let mut width = self.receivers();
        while width > 0 {
            let of = width / 2..width;
            let elements = self.elements(shares, like, of.clone(), group.size());
            let to = self.tree.start + like + of.start * self.apart;
            x.exchange(wire, group, Combine::Replace, Some((to, &elements)), None)?;
            width /= 2;
        }
        Ok(())
    }

    /// The part of receiver `number`: takes its own elements and those of the receivers behind it,
    /// and hands these on.
    fn receive(
        &self,
        x: &mut dyn ReduceBuffer,
        wire: &mut dyn Transport,
        group: &GroupRanks,
        shares: &Shares,
        number: usize,
    ) -> Result<()> {
        let like = self.from - self.tree.end;
        let rank = |number: usize| self.tree.start + like + number * self.apart;
        // As many as its lowest set bit says come with it.
        let mut width = if number == 0 { 1 } else { 1 << number.trailing_zeros() };
        let from = match number.saturating_sub(width) {
            0 => self.from,
            leader => rank(leader),
        };
        let elements = self.elements(shares, like, number..number + width, group.size());
        x.exchange(wire, group, Combine::Replace, None, Some((from, &elements)))?;
        while width > 1 {
            width /= 2;
            let of = number + width..number + 2 * width;
            let elements = self.elements(shares, like, of.clone(), group.size());
            x.exchange(wire, group, Combine::Replace, Some((rank(of.start), &elements)), None)?;
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
        assert!((12..5000).all(|ranks| aside(ranks) <= BLOCK / 2 + BLOCK / 16));
    }
}
