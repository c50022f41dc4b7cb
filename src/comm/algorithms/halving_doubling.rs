//! Recursive halving and doubling, the deterministic algorithm: the same binary tree over the ranks
//! sums every element.
//!
//! Level k of the tree adds, to the partial sum of rank i (a multiple of 2^(k+1)), that of rank i +
//! 2^k if that rank exists: (x0+x1)+(x2+x3) for four ranks, (x0+x1)+x2 for three. Neither the
//! position of an element nor its route changes the tree, and one rank can evaluate the lower
//! levels by itself, so a sum over eight terms has the same bits on 8, 4, 2 or 1 ranks.
//!
//! On a power of two of ranks, halving and doubling start with the nearest partner, which the
//! tree's lowest level requires (Thakur, Rabenseifner and Gropp, "Optimization of Collective
//! Communication Operations in MPICH", 2005). Other groups of at most [`DIRECT`] ranks exchange
//! shares directly: the owner of a share receives all its terms and adds them in the tree's order.
//! Larger groups are divided into powers of two ([`super::subtrees`]).

use std::ops::Range;
use std::slice::from_ref;

use super::partition::Shares;
use super::power_of_two::{double, halve};
use super::subtrees;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// Elements of one direct message. The owner keeps this many elements of each rank in scratch.
const BLOCK: usize = 1 << 14;

/// The most ranks that exchange shares directly. With one more, that would take more than
/// 2⌈log₂ n⌉ + 2 rounds.
const DIRECT: usize = 11;

/// Returns the most elements that a rank keeps in scratch.
pub fn scratch_elements(ranks: usize) -> usize {
    match ranks {
        _ if ranks.is_power_of_two() => 0,
        ..=DIRECT => ranks * BLOCK,
        _ => subtrees::scratch_elements(ranks),
    }
}

/// Leaves this rank's share of the sum in its memory.
pub fn reduce_scatter(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    match group.size() {
        size if size.is_power_of_two() => halve(x, transport, group, shares),
        ..=DIRECT => exchange_directly(x, transport, group, shares),
        _ => subtrees::reduce_scatter(x, transport, group, shares),
    }
}

/// Sends every share directly to its owner, in n−1 steps for each block: in step s each rank sends
/// to the rank s ahead, so that each rank receives one message in a step.
fn exchange_directly(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
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
            let receive = (from, block.ranges(rank));
            x.exchange(
                transport,
                group,
                Combine::Aside(from),
                Some((to, block.ranges(to))),
                Some(receive),
            )?;
        }
        x.fold(block.ranges(rank), rank, &additions)?;
    }
    Ok(())
}

/// Returns the additions (into, from) of the tree over `size` terms, in order. The sum ends in
/// term 0.
fn additions(size: usize) -> Vec<(usize, usize)> {
    let strides = std::iter::successors(Some(1), |stride| Some(2 * stride))
        .take_while(|&stride| stride < size);
    strides
        .flat_map(|stride| {
            (0..size - stride).step_by(2 * stride).map(move |into| (into, into + stride))
        })
        .collect()
}

/// Leaves the whole sum on rank 0. The elements of the other ranks are unspecified.
pub fn reduce(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    ranges: &[Range<usize>],
) -> Result<()> {
    for (into, from) in additions(group.size()) {
        if group.rank == from {
            x.exchange(transport, group, Combine::Add, Some((into, ranges)), None)?;
        } else if group.rank == into {
            x.exchange(transport, group, Combine::Add, None, Some((from, ranges)))?;
        }
    }
    Ok(())
}

/// Brings every rank's share to every rank, in ⌈log₂ n⌉ steps. On a power of two of ranks this is
/// recursive doubling; otherwise each rank has before step k the shares of the 2^k ranks from
/// itself on, and receives those of the next ranks (Bruck et al., 1997).
pub fn all_gather(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let rank = group.rank;
    if !size.is_power_of_two() {
        let from = |first: usize, count: usize| {
            shares.ranges_of((first..first + count).map(|rank| rank % size))
        };
        let mut distance = 1;
        while distance < size {
            let count = distance.min(size - distance);
            let behind = (rank + size - distance) % size;
            let ahead = (rank + distance) % size;
            let mine = from(rank, count);
            let theirs = from(ahead, count);
            x.exchange(
                transport,
                group,
                Combine::Replace,
                Some((behind, &mine)),
                Some((ahead, &theirs)),
            )?;
            distance *= 2;
        }
        return Ok(());
    }
    double(x, transport, group, shares)
}

/// Returns the shares of the subtree of rank `first` in the binomial tree to rank 0: the shares
/// that it has received when the steps below `stride` are done, and its own.
fn below(shares: &Shares, first: usize, stride: usize, size: usize) -> Vec<Range<usize>> {
    shares.ranges_of(first..size.min(first + stride))
}

/// Brings all shares to rank 0 by a binomial tree: in step k each rank whose lowest set bit is 2^k
/// sends the shares that it has to the rank 2^k before it.
pub fn gather(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let rank = group.rank;
    let mut stride = 1;
    while stride < size {
        if rank % (2 * stride) == stride {
            let mine = below(shares, rank, stride, size);
            x.exchange(transport, group, Combine::Replace, Some((rank - stride, &mine)), None)?;
        } else if rank.is_multiple_of(2 * stride) && rank + stride < size {
            let theirs = below(shares, rank + stride, stride, size);
            x.exchange(transport, group, Combine::Replace, None, Some((rank + stride, &theirs)))?;
        }
        stride *= 2;
    }
    Ok(())
}

/// Sends each rank its share from rank 0: the reverse of [`gather`].
pub fn scatter(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let rank = group.rank;
    let mut stride = size.next_power_of_two() / 2;
    while stride > 0 {
        if rank % (2 * stride) == stride {
            let mine = below(shares, rank, stride, size);
            x.exchange(transport, group, Combine::Replace, None, Some((rank - stride, &mine)))?;
        } else if rank.is_multiple_of(2 * stride) && rank + stride < size {
            let theirs = below(shares, rank + stride, stride, size);
            x.exchange(transport, group, Combine::Replace, Some((rank + stride, &theirs)), None)?;
        }
        stride /= 2;
    }
    Ok(())
}

/// Broadcasts by a binomial tree: in step k the 2^k ranks that have the elements send them 2^k
/// ranks ahead.
pub fn broadcast(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    range: &Range<usize>,
    root: usize,
) -> Result<()> {
    broadcast_all(x, transport, group, from_ref(range), root)
}

/// Broadcasts several ranges, like [`broadcast`].
pub fn broadcast_all(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
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
            x.exchange(
                transport,
                group,
                Combine::Replace,
                Some((absolute(me + stride), ranges)),
                None,
            )?;
        } else if (stride..2 * stride).contains(&me) {
            x.exchange(
                transport,
                group,
                Combine::Replace,
                None,
                Some((absolute(me - stride), ranges)),
            )?;
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
