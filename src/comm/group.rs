//! Collectives and messages of a group of ranks.

use std::ops::Range;
use std::sync::Arc;

use super::algorithms::{self, Algorithm, Call, Operation, bytes};
use super::autotune::table::Table;
use super::communicator::{Comm, WORLD};
use super::device::cuda_aware::CudaAware;
use super::device::host_staged::PinnedStaging;
use super::device::nccl_p2p::{self, NcclP2pCollective};
use super::device::path::DeviceTransport;
use super::health::flight_recorder::{Label, RECV, Size};
use super::p2p_request::{P2pRecord, P2pRequest, chunks, on_host, whole};
use super::pending::{Pending, reply};
use super::reduce_buffer::HostBuffer;
use super::shared::Stats;
use super::transport::{GroupRanks, P2pBuffer as _, Peer, Transport};
use super::worker::{CommRequest, CommThreadState};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, CommBuffer};

/// Some ranks of the world, in order. Clones share the communication thread.
///
/// Collectives are requested by all ranks of the group, in the same order. A group of one is the
/// identity.
pub struct Group<B: Backend> {
    comm: Comm<B>,
    members: GroupRanks,
    table: Arc<Table>,
    name: &'static str,
    /// Name of the block that requests through this handle concern.
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
    /// The group of all ranks.
    pub fn world(&self) -> Group<B> {
        Group::new(self.clone(), self.home.clone()).named(WORLD)
    }

    /// Collective over the world: the group of the ranks that share my colour, ordered by rank.
    /// Every rank passes the colours of *all* ranks. The group lives as long as the communicator.
    ///
    /// # Errors
    /// A colour is missing, or the message between ranks failed.
    pub fn split(&self, colors_of_all_ranks: &[usize]) -> Result<Group<B>> {
        Ok(Group::new(self.clone(), self.members(colors_of_all_ranks)?))
    }
}

impl<B: Backend> Group<B> {
    fn new(comm: Comm<B>, members: GroupRanks) -> Self {
        let table = Arc::new(Table::always(comm.algorithm()));
        Self { comm, members, table, name: "group", unit: None }
    }

    /// The same group with a name for people to read.
    #[must_use]
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// A handle for requests about a unit, such as a block: people find its name in ledgers, errors
    /// and traces. Debug builds check that all ranks request the same of the same.
    #[must_use]
    pub fn with_label(&self, unit: &Arc<str>) -> Self {
        Self { unit: Some(unit.clone()), ..self.clone() }
    }

    /// The same ranks, with algorithms chosen by `table`, which is the same on all of them.
    #[must_use]
    pub fn with_algorithms(&self, table: Table) -> Self {
        Self { table: Arc::new(table), ..self.clone() }
    }

    /// The algorithms of the operations.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Nodes that the group's ranks are on.
    pub fn nodes(&self) -> usize {
        self.members.by_node().len()
    }

    /// Whether this rank is the first one of the group on its node.
    pub fn is_first_of_node(&self) -> bool {
        self.members.by_node().iter().any(|ranks| ranks.first() == Some(&self.rank()))
    }

    /// Algorithms that this group can run: the library's own only where there is a library. With
    /// `exact`, only those that add in the order of [`Algorithm::HalvingDoubling`].
    pub fn algorithms(&self, exact: bool) -> Vec<Algorithm> {
        let vendor =
            self.comm.inner.world.vendor || self.comm.device_path() == Some(DeviceTransport::Nccl);
        let able = |algorithm: &Algorithm| vendor || *algorithm != Algorithm::Vendor;
        let fits = |algorithm: &Algorithm| {
            able(algorithm) && (!exact || algorithm.is_exact(&self.members))
        };
        Algorithm::ALL.into_iter().filter(fits).collect()
    }

    /// My rank in the world and my host, for people.
    pub fn place(&self) -> String {
        format!("rank {} on {}", self.comm.rank(), self.comm.node().host)
    }

    /// My number in the group.
    pub fn rank(&self) -> usize {
        self.members.rank
    }

    /// Ranks in the group.
    pub fn size(&self) -> usize {
        self.members.size()
    }

    /// Cost of communication for this rank so far, in all groups.
    pub fn stats(&self) -> Stats {
        self.comm.stats()
    }

    /// The sum over all ranks of the elements in `range`, on every rank.
    pub fn all_reduce(&self, buf: B::Buf, range: Range<usize>) -> Pending<B::Buf> {
        let len = B::len(&buf);
        if range.start > range.end || range.end > len {
            return Pending::refused(Error::internal(format!(
                "all_reduce of {range:?} in a buffer of {len}"
            )));
        }
        self.collective(Operation::AllReduce, Pending::ready(buf), range, None)
    }

    /// As [`all_reduce`](Group::all_reduce), of the buffer that `before` will give: it follows that
    /// request without any other thread in between. The range lies in the buffer.
    pub fn all_reduce_after(
        &self,
        before: Pending<B::Buf>,
        range: Range<usize>,
    ) -> Pending<B::Buf> {
        self.collective(Operation::AllReduce, before, range, None)
    }

    /// The sum over all ranks of a whole buffer, on rank 0; elsewhere its elements are unspecified.
    pub fn reduce(&self, buf: B::Buf) -> Pending<B::Buf> {
        let range = 0..B::len(&buf);
        self.reduce_after(Pending::ready(buf), range)
    }

    /// As [`reduce`](Group::reduce), of the elements in `range` of the buffer that `before` will
    /// give, as in [`all_reduce_after`](Group::all_reduce_after).
    pub fn reduce_after(&self, before: Pending<B::Buf>, range: Range<usize>) -> Pending<B::Buf> {
        self.collective(Operation::Reduce, before, range, None)
    }

    /// The sum over all ranks of my part, elements `rank·len/size..(rank+1)·len/size`. The rest of
    /// the buffer is unspecified afterwards. The length is a multiple of the group's size.
    pub fn reduce_scatter(&self, buf: B::Buf) -> Pending<B::Buf> {
        self.collective_of_parts(Operation::ReduceScatter, buf)
    }

    /// Every rank's part, as in [`reduce_scatter`](Group::reduce_scatter), on every rank, in place.
    pub fn all_gather(&self, buf: B::Buf) -> Pending<B::Buf> {
        self.collective_of_parts(Operation::AllGather, buf)
    }

    /// As [`all_gather`](Group::all_gather), of the buffer that `before` will give, as in
    /// [`all_reduce_after`](Group::all_reduce_after). Its length is a multiple of the group's size.
    pub fn all_gather_after(&self, before: Pending<B::Buf>, len: usize) -> Pending<B::Buf> {
        self.collective(Operation::AllGather, before, 0..len, None)
    }

    /// The elements of rank `root`, on every rank.
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

    /// The elements of rank 0 in `range`, on every rank. The range lies in the buffer.
    pub fn broadcast_range(&self, buf: B::Buf, range: Range<usize>) -> Pending<B::Buf> {
        self.collective(Operation::Broadcast, Pending::ready(buf), range, Some(0))
    }

    /// One of the collectives above on a whole buffer; rank 0 is the root of a broadcast.
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

    /// Sends a buffer, which comes back when it may be written again. The communication thread does
    /// not wait for the receiver before it turns to the next request.
    pub fn send(&self, to: usize, buf: B::Buf) -> Pending<B::Buf> {
        let ready = match self.check_peer(to).and_then(|()| B::record_event(&buf)) {
            Ok(ready) => ready,
            Err(error) => return Pending::refused(error),
        };
        let members = self.members.clone();
        let (reply, pending) = reply(&self.comm.inner.shared);
        let path = self.comm.path;
        let words = self.comm.slot;
        self.comm.inner.submit(CommRequest::run(move |state| {
            let mut parcel = Box::new(P2pRequest::<B> { buf, reply, entry: None });
            if let Err(error) =
                state.after(ready).and_then(|()| state.failure().map_or(Ok(()), Err))
            {
                return parcel.finish(Err(error));
            }
            if !B::ON_HOST && path.stages_messages() {
                let sent = state.attempt(|state| match whole::<B>(&mut parcel.buf)? {
                    CommBuffer::Device(memory, copies) => {
                        let staging =
                            PinnedStaging { copies: &*copies, slots: &state.slots, words };
                        staging.send(memory, &mut *state.wire, &members, to)
                    }
                    CommBuffer::Host(_) => Err(on_host()),
                });
                return parcel.finish(sent);
            }
            // The wire answers through the parcel, also after a failure.
            let _ = state.attempt(|state| state.wire.post(&members, Peer::To(to), parcel));
        }));
        pending
    }

    /// Fills a buffer with a message of rank `from`, which has the same length. The communication
    /// thread does not wait for it before it turns to the next request.
    pub fn recv(&self, from: usize, buf: B::Buf) -> Pending<B::Buf> {
        let ready = match self.check_peer(from).and_then(|()| B::record_event(&buf)) {
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
            let number = state.shared.ledger().begin(&members, &label).0;
            posted.entry = Some(P2pRecord::new(&state.shared, number));
            if B::ON_HOST || !path.stages_messages() {
                // The wire answers through the parcel, also after a failure.
                let _ = state.attempt(|state| state.wire.post(&members, Peer::From(from), posted));
                return;
            }
            match chunks(posted, &state.slots, words) {
                Err(error) => drop(state.attempt::<()>(|_| Err(error))),
                Ok(chunks) => {
                    for chunk in chunks {
                        let _ = state.attempt(|state| {
                            state.wire.post(&members, Peer::From(from), Box::new(chunk))
                        });
                    }
                }
            }
        }));
        pending
    }

    /// Every rank's bytes, of any length, in rank order, on every rank.
    pub fn gather_bytes(&self, mine: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.gather_as("gather_bytes", mine)
    }

    /// Every rank's bytes, of any length, in rank order, on rank 0 of the group; nothing on the
    /// other ranks.
    pub fn gather_bytes_to_root(&self, mine: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        if self.size() == 1 {
            return Pending::ready(vec![mine]);
        }
        let label = self.label("gather_bytes_to_root", Size::Own(mine.len()), "binomial tree");
        self.metadata(label, |wire, members| bytes::gather_to_root(wire, members, mine))
    }

    /// The bytes of rank 0 of the group, of any length, on every rank; those of the other ranks are
    /// ignored.
    pub fn broadcast_bytes(&self, mine: Vec<u8>) -> Pending<Vec<u8>> {
        if self.size() == 1 {
            return Pending::ready(mine);
        }
        let label = self.label("broadcast_bytes", Size::Own(mine.len()), "binomial tree");
        self.metadata(label, |wire, members| bytes::broadcast(wire, members, mine))
    }

    /// The bytes that rank 0 of the group gives for each rank, of any lengths, in rank order; each
    /// rank receives its own. The other ranks give nothing.
    pub fn scatter_bytes(&self, mut all: Vec<Vec<u8>>) -> Pending<Vec<u8>> {
        if self.size() == 1 {
            return Pending::ready(all.pop().unwrap_or_default());
        }
        let label =
            self.label("scatter_bytes", Size::Own(all.iter().map(Vec::len).sum()), "binomial tree");
        self.metadata(label, |wire, members| bytes::scatter(wire, members, all))
    }

    /// As [`Group::gather_bytes`], of numbers; waits for them.
    ///
    /// # Errors
    /// A message failed.
    pub fn all_gather_u64(&self, mine: &[u64]) -> Result<Vec<Vec<u64>>> {
        Ok(self.gather_bytes(encode(mine)).wait()?.iter().map(|bytes| decode(bytes)).collect())
    }

    /// As [`Group::broadcast_bytes`], of numbers; waits for them.
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
        self.metadata(label, |wire, members| bytes::gather(wire, members, mine))
    }

    /// Done when every rank has made the request.
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
            let done =
                state.collective(&members, &label, |state| exchange(&mut *state.wire, &members));
            reply.send(done);
        }));
        pending
    }

    /// Collective: succeeds on all ranks or on none.
    ///
    /// # Errors
    /// The error of the lowest rank that has one, the same on every rank. It names that rank,
    /// unless all ranks failed alike.
    pub fn all_ok<T>(&self, mine: Result<T>) -> Result<T> {
        if self.size() == 1 {
            return mine;
        }
        match self.first_error(mine.as_ref().err()) {
            None => mine,
            Some(error) => Err(error),
        }
    }

    /// The error that all ranks of [`Self::all_ok`] return, if one of them has one. Not generic: it
    /// is compiled once.
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
            Err(unheard) => return Some(mine.cloned().unwrap_or(unheard)),
        };
        let alike = reports.iter().all(|report| *report == reports[0]);
        for (&rank, report) in self.members.ranks.iter().zip(&reports) {
            match serde_json::from_slice::<Option<Error>>(report) {
                Ok(None) => {}
                Ok(Some(error)) => {
                    return Some(if alike { error } else { error.on_rank(rank) }.shared());
                }
                Err(error) => {
                    return Some(
                        Error::internal(format!("unreadable report: {error}")).on_rank(rank),
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

    /// Queues a collective on a range of a buffer, which may be one that an earlier request of this
    /// rank will give.
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
        // A buffer that a request gives is done with when it comes.
        let ready = match before.at_hand().map(B::record_event).transpose() {
            Ok(ready) => ready.flatten(),
            Err(error) => return Pending::refused(error),
        };
        let bytes = range.len() * size_of::<f32>();
        let algorithm = self.table.pick(operation, bytes);
        let label =
            Label { root, ..self.label(operation.name(), Size::Same(bytes), algorithm.name()) };
        let call = Call { operation, algorithm, root: root.unwrap_or(0) };
        let members = self.members.clone();
        let path = (self.comm.path, self.comm.slot);
        let (reply, pending) = reply(&self.comm.inner.shared);
        self.comm.inner.submit(CommRequest::run(move |state| {
            let done = state.after(ready).and_then(|()| {
                state.collective(&members, &label, |state| {
                    // Requests run in their order: the buffer is there.
                    let mut buf = before.wait()?;
                    let reach = (range.len(), B::comm_buffer(&mut buf, range)?);
                    run(state, call, &members, reach, path)?;
                    Ok(buf)
                })
            });
            reply.send(done);
        }));
        pending
    }

    fn label(&self, op: &'static str, size: Size, algorithm: &'static str) -> Label {
        Label { op, group: self.name, unit: self.unit.clone(), size, algorithm, root: None }
    }

    fn check_peer(&self, peer: usize) -> Result<()> {
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

/// Numbers as bytes.
fn encode(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// The numbers in bytes.
fn decode(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()
}

/// Runs a collective on so many elements where their memory is. Device memory takes the given path,
/// through slots of so many words.
fn run(
    state: &mut CommThreadState,
    call: Call,
    group: &GroupRanks,
    (elements, memory): (usize, CommBuffer<'_>),
    (path, slot): (DeviceTransport, usize),
) -> Result<()> {
    let CommThreadState { wire, scratch, slots, room, device_comms, shared, .. } = state;
    let wire = &mut **wire;
    let words = match &memory {
        CommBuffer::Host(memory) => memory.len(),
        CommBuffer::Device(memory, _) => memory.words(),
    };
    if call.operation.adds() && words != elements {
        return Err(Error::internal(format!("{} of numbers that are not f32", call.operation)));
    }
    let in_parts = matches!(call.operation, Operation::ReduceScatter | Operation::AllGather);
    if in_parts && !words.is_multiple_of(group.size()) {
        let told =
            format!("{} of {words} words of memory in {} parts", call.operation, group.size());
        return Err(Error::internal(told));
    }
    match (memory, path) {
        (CommBuffer::Host(memory), _) => {
            algorithms::run(call, &mut HostBuffer { memory, scratch }, wire, group)
        }
        (CommBuffer::Device(memory, copies), DeviceTransport::HostStaged) => {
            PinnedStaging { copies: &*copies, slots, words: slot }
                .collective(call, memory, wire, scratch, group)
        }
        (CommBuffer::Device(memory, copies), DeviceTransport::CudaAware) => {
            let copies = &*copies;
            algorithms::run(
                call,
                &mut CudaAware { memory, device_comm: None, copies, room, shared },
                wire,
                group,
            )
        }
        (CommBuffer::Device(memory, copies), DeviceTransport::Nccl) => {
            let (copies, device_comm) = (&*copies, device_comms.of(&*copies, wire, group)?);
            if let Some(levels) = nccl_p2p::takes(call, group) {
                let chunk = nccl_p2p::chunk(slot, group.size());
                let grouped = NcclP2pCollective {
                    memory,
                    device_comm,
                    copies,
                    places: &mut room.terms,
                    chunk,
                };
                return grouped.run(call, &levels, wire, group);
            }
            let device_comm = Some(device_comm);
            algorithms::run(
                call,
                &mut CudaAware { memory, device_comm, copies, room, shared },
                wire,
                group,
            )
        }
    }
}
