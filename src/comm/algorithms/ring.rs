//! Around a ring: each rank talks to two neighbours only, and every link carries the same load.

use std::ops::Range;
use std::slice::from_ref;

use super::partition::Shares;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// Elements a rank of a broadcast receives before it passes them on.
const SEGMENT: usize = 1 << 16;

/// n−1 steps. A share starts its way around behind its owner, collects a term on each rank, and
/// arrives complete.
pub fn reduce_scatter(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    // `back` ranks behind me around the ring.
    let behind = |back: usize| shares.of((group.rank + 2 * size - back) % size);
    for step in 1..size {
        let receive = (group.previous(), behind(step + 1));
        x.exchange(wire, group, Combine::Add, Some((group.next(), behind(step))), Some(receive))?;
    }
    Ok(())
}

/// n−1 steps. Each rank passes on the share it received in the step before, its own first.
pub fn all_gather(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let behind = |back: usize| shares.of((group.rank + size - back) % size);
    for step in 1..size {
        let receive = (group.previous(), behind(step));
        x.exchange(
            wire,
            group,
            Combine::Replace,
            Some((group.next(), behind(step - 1))),
            Some(receive),
        )?;
    }
    Ok(())
}

/// A chain that starts at the root: each rank passes one segment on while it receives the next.
pub fn broadcast(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    range: &Range<usize>,
    root: usize,
) -> Result<()> {
    let segments = range.len().div_ceil(SEGMENT);
    let segment =
        |i: usize| range.start + i * SEGMENT..range.end.min(range.start + (i + 1) * SEGMENT);
    let is_root = group.rank == root;
    let is_last = group.next() == root;
    // The root has every segment; the others send segment i−1 while segment i arrives.
    let delay = usize::from(!is_root);
    for step in 0..segments + delay {
        let send = step.checked_sub(delay).filter(|_| !is_last).map(segment);
        let receive = Some(step).filter(|_| !is_root && step < segments).map(segment);
        x.exchange(
            wire,
            group,
            Combine::Replace,
            send.as_ref().map(|range| (group.next(), from_ref(range))),
            receive.as_ref().map(|range| (group.previous(), from_ref(range))),
        )?;
    }
    Ok(())
}
