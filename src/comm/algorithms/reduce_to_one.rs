//! Everything through one rank: the sum is built on rank 0, by the tree of [`super::tree`], and handed out from there.
//!
//! Few messages, so it may be the fastest for short ones; for long ones rank 0 is the bottleneck.

use std::ops::Range;
use std::slice::from_ref;

use super::shares::Shares;
use super::tree;
use crate::operand::{Combine, Operand};
use crate::wire::{Members, Wire};
use hpctrain_base::error::Result;

/// The sum of a range to rank 0, and from there to all.
pub fn all_reduce(x: &mut dyn Operand, wire: &mut dyn Wire, group: &Members, range: &Range<usize>) -> Result<()> {
    tree::reduce(x, wire, group, from_ref(range))?;
    tree::broadcast(x, wire, group, range, 0)
}

/// The sum to rank 0, and from there to each owner its share.
pub fn reduce_scatter(x: &mut dyn Operand, wire: &mut dyn Wire, group: &Members, shares: &Shares) -> Result<()> {
    tree::reduce(x, wire, group, &shares.all())?;
    tree::scatter(x, wire, group, shares)
}

/// All shares to rank 0, and from there to all.
pub fn all_gather(x: &mut dyn Operand, wire: &mut dyn Wire, group: &Members, shares: &Shares) -> Result<()> {
    tree::gather(x, wire, group, shares)?;
    tree::broadcast_all(x, wire, group, &shares.all(), 0)
}

/// From the root to each rank.
pub fn broadcast(
    x: &mut dyn Operand,
    wire: &mut dyn Wire,
    group: &Members,
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
