//! Sliding windows over images: im2col (unfold) and pooling.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// A sliding window over images of b × `height` × `width` × `channels`, channels last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Im2colShape {
    /// The number of images.
    pub batch: usize,
    /// The number of rows of an image.
    pub height: usize,
    /// The number of columns of an image.
    pub width: usize,
    /// The number of channels of an image.
    pub channels: usize,
    /// The rows and columns of the window (kernel size).
    pub size: [usize; 2],
    /// The rows and columns from one window position to the next.
    pub stride: [usize; 2],
    /// The rows and columns of padding at each edge; less than the window's.
    pub padding: [usize; 2],
}

impl Im2colShape {
    /// Returns the rows and columns of the output: the window positions of an image.
    pub fn output_size(&self) -> [usize; 2] {
        let along = |axis: usize, len: usize| {
            (len + 2 * self.padding[axis])
                .checked_sub(self.size[axis])
                .map_or(0, |rest| rest / self.stride[axis] + 1)
        };
        [along(0, self.height), along(1, self.width)]
    }

    /// Returns the window positions in all images: the rows of the output.
    pub fn rows(&self) -> usize {
        let [high, wide] = self.output_size();
        self.batch * high * wide
    }

    /// Returns the number of elements of all images.
    pub fn elements(&self) -> usize {
        self.batch * self.height * self.width * self.channels
    }
}

/// Sliding windows over images: im2col (unfold) and pooling.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait WindowOps: Backend {
    /// Writes the im2col matrix of a convolution: for each window position a row of `y` with the
    /// elements under the window of `channels` neighbouring channels from `first` on (window rows ×
    /// window columns × `channels`), zero in the padding; overwrites.
    fn unfold(
        &self,
        window: Im2colShape,
        first: usize,
        channels: usize,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes the backward of [`WindowOps::unfold`] (col2im): adds every element of `dy` to the
    /// one of `dx` that it was copied from.
    fn fold(
        &self,
        window: Im2colShape,
        first: usize,
        channels: usize,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes the largest element under the window at each position, channel by channel;
    /// overwrites.
    fn max_pool(&self, window: Im2colShape, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Routes the gradient of each position to the first of its largest elements; overwrites `dx`.
    fn max_pool_backward(
        &self,
        window: Im2colShape,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Computes the mean of the elements under the window at each position, channel by channel,
    /// padding not counted; overwrites.
    fn average_pool(
        &self,
        window: Im2colShape,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Distributes the gradient of each position over its elements; overwrites `dx`.
    fn average_pool_backward(
        &self,
        window: Im2colShape,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// Returns the cost of an unfold of `channels` channels.
    pub fn unfold(w: Im2colShape, channels: usize) -> Self {
        let seen = w.rows() * w.size[0] * w.size[1] * channels;
        Self::new("unfold", w.elements() / w.channels.max(1) * channels + seen)
            .with_shape([w.rows(), w.size[0] * w.size[1] * channels])
    }

    /// Returns the cost of its gradient, which is added.
    pub fn fold(w: Im2colShape, channels: usize) -> Self {
        let seen = w.rows() * w.size[0] * w.size[1] * channels;
        Self::new("fold", 2 * (w.elements() / w.channels.max(1) * channels) + seen)
            .with_shape([w.rows(), w.size[0] * w.size[1] * channels])
    }

    /// Returns the cost of a pooling of images.
    pub fn pool(kernel: &'static str, w: Im2colShape) -> Self {
        Self::new(kernel, w.elements() + w.rows() * w.channels).with_shape([w.rows(), w.channels])
    }

    /// Returns the cost of the gradient of max pooling.
    pub fn max_pool_backward(w: Im2colShape) -> Self {
        Self::new("max pool, backward", 2 * w.elements() + w.rows() * w.channels)
            .with_shape([w.rows(), w.channels])
    }
}
