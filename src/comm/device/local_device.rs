//! The device of a rank, as the selection of a transport needs to know it.

use std::sync::{Arc, OnceLock};

use super::path::DeviceTransport;
use hpctrain_base::error::Result;

/// Opens a device with little memory, besides a number of bytes.
type OpenSmall<B> = Box<dyn Fn(usize) -> Result<B> + Send + Sync>;

/// The device of a rank.
pub struct LocalDevice<B> {
    /// Identifies the device on its node.
    pub(super) id: String,
    /// Whether other ranks of the node see other devices than this one.
    pub(super) is_isolated: bool,
    /// Whether its memory pool grows.
    pub(crate) has_growing_memory: bool,
    /// Whether collectives are those of the vendor.
    pub(super) needs_vendor: bool,
    /// The bytes per second that an all-reduce inside a node should reach, by the device's model.
    pub(super) bus_bandwidth: Option<u64>,
    /// Opens the device with little memory, for measurements, besides a number of bytes.
    pub(super) open_small: OpenSmall<B>,
    /// The choice of `auto` and its reason, once it is made.
    pub(super) chosen: OnceLock<(DeviceTransport, Arc<str>)>,
}

impl<B> LocalDevice<B> {
    /// Creates a description of the device that `id` identifies on its node. `small` opens it with
    /// little memory, besides a number of bytes.
    pub fn new(id: String, small: impl Fn(usize) -> Result<B> + Send + Sync + 'static) -> Self {
        Self {
            id,
            is_isolated: false,
            has_growing_memory: false,
            needs_vendor: false,
            bus_bandwidth: None,
            open_small: Box::new(small),
            chosen: OnceLock::new(),
        }
    }

    /// Sets whether the memory pool of the device grows.
    pub fn with_growing_memory(self, has_growing_memory: bool) -> Self {
        Self { has_growing_memory, ..self }
    }

    /// Sets whether collectives are those of the vendor: `comm.algorithm = vendor`.
    pub fn with_vendor_collectives(self, needs_vendor: bool) -> Self {
        Self { needs_vendor, ..self }
    }

    /// Sets the bytes per second that an all-reduce inside a node should reach, if the model of the
    /// device has links that are known.
    pub fn with_bus_bandwidth(self, bus_bandwidth: Option<u64>) -> Self {
        Self { bus_bandwidth, ..self }
    }

    /// Sets whether other ranks of the node see other devices than this one.
    pub fn with_isolation(self, is_isolated: bool) -> Self {
        Self { is_isolated, ..self }
    }
}
