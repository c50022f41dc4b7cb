//! Batch and group normalisation of channels, and its statistics.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// The shape of a normalisation of channels: samples of `places` × `channels` elements, channels
/// last, normalised over all places of a sample in groups of neighbouring channels. Batch
/// normalisation passes a whole batch as one sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelNormShape {
    /// The number of samples.
    pub samples: usize,
    /// The number of spatial positions of a sample: pixels of an image.
    pub places: usize,
    /// The number of channels.
    pub channels: usize,
    /// The number of groups of channels, a divisor of `channels`.
    pub groups: usize,
}

impl ChannelNormShape {
    /// Returns the number of elements of all samples.
    pub fn elements(&self) -> usize {
        self.samples * self.places * self.channels
    }

    /// Returns the number of channels of a group.
    pub fn channels_per_group(&self) -> usize {
        self.channels / self.groups
    }
}

/// Normalisation of channels, and its statistics.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ChannelOps: Backend {
    /// Computes the sums over the positions of every sample for its statistics, in f32 and in
    /// chunks that depend on the shape alone: for each sample the channels `s` of the first
    /// position, then Σ (x - s), then Σ (x - s)² of every channel; overwrites.
    fn channel_moments(
        &self,
        shape: ChannelNormShape,
        x: Self::View<'_>,
        moments: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes `y = (x - mean)·rstd·weight + bias`, where `stats` (f32) has mean and rstd of every
    /// group of every sample, and weight and bias are per channel; overwrites.
    fn channel_norm(
        &self,
        shape: ChannelNormShape,
        x: Self::View<'_>,
        stats: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes the sums for the backward, in chunks as [`ChannelOps::channel_moments`]: for each
    /// sample Σ dy, then Σ dy·(x - mean)·rstd of every channel; overwrites.
    fn channel_norm_sums(
        &self,
        shape: ChannelNormShape,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        stats: Self::View<'_>,
        sums: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes `dx = rstd·(dy·weight - a - (x - mean)·rstd·b)`, where `means` (f32) has a and b of
    /// every group of every sample: the means of dy·weight and of dy·weight·(x - mean)·rstd;
    /// overwrites.
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
    /// Returns the cost of the sums of channels for their statistics or for a gradient, which read
    /// `reads` arrays.
    pub fn channel_sums(kernel: &'static str, s: ChannelNormShape, reads: usize) -> Self {
        Self::new(kernel, reads * s.elements())
            .with_shape([s.samples, s.places, s.channels])
            .with_f32_elements(3 * s.samples * s.channels)
    }

    /// Returns the cost of a normalisation of channels or its gradient, which reads or writes
    /// `arrays` arrays.
    pub fn channel_norm(kernel: &'static str, s: ChannelNormShape, arrays: usize) -> Self {
        let stats = 2 * s.samples * s.groups;
        Self::new(kernel, arrays * s.elements() + 2 * s.channels)
            .with_shape([s.samples, s.places, s.channels])
            .with_f32_elements(stats)
    }
}
