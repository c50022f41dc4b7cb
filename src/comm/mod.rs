//! Messages between ranks.
//!
//! One **communication thread** per rank owns the wire: with MPI it initialises the library, makes every
//! call and finalises it. Compute threads hand it buffers *by move*, and [`Pending::wait`] gives them
//! back, so no borrow can race with the wire. Requests run in the order they were made, one at a time;
//! only sends finish in the background. The ranks of a group must make the same collective requests in
//! the same order, which debug builds check.
//!
//! Three things carry messages: [`mpi`], [`threads`] (ranks as threads of one process, for tests and
//! simulation), and nothing at all ([`single`]). The collectives above them are shared.
//! A group of one rank is the identity, so callers never ask how large a group is.

mod algorithms;
mod backoff;
mod choice;
mod clock;
mod cut;
mod device_comms;
mod direct;
mod group;
mod heartbeat;
pub mod launch;
mod ledger;
pub mod mpi;
mod operand;
mod path;
mod pending;
mod shared;
mod staged;
mod stall;
mod table;
#[cfg(test)]
mod tests;
pub mod threads;
mod watchdog;
mod wire;
mod worker;

use std::marker::PhantomData;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::activity::{self, Activity};
use crate::backend::{Backend, MemoryKind};
use crate::error::{Error, Result};

pub use algorithms::{Algorithm, Operation};
pub use choice::{Choice, measure, slowest};
pub use group::Group;
pub use path::{DevicePath, PROOF, PathSetting, prove};
pub use pending::Pending;
pub use shared::Stats;
pub use table::Table;
pub use watchdog::Watch;

use heartbeat::Files;
use ledger::{Label, Size};
use pending::reply;
use shared::Shared;
use wire::Members;
use worker::{Request, Worker};

/// Name of the group of all ranks.
const WORLD: &str = "world";

/// Time limit of an abort, after which the process ends on its own.
const ABORT_PATIENCE: Duration = Duration::from_secs(2);

/// The node of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeInfo {
    /// This rank's number among the ranks of its node.
    pub local_rank: usize,
    /// Ranks on this node.
    pub local_size: usize,
    /// The node's name.
    pub host: String,
}

/// The world of a rank, as it was started.
#[derive(Clone)]
struct World {
    rank: usize,
    /// The node of every rank, as a number.
    nodes: Arc<[usize]>,
    node: NodeInfo,
    library: String,
    /// Whether ranks of this node exchange through shared memory.
    shares_memory: bool,
    /// Whether the library has collectives of its own.
    vendor: bool,
    /// Whether the library says that it takes addresses of GPUs.
    claims_devices: bool,
    /// Thread level of MPI; none without MPI.
    threads: Option<&'static str>,
    /// Bytes that messages pass through, at most.
    staging: usize,
}

/// The end of a rank that aborts.
enum Abort {
    /// With its process.
    Exit,
    /// By unwinding with [`threads::Aborted`]: the process is shared with other ranks.
    Unwind,
}

/// A handle to this rank's communication thread. Clones share it.
pub struct Comm<B: Backend> {
    inner: Arc<Inner>,
    /// The ranks that this handle takes for the world.
    home: Members,
    /// The path of messages to device memory.
    path: DevicePath,
    /// Words of device memory that go through the host at a time.
    slot: usize,
    backend: PhantomData<fn() -> B>,
}

struct Inner {
    world: World,
    algorithm: Algorithm,
    abort: Abort,
    shared: Arc<Shared>,
    /// None in a world of one, which needs no communication.
    worker: Mutex<Option<Worker>>,
}

impl<B: Backend> Clone for Comm<B> {
    fn clone(&self) -> Self {
        self.on()
    }
}

/// The communicator of a process that was started alone: no MPI, no thread.
pub fn single<B: Backend>() -> Comm<B> {
    let node = NodeInfo { local_rank: 0, local_size: 1, host: "localhost".into() };
    let world = World {
        rank: 0,
        nodes: [0].into(),
        node,
        library: "none (one rank)".into(),
        shares_memory: false,
        vendor: false,
        claims_devices: false,
        threads: None,
        staging: 0,
    };
    Comm::new(world, Algorithm::Tree, Abort::Exit, Arc::default(), None)
}

impl<B: Backend> Comm<B> {
    fn new(world: World, algorithm: Algorithm, abort: Abort, shared: Arc<Shared>, worker: Option<Worker>) -> Self {
        let home = Members::world(world.rank, world.nodes.clone());
        let inner = Inner { world, algorithm, abort, shared, worker: Mutex::new(worker) };
        Self { inner: Arc::new(inner), home, path: DevicePath::Staged, slot: staged::WORDS, backend: PhantomData }
    }

    /// The same thread and world, for buffers of another backend.
    pub fn on<C: Backend>(&self) -> Comm<C> {
        let Self { inner, home, path, slot, backend: _ } = self;
        Comm { inner: inner.clone(), home: home.clone(), path: *path, slot: *slot, backend: PhantomData }
    }

    /// This rank's number in the world.
    pub fn rank(&self) -> usize {
        self.home.rank
    }

    /// Ranks in the world.
    pub fn size(&self) -> usize {
        self.home.size()
    }

    /// The node of this rank.
    pub fn node(&self) -> NodeInfo {
        self.inner.world.node.clone()
    }

    /// The library that carries messages, such as `"Open MPI v4.1.4"`.
    pub fn library(&self) -> &str {
        &self.inner.world.library
    }

    /// Whether the ranks of this node exchange through shared memory.
    pub fn shares_memory(&self) -> bool {
        self.inner.world.shares_memory
    }

    /// Whether the MPI library says that it takes addresses of GPUs. Some say so where they cannot.
    pub fn claims_devices(&self) -> bool {
        self.inner.world.claims_devices
    }

    /// Thread level of MPI, such as `MPI_THREAD_FUNNELED`; none without MPI.
    pub fn thread_level(&self) -> Option<&'static str> {
        self.inner.world.threads
    }

    /// The default algorithm of groups.
    pub fn algorithm(&self) -> Algorithm {
        self.inner.algorithm
    }

    /// Cost of communication for this rank so far.
    pub fn stats(&self) -> Stats {
        self.inner.shared.stats()
    }

    /// Bytes of memory that messages pass through, at most.
    pub fn staging(&self) -> usize {
        let on_device = match self.device_path() {
            Some(_) if self.size() == 1 => 0,
            None => 0,
            Some(DevicePath::Staged) => staged::BYTES,
            Some(DevicePath::Direct | DevicePath::Nccl) => direct::BYTES + algorithms::staging(self.size()),
        };
        self.inner.world.staging + on_device
    }

    /// Counts the memory that messages pass through as the backend's.
    pub fn count_memory(&self, backend: B) {
        self.inner.shared.count_staging(Box::new(move |bytes| backend.ledger().take(MemoryKind::Communication, bytes)));
    }

    /// The group of all ranks.
    pub fn world(&self) -> Group<B> {
        Group::new(self.clone(), self.home.clone()).named(WORLD)
    }

    /// Collective over the world: a handle for which the ranks that share my colour are the world. Ranks of other
    /// colours are out of its reach, but for [`Comm::abort`]. Every rank passes the colours of *all* ranks.
    ///
    /// # Errors
    /// As [`Comm::split`].
    pub fn role(&self, colors_of_all_ranks: &[usize]) -> Result<Self> {
        Ok(Self { home: self.members(colors_of_all_ranks)?, ..self.clone() })
    }

    /// Collective over the world: the group of the ranks that share my colour, ordered by rank.
    /// Every rank passes the colours of *all* ranks. The group lives as long as the communicator.
    ///
    /// # Errors
    /// A colour is missing, or the message between ranks failed.
    pub fn split(&self, colors_of_all_ranks: &[usize]) -> Result<Group<B>> {
        Ok(Group::new(self.clone(), self.members(colors_of_all_ranks)?))
    }

    /// The ranks that share my colour.
    fn members(&self, colors: &[usize]) -> Result<Members> {
        if colors.len() != self.size() {
            return Err(Error::internal(format!("{} colours for {} ranks", colors.len(), self.size())));
        }
        let mine = colors[self.rank()];
        let id = if self.size() == 1 {
            0
        } else {
            let world = self.home.clone();
            let label = self.label("split", Size::Own(0));
            let (reply, pending) = reply(&self.inner.shared);
            self.inner.submit(Request::run(move |state| {
                reply.send(state.collective(&world, &label, |state| state.wire.split(&world, mine)));
            }));
            pending.wait()?
        };
        let ours = self.home.ranks.iter().zip(colors).filter(|(_, color)| **color == mine);
        let ranks: Vec<usize> = ours.map(|(rank, _)| *rank).collect();
        Ok(Members::new(id, self.inner.world.rank, ranks, self.inner.world.nodes.clone()))
    }

    /// Record of the activity of this rank's threads.
    pub fn activity(&self) -> &Activity {
        &self.inner.shared.activity
    }

    /// Collective over the world: nanoseconds to add to this rank's [`now`](crate::activity::now) for that of rank 0.
    ///
    /// # Errors
    /// The message failed.
    pub fn clock_offset(&self) -> Result<i64> {
        if self.size() == 1 {
            return Ok(0);
        }
        let world = self.home.clone();
        let label = self.label("clock", Size::Same(0));
        let (reply, pending) = reply(&self.inner.shared);
        self.inner.submit(Request::run(move |state| {
            reply
                .send(state.collective(&world, &label, |state| clock::offset(&mut *state.wire, &world, activity::now)));
        }));
        pending.wait()
    }

    /// Collective over the world: watches over this rank until the watch is dropped. Heartbeats and ledgers go to
    /// `folder`, which all ranks share. When a rank waits for longer than `timeout` in a collective or for data, the
    /// job ends with a report of where each rank is, and exit code 1. A world of one rank needs no watch.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn watch(&self, folder: &Path, timeout: Duration) -> Result<Option<Watch>> {
        if self.size() == 1 {
            return Ok(None);
        }
        let world = self.world();
        // No rank may take files of an earlier job for this job's.
        world.agree(if self.rank() == 0 { Files::new(folder).clear() } else { Ok(()) })?;
        world.agree(Watch::start(self.inner.clone(), self.rank(), self.size(), folder, timeout)).map(Some)
    }

    /// Something that concerns the world.
    fn label(&self, op: &'static str, size: Size) -> Label {
        Label { op, group: WORLD, unit: None, size, algorithm: "direct", root: None }
    }

    /// Ends the communication thread once it has finished its requests, and leaves the world (`MPI_Finalize`). Groups
    /// that are still alive can make no further requests. Dropping the last handle does the same.
    pub fn shutdown(self) {
        self.inner.end();
    }

    /// Ends *all* ranks, even while they wait for one another.
    ///
    /// With MPI this is `MPI_Abort` on the communication thread, and after two seconds without effect the
    /// end of this process, which makes the launcher end the others. Between threads every request of every
    /// rank fails from now on, and the calling thread unwinds with [`threads::Aborted`].
    pub fn abort(&self, code: i32) -> ! {
        self.inner.request_abort(code);
        match self.inner.abort {
            Abort::Unwind => std::panic::resume_unwind(Box::new(threads::Aborted { code })),
            Abort::Exit => {
                if self.inner.world.nodes.len() > 1 {
                    std::thread::sleep(ABORT_PATIENCE);
                }
                std::process::exit(code)
            }
        }
    }
}

impl Inner {
    /// Queues a request. If the thread has ended, the request is dropped, which its `Pending` reports.
    fn submit(&self, request: Request) {
        if let Some(worker) = &*self.worker.lock().unwrap_or_else(PoisonError::into_inner) {
            worker.submit(request);
        }
    }

    fn request_abort(&self, code: i32) {
        self.shared.abort(code);
        // The thread may be asleep on its queue.
        self.submit(Request::run(|_| {}));
    }

    /// Ends the job from a thread that knows it to be stuck, and this process with it.
    fn end_job(&self, code: i32) -> ! {
        // Libraries clean up when a process ends, and may wait for a lock that a stuck thread holds.
        let impatient = || {
            std::thread::sleep(2 * ABORT_PATIENCE);
            std::process::abort()
        };
        let _ = std::thread::Builder::new().spawn(impatient);
        if let Abort::Exit = self.abort {
            self.request_abort(code);
            std::thread::sleep(ABORT_PATIENCE);
        }
        std::process::exit(code)
    }

    fn end(&self) {
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(worker) = worker {
            worker.end();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The others may be waiting for messages that this rank will never send.
            self.request_abort(1);
        }
        self.end();
    }
}
