//! The angles of rotary positions (Su et al., "RoFormer", 2021), shared by the blocks of a network.

use std::sync::OnceLock;

use crate::backend::{Backend, MemoryKind};
use crate::error::{Error, Result};

/// Cosines and sines of every position, on the device from their first use on.
pub struct Angles<B: Backend> {
    base: f64,
    head_width: usize,
    context: usize,
    table: OnceLock<B::Buf>,
}

impl<B: Backend> Angles<B> {
    /// The angles of so many positions, for heads of `head_width` elements: pair i of position t turns by t ·
    /// `base`^(-2i / `head_width`).
    pub fn new(base: f64, head_width: usize, context: usize) -> Self {
        Self { base, head_width, context, table: OnceLock::new() }
    }

    /// Elements of the table.
    pub fn len(&self) -> usize {
        self.context * self.head_width
    }

    /// The table, context × head width: a row is the cosines of a position's angles, then the sines.
    ///
    /// # Errors
    /// Out of memory.
    pub fn table(&self, backend: &B) -> Result<B::View<'_>> {
        if self.table.get().is_none() {
            // Another thread's is the same.
            let _ = self.table.set(backend.upload_f32(MemoryKind::Activations, &self.values())?);
        }
        self.table.get().map(B::all).ok_or_else(|| Error::internal("a table that was set is not there"))
    }

    /// Computed in f64 and rounded once: far positions have large angles.
    fn values(&self) -> Vec<f32> {
        let half = self.head_width / 2;
        let angle = |t: usize, i: usize| t as f64 * self.base.powf(-2.0 * i as f64 / self.head_width as f64);
        let row = |t: usize| {
            let angles = (0..half).map(move |i| angle(t, i));
            angles.clone().map(f64::cos).chain(angles.map(f64::sin)).map(|x| x as f32)
        };
        (0..self.context).flat_map(row).collect()
    }
}
