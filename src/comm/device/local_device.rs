//! The device of a rank, as the choice of a path wants to know it.

use std::sync::{Arc, OnceLock};

use super::path::DeviceTransport;
use hpctrain_base::error::Result;

/// The device of a rank.
pub struct LocalDevice<B> {
    /// Tells it apart on its node.
    pub(super) id: String,
    /// Whether ranks of its node see other devices than this one.
    pub(super) is_apart: bool,
    /// Makes it with little memory, to try things out.
    pub(super) small: Box<dyn Fn() -> Result<B> + Send + Sync>,
    /// The choice of `auto`, which is made once.
    pub(super) chosen: OnceLock<(DeviceTransport, Arc<str>)>,
}

impl<B> LocalDevice<B> {
    /// A device with this name on its node, which `small` makes with little memory.
    pub fn new(id: String, small: impl Fn() -> Result<B> + Send + Sync + 'static) -> Self {
        Self { id, is_apart: false, small: Box::new(small), chosen: OnceLock::new() }
    }

    /// The same, where ranks of its node see other devices than this one does.
    pub fn apart(self, is_apart: bool) -> Self {
        Self { is_apart, ..self }
    }
}
