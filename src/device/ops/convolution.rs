//! Convolution.

use std::ops::Range;

use crate::kernel_cost::flops;
use crate::{Im2colShape, KernelCost, Linear, LinearOps, MemoryKind, WindowOps};
use hpctrain_base::error::Result;

/// A convolution of images: filters on the elements that a window sees of some neighbouring
/// channels. Filters are stored one after the other, each as window rows × window columns ×
/// channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution {
    /// On all images.
    pub window: Im2colShape,
    /// The first channel that filters see.
    pub first: usize,
    /// Channels that filters see.
    pub channels: usize,
    /// Channels of the output.
    pub filters: usize,
}

impl Convolution {
    /// Elements that a filter sees.
    pub fn seen(&self) -> usize {
        self.window.size[0] * self.window.size[1] * self.channels
    }

    /// The product that it is of unfolded windows.
    pub fn product(&self) -> Linear {
        Linear::new(self.window.rows(), self.seen(), self.filters)
    }
}

/// Convolution.
///
/// [`Kernels`](super::Kernels) has the rules common to all.
pub trait ConvolutionOps: LinearOps + WindowOps {
    /// Every filter's product with the elements that the window sees at each place, and a bias for
    /// each filter; overwrites `y` (places × filters).
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
    /// Adds to the gradients of filters and bias.
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
    /// Adds to the channels of `dx` that filters see.
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
    /// A convolution that unfolds nothing in memory.
    pub fn convolve(s: Convolution, bias: usize) -> Self {
        let product = s.product();
        let filters = product.inputs * product.outputs + bias;
        let moved = s.window.elements() / s.window.channels.max(1) * s.channels
            + product.rows * product.outputs;
        Self::moves("convolution", moved + filters)
            .on([product.rows, product.inputs, product.outputs])
            .computes(flops(product.rows, product.inputs, product.outputs))
    }

    /// The gradients of its filters and bias.
    pub fn convolve_backward_weight(s: Convolution, bias: usize) -> Self {
        let forward = Self::convolve(s, 0);
        let filters = s.seen() * s.filters;
        let kernel = Self { kernel: "convolution, weight's gradient", ..forward };
        Self { elements: forward.elements - filters as f64, ..kernel }.exactly(2 * (filters + bias))
    }

    /// The gradient of its input, added.
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

/// Elements of the unfolded windows that are held at a time, unless one image has more.
const UNFOLDED: usize = 1 << 22;

/// So many images, their elements of input and output, and their product.
struct Part {
    window: Im2colShape,
    inputs: Range<usize>,
    outputs: Range<usize>,
    product: Linear,
}

/// The images of a convolution, some at a time.
fn parts(s: Convolution) -> impl Iterator<Item = Part> {
    let one = Convolution { window: Im2colShape { batch: 1, ..s.window }, ..s };
    let of_image = one.window.elements();
    let of_places = one.window.rows() * s.filters;
    let most = (UNFOLDED / (one.window.rows() * s.seen()).max(1)).max(1);
    (0..s.window.batch).step_by(most).map(move |first| {
        let last = s.window.batch.min(first + most);
        let window = Im2colShape { batch: last - first, ..s.window };
        Part {
            window,
            inputs: first * of_image..last * of_image,
            outputs: first * of_places..last * of_places,
            product: Convolution { window, ..s }.product(),
        }
    })
}

/// The part of a window of memory.
fn part<B: ConvolutionOps>(view: B::View<'_>, range: Range<usize>) -> B::View<'_> {
    B::split_at(B::split_at(view, range.start).1, range.len()).0
}

/// As [`part`], exclusively.
fn part_mut<'a, B: ConvolutionOps>(
    view: &'a mut B::ViewMut<'_>,
    range: Range<usize>,
) -> B::ViewMut<'a> {
    B::cut_mut(B::cut_mut(B::reborrow(view), range.start).1, range.len()).0
}

/// [`ConvolutionOps::convolve`].
pub fn forward<B: ConvolutionOps>(
    b: &B,
    s: Convolution,
    x: B::View<'_>,
    weight: B::View<'_>,
    bias: B::View<'_>,
    mut y: B::ViewMut<'_>,
) -> Result<()> {
    for Part { window, inputs, outputs, product } in parts(s) {
        let mut unfolded = b.alloc(MemoryKind::Activations, product.rows * product.inputs)?;
        b.unfold(window, s.first, s.channels, part::<B>(x, inputs), B::all_mut(&mut unfolded))?;
        b.linear(product, B::all(&unfolded), weight, bias, part_mut::<B>(&mut y, outputs))?;
    }
    Ok(())
}

/// [`ConvolutionOps::convolve_backward_weight`].
pub fn backward_weight<B: ConvolutionOps>(
    b: &B,
    s: Convolution,
    dy: B::View<'_>,
    x: B::View<'_>,
    mut dweight: B::ViewMut<'_>,
    mut dbias: B::ViewMut<'_>,
) -> Result<()> {
    for Part { window, inputs, outputs, product } in parts(s) {
        let mut unfolded = b.alloc(MemoryKind::Activations, product.rows * product.inputs)?;
        b.unfold(window, s.first, s.channels, part::<B>(x, inputs), B::all_mut(&mut unfolded))?;
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

/// [`ConvolutionOps::convolve_backward_input`].
pub fn backward_input<B: ConvolutionOps>(
    b: &B,
    s: Convolution,
    dy: B::View<'_>,
    weight: B::View<'_>,
    mut dx: B::ViewMut<'_>,
) -> Result<()> {
    for Part { window, inputs, outputs, product } in parts(s) {
        let mut unfolded = b.alloc(MemoryKind::Activations, product.rows * product.inputs)?;
        b.linear_backward_input(
            product,
            part::<B>(dy, outputs),
            weight,
            B::all_mut(&mut unfolded),
        )?;
        b.fold(window, s.first, s.channels, B::all(&unfolded), part_mut::<B>(&mut dx, inputs))?;
    }
    Ok(())
}
