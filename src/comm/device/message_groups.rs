//! Groups of messages of device memory, and ordered sums between them: by a library of the device's
//! vendor, or by CUDA-aware MPI.

use std::collections::VecDeque;
use std::sync::Arc;

use super::comms::GroupComm;
use crate::polling;
use crate::shared::Shared;
use crate::transport::{DeviceMessage, GroupRanks, Transport};
use hpctrain_base::error::Result;
use hpctrain_device::{DeviceCopies, DeviceEvent, DeviceOperation, OrderedSum};

/// A way to run the message groups and sums of one collective.
pub trait MessageGroups {
    /// The result of a collective.
    type Outcome;

    /// Sends and receives the messages of one group. Messages between two ranks arrive in the order
    /// of the slices.
    fn exchange_group(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        sends: &[DeviceMessage<'_>],
        receives: &[DeviceMessage<'_>],
    ) -> Result<()>;

    /// Starts sums, if there are any, of terms received so far. They run while later groups are
    /// exchanged.
    fn sum_in_order(&mut self, sums: &[OrderedSum<'_>]) -> Result<()>;

    /// Orders later groups after the sums of all calls of
    /// [`sum_in_order`](MessageGroups::sum_in_order) but the last `but` calls.
    fn wait_for_sums(&mut self, transport: &mut dyn Transport, but: usize) -> Result<()>;

    /// Ends the collective.
    fn finish(self, transport: &mut dyn Transport) -> Result<Self::Outcome>;
}

/// The device keeps the order, after [`GroupComm::begin`]; the host waits only until messages are
/// queued.
impl MessageGroups for GroupComm<'_> {
    type Outcome = Arc<dyn DeviceOperation>;

    fn exchange_group(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        sends: &[DeviceMessage<'_>],
        receives: &[DeviceMessage<'_>],
    ) -> Result<()> {
        self.queue(transport, group, sends, receives)
    }

    fn sum_in_order(&mut self, sums: &[OrderedSum<'_>]) -> Result<()> {
        self.fold(sums)
    }

    fn wait_for_sums(&mut self, _: &mut dyn Transport, but: usize) -> Result<()> {
        self.after_folds(but)
    }

    fn finish(self, _: &mut dyn Transport) -> Result<Self::Outcome> {
        self.end()
    }
}

/// Groups of messages of CUDA-aware MPI. The host keeps the order: it waits for all messages of a
/// group, and for sums before a group that needs them.
pub struct CudaAwareGroups<'a> {
    copies: &'a dyn DeviceCopies,
    shared: &'a Shared,
    /// For each call of `sum_in_order` that was not awaited, in order, the end of its sums, if it
    /// had any.
    sums: VecDeque<Option<Box<dyn DeviceEvent>>>,
}

impl<'a> CudaAwareGroups<'a> {
    /// Begins a collective on memory on which the device has finished its work.
    pub fn new(copies: &'a dyn DeviceCopies, shared: &'a Shared) -> Self {
        Self { copies, shared, sums: VecDeque::new() }
    }
}

impl MessageGroups for CudaAwareGroups<'_> {
    type Outcome = ();

    fn exchange_group(
        &mut self,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        sends: &[DeviceMessage<'_>],
        receives: &[DeviceMessage<'_>],
    ) -> Result<()> {
        transport.exchange_device_group(group, sends, receives)
    }

    fn sum_in_order(&mut self, sums: &[OrderedSum<'_>]) -> Result<()> {
        let end = if sums.is_empty() { None } else { Some(self.copies.sum_in_order(sums)?) };
        self.sums.push_back(end);
        Ok(())
    }

    fn wait_for_sums(&mut self, transport: &mut dyn Transport, but: usize) -> Result<()> {
        while self.sums.len() > but {
            if let Some(Some(end)) = self.sums.front() {
                polling::wait_for_event(&**end, transport, self.shared)?;
            }
            self.sums.pop_front();
        }
        Ok(())
    }

    fn finish(mut self, transport: &mut dyn Transport) -> Result<()> {
        self.wait_for_sums(transport, 0)
    }
}

impl Drop for CudaAwareGroups<'_> {
    fn drop(&mut self) {
        // After an error, sums may still use memory that is about to be returned. If waiting for
        // them fails too, the device has failed.
        self.sums.drain(..).flatten().for_each(|end| drop(end.wait()));
    }
}
