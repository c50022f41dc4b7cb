//! Ring collectives: each rank exchanges with its two neighbours only, and every link carries the
//! same load.

use std::ops::Range;
use std::slice::from_ref;

use super::partition::Shares;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// Elements that a rank receives in a broadcast before it passes them on.
const SEGMENT: usize = 1 << 16;

/// Reduce-scatters in n−1 steps. A share starts at the rank after its owner, gains a term on each
/// rank, and arrives complete.
pub fn reduce_scatter(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    // The share of the rank `back` ranks before this one around the ring.
    let behind = |back: usize| shares.ranges((group.rank + 2 * size - back) % size);
    for step in 1..size {
        let receive = (group.previous(), behind(step + 1));
        x.exchange(
            transport,
            group,
            Combine::Add,
            Some((group.next(), behind(step))),
            Some(receive),
        )?;
    }
    Ok(())
}

/// Runs an all-gather in n−1 steps. Each rank first sends its own share, then the one it received
/// in the step before.
pub fn all_gather(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let size = group.size();
    let behind = |back: usize| shares.ranges((group.rank + size - back) % size);
    for step in 1..size {
        let receive = (group.previous(), behind(step));
        x.exchange(
            transport,
            group,
            Combine::Replace,
            Some((group.next(), behind(step - 1))),
            Some(receive),
        )?;
    }
    Ok(())
}

/// Broadcasts along a chain that starts at the root: each rank sends one segment while it receives
/// the next.
pub fn broadcast(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
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
            transport,
            group,
            Combine::Replace,
            send.as_ref().map(|range| (group.next(), from_ref(range))),
            receive.as_ref().map(|range| (group.previous(), from_ref(range))),
        )?;
    }
    Ok(())
}
