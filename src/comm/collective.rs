//! Collectives of the communication thread on memory of the host or of a device, by any transport.

use std::sync::Arc;

use super::algorithms::{self, Algorithm, Call, Operation, UnequalCollective};
use super::device::chunk_pipeline::Level;
use super::device::cuda_aware::CudaAware;
use super::device::grouped_collective::{self, GroupedCollective};
use super::device::host_chunks::HostChunks;
use super::device::host_staged::PinnedStaging;
use super::device::message_groups::CudaAwareGroups;
use super::device::path::DeviceTransport;
use super::p2p_request::on_host;
use super::reduce_buffer::HostBuffer;
use super::transport::GroupRanks;
use super::worker::CommThreadState;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{CommBuffer, DeviceCollective, DeviceEvent, DeviceOperation, Element};

/// The memory of a collective, and the format of its elements.
pub struct CollectiveBuffer<'a> {
    pub memory: CommBuffer<'a>,
    pub element: Element,
}

/// How messages carry the memory of a collective.
#[derive(Debug, Clone, Copy)]
pub struct MessagePath {
    /// The transport of device memory.
    pub transport: DeviceTransport,
    /// Words of a host-staged chunk.
    pub slot: usize,
    /// Whether host memory is sent in the chunks of device memory, which other ranks have.
    pub is_mixed: bool,
}

/// Checks that a collective supports memory that has these elements, and returns it.
pub fn operand<'a>(
    call: Call,
    group: &GroupRanks,
    element: Element,
    memory: CommBuffer<'a>,
) -> Result<CollectiveBuffer<'a>> {
    let words = match &memory {
        CommBuffer::Host(memory) => memory.len(),
        CommBuffer::Device(memory, _) => memory.words(),
    };
    let in_parts = matches!(call.operation, Operation::ReduceScatter | Operation::AllGather);
    if in_parts && !words.is_multiple_of(group.size()) {
        let message =
            format!("{} of {words} words of memory in {} parts", call.operation, group.size());
        return Err(Error::internal(message));
    }
    Ok(CollectiveBuffer { memory, element })
}

/// Returns an error if a call adds elements of another format than f32: only sums in groups of
/// messages do.
fn check_is_f32(call: Call, element: Element) -> Result<()> {
    match call.operation.adds() && element != Element::F32 {
        true => Err(Error::internal(format!("{} requires f32 elements", call.operation))),
        false => Ok(()),
    }
}

/// Runs a collective on memory of the host or of a device.
pub fn run(
    state: &mut CommThreadState,
    call: Call,
    group: &GroupRanks,
    CollectiveBuffer { memory, element }: CollectiveBuffer<'_>,
    MessagePath { transport: path, slot, is_mixed }: MessagePath,
) -> Result<()> {
    // The host orders the following work by waits.
    state.drain_device()?;
    let CommThreadState { transport, scratch, slots, device_scratch, device_comms, shared, .. } =
        state;
    let transport = &mut **transport;
    match (memory, path) {
        (CommBuffer::Host(memory), _) if is_mixed => {
            HostChunks { words: slot }.collective(call, memory, transport, scratch, group)
        }
        (CommBuffer::Host(memory), _) => {
            algorithms::run(call, &mut HostBuffer { memory, scratch }, transport, group)
        }
        (CommBuffer::Device(memory, copies), DeviceTransport::HostStaged) => {
            check_is_f32(call, element)?;
            PinnedStaging { copies: &*copies, slots, words: slot }
                .collective(call, memory, transport, scratch, group)
        }
        (CommBuffer::Device(memory, copies), path) => {
            let copies = &*copies;
            let levels = match path {
                DeviceTransport::CudaAware => grouped_collective::group_levels(call, group),
                _ => None,
            };
            if let Some(levels) = levels {
                let chunk = grouped_collective::chunk(slot, group.size());
                let (terms, slots) =
                    grouped_collective::scratch_slots(call, memory.words(), chunk, group.size());
                let slots = device_scratch.terms.reserve_all(copies, slots, terms)?;
                return GroupedCollective { memory, element, slots: &slots, chunk }.run(
                    CudaAwareGroups::new(copies, shared),
                    call,
                    &levels,
                    transport,
                    group,
                );
            }
            check_is_f32(call, element)?;
            let device_comm = match path.orders_on_device() {
                true => Some(device_comms.get_or_create(copies, transport, group, path)?),
                false => None,
            };
            algorithms::run(
                call,
                &mut CudaAware { memory, device_comm, copies, scratch: device_scratch, shared },
                transport,
                group,
            )
        }
    }
}

/// Runs a collective of unequal parts on memory of the host or of a device, as [`run`] does.
pub fn run_unequal(
    state: &mut CommThreadState,
    collective: &UnequalCollective,
    group: &GroupRanks,
    CollectiveBuffer { memory, element }: CollectiveBuffer<'_>,
    MessagePath { transport: path, slot, is_mixed }: MessagePath,
) -> Result<()> {
    if collective.terms.is_some() && element != Element::F32 {
        return Err(Error::internal("sums of unequal parts require f32 elements"));
    }
    state.drain_device()?;
    let CommThreadState { transport, scratch, slots, device_scratch, device_comms, shared, .. } =
        state;
    let transport = &mut **transport;
    let collective = collective.in_words(element);
    match (memory, path) {
        (CommBuffer::Host(memory), _) if is_mixed => {
            HostChunks { words: slot }.unequal(&collective, memory, transport, scratch, group)
        }
        (CommBuffer::Host(memory), _) => {
            collective.run(&mut HostBuffer { memory, scratch }, transport, group)
        }
        (CommBuffer::Device(memory, copies), DeviceTransport::HostStaged) => {
            PinnedStaging { copies: &*copies, slots, words: slot }.unequal(
                &collective,
                memory,
                transport,
                scratch,
                group,
            )
        }
        (CommBuffer::Device(memory, copies), path) => {
            let copies = &*copies;
            let device_comm = match path.orders_on_device() {
                true => Some(device_comms.get_or_create(copies, transport, group, path)?),
                false => None,
            };
            let mut x = CudaAware { memory, device_comm, copies, scratch: device_scratch, shared };
            collective.run(&mut x, transport, group)
        }
    }
}

/// How the communicator of a device runs a collective that the device orders with compute.
pub enum DeviceSchedule {
    /// In groups of messages, with sums in a fixed order.
    Groups(Vec<Level>),
    /// By a collective of the device vendor's library, NCCL.
    Vendor(DeviceCollective),
}

impl DeviceSchedule {
    /// Returns the schedule of a call, or `None` if the host has to run it.
    pub fn new(call: Call, group: &GroupRanks, device: DeviceTransport) -> Option<Self> {
        // Broadcasts add nothing, so NCCL's change no bits.
        let is_copy = call.operation == Operation::Broadcast && device == DeviceTransport::Nccl;
        match call.algorithm {
            Algorithm::Vendor => Some(Self::Vendor(call.vendor_collective())),
            _ if is_copy => Some(Self::Vendor(call.vendor_collective())),
            _ => grouped_collective::group_levels(call, group).map(Self::Groups),
        }
    }

    /// Starts a call on device memory after the event `ready` of compute.
    pub fn start(
        &self,
        state: &mut CommThreadState,
        call: Call,
        group: &GroupRanks,
        CollectiveBuffer { memory, element }: CollectiveBuffer<'_>,
        MessagePath { transport: path, slot, .. }: MessagePath,
        ready: Option<Box<dyn DeviceEvent>>,
    ) -> Result<Arc<dyn DeviceOperation>> {
        let CommBuffer::Device(memory, copies) = memory else { return Err(on_host()) };
        let chunk = grouped_collective::chunk(slot, group.size());
        let (terms, slots) = match self {
            Self::Groups(_) => {
                grouped_collective::scratch_slots(call, memory.words(), chunk, group.size())
            }
            Self::Vendor(_) => (0, 0),
        };
        if !state.device_comms.has(group, path) || !state.device_scratch.terms.have(slots, terms) {
            // A communicator that is created may synchronise the device, and scratch memory is freed
            // before it grows.
            state.drain_device()?;
        }
        let CommThreadState { transport, device_scratch, device_comms, .. } = state;
        let transport = &mut **transport;
        let slots = device_scratch.terms.reserve_all(&*copies, slots, terms)?;
        let device_comm = device_comms.get_or_create(&*copies, transport, group, path)?;
        device_comm.begin(ready.as_deref())?;
        match self {
            Self::Groups(levels) => GroupedCollective { memory, element, slots: &slots, chunk }
                .run(device_comm, call, levels, transport, group),
            Self::Vendor(collective) => {
                check_is_f32(call, element)?;
                device_comm.vendor(transport, group, *collective, memory)?;
                device_comm.end()
            }
        }
    }
}
