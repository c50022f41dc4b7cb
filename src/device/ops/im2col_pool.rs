//! Windows that move over images: unfolding and pooling.

use crate::{Backend, KernelCost};
use hpctrain_base::error::Result;

/// A window that moves over images: b × `height` × `width` × `channels`, channels last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Im2colShape {
    /// Images.
    pub batch: usize,
    /// Rows of an image.
    pub height: usize,
    /// Columns of an image.
    pub width: usize,
    /// Channels of an image.
    pub channels: usize,
    /// Rows and columns of the window.
    pub size: [usize; 2],
    /// Rows and columns from one place to the next.
    pub stride: [usize; 2],
    /// Rows and columns beyond each edge where the window begins; less than its size.
    pub padding: [usize; 2],
}

impl Im2colShape {
    /// Rows and columns of places.
    pub fn places(&self) -> [usize; 2] {
        let along = |axis: usize, len: usize| {
            (len + 2 * self.padding[axis])
                .checked_sub(self.size[axis])
                .map_or(0, |rest| rest / self.stride[axis] + 1)
        };
        [along(0, self.height), along(1, self.width)]
    }

    /// Places in all images: rows of the output.
    pub fn rows(&self) -> usize {
        let [high, wide] = self.places();
        self.batch * high * wide
    }

    /// Elements of all images.
    pub fn elements(&self) -> usize {
        self.batch * self.height * self.width * self.channels
    }
}

/// Windows that move over images: unfolding and pooling.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait WindowOps: Backend {
    /// The operand of a convolution's product: for each place of the window a row of `y` with the
    /// elements that it sees of `channels` neighbouring channels from `first` on (window rows ×
    /// window columns × `channels`), zero beyond the edges; overwrites.
    fn unfold(
        &self,
        window: Im2colShape,
        first: usize,
        channels: usize,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// The backward of [`WindowOps::unfold`]: adds every element of `dy` to the one of `dx` that it
    /// was copied from.
    fn fold(
        &self,
        window: Im2colShape,
        first: usize,
        channels: usize,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// The largest element that the window sees at each place, channel by channel; overwrites.
    fn max_pool(&self, window: Im2colShape, x: Self::View<'_>, y: Self::ViewMut<'_>) -> Result<()>;
    /// Gives the gradient of each place to the first of its largest elements; overwrites `dx`.
    fn max_pool_backward(
        &self,
        window: Im2colShape,
        x: Self::View<'_>,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// The mean of the elements that the window sees at each place, channel by channel, edges not
    /// counted; overwrites.
    fn average_pool(
        &self,
        window: Im2colShape,
        x: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()>;
    /// Overwrites `dx`.
    fn average_pool_backward(
        &self,
        window: Im2colShape,
        dy: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()>;
}

impl KernelCost {
    /// The unfolding of windows over so many channels.
    pub fn unfold(w: Im2colShape, channels: usize) -> Self {
        let seen = w.rows() * w.size[0] * w.size[1] * channels;
        Self::moves("unfold", w.elements() / w.channels.max(1) * channels + seen)
            .on([w.rows(), w.size[0] * w.size[1] * channels])
    }

    /// Its gradient, added.
    pub fn fold(w: Im2colShape, channels: usize) -> Self {
        let seen = w.rows() * w.size[0] * w.size[1] * channels;
        Self::moves("fold", 2 * (w.elements() / w.channels.max(1) * channels) + seen)
            .on([w.rows(), w.size[0] * w.size[1] * channels])
    }

    /// A pooling of images.
    pub fn pool(kernel: &'static str, w: Im2colShape) -> Self {
        Self::moves(kernel, w.elements() + w.rows() * w.channels).on([w.rows(), w.channels])
    }

    /// The gradient of the largest.
    pub fn max_pool_backward(w: Im2colShape) -> Self {
        Self::moves("max pool, backward", 2 * w.elements() + w.rows() * w.channels)
            .on([w.rows(), w.channels])
    }
}
