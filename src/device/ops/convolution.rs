//! Convolution.

use std::ops::Range;

use crate::kernel_cost::matmul_flops;
use crate::{Im2colShape, KernelCost, Linear, LinearOps, MemoryKind, WindowOps};
use hpctrain_base::error::Result;

/// A 2-D convolution of images, over some neighbouring channels of the input. Filters are stored
/// one after the other, each as window rows × window columns × channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution {
    /// The sliding window over all images.
    pub window: Im2colShape,
    /// The first input channel of the filters.
    pub first_channel: usize,
    /// The number of input channels of the filters.
    pub channels: usize,
    /// The number of output channels.
    pub filters: usize,
}

impl Convolution {
    /// Returns the number of elements of a filter.
    pub fn filter_len(&self) -> usize {
        self.window.size[0] * self.window.size[1] * self.channels
    }

    /// Returns the shape of the equivalent matmul over im2col rows.
    pub fn im2col_matmul(&self) -> Linear {
        Linear::new(self.window.rows(), self.filter_len(), self.filters)
    }
}

/// Convolution.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ConvolutionOps: LinearOps + WindowOps {
    /// Computes the dot product of every filter with the elements under the window at each
    /// position, plus a bias for each filter; overwrites `y` (positions × filters).
    fn convolve(
        &self,
        shape: Convolution,
        x: Self::View<'_>,
        weight: Self::View<'_>,
        bias: Self::View<'_>,
        y: Self::ViewMut<'_>,
    ) -> Result<()> {
        forward(self, shape, x, weight, bias, y)
    }
    /// Adds to the gradients of the filters and the bias.
    fn convolve_backward_weight(
        &self,
        shape: Convolution,
        dy: Self::View<'_>,
        x: Self::View<'_>,
        dweight: Self::ViewMut<'_>,
        dbias: Self::ViewMut<'_>,
    ) -> Result<()> {
        backward_weight(self, shape, dy, x, dweight, dbias)
    }
    /// Adds to the gradient of the input channels of the filters in `dx`.
    fn convolve_backward_input(
        &self,
        shape: Convolution,
        dy: Self::View<'_>,
        weight: Self::View<'_>,
        dx: Self::ViewMut<'_>,
    ) -> Result<()> {
        backward_input(self, shape, dy, weight, dx)
    }
}

impl KernelCost {
    /// Returns the cost of a convolution without im2col buffers.
    pub fn convolve(s: Convolution, bias: usize) -> Self {
        let product = s.im2col_matmul();
        let filters = product.inputs * product.outputs + bias;
        let moved = s.window.elements() / s.window.channels.max(1) * s.channels
            + product.rows * product.outputs;
        Self::new("convolution", moved + filters)
            .with_shape([product.rows, product.inputs, product.outputs])
            .with_flops(matmul_flops(product.rows, product.inputs, product.outputs))
    }

    /// Returns the cost of the gradients of its filters and bias.
    pub fn convolve_backward_weight(s: Convolution, bias: usize) -> Self {
        let forward = Self::convolve(s, 0);
        let filters = s.filter_len() * s.filters;
        let kernel = Self { kernel: "convolution, weight's gradient", ..forward };
        Self { elements: forward.elements - filters as f64, ..kernel }
            .with_f32_elements(2 * (filters + bias))
    }

    /// Returns the cost of the gradient of its input, which is added.
    pub fn convolve_backward_input(s: Convolution) -> Self {
        let forward = Self::convolve(s, 0);
        let seen = s.window.elements() / s.window.channels.max(1) * s.channels;
        Self {
            kernel: "convolution, input's gradient",
            elements: forward.elements + seen as f64,
            ..forward
        }
    }
}

/// The largest im2col buffer in elements, unless one image needs more.
const UNFOLDED: usize = 1 << 22;

/// A chunk of the images, their elements of input and output, and their matmul.
struct ImageChunk {
    window: Im2colShape,
    inputs: Range<usize>,
    outputs: Range<usize>,
    product: Linear,
}

/// Splits the images of a convolution into chunks.
fn parts(s: Convolution) -> impl Iterator<Item = ImageChunk> {
    let one = Convolution { window: Im2colShape { batch: 1, ..s.window }, ..s };
    let image_inputs = one.window.elements();
    let image_outputs = one.window.rows() * s.filters;
    let most = (UNFOLDED / (one.window.rows() * s.filter_len()).max(1)).max(1);
    (0..s.window.batch).step_by(most).map(move |first| {
        let last = s.window.batch.min(first + most);
        let window = Im2colShape { batch: last - first, ..s.window };
        ImageChunk {
            window,
            inputs: first * image_inputs..last * image_inputs,
            outputs: first * image_outputs..last * image_outputs,
            product: Convolution { window, ..s }.im2col_matmul(),
        }
    })
}

/// Returns a part of a window of memory.
fn part<B: ConvolutionOps>(view: B::View<'_>, range: Range<usize>) -> B::View<'_> {
    B::split_at(B::split_at(view, range.start).1, range.len()).0
}

/// Returns the patches of a chunk's images, one per row (im2col).
fn unfold_chunk<B: ConvolutionOps>(
    b: &B,
    s: Convolution,
    x: B::View<'_>,
    chunk: &ImageChunk,
) -> Result<B::Buf> {
    let product = chunk.product;
    let mut unfolded = b.alloc(MemoryKind::Activations, product.rows * product.inputs)?;
    let images = part::<B>(x, chunk.inputs.clone());
    b.unfold(chunk.window, s.first_channel, s.channels, images, B::all_mut(&mut unfolded))?;
    Ok(unfolded)
}

/// Returns a part of an exclusive window of memory.
fn part_mut<'a, B: ConvolutionOps>(
    view: &'a mut B::ViewMut<'_>,
    range: Range<usize>,
) -> B::ViewMut<'a> {
    B::split_at_mut(B::split_at_mut(B::reborrow(view), range.start).1, range.len()).0
}

/// Computes [`ConvolutionOps::convolve`] by im2col and matmul.
pub fn forward<B: ConvolutionOps>(
    b: &B,
    s: Convolution,
    x: B::View<'_>,
    weight: B::View<'_>,
    bias: B::View<'_>,
    mut y: B::ViewMut<'_>,
) -> Result<()> {
    for chunk in parts(s) {
        let unfolded = unfold_chunk(b, s, x, &chunk)?;
        let ImageChunk { outputs, product, .. } = chunk;
        b.linear(product, B::all(&unfolded), weight, bias, part_mut::<B>(&mut y, outputs))?;
    }
    Ok(())
}

/// Computes [`ConvolutionOps::convolve_backward_weight`] by im2col and matmul.
pub fn backward_weight<B: ConvolutionOps>(
    b: &B,
    s: Convolution,
    dy: B::View<'_>,
    x: B::View<'_>,
    mut dweight: B::ViewMut<'_>,
    mut dbias: B::ViewMut<'_>,
) -> Result<()> {
    for chunk in parts(s) {
        let unfolded = unfold_chunk(b, s, x, &chunk)?;
        let ImageChunk { outputs, product, .. } = chunk;
        let dweight = B::reborrow(&mut dweight);
        let dbias = B::reborrow(&mut dbias);
        b.linear_backward_weight(
            product,
            part::<B>(dy, outputs),
            B::all(&unfolded),
            dweight,
            dbias,
            true,
        )?;
    }
    Ok(())
}

/// Computes [`ConvolutionOps::convolve_backward_input`] by matmul and col2im.
pub fn backward_input<B: ConvolutionOps>(
    b: &B,
    s: Convolution,
    dy: B::View<'_>,
    weight: B::View<'_>,
    mut dx: B::ViewMut<'_>,
) -> Result<()> {
    for ImageChunk { window, inputs, outputs, product } in parts(s) {
        let mut unfolded = b.alloc(MemoryKind::Activations, product.rows * product.inputs)?;
        b.linear_backward_input(
            product,
            part::<B>(dy, outputs),
            weight,
            B::all_mut(&mut unfolded),
        )?;
        b.fold(
            window,
            s.first_channel,
            s.channels,
            B::all(&unfolded),
            part_mut::<B>(&mut dx, inputs),
        )?;
    }
    Ok(())
}
