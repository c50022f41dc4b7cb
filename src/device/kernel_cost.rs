//! The FLOPs and bytes of every kernel, computed from its shape alone: profiles and benchmarks
//! divide them by time.
//!
//! FLOPs are those of matmuls and attention; kernels that only move memory have none. Bytes count
//! every operand once (twice if it is changed in place), as if nothing were in a cache; indices are
//! not counted.
//! nothing were in a cache; indices are not counted.

/// The cost of one launch of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelCost {
    /// The name of the kernel, such as `norm, backward`.
    pub kernel: &'static str,
    /// The sizes that its time depends on, rows first; trailing zeros are unused.
    pub shape: [usize; 4],
    /// Floating-point operations: a multiplication and an addition are two.
    pub flops: f64,
    /// The elements of the compute type that are read or written: parameters and activations.
    pub elements: f64,
    /// The elements read or written that are f32 for every compute type: statistics, gradients of
    /// parameters, fp32 master weights.
    pub f32_elements: f64,
}

impl KernelCost {
    /// Creates the cost of a kernel that reads or writes `elements` elements and has no other size.
    pub(super) fn new(kernel: &'static str, elements: usize) -> Self {
        Self {
            kernel,
            shape: [elements, 0, 0, 0],
            flops: 0.0,
            elements: elements as f64,
            f32_elements: 0.0,
        }
    }

    pub(super) fn with_shape<const N: usize>(self, sizes: [usize; N]) -> Self {
        let mut shape = [0; 4];
        shape[..N].copy_from_slice(&sizes);
        Self { shape, ..self }
    }

    pub(super) fn with_f32_elements(self, exact: usize) -> Self {
        Self { f32_elements: exact as f64, ..self }
    }

    pub(super) fn with_flops(self, flops: f64) -> Self {
        Self { flops, ..self }
    }

    /// Returns the bytes read or written if an element of the compute type has `width` bytes.
    pub fn bytes(&self, width: usize) -> f64 {
        self.elements * width as f64 + self.f32_elements * size_of::<f32>() as f64
    }
}

/// Returns the FLOPs of an m×k by k×n matmul.
pub(super) fn matmul_flops(m: usize, n: usize, k: usize) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, Linear};

    #[test]
    fn work_follows_from_shapes() {
        let linear = Linear::new(10, 3, 4);
        let work = KernelCost::linear(linear, 4);
        assert_eq!((work.flops, work.bytes(4), work.bytes(2)), (240.0, 4.0 * 86.0, 2.0 * 86.0));
        let work = KernelCost::linear_backward_weight(linear, 4, true);
        assert_eq!((work.flops, work.bytes(2)), (240.0, 2.0 * 70.0 + 4.0 * 32.0));
        assert_eq!(
            KernelCost::linear_backward_weight(linear, 4, false).bytes(2),
            2.0 * 70.0 + 4.0 * 20.0
        );
        let attention = Attention { batch: 2, time: 8, heads: 4, kv_heads: 2, head_width: 16 };
        let work = KernelCost::attention(attention);
        // 8 · 8 / 2 pairs of positions, 16 numbers each, 2 operations, 2 matmuls, 4 heads, 2
        // sequences.
        assert_eq!(work.flops, 32.0 * 16.0 * 2.0 * 2.0 * 4.0 * 2.0);
        assert_eq!(work.bytes(4), 4.0 * (16.0 * (128.0 + 64.0) + 64.0));
        assert_eq!(KernelCost::attention_backward(attention).flops, 2.5 * work.flops);
        assert_eq!(KernelCost::adamw(100, 100).bytes(2), 3000.0);
    }
}
