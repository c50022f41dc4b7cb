//! Collectives through one rank: rank 0 receives the sum, by the tree of
//! [`super::halving_doubling`], and distributes it.
//!
//! It needs few messages, so it may be the fastest for short buffers. For long ones rank 0 is the
//! bottleneck.

use std::ops::Range;
use std::slice::from_ref;

use super::halving_doubling;
use super::partition::Shares;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// Reduces a range to rank 0, then broadcasts it.
pub fn all_reduce(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    range: &Range<usize>,
) -> Result<()> {
    halving_doubling::reduce(x, transport, group, from_ref(range))?;
    halving_doubling::broadcast(x, transport, group, range, 0)
}

/// Reduces to rank 0, then sends each owner its share.
pub fn reduce_scatter(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    halving_doubling::reduce(x, transport, group, &shares.all())?;
    halving_doubling::scatter(x, transport, group, shares)
}

/// Gathers all shares on rank 0, then broadcasts them.
pub fn all_gather(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    halving_doubling::gather(x, transport, group, shares)?;
    halving_doubling::broadcast_all(x, transport, group, &shares.all(), 0)
}

/// Sends the range from the root to each rank in turn.
pub fn broadcast(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    range: &Range<usize>,
    root: usize,
) -> Result<()> {
    let range = from_ref(range);
    for rank in (0..group.size()).filter(|&rank| rank != root) {
        if group.rank == root {
            x.exchange(transport, group, Combine::Replace, Some((rank, range)), None)?;
        } else if group.rank == rank {
            x.exchange(transport, group, Combine::Replace, None, Some((root, range)))?;
        }
    }
    Ok(())
}
