//! Collectives and point-to-point messages of a group of ranks.

use std::ops::Range;
use std::sync::Arc;

use super::algorithms::{Algorithm, Call, Operation, UnequalCollective, bytes};
use super::autotune::table::{AlgorithmTable, Route};
use super::collective::{CollectiveBuffer, DeviceSchedule, MessagePath, operand, run, run_unequal};
use super::communicator::{Comm, WORLD};
use super::device::grouped_collective::group_levels;
use super::device::host_staged::PinnedStaging;
use super::device::path::DeviceTransport;
use super::health::flight_recorder::{Label, RECV, Size};
use super::p2p_request::{P2pRecord, P2pRequest, chunks, on_host, whole};
use super::pending::{Pending, reply};
use super::shared::Stats;
use super::transport::{GroupRanks, P2pBuffer as _, Peer, Transport};
use super::worker::{CommRequest, CommThreadState};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, CommBuffer, MemoryKind};

/// A group of ranks of the world, in order. Clones share the communication thread.
///
/// All ranks of the group must request its collectives, in the same order. On a group of one rank
/// every collective is the identity.
pub struct Group<B: Backend> {
    comm: Comm<B>,
    members: GroupRanks,
    table: Arc<AlgorithmTable>,
    name: &'static str,
    /// The name of the unit that requests through this handle concern.
    unit: Option<Arc<str>>,
}

impl<B: Backend> Clone for Group<B> {
    fn clone(&self) -> Self {
        Self {
            comm: self.comm.clone(),
            members: self.members.clone(),
            table: self.table.clone(),
            name: self.name,
            unit: self.unit.clone(),
        }
    }
}

impl<B: Backend> Comm<B> {
    /// Returns the group of all ranks.
    pub fn world(&self) -> Group<B> {
        Group::new(self.clone(), self.home.clone()).named(WORLD)
    }

    /// Returns the group of the ranks of this rank's colour, ordered by rank. Every rank passes the
    /// colours of *all* ranks. The group lives as long as the communicator. Collective over the
    /// world.
    ///
    /// # Errors
    /// Returns an error if the number of colours is wrong, or a message between ranks failed.
    pub fn split(&self, colors_of_all_ranks: &[usize]) -> Result<Group<B>> {
        Ok(Group::new(self.clone(), self.members(colors_of_all_ranks)?))
    }
}

impl<B: Backend> Group<B> {
    fn new(comm: Comm<B>, members: GroupRanks) -> Self {
        let table = Arc::new(AlgorithmTable::uniform(comm.algorithm()));
        Self { comm, members, table, name: "group", unit: None }
    }

    /// Returns the same group with a name that logs and reports show.
    #[must_use]
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// Returns a handle for requests about a unit, such as a block, whose name flight recorders,
    /// errors and traces show. Debug builds check that all ranks request the same operation of the
    /// same unit.
    #[must_use]
    pub fn with_label(&self, unit: &Arc<str>) -> Self {
        Self { unit: Some(unit.clone()), ..self.clone() }
    }

    /// Returns the same group with the algorithms of `table`, which must be the same on all ranks.
    #[must_use]
    pub fn with_algorithms(&self, table: AlgorithmTable) -> Self {
        Self { table: Arc::new(table), ..self.clone() }
    }

    /// Returns the algorithms of the operations.
    pub fn table(&self) -> &AlgorithmTable {
        &self.table
    }

    /// Returns the error with which requests will fail because a rank was lost, so that long
    /// computations between requests can end.
    ///
    /// # Errors
    /// Returns that error, if there is one.
    pub fn check_interruption(&self) -> Result<()> {
        self.comm.inner.shared.check_interruption()
    }

    /// Returns the number of nodes that the group's ranks are on.
    pub fn nodes(&self) -> usize {
        self.members.by_node().len()
    }

    /// Returns true if this rank is the first one of the group on its node.
    pub fn is_first_of_node(&self) -> bool {
        self.members.by_node().iter().any(|ranks| ranks.first() == Some(&self.rank()))
    }

    /// Returns the algorithms that this group can run: the vendor's only where the transport has
    /// vendor collectives. With `exact`, only those that add in the order of
    /// [`Algorithm::HalvingDoubling`].
    pub fn algorithms(&self, exact: bool) -> Vec<Algorithm> {
        let mpi = self.comm.inner.world.vendor;
        let device = self.comm.device_transport();
        let vendor = device.map_or(mpi, |device| device.has_vendor_collectives(mpi));
        let fitting = Algorithm::ALL.into_iter().filter(|algorithm| {
            (vendor || *algorithm != Algorithm::Vendor)
                && (!exact || algorithm.is_exact(&self.members))
        });
        fitting.collect()
    }

    /// Returns the algorithm that others have to beat: [`Algorithm::Hierarchical`] if there are
    /// several nodes with several ranks each and it can run, else [`Algorithm::HalvingDoubling`].
    pub fn default_algorithm(&self, exact: bool) -> Algorithm {
        let has_levels = self.nodes() > 1 && self.nodes() < self.size();
        if has_levels && self.algorithms(exact).contains(&Algorithm::Hierarchical) {
            Algorithm::Hierarchical
        } else {
            Algorithm::HalvingDoubling
        }
    }

    /// Returns true if an algorithm can sum elements in bf16 over this group: in groups of messages
    /// of device memory.
    pub fn can_sum_bf16(&self, algorithm: Algorithm) -> bool {
        let call = Call { operation: Operation::ReduceScatter, algorithm, root: 0 };
        let transport = self.comm.device_transport();
        transport.is_some_and(|transport| transport.uses_device_memory())
            && group_levels(call, &self.members).is_some()
    }

    /// Returns true if an algorithm may be faster than the default. Where the device orders
    /// collectives with compute, only those count that it can order; and halving-doubling, which
    /// costs NCCL device memory for each pair of ranks, is not tried where hierarchical can run.
    pub(super) fn is_worth_measuring(&self, algorithm: Algorithm, default: Algorithm) -> bool {
        let on_device =
            self.comm.device_transport().is_some_and(|device| device.orders_on_device());
        match algorithm {
            // On one node, or with one rank per node, hierarchical is halving-doubling.
            Algorithm::Hierarchical => {
                default == Algorithm::Hierarchical
                    || (self.nodes() > 1 && self.nodes() < self.size())
            }
            Algorithm::HalvingDoubling => !on_device || default != Algorithm::Hierarchical,
            Algorithm::Ring | Algorithm::ReduceToOne => !on_device,
            Algorithm::Vendor => true,
        }
    }

    /// Opens the memory of the group's ranks to each other, if collectives over CUDA IPC may be
    /// faster than those of NCCL, and returns whether it is open, the same on all ranks: where `auto`
    /// has chosen NCCL, and the ranks are on one node. Collective over the group.
    ///
    /// # Errors
    /// Returns an error if memory runs out, or a message between ranks failed.
    pub fn open_peers(&self, backend: &B) -> Result<bool> {
        let has_fixed_memory =
            self.comm.device.as_ref().is_some_and(|device| !device.has_growing_memory);
        let is_chosen = self.transport() == Some(DeviceTransport::Nccl) && self.comm.why.is_some();
        if self.size() == 1 || self.nodes() > 1 || !is_chosen || !has_fixed_memory {
            return Ok(false);
        }
        let mut buf = backend.alloc(MemoryKind::Communication, 1)?;
        let members = self.members.clone();
        let label = self.label("open_peers", Size::Same(0), "direct");
        let (reply, pending) = reply(&self.comm.inner.shared);
        self.comm.inner.submit(CommRequest::run(move |state| {
            reply.send(state.collective(&members, &label, |state| {
                state.drain_device()?;
                let CommBuffer::Device(_, copies) = B::comm_buffer(&mut buf, 0..1)? else {
                    return Ok(false);
                };
                let CommThreadState { transport, device_comms, .. } = state;
                device_comms.try_peers(&*copies, &mut **transport, &members)
            }));
        }));
        pending.wait()
    }

    /// Returns true if some ranks of the job have device memory and others have not.
    pub fn is_mixed(&self) -> bool {
        self.comm.is_mixed
    }

    /// Returns the device transport, or `None` if the backend's memory is the host's.
    pub fn transport(&self) -> Option<DeviceTransport> {
        self.comm.device_transport()
    }

    /// Describes this rank for messages: its number in the world and its host.
    pub fn place(&self) -> String {
        format!("rank {} on {}", self.comm.rank(), self.comm.node().host)
    }

    /// Returns this rank's number in the group.
    pub fn rank(&self) -> usize {
        self.members.rank
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.members.size()
    }

    /// Returns the communication statistics of this rank so far, over all groups.
    pub fn stats(&self) -> Stats {
        self.comm.stats()
    }

    /// Sums the elements in `range` over all ranks, on every rank.
    pub fn all_reduce(&self, buf: B::Buf, range: Range<usize>) -> Pending<B::Buf> {
        let len = B::len(&buf);
        if range.start > range.end || range.end > len {
            return Pending::refused(Error::internal(format!(
                "all_reduce of {range:?} in a buffer of {len}"
            )));
        }
        self.collective(Operation::AllReduce, Pending::ready(buf), range, None)
    }

    /// Runs [`all_reduce`](Group::all_reduce) on the buffer that `before` will return. The
    /// communication thread chains the two requests without the caller waiting for the first. The
    /// range must lie in the buffer.
    pub fn all_reduce_after(
        &self,
        before: Pending<B::Buf>,
        range: Range<usize>,
    ) -> Pending<B::Buf> {
        self.collective(Operation::AllReduce, before, range, None)
    }

    /// Sums a whole buffer over all ranks, on rank 0. On the other ranks its elements are
    /// unspecified afterwards.
    pub fn reduce(&self, buf: B::Buf) -> Pending<B::Buf> {
        let range = 0..B::len(&buf);
        self.reduce_after(Pending::ready(buf), range)
    }

    /// Runs [`reduce`](Group::reduce) on the elements in `range` of the buffer that `before` will
    /// return, as [`all_reduce_after`](Group::all_reduce_after) does.
    pub fn reduce_after(&self, before: Pending<B::Buf>, range: Range<usize>) -> Pending<B::Buf> {
        self.collective(Operation::Reduce, before, range, None)
    }

    /// Sums over all ranks and leaves each rank its part, elements
    /// `rank·len/size..(rank+1)·len/size`. The rest of the buffer is unspecified afterwards. The
    /// length must be a multiple of the group's size.
    pub fn reduce_scatter(&self, buf: B::Buf) -> Pending<B::Buf> {
        self.collective_of_parts(Operation::ReduceScatter, buf)
    }

    /// Brings every rank's part, as in [`reduce_scatter`](Group::reduce_scatter), to every rank, in
    /// place.
    pub fn all_gather(&self, buf: B::Buf) -> Pending<B::Buf> {
        self.collective_of_parts(Operation::AllGather, buf)
    }

    /// Runs [`all_gather`](Group::all_gather) on the buffer that `before` will return, as
    /// [`all_reduce_after`](Group::all_reduce_after) does. Its length `len` must be a multiple of
    /// the group's size.
    pub fn all_gather_after(&self, before: Pending<B::Buf>, len: usize) -> Pending<B::Buf> {
        self.collective(Operation::AllGather, before, 0..len, None)
    }

    /// Runs a sum or an all-gather of unequal parts on the buffer that `before` will return, as
    /// [`all_reduce_after`](Group::all_reduce_after) does. The sum has the same bits on any number of
    /// ranks that have the same terms in some division.
    pub fn unequal(
        &self,
        before: Pending<B::Buf>,
        collective: UnequalCollective,
    ) -> Pending<B::Buf> {
        if self.size() == 1 {
            return before;
        }
        if collective.parts.len() != self.size() {
            return Pending::refused(Error::internal(format!(
                "{} parts for {} ranks",
                collective.parts.len(),
                self.size()
            )));
        }
        let ready = match before.ready_value().map(B::record_event).transpose() {
            Ok(ready) => ready.flatten(),
            Err(error) => return Pending::refused(error),
        };
        let operation = match (&collective.terms, collective.all_gathers.is_empty()) {
            (None, _) => Operation::AllGather,
            (Some(_), true) => Operation::ReduceScatter,
            (Some(_), false) => Operation::AllReduce,
        };
        let bytes = Size::Same(collective.len * size_of::<f32>());
        let label = self.label(operation.name(), bytes, "direct");
        let members = self.members.clone();
        let path = self.message_path(None);
        let (reply, pending) = reply(&self.comm.inner.shared);
        self.comm.inner.submit(CommRequest::run(move |state| {
            let done = state.after(ready).and_then(|()| {
                state.collective(&members, &label, |state| {
                    let mut buf = before.in_order()?;
                    let element = B::element_of(&buf);
                    let range = 0..collective.len * collective.slots_of(members.rank);
                    let memory = B::comm_buffer(&mut buf, range)?;
                    let operand = CollectiveBuffer { memory, element };
                    run_unequal(state, &collective, &members, operand, path)?;
                    Ok(buf)
                })
            });
            reply.send(done);
        }));
        pending
    }

    /// Broadcasts the elements of rank `root` to every rank.
    pub fn broadcast(&self, buf: B::Buf, root: usize) -> Pending<B::Buf> {
        if root >= self.size() {
            return Pending::refused(Error::internal(format!(
                "broadcast from rank {root} of {}",
                self.size()
            )));
        }
        let range = 0..B::len(&buf);
        self.collective(Operation::Broadcast, Pending::ready(buf), range, Some(root))
    }

    /// Broadcasts the elements of rank 0 in `range` to every rank. The range must lie in the
    /// buffer.
    pub fn broadcast_range(&self, buf: B::Buf, range: Range<usize>) -> Pending<B::Buf> {
        self.collective(Operation::Broadcast, Pending::ready(buf), range, Some(0))
    }

    /// Runs `operation` on a whole buffer. Rank 0 is the root of a broadcast.
    pub fn run(&self, operation: Operation, buf: B::Buf) -> Pending<B::Buf> {
        match operation {
            Operation::AllReduce => {
                let range = 0..B::len(&buf);
                self.all_reduce(buf, range)
            }
            Operation::Reduce => self.reduce(buf),
            Operation::ReduceScatter => self.reduce_scatter(buf),
            Operation::AllGather => self.all_gather(buf),
            Operation::Broadcast => self.broadcast(buf, 0),
        }
    }

    /// Sends a buffer, which is returned when it may be written again. The communication thread
    /// does not wait for the receiver before it serves the next request.
    pub fn send(&self, to: usize, buf: B::Buf) -> Pending<B::Buf> {
        let ready = match self.check_message(to, &buf).and_then(|()| B::record_event(&buf)) {
            Ok(ready) => ready,
            Err(error) => return Pending::refused(error),
        };
        let members = self.members.clone();
        let (reply, pending) = reply(&self.comm.inner.shared);
        let path = self.comm.path;
        let words = self.comm.slot;
        self.comm.inner.submit(CommRequest::run(move |state| {
            let mut message = Box::new(P2pRequest::<B> { buf, reply, entry: None });
            if let Err(error) =
                state.after(ready).and_then(|()| state.failure().map_or(Ok(()), Err))
            {
                return message.finish(Err(error));
            }
            if !B::ON_HOST && path.stages_messages() {
                let sent = state.attempt(|state| match whole::<B>(&mut message.buf)? {
                    CommBuffer::Device(memory, copies) => {
                        let staging =
                            PinnedStaging { copies: &*copies, slots: &state.slots, words };
                        staging.send(memory, &mut *state.transport, &members, to)
                    }
                    CommBuffer::Host(_) => Err(on_host()),
                });
                return message.finish(sent);
            }
            // The transport answers through the message, also after a failure.
            let _ = state.attempt(|state| state.transport.post(&members, Peer::To(to), message));
        }));
        pending
    }

    /// Receives a message of the buffer's length from rank `from`. The communication thread does
    /// not wait for it before it serves the next request.
    pub fn recv(&self, from: usize, buf: B::Buf) -> Pending<B::Buf> {
        let ready = match self.check_message(from, &buf).and_then(|()| B::record_event(&buf)) {
            Ok(ready) => ready,
            Err(error) => return Pending::refused(error),
        };
        let size = Size::Same(size_of::<f32>() * B::len(&buf));
        let label = Label { root: Some(from), ..self.label(RECV, size, "direct") };
        let members = self.members.clone();
        let (reply, pending) = reply(&self.comm.inner.shared);
        let path = self.comm.path;
        let words = self.comm.slot;
        self.comm.inner.submit(CommRequest::run(move |state| {
            let mut posted = Box::new(P2pRequest::<B> { buf, reply, entry: None });
            if let Err(error) =
                state.after(ready).and_then(|()| state.failure().map_or(Ok(()), Err))
            {
                return posted.finish(Err(error));
            }
            let number = state.shared.flight_recorder().begin(&members, &label).0;
            posted.entry = Some(P2pRecord::new(&state.shared, number));
            if B::ON_HOST || !path.stages_messages() {
                // The transport answers through the message, also after a failure.
                let _ =
                    state.attempt(|state| state.transport.post(&members, Peer::From(from), posted));
                return;
            }
            match chunks(posted, &state.slots, words) {
                Err(error) => drop(state.attempt::<()>(|_| Err(error))),
                Ok(chunks) => {
                    for chunk in chunks {
                        let _ = state.attempt(|state| {
                            state.transport.post(&members, Peer::From(from), Box::new(chunk))
                        });
                    }
                }
            }
        }));
        pending
    }

    /// Returns every rank's bytes, of any length, in rank order, on every rank.
    pub fn gather_bytes(&self, mine: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.gather_as("gather_bytes", mine)
    }

    /// Returns every rank's bytes, of any length, in rank order, on rank 0 of the group, and an
    /// empty vector on the other ranks.
    pub fn gather_bytes_to_root(&self, mine: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        if self.size() == 1 {
            return Pending::ready(vec![mine]);
        }
        let label = self.label("gather_bytes_to_root", Size::Own(mine.len()), "binomial tree");
        self.metadata(label, |transport, members| bytes::gather_to_root(transport, members, mine))
    }

    /// Returns the bytes of rank 0 of the group, of any length, on every rank. `mine` is ignored on
    /// the other ranks.
    pub fn broadcast_bytes(&self, mine: Vec<u8>) -> Pending<Vec<u8>> {
        if self.size() == 1 {
            return Pending::ready(mine);
        }
        let label = self.label("broadcast_bytes", Size::Own(mine.len()), "binomial tree");
        self.metadata(label, |transport, members| bytes::broadcast(transport, members, mine))
    }

    /// Returns on each rank the bytes that rank 0 of the group has for it. On rank 0 `all` has the
    /// bytes of each rank in rank order, of any length; on the other ranks it is ignored.
    pub fn scatter_bytes(&self, mut all: Vec<Vec<u8>>) -> Pending<Vec<u8>> {
        if self.size() == 1 {
            return Pending::ready(all.pop().unwrap_or_default());
        }
        let label =
            self.label("scatter_bytes", Size::Own(all.iter().map(Vec::len).sum()), "binomial tree");
        self.metadata(label, |transport, members| bytes::scatter(transport, members, all))
    }

    /// Returns the bytes that each rank has for this one, of any length, in rank order. `all` has
    /// those of this rank for each rank, itself included.
    pub fn all_to_all_bytes(&self, all: Vec<Vec<u8>>) -> Pending<Vec<Vec<u8>>> {
        if self.size() == 1 {
            return Pending::ready(all);
        }
        let size = Size::Own(all.iter().map(Vec::len).sum());
        let label = self.label("all_to_all_bytes", size, "pairwise");
        self.metadata(label, |transport, members| bytes::all_to_all(transport, members, all))
    }

    /// Returns every rank's numbers, in rank order, on every rank. Blocks until they have arrived.
    ///
    /// # Errors
    /// Returns an error if a message failed.
    pub fn all_gather_u64(&self, mine: &[u64]) -> Result<Vec<Vec<u64>>> {
        Ok(self.gather_bytes(encode(mine)).wait()?.iter().map(|bytes| decode(bytes)).collect())
    }

    /// Returns the numbers of rank 0 on every rank. Blocks until they have arrived.
    ///
    /// # Errors
    /// Returns an error if a message failed.
    pub fn broadcast_numbers(&self, mine: &[u64]) -> Result<Vec<u64>> {
        Ok(decode(&self.broadcast_bytes(encode(mine)).wait()?))
    }

    pub(super) fn gather_as(&self, op: &'static str, mine: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        if self.size() == 1 {
            return Pending::ready(vec![mine]);
        }
        let label = self.label(op, Size::Own(mine.len()), "dissemination");
        self.metadata(label, |transport, members| bytes::gather(transport, members, mine))
    }

    /// Returns a request that is done when every rank has made it.
    pub fn barrier(&self) -> Pending<()> {
        if self.size() == 1 {
            return Pending::ready(());
        }
        let label = self.label("barrier", Size::Same(0), "dissemination");
        self.metadata(label, bytes::barrier)
    }

    /// Queues a collective of small messages.
    fn metadata<T: Send + 'static>(
        &self,
        label: Label,
        exchange: impl FnOnce(&mut dyn Transport, &GroupRanks) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let members = self.members.clone();
        let (reply, pending) = reply(&self.comm.inner.shared);
        self.comm.inner.submit(CommRequest::run(move |state| {
            let done = state
                .collective(&members, &label, |state| exchange(&mut *state.transport, &members));
            reply.send(done);
        }));
        pending
    }

    /// Agrees on errors: succeeds on all ranks or on none. Collective.
    ///
    /// # Errors
    /// Returns the error of the lowest rank that has one, the same on every rank. It names that
    /// rank, unless all ranks have the same error.
    pub fn all_ok<T>(&self, mine: Result<T>) -> Result<T> {
        if self.size() == 1 {
            return mine;
        }
        match self.first_error(mine.as_ref().err()) {
            None => mine,
            Some(error) => Err(error),
        }
    }

    /// Returns the error that all ranks of [`Self::all_ok`] return, if a rank has one. It does not
    /// depend on the type of the result, so it is compiled once.
    fn first_error(&self, mine: Option<&Error>) -> Option<Error> {
        let report = match serde_json::to_vec(&mine) {
            Ok(report) => report,
            Err(error) => {
                return Some(Error::internal(format!("cannot serialize an error: {error}")));
            }
        };
        let reports = match self.gather_as("agree", report).wait() {
            Ok(reports) => reports,
            // A local error says more than the failure to report it.
            Err(failure) => return Some(mine.cloned().unwrap_or(failure)),
        };
        let same = reports.iter().all(|report| *report == reports[0]);
        for (&rank, report) in self.members.ranks.iter().zip(&reports) {
            match serde_json::from_slice::<Option<Error>>(report) {
                Ok(None) => {}
                Ok(Some(error)) => {
                    return Some(if same { error } else { error.on_rank(rank) }.shared());
                }
                Err(error) => {
                    return Some(
                        Error::internal(format!("cannot parse the error of this rank: {error}"))
                            .on_rank(rank),
                    );
                }
            }
        }
        None
    }

    /// Queues a collective that works on equal parts of the whole buffer.
    fn collective_of_parts(&self, op: Operation, buf: B::Buf) -> Pending<B::Buf> {
        let len = B::len(&buf);
        if !len.is_multiple_of(self.size()) {
            return Pending::refused(Error::internal(format!(
                "{op} of {len} elements in {} parts",
                self.size()
            )));
        }
        self.collective(op, Pending::ready(buf), 0..len, None)
    }

    /// Queues a collective on a range of a buffer, which an earlier request of this rank may still
    /// have to return.
    fn collective(
        &self,
        operation: Operation,
        before: Pending<B::Buf>,
        range: Range<usize>,
        root: Option<usize>,
    ) -> Pending<B::Buf> {
        if self.size() == 1 {
            return before;
        }
        // A buffer that an earlier request returns needs no event.
        let ready = match before.ready_value().map(B::record_event).transpose() {
            Ok(ready) => ready.flatten(),
            Err(error) => return Pending::refused(error),
        };
        let bytes = range.len() * size_of::<f32>();
        let Route { algorithm, transport } = self.table.pick(operation, bytes);
        let label =
            Label { root, ..self.label(operation.name(), Size::Same(bytes), algorithm.name()) };
        let call = Call { operation, algorithm, root: root.unwrap_or(0) };
        let members = self.members.clone();
        let path = self.message_path(transport);
        let schedule =
            match self.comm.device_transport().map(|of_comm| transport.unwrap_or(of_comm)) {
                Some(device) if device.orders_on_device() => {
                    DeviceSchedule::new(call, &members, device)
                }
                _ => None,
            };
        let (reply, pending) = reply(&self.comm.inner.shared);
        self.comm.inner.submit(CommRequest::run(move |state| match schedule {
            Some(schedule) => {
                let started = state.start_collective(&members, &label, |state| {
                    let mut buf = before.in_order()?;
                    let element = B::element_of(&buf);
                    let operand =
                        operand(call, &members, element, B::comm_buffer(&mut buf, range)?)?;
                    let operation = schedule.start(state, call, &members, operand, path, ready)?;
                    Ok((buf, operation))
                });
                reply.send_started(started);
            }
            None => {
                let done = state.after(ready).and_then(|()| {
                    state.collective(&members, &label, |state| {
                        let mut buf = before.in_order()?;
                        let element = B::element_of(&buf);
                        let operand =
                            operand(call, &members, element, B::comm_buffer(&mut buf, range)?)?;
                        run(state, call, &members, operand, path)?;
                        Ok(buf)
                    })
                });
                reply.send(done);
            }
        }));
        pending
    }

    /// Returns how messages carry memory, by `transport` if it is given.
    fn message_path(&self, transport: Option<DeviceTransport>) -> MessagePath {
        let Comm { path, slot, is_mixed, .. } = self.comm;
        MessagePath { transport: transport.unwrap_or(path), slot, is_mixed }
    }

    fn label(&self, op: &'static str, size: Size, algorithm: &'static str) -> Label {
        Label { op, group: self.name, unit: self.unit.clone(), size, algorithm, root: None }
    }

    /// Checks a message to or from a rank.
    fn check_message(&self, peer: usize, buf: &B::Buf) -> Result<()> {
        let len = B::len(buf);
        if self.comm.is_mixed && len > self.comm.slot {
            // Device memory would go in several messages, and host memory in one.
            return Err(Error::internal(format!(
                "a message of {len} words between ranks with and without device memory"
            )));
        }
        if peer < self.size() && peer != self.rank() {
            return Ok(());
        }
        Err(Error::internal(format!(
            "a message between rank {} and rank {peer} of {}",
            self.rank(),
            self.size()
        )))
    }
}

/// Encodes numbers as bytes.
fn encode(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Decodes numbers from bytes.
fn decode(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()
}
