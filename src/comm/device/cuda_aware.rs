//! Communication of device memory by its address, through CUDA-aware MPI or the device vendor's
//! library.
//!
//! The algorithms are those of the host, and the device adds received elements in the same order.
//! Only widely supported MPI functions are used: sends, receives, and the blocking collectives. The
//! host waits for each message, also over NCCL. So this is for what cannot run in the groups of
//! messages of `grouped_collective.rs`: rings, sums by one rank, broadcasts, vendor collectives.

use std::ops::Range;
use std::sync::Arc;

use super::comms::GroupComm;
use crate::polling;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::shared::Shared;
use crate::transport::{DeviceCollective, GroupRanks, Transport};
use hpctrain_base::error::Result;
use hpctrain_device::{DeviceCopies, DeviceEvent, DeviceSpan, Scratch};

/// Words of one message whose elements are added, 4 MiB.
const WORDS: usize = 1 << 20;

/// Messages in flight: one is added while the next is received.
const DEPTH: usize = 2;

/// Bytes of device scratch for received messages, without the scratch slots of algorithms.
pub const BYTES: usize = DEPTH * WORDS * size_of::<f32>();

/// Scratch device memory for messages; kept between collectives. All buffers of a rank are on one
/// device.
pub struct DeviceScratch {
    received: ScratchSlots,
    aside: ScratchSlots,
    /// Terms of the sums of [`grouped_collective`](super::grouped_collective).
    pub terms: ScratchSlots,
}

impl DeviceScratch {
    /// Creates empty scratch memory. `shared` counts its growth.
    pub fn new(shared: &Arc<Shared>) -> Self {
        let places = || ScratchSlots { places: Vec::new(), shared: shared.clone() };
        Self { received: places(), aside: places(), terms: places() }
    }
}

impl DeviceScratch {
    /// Frees all of it.
    pub fn empty(&mut self, shared: &Shared) {
        for places in [&mut self.received, &mut self.aside, &mut self.terms] {
            let pieces = std::mem::take(&mut places.places).into_iter().flatten();
            let words: usize = pieces.map(|piece| piece.span().words()).sum();
            shared.subtract_staging(words * size_of::<f32>());
        }
    }
}

/// Numbered pieces of device memory.
pub struct ScratchSlots {
    places: Vec<Option<Box<dyn Scratch>>>,
    shared: Arc<Shared>,
}

impl ScratchSlots {
    /// Ensures that slot `number` has at least `words` words.
    pub fn reserve(
        &mut self,
        copies: &dyn DeviceCopies,
        number: usize,
        words: usize,
    ) -> Result<()> {
        if self.places.len() <= number {
            self.places.resize_with(number + 1, || None);
        }
        let place = &mut self.places[number];
        let before = place.as_ref().map_or(0, |place| place.span().words());
        if before < words {
            *place = None;
            *place = Some(copies.scratch(words)?);
            self.shared.add_staging((words - before) * size_of::<f32>());
        }
        Ok(())
    }

    /// Ensures that the first `slots` slots have at least `words` words each, and returns these
    /// words.
    pub fn reserve_all(
        &mut self,
        copies: &dyn DeviceCopies,
        slots: usize,
        words: usize,
    ) -> Result<Vec<DeviceSpan<'_>>> {
        (0..slots).try_for_each(|number| self.reserve(copies, number, words))?;
        Ok((0..slots).filter_map(|number| self.span(number, 0..words)).collect())
    }

    /// Returns true if the first `slots` slots have at least `words` words each.
    pub fn have(&self, slots: usize, words: usize) -> bool {
        (0..slots).all(|number| {
            let place = self.places.get(number).and_then(Option::as_ref);
            place.is_some_and(|place| place.span().words() >= words)
        })
    }

    /// Returns `range` of slot `number`, if it is allocated.
    pub fn span(&self, number: usize, range: Range<usize>) -> Option<DeviceSpan<'_>> {
        Some(self.places.get(number)?.as_ref()?.span().part(range))
    }
}

/// Device memory whose address a library accepts.
pub struct CudaAware<'a> {
    pub memory: DeviceSpan<'a>,
    /// The communicator that carries messages; `None` if the transport is CUDA-aware itself.
    pub device_comm: Option<GroupComm<'a>>,
    pub copies: &'a dyn DeviceCopies,
    pub scratch: &'a mut DeviceScratch,
    pub shared: &'a Shared,
}

/// Divides ranges into messages. Sender and receiver pass the same ranges of the same buffer, so
/// both make the same messages.
fn messages(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range.clone()),
        }
    }
    let parts = joined.into_iter().flat_map(|range| {
        range.clone().step_by(WORDS).map(move |at| at..range.end.min(at + WORDS))
    });
    parts.collect()
}

/// Exchanges one message in each direction.
fn exchange_one(
    device_comm: Option<&GroupComm<'_>>,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    send: Option<(usize, DeviceSpan<'_>)>,
    receive: Option<(usize, DeviceSpan<'_>)>,
) -> Result<()> {
    match device_comm {
        Some(device_comm) => device_comm.exchange(transport, group, send, receive),
        None => transport.exchange_device(group, send, receive),
    }
}

impl CudaAware<'_> {
    /// Runs the messages of an exchange. `adding` has the events of additions that the device may
    /// not have finished when it returns.
    fn exchange_all(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        how: Combine,
        (to, sends): (usize, &[Range<usize>]),
        (from, receives): (usize, &[Range<usize>]),
        adding: &mut [Option<Box<dyn DeviceEvent>>; DEPTH],
    ) -> Result<()> {
        let Self { memory, device_comm, copies, scratch: room, shared } = self;
        let device_comm = device_comm.as_ref();
        let mut kept = 0;
        for i in 0..sends.len().max(receives.len()) {
            let send = sends.get(i).map(|range| (to, memory.part(range.clone())));
            let Some(range) = receives.get(i) else {
                exchange_one(device_comm, transport, group, send, None)?;
                continue;
            };
            let place = i % DEPTH;
            let into = match how {
                Combine::Replace => Some(memory.part(range.clone())),
                Combine::Add => {
                    if let Some(event) = adding[place].take() {
                        polling::wait_for_event(&*event, transport, shared)?;
                    }
                    room.received.reserve(*copies, place, WORDS)?;
                    room.received.span(place, 0..range.len())
                }
                Combine::Aside(number) => {
                    kept += range.len();
                    room.aside.span(number, kept - range.len()..kept)
                }
            };
            let Some(into) = into else { continue };
            exchange_one(device_comm, transport, group, send, Some((from, into)))?;
            if how == Combine::Add {
                copies.add(into, memory.part(range.clone()))?;
                adding[place] = Some(copies.mark()?);
            }
        }
        Ok(())
    }
}

impl ReduceBuffer for CudaAware<'_> {
    fn len(&self) -> usize {
        self.memory.words()
    }

    fn exchange(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        how: Combine,
        send: Option<(usize, &[Range<usize>])>,
        receive: Option<(usize, &[Range<usize>])>,
    ) -> Result<()> {
        let divide = |side: Option<(usize, &[Range<usize>])>| {
            side.map_or((0, Vec::new()), |(rank, ranges)| (rank, messages(ranges)))
        };
        let ((to, sends), (from, receives)) = (divide(send), divide(receive));
        if let Combine::Aside(number) = how {
            self.scratch.aside.reserve(
                self.copies,
                number,
                receives.iter().map(Range::len).sum(),
            )?;
        }
        let mut adding = [None, None];
        let exchanged =
            self.exchange_all(transport, group, how, (to, &sends), (from, &receives), &mut adding);
        // All of them end, also after an error, because the memory is about to be returned.
        let mut added = Ok(());
        for event in adding.into_iter().flatten() {
            added = added.and(event.wait());
        }
        exchanged.and(added)
    }

    fn set_aside(&mut self, number: usize, ranges: &[Range<usize>]) -> Result<()> {
        self.scratch.aside.reserve(self.copies, number, ranges.iter().map(Range::len).sum())?;
        let mut at = 0;
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            if let Some(place) = self.scratch.aside.span(number, at..at + range.len()) {
                self.copies.copy(self.memory.part(range.clone()), place)?;
            }
            at += range.len();
        }
        // The elements may be overwritten next.
        self.copies.mark()?.wait()
    }

    fn fold(
        &mut self,
        ranges: &[Range<usize>],
        own: usize,
        additions: &[(usize, usize)],
    ) -> Result<()> {
        let mut at = 0;
        for range in ranges {
            let here = at..at + range.len();
            let term = |number: usize| match number == own {
                true => Some(self.memory.part(range.clone())),
                false => self.scratch.aside.span(number, here.clone()),
            };
            let terms =
                additions.iter().filter_map(|&(into, from)| Some((term(into)?, term(from)?)));
            for (into, from) in terms {
                self.copies.add(from, into)?;
            }
            if let (true, Some(sum)) = (own != 0, term(0)) {
                self.copies.copy(sum, self.memory.part(range.clone()))?;
            }
            at += range.len();
        }
        self.copies.mark()?.wait()
    }

    fn vendor(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        call: DeviceCollective,
    ) -> Result<()> {
        if let Some(device_comm) = &self.device_comm {
            return device_comm.vendor(transport, group, call, self.memory);
        }
        transport.vendor_device(group, call, self.memory)?;
        let part = self.memory.words() / group.size();
        if let (DeviceCollective::ReduceScatter, true) = (call, group.rank > 0) {
            // MPI leaves the sum where part 0 was.
            self.copies.copy(
                self.memory.part(0..part),
                self.memory.part(group.rank * part..(group.rank + 1) * part),
            )?;
            self.copies.mark()?.wait()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_a_message_and_long_ranges_do_not_fit_one() {
        assert_eq!(messages(&[0..2, 2..2, 2..5, 7..8]), [0..5, 7..8]);
        assert_eq!(
            messages(&[5..WORDS + 6, WORDS + 9..WORDS + 9]),
            [5..WORDS + 5, WORDS + 5..WORDS + 6]
        );
    }
}
