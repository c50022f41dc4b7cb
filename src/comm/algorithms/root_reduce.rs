//! Everything through one rank: the sum is built on rank 0, by the tree of [`super::tree`], and
//! handed out from there.
//!
//! Few messages, so it may be the fastest for short ones; for long ones rank 0 is the bottleneck.

use std::ops::Range;
use std::slice::from_ref;

use super::halving_doubling;
use super::partition::Shares;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// The sum of a range to rank 0, and from there to all.
pub fn all_reduce(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    range: &Range<usize>,
) -> Result<()> {
    halving_doubling::reduce(x, wire, group, from_ref(range))?;
    halving_doubling::broadcast(x, wire, group, range, 0)
}

/// The sum to rank 0, and from there to each owner its share.
pub fn reduce_scatter(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    halving_doubling::reduce(x, wire, group, &shares.all())?;
    halving_doubling::scatter(x, wire, group, shares)
}

/// All shares to rank 0, and from there to all.
pub fn all_gather(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    halving_doubling::gather(x, wire, group, shares)?;
    halving_doubling::broadcast_all(x, wire, group, &shares.all(), 0)
}

/// From the root to each rank.
pub fn broadcast(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    range: &Range<usize>,
    root: usize,
) -> Result<()> {
    let range = from_ref(range);
    for rank in (0..group.size()).filter(|&rank| rank != root) {
        if group.rank == root {
            x.exchange(wire, group, Combine::Replace, Some((rank, range)), None)?;
        } else if group.rank == rank {
            x.exchange(wire, group, Combine::Replace, None, Some((root, range)))?;
        }
    }
    Ok(())
}
