//! Digests of memory, which tell whether something else than a kernel has changed it.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Elements of a chunk.
pub const CHUNK: usize = 1 << 14;

/// The factor on the bits of element `index`: odd, so that no change of a single bit is lost in a
/// sum modulo 2³², and another one for each place, so that elements that change places are noticed.
pub const fn weight(index: u32) -> u32 {
    index.wrapping_mul(0x9e37_79b1) | 1
}

/// Digests of the buffers that an update changes, each as the update finds it and as it leaves it.
#[derive(Debug)]
pub struct Audit<S> {
    /// Before.
    pub found: Vec<S>,
    /// After.
    pub left: Vec<S>,
}

impl<S> Default for Audit<S> {
    fn default() -> Self {
        Self { found: Vec::new(), left: Vec::new() }
    }
}

/// Digests.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait DigestOps: Backend {
    /// `Σ` over chunks of 16,384 elements of (`Σ bits(x[i])·weight(i) mod 2³²`), of f32: an integer
    /// that f64 holds.
    fn digest(&self, x: Self::View<'_>) -> Result<Self::Scalar>;
}

impl KernelCost {
    /// A digest.
    pub fn digest(len: usize) -> Self {
        Self::moves("digest", 0).on([len]).exactly(len)
    }
}
