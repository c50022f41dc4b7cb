//! Runs plain code compiled for the widest vector extensions of the machine.

use std::sync::LazyLock;

static ARCH: LazyLock<pulp::Arch> = LazyLock::new(pulp::Arch::new);

/// Returns the name of the machine's vector extensions, which affect the last bits of sums.
pub fn name() -> String {
    #[cfg(target_arch = "x86_64")]
    match *ARCH {
        pulp::Arch::V4(_) => return "AVX-512".into(),
        pulp::Arch::V3(_) => return "AVX2".into(),
        _ => {}
    }
    std::env::consts::ARCH.into()
}

/// Runs `f` compiled for the machine's vector extensions.
///
/// The closure must be marked `#[inline(always)]`: code that is not inlined here is compiled for
/// the oldest machine.
#[inline(always)]
pub fn simd<R>(f: impl FnOnce() -> R) -> R {
    ARCH.dispatch(f)
}

/// Runs code that is generic over the vector width with the machine's vectors. It must be inlined
/// like that of [`simd`].
#[inline(always)]
pub fn vectors<R>(code: impl pulp::WithSimd<Output = R>) -> R {
    ARCH.dispatch(code)
}
