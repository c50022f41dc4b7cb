//! Shared memory between the ranks of a node: each rank has a few slots that it fills and its neighbours empty.
//!
//! A message goes through a slot in pieces: the sender copies a piece in, the receiver adds it to its own memory straight
//! from the slot. MPI's own way inside a node copies it once more. The copy goes past the caches: the receiver's has the slot's
//! last piece, and where cores share none the sender would wait for every line of it.
//!
//! A slot's state is 0 while it is free, else the ticket of the piece in it: its addressee, and its number among the
//! pieces between these two ranks. Only the owner fills free slots; only the addressee empties a full one.
//!
//! Each rank has four slots of 128 KiB in a window that MPI lets the ranks of a node share. Elements that are only
//! copied go through it as well, unless messages prove clearly faster at the start: the system may let MPI copy from
//! the memory of one process to another's, once instead of twice. `HPCTRAIN_RANKS_PER_NODE=1` turns shared memory off;
//! other numbers make several nodes of one machine.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use mpi::ffi;

use super::calls::{check, count};
use crate::error::Result;

/// Slots of a rank.
const SLOTS: usize = 4;

/// Elements of a slot, 128 KiB: sender and receiver work on different ones.
pub const SLOT: usize = 1 << 15;

/// Bytes before the elements: the state, on a cache line of its own, and a gap that keeps elements aligned.
const HEADER: usize = 128;

/// Bytes of a slot.
const STRIDE: usize = HEADER + SLOT * size_of::<f32>();

/// Bytes of shared memory a rank.
pub const BYTES: usize = SLOTS * STRIDE;

/// The memory that the ranks of this node share.
pub struct Segment {
    window: ffi::MPI_Win,
    /// Slots of every rank of the node.
    bases: Vec<*mut u8>,
    me: usize,
    /// Rank of the node by rank of the world, for those on this node.
    locals: Vec<Option<usize>>,
    /// Pieces so far, to and from every rank of the node.
    sent: Vec<u32>,
    received: Vec<u32>,
}

/// The state of a slot that holds piece `number` for rank `to` of the node.
fn ticket(to: usize, number: u32) -> u64 {
    (to as u64 + 1) << 32 | u64::from(number)
}

impl Segment {
    /// Collective over `node`, the communicator of this node's ranks. `locals` has their numbers by rank of the world.
    /// No slot may be used before the node's ranks have met once more: all slots are free then. That meeting is the
    /// caller's, so that a rank which fails here makes the same collectives as the others.
    pub fn open(node: ffi::MPI_Comm, me: usize, locals: Vec<Option<usize>>) -> Result<Self> {
        let size = locals.iter().flatten().count();
        let bytes = |bytes: usize| bytes as ffi::MPI_Aint;
        // SAFETY: out-parameters are live locals; the base of my part comes back through the query below.
        let (code, window) = unsafe {
            let (mut window, mut base): (ffi::MPI_Win, *mut c_void) = (std::mem::zeroed(), std::ptr::null_mut());
            let to: *mut *mut c_void = &mut base;
            (ffi::MPI_Win_allocate_shared(bytes(BYTES), 1, ffi::RSMPI_INFO_NULL, node, to.cast(), &mut window), window)
        };
        check(code, "MPI_Win_allocate_shared")?;
        let base_of = |rank: usize| {
            let (mut size, mut unit, mut base): (ffi::MPI_Aint, _, *mut c_void) = (0, 0, std::ptr::null_mut());
            let to: *mut *mut c_void = &mut base;
            let rank = count(rank)?;
            // SAFETY: the window is open; out-parameters are live locals.
            let code = unsafe { ffi::MPI_Win_shared_query(window, rank, &mut size, &mut unit, to.cast()) };
            check(code, "MPI_Win_shared_query").map(|()| base.cast::<u8>())
        };
        let bases = (0..size).map(base_of).collect::<Result<Vec<_>>>()?;
        let segment = Self { window, bases, me, locals, sent: vec![0; size], received: vec![0; size] };
        for slot in 0..SLOTS {
            segment.state(me, slot).store(0, Ordering::Release);
        }
        Ok(segment)
    }

    /// The number on this node of a rank of the world, if it is here.
    pub fn local(&self, rank: usize) -> Option<usize> {
        self.locals[rank]
    }

    fn state(&self, rank: usize, slot: usize) -> &AtomicU64 {
        // SAFETY: the slot lies within the rank's part of the window, at a multiple of 8 bytes, and is only ever
        // accessed as an atomic; it lives as long as the window, which `self` keeps open.
        unsafe { AtomicU64::from_ptr(self.bases[rank].add(slot * STRIDE).cast()) }
    }

    fn elements(&self, rank: usize, slot: usize) -> *mut f32 {
        self.bases[rank].wrapping_add(slot * STRIDE + HEADER).cast()
    }

    /// Sends one piece to rank `to` of the node: `fill` writes its elements, at most [`SLOT`]. Whether a slot was free.
    pub fn put(&mut self, to: usize, fill: impl FnOnce(&mut [f32])) -> bool {
        let me = self.me;
        let Some(slot) = (0..SLOTS).find(|&slot| self.state(me, slot).load(Ordering::Acquire) == 0) else {
            return false;
        };
        // SAFETY: a free slot of mine is touched by nobody else until its state changes; any bits are an f32.
        fill(unsafe { std::slice::from_raw_parts_mut(self.elements(me, slot), SLOT) });
        self.state(me, slot).store(ticket(to, self.sent[to]), Ordering::Release);
        self.sent[to] = self.sent[to].wrapping_add(1);
        true
    }

    /// Receives the next piece from rank `from` of the node: `empty` reads its elements. Whether it was there.
    pub fn take(&mut self, from: usize, empty: impl FnOnce(&[f32])) -> bool {
        let wanted = ticket(self.me, self.received[from]);
        let Some(slot) = (0..SLOTS).find(|&slot| self.state(from, slot).load(Ordering::Acquire) == wanted) else {
            return false;
        };
        // SAFETY: a full slot for me is left alone by its owner until I free it.
        empty(unsafe { std::slice::from_raw_parts(self.elements(from, slot), SLOT) });
        self.state(from, slot).store(0, Ordering::Release);
        self.received[from] = self.received[from].wrapping_add(1);
        true
    }

    /// Collective over the node: gives the memory back.
    pub fn close(mut self) {
        // SAFETY: `self` is gone afterwards, and with it every pointer into the window. If MPI refuses, the memory
        // is freed with the process.
        unsafe { ffi::MPI_Win_free(&mut self.window) };
    }
}
