//! A transport that records the peers of each exchange, for hang reports.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{
    DeviceCollective, DeviceMessage, GroupRanks, InFlight, Incoming, Outgoing, P2pBuffer, Peer,
    Transport, World,
};
use crate::shared::Shared;
use hpctrain_base::error::Result;
use hpctrain_device::DeviceSpan;

/// Wraps another transport and records the peers of its exchanges in [`Shared`].
pub struct TrackedTransport {
    inner: Box<dyn Transport>,
    shared: Arc<Shared>,
}

impl TrackedTransport {
    pub fn new(inner: Box<dyn Transport>, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }

    fn with(
        &mut self,
        group: &GroupRanks,
        peers: impl Iterator<Item = usize>,
        exchange: impl FnOnce(&mut dyn Transport) -> Result<()>,
    ) -> Result<()> {
        self.shared.partners.begin(peers.map(|rank| group.ranks[rank]));
        let done = exchange(&mut *self.inner);
        self.shared.partners.end();
        done
    }
}

impl Transport for TrackedTransport {
    fn exchange(
        &mut self,
        group: &GroupRanks,
        sums: bool,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_, '_>>,
    ) -> Result<()> {
        let to = send.as_ref().map(|send| send.to);
        let from = receive.as_ref().map(|receive| receive.from);
        let peers = from.into_iter().chain(to);
        self.with(group, peers, |inner| inner.exchange(group, sums, send, receive))
    }

    fn exchange_bytes(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
    ) -> Result<()> {
        let to = send.map(|(to, _)| to);
        let from = receive.as_ref().map(|(from, _)| *from);
        let peers = from.into_iter().chain(to);
        self.with(group, peers, |inner| inner.exchange_bytes(group, send, receive))
    }

    fn exchange_device(
        &mut self,
        group: &GroupRanks,
        send: Option<DeviceMessage<'_>>,
        receive: Option<DeviceMessage<'_>>,
    ) -> Result<()> {
        let peers = receive.iter().chain(&send).map(|(rank, _)| *rank);
        self.with(group, peers, |inner| inner.exchange_device(group, send, receive))
    }

    fn exchange_device_group(
        &mut self,
        group: &GroupRanks,
        sends: &[DeviceMessage<'_>],
        receives: &[DeviceMessage<'_>],
    ) -> Result<()> {
        let peers: BTreeSet<_> = receives.iter().chain(sends).map(|(rank, _)| *rank).collect();
        self.with(group, peers.into_iter(), |inner| {
            inner.exchange_device_group(group, sends, receives)
        })
    }

    fn post(&mut self, group: &GroupRanks, peer: Peer, buffer: Box<dyn P2pBuffer>) -> Result<()> {
        self.inner.post(group, peer, buffer)
    }

    fn progress(&mut self) -> Result<InFlight> {
        self.inner.progress()
    }

    fn vendor(
        &mut self,
        group: &GroupRanks,
        call: DeviceCollective,
        memory: &mut [f32],
    ) -> Result<()> {
        self.inner.vendor(group, call, memory)
    }

    fn vendor_device(
        &mut self,
        group: &GroupRanks,
        call: DeviceCollective,
        memory: DeviceSpan<'_>,
    ) -> Result<()> {
        self.inner.vendor_device(group, call, memory)
    }

    fn split(&mut self, parent: &GroupRanks, color: usize) -> Result<usize> {
        self.inner.split(parent, color)
    }

    fn shrink(&mut self) -> Result<World> {
        self.inner.shrink()
    }

    fn abort(&mut self, code: i32) {
        self.inner.abort(code);
    }

    fn leave(&mut self, in_order: bool) {
        self.inner.leave(in_order);
    }
}
