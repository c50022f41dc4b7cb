//! Shared memory between the ranks of a node: each rank has a few slots that it fills and its
//! neighbours empty.
//!
//! A message goes through a slot in pieces: the sender copies a piece in, the receiver adds it to
//! its own memory straight from the slot. MPI's own way inside a node copies it once more. The copy
//! goes past the caches: the receiver's has the slot's last piece, and where cores share none the
//! sender would wait for every line of it.
//!
//! A slot's state is 0 while it is free, else the ticket of the piece in it: its addressee, and its
//! number among the pieces between these two ranks. Only the owner fills free slots; only the
//! addressee empties a full one.
//!
//! Each rank has four slots of 128 KiB in memory that the ranks of a node share. Elements that are
//! only copied go through it as well, unless messages prove clearly faster at the start: the system
//! may let MPI copy from the memory of one process to another's, once instead of twice.
//! `HPCTRAIN_RANKS_PER_NODE=1` turns shared memory off; other numbers make several nodes of one
//! machine.
//!
//! The memory is a file without a name (`memfd_create`) of the node's first rank, which the others
//! open by its number under `/proc`. It takes nothing from `/dev/shm`, which is small in
//! containers, and leaves nothing behind. `MPI_Win_allocate_shared` is not used: it is collective,
//! and may fail on one rank while the others wait in it. Here every rank fails by itself, and the
//! caller lets the ranks agree.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use mpi::ffi;
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, fstat, ftruncate, memfd_create, open, stat,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::calls::{check, count};
use hpctrain_base::error::{Error, Result};

/// Slots of a rank.
const SLOTS: usize = 4;

/// Elements of a slot, 128 KiB: sender and receiver work on different ones.
pub const SLOT: usize = 1 << 15;

/// Bytes before the elements: the state, on a cache line of its own, and a gap that keeps elements
/// aligned.
const HEADER: usize = 128;

/// Bytes of a slot.
const STRIDE: usize = HEADER + SLOT * size_of::<f32>();

/// Bytes of shared memory a rank.
pub const BYTES: usize = SLOTS * STRIDE;

/// The memory that the ranks of this node share.
pub struct Segment {
    base: NonNull<u8>,
    /// Ranks of the node.
    ranks: usize,
    me: usize,
    /// Rank of the node by rank of the world, for those on this node.
    locals: Vec<Option<usize>>,
    /// Pieces so far, to and from every rank of the node.
    sent: Vec<u32>,
    received: Vec<u32>,
    /// Keeps the file open until all ranks have opened it.
    _file: OwnedFd,
}

/// The place of the first rank's file, as the other ranks of the node find it.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Place {
    /// The process. 0 if it could not create the file.
    process: u64,
    descriptor: u64,
    device: u64,
    inode: u64,
}

impl Place {
    fn of(file: &OwnedFd) -> Result<Self> {
        let stat = fstat(file).map_err(|e| refused("look at", e))?;
        Ok(Self {
            process: u64::from(std::process::id()),
            descriptor: u64::from(file.as_raw_fd().unsigned_abs()),
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }

    /// Opens the file, after a check that it is the one that the first rank created.
    fn open(self) -> Result<OwnedFd> {
        if self.process == 0 {
            return Err(Error::comm("the first rank of the node has none"));
        }
        let path = PathBuf::from(format!("/proc/{}/fd/{}", self.process, self.descriptor));
        // In a PID namespace the number may stand for another process.
        match stat(&path) {
            Ok(found) if (found.st_dev, found.st_ino) == (self.device, self.inode) => {}
            _ => {
                return Err(Error::comm(
                    "this rank does not see the process of the first rank of its node in /proc",
                ));
            }
        }
        open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|e| refused("open", e))
    }
}

fn refused(doing: &str, e: Errno) -> Error {
    Error::comm(format!("cannot {doing} shared memory: {e}"))
}

/// Creates the file that holds the slots of all ranks of a node.
fn create(ranks: usize) -> Result<OwnedFd> {
    let file = memfd_create("hpctrain", MemfdFlags::CLOEXEC).map_err(|e| refused("create", e))?;
    ftruncate(&file, (ranks * BYTES) as u64).map_err(|e| refused("create", e))?;
    Ok(file)
}

/// The state of a slot that holds piece `number` for rank `to` of the node.
fn ticket(to: usize, number: u32) -> u64 {
    (to as u64 + 1) << 32 | u64::from(number)
}

impl Segment {
    /// Collective over `node`, the communicator of this node's ranks. `locals` has their numbers by
    /// rank of the world. No slot may be used before the node's ranks have met once more: then all
    /// have opened the file. That meeting is the caller's, so that a rank which fails here makes
    /// the same collectives as the others.
    ///
    /// # Errors
    /// Returns an error if MPI failed. The inner one is of this rank alone: it has no shared
    /// memory.
    pub fn open(
        node: ffi::MPI_Comm,
        me: usize,
        locals: Vec<Option<usize>>,
    ) -> Result<Result<Self>> {
        let ranks = locals.iter().flatten().count();
        let created =
            (me == 0).then(|| create(ranks).and_then(|file| Ok((Place::of(&file)?, file))));
        let mut place =
            created.iter().flatten().map(|(place, _)| *place).next().unwrap_or_default();
        // SAFETY: the parameter is a live local of as many bytes.
        let code = unsafe {
            let bytes = bytemuck::bytes_of_mut(&mut place);
            ffi::MPI_Bcast(
                bytes.as_mut_ptr().cast(),
                count(bytes.len())?,
                ffi::RSMPI_UINT8_T,
                0,
                node,
            )
        };
        check(code, "MPI_Bcast")?;
        let file = match created {
            Some(created) => created.map(|(_, file)| file),
            None => place.open(),
        };
        Ok(file.and_then(|file| Self::map(file, ranks, me, locals)))
    }

    /// Maps the file. Each rank takes the memory of its own slots, on its own part of the machine:
    /// a lack of memory is an error here, and a signal later.
    fn map(file: OwnedFd, ranks: usize, me: usize, locals: Vec<Option<usize>>) -> Result<Self> {
        let range = ((me * BYTES) as u64, BYTES as u64);
        fallocate(&file, FallocateFlags::empty(), range.0, range.1)
            .map_err(|e| refused("reserve", e))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, of a file that has so many bytes and that no process makes
        // shorter.
        let base = unsafe { mmap(null_mut(), ranks * BYTES, access, MapFlags::SHARED, &file, 0) };
        let base = base.map_err(|e| refused("map", e))?;
        let base =
            NonNull::new(base.cast()).ok_or_else(|| Error::internal("a mapping at address 0"))?;
        let numbers = vec![0; ranks];
        Ok(Self { base, ranks, me, locals, sent: numbers.clone(), received: numbers, _file: file })
    }

    /// The number on this node of a rank of the world, if it is here.
    pub fn local(&self, rank: usize) -> Option<usize> {
        self.locals[rank]
    }

    /// The first byte of a slot.
    fn slot(&self, rank: usize, slot: usize) -> *mut u8 {
        assert!(rank < self.ranks && slot < SLOTS, "slot {slot} of rank {rank} of {}", self.ranks);
        self.base.as_ptr().wrapping_add(rank * BYTES + slot * STRIDE)
    }

    fn state(&self, rank: usize, slot: usize) -> &AtomicU64 {
        // SAFETY: the slot lies within the mapping, at a multiple of 8 bytes, and its state is only
        // ever accessed as an atomic; it lives as long as the mapping, which `self` keeps. It is 0
        // at first, as the file is.
        unsafe { AtomicU64::from_ptr(self.slot(rank, slot).cast()) }
    }

    fn elements(&self, rank: usize, slot: usize) -> *mut f32 {
        self.slot(rank, slot).wrapping_add(HEADER).cast()
    }

    /// Sends one piece to rank `to` of the node: `fill` writes its elements, at most [`SLOT`].
    /// Whether a slot was free.
    pub fn put(&mut self, to: usize, fill: impl FnOnce(&mut [f32])) -> bool {
        let me = self.me;
        let Some(slot) = (0..SLOTS).find(|&slot| self.state(me, slot).load(Ordering::Acquire) == 0)
        else {
            return false;
        };
        // SAFETY: a free slot of mine is touched by nobody else until its state changes; any bits
        // are an f32.
        fill(unsafe { std::slice::from_raw_parts_mut(self.elements(me, slot), SLOT) });
        self.state(me, slot).store(ticket(to, self.sent[to]), Ordering::Release);
        self.sent[to] = self.sent[to].wrapping_add(1);
        true
    }

    /// Receives the next piece from rank `from` of the node: `empty` reads its elements. Whether it
    /// was there.
    pub fn take(&mut self, from: usize, empty: impl FnOnce(&[f32])) -> bool {
        let wanted = ticket(self.me, self.received[from]);
        let Some(slot) =
            (0..SLOTS).find(|&slot| self.state(from, slot).load(Ordering::Acquire) == wanted)
        else {
            return false;
        };
        // SAFETY: a full slot for me is left alone by its owner until I free it.
        empty(unsafe { std::slice::from_raw_parts(self.elements(from, slot), SLOT) });
        self.state(from, slot).store(0, Ordering::Release);
        self.received[from] = self.received[from].wrapping_add(1);
        true
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: every access goes through `self`. Other ranks have mappings of their own.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.ranks * BYTES) };
        // The memory ends with the process at the latest.
        unmapped.unwrap_or_else(|e| log::debug!("shared memory stays mapped: {e}"));
    }
}
