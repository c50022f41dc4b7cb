//! The interface of `bf16/` on CPUs of other architectures than x86-64, which it does not support:
//! ARM's BFMMLA rounds sums at other points than AVX512-BF16.

use super::output_init::OutputInit;
use super::threads::Threads;

/// Returns false: matmuls are computed in f32.
pub fn is_supported() -> bool {
    false
}

/// Returns `None`: there is nothing to measure.
pub fn peak(_: &Threads) -> Option<f64> {
    None
}

pub use UnusedOperand as Operand;

/// An operand of a matmul, which is never computed.
pub struct UnusedOperand;

impl UnusedOperand {
    pub fn new(_: &[f32], _: usize, _: usize, _: bool) -> Self {
        Self
    }
}

/// Panics: `MatmulBackend::check` refuses bf16 where [`is_supported`] returns false.
pub fn multiply(
    _: &Threads,
    _: Operand,
    _: Operand,
    _: &mut [f32],
    _: OutputInit<'_>,
    _: &mut [f32],
) {
    unreachable!("bf16 is refused on CPUs without AVX512-BF16")
}
