//! The device of a rank, as the selection of a transport needs to know it.

use std::sync::{Arc, OnceLock};

use super::path::DeviceTransport;
use hpctrain_base::error::Result;

/// The device of a rank.
pub struct LocalDevice<B> {
    /// Identifies the device on its node.
    pub(super) id: String,
    /// Whether other ranks of the node see other devices than this one.
    pub(super) is_isolated: bool,
    /// Opens the device with little memory, for measurements.
    pub(super) open_small: Box<dyn Fn() -> Result<B> + Send + Sync>,
    /// The choice of `auto` and its reason, once it is made.
    pub(super) chosen: OnceLock<(DeviceTransport, Arc<str>)>,
}

impl<B> LocalDevice<B> {
    /// Creates a description of the device that `id` identifies on its node. `small` opens it with
    /// little memory.
    pub fn new(id: String, small: impl Fn() -> Result<B> + Send + Sync + 'static) -> Self {
        Self { id, is_isolated: false, open_small: Box::new(small), chosen: OnceLock::new() }
    }

    /// Sets whether other ranks of the node see other devices than this one.
    pub fn with_isolation(self, is_isolated: bool) -> Self {
        Self { is_isolated, ..self }
    }
}
