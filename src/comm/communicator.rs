//! A rank's handle to its communication thread: startup, information about the world, shutdown.

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
use super::device::{cuda_aware, grouped_collective, host_staged};
use super::environment::{MPI_LIBRARY, prepare_environment};
use super::exit::{Abort, Exit, exit_process};
use super::health::flight_recorder::{LEAVE, Label, Size};
use super::health::watchdog::{CODE, Guard, WatchdogContext};
use super::pending::reply;
use super::shared::{Shared, Stats};
use super::transport::in_process;
use super::transport::launch::{launched, launched_size};
use super::transport::tcp::{self, TcpMesh, TcpRendezvous};
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
    /// The ranks that this handle treats as the world.
    pub(super) home: GroupRanks,
    /// The transport of device memory.
    pub(super) path: DeviceTransport,
    /// Why `auto` chose it, if it did.
    pub(super) why: Option<Arc<str>>,
    /// The device of this rank, if it is known.
    pub(super) device: Option<Arc<LocalDevice<B>>>,
    /// Words of device memory in one host-staged chunk.
    pub(super) slot: usize,
    /// Whether some ranks of the job have device memory and others have not.
    pub(super) is_mixed: bool,
    backend: PhantomData<fn() -> B>,
}

/// The communication thread of a rank.
pub(super) struct Inner {
    pub world: World,
    algorithm: Algorithm,
    pub shared: Arc<Shared>,
    exit: Exit,
    /// Whether the ranks of the job have different roles.
    has_roles: Arc<AtomicBool>,
    /// The watchdog of this rank, once it has started.
    watch: Mutex<Option<Guard>>,
    /// Whether another world has taken the communication thread over.
    is_replaced: AtomicBool,
}

impl<B: Backend> Clone for Comm<B> {
    fn clone(&self) -> Self {
        Self { device: self.device.clone(), ..self.on() }
    }
}

/// Creates the communicator of a process that runs alone, without MPI and without a thread.
pub fn single<B: Backend>() -> Comm<B> {
    prepare_environment(false);
    let node = NodeInfo { local_rank: 0, local_size: 1, host: "localhost".into() };
    let world = World {
        rank: 0,
        launch_rank: 0,
        is_renumbered: false,
        nodes: [0].into(),
        node,
        library: "none (one rank)".into(),
        shares_memory: false,
        vendor: false,
        claims_cuda_aware: false,
        thread_level: None,
        staging: 0,
    };
    Comm::new(world, Algorithm::HalvingDoubling, Abort::Exit, Arc::default(), None)
}

/// Interval at which the start of the communication thread is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The least time that the processes of a job have to start: launchers do not start all of them at
/// once.
const START: Duration = Duration::from_secs(15);

/// Starts a communication thread of this name, on which `open` creates the transport.
///
/// If `open` has not returned after `timeout`, which is not zero, and [`START`], the process exits:
/// another rank may never start.
fn start(
    name: &str,
    timeout: Duration,
    open: impl FnOnce(Arc<Shared>) -> Result<(Box<dyn Transport>, World)> + Send + 'static,
) -> Result<(Worker, Arc<Shared>, World)> {
    let shared: Arc<Shared> = Arc::default();
    let (sender, receiver) = sync_channel(1);
    let worker = Worker::start(name, &shared, {
        let shared = shared.clone();
        move || {
            let (transport, outcome) = match open(shared) {
                Ok((transport, world)) => (Some(transport), Ok(world)),
                Err(error) => (None, Err(error)),
            };
            // The receiver waits below.
            let _ = sender.send(outcome);
            transport
        }
    })?;
    // As in the watchdog, time in which this process was stopped does not count.
    let mut last = Instant::now();
    let mut waited = Duration::ZERO;
    loop {
        match receiver.recv_timeout(POLL_INTERVAL) {
            Ok(outcome) => return Ok((worker, shared, outcome?)),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::comm("the communication thread did not start"));
            }
            Err(RecvTimeoutError::Timeout) => waited += last.elapsed().min(2 * POLL_INTERVAL),
        }
        last = Instant::now();
        if !timeout.is_zero() && waited > timeout.max(START) {
            log::error!(
                "the job hangs: MPI_Init has not returned for {:.1} s: another rank has not started, or cannot be \
                 reached\nhint: check on which hosts the launcher started the ranks; the time limit is \
                 comm.timeout = {} seconds, but at least {}",
                waited.as_secs_f64(),
                timeout.as_secs(),
                START.as_secs()
            );
            exit_process(CODE)
        }
    }
}

/// Creates the communicator of a process that an MPI launcher started: initialises MPI on a new
/// communication thread. Call it once in a process, best before other threads start: only then does
/// it set environment variables that libraries read ([`prepare_environment`]).
///
/// # Errors
/// Returns an error if MPI cannot be initialised, or the processes were started by the launcher of
/// another MPI library.
pub fn start_mpi<B: Backend>(algorithm: Algorithm) -> Result<Comm<B>> {
    start_mpi_within(algorithm, Duration::ZERO)
}

/// Starts as [`start_mpi`] does, but the process exits if the other ranks have not started after
/// `timeout`; zero waits for ever.
///
/// # Errors
/// Returns an error in the same cases as [`start_mpi`].
pub fn start_mpi_within<B: Backend>(algorithm: Algorithm, timeout: Duration) -> Result<Comm<B>> {
    prepare_environment(algorithm == Algorithm::Vendor);
    let (worker, shared, world) = start("comm", timeout, mpi::open)?;
    match launched_size(|name| std::env::var(name).ok()) {
        Some(started) if started > 1 && world.nodes.len() == 1 => {
            worker.end();
            let launch = launched(|name| std::env::var(name).ok()).ok().flatten();
            let by = launch.map_or("a launcher", |launch| launch.by);
            let (library, hint) = match mpi::opened_path() {
                None => (
                    world.library,
                    "start with the mpirun of the MPI library that hpctrain is linked with".into(),
                ),
                Some(path) => (
                    format!("{} ({path})", world.library),
                    format!(
                        "set {MPI_LIBRARY} to the library of that launcher, or start with the mpirun of this one"
                    ),
                ),
            };
            let message =
                format!("{started} processes were started by {by}, but {library} sees only itself");
            Err(Error::comm(message).hint(hint))
        }
        _ => Ok(Comm::new(world, algorithm, Abort::Exit, shared, Some(worker))),
    }
}

/// Creates the communicator of a process that connects to the other ranks over TCP.
///
/// # Errors
/// Returns an error if a rank does not connect in time, or the network fails.
pub fn start_tcp<B: Backend>(meeting: &TcpRendezvous, algorithm: Algorithm) -> Result<Comm<B>> {
    prepare_environment(algorithm == Algorithm::Vendor);
    let place = meeting.clone();
    let name = format!("comm-{}", meeting.rank);
    // The rendezvous has its own time limit.
    let (worker, shared, world) =
        start(&name, Duration::ZERO, move |shared| tcp::open(&place, shared))?;
    Ok(Comm::new(world, algorithm, Abort::Exit, shared, Some(worker)))
}

/// Creates the communicator of a process that connects to the other ranks at known addresses.
///
/// # Errors
/// Returns an error of kind [`Lost`](hpctrain_base::error::Kind::Lost) if a rank is gone or does
/// not connect in time, or another one if the network fails.
pub fn start_tcp_mesh<B: Backend>(mesh: TcpMesh, algorithm: Algorithm) -> Result<Comm<B>> {
    let name = format!("comm-{}", mesh.rank);
    // The mesh has its own time limit.
    let (worker, shared, world) =
        start(&name, Duration::ZERO, move |shared| tcp::open_mesh(mesh, shared))?;
    Ok(Comm::new(world, algorithm, Abort::Exit, shared, Some(worker)))
}

/// Creates the communicators of `ranks` ranks in this process. Give each to its own thread.
///
/// # Errors
/// Returns an error if a thread cannot be started.
pub fn start_threads<B: Backend>(ranks: usize, algorithm: Algorithm) -> Result<Vec<Comm<B>>> {
    start_threads_on_nodes(&vec![0; ranks], algorithm)
}

/// Creates the communicators of as many ranks as `nodes` has entries, as [`start_threads`] does.
/// Each rank behaves as if it were on the node of its entry.
///
/// # Errors
/// Returns an error if a thread cannot be started.
pub fn start_threads_on_nodes<B: Backend>(
    nodes: &[usize],
    algorithm: Algorithm,
) -> Result<Vec<Comm<B>>> {
    prepare_environment(algorithm == Algorithm::Vendor);
    let shared: Vec<Arc<Shared>> = nodes.iter().map(|_| Arc::default()).collect();
    let start =
        |((transport, world), shared): ((Box<dyn Transport + Send>, World), Arc<Shared>)| {
            let name = format!("comm-{}", world.rank);
            let worker = (nodes.len() > 1).then(|| {
                Worker::start(&name, &shared, move || Some(transport as Box<dyn Transport>))
            });
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
            is_replaced: AtomicBool::new(false),
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
            is_mixed: false,
            backend: PhantomData,
        }
    }

    /// Returns a handle to the same thread and world for buffers of another backend.
    pub fn on<C: Backend>(&self) -> Comm<C> {
        let Self { inner, home, path, why, slot, is_mixed, device: _, backend: _ } = self;
        Comm {
            inner: inner.clone(),
            home: home.clone(),
            path: *path,
            why: why.clone(),
            device: None,
            slot: *slot,
            is_mixed: *is_mixed,
            backend: PhantomData,
        }
    }

    /// Returns a handle for a job in which some ranks have device memory and others have not: its
    /// messages are host-staged, in the same chunks on all ranks. All ranks must call it.
    #[must_use]
    pub fn with_mixed_devices(&self) -> Self {
        Self { is_mixed: true, ..self.with_transport(DeviceTransport::HostStaged) }
    }

    /// Returns true for a handle of [`Self::with_mixed_devices`].
    pub fn is_mixed(&self) -> bool {
        self.is_mixed
    }

    /// Returns a handle that knows the device of this rank.
    #[must_use]
    pub fn with_local_device(&self, device: LocalDevice<B>) -> Self {
        Self { device: Some(Arc::new(device)), ..self.clone() }
    }

    /// Returns this rank's number in the world.
    pub fn rank(&self) -> usize {
        self.home.rank
    }

    /// Returns the number of ranks in the world.
    pub fn size(&self) -> usize {
        self.home.size()
    }

    /// Returns the number that the launcher gave to this rank.
    pub fn launch_rank(&self) -> usize {
        self.inner.world.launch_rank
    }

    /// Returns true if the launcher placed consecutive ranks of the job on different nodes, so that
    /// MPI's ranks were renumbered by node: those of a node are consecutive, and rank 0 stays rank
    /// 0. Algorithms then send the least between nodes, and groups of consecutive ranks, such as
    /// those of tensor parallelism, lie within nodes.
    pub fn is_renumbered(&self) -> bool {
        self.inner.world.is_renumbered
    }

    /// Returns the node of this rank.
    pub fn node(&self) -> NodeInfo {
        self.inner.world.node.clone()
    }

    /// Returns the name of the communication library, such as `"Open MPI v4.1.4"`.
    pub fn library(&self) -> &str {
        &self.inner.world.library
    }

    /// Returns true if the ranks of this node exchange through shared memory.
    pub fn shares_memory(&self) -> bool {
        self.inner.world.shares_memory
    }

    /// Returns true if the MPI library claims to be CUDA-aware. Some claim it where they are not.
    pub fn claims_cuda_aware(&self) -> bool {
        self.inner.world.claims_cuda_aware
    }

    /// Returns the thread level of MPI, such as `MPI_THREAD_FUNNELED`, or `None` without MPI.
    pub fn thread_level(&self) -> Option<&'static str> {
        self.inner.world.thread_level
    }

    /// Returns the default algorithm of groups.
    pub fn algorithm(&self) -> Algorithm {
        self.inner.algorithm
    }

    /// Returns the communication statistics of this rank so far.
    pub fn stats(&self) -> Stats {
        self.inner.shared.stats()
    }

    /// Returns the most bytes of staging memory that messages may need.
    pub fn staging(&self) -> usize {
        let on_device = match self.device_transport() {
            Some(_) if self.size() == 1 => 0,
            None => 0,
            Some(DeviceTransport::HostStaged) => host_staged::BYTES,
            Some(DeviceTransport::CudaAware | DeviceTransport::CudaIpc | DeviceTransport::Nccl) => {
                let chunk = grouped_collective::chunk(self.slot, self.size());
                let terms = grouped_collective::terms(chunk, chunk, self.size());
                cuda_aware::BYTES
                    + algorithms::staging(self.size())
                    + grouped_collective::SCRATCH_SLOTS * terms * size_of::<f32>()
            }
        };
        self.inner.world.staging + on_device
    }

    /// Returns a handle with a device transport that is known to work. All ranks must pass the
    /// same.
    #[must_use]
    pub fn with_transport(&self, path: DeviceTransport) -> Self {
        Self { path, why: None, ..self.clone() }
    }

    /// Returns a handle with a device transport and the reason for it.
    pub(super) fn with_transport_and_reason(&self, path: DeviceTransport, why: Arc<str>) -> Self {
        Self { path, why: Some(why), ..self.clone() }
    }

    /// Returns a handle whose host-staged messages go in chunks of `words` words instead of 4 MiB.
    /// All ranks must pass the same.
    #[must_use]
    pub fn with_staging_chunk(&self, words: usize) -> Self {
        Self { slot: words.max(1), ..self.clone() }
    }

    /// Returns the device transport, or `None` if the backend's memory is the host's.
    pub fn device_transport(&self) -> Option<DeviceTransport> {
        (!B::ON_HOST).then_some(self.path)
    }

    /// Returns why [`Comm::select_transport`] chose the device transport, if it had the choice.
    pub fn transport_reason(&self) -> Option<&str> {
        self.why.as_deref().filter(|_| !B::ON_HOST)
    }

    /// Frees the device memory and the device communicators that messages have used so far.
    /// Collective over the world.
    pub(super) fn free_device_resources(&self) -> Result<()> {
        let world = self.home.clone();
        let label = self.label("forget", Size::Same(0));
        let (reply, pending) = reply(&self.inner.shared);
        self.inner.submit(CommRequest::run(move |state| {
            reply.send(state.collective(&world, &label, |state| {
                state.drain_device()?;
                state.device_comms.finalize(&mut *state.transport);
                state.device_scratch.empty(&state.shared);
                Ok(())
            }));
        }));
        pending.wait()
    }

    /// Counts staging memory in the backend's memory statistics.
    pub fn count_memory(&self, backend: B) {
        self.inner.shared.count_staging(Box::new(move |bytes| {
            backend.memory_stats().record_alloc(MemoryKind::Communication, bytes)
        }));
    }

    /// Returns a handle whose world is the ranks of this rank's colour. It cannot reach ranks of
    /// other colours, except by [`Comm::abort`]. Every rank passes the colours of *all* ranks.
    /// Collective over the world.
    ///
    /// # Errors
    /// Returns an error if the number of colours is wrong, or a message between ranks failed.
    pub fn role(&self, colors_of_all_ranks: &[usize]) -> Result<Self> {
        self.inner.has_roles.store(true, Ordering::Relaxed);
        Ok(Self { home: self.members(colors_of_all_ranks)?, ..self.clone() })
    }

    /// Splits the world by colours and returns the ranks of this rank's colour.
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
                reply.send(
                    state.collective(&world, &label, |state| state.transport.split(&world, mine)),
                );
            }));
            pending.wait()?
        };
        let ours = self.home.ranks.iter().zip(colors).filter(|(_, color)| **color == mine);
        let ranks: Vec<usize> = ours.map(|(rank, _)| *rank).collect();
        Ok(GroupRanks::new(id, self.inner.world.rank, ranks, self.inner.world.nodes.clone()))
    }

    /// Returns the recorded activity of this rank's threads.
    pub fn activity(&self) -> &Activity {
        &self.inner.shared.activity
    }

    /// Returns the nanoseconds to add to this rank's [`now`](hpctrain_base::spans::now) to get that
    /// of rank 0. Collective over the world.
    ///
    /// # Errors
    /// Returns an error if a message failed.
    pub fn clock_offset(&self) -> Result<i64> {
        if self.size() == 1 {
            return Ok(0);
        }
        let world = self.home.clone();
        let label = self.label("clock", Size::Same(0));
        let (reply, pending) = reply(&self.inner.shared);
        self.inner.submit(CommRequest::run(move |state| {
            reply.send(state.collective(&world, &label, |state| {
                clock::offset(&mut *state.transport, &world, spans::now)
            }));
        }));
        pending.wait()
    }

    /// Returns the label of an operation on the world.
    pub(super) fn label(&self, op: &'static str, size: Size) -> Label {
        Label { op, group: WORLD, unit: None, size, algorithm: "direct", root: None }
    }

    /// Returns a handle by which another thread can end all requests of this rank.
    pub fn interrupter(&self) -> Interrupter {
        Interrupter { shared: self.inner.shared.clone(), exit: self.inner.exit.clone() }
    }

    /// Returns the communicator of the ranks that are left after a loss, on the same thread: of this
    /// one only the watchdog is left to end. Collective over the ranks that are left.
    ///
    /// # Errors
    /// Returns an error of kind [`Lost`](hpctrain_base::error::Kind::Lost) if another rank was lost
    /// meanwhile: then shrink again. Returns another error if the transport cannot do that.
    pub fn shrink(&self) -> Result<Self> {
        let (reply, pending) = reply(&self.inner.shared);
        self.inner.submit(CommRequest::run(move |state| reply.send(state.shrink())));
        let world = pending.wait()?;
        self.inner.is_replaced.store(true, Ordering::Relaxed);
        let inner = Inner {
            algorithm: self.inner.algorithm,
            shared: self.inner.shared.clone(),
            exit: self.inner.exit.clone(),
            has_roles: Arc::default(),
            watch: Mutex::new(None),
            is_replaced: AtomicBool::new(false),
            world,
        };
        Ok(Self {
            home: GroupRanks::world(inner.world.rank, inner.world.nodes.clone()),
            inner: Arc::new(inner),
            path: DeviceTransport::HostStaged,
            why: None,
            device: None,
            slot: host_staged::WORDS,
            is_mixed: false,
            backend: PhantomData,
        })
    }

    /// Returns true if a request has failed because another rank is gone.
    pub fn has_lost_ranks(&self) -> bool {
        self.inner.shared.has_lost_ranks()
    }

    /// Ends the communication thread once it has finished its requests, and leaves the world
    /// (`MPI_Finalize`). Requests of groups that are still alive fail from then on. Dropping the
    /// last handle does the same.
    pub fn shutdown(self) {
        self.inner.end();
    }

    /// Aborts *all* ranks, even while they wait for one another.
    ///
    /// With MPI the communication thread calls `MPI_Abort` (ranks of Open MPI 4's `mpirun` exit, which
    /// it takes for the same); if that has no effect within two
    /// seconds, this process exits, which makes the launcher end the others. Between threads of one
    /// process every request of every rank fails from now on, and the calling thread unwinds with
    /// [`Aborted`](crate::Aborted).
    pub fn abort(&self, code: i32) -> ! {
        self.inner.exit.abort(code)
    }
}

/// Ends the requests of a rank from another thread, because a rank is gone.
#[derive(Clone)]
pub struct Interrupter {
    shared: Arc<Shared>,
    exit: Exit,
}

impl Interrupter {
    /// Fails all requests with this error from now on, also those under way, and closes the
    /// connections, from which the other ranks learn of it.
    pub fn interrupt(&self, error: Error) {
        self.shared.interrupt(error);
        // The thread may be asleep on its queue.
        self.exit.submit(CommRequest::run(|state| {
            // The error stays, and is returned by the next request.
            let _ = state.attempt(|_| Ok(()));
        }));
    }
}

impl Inner {
    /// Queues a request. If the thread has ended, the request is dropped, which its `Pending`
    /// reports.
    pub fn submit(&self, request: CommRequest) {
        self.exit.submit(request);
    }

    /// Returns what the watchdog needs to know of this rank.
    pub fn watchdog_context(&self) -> WatchdogContext {
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

    /// Runs `act` on the watchdog of this rank, which is started if it does not run.
    pub fn watched<T>(&self, act: impl FnOnce(&Guard) -> Result<T>) -> Result<T> {
        let mut watch = self.watch();
        let guard = match watch.take() {
            Some(guard) => guard,
            None => Guard::start(self.watchdog_context())?,
        };
        let done = act(&guard);
        *watch = Some(guard);
        done
    }

    /// Returns true if the watchdog of this rank runs.
    pub fn is_watched(&self) -> bool {
        self.watch().is_some()
    }

    /// Stops the watchdog of this rank.
    pub fn end_watch(&self) {
        let watch = self.watch().take();
        drop(watch);
    }

    fn end(&self) {
        if self.is_replaced.load(Ordering::Relaxed) {
            return self.end_watch();
        }
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
                    state.shared.flight_recorder().begin(&world, &label);
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
            // The other ranks may wait for messages that this rank will never send.
            self.exit.request_abort(1);
        }
        self.end();
    }
}
