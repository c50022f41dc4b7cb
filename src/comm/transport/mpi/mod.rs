//! Ranks as processes that an MPI launcher started.
//!
//! One thread makes all calls (`MPI_THREAD_FUNNELED`), through raw bindings (`ffi.rs`): those of rsmpi,
//! whose safe layer ignores return codes, or those of a library that is opened at run time. Requests are non-blocking and polled here with a backoff,
//! so that a spinning library does not take the core from compute, and an abort takes effect in the
//! middle of a collective. Only vendor collectives block. The default features of rsmpi are off:
//! they add libffi for user-defined operations.
//!
//! Between ranks of one node, elements that will be added go through shared memory; other elements,
//! too, unless MPI messages are measured to be faster at the start. Between nodes, and for bytes,
//! MPI messages are used.

mod calls;
mod collectives;
mod cuda_probe;
mod exchange;
mod ffi;
#[cfg_attr(feature = "linked-mpi", allow(dead_code, reason = "a linked library is used instead"))]
mod library;
mod node;
mod request;
mod shm_window;
mod ulfm;

use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use calls::{check, count, count_up, text};
use exchange::{ChunkStaging, MessageWindow, Receiving, Sending};
use node::{Node, place};
use request::{Bytes, MessageKind, MpiRequest};
use shm_window::Segment;

use super::{
    DeviceCollective, DeviceMessage, GroupRanks, InFlight, Incoming, NodeInfo, Outgoing, P2pBuffer,
    Peer, Transport, World, check_length, least_sent,
};
use crate::algorithms;
use crate::environment::{YIELD, cores};
use crate::polling::Backoff;
use crate::shared::Shared;
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_device::DeviceSpan;
use ulfm::ulfm;

pub use cuda_probe::{probe_in_child, run_cuda_probe};
pub use ffi::opened_path;
pub use ulfm::is_enabled as has_ulfm;

/// The oldest supported version of MPI, the first with shared memory between ranks.
const OLDEST: (c_int, c_int) = (3, 0);

/// Interval at which a rank that waits checks whether others were lost.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Elements and number of the exchanges that measure a path. The fastest counts; the others were
/// disturbed.
const TRIAL: usize = 1 << 18;
const TRIALS: usize = 5;

/// MPI messages carry copies only if they take less than this fraction of the time of shared
/// memory: timings at startup are rough.
const GAIN: f64 = 0.8;

/// Variable of ranks that were started by the `mpirun` of Open MPI before version 5 (ORTE).
const ORTE: &str = "OMPI_MCA_orte_hnp_uri";

/// Initialises MPI on this thread, which makes all calls from now on.
///
/// # Errors
/// Returns an error if MPI cannot be initialised.
pub(crate) fn open(shared: Arc<Shared>) -> Result<(Box<dyn Transport>, World)> {
    let (transport, world) = Mpi::open(shared)?;
    Ok((Box::new(transport), world))
}

/// Extracts the name and version from the text of `MPI_Get_library_version`: `"Open MPI v4.1.4,
/// package: …"`, `"MPICH Version:      4.1\nMPICH Release date: …"`.
fn short_version(text: &str) -> String {
    let first = text.split([',', '\n']).next().unwrap_or_default();
    first.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the name and version of the MPI library. It may be called before MPI is initialised.
///
/// # Errors
/// Returns an error if the library is opened at run time, and there is none.
pub fn library() -> Result<String> {
    ffi::open()?;
    // SAFETY: MPI allows the call at any time; the buffer has room for any text.
    Ok(short_version(&text(|to, len| unsafe { ffi::MPI_Get_library_version(to, len) })))
}

/// Returns the name of a thread level of MPI.
fn thread_level(level: c_int) -> &'static str {
    let named = [
        (ffi::thread_single(), "MPI_THREAD_SINGLE"),
        (ffi::thread_funneled(), "MPI_THREAD_FUNNELED"),
        (ffi::thread_serialized(), "MPI_THREAD_SERIALIZED"),
        (ffi::thread_multiple(), "MPI_THREAD_MULTIPLE"),
    ];
    named
        .iter()
        .find(|(number, _)| *number == level)
        .map_or("an unknown thread level", |(_, name)| name)
}

/// Checks that the library implements a recent enough version of the MPI standard.
fn check_version(version: (c_int, c_int), library: &str) -> Result<()> {
    if version >= OLDEST {
        return Ok(());
    }
    let have = format!("{}.{}", version.0, version.1);
    let required = format!("{}.{}", OLDEST.0, OLDEST.1);
    let message =
        format!("{} implements MPI {have}; hpctrain requires {required}", short_version(library));
    Err(Error::input(message)
        .hint("build hpctrain against a newer MPI library: Open MPI 1.8, MPICH 3.0 or later"))
}

/// Checks that the library allows other threads beside the one that makes all calls.
fn check_threads(provided: c_int, wanted: c_int, library: &str) -> Result<()> {
    if provided >= wanted {
        return Ok(());
    }
    let message = format!("{} does not support programs with threads", short_version(library));
    Err(Error::input(format!(
        "{message} (thread level {provided}; hpctrain requires {wanted}, MPI_THREAD_FUNNELED)"
    ))
    .hint("use an MPI library that was built with thread support"))
}

/// A posted message in flight.
struct Posted {
    /// The requests of its parts, with the expected length of each part that is received.
    requests: Vec<(MpiRequest, Option<usize>)>,
    peer: usize,
    buffer: Box<dyn P2pBuffer>,
}

struct Mpi {
    /// Communicators by group number, for the vendor's collectives; 0 is the world, in which the
    /// ranks of each node are consecutive.
    groups: Vec<ffi::MPI_Comm>,
    rank: usize,
    posted: Vec<Posted>,
    /// The node's shared memory; `None` if the node has one rank or cannot share memory.
    segment: Option<Segment>,
    /// Whether elements that are only copied go through shared memory, too. On some systems MPI
    /// copies them faster.
    shares_copies: bool,
    staging: ChunkStaging,
    /// Staging memory for operands that are longer than the vendor's counts allow.
    parts: Vec<f32>,
    in_place: *const c_void,
    /// The last time that the communicator was checked for lost ranks.
    checked: Instant,
    /// The number that the launcher gave to this rank, and the facts that stay when ranks are lost.
    launch_rank: usize,
    host: String,
    library: String,
    thread_level: &'static str,
    shared: Arc<Shared>,
}

impl Mpi {
    /// Initialises MPI on this thread, which makes all calls from now on.
    fn open(shared: Arc<Shared>) -> Result<(Self, World)> {
        ffi::open()?;
        let mut initialized = 0;
        let mut provided = 0;
        let mut version = (0, 0);
        // SAFETY: lets sleeps of the backoff end on time; affects this thread alone and takes no
        // memory.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
        // SAFETY: out-parameters are live locals, null arguments are allowed, and MPI_Initialized
        // and MPI_Get_version may be called at any time; calls after MPI_Init_thread are made only
        // if that succeeded.
        let (world, library, host) = unsafe {
            ffi::MPI_Initialized(&mut initialized);
            if initialized != 0 {
                return Err(Error::internal("MPI is already initialised"));
            }
            let library = text(|to, len| ffi::MPI_Get_library_version(to, len));
            ffi::MPI_Get_version(&mut version.0, &mut version.1);
            check_version(version, &library)?;
            let null = std::ptr::null_mut();
            let wanted = ffi::thread_funneled();
            let code = ffi::MPI_Init_thread(null, null.cast(), wanted, &mut provided);
            if code != 0 {
                return Err(Error::comm(format!(
                    "MPI_Init_thread of {} failed with code {code}",
                    short_version(&library)
                )));
            }
            check_threads(provided, wanted, &library)?;
            let world = ffi::comm_world();
            check(
                ffi::MPI_Comm_set_errhandler(world, ffi::errors_return()),
                "MPI_Comm_set_errhandler",
            )?;
            (world, library, text(|to, len| ffi::MPI_Get_processor_name(to, len)))
        };
        let (launch_rank, _) = place(world)?;
        let mut mpi = Self {
            groups: vec![world],
            rank: 0,
            posted: Vec::new(),
            segment: None,
            shares_copies: true,
            staging: ChunkStaging::default(),
            parts: Vec::new(),
            in_place: ffi::in_place(),
            checked: Instant::now(),
            launch_rank,
            host,
            library: short_version(&library),
            thread_level: thread_level(provided),
            shared,
        };
        if ulfm().is_some() {
            // The world itself is never revoked.
            mpi.groups[0] = duplicate(world)?;
        }
        let world = mpi.find_world()?;
        Ok((mpi, world))
    }

    /// Finds the nodes of the ranks of group 0, numbers the ranks by node, and opens the memory that
    /// those of this node share. Collective over the group.
    fn find_world(&mut self) -> Result<World> {
        let (rank, size) = place(self.groups[0])?;
        let mut node = Node::find(self.groups[0], count(rank)?, count(size)?)?;
        (self.groups[0], self.rank) = node.renumber(self.groups[0], rank)?;
        self.segment = node.share(self.rank)?;
        if node.on_machine.1 > cores() || std::env::var_os(YIELD).is_some_and(|value| value == "1")
        {
            self.shared.set_oversubscribed();
        }
        let near = if self.segment.is_some() { shm_window::BYTES } else { 0 };
        self.shared.add_staging(near);
        let nodes: Arc<[usize]> = node.of_ranks.iter().map(|&first| count_up(first)).collect();
        self.shares_copies = true;
        if self.segment.is_some() {
            self.shares_copies = self.shared_copies_are_faster(&node, &nodes)?;
        }
        Ok(World {
            rank: self.rank,
            launch_rank: self.launch_rank,
            is_renumbered: node.is_renumbered,
            nodes,
            node: NodeInfo {
                local_rank: node.on_machine.0,
                local_size: node.on_machine.1,
                host: self.host.clone(),
            },
            library: self.library.clone(),
            shares_memory: self.segment.is_some(),
            vendor: true,
            claims_cuda_aware: cuda_probe::claims_cuda_aware(),
            thread_level: Some(self.thread_level),
            staging: algorithms::staging(size) + near + if size > 1 { exchange::BYTES } else { 0 },
        })
    }

    /// Ends all communication after a rank was lost: revokes the groups, from which the other ranks
    /// learn of it, and waits until MPI no longer uses the memory of posted messages. Other errors
    /// end the job where they leave MPI using memory.
    fn lose(&mut self, error: Error) -> Error {
        let Some(ulfm) = ulfm().filter(|_| error.kind() == Kind::Lost) else { return error };
        self.groups.iter().for_each(|group| ulfm.revoke(*group));
        for posted in std::mem::take(&mut self.posted) {
            let Posted { mut requests, buffer, .. } = posted;
            let ended = requests.iter_mut().try_for_each(|(request, _)| request.let_go());
            ended.unwrap_or_else(|error| self.give_up(&error));
            buffer.finish(Err(error.clone()));
        }
        error
    }

    /// Measures whether the node copies faster through its shared memory than by MPI messages,
    /// which copy directly between processes where the system allows it. The node's first two ranks
    /// measure, and the first decides. Collective over the node.
    fn shared_copies_are_faster(&mut self, node: &Node, nodes: &Arc<[usize]>) -> Result<bool> {
        let mut faster = c_int::from(true);
        if node.rank < 2 {
            let pair: Vec<usize> =
                (0..nodes.len()).filter(|&rank| nodes[rank] == nodes[self.rank]).take(2).collect();
            let group = GroupRanks::new(0, self.rank, pair, nodes.clone());
            let sent = vec![0.0; TRIAL];
            let mut received = vec![0.0; TRIAL];
            let mut fastest = [Duration::MAX; 2];
            for trial in 0..2 * TRIALS {
                let through = trial % 2;
                self.shares_copies = through == 1;
                let start = Instant::now();
                self.exchange(
                    &group,
                    false,
                    Some(Outgoing { to: group.next(), pieces: &[&sent] }),
                    Some(Incoming { from: group.next(), pieces: &mut [&mut received], add: false }),
                )?;
                fastest[through] = fastest[through].min(start.elapsed());
            }
            faster = c_int::from(fastest[1].mul_f64(GAIN) <= fastest[0]);
        }
        // SAFETY: the parameter is a live local.
        let code =
            unsafe { ffi::MPI_Bcast((&raw mut faster).cast(), 1, ffi::int32_t(), 0, node.comm) };
        check(code, "MPI_Bcast")?;
        Ok(faster != 0)
    }

    /// Aborts all ranks. Also used when an error leaves MPI using memory that is about to be freed.
    ///
    /// Open MPI 4's `mpirun` uses freed memory when a rank sends it the message of `MPI_Abort` (PMIx's
    /// log): one abort in ten ends it with a segmentation fault on a loaded machine, and some hang. It
    /// ends the job with the same code when a rank exits without `MPI_Finalize`, which here, as in
    /// `MPI_Abort`, is without exit handlers.
    fn abort_all(&self, code: i32) -> ! {
        if std::env::var_os(ORTE).is_some() {
            // SAFETY: it only ends the process.
            unsafe { libc::_exit(code) }
        }
        // SAFETY: called on the thread of all MPI calls, while MPI is initialised. Libraries end all
        // processes for this communicator only.
        unsafe { ffi::MPI_Abort(ffi::comm_world(), code) };
        std::process::exit(code)
    }

    /// Sends and receives like [`Transport::exchange_bytes`], on host or device memory.
    ///
    /// # Safety
    /// The caller keeps both buffers borrowed until this returns. MPI must accept the addresses of
    /// device memory.
    unsafe fn exchange_messages(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, Bytes)>,
        receive: Option<(usize, Bytes)>,
    ) -> Result<()> {
        let messages = |side: Option<(usize, Bytes)>| {
            side.into_iter()
                .flat_map(|(rank, bytes)| bytes.messages().map(move |bytes| (rank, bytes)))
        };
        let mut outgoing = messages(send);
        let mut incoming = messages(receive);
        loop {
            let send = outgoing.next();
            let receive = incoming.next();
            if send.is_none() && receive.is_none() {
                return Ok(());
            }
            // SAFETY: as the caller promises.
            unsafe { self.exchange_message(group, send, receive)? };
        }
    }

    /// Exchanges single messages of at most [`LONGEST`](request::LONGEST) bytes. Returns only when
    /// MPI no longer uses either buffer; if an MPI error makes that impossible, the job is aborted.
    ///
    /// # Safety
    /// The same as for [`Mpi::exchange_messages`].
    unsafe fn exchange_message(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, Bytes)>,
        receive: Option<(usize, Bytes)>,
    ) -> Result<()> {
        let world = self.groups[0];
        let expected = receive.map(|(from, bytes)| (group.ranks[from], bytes.len));
        // SAFETY: the caller holds the buffer until this function returns, which is after the
        // request is complete.
        let start = |(from, bytes)| unsafe {
            MpiRequest::receive(world, group, from, MessageKind::Exchange, bytes)
        };
        let mut receiving = receive.map(start).transpose().map_err(|error| self.lose(error))?;
        self.shared.add_sent(send.map_or(0, |(_, bytes)| bytes.len));
        // SAFETY: as above.
        let start = |(to, bytes)| unsafe {
            MpiRequest::send(world, group, to, MessageKind::Exchange, bytes)
        };
        let mut sending = match send.map(start).transpose() {
            Ok(sending) => sending,
            Err(error) if receiving.is_none() => return Err(self.lose(error)),
            Err(error) if error.kind() == Kind::Lost => {
                let error = self.lose(error);
                let ended = receiving.iter_mut().try_for_each(MpiRequest::let_go);
                ended.unwrap_or_else(|error| self.give_up(&error));
                return Err(error);
            }
            Err(error) => self.give_up(&error),
        };
        let mut received = None;
        let mut backoff = Backoff::new(false);
        while receiving.is_some() || sending.is_some() {
            let advanced = self.completed(&mut receiving).and_then(|bytes| {
                received = bytes.or(received);
                self.completed(&mut sending)
            });
            if receiving.is_none() && sending.is_none() && advanced.is_ok() {
                break;
            }
            if let Err(error) = advanced.and_then(|_| self.poll()) {
                let error = self.lose(error);
                let mut left = [&mut receiving, &mut sending].into_iter().flatten();
                let ended = left.try_for_each(MpiRequest::let_go);
                ended.unwrap_or_else(|error| self.give_up(&error));
                return Err(error);
            }
            backoff.pause(&self.shared);
        }
        match (expected, received) {
            (Some((from, expected)), Some(received)) => check_length(from, received, expected),
            _ => Ok(()),
        }
    }

    /// Starts messages of a group as far as the windows allow, and removes those that are complete.
    /// Returns whether there were any.
    fn advance_group(
        &self,
        group: &GroupRanks,
        sending: &mut MessageWindow<MpiRequest>,
        receiving: &mut MessageWindow<MpiRequest>,
    ) -> Result<bool> {
        let world = self.groups[0];
        let kind = MessageKind::Exchange;
        // Receives come first, so that messages find their memory when they arrive.
        receiving.start(|from, bytes| {
            // SAFETY: spans are memory that lives for longer than the exchange, which ends when all
            // requests are complete, and MPI may be given their addresses.
            unsafe { MpiRequest::receive(world, group, from, kind, bytes) }
        })?;
        sending.start(|to, bytes| {
            self.shared.add_sent(bytes.len);
            // SAFETY: as above.
            unsafe { MpiRequest::send(world, group, to, kind, bytes) }
        })?;
        let received = receiving
            .complete(|request, from, len| is_complete(request, Some(len), group.ranks[from]))?;
        Ok(sending.complete(|request, to, _| is_complete(request, None, to))? || received)
    }

    /// Clears `slot` if its request is complete, and then returns the bytes received.
    ///
    /// # Errors
    /// Returns an error if a rank was lost. Others end the job.
    fn completed(&self, slot: &mut Option<MpiRequest>) -> Result<Option<usize>> {
        let Some(request) = slot else { return Ok(None) };
        let tested = self.unless_lost(request.test())?;
        if tested.is_some() {
            *slot = None;
        }
        Ok(tested)
    }

    /// Returns a result, unless its error leaves MPI using borrowed memory, which ends the job: only
    /// after the loss of a rank will MPI let go of it.
    fn unless_lost<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            Err(error) if error.kind() != Kind::Lost => self.give_up(&error),
            result => result,
        }
    }

    /// Returns an error if a rank of the world was lost, or another thread has found that.
    fn check_ranks(&mut self) -> Result<()> {
        self.shared.check_interruption()?;
        let Some(ulfm) = ulfm().filter(|_| self.checked.elapsed() >= CHECK_INTERVAL) else {
            return Ok(());
        };
        self.checked = Instant::now();
        if ulfm.has_failed(self.groups[0]) {
            return Err(Error::lost("a rank is gone: MPI has noticed its end"));
        }
        Ok(())
    }

    /// Checks for an abort and for lost ranks, and finishes posted messages that are complete.
    fn poll(&mut self) -> Result<()> {
        if let Some(code) = self.shared.aborted() {
            self.abort_all(code);
        }
        self.check_ranks()?;
        let mut index = 0;
        while index < self.posted.len() {
            let mut requests = std::mem::take(&mut self.posted[index].requests);
            let peer = self.posted[index].peer;
            let mut lost = Ok(());
            requests.retain_mut(|(request, expected)| {
                let tested = self.unless_lost(is_complete(request, *expected, peer));
                !tested.unwrap_or_else(|error| {
                    lost = Err(error);
                    false
                })
            });
            if lost.is_err() {
                self.posted[index].requests = requests;
                return lost;
            }
            if requests.is_empty() {
                self.posted.remove(index).buffer.finish(Ok(()));
            } else {
                self.posted[index].requests = requests;
                index += 1;
            }
        }
        Ok(())
    }

    /// Aborts the job after an error that leaves MPI using borrowed memory.
    fn give_up(&self, error: &Error) -> ! {
        log::error!("rank {}: {error}", self.rank);
        self.abort_all(error.exit_code())
    }

    /// Ends an exchange after a rank was lost, once MPI no longer uses its memory.
    fn lose_exchange(
        &mut self,
        error: Error,
        mut sending: Sending<'_>,
        mut receiving: Receiving<'_, '_>,
    ) -> Error {
        let error = self.lose(error);
        let ended = sending.let_go().and_then(|()| receiving.let_go());
        ended.unwrap_or_else(|error| self.give_up(&error));
        error
    }

    /// Returns the number on this node of a rank of a group, if it is reached by shared memory.
    fn near(&self, group: &GroupRanks, rank: Option<usize>) -> Option<usize> {
        self.segment.as_ref()?.local(group.ranks[rank?])
    }
}

/// Returns a communicator of the same ranks, whose errors are returned.
fn duplicate(comm: ffi::MPI_Comm) -> Result<ffi::MPI_Comm> {
    // SAFETY: the out-parameter is a live local.
    let (code, duplicate) = unsafe {
        let mut duplicate = ffi::comm_null();
        (ffi::MPI_Comm_dup(comm, &mut duplicate), duplicate)
    };
    check(code, "MPI_Comm_dup")?;
    // SAFETY: a communicator of this process.
    let code = unsafe { ffi::MPI_Comm_set_errhandler(duplicate, ffi::errors_return()) };
    check(code, "MPI_Comm_set_errhandler").map(|()| duplicate)
}

/// Returns true if a part of a posted message is complete, after a check of the length received.
fn is_complete(request: &mut MpiRequest, expected: Option<usize>, peer: usize) -> Result<bool> {
    match (request.test()?, expected) {
        (Some(received), Some(expected)) => check_length(peer, received, expected).map(|()| true),
        (done, _) => Ok(done.is_some()),
    }
}

impl Transport for Mpi {
    fn exchange(
        &mut self,
        group: &GroupRanks,
        sums: bool,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_, '_>>,
    ) -> Result<()> {
        let world = self.groups[0];
        let sent: usize =
            send.map_or(0, |send| send.pieces.iter().map(|piece| size_of_val(*piece)).sum());
        self.shared.add_sent(sent);
        let shared = sums || self.shares_copies;
        let to = self.near(group, send.map(|send| send.to)).filter(|_| shared);
        let from =
            self.near(group, receive.as_ref().map(|receive| receive.from)).filter(|_| shared);
        let mut sending = Sending::new(send);
        let mut receiving = Receiving::new(receive);
        let mut backoff = Backoff::new(false);
        let held = self.staging.bytes();
        while !(sending.is_done() && receiving.is_done()) {
            let sent = match (&mut self.segment, to) {
                (Some(segment), Some(to)) => Ok(sending.advance_shared(segment, to)),
                _ => sending.advance_mpi(world, group, &mut self.staging),
            };
            let received = match (&mut self.segment, from) {
                (Some(segment), Some(from)) => Ok(receiving.advance_shared(segment, from)),
                _ => receiving.advance_mpi(world, group, &mut self.staging),
            };
            match (sent, received) {
                (Ok(sent), Ok(received)) if sent || received => backoff.restart(),
                (Ok(_), Ok(_)) => match self.poll() {
                    Ok(()) => backoff.pause(&self.shared),
                    Err(error) => return Err(self.lose_exchange(error, sending, receiving)),
                },
                (Err(error), _) | (_, Err(error)) if error.kind() == Kind::Lost => {
                    return Err(self.lose_exchange(error, sending, receiving));
                }
                // MPI still uses the memory.
                (Err(error), _) | (_, Err(error)) => self.give_up(&error),
            }
        }
        self.shared.add_staging(self.staging.bytes() - held);
        Ok(())
    }

    fn exchange_bytes(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
    ) -> Result<()> {
        let send = send.map(|(to, bytes)| (to, bytes.into()));
        let receive = receive.map(|(from, bytes)| (from, bytes.into()));
        // SAFETY: both are borrowed until this function returns.
        unsafe { self.exchange_messages(group, send, receive) }
    }

    fn exchange_device(
        &mut self,
        group: &GroupRanks,
        send: Option<DeviceMessage<'_>>,
        receive: Option<DeviceMessage<'_>>,
    ) -> Result<()> {
        let send = send.map(|(to, span)| (to, span.into()));
        let receive = receive.map(|(from, span)| (from, span.into()));
        // SAFETY: spans are memory that lives for longer than this call, with addresses that MPI
        // may be given.
        unsafe { self.exchange_messages(group, send, receive) }
    }

    fn exchange_device_group(
        &mut self,
        group: &GroupRanks,
        sends: &[DeviceMessage<'_>],
        receives: &[DeviceMessage<'_>],
    ) -> Result<()> {
        let mut sending = MessageWindow::of_sends(group, sends);
        let mut receiving = MessageWindow::of_receives(group, receives);
        let mut backoff = Backoff::new(false);
        let mut has_advanced = false;
        while !(sending.is_done() && receiving.is_done()) {
            let advanced = self.advance_group(group, &mut sending, &mut receiving);
            // After an error MPI still uses the memory.
            let advanced = self.unless_lost(advanced);
            if let Ok(true) = advanced {
                backoff.restart();
                has_advanced = true;
                continue;
            }
            if let Err(error) = advanced.and_then(|_| self.poll()) {
                let error = self.lose(error);
                let ended = sending
                    .let_go(MpiRequest::let_go)
                    .and_then(|()| receiving.let_go(MpiRequest::let_go));
                ended.unwrap_or_else(|error| self.give_up(&error));
                return Err(error);
            }
            if std::mem::take(&mut has_advanced) {
                let pending: BTreeSet<_> = receiving.pending().chain(sending.pending()).collect();
                self.shared.partners.narrow(pending.into_iter().map(|rank| group.ranks[rank]));
            }
            backoff.pause(&self.shared);
        }
        Ok(())
    }

    fn post(
        &mut self,
        group: &GroupRanks,
        peer: Peer,
        mut buffer: Box<dyn P2pBuffer>,
    ) -> Result<()> {
        let bytes = match buffer.payload() {
            Ok(payload) => Bytes::from(payload),
            Err(error) => {
                buffer.finish(Err(error.clone()));
                return Err(error);
            }
        };
        let world = self.groups[0];
        let kind = MessageKind::Posted;
        let mut requests = Vec::with_capacity(1);
        for message in bytes.messages() {
            // SAFETY: the buffer keeps its bytes in place, where MPI can access them, until it is
            // finished, which `poll` does only when all requests are complete.
            let started = unsafe {
                match peer {
                    Peer::To(to) => MpiRequest::send(world, group, to, kind, message)
                        .map(|request| (request, None)),
                    Peer::From(from) => MpiRequest::receive(world, group, from, kind, message)
                        .map(|request| (request, Some(message.len))),
                }
            };
            match self.unless_lost(started) {
                Ok(started) => requests.push(started),
                Err(error) => {
                    let error = self.lose(error);
                    let ended = requests.iter_mut().try_for_each(|(request, _)| request.let_go());
                    ended.unwrap_or_else(|error| self.give_up(&error));
                    buffer.finish(Err(error.clone()));
                    return Err(error);
                }
            }
        }
        let (Peer::To(other) | Peer::From(other)) = peer;
        if let Peer::To(_) = peer {
            self.shared.add_sent(bytes.len);
        }
        self.posted.push(Posted { requests, peer: group.ranks[other], buffer });
        self.poll().map_err(|error| self.lose(error))
    }

    fn progress(&mut self) -> Result<InFlight> {
        self.poll().map_err(|error| self.lose(error))?;
        // Receives have an expected length.
        let leaves =
            |posted: &Posted| posted.requests.iter().any(|(_, expected)| expected.is_none());
        Ok(match &self.posted[..] {
            [] => InFlight::Nothing,
            posted if posted.iter().any(leaves) => InFlight::Leaving,
            _ => InFlight::Arriving,
        })
    }

    fn vendor(
        &mut self,
        group: &GroupRanks,
        call: DeviceCollective,
        memory: &mut [f32],
    ) -> Result<()> {
        self.shared.add_sent_messages(0, least_sent(group, call, memory.len()));
        let comm = self.groups[group.id];
        collectives::run(comm, self.in_place, group, call, memory, &mut self.parts)
            .map_err(|error| self.lose(error))
    }

    fn vendor_device(
        &mut self,
        group: &GroupRanks,
        call: DeviceCollective,
        memory: DeviceSpan<'_>,
    ) -> Result<()> {
        self.shared.add_sent_messages(0, least_sent(group, call, memory.words()));
        collectives::run_on_device(self.groups[group.id], self.in_place, group, call, memory)
            .map_err(|error| self.lose(error))
    }

    fn split(&mut self, parent: &GroupRanks, color: usize) -> Result<usize> {
        let color = count(color)?;
        let key = count(self.rank)?;
        // SAFETY: the out-parameter is a live local.
        let (code, group) = unsafe {
            let mut group = ffi::comm_null();
            (ffi::MPI_Comm_split(self.groups[parent.id], color, key, &mut group), group)
        };
        check(code, "MPI_Comm_split").map_err(|error| self.lose(error))?;
        self.groups.push(group);
        Ok(self.groups.len() - 1)
    }

    fn abort(&mut self, code: i32) {
        self.abort_all(code)
    }

    fn shrink(&mut self) -> Result<World> {
        let ulfm = ulfm().ok_or_else(|| {
            Error::internal("MPI cannot go on without a rank: mpirun was started without ULFM")
        })?;
        let (code, left) = ulfm.shrink(self.groups[0]);
        check(code, "MPIX_Comm_shrink")?;
        // SAFETY: a communicator of this process.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(left, ffi::errors_return()) };
        check(code, "MPI_Comm_set_errhandler")?;
        self.groups = vec![left];
        self.segment = None;
        // Ranks that have found the world without this one would wait for it.
        self.find_world().map_err(|error| self.lose(error))
    }

    fn leave(&mut self, in_order: bool) {
        // After an error other ranks may still wait for this one; only `abort` ends them.
        for posted in self.posted.drain(..) {
            posted
                .buffer
                .abandon(Error::comm("another message failed before this one was complete"));
        }
        if in_order {
            drop(self.segment.take());
            // SAFETY: nothing is in flight, no MPI call follows.
            unsafe { ffi::MPI_Finalize() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_shortened() {
        assert_eq!(
            short_version("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"),
            "Open MPI v4.1.4"
        );
        assert_eq!(
            short_version("MPICH Version:      4.1\nMPICH Release date: x"),
            "MPICH Version: 4.1"
        );
    }

    #[test]
    fn old_libraries_and_those_without_threads_are_refused() {
        let error = check_version((2, 2), "Open MPI v1.6, package: x").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error
                .to_string()
                .starts_with("Open MPI v1.6 implements MPI 2.2; hpctrain requires 3.0\nhint: "),
            "{error}"
        );
        assert!(check_version((3, 1), "").is_ok() && check_version((4, 0), "").is_ok());
        let error = check_threads(0, 1, "Open MPI v1.6, package: x").unwrap_err();
        assert!(
            error.to_string().contains(
                "does not support programs with threads (thread level 0; hpctrain requires 1"
            ),
            "{error}"
        );
    }
}
