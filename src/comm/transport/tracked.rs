//! A transport that records the peers of each exchange, for hang reports.

use std::sync::Arc;

use super::{
    DeviceCollective, GroupRanks, InFlight, Incoming, Outgoing, P2pBuffer, Peer, Transport,
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
        to: Option<usize>,
        from: Option<usize>,
        exchange: impl FnOnce(&mut dyn Transport) -> Result<()>,
    ) -> Result<()> {
        let in_world = |rank: usize| group.ranks[rank];
        self.shared.partners.begin(to.map(in_world), from.map(in_world));
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
        self.with(group, to, from, |inner| inner.exchange(group, sums, send, receive))
    }

    fn exchange_bytes(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
    ) -> Result<()> {
        let to = send.map(|(to, _)| to);
        let from = receive.as_ref().map(|(from, _)| *from);
        self.with(group, to, from, |inner| inner.exchange_bytes(group, send, receive))
    }

    fn exchange_device(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, DeviceSpan<'_>)>,
        receive: Option<(usize, DeviceSpan<'_>)>,
    ) -> Result<()> {
        let to = send.map(|(to, _)| to);
        let from = receive.map(|(from, _)| from);
        self.with(group, to, from, |inner| inner.exchange_device(group, send, receive))
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

    fn abort(&mut self, code: i32) {
        self.inner.abort(code);
    }

    fn leave(&mut self, in_order: bool) {
        self.inner.leave(in_order);
    }
}
