//! A rank's handle to its communication thread: its start, its view of the world, its end.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::algorithms::{self, Algorithm};
use super::clock;
use super::device::local_device::LocalDevice;
use super::device::path::DeviceTransport;
use super::device::{cuda_aware, host_staged, nccl_p2p};
use super::exit::{Abort, Exit, leave};
use super::health::flight_recorder::{LEAVE, Label, Size};
use super::health::watchdog::{CODE, Guard, WatchdogContext};
use super::pending::reply;
use super::shared::{Shared, Stats};
use super::transport::in_process;
use super::transport::launch::launched_size;
use super::transport::tcp::{self, TcpRendezvous};
use super::transport::{GroupRanks, NodeInfo, Transport, World, mpi};
use super::worker::{CommRequest, Worker};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans;
use hpctrain_base::spans::Activity;
use hpctrain_device::{Backend, MemoryKind};

/// Name of the group of all ranks.
pub(super) const WORLD: &str = "world";

/// A handle to this rank's communication thread. Clones share it.
pub struct Comm<B: Backend> {
    pub(super) inner: Arc<Inner>,
    /// The ranks that this handle takes for the world.
    pub(super) home: GroupRanks,
    /// The path of messages to device memory.
    pub(super) path: DeviceTransport,
    /// The reason for it, where it was chosen here.
    pub(super) why: Option<Arc<str>>,
    /// The device of this rank, if it is known.
    pub(super) device: Option<Arc<LocalDevice<B>>>,
    /// Words of device memory that go through the host at a time.
    pub(super) slot: usize,
    backend: PhantomData<fn() -> B>,
}

/// The communication thread of a rank.
pub(super) struct Inner {
    pub world: World,
    algorithm: Algorithm,
    pub shared: Arc<Shared>,
    exit: Exit,
    /// Whether the ranks of the job have different work.
    has_roles: Arc<AtomicBool>,
    /// The watch over this rank, once it has begun.
    watch: Mutex<Option<Guard>>,
}

impl<B: Backend> Clone for Comm<B> {
    fn clone(&self) -> Self {
        Self { device: self.device.clone(), ..self.on() }
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
    Comm::new(world, Algorithm::HalvingDoubling, Abort::Exit, Arc::default(), None)
}

/// Time between two looks whether a rank has started.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Time that the processes of a job have to start, at least: launchers do not start all of them at
/// once.
const START: Duration = Duration::from_secs(15);

/// A communication thread of this name, whose wire `open` makes on it.
///
/// After `patience` without an answer the process ends: another rank may never come.
fn start(
    name: &str,
    patience: Duration,
    open: impl FnOnce(Arc<Shared>) -> Result<(Box<dyn Transport>, World)> + Send + 'static,
) -> Result<(Worker, Arc<Shared>, World)> {
    let shared: Arc<Shared> = Arc::default();
    let (tell, told) = sync_channel(1);
    let worker = Worker::start(name, &shared, {
        let shared = shared.clone();
        move || {
            let (wire, news) = match open(shared) {
                Ok((wire, world)) => (Some(wire), Ok(world)),
                Err(error) => (None, Err(error)),
            };
            // The receiver waits below.
            let _ = tell.send(news);
            wire
        }
    })?;
    // As in the watch, time in which this process was stopped does not count.
    let mut last = Instant::now();
    let mut waited = Duration::ZERO;
    loop {
        match told.recv_timeout(POLL_INTERVAL) {
            Ok(news) => return Ok((worker, shared, news?)),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::comm("the communication thread did not start"));
            }
            Err(RecvTimeoutError::Timeout) => waited += last.elapsed().min(2 * POLL_INTERVAL),
        }
        last = Instant::now();
        if !patience.is_zero() && waited > patience.max(START) {
            log::error!(
                "the job stands still: MPI_Init has not returned for {:.1} s: another rank has not started, or cannot be \
                 reached\nhint: look where the launcher has started them; a start may take comm.timeout = {} seconds, and {} \
                 at least",
                waited.as_secs_f64(),
                patience.as_secs(),
                START.as_secs()
            );
            leave(CODE)
        }
    }
}

/// The communicator of a process that an MPI launcher started: initialises MPI on a new
/// communication thread. Once in a process, best before other threads start: then it may set
/// environment variables that MPI and CUDA read.
///
/// # Errors
/// MPI cannot be initialised, or the processes were started by the launcher of another MPI library.
pub fn start_mpi<B: Backend>(algorithm: Algorithm) -> Result<Comm<B>> {
    start_mpi_within(algorithm, Duration::ZERO)
}

/// As [`start_mpi`]; but if the other ranks have not come after `patience`, which is not zero, this
/// process ends.
///
/// # Errors
/// As [`start_mpi`].
pub fn start_mpi_within<B: Backend>(algorithm: Algorithm, patience: Duration) -> Result<Comm<B>> {
    mpi::prepare_environment();
    let (worker, shared, world) = start("comm", patience, mpi::open)?;
    match launched_size(|name| std::env::var(name).ok()) {
        Some(started) if started > 1 && world.nodes.len() == 1 => {
            worker.end();
            let message =
                format!("{started} processes were started, but {} sees only itself", world.library);
            Err(Error::comm(message)
                .hint("start with the mpirun of the MPI library that hpctrain is linked with"))
        }
        _ => Ok(Comm::new(world, algorithm, Abort::Exit, shared, Some(worker))),
    }
}

/// The communicator of a process that meets the others of its world by itself, over TCP.
///
/// # Errors
/// They do not come in time, or the network refused.
pub fn start_tcp<B: Backend>(meeting: &TcpRendezvous, algorithm: Algorithm) -> Result<Comm<B>> {
    let place = meeting.clone();
    // The meeting has a time limit of its own.
    let open = move |shared| tcp::open(&place, shared);
    let (worker, shared, world) = start(&format!("comm-{}", meeting.rank), Duration::ZERO, open)?;
    Ok(Comm::new(world, algorithm, Abort::Exit, shared, Some(worker)))
}

/// The communicators of `ranks` ranks in this process. Give each to a thread of its own.
///
/// # Errors
/// Returns an error if the system refused a thread.
pub fn start_threads<B: Backend>(ranks: usize, algorithm: Algorithm) -> Result<Vec<Comm<B>>> {
    start_threads_on_nodes(&vec![0; ranks], algorithm)
}

/// As [`start_threads`], of ranks that behave as if each were on the node given for it.
///
/// # Errors
/// The same.
pub fn start_threads_on_nodes<B: Backend>(
    nodes: &[usize],
    algorithm: Algorithm,
) -> Result<Vec<Comm<B>>> {
    let shared: Vec<Arc<Shared>> = nodes.iter().map(|_| Arc::default()).collect();
    let start = |((wire, world), shared): ((Box<dyn Transport + Send>, World), Arc<Shared>)| {
        let name = format!("comm-{}", world.rank);
        let worker = (nodes.len() > 1)
            .then(|| Worker::start(&name, &shared, move || Some(wire as Box<dyn Transport>)));
        Ok(Comm::new(world, algorithm, Abort::Unwind, shared, worker.transpose()?))
    };
    in_process::open(nodes, &shared).into_iter().zip(shared).map(start).collect()
}

impl<B: Backend> Comm<B> {
    fn new(
        world: World,
        algorithm: Algorithm,
        abort: Abort,
        shared: Arc<Shared>,
        worker: Option<Worker>,
    ) -> Self {
        let home = GroupRanks::world(world.rank, world.nodes.clone());
        let exit = Exit::new(abort, world.nodes.len() > 1, shared.clone(), worker);
        let inner = Inner {
            world,
            algorithm,
            shared,
            exit,
            has_roles: Arc::default(),
            watch: Mutex::new(None),
        };
        let path = DeviceTransport::HostStaged;
        let slot = host_staged::WORDS;
        Self {
            inner: Arc::new(inner),
            home,
            path,
            why: None,
            device: None,
            slot,
            backend: PhantomData,
        }
    }

    /// The same thread and world, for buffers of another backend.
    pub fn on<C: Backend>(&self) -> Comm<C> {
        let Self { inner, home, path, why, slot, device: _, backend: _ } = self;
        let inner = inner.clone();
        let home = home.clone();
        let why = why.clone();
        Comm { inner, home, path: *path, why, device: None, slot: *slot, backend: PhantomData }
    }

    /// The same, of a rank that has this device.
    #[must_use]
    pub fn with_local_device(&self, device: LocalDevice<B>) -> Self {
        Self { device: Some(Arc::new(device)), ..self.clone() }
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
            Some(DeviceTransport::HostStaged) => host_staged::BYTES,
            Some(DeviceTransport::CudaAware) => {
                cuda_aware::BYTES + algorithms::staging(self.size())
            }
            Some(DeviceTransport::Nccl) => {
                let chunk = nccl_p2p::chunk(self.slot, self.size());
                let terms = nccl_p2p::terms(chunk, chunk, self.size()) * size_of::<f32>();
                cuda_aware::BYTES + algorithms::staging(self.size()) + nccl_p2p::PLACES * terms
            }
        };
        self.inner.world.staging + on_device
    }

    /// A handle whose messages reach device memory by a path that is known to work. All ranks take
    /// the same.
    #[must_use]
    pub fn with_transport(&self, path: DeviceTransport) -> Self {
        Self { path, why: None, ..self.clone() }
    }

    /// As [`Comm::with_transport`], with the reasons.
    pub(super) fn because(&self, path: DeviceTransport, why: Arc<str>) -> Self {
        Self { path, why: Some(why), ..self.clone() }
    }

    /// A handle whose staged messages go in chunks of so many words, rather than 4 MiB. All ranks
    /// take the same.
    #[must_use]
    pub fn in_chunks(&self, words: usize) -> Self {
        Self { slot: words.max(1), ..self.clone() }
    }

    /// The path of messages to the memory of the backend; none if it is the host's.
    pub fn device_path(&self) -> Option<DeviceTransport> {
        (!B::ON_HOST).then_some(self.path)
    }

    /// The reasons for that path, where [`Comm::select_transport`] had the choice.
    pub fn transport_reason(&self) -> Option<&str> {
        self.why.as_deref().filter(|_| !B::ON_HOST)
    }

    /// Gives back the device memory and the communicators by which messages have passed so far;
    /// collective over the world.
    pub(super) fn forget_devices(&self) -> Result<()> {
        let world = self.home.clone();
        let label = self.label("forget", Size::Same(0));
        let (reply, pending) = reply(&self.inner.shared);
        self.inner.submit(CommRequest::run(move |state| {
            reply.send(state.collective(&world, &label, |state| {
                state.device_comms.part(&mut *state.wire);
                state.room.empty(&state.shared);
                Ok(())
            }));
        }));
        pending.wait()
    }

    /// Counts the memory that messages pass through as the backend's.
    pub fn count_memory(&self, backend: B) {
        self.inner.shared.count_staging(Box::new(move |bytes| {
            backend.ledger().take(MemoryKind::Communication, bytes)
        }));
    }

    /// Collective over the world: a handle for which the ranks that share my colour are the world.
    /// Ranks of other colours are out of its reach, but for [`Comm::abort`]. Every rank passes the
    /// colours of *all* ranks.
    ///
    /// # Errors
    /// As [`Comm::split`].
    pub fn role(&self, colors_of_all_ranks: &[usize]) -> Result<Self> {
        self.inner.has_roles.store(true, Ordering::Relaxed);
        Ok(Self { home: self.members(colors_of_all_ranks)?, ..self.clone() })
    }

    /// The ranks that share my colour.
    pub(super) fn members(&self, colors: &[usize]) -> Result<GroupRanks> {
        if colors.len() != self.size() {
            return Err(Error::internal(format!(
                "{} colours for {} ranks",
                colors.len(),
                self.size()
            )));
        }
        let mine = colors[self.rank()];
        let id = if self.size() == 1 {
            0
        } else {
            let world = self.home.clone();
            let label = self.label("split", Size::Own(0));
            let (reply, pending) = reply(&self.inner.shared);
            self.inner.submit(CommRequest::run(move |state| {
                reply
                    .send(state.collective(&world, &label, |state| state.wire.split(&world, mine)));
            }));
            pending.wait()?
        };
        let ours = self.home.ranks.iter().zip(colors).filter(|(_, color)| **color == mine);
        let ranks: Vec<usize> = ours.map(|(rank, _)| *rank).collect();
        Ok(GroupRanks::new(id, self.inner.world.rank, ranks, self.inner.world.nodes.clone()))
    }

    /// Record of the activity of this rank's threads.
    pub fn activity(&self) -> &Activity {
        &self.inner.shared.activity
    }

    /// Collective over the world: nanoseconds to add to this rank's
    /// [`now`](hpctrain_base::spans::now) for that of rank 0.
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
        self.inner.submit(CommRequest::run(move |state| {
            reply.send(state.collective(&world, &label, |state| {
                clock::offset(&mut *state.wire, &world, spans::now)
            }));
        }));
        pending.wait()
    }

    /// Something that concerns the world.
    pub(super) fn label(&self, op: &'static str, size: Size) -> Label {
        Label { op, group: WORLD, unit: None, size, algorithm: "direct", root: None }
    }

    /// Ends the communication thread once it has finished its requests, and leaves the world
    /// (`MPI_Finalize`). Groups that are still alive can make no further requests. Dropping the
    /// last handle does the same.
    pub fn shutdown(self) {
        self.inner.end();
    }

    /// Ends *all* ranks, even while they wait for one another.
    ///
    /// With MPI this is `MPI_Abort` on the communication thread, and after two seconds without
    /// effect the end of this process, which makes the launcher end the others. Between threads
    /// every request of every rank fails from now on, and the calling thread unwinds with
    /// [`Aborted`](crate::Aborted).
    pub fn abort(&self, code: i32) -> ! {
        self.inner.exit.abort(code)
    }
}

impl Inner {
    /// Queues a request. If the thread has ended, the request is dropped, which its `Pending`
    /// reports.
    pub fn submit(&self, request: CommRequest) {
        self.exit.submit(request);
    }

    /// This rank as its watch sees it.
    pub fn seat(&self) -> WatchdogContext {
        let Self { world, shared, exit, has_roles, .. } = self;
        WatchdogContext {
            shared: shared.clone(),
            world: world.clone(),
            exit: exit.clone(),
            has_roles: has_roles.clone(),
        }
    }

    fn watch(&self) -> MutexGuard<'_, Option<Guard>> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the watch over this rank, which begins if it has not.
    pub fn watched<T>(&self, act: impl FnOnce(&Guard) -> Result<T>) -> Result<T> {
        let mut watch = self.watch();
        let guard = match watch.take() {
            Some(guard) => guard,
            None => Guard::start(self.seat())?,
        };
        let done = act(&guard);
        *watch = Some(guard);
        done
    }

    /// Whether a watch over this rank has begun.
    pub fn is_watched(&self) -> bool {
        self.watch().is_some()
    }

    /// Ends the watch over this rank.
    pub fn end_watch(&self) {
        let watch = self.watch().take();
        drop(watch);
    }

    fn end(&self) {
        if let Some(worker) = self.exit.take_worker() {
            let world = GroupRanks::world(self.world.rank, self.world.nodes.clone());
            let label = Label {
                op: LEAVE,
                group: WORLD,
                unit: None,
                size: Size::Own(0),
                algorithm: "direct",
                root: None,
            };
            worker.submit(CommRequest::run(move |state| {
                if state.failure().is_none() {
                    state.shared.ledger().begin(&world, &label);
                }
            }));
            worker.end();
        }
        self.end_watch();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The others may be waiting for messages that this rank will never send.
            self.exit.request_abort(1);
        }
        self.end();
    }
}
