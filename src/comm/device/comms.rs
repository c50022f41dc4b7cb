//! Messages of device memory by a library of the device's vendor, such as NCCL.
//!
//! Algorithms and sums are those of [`Direct`](super::cuda_aware::Direct); only messages take
//! another way. The ranks of a group create a communicator when they first need one, so that only
//! ranks wait for each other that have something to exchange. All waiting is the program's: the
//! library is asked how far it is, and a rank that waits for a dead one still hears of an abort.
//!
//! The identifier of a communicator reaches the other ranks as bytes of the wire. Communicators do
//! not block; they are asked for their progress and for asynchronous errors, and after a failure
//! they are aborted before memory is released. Single messages (`Group::send`) stay staged: a
//! message of NCCL holds up its stream until the receiver takes it.

use std::sync::Arc;

use crate::polling;
use crate::shared::Shared;
use crate::transport::{DeviceCollective, GroupRanks, Transport, least_sent};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{CommId, DeviceComm, DeviceCopies, DeviceSpan, OrderedSum};

/// Cached communicators, in the order in which they were created; creation is slow.
pub struct DeviceComms {
    entries: Vec<Entry>,
    shared: Arc<Shared>,
}

/// The communicator of some ranks.
struct Entry {
    ranks: Arc<[usize]>,
    comm: Box<dyn DeviceComm>,
}

impl Entry {
    fn group_comm<'a>(&'a self, shared: &'a Shared) -> GroupComm<'a> {
        GroupComm { ranks: &self.ranks, comm: &*self.comm, shared }
    }
}

impl DeviceComms {
    /// None yet.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { entries: Vec::new(), shared }
    }

    /// The communicator of the ranks of a group. Collective if there is none yet: the first rank
    /// makes its identifier.
    pub fn of(
        &mut self,
        copies: &dyn DeviceCopies,
        wire: &mut dyn Transport,
        group: &GroupRanks,
    ) -> Result<GroupComm<'_>> {
        let known = self.entries.iter().position(|entry| entry.ranks == group.ranks);
        let place = match known {
            Some(place) => place,
            None => {
                let comm =
                    copies.init_rank(&comm_id(copies, wire, group)?, group.rank, group.size())?;
                let entry = Entry { ranks: group.ranks.clone(), comm };
                entry.group_comm(&self.shared).until_done(wire, |_| Ok(()))?;
                self.entries.push(entry);
                self.entries.len() - 1
            }
        };
        Ok(self.entries[place].group_comm(&self.shared))
    }

    /// Finalizes all communicators, in an order that is the same on all their ranks.
    pub fn part(&mut self, wire: &mut dyn Transport) {
        for entry in self.entries.drain(..) {
            let parted = entry.group_comm(&self.shared).until_done(wire, |comm| comm.part());
            // Aborted, then; its work is done.
            parted.inspect_err(|error| log::debug!("destroying a communicator: {error}")).ok();
        }
    }

    /// Aborts all communicators. Other ranks may wait for this one for ever.
    pub fn tear(&mut self) {
        self.entries.clear();
    }
}

/// One identifier for all ranks of a group.
fn comm_id(
    copies: &dyn DeviceCopies,
    wire: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<CommId> {
    if group.rank == 0 {
        let made = copies.comm_id()?;
        (1..group.size()).try_for_each(|to| wire.exchange_bytes(group, Some((to, &made)), None))?;
        return Ok(made);
    }
    let mut received = [0; size_of::<CommId>()];
    wire.exchange_bytes(group, None, Some((0, &mut received)))?;
    Ok(received)
}

/// A communicator as a group uses it.
pub struct GroupComm<'a> {
    /// Their numbers in the world.
    ranks: &'a [usize],
    comm: &'a dyn DeviceComm,
    shared: &'a Shared,
}

impl GroupComm<'_> {
    /// Starts something and waits until it is done here. After an error nothing of it uses memory
    /// any more.
    fn until_done(
        &self,
        wire: &mut dyn Transport,
        start: impl FnOnce(&dyn DeviceComm) -> Result<()>,
    ) -> Result<()> {
        let done =
            start(self.comm).and_then(|()| polling::settle(&*self.comm.mark()?, wire, self.shared));
        done.inspect_err(|_| self.comm.tear())
    }

    /// The number here of a rank of some group of ours.
    fn number(&self, group: &GroupRanks, rank: usize) -> Result<usize> {
        let found = self.ranks.binary_search(&group.ranks[rank]);
        found.map_err(|_| {
            Error::internal(format!(
                "rank {} is not in the communicator {:?}",
                group.ranks[rank], self.ranks
            ))
        })
    }

    /// As [`Transport::exchange_device`].
    pub fn exchange(
        &self,
        wire: &mut dyn Transport,
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
        self.until_done(wire, |comm| comm.exchange(send.as_slice(), receive.as_slice()))
    }

    /// Starts messages between this rank and others of the group, and what is to follow them on the
    /// device; returns when the device has it among its work, with [`GroupComm::finish`] to come.
    /// After an error nothing of it uses memory any more.
    pub fn queue(
        &self,
        wire: &mut dyn Transport,
        group: &GroupRanks,
        sends: &[(usize, DeviceSpan<'_>)],
        receives: &[(usize, DeviceSpan<'_>)],
    ) -> Result<()> {
        self.shared.add_sent(sends.iter().map(|(_, span)| span.words() * size_of::<f32>()).sum());
        let mut start = || {
            self.comm.exchange(&self.peers(group, sends)?, &self.peers(group, receives)?)?;
            polling::handed_over(&*self.comm.queued(), wire, self.shared)
        };
        start().inspect_err(|_| self.comm.tear())
    }

    /// Messages with the numbers here of their other ranks.
    fn peers<'a>(
        &self,
        group: &GroupRanks,
        side: &[(usize, DeviceSpan<'a>)],
    ) -> Result<Vec<(usize, DeviceSpan<'a>)>> {
        side.iter().map(|&(rank, span)| Ok((self.number(group, rank)?, span))).collect()
    }

    /// Queues sums behind the messages queued so far, as [`DeviceComm::fold`].
    pub fn fold(&self, folds: &[OrderedSum<'_>]) -> Result<()> {
        self.comm.fold(folds).inspect_err(|_| self.comm.tear())
    }

    /// Has messages come behind sums, as [`DeviceComm::after_folds`].
    pub fn after_folds(&self, but: usize) -> Result<()> {
        self.comm.after_folds(but).inspect_err(|_| self.comm.tear())
    }

    /// Waits for all that was queued.
    pub fn finish(&self, wire: &mut dyn Transport) -> Result<()> {
        self.until_done(wire, |_| Ok(()))
    }

    /// As [`Transport::vendor`], of all ranks of the communicator.
    pub fn vendor(
        &self,
        wire: &mut dyn Transport,
        group: &GroupRanks,
        call: DeviceCollective,
        memory: DeviceSpan<'_>,
    ) -> Result<()> {
        self.shared.add_sent(least_sent(group, call, memory.words()));
        self.until_done(wire, |comm| comm.vendor(call, memory))
    }
}
