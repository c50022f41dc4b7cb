//! Losses: the end of the forward and the seed of the backward.

use super::Micro;
use crate::backend::{CrossEntropy, Kernels, Memory};
use crate::error::Result;

/// Σ over rows of the cross-entropy between `logits` (rows × classes) and the micro-batch's targets.
///
/// # Errors
/// The device failed.
pub fn cross_entropy<B: Kernels>(backend: &B, micro: &Micro<B>, logits: &mut B::Buf) -> Result<B::Scalar> {
    run(backend, micro, logits, 0.0, false)
}

/// As [`cross_entropy`]; replaces the logits by their gradient times `scale`.
///
/// # Errors
/// The device failed.
pub fn cross_entropy_with_gradient<B: Kernels>(
    backend: &B,
    micro: &Micro<B>,
    logits: &mut B::Buf,
    scale: f32,
) -> Result<B::Scalar> {
    run(backend, micro, logits, scale, true)
}

fn run<B: Kernels>(
    backend: &B,
    micro: &Micro<B>,
    logits: &mut B::Buf,
    scale: f32,
    gradient: bool,
) -> Result<B::Scalar> {
    let rows = micro.rows();
    let mut losses = backend.alloc_f32(Memory::Activations, rows)?;
    let shape = CrossEntropy { rows, classes: B::len(logits) / rows.max(1), scale, gradient };
    backend.cross_entropy(shape, B::all_mut(logits), &micro.targets, B::all_mut(&mut losses))?;
    backend.sum(B::all(&losses))
}
