//! Messages between the ranks of a node through memory that they open of each other: CUDA IPC between
//! processes, peer access between devices of one process.
//!
//! A rank exports the blocks of its memory pool, which hold all buffers, and a **mailbox** in one.
//! Its peers open the blocks, and write messages straight into its buffers: no library, no copy in
//! between, NVLink or PCIe peer-to-peer where the devices have it. `kernels/ipc.cu` has the
//! protocol, and why it cannot deadlock. Nothing synchronises with the host.
//!
//! The mailbox has, for each peer, [`ENTRIES`] entries in which the peer posts its receives, and
//! [`MOST_BLOCKS`] flags by which the peer's blocks report that messages have arrived. Messages
//! between two ranks go in **rounds** of up to [`ENTRIES`]; both count them.
//!
//! A rank that is aborted ends its kernels through a word of pinned memory, which they poll. Peers
//! may still write to its memory then, so the memory is never freed.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUipcMem_flags_enum, CUipcMemHandle, CUresult};
use cudarc::driver::{CudaFunction, DriverError, result};

use super::comm_queue::{CommQueue, CommState, CommStreams};
use super::libraries::check;
use super::nvrtc::{KernelModules, Variant};
use super::ordered_sum::OrderedSumKernel;
use super::pinned::Pinned;
use super::pool::DevicePool;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{
    DeviceCollective, DeviceComm, DeviceEvent, DeviceOperation, DeviceSpan, ExportedMemory,
    OrderedSum, Scratch,
};

/// Most blocks of a pool that does not grow.
const BLOCKS: usize = 2;

/// The bit of an offset that names the block.
const BLOCK_BIT: u32 = 63;

/// Most messages from one rank to another in a round.
const ENTRIES: usize = 16;

/// Most messages, and most ranks, of a launch; threads of a block that posts or waits.
const MESSAGES: usize = 32;

/// Most blocks that send to one rank, and most blocks that send to all ranks unless there are more.
const MOST_BLOCKS: usize = 32;

/// Words that are worth another block.
const BLOCK_WORDS: usize = 8 << 10;

/// The hint if the memory of a rank cannot be opened.
const NO_ACCESS: &str = "set comm.transport=auto; CUDA IPC requires that ranks see each other's GPUs, and that these have \
     peer access (nvidia-smi topo -p2p r)";

/// Threads of a block that sends.
const SEND_THREADS: u32 = 512;

/// Threads of a block that waits.
const WAIT_THREADS: u32 = 128;

/// Words of an entry of a mailbox.
const ENTRY_WORDS: usize = size_of::<Entry>() / size_of::<u32>();

/// Words of a mailbox for each peer.
const MAILBOX_WORDS: usize = ENTRIES * ENTRY_WORDS + MOST_BLOCKS;

/// Where a message goes: the types of `kernels/ipc.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Entry {
    offset: u64,
    round: u32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Receive {
    entry: u64,
    contents: Entry,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Put {
    from: u64,
    words: i64,
    entry: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Receiver {
    memory: [u64; BLOCKS],
    flags: u64,
    first: u32,
    count: u32,
    blocks: u32,
    round: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Puts {
    messages: [Put; MESSAGES],
    receivers: [Receiver; MESSAGES],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sender {
    flags: u64,
    blocks: u32,
    round: u32,
}

/// The kernels of a round.
struct Kernels {
    post: CudaFunction,
    put: CudaFunction,
    wait: CudaFunction,
}

impl Kernels {
    /// Loads the kernels, which may synchronise the device.
    fn load(programs: &Arc<KernelModules>) -> Result<Self> {
        let variant = Variant { source: "ipc.cu", narrow: false, head: None };
        Ok(Self {
            post: programs.function(variant, "post_receives", 0)?,
            put: programs.function(variant, "put_messages", 0)?,
            wait: programs.function(variant, "await_messages", 0)?,
        })
    }
}

/// Identifies this process, also among those of other containers.
fn process_id() -> u64 {
    static ID: OnceLock<u64> = OnceLock::new();
    *ID.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// The handle of a rank's memory, for the ranks that open it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct MemoryHandle {
    process: u64,
    /// The context, for ranks of the same process.
    context: u64,
    /// The [offset](MemoryHandle::offset) of the mailbox.
    mailbox: u64,
    /// The blocks of the pool. Missing ones have no bytes.
    blocks: [BlockHandle; BLOCKS],
}

/// A block of a pool.
#[derive(Debug, Clone, Copy, PartialEq)]
struct BlockHandle {
    /// The address in its process.
    address: u64,
    bytes: u64,
    ipc: [u8; size_of::<CUipcMemHandle>()],
}

/// Numbers of a [`MemoryHandle`], besides the operating system's handles.
const NUMBERS: usize = 3 + 2 * BLOCKS;

impl MemoryHandle {
    fn to_bytes(self) -> Vec<u8> {
        let numbers = [self.process, self.context, self.mailbox];
        let of_blocks = self.blocks.iter().flat_map(|block| [block.address, block.bytes]);
        let numbers = numbers.into_iter().chain(of_blocks).flat_map(u64::to_le_bytes);
        numbers.chain(self.blocks.iter().flat_map(|block| block.ipc)).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (numbers, ipc) = bytes.split_at_checked(NUMBERS * size_of::<u64>())?;
        let (numbers, _) = numbers.as_chunks();
        let [process, context, mailbox, of_blocks @ ..] =
            <[[u8; 8]; NUMBERS]>::try_from(numbers).ok()?.map(u64::from_le_bytes);
        let (ipc, []) = ipc.as_chunks() else { return None };
        let ipc: [_; BLOCKS] = ipc.try_into().ok()?;
        let blocks = std::array::from_fn(|block| BlockHandle {
            address: of_blocks[2 * block],
            bytes: of_blocks[2 * block + 1],
            ipc: ipc[block],
        });
        Some(Self { process, context, mailbox, blocks })
    }
}

/// Returns the offset of `bytes` bytes at an address in the blocks of a pool, by which other ranks
/// find them: the bytes from the start of its block, and the number of the block in the highest bit.
fn offset_in(blocks: &[BlockHandle; BLOCKS], address: u64, bytes: u64) -> Result<u64> {
    for (number, block) in (0..).zip(blocks) {
        let offset = address.checked_sub(block.address);
        if let Some(offset) = offset.filter(|offset| offset + bytes <= block.bytes) {
            return Ok(offset | number << BLOCK_BIT);
        }
    }
    Err(Error::internal("a message outside of the pool of device memory"))
}

/// Returns the address of an offset in memory whose blocks begin at these addresses.
fn address_of(memory: [u64; BLOCKS], offset: u64) -> u64 {
    memory[(offset >> BLOCK_BIT) as usize] + (offset & !(1 << BLOCK_BIT))
}

/// The pool of a rank with a mailbox, ready to be opened by others.
pub struct IpcExport {
    pool: Arc<DevicePool>,
    streams: Arc<CommStreams>,
    programs: Arc<KernelModules>,
    mailbox: Box<dyn Scratch>,
    handle: MemoryHandle,
}

/// Returns the words of a mailbox for `ranks` ranks.
pub fn mailbox_words(ranks: usize) -> usize {
    ranks * MAILBOX_WORDS
}

impl IpcExport {
    /// Exports a pool with a mailbox of [`mailbox_words`], which nothing uses.
    ///
    /// # Errors
    /// Returns an error if the pool grows, or the driver cannot export its memory.
    pub fn new(
        pool: &Arc<DevicePool>,
        streams: Arc<CommStreams>,
        programs: &Arc<KernelModules>,
        mailbox: Box<dyn Scratch>,
    ) -> Result<Self> {
        let exported = pool.all_blocks()?;
        check("be chosen", streams.compute.context().bind_to_thread())?;
        let span = mailbox.span();
        // SAFETY: the mailbox has as many bytes.
        let cleared = unsafe {
            result::memset_d8_async(
                span.address() as u64,
                0,
                span.words() * size_of::<u32>(),
                streams.messages.cu_stream(),
            )
        };
        check("clear memory", cleared)?;
        check("finish its work", streams.messages.synchronize())?;
        let mut blocks = [BlockHandle { address: 0, bytes: 0, ipc: [0; _] }; BLOCKS];
        for (block, &(address, bytes)) in blocks.iter_mut().zip(&exported) {
            let mut ipc = CUipcMemHandle { reserved: [0; _] };
            // SAFETY: the block is memory of `cuMemAlloc`; writes the handle.
            let exported = unsafe { sys::cuIpcGetMemHandle(&mut ipc, address) };
            check("export its memory to other processes", exported.result())?;
            let ipc = ipc.reserved.map(|byte| byte as u8);
            *block = BlockHandle { address, bytes: bytes as u64, ipc };
        }
        let bytes = span.words() * size_of::<u32>();
        let handle = MemoryHandle {
            process: process_id(),
            context: streams.compute.context().cu_ctx().expose_provenance() as u64,
            mailbox: offset_in(&blocks, span.address() as u64, bytes as u64)?,
            blocks,
        };
        Ok(Self { pool: pool.clone(), streams, programs: programs.clone(), mailbox, handle })
    }
}

impl ExportedMemory for IpcExport {
    fn handle(&self) -> Vec<u8> {
        self.handle.to_bytes()
    }

    fn open_peers(
        self: Box<Self>,
        handles: &[Vec<u8>],
        rank: usize,
    ) -> Result<Box<dyn DeviceComm>> {
        let kernels = Kernels::load(&self.programs)?;
        let sum = OrderedSumKernel::load(&self.programs)?;
        let context = self.streams.compute.context();
        check("be chosen", context.bind_to_thread())?;
        let state =
            Arc::new(IpcState { aborted: Pinned::new(context, 1)?, is_aborted: OnceLock::new() });
        let mut comm = IpcComm {
            peers: Vec::new(),
            rank,
            handle: self.handle,
            kernels,
            queue: CommQueue::new(self.streams, sum, state.clone()),
            state,
            parts: Cell::new(false),
            memory: Some((self.pool, self.mailbox)),
            rounds: RefCell::new(vec![Rounds::default(); handles.len()]),
        };
        for (peer, bytes) in handles.iter().enumerate() {
            let handle = MemoryHandle::from_bytes(bytes).ok_or_else(|| {
                Error::comm(format!("rank {peer} of a group sent a malformed handle of its memory"))
            })?;
            // Those that are open are closed when the communicator is dropped.
            let peer = comm
                .open(&handle)
                .map_err(|error| error.at(format!("peer {peer}")).hint(NO_ACCESS))?;
            comm.peers.push(peer);
        }
        Ok(Box::new(comm))
    }
}

/// Memory of a rank as this one sees it.
struct Peer {
    /// The addresses of its blocks.
    memory: [u64; BLOCKS],
    /// The address of its mailbox.
    mailbox: u64,
    /// The number of blocks that are closed at the end.
    opened: usize,
}

impl Drop for Peer {
    fn drop(&mut self) {
        for memory in &self.memory[..self.opened] {
            // SAFETY: the memory was opened once for this communicator, whose kernels have ended. If
            // no context is bound, the device has failed.
            let _ = unsafe { sys::cuIpcCloseMemHandle(*memory) };
        }
    }
}

/// Numbers of rounds of messages with a peer, in each direction.
#[derive(Debug, Clone, Copy, Default)]
struct Rounds {
    sent: u32,
    received: u32,
}

/// The word of memory that ends kernels.
struct IpcState {
    aborted: Pinned<u32>,
    is_aborted: OnceLock<()>,
}

impl IpcState {
    /// Ends all kernels of the communicator.
    fn abort(&self) {
        self.is_aborted.get_or_init(|| ());
        // SAFETY: the word is alive, aligned, and accessed by nothing else than atomic loads of the
        // device.
        unsafe { AtomicU32::from_ptr(self.aborted.as_ptr()) }.store(1, Ordering::Release);
    }
}

impl CommState for IpcState {
    fn is_settled(&self) -> Result<bool> {
        match self.is_aborted.get() {
            // A launch puts the work in its stream.
            None => Ok(true),
            Some(()) => Err(Error::device("the exchange of GPU memory (CUDA IPC) was aborted")),
        }
    }
}

/// A communicator of ranks that write to each other's memory.
struct IpcComm {
    peers: Vec<Peer>,
    rank: usize,
    /// The memory of this rank.
    handle: MemoryHandle,
    kernels: Kernels,
    queue: CommQueue,
    state: Arc<IpcState>,
    parts: Cell<bool>,
    /// `None` only while it is dropped.
    memory: Option<(Arc<DevicePool>, Box<dyn Scratch>)>,
    rounds: RefCell<Vec<Rounds>>,
}

impl IpcComm {
    /// Opens the memory of a rank.
    fn open(&self, other: &MemoryHandle) -> Result<Peer> {
        if other.process != self.handle.process {
            let mut peer = Peer { memory: [0; BLOCKS], mailbox: 0, opened: 0 };
            for block in other.blocks.iter().filter(|block| block.bytes > 0) {
                let ipc = CUipcMemHandle { reserved: block.ipc.map(|byte| byte as _) };
                let flags = CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
                let memory = &mut peer.memory[peer.opened];
                // SAFETY: the handle is of the driver in the other process; writes the address.
                let opened = unsafe { sys::cuIpcOpenMemHandle_v2(memory, ipc, flags) };
                check("open memory of another process (CUDA IPC)", opened.result())?;
                peer.opened += 1;
            }
            peer.mailbox = address_of(peer.memory, other.mailbox);
            return Ok(peer);
        }
        if other.context != self.handle.context {
            let context = std::ptr::with_exposed_provenance_mut(other.context as usize);
            // SAFETY: the context is of a device of this process, whose ranks keep it alive.
            match unsafe { sys::cuCtxEnablePeerAccess(context, 0) }.result() {
                Err(DriverError(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => {}
                enabled => check("access memory of another GPU", enabled)?,
            }
        }
        let memory = other.blocks.map(|block| block.address);
        Ok(Peer { memory, mailbox: address_of(memory, other.mailbox), opened: 0 })
    }

    /// Returns the part of `mailbox` for messages to or from `rank`: entries and flags.
    fn part_of(mailbox: u64, rank: usize) -> (u64, u64) {
        let entries = mailbox + (rank * MAILBOX_WORDS * size_of::<u32>()) as u64;
        (entries, entries + (ENTRIES * size_of::<Entry>()) as u64)
    }

    /// Returns the number of blocks that send `words` words from one rank to another, the same on
    /// both.
    fn blocks(&self, words: usize) -> u32 {
        let most = (MOST_BLOCKS / (self.peers.len() - 1).max(1)).max(1);
        words.div_ceil(BLOCK_WORDS).clamp(1, most) as u32
    }

    /// Returns the offset of a span in this rank's pool.
    fn offset(&self, span: DeviceSpan<'_>) -> Result<u64> {
        let bytes = span.words() * size_of::<u32>();
        offset_in(&self.handle.blocks, span.address() as u64, bytes as u64)
    }

    /// Queues a kernel in the stream of messages. Its arguments are `arguments`, in order.
    ///
    /// # Safety
    /// The kernel takes arguments of these types, and accesses only memory that lives until it ends.
    unsafe fn launch(
        &self,
        kernel: &CudaFunction,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let stream = self.queue.streams.messages.cu_stream();
        let grid = (blocks, 1, 1);
        // SAFETY: the caller's promise.
        let queued = unsafe {
            result::launch_kernel(kernel.cu_function(), grid, (threads, 1, 1), 0, stream, arguments)
        };
        check("exchange messages", queued)
    }

    /// Queues messages of one round.
    fn round(&self, sends: &ByPeer<'_>, receives: &ByPeer<'_>) -> Result<()> {
        let mut rounds = self.rounds.borrow_mut();
        let mut posts = Vec::new();
        let mut senders = Vec::new();
        let own = self.peers[self.rank].mailbox;
        for (peer, spans) in with_messages(receives) {
            let round = rounds[peer].received.wrapping_add(1);
            rounds[peer].received = round;
            let (entries, _) = Self::part_of(self.peers[peer].mailbox, self.rank);
            for (number, &span) in spans.iter().enumerate() {
                posts.push(Receive {
                    entry: entries + (number * size_of::<Entry>()) as u64,
                    contents: Entry { offset: self.offset(span)?, round, unused: 0 },
                });
            }
            let (_, flags) = Self::part_of(own, peer);
            senders.push(Sender { flags, blocks: self.blocks(words(spans)), round });
        }
        // Launches, with their numbers of messages and of receivers.
        let mut puts: Vec<(Puts, usize, usize)> = Vec::new();
        for (peer, spans) in with_messages(sends) {
            let round = rounds[peer].sent.wrapping_add(1);
            rounds[peer].sent = round;
            let is_full = puts.last().is_none_or(|(_, messages, receivers)| {
                messages + spans.len() > MESSAGES || *receivers == MESSAGES
            });
            if is_full {
                puts.push((Puts::default(), 0, 0));
            }
            let Some((put, messages, receivers)) = puts.last_mut() else { continue };
            let (entries, _) = Self::part_of(own, peer);
            let (_, flags) = Self::part_of(self.peers[peer].mailbox, self.rank);
            put.receivers[*receivers] = Receiver {
                memory: self.peers[peer].memory,
                flags,
                first: *messages as u32,
                count: spans.len() as u32,
                blocks: self.blocks(words(spans)),
                round,
            };
            *receivers += 1;
            for (number, span) in spans.iter().enumerate() {
                put.messages[*messages] = Put {
                    from: span.address() as u64,
                    words: span.words() as i64,
                    entry: entries + (number * size_of::<Entry>()) as u64,
                };
                *messages += 1;
            }
        }
        posts.chunks(MESSAGES).try_for_each(|posts| self.post(posts))?;
        puts.iter().try_for_each(|(put, _, receivers)| self.put(put, *receivers))?;
        senders.chunks(MESSAGES).try_for_each(|senders| self.wait(senders))
    }

    /// Queues the kernel that posts receives.
    fn post(&self, posts: &[Receive]) -> Result<()> {
        let mut list = [Receive::default(); MESSAGES];
        list[..posts.len()].copy_from_slice(posts);
        let count = posts.len() as i32;
        let mut arguments = [argument(&list), argument(&count)];
        // SAFETY: the kernel takes a list of receives and a number; the entries are of mailboxes that
        // live as long as the communicators of their ranks.
        unsafe { self.launch(&self.kernels.post, 1, MESSAGES as u32, &mut arguments) }
    }

    /// Queues the kernel that sends messages to `receivers` ranks.
    fn put(&self, put: &Puts, receivers: usize) -> Result<()> {
        let blocks = put.receivers[..receivers].iter().map(|receiver| receiver.blocks).sum();
        if blocks == 0 {
            return Ok(());
        }
        let aborted = self.state.aborted.as_ptr().expose_provenance() as u64;
        let mut arguments = [argument(put), argument(&aborted)];
        // SAFETY: the kernel takes a list of messages and an address; the caller of `exchange` keeps
        // the spans alive, and so does that of the receiver.
        unsafe { self.launch(&self.kernels.put, blocks, SEND_THREADS, &mut arguments) }
    }

    /// Queues the kernel that waits for messages.
    fn wait(&self, senders: &[Sender]) -> Result<()> {
        let mut list = [Sender::default(); MESSAGES];
        list[..senders.len()].copy_from_slice(senders);
        let count = senders.len() as i32;
        let aborted = self.state.aborted.as_ptr().expose_provenance() as u64;
        let mut arguments = [argument(&list), argument(&count), argument(&aborted)];
        // SAFETY: the kernel takes a list of flags, a number and an address; the flags are of this
        // rank's mailbox.
        unsafe { self.launch(&self.kernels.wait, 1, WAIT_THREADS, &mut arguments) }
    }
}

/// Messages by their peer.
type ByPeer<'a> = Vec<&'a [DeviceSpan<'a>]>;

/// Returns the peers with messages.
fn with_messages<'a>(
    by_peer: &'a ByPeer<'a>,
) -> impl Iterator<Item = (usize, &'a [DeviceSpan<'a>])> {
    by_peer.iter().copied().enumerate().filter(|(_, spans)| !spans.is_empty())
}

/// Returns the words of all spans.
fn words(spans: &[DeviceSpan<'_>]) -> usize {
    spans.iter().map(|span| span.words()).sum()
}

/// Returns the address of an argument of a kernel.
fn argument<T>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Groups messages by their peer, in order.
fn by_peer<'a>(
    peers: usize,
    messages: &[(usize, DeviceSpan<'a>)],
) -> Result<Vec<Vec<DeviceSpan<'a>>>> {
    let mut grouped = vec![Vec::new(); peers];
    for &(peer, span) in messages {
        grouped
            .get_mut(peer)
            .ok_or_else(|| Error::internal(format!("a message to rank {peer} of {peers}")))?
            .push(span);
    }
    Ok(grouped)
}

impl DeviceComm for IpcComm {
    fn begin(&self, ready: Option<&dyn DeviceEvent>) -> Result<()> {
        self.queue.begin(ready)
    }

    fn end(&self) -> Result<Arc<dyn DeviceOperation>> {
        self.queue.end()
    }

    fn exchange(
        &self,
        sends: &[(usize, DeviceSpan<'_>)],
        receives: &[(usize, DeviceSpan<'_>)],
    ) -> Result<()> {
        self.state.is_settled()?;
        check("be chosen", self.queue.streams.compute.context().bind_to_thread())?;
        let sends = by_peer(self.peers.len(), sends)?;
        let receives = by_peer(self.peers.len(), receives)?;
        let longest = sends.iter().chain(&receives).map(Vec::len).max().unwrap_or(0);
        for start in (0..longest).step_by(ENTRIES) {
            self.round(&part(&sends, start), &part(&receives, start))?;
        }
        Ok(())
    }

    fn sum_in_order(&self, folds: &[OrderedSum<'_>]) -> Result<()> {
        self.queue.sum_in_order(folds)
    }

    fn wait_for_sums(&self, but: usize) -> Result<()> {
        self.queue.wait_for_sums(but)
    }

    fn collective(&self, _: DeviceCollective, _: DeviceSpan<'_>) -> Result<()> {
        Err(Error::input("CUDA IPC has no vendor collectives")
            .hint("set comm.algorithm=halving-doubling, or comm.transport=nccl"))
    }

    fn part(&self) -> Result<()> {
        // When this rank's messages are done, no peer has work that concerns its memory: it has waited
        // for what they put there, and has read what they posted. A meeting of kernels here would
        // wait for other ranks, whose hosts may be waiting for the device.
        self.parts.set(true);
        Ok(())
    }

    fn mark(&self) -> Result<Box<dyn DeviceEvent>> {
        self.queue.mark()
    }

    fn queued(&self) -> Box<dyn DeviceEvent> {
        self.queue.queued()
    }

    fn abort(&self) {
        self.state.abort();
    }

    fn synchronize(&self) {
        self.queue.synchronize();
    }
}

/// Returns the messages of each peer that are in the round which begins with message `start`.
fn part<'a>(by_peer: &'a [Vec<DeviceSpan<'a>>], start: usize) -> ByPeer<'a> {
    let in_round = |spans: &'a Vec<DeviceSpan<'a>>| {
        let end = spans.len().min(start + ENTRIES);
        spans.get(start..end).unwrap_or_default()
    };
    by_peer.iter().map(in_round).collect()
}

impl Drop for IpcComm {
    fn drop(&mut self) {
        let in_order = self.parts.get() && self.state.is_aborted.get().is_none();
        if !in_order {
            self.state.abort();
        }
        // If the context cannot be bound, the device has failed.
        let _ = self.queue.streams.compute.context().bind_to_thread();
        // Aborted kernels end at once.
        self.queue.synchronize();
        self.peers.clear();
        if !in_order {
            // Peers may still write to it.
            std::mem::forget(self.memory.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_its_bytes() {
        let block = |number: u64| BlockHandle {
            address: number << 40,
            bytes: 100 * number,
            ipc: std::array::from_fn(|i| i as u8 + number as u8),
        };
        let blocks = [block(1), block(3)];
        let handle = MemoryHandle { process: 1, context: 2, mailbox: 5, blocks };
        let bytes = handle.to_bytes();
        assert_eq!(MemoryHandle::from_bytes(&bytes), Some(handle));
        assert_eq!(MemoryHandle::from_bytes(&bytes[1..]), None);
        assert_eq!(MemoryHandle::from_bytes(&[]), None);
    }

    #[test]
    fn offsets_find_their_block() {
        let block = |address, bytes| BlockHandle { address, bytes, ipc: [0; _] };
        let blocks = [block(1000, 100), block(5000, 200)];
        let moved = |address, bytes| {
            offset_in(&blocks, address, bytes).map(|offset| address_of([70_000, 90_000], offset))
        };
        assert_eq!((moved(1000, 100), moved(1096, 4)), (Ok(70_000), Ok(70_096)));
        assert_eq!(moved(5196, 4), Ok(90_196));
        assert!(moved(1096, 8).is_err() && moved(4000, 4).is_err() && moved(6000, 4).is_err());
    }

    #[test]
    fn arguments_fit_a_launch() {
        // The limit of CUDA for all arguments of a kernel.
        const LIMIT: usize = 4096;
        assert!(size_of::<Puts>() + size_of::<u64>() <= LIMIT);
        assert!(size_of::<[Receive; MESSAGES]>() + size_of::<i32>() <= LIMIT);
        const { assert!(ENTRIES <= MESSAGES) };
    }

    #[test]
    fn rounds_have_the_messages_of_each_peer_in_order() {
        // SAFETY: nothing accesses the words.
        let span = |at: usize| unsafe { DeviceSpan::new(at, 1) };
        let messages: Vec<_> = (0..ENTRIES + 3).map(|at| (1, span(4 * at))).collect();
        let messages = [&messages[..], &[(0, span(4))]].concat();
        let grouped = by_peer(3, &messages).unwrap();
        let sizes =
            |start| part(&grouped, start).iter().map(|spans| spans.len()).collect::<Vec<_>>();
        assert_eq!((sizes(0), sizes(ENTRIES)), (vec![1, ENTRIES, 0], vec![0, 3, 0]));
        assert_eq!(part(&grouped, ENTRIES)[1][0].address(), 4 * ENTRIES);
        assert!(by_peer(1, &messages).is_err());
    }
}
