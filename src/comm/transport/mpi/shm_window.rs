//! Shared memory between the ranks of a node: each rank has a few slots that it fills and other
//! ranks of the node empty.
//!
//! A message goes through slots in pieces: the sender copies a piece into a slot, and the receiver
//! adds it to its memory directly from there. MPI messages inside a node need one more copy. The
//! sender's copy bypasses the caches, because the receiver's cache holds the slot's last piece, and
//! where cores share no cache the sender would wait for every line of it.
//!
//! A slot's state, which is atomic, is 0 while it is free, and otherwise the ticket of the piece in
//! it: its receiver, and its number among the pieces between these two ranks. Only the owner fills
//! free slots; only the receiver empties a full one. So a slot belongs to one side at a time, on
//! which the `unsafe` accesses to the shared memory rely.
//!
//! Each rank has four slots of 128 KiB. Elements that are only copied go through shared memory as
//! well, unless MPI messages are measured to be clearly faster at the start: the system may let MPI
//! copy between the memories of two processes, once instead of twice. `HPCTRAIN_RANKS_PER_NODE=1`
//! turns shared memory off; other numbers divide one machine into several nodes.
//!
//! The memory is an anonymous file (`memfd_create`) of the node's first rank, which the others open
//! by its number under `/proc`. It needs no space in `/dev/shm`, which is small in containers, and
//! leaves nothing behind. `MPI_Win_allocate_shared` is not used: it is collective, and may fail on
//! one rank while the others wait in it. Here every rank fails by itself, and the caller lets the
//! ranks agree on the error.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use super::ffi;
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, fstat, ftruncate, memfd_create, open, stat,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::calls::{check, count};
use hpctrain_base::error::{Error, Result};

/// The number of slots of a rank.
const SLOTS: usize = 4;

/// Elements of a slot, 128 KiB. Sender and receiver work on different slots.
pub const SLOT: usize = 1 << 15;

/// Bytes before the elements: the state, on its own cache line, and padding that keeps the elements
/// aligned.
const HEADER: usize = 128;

/// Bytes of a slot.
const STRIDE: usize = HEADER + SLOT * size_of::<f32>();

/// Bytes of shared memory per rank.
pub const BYTES: usize = SLOTS * STRIDE;

/// The memory that the ranks of this node share.
pub struct Segment {
    base: NonNull<u8>,
    /// The number of ranks of the node.
    ranks: usize,
    me: usize,
    /// The number on the node of every rank of the world that is on it.
    locals: Vec<Option<usize>>,
    /// The number of pieces so far to and from every rank of the node.
    sent: Vec<u32>,
    received: Vec<u32>,
    /// Keeps the file open until all ranks have opened it.
    _file: OwnedFd,
}

/// How the other ranks of the node find the first rank's file.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Place {
    /// The process id; 0 if the first rank could not create the file.
    process: u64,
    descriptor: u64,
    device: u64,
    inode: u64,
}

impl Place {
    fn from_file(file: &OwnedFd) -> Result<Self> {
        let stat = fstat(file).map_err(|e| refused("stat", e))?;
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
            return Err(Error::comm("the first rank of the node could not create shared memory"));
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

/// Returns the state of a slot that holds piece `number` for rank `to` of the node.
fn ticket(to: usize, number: u32) -> u64 {
    (to as u64 + 1) << 32 | u64::from(number)
}

impl Segment {
    /// Opens the shared memory. `locals` has the numbers of the node's ranks by rank of the world.
    /// No slot may be used before the node's ranks have synchronised once more, which shows that
    /// all have opened the file. The caller does that, so that a rank which fails here makes the
    /// same collectives as the others. Collective over `node`, the communicator of this node's
    /// ranks.
    ///
    /// # Errors
    /// Returns an error if MPI failed. The inner error concerns this rank alone: it cannot map the
    /// shared memory.
    pub fn open(
        node: ffi::MPI_Comm,
        me: usize,
        locals: Vec<Option<usize>>,
    ) -> Result<Result<Self>> {
        let ranks = locals.iter().flatten().count();
        let created =
            (me == 0).then(|| create(ranks).and_then(|file| Ok((Place::from_file(&file)?, file))));
        let mut place =
            created.iter().flatten().map(|(place, _)| *place).next().unwrap_or_default();
        // SAFETY: the parameter is a live local of as many bytes.
        let code = unsafe {
            let bytes = bytemuck::bytes_of_mut(&mut place);
            ffi::MPI_Bcast(bytes.as_mut_ptr().cast(), count(bytes.len())?, ffi::uint8_t(), 0, node)
        };
        check(code, "MPI_Bcast")?;
        let file = match created {
            Some(created) => created.map(|(_, file)| file),
            None => place.open(),
        };
        Ok(file.and_then(|file| Self::map(file, ranks, me, locals)))
    }

    /// Maps the file. Each rank allocates the memory of its own slots, on its own NUMA node: a lack
    /// of memory is an error here, and would be a signal later.
    fn map(file: OwnedFd, ranks: usize, me: usize, locals: Vec<Option<usize>>) -> Result<Self> {
        let range = ((me * BYTES) as u64, BYTES as u64);
        fallocate(&file, FallocateFlags::empty(), range.0, range.1)
            .map_err(|e| refused("reserve", e))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, of a file that has this length and that no process makes shorter.
        let base = unsafe { mmap(null_mut(), ranks * BYTES, access, MapFlags::SHARED, &file, 0) };
        let base = base.map_err(|e| refused("map", e))?;
        let base =
            NonNull::new(base.cast()).ok_or_else(|| Error::internal("mmap returned address 0"))?;
        let numbers = vec![0; ranks];
        Ok(Self { base, ranks, me, locals, sent: numbers.clone(), received: numbers, _file: file })
    }

    /// Returns the number on this node of a rank of the world, if it is on it.
    pub fn local(&self, rank: usize) -> Option<usize> {
        self.locals[rank]
    }

    /// Returns the first byte of a slot.
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

    /// Sends one piece of at most [`SLOT`] elements, which `fill` writes, to rank `to` of the node.
    /// Returns false if no slot is free.
    pub fn put(&mut self, to: usize, fill: impl FnOnce(&mut [f32])) -> bool {
        let me = self.me;
        let Some(slot) = (0..SLOTS).find(|&slot| self.state(me, slot).load(Ordering::Acquire) == 0)
        else {
            return false;
        };
        // SAFETY: no other rank accesses a free slot of this rank until its state changes; any bits
        // are an f32.
        fill(unsafe { std::slice::from_raw_parts_mut(self.elements(me, slot), SLOT) });
        self.state(me, slot).store(ticket(to, self.sent[to]), Ordering::Release);
        self.sent[to] = self.sent[to].wrapping_add(1);
        true
    }

    /// Receives the next piece from rank `from` of the node, whose elements `empty` reads. Returns
    /// false if it has not arrived.
    pub fn take(&mut self, from: usize, empty: impl FnOnce(&[f32])) -> bool {
        let wanted = ticket(self.me, self.received[from]);
        let Some(slot) =
            (0..SLOTS).find(|&slot| self.state(from, slot).load(Ordering::Acquire) == wanted)
        else {
            return false;
        };
        // SAFETY: the owner of a full slot does not access it until its receiver frees it.
        empty(unsafe { std::slice::from_raw_parts(self.elements(from, slot), SLOT) });
        self.state(from, slot).store(0, Ordering::Release);
        self.received[from] = self.received[from].wrapping_add(1);
        true
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: every access goes through `self`. Other ranks have their own mappings.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.ranks * BYTES) };
        // The process's end unmaps the memory at the latest.
        unmapped.unwrap_or_else(|e| log::debug!("shared memory stays mapped: {e}"));
    }
}
