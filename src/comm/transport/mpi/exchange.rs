//! The two directions of an exchange, each through the node's shared memory or MPI messages.

use std::collections::VecDeque;
use std::ops::Range;

use super::ffi;

use super::request::{Bytes, MessageKind, MpiRequest};
use super::shm_window::{SLOT, Segment};
use crate::chunking::ChunkCursor;
use crate::transport::{DeviceMessage, GroupRanks, Incoming, Outgoing, check_length};
use hpctrain_base::error::Result;
use hpctrain_cpu::{add_serial, copy_for_another_core};

/// Elements of one MPI message, 1 MiB: received elements are added while they are still in the
/// cache. Between two processes of one machine, 256 KiB took a fifth longer and 128 KiB a quarter;
/// 4 MiB made no difference.
const MESSAGE: usize = 1 << 18;

/// MPI messages in flight at once: one is transferred while the one before is added.
const DEPTH: usize = 2;

/// Bytes of staging memory of MPI messages.
pub const BYTES: usize = 2 * DEPTH * MESSAGE * size_of::<f32>();

/// Staging memory for MPI messages that consist of several pieces, or are to be added.
#[derive(Default)]
pub struct ChunkStaging {
    packed: [Vec<f32>; DEPTH],
    received: [Vec<f32>; DEPTH],
}

impl ChunkStaging {
    /// Returns the bytes allocated.
    pub fn bytes(&self) -> usize {
        self.packed.iter().chain(&self.received).map(|buf| buf.capacity() * size_of::<f32>()).sum()
    }
}

/// The piece and range of each part of a message.
type Parts = Vec<(usize, Range<usize>)>;

/// The sending direction.
pub struct Sending<'a> {
    from: Outgoing<'a>,
    cursor: ChunkCursor,
    done: bool,
    /// The number of MPI messages so far, and those in flight.
    count: usize,
    in_flight: VecDeque<MpiRequest>,
}

impl<'a> Sending<'a> {
    pub fn new(from: Option<Outgoing<'a>>) -> Self {
        let nothing = Outgoing { to: 0, pieces: &[] };
        let (from, done) = (from.unwrap_or(nothing), from.is_none());
        Self {
            from,
            cursor: ChunkCursor::default(),
            done,
            count: 0,
            in_flight: VecDeque::with_capacity(DEPTH),
        }
    }

    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Waits until MPI no longer uses the memory, on a communicator that was revoked.
    pub fn let_go(&mut self) -> Result<()> {
        self.in_flight.iter_mut().try_for_each(MpiRequest::let_go)
    }

    fn next_len(&self, limit: usize) -> usize {
        let mut ahead = self.cursor;
        ahead.message(|i| self.from.pieces.get(i).map(|piece| piece.len()), limit, |_, _| {})
    }

    /// Writes the next piece to shared memory if a slot is free. Returns true on progress.
    pub fn advance_shared(&mut self, segment: &mut Segment, to: usize) -> bool {
        if self.done {
            return false;
        }
        if self.next_len(SLOT) == 0 {
            self.done = true;
            return true;
        }
        let pieces = self.from.pieces;
        let cursor = &mut self.cursor;
        segment.put(to, |slot| {
            let mut at = 0;
            cursor.message(
                |i| pieces.get(i).map(|piece| piece.len()),
                SLOT,
                |piece, range| {
                    let len = range.len();
                    copy_for_another_core(&pieces[piece][range], &mut slot[at..at + len]);
                    at += len;
                },
            );
        })
    }

    /// Starts and completes MPI messages. Returns true on progress.
    pub fn advance_mpi(
        &mut self,
        world: ffi::MPI_Comm,
        group: &GroupRanks,
        staging: &mut ChunkStaging,
    ) -> Result<bool> {
        let mut progressed = false;
        if let Some(request) = self.in_flight.front_mut()
            && request.test()?.is_some()
        {
            self.in_flight.pop_front();
            progressed = true;
        }
        if self.done || self.in_flight.len() == DEPTH {
            return Ok(progressed);
        }
        let pieces = self.from.pieces;
        let mut parts = Parts::new();
        let len = self.cursor.message(
            |i| pieces.get(i).map(|piece| piece.len()),
            MESSAGE,
            |piece, range| parts.push((piece, range)),
        );
        if len == 0 {
            self.done = self.in_flight.is_empty();
            return Ok(progressed || self.done);
        }
        let elements = match &parts[..] {
            [(piece, range)] => &pieces[*piece][range.clone()],
            several => {
                let packed = &mut staging.packed[self.count % DEPTH];
                packed.clear();
                several.iter().for_each(|(piece, range)| {
                    packed.extend_from_slice(&pieces[*piece][range.clone()])
                });
                &packed[..]
            }
        };
        let bytes = bytemuck::cast_slice(elements);
        // SAFETY: the pieces are borrowed until the exchange is over, which is after every message;
        // a packed buffer is filled again only DEPTH messages later, when this one has been popped.
        // After an error the
        // caller waits until MPI has let go of it, or ends the process.
        self.in_flight.push_back(unsafe {
            MpiRequest::send(world, group, self.from.to, MessageKind::Exchange, bytes)?
        });
        self.count += 1;
        Ok(true)
    }
}

/// The receiving direction.
pub struct Receiving<'a, 'b> {
    into: Incoming<'a, 'b>,
    cursor: ChunkCursor,
    done: bool,
    count: usize,
    in_flight: VecDeque<(MpiRequest, Parts, usize)>,
}

impl<'a, 'b> Receiving<'a, 'b> {
    pub fn new(into: Option<Incoming<'a, 'b>>) -> Self {
        let done = into.is_none();
        let into = into.unwrap_or(Incoming { from: 0, pieces: &mut [], add: false });
        Self {
            into,
            cursor: ChunkCursor::default(),
            done,
            count: 0,
            in_flight: VecDeque::with_capacity(DEPTH),
        }
    }

    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Waits until MPI no longer uses the memory, on a communicator that was revoked.
    pub fn let_go(&mut self) -> Result<()> {
        self.in_flight.iter_mut().try_for_each(|(request, ..)| request.let_go())
    }

    /// Reads the next piece from shared memory if it is there. Returns true on progress.
    pub fn advance_shared(&mut self, segment: &mut Segment, from: usize) -> bool {
        if self.done {
            return false;
        }
        let into = &mut self.into;
        let cursor = &mut self.cursor;
        let mut ahead = *cursor;
        if ahead.message(|i| into.pieces.get(i).map(|piece| piece.len()), SLOT, |_, _| {}) == 0 {
            self.done = true;
            return true;
        }
        let add = into.add;
        segment.take(from, |slot| {
            let mut at = 0;
            let lens = into.pieces.iter().map(|piece| piece.len()).collect::<Vec<_>>();
            cursor.message(
                |i| lens.get(i).copied(),
                SLOT,
                |piece, range| {
                    let len = range.len();
                    combine(add, &slot[at..at + len], &mut into.pieces[piece][range]);
                    at += len;
                },
            );
        })
    }

    /// Starts MPI messages and completes those that have arrived. Returns true on progress.
    pub fn advance_mpi(
        &mut self,
        world: ffi::MPI_Comm,
        group: &GroupRanks,
        staging: &mut ChunkStaging,
    ) -> Result<bool> {
        let mut progressed = false;
        let Incoming { from, pieces, add } = &mut self.into;
        if let Some((request, parts, number)) = self.in_flight.front_mut()
            && let Some(bytes) = request.test()?
        {
            let len: usize = parts.iter().map(|(_, range)| range.len()).sum();
            check_length(group.ranks[*from], bytes, len * size_of::<f32>())?;
            if *add || parts.len() > 1 {
                let mut received = &staging.received[*number % DEPTH][..len];
                for (piece, range) in parts {
                    let (here, rest) = received.split_at(range.len());
                    combine(*add, here, &mut pieces[*piece][range.clone()]);
                    received = rest;
                }
            }
            self.in_flight.pop_front();
            progressed = true;
        }
        if self.done || self.in_flight.len() == DEPTH {
            return Ok(progressed);
        }
        let mut parts = Parts::new();
        let len = self.cursor.message(
            |i| pieces.get(i).map(|piece| piece.len()),
            MESSAGE,
            |piece, range| parts.push((piece, range)),
        );
        if len == 0 {
            self.done = self.in_flight.is_empty();
            return Ok(progressed || self.done);
        }
        let elements = match &parts[..] {
            [(piece, range)] if !*add => &mut pieces[*piece][range.clone()],
            _ => {
                let received = &mut staging.received[self.count % DEPTH];
                if received.len() < len {
                    received.resize(len, 0.0);
                }
                &mut received[..len]
            }
        };
        let bytes = bytemuck::cast_slice_mut(elements);
        // SAFETY: the pieces are borrowed until the exchange is over, and each range is received
        // into once; a staging buffer is used again only DEPTH messages later, when this one has
        // been popped. After an error the
        // caller waits until MPI has let go of it, or ends the process.
        let request =
            unsafe { MpiRequest::receive(world, group, *from, MessageKind::Exchange, bytes)? };
        self.in_flight.push_back((request, parts, self.count));
        self.count += 1;
        Ok(true)
    }
}

/// The most bytes of a group of messages of device memory that are in flight in one direction: all
/// of the group, while a collective's chunks come.
const WINDOW: usize = 64 << 20;

/// One direction of a group of messages of device memory, with requests of type `R`.
pub struct MessageWindow<R> {
    /// The messages that have not started, with the other rank.
    waiting: VecDeque<(usize, Bytes)>,
    in_flight: Vec<(R, usize, usize)>,
    /// Bytes in flight.
    bytes: usize,
    limit: usize,
}

impl<R> MessageWindow<R> {
    /// Creates the window of the messages that this rank sends.
    pub fn of_sends(group: &GroupRanks, sends: &[DeviceMessage<'_>]) -> Self {
        Self::new(sends, WINDOW, |to| (to + group.size() - group.rank) % group.size())
    }

    /// Creates the window of the messages that this rank receives.
    pub fn of_receives(group: &GroupRanks, receives: &[DeviceMessage<'_>]) -> Self {
        Self::new(receives, WINDOW, |from| (group.rank + group.size() - from) % group.size())
    }

    /// Orders messages by `distance`, the number of ranks that the receiver is ahead of the sender.
    /// So not all ranks send to the same one at once. And since the senders and receivers start
    /// them in this order, the first message of the whole group that is not complete can always
    /// start on both sides: windows do not wait for each other in a circle.
    fn new(
        messages: &[DeviceMessage<'_>],
        limit: usize,
        distance: impl Fn(usize) -> usize,
    ) -> Self {
        let mut order = messages.to_vec();
        order.sort_by_key(|(rank, _)| distance(*rank));
        let pieces = order
            .into_iter()
            .flat_map(|(rank, span)| Bytes::from(span).messages().map(move |bytes| (rank, bytes)));
        Self { waiting: pieces.collect(), in_flight: Vec::new(), bytes: 0, limit }
    }

    pub fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.in_flight.is_empty()
    }

    /// Starts messages with `start` until the window is full. A message that is longer than the
    /// window is in flight alone.
    pub fn start(&mut self, mut start: impl FnMut(usize, Bytes) -> Result<R>) -> Result<()> {
        while let Some(&(rank, bytes)) = self.waiting.front()
            && (self.in_flight.is_empty() || self.bytes + bytes.len <= self.limit)
        {
            self.in_flight.push((start(rank, bytes)?, rank, bytes.len));
            self.bytes += bytes.len;
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Removes the messages for which `is_complete` returns true; it is called with the request, the
    /// other rank and the length. Returns whether there were any.
    pub fn complete(
        &mut self,
        mut is_complete: impl FnMut(&mut R, usize, usize) -> Result<bool>,
    ) -> Result<bool> {
        let before = self.in_flight.len();
        let mut index = 0;
        while let Some((request, rank, len)) = self.in_flight.get_mut(index) {
            if is_complete(request, *rank, *len)? {
                self.bytes -= *len;
                self.in_flight.remove(index);
            } else {
                index += 1;
            }
        }
        Ok(self.in_flight.len() < before)
    }

    /// Calls `let_go` with all requests in flight.
    pub fn let_go(&mut self, mut let_go: impl FnMut(&mut R) -> Result<()>) -> Result<()> {
        self.in_flight.iter_mut().try_for_each(|(request, ..)| let_go(request))
    }

    /// Iterates over the other ranks of the messages that are not complete.
    pub fn pending(&self) -> impl Iterator<Item = usize> {
        let waiting = self.waiting.iter().map(|(rank, _)| *rank);
        self.in_flight.iter().map(|(_, rank, _)| *rank).chain(waiting)
    }
}

fn combine(add: bool, from: &[f32], into: &mut [f32]) {
    if add { add_serial(from, into) } else { into.copy_from_slice(from) }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use super::*;
    use hpctrain_device::DeviceSpan;

    /// Returns the lengths of a window's requests in flight.
    fn lengths(window: &MessageWindow<usize>) -> Vec<usize> {
        window.in_flight.iter().map(|(_, _, len)| *len).collect()
    }

    #[test]
    fn bytes_in_flight_are_bounded_but_a_long_message_goes_alone() {
        let mut memory = [0.0; 12];
        let all = DeviceSpan::from(&mut memory[..]);
        let messages = [0..1, 1..3, 3..12, 12..12, 2..3].map(|range| (1, all.part(range)));
        let mut window = MessageWindow::new(&messages, 16, |rank| rank);
        let mut flights = Vec::new();
        while !window.is_done() {
            window.start(|_, bytes| Ok(bytes.len)).unwrap();
            flights.push(lengths(&window));
            assert!(window.complete(|_, _, _| Ok(true)).unwrap());
        }
        assert_eq!(flights, [vec![4, 8], vec![36], vec![4]]);
        // Messages complete in any order.
        let mut window = MessageWindow::new(&messages, 16, |rank| rank);
        window.start(|_, bytes| Ok(bytes.len)).unwrap();
        assert!(window.complete(|_, _, len| Ok(len == 8)).unwrap());
        window.start(|_, bytes| Ok(bytes.len)).unwrap();
        assert_eq!((lengths(&window), window.pending().count()), (vec![4], 3));
        assert!(!window.complete(|_, _, _| Ok(false)).unwrap());
    }

    /// Ranks with windows of one message exchange with all others: a message completes only when
    /// both ranks have started it, and the first ones of any two ranks fit together.
    #[test]
    fn windows_do_not_wait_for_each_other() {
        for ranks in 2..8 {
            let mut memory = [0.0];
            let word = DeviceSpan::from(&mut memory[..]);
            let of_rank = |rank: usize| {
                let group = GroupRanks::world(rank, vec![0; ranks].into());
                let others = (0..ranks).filter(|&other| other != rank);
                // Two messages for each other rank, as those of two stages.
                let others: Vec<_> = others.clone().chain(others).map(|to| (to, word)).collect();
                let mut sends = MessageWindow::<usize>::of_sends(&group, &others);
                let mut receives = MessageWindow::<usize>::of_receives(&group, &others);
                (sends.limit, receives.limit) = (1, 1);
                [sends, receives]
            };
            let mut windows: Vec<_> = (0..ranks).map(of_rank).collect();
            // The numbers of messages that were started, by direction, sender and receiver.
            let started = RefCell::new(BTreeMap::new());
            let count = |route| started.borrow().get(&route).copied().unwrap_or(0_usize);
            let begin = |route| {
                *started.borrow_mut().entry(route).or_insert(0) += 1;
                Ok(count(route))
            };
            for _ in 0..4 * ranks {
                for (rank, [sends, receives]) in windows.iter_mut().enumerate() {
                    receives.start(|from, _| begin((1, from, rank))).unwrap();
                    sends.start(|to, _| begin((0, rank, to))).unwrap();
                }
                for (rank, [sends, receives]) in windows.iter_mut().enumerate() {
                    sends.complete(|number, to, _| Ok(count((1, rank, to)) >= *number)).unwrap();
                    receives
                        .complete(|number, from, _| Ok(count((0, from, rank)) >= *number))
                        .unwrap();
                }
            }
            assert!(windows.iter().flatten().all(MessageWindow::is_done), "{ranks} ranks");
        }
    }
}
