//! The two directions of an exchange, each through the node's shared memory or MPI messages.

use std::collections::VecDeque;
use std::ops::Range;

use mpi::ffi;

use super::request::{MessageKind, MpiRequest};
use super::shm_window::{SLOT, Segment};
use crate::chunking::ChunkCursor;
use crate::transport::{GroupRanks, Incoming, Outgoing, check_length};
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
        // An error ends the process.
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
        // been popped. An error ends the process.
        let request =
            unsafe { MpiRequest::receive(world, group, *from, MessageKind::Exchange, bytes)? };
        self.in_flight.push_back((request, parts, self.count));
        self.count += 1;
        Ok(true)
    }
}

fn combine(add: bool, from: &[f32], into: &mut [f32]) {
    if add { add_serial(from, into) } else { into.copy_from_slice(from) }
}
