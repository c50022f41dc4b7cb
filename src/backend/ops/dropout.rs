//! Dropout.

use crate::backend::{Backend, Work};
use crate::error::Result;

/// Source of a dropout mask: a counter, never a state.
///
/// Element `i` of the window is kept or dropped by a hash of (`key`, `offset + i`), so the mask is the
/// same in a recomputation and on any number of ranks.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// Chance to drop an element; kept ones are scaled by `1 / (1 - rate)`.
    pub rate: f32,
    /// Names the stream: run seed, step and layer.
    pub key: u64,
    /// Index of the window's first element in the global batch.
    pub offset: u64,
}

/// Dropout.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait DropoutOps: Backend {
    /// Drops and scales in place; the backward is the same call on the gradient.
    fn dropout(&self, mask: Dropout, x: Self::ViewMut<'_>) -> Result<()>;
}

impl Work {
    /// A mask in place.
    pub fn dropout(len: usize) -> Self {
        Self::moves("dropout", 2 * len).on([len])
    }
}

/// Every kernel against f64 arithmetic, on any device.
#[cfg(test)]
pub(in crate::backend) mod suite {
    use super::*;
    use crate::backend::Kernels;
    use crate::backend::suite::{Results, down, random, rounded, up};

    pub fn dropouts<B: Kernels>(b: &B) -> Results {
        let len = 40_000;
        let mask = |offset| Dropout { rate: 0.25, key: 9, offset };
        let mut whole = up(b, &vec![1.0; len]);
        b.dropout(mask(0), B::all_mut(&mut whole)).unwrap();
        let whole = down(b, &whole);
        let kept = whole.iter().filter(|&&x| x != 0.0).count() as f64 / len as f64;
        assert!((kept - 0.75).abs() < 0.01, "kept {kept}");
        let factor = rounded(b, &[1.0 / 0.75])[0];
        assert!(whole.iter().all(|&x| x == 0.0 || x == factor));
        // Any window sees its part of the same mask.
        for (start, end) in [(0, 1), (1, 2), (2, 20_001), (16_383, 16_390), (5, 5), (39_999, 40_000)] {
            let mut part = up(b, &vec![1.0; end - start]);
            b.dropout(mask(start as u64), B::all_mut(&mut part)).unwrap();
            assert_eq!(down(b, &part), whole[start..end], "{start}..{end}");
        }
        let mut other = up(b, &vec![1.0; len]);
        b.dropout(Dropout { key: 10, ..mask(0) }, B::all_mut(&mut other)).unwrap();
        assert_ne!(down(b, &other), whole);
        let mut none = up(b, &random(b, 35, 100));
        b.dropout(Dropout { rate: 0.0, ..mask(0) }, B::all_mut(&mut none)).unwrap();
        assert_eq!(down(b, &none), random(b, 35, 100));
        vec![whole]
    }
}
