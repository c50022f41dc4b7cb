//! Products of rows in pairs.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Samples of `rows` × `width` elements, whose rows are multiplied in pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DotInteraction {
    /// Samples.
    pub samples: usize,
    /// Rows of a sample.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

impl DotInteraction {
    /// Elements of a sample's output: the first row, then a product for each pair.
    pub fn outputs(&self) -> usize {
        self.width + self.rows * self.rows.saturating_sub(1) / 2
    }
}

/// Products of rows in pairs.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait PairsOps: Backend {
    /// The first row of every sample, then the scalar products of its rows in pairs: of the second
    /// with the first, of the third with the first and the second, and so on (Naumov et al., 2019);
    /// overwrites `y` (samples × [`DotInteraction::outputs`]).
    fn pair_products(
        &self,
        shape: DotInteraction,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Overwrites `dx`.
    fn pair_products_backward(
        &self,
        shape: DotInteraction,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Products of rows in pairs.
    pub fn pair_products(s: DotInteraction) -> Self {
        let multiplied = (s.samples * (s.outputs() - s.width) * 2 * s.width) as f64;
        let kernel = Self::moves("pairs of rows", s.samples * (s.rows * s.width + s.outputs()));
        kernel.on([s.samples, s.rows, s.width]).computes(multiplied)
    }

    /// The gradient of the rows.
    pub fn pair_products_backward(s: DotInteraction) -> Self {
        let forward = Self::pair_products(s);
        let kernel = Self::moves(
            "pairs of rows, backward",
            s.samples * (2 * s.rows * s.width + s.outputs()),
        );
        kernel.on([s.samples, s.rows, s.width]).computes(2.0 * forward.flops)
    }
}
