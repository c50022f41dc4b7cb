//! Communicators of devices: of a library of the vendor, such as NCCL, or of ranks that write to
//! each other's memory (CUDA IPC).
//!
//! Algorithms and sums are those of [`CudaAware`](super::cuda_aware::CudaAware); only the messages
//! go through the communicator. The ranks of a group create a communicator when they first need one, so
//! that only ranks that exchange wait for each other. The device runs the operations of all of them
//! in one order. The program polls the communicator instead of blocking in it, so a rank that waits
//! for a dead one still reacts to an abort.
//!
//! The host's transport sends the other ranks the data that they need to create a communicator: the
//! identifier of rank 0, or the handles of every rank's memory. Communicators are non-blocking; they
//! are polled for progress and for asynchronous errors, and after a failure they are aborted before
//! memory is freed. Point-to-point messages (`Group::send`)
//! are host-staged, because a message blocks its stream until the receiver takes it.

use std::sync::Arc;

use super::path::DeviceTransport;
use crate::algorithms::bytes;
use crate::polling;
use crate::shared::Shared;
use crate::transport::{DeviceCollective, GroupRanks, Transport, least_sent};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{
    CommId, DeviceComm, DeviceCopies, DeviceEvent, DeviceOperation, DeviceSpan, OrderedSum,
};

/// Cached communicators, in the order in which they were created; creation is slow.
pub struct DeviceComms {
    entries: Vec<Entry>,
    shared: Arc<Shared>,
}

/// The communicator of the ranks of a group.
struct Entry {
    group: GroupRanks,
    transport: DeviceTransport,
    comm: Box<dyn DeviceComm>,
}

impl Entry {
    /// Waits until the communicator is settled after `start`.
    fn until_done(
        &self,
        transport: &mut dyn Transport,
        shared: &Shared,
        start: impl FnOnce(&dyn DeviceComm) -> Result<()>,
    ) -> Result<()> {
        start(&*self.comm)
            .and_then(|()| polling::wait_for_event(&*self.comm.mark()?, transport, shared))
    }
}

/// Aborts all communicators. Afterwards they use no memory.
fn abort(entries: &[Entry]) {
    entries.iter().for_each(|entry| entry.comm.abort());
    if let Some(entry) = entries.first() {
        // All of them use the same streams.
        entry.comm.synchronize();
    }
}

impl DeviceComms {
    /// Creates an empty cache.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { entries: Vec::new(), shared }
    }

    /// Returns the communicator of the ranks of a group for a transport, and creates it if there is
    /// none yet, which is collective over the group. The device has no work of communicators then.
    pub fn get_or_create(
        &mut self,
        copies: &dyn DeviceCopies,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        path: DeviceTransport,
    ) -> Result<GroupComm<'_>> {
        let place = match self.find(group, path) {
            Some(place) => place,
            None => {
                let comm = match path {
                    DeviceTransport::CudaIpc => open_peers(copies, transport, group)??,
                    _ => {
                        let id = comm_id(copies, transport, group)?;
                        copies.init_rank(&id, group.rank, group.size())?
                    }
                };
                self.add(transport, group, path, comm)?
            }
        };
        Ok(GroupComm { entries: &self.entries, place, shared: &self.shared })
    }

    /// Adds a communicator that was created, and returns its index once it is settled.
    fn add(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        path: DeviceTransport,
        comm: Box<dyn DeviceComm>,
    ) -> Result<usize> {
        self.entries.push(Entry { group: group.clone(), transport: path, comm });
        let place = self.entries.len() - 1;
        self.entries[place].until_done(transport, &self.shared, |_| Ok(()))?;
        Ok(place)
    }

    /// Creates the communicator of the ranks of a group over CUDA IPC if it can be created, and
    /// returns whether it was, the same on all ranks. Collective over the group.
    pub fn try_peers(
        &mut self,
        copies: &dyn DeviceCopies,
        transport: &mut dyn Transport,
        group: &GroupRanks,
    ) -> Result<bool> {
        if self.has(group, DeviceTransport::CudaIpc) {
            return Ok(true);
        }
        let comm = match open_peers(copies, transport, group)? {
            Ok(comm) => comm,
            Err(error) => {
                log::debug!("no collectives over CUDA IPC: {error}");
                return Ok(false);
            }
        };
        self.add(transport, group, DeviceTransport::CudaIpc, comm)?;
        Ok(true)
    }

    /// Returns the index of the communicator of the ranks of a group.
    fn find(&self, group: &GroupRanks, path: DeviceTransport) -> Option<usize> {
        let is_it = |entry: &Entry| entry.transport == path && entry.group.ranks == group.ranks;
        self.entries.iter().position(is_it)
    }

    /// Returns true if there is a communicator of the ranks of a group for a transport.
    pub fn has(&self, group: &GroupRanks, path: DeviceTransport) -> bool {
        self.find(group, path).is_some()
    }

    /// Finalizes all communicators, in an order that is the same on all their ranks.
    pub fn finalize(&mut self, transport: &mut dyn Transport) {
        for entry in &self.entries {
            let parted = entry.until_done(transport, &self.shared, |comm| comm.part());
            if let Err(error) = parted {
                // Its work is done.
                log::debug!("destroying a communicator: {error}");
                entry.comm.abort();
            }
        }
        for Entry { group, transport: path, comm } in self.entries.drain(..) {
            drop(comm);
            if path == DeviceTransport::CudaIpc
                && let Err(error) = bytes::gather(transport, &group, Vec::new())
            {
                // No rank may free its memory before the others have closed it, unless they ended.
                log::debug!("closing the memory of other ranks: {error}");
            }
        }
    }

    /// Aborts all communicators. Other ranks may then wait for this one for ever.
    pub fn abort(&mut self) {
        abort(&self.entries);
        self.entries.clear();
    }
}

/// Creates an identifier on rank 0 and sends it to all ranks of a group.
fn comm_id(
    copies: &dyn DeviceCopies,
    transport: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<CommId> {
    if group.rank == 0 {
        let made = copies.comm_id()?;
        (1..group.size())
            .try_for_each(|to| transport.exchange_bytes(group, Some((to, &made)), None))?;
        return Ok(made);
    }
    let mut received = [0; size_of::<CommId>()];
    transport.exchange_bytes(group, None, Some((0, &mut received)))?;
    Ok(received)
}

/// Exports this rank's memory to all ranks of a group, and opens theirs. The inner result is that of
/// the device, an error on all ranks if it is one on some.
fn open_peers(
    copies: &dyn DeviceCopies,
    transport: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<Result<Box<dyn DeviceComm>>> {
    let exported = copies.export_memory(group.size());
    let handle = exported.as_ref().map_or_else(|_| Vec::new(), |exported| exported.handle());
    // A rank without a handle takes part, so that the others do not wait for it.
    let handles = bytes::gather(transport, group, handle)?;
    let failed_on = |rank: usize, what: &str| {
        Error::comm(format!("rank {} could not {what} (CUDA IPC)", group.ranks[rank]))
    };
    if let Some(rank) = handles.iter().position(Vec::is_empty) {
        let theirs = failed_on(rank, "export the memory of its GPU");
        return Ok(Err(exported.err().unwrap_or(theirs)));
    }
    let opened = exported.and_then(|exported| exported.open_peers(&handles, group.rank));
    let all = bytes::gather(transport, group, vec![u8::from(opened.is_ok())])?;
    match all.iter().position(|opened| *opened != [1]) {
        Some(rank) if opened.is_ok() => {
            Ok(Err(failed_on(rank, "open the memory of the others' GPUs")))
        }
        _ => Ok(opened),
    }
}

/// A communicator, used by a group of its ranks. After an error all communicators are aborted, and
/// no operation uses memory.
pub struct GroupComm<'a> {
    entries: &'a [Entry],
    /// The index of the communicator.
    place: usize,
    shared: &'a Shared,
}

impl GroupComm<'_> {
    fn comm(&self) -> &dyn DeviceComm {
        &*self.entries[self.place].comm
    }

    /// Passes a result on; an error aborts all communicators.
    fn or_abort<T>(&self, done: Result<T>) -> Result<T> {
        done.inspect_err(|_| abort(self.entries))
    }

    /// Starts an operation and waits until it is done on this rank.
    fn until_done(
        &self,
        transport: &mut dyn Transport,
        start: impl FnOnce(&dyn DeviceComm) -> Result<()>,
    ) -> Result<()> {
        self.or_abort(self.entries[self.place].until_done(transport, self.shared, start))
    }

    /// Starts a part of an operation and waits until it is in the device's queue.
    fn until_queued(
        &self,
        transport: &mut dyn Transport,
        start: impl FnOnce(&dyn DeviceComm) -> Result<()>,
    ) -> Result<()> {
        let queued = start(self.comm()).and_then(|()| {
            polling::wait_until_queued(&*self.comm().queued(), transport, self.shared)
        });
        self.or_abort(queued)
    }

    /// Begins an operation that the device runs after `ready`, an event of compute.
    pub fn begin(&self, ready: Option<&dyn DeviceEvent>) -> Result<()> {
        self.or_abort(self.comm().begin(ready))
    }

    /// Ends the operation, of which everything is in the device's queue.
    pub fn end(&self) -> Result<Arc<dyn DeviceOperation>> {
        self.or_abort(self.comm().end())
    }

    /// Returns the number in this communicator of a rank of `group`.
    fn number(&self, group: &GroupRanks, rank: usize) -> Result<usize> {
        let ranks = &self.entries[self.place].group.ranks;
        let found = ranks.binary_search(&group.ranks[rank]);
        found.map_err(|_| {
            Error::internal(format!(
                "rank {} is not in the communicator {ranks:?}",
                group.ranks[rank]
            ))
        })
    }

    /// Sends and receives device memory, like [`Transport::exchange_device`].
    pub fn exchange(
        &self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        send: Option<(usize, DeviceSpan<'_>)>,
        receive: Option<(usize, DeviceSpan<'_>)>,
    ) -> Result<()> {
        let peer = |side: Option<(usize, _)>| {
            side.map(|(rank, span)| Ok((self.number(group, rank)?, span))).transpose()
        };
        let send = peer(send)?;
        let receive = peer(receive)?;
        self.shared.add_sent(send.map_or(0, |(_, span)| span.words() * size_of::<f32>()));
        self.until_done(transport, |comm| comm.exchange(send.as_slice(), receive.as_slice()))
    }

    /// Queues messages between this rank and others of the group on the device, as a part of an
    /// operation. Returns when the device has queued them.
    pub fn queue(
        &self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        sends: &[(usize, DeviceSpan<'_>)],
        receives: &[(usize, DeviceSpan<'_>)],
    ) -> Result<()> {
        let words: usize = sends.iter().map(|(_, span)| span.words()).sum();
        self.shared.add_sent_messages(sends.len(), words * size_of::<f32>());
        self.until_queued(transport, |comm| {
            comm.exchange(&self.peers(group, sends)?, &self.peers(group, receives)?)
        })
    }

    /// Translates the ranks of messages to their numbers in this communicator.
    fn peers<'a>(
        &self,
        group: &GroupRanks,
        side: &[(usize, DeviceSpan<'a>)],
    ) -> Result<Vec<(usize, DeviceSpan<'a>)>> {
        side.iter().map(|&(rank, span)| Ok((self.number(group, rank)?, span))).collect()
    }

    /// Queues sums after the messages queued so far; see [`DeviceComm::sum_in_order`].
    pub fn fold(&self, folds: &[OrderedSum<'_>]) -> Result<()> {
        self.or_abort(self.comm().sum_in_order(folds))
    }

    /// Orders later messages after sums; see [`DeviceComm::wait_for_sums`].
    pub fn after_folds(&self, but: usize) -> Result<()> {
        self.or_abort(self.comm().wait_for_sums(but))
    }

    /// Queues a vendor collective of all ranks of the communicator on the device, as a part of an
    /// operation.
    pub fn vendor(
        &self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        call: DeviceCollective,
        memory: DeviceSpan<'_>,
    ) -> Result<()> {
        self.shared.add_sent_messages(0, least_sent(group, call, memory.words()));
        self.until_queued(transport, |comm| comm.collective(call, memory))
    }
}
