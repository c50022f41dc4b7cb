//! The operands of the algorithms: host or device memory that messages are sent from, received into
//! and added to.

use std::ops::Range;
use std::sync::Arc;

use super::shared::Shared;
use super::transport::{DeviceCollective, GroupRanks, Incoming, Outgoing, Transport};
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::add_serial;

/// The operation on received elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    /// They overwrite those in memory.
    Replace,
    /// They are added to those in memory.
    Add,
    /// They go to the scratch slot of this number, for [`ReduceBuffer::fold`].
    Aside(usize),
}

/// The memory of one collective. Ranges are in elements.
pub trait ReduceBuffer {
    fn len(&self) -> usize;

    /// Sends the elements of some ranges to one rank and receives elements from another into ranges
    /// that must not overlap them. Sender and receiver pass the same ranges and agree on whether
    /// the receiver sums.
    fn exchange(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        how: Combine,
        send: Option<(usize, &[Range<usize>])>,
        receive: Option<(usize, &[Range<usize>])>,
    ) -> Result<()>;

    /// Copies the elements of some ranges to the scratch slot `number`, for
    /// [`ReduceBuffer::fold`].
    fn set_aside(&mut self, number: usize, ranges: &[Range<usize>]) -> Result<()>;

    /// Adds terms by `additions` (into, from) in this order and leaves term 0 at `ranges`. Term
    /// `own`, if there is one of this number, is in memory at `ranges`; the others are in the scratch
    /// slots of their numbers.
    fn fold(
        &mut self,
        ranges: &[Range<usize>],
        own: usize,
        additions: &[(usize, usize)],
    ) -> Result<()>;

    /// Runs a collective of the transport's library on the whole memory.
    fn vendor(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        call: DeviceCollective,
    ) -> Result<()>;
}

/// Scratch memory for terms of sums; kept between collectives.
pub struct Scratch {
    aside: Vec<Vec<f32>>,
    shared: Arc<Shared>,
}

impl Scratch {
    /// Creates empty scratch memory. `shared` counts its growth.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { aside: Vec::new(), shared }
    }

    /// Returns scratch slot `number`, resized to `len` elements.
    fn aside(&mut self, number: usize, len: usize) -> &mut [f32] {
        if self.aside.len() <= number {
            self.aside.resize_with(number + 1, Vec::new);
        }
        let place = &mut self.aside[number];
        let before = place.capacity();
        place.resize(len, 0.0);
        self.shared.add_staging((place.capacity() - before) * size_of::<f32>());
        place
    }
}

/// Host memory, which the transport may access directly.
pub struct HostBuffer<'a> {
    pub memory: &'a mut [f32],
    pub scratch: &'a mut Scratch,
}

/// Pieces of memory that are read, and pieces that are written.
type Pieces<'a> = (Vec<&'a [f32]>, Vec<&'a mut [f32]>);

/// Borrows ranges of `memory` that do not overlap.
///
/// # Errors
/// Returns an error if the ranges are not in ascending order, or overlap.
fn pieces<'a>(
    memory: &'a mut [f32],
    read: &[Range<usize>],
    written: &[Range<usize>],
) -> Result<Pieces<'a>> {
    // Elements are sent and received in the order of their ranges.
    let ascending = |ranges: &[Range<usize>]| {
        ranges.iter().filter(|range| !range.is_empty()).is_sorted_by_key(|range| range.start)
    };
    if !ascending(read) || !ascending(written) {
        return Err(Error::internal("the ranges of an exchange are not in ascending order"));
    }
    let tag = |write: bool| move |range: &Range<usize>| (range.clone(), write);
    let mut order: Vec<_> =
        read.iter().map(tag(false)).chain(written.iter().map(tag(true))).collect();
    order.retain(|(range, _)| !range.is_empty());
    order.sort_unstable_by_key(|(range, _)| range.start);
    let mut reads = Vec::with_capacity(read.len());
    let mut writes = Vec::with_capacity(written.len());
    let mut rest = memory;
    let mut at = 0;
    for (range, write) in order {
        let gap = range.start.checked_sub(at);
        let gap = gap.ok_or_else(|| {
            Error::internal(format!("the ranges of an exchange overlap before element {at}"))
        })?;
        let (piece, after) = rest[gap..].split_at_mut(range.len());
        if write {
            writes.push(piece);
        } else {
            reads.push(&*piece);
        }
        (rest, at) = (after, range.end);
    }
    Ok((reads, writes))
}

impl ReduceBuffer for HostBuffer<'_> {
    fn len(&self) -> usize {
        self.memory.len()
    }

    fn exchange(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        how: Combine,
        send: Option<(usize, &[Range<usize>])>,
        receive: Option<(usize, &[Range<usize>])>,
    ) -> Result<()> {
        let read = send.map_or(&[][..], |(_, ranges)| ranges);
        let ranges = receive.map_or(&[][..], |(_, ranges)| ranges);
        let aside = matches!(how, Combine::Aside(_));
        let (reads, mut writes) = pieces(self.memory, read, if aside { &[] } else { ranges })?;
        if let Combine::Aside(number) = how {
            writes = vec![self.scratch.aside(number, ranges.iter().map(Range::len).sum())];
        }
        let add = how == Combine::Add;
        transport.exchange(
            group,
            how != Combine::Replace,
            send.map(|(to, _)| Outgoing { to, pieces: &reads }),
            receive.map(|(from, _)| Incoming { from, pieces: &mut writes, add }),
        )
    }

    fn set_aside(&mut self, number: usize, ranges: &[Range<usize>]) -> Result<()> {
        let mut rest = self.scratch.aside(number, ranges.iter().map(Range::len).sum());
        for range in ranges {
            let here;
            (here, rest) = rest.split_at_mut(range.len());
            here.copy_from_slice(&self.memory[range.clone()]);
        }
        Ok(())
    }

    fn fold(
        &mut self,
        ranges: &[Range<usize>],
        own: usize,
        additions: &[(usize, usize)],
    ) -> Result<()> {
        let aside = &mut self.scratch.aside;
        let mut at = 0;
        for range in ranges {
            let memory = &mut self.memory[range.clone()];
            let here = at..at + range.len();
            for &(into, from) in additions {
                if into == own {
                    add_serial(&aside[from][here.clone()], memory);
                } else if from == own {
                    add_serial(memory, &mut aside[into][here.clone()]);
                } else if let Ok([into, from]) = aside.get_disjoint_mut([into, from]) {
                    add_serial(&from[here.clone()], &mut into[here.clone()]);
                }
            }
            if own != 0 {
                memory.copy_from_slice(&aside[0][here]);
            }
            at += range.len();
        }
        Ok(())
    }

    fn vendor(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        call: DeviceCollective,
    ) -> Result<()> {
        transport.vendor(group, call, self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_disjoint_and_in_order() {
        let mut memory: Vec<f32> = (0..10).map(|i| i as f32).collect();
        let (reads, writes) = pieces(&mut memory, &[0..2, 8..10], &[2..3, 4..4, 5..8]).unwrap();
        assert_eq!(reads, [&[0.0, 1.0], &[8.0, 9.0]]);
        assert_eq!(writes, [&[2.0][..], &[5.0, 6.0, 7.0]]);
        assert!(pieces(&mut memory, &[0..4, 6..7], &[3..5, 8..9]).is_err());
        assert!(pieces(&mut memory, &[4..5, 0..1], &[]).is_err());
    }
}
