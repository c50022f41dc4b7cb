//! The reproducible algorithm: every element is summed by the same binary tree over the ranks.
//!
//! Level k of the tree adds, to the partial sum of rank i (a multiple of 2^(k+1)), the one of rank
//! i + 2^k if that rank exists: (x0+x1)+(x2+x3) for four ranks, (x0+x1)+x2 for three. Neither the
//! position of an element nor the way it travels changes the tree, and its lower levels can as well
//! be evaluated inside a rank, so that a sum over eight terms has the same bits on 8, 4, 2 or 1
//! ranks.
//!
//! A power of two of ranks halves and doubles recursively (Thakur, Rabenseifner and Gropp,
//! "Optimization of Collective Communication Operations in MPICH", 2005), nearest partner first, as
//! the tree's lowest level wants it. Few ranks of another number exchange shares directly: the
//! owner of a share receives all its terms and adds them in the tree's order. Of more ranks
//! ([`super::subtrees`]) the largest power of two halves, and so do the rest.

use std::ops::Range;
use std::slice::from_ref;

use super::partition::Shares;
use super::power_of_two::{double, halve};
use super::subtrees;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// Elements of one direct message: the owner keeps as many of each rank aside.
const BLOCK: usize = 1 << 14;

/// The most ranks that exchange shares directly: with one more it would take more than 2⌈log₂ n⌉ +
/// 2 rounds.
const DIRECT: usize = 11;

/// Elements that a rank keeps aside, at most.
pub fn aside(ranks: usize) -> usize {
    match ranks {
        _ if ranks.is_power_of_two() => 0,
        ..=DIRECT => ranks * BLOCK,
        _ => subtrees::aside(ranks),
    }
}

/// My share of the sum.
pub fn reduce_scatter(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    match group.size() {
        size if size.is_power_of_two() => halve(x, wire, group, shares),
        ..=DIRECT => exchange_directly(x, wire, group, shares),
        _ => subtrees::reduce_scatter(x, wire, group, shares),
    }
}

/// n−1 steps a block: in step s each rank sends to the owner s ranks ahead, so that nobody is sent
/// to twice.
fn exchange_directly(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let rank = group.rank;
    let additions = additions(size);
    for start in (0..shares.longest()).step_by(BLOCK) {
        let block = shares.window(&(start..start + BLOCK));
        for step in 1..size {
            let to = (rank + step) % size;
            let from = (rank + size - step) % size;
            let receive = (from, block.of(rank));
            x.exchange(wire, group, Combine::Aside(from), Some((to, block.of(to))), Some(receive))?;
        }
        x.fold(block.of(rank), rank, &additions)?;
    }
    Ok(())
}

/// The additions (into, from) of the tree over `size` terms, in order; the sum ends in term 0.
fn additions(size: usize) -> Vec<(usize, usize)> {
    let strides = std::iter::successors(Some(1), |stride| Some(2 * stride))
        .take_while(|&stride| stride < size);
    strides
        .flat_map(|stride| {
            (0..size - stride).step_by(2 * stride).map(move |into| (into, into + stride))
        })
        .collect()
}

/// The whole sum, on rank 0. The elements of the other ranks are unspecified.
pub fn reduce(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    ranges: &[Range<usize>],
) -> Result<()> {
    for (into, from) in additions(group.size()) {
        if group.rank == from {
            x.exchange(wire, group, Combine::Add, Some((into, ranges)), None)?;
        } else if group.rank == into {
            x.exchange(wire, group, Combine::Add, None, Some((from, ranges)))?;
        }
    }
    Ok(())
}

/// Every rank's share: the halving backwards; or in step k each rank has the shares of the 2^k
/// ranks from itself on, and takes those of the next ones (Bruck et al., 1997). ⌈log₂ n⌉ steps.
pub fn all_gather(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let rank = group.rank;
    if !size.is_power_of_two() {
        let from = |first: usize, count: usize| {
            shares.of_all((first..first + count).map(|rank| rank % size))
        };
        let mut distance = 1;
        while distance < size {
            let count = distance.min(size - distance);
            let behind = (rank + size - distance) % size;
            let ahead = (rank + distance) % size;
            let mine = from(rank, count);
            let theirs = from(ahead, count);
            x.exchange(
                wire,
                group,
                Combine::Replace,
                Some((behind, &mine)),
                Some((ahead, &theirs)),
            )?;
            distance *= 2;
        }
        return Ok(());
    }
    double(x, wire, group, shares)
}

/// The shares of `first` and the ranks after it whose way to rank 0 leads over it by a binomial
/// tree, when steps up to `stride` are done.
fn below(shares: &Shares, first: usize, stride: usize, size: usize) -> Vec<Range<usize>> {
    shares.of_all(first..size.min(first + stride))
}

/// All shares to rank 0, by a binomial tree: in step k ranks whose lowest set bit is 2^k send what
/// they have 2^k ranks back.
pub fn gather(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let rank = group.rank;
    let mut stride = 1;
    while stride < size {
        if rank % (2 * stride) == stride {
            let mine = below(shares, rank, stride, size);
            x.exchange(wire, group, Combine::Replace, Some((rank - stride, &mine)), None)?;
        } else if rank.is_multiple_of(2 * stride) && rank + stride < size {
            let theirs = below(shares, rank + stride, stride, size);
            x.exchange(wire, group, Combine::Replace, None, Some((rank + stride, &theirs)))?;
        }
        stride *= 2;
    }
    Ok(())
}

/// From rank 0 to each its share: [`gather`] backwards.
pub fn scatter(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let rank = group.rank;
    let mut stride = size.next_power_of_two() / 2;
    while stride > 0 {
        if rank % (2 * stride) == stride {
            let mine = below(shares, rank, stride, size);
            x.exchange(wire, group, Combine::Replace, None, Some((rank - stride, &mine)))?;
        } else if rank.is_multiple_of(2 * stride) && rank + stride < size {
            let theirs = below(shares, rank + stride, stride, size);
            x.exchange(wire, group, Combine::Replace, Some((rank + stride, &theirs)), None)?;
        }
        stride /= 2;
    }
    Ok(())
}

/// A binomial tree: in step k the 2^k ranks that have the elements send them 2^k ranks ahead.
pub fn broadcast(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    range: &Range<usize>,
    root: usize,
) -> Result<()> {
    broadcast_all(x, wire, group, from_ref(range), root)
}

/// As [`broadcast`], of several ranges.
pub fn broadcast_all(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    ranges: &[Range<usize>],
    root: usize,
) -> Result<()> {
    let size = group.size();
    // Counted from the root.
    let me = (group.rank + size - root) % size;
    let mut stride = 1;
    while stride < size {
        let absolute = |relative: usize| (relative + root) % size;
        if me < stride && me + stride < size {
            x.exchange(wire, group, Combine::Replace, Some((absolute(me + stride), ranges)), None)?;
        } else if (stride..2 * stride).contains(&me) {
            x.exchange(wire, group, Combine::Replace, None, Some((absolute(me - stride), ranges)))?;
        }
        stride *= 2;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_the_documented_one() {
        assert_eq!(additions(1), []);
        assert_eq!(additions(3), [(0, 1), (0, 2)]);
        assert_eq!(additions(4), [(0, 1), (2, 3), (0, 2)]);
        assert_eq!(additions(6), [(0, 1), (2, 3), (4, 5), (0, 2), (0, 4)]);
    }
}
