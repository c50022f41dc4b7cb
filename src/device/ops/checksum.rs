//! Checksums of memory, which detect silent data corruption: changes made by anything but a kernel.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// The number of elements of a chunk.
pub const CHUNK: usize = 1 << 14;

/// Returns the factor on the bits of element `index`: odd, so that a change of a single bit always
/// changes the sum modulo 2³², and different at each index, so that swapped elements are detected.
pub const fn weight(index: u32) -> u32 {
    index.wrapping_mul(0x9e37_79b1) | 1
}

/// Checksums of the buffers that an update changes, each before and after the update.
#[derive(Debug)]
pub struct UpdateChecksums<S> {
    /// The checksums before the update.
    pub before: Vec<S>,
    /// The checksums after the update.
    pub after: Vec<S>,
}

impl<S> Default for UpdateChecksums<S> {
    fn default() -> Self {
        Self { before: Vec::new(), after: Vec::new() }
    }
}

/// Checksums of memory.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait DigestOps: Backend {
    /// Computes `Σ` over chunks of 16,384 elements of (`Σ bits(x[i])·weight(i) mod 2³²`) of f32: an
    /// integer that f64 holds exactly.
    fn digest(&self, x: Self::View<'_>) -> Result<Self::Scalar>;
}

impl KernelCost {
    /// Returns the cost of a checksum.
    pub fn digest(len: usize) -> Self {
        Self::new("digest", 0).with_shape([len]).with_f32_elements(len)
    }
}
