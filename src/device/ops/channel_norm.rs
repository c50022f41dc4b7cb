//! Statistics of channels and normalisation by them.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// Samples of `places` × `channels` elements, channels last, whose channels are normalised in
/// groups of neighbours: over all places of a sample. A whole batch may count as one sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelNormShape {
    /// Samples.
    pub samples: usize,
    /// Places of a sample: pixels of an image.
    pub places: usize,
    /// Channels of a place.
    pub channels: usize,
    /// Groups of channels, a divisor of `channels`.
    pub groups: usize,
}

impl ChannelNormShape {
    /// Elements of all samples.
    pub fn elements(&self) -> usize {
        self.samples * self.places * self.channels
    }

    /// Channels of one group.
    pub fn of_group(&self) -> usize {
        self.channels / self.groups
    }
}

/// Statistics of channels and normalisation by them.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ChannelOps: Backend {
    /// Sums over the places of every sample for its statistics, in f32 and in chunks that depend on
    /// the shape alone: for each sample the first place's channels `s`, then Σ (x - s), then Σ (x -
    /// s)² of every channel; overwrites.
    fn channel_moments(
        &self,
        shape: ChannelNormShape,
        x: Self::View<'_>,
        moments: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// `y = (x - mean)·rstd·weight + bias`, where `stats` (f32) has mean and rstd of every group of
    /// every sample, weight and bias are of a channel; overwrites.
    fn channel_norm(
        &self,
        shape: ChannelNormShape,
        x: Self::View<'_>,
        stats: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Sums for the backward, as [`ChannelOps::channel_moments`] has them: for each sample Σ dy,
    /// then Σ dy·(x - mean)·rstd of every channel; overwrites.
    fn channel_norm_sums(
        &self,
        shape: ChannelNormShape,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        stats: Self::View<'_>,
        sums: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// `dx = rstd·(dy·weight - a - (x - mean)·rstd·b)`, where `means` (f32) has a and b of every
    /// group of every sample: the means of dy·weight and of dy·weight·(x - mean)·rstd; overwrites.
    #[expect(clippy::too_many_arguments, reason = "one argument for each tensor of the operation")]
    fn channel_norm_backward(
        &self,
        shape: ChannelNormShape,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        stats: Self::View<'_>,
        weight: Self::View<'_>,
        means: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Sums of channels over places for their statistics, or for a gradient's: `reads` arrays are
    /// read.
    pub fn channel_sums(kernel: &'static str, s: ChannelNormShape, reads: usize) -> Self {
        Self::moves(kernel, reads * s.elements())
            .on([s.samples, s.places, s.channels])
            .exactly(3 * s.samples * s.channels)
    }

    /// A normalisation of channels, or its gradient: `arrays` are read or written.
    pub fn channel_norm(kernel: &'static str, s: ChannelNormShape, arrays: usize) -> Self {
        let stats = 2 * s.samples * s.groups;
        Self::moves(kernel, arrays * s.elements() + 2 * s.channels)
            .on([s.samples, s.places, s.channels])
            .exactly(stats)
    }
}
