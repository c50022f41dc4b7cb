//! The device of a rank, as the choice of a path wants to know it.

use std::sync::{Arc, OnceLock};

use super::path::DevicePath;
use crate::error::Result;

/// The device of a rank.
pub struct OwnDevice<B> {
    /// Tells it apart on its node.
    pub(super) id: String,
    /// Makes it with little memory, to try things out.
    pub(super) small: Box<dyn Fn() -> Result<B> + Send + Sync>,
    /// The choice of `auto`, which is made once.
    pub(super) chosen: OnceLock<(DevicePath, Arc<str>)>,
}

impl<B> OwnDevice<B> {
    /// A device with this name on its node, which `small` makes with little memory.
    pub fn new(id: String, small: impl Fn() -> Result<B> + Send + Sync + 'static) -> Self {
        Self { id, small: Box::new(small), chosen: OnceLock::new() }
    }
}
