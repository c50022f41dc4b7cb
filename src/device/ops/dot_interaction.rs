//! Pairwise dot interactions of feature vectors.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Samples of `rows` × `width` elements, whose rows are multiplied in pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DotInteraction {
    /// The number of samples.
    pub samples: usize,
    /// The number of rows of a sample.
    pub rows: usize,
    /// The number of elements of a row.
    pub width: usize,
}

impl DotInteraction {
    /// Returns the elements of a sample's output: the first row, then a dot product for each pair.
    pub fn outputs(&self) -> usize {
        self.width + self.rows * self.rows.saturating_sub(1) / 2
    }
}

/// Pairwise dot interactions.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait DotInteractionOps: Backend {
    /// Writes the first row of every sample, then the dot products of its rows in pairs: of the
    /// second with the first, of the third with the first and the second, and so on (DLRM, Naumov
    /// et al., 2019); overwrites `y` (samples × [`DotInteraction::outputs`]).
    fn dot_interaction(
        &self,
        shape: DotInteraction,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes the gradient of the rows; overwrites `dx`.
    fn dot_interaction_backward(
        &self,
        shape: DotInteraction,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of a dot interaction.
    pub fn dot_interaction(s: DotInteraction) -> Self {
        let multiplied = (s.samples * (s.outputs() - s.width) * 2 * s.width) as f64;
        let kernel = Self::new("pairs of rows", s.samples * (s.rows * s.width + s.outputs()));
        kernel.with_shape([s.samples, s.rows, s.width]).with_flops(multiplied)
    }

    /// Returns the cost of the gradient of the rows.
    pub fn dot_interaction_backward(s: DotInteraction) -> Self {
        let forward = Self::dot_interaction(s);
        let kernel =
            Self::new("pairs of rows, backward", s.samples * (2 * s.rows * s.width + s.outputs()));
        kernel.with_shape([s.samples, s.rows, s.width]).with_flops(2.0 * forward.flops)
    }
}
