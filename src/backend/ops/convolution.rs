//! Convolution.

use std::ops::Range;

use crate::backend::work::flops;
use crate::backend::{Linear, LinearOps, MemoryKind, Window, WindowOps, Work};
use crate::error::Result;

/// A convolution of images: filters on the elements that a window sees of some neighbouring channels. Filters are
/// stored one after the other, each as window rows × window columns × channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution {
    /// On all images.
    pub window: Window,
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
    /// Every filter's product with the elements that the window sees at each place, and a bias for each filter;
    /// overwrites `y` (places × filters).
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

impl Work {
    /// A convolution that unfolds nothing in memory.
    pub fn convolve(s: Convolution, bias: usize) -> Self {
        let product = s.product();
        let filters = product.inputs * product.outputs + bias;
        let moved = s.window.elements() / s.window.channels.max(1) * s.channels + product.rows * product.outputs;
        Self::moves("convolution", moved + filters).on([product.rows, product.inputs, product.outputs]).computes(flops(
            product.rows,
            product.inputs,
            product.outputs,
        ))
    }

    /// The gradients of its filters and bias.
    pub fn convolve_backward_weight(s: Convolution, bias: usize) -> Self {
        let (forward, filters) = (Self::convolve(s, 0), s.seen() * s.filters);
        let kernel = Self { kernel: "convolution, weight's gradient", ..forward };
        Self { elements: forward.elements - filters as f64, ..kernel }.exactly(2 * (filters + bias))
    }

    /// The gradient of its input, added.
    pub fn convolve_backward_input(s: Convolution) -> Self {
        let forward = Self::convolve(s, 0);
        let seen = s.window.elements() / s.window.channels.max(1) * s.channels;
        Self { kernel: "convolution, input's gradient", elements: forward.elements + seen as f64, ..forward }
    }
}

/// Elements of the unfolded windows that are held at a time, unless one image has more.
const UNFOLDED: usize = 1 << 22;

/// So many images, their elements of input and output, and their product.
struct Part {
    window: Window,
    inputs: Range<usize>,
    outputs: Range<usize>,
    product: Linear,
}

/// The images of a convolution, some at a time.
fn parts(s: Convolution) -> impl Iterator<Item = Part> {
    let one = Convolution { window: Window { batch: 1, ..s.window }, ..s };
    let (of_image, of_places) = (one.window.elements(), one.window.rows() * s.filters);
    let most = (UNFOLDED / (one.window.rows() * s.seen()).max(1)).max(1);
    (0..s.window.batch).step_by(most).map(move |first| {
        let last = s.window.batch.min(first + most);
        let window = Window { batch: last - first, ..s.window };
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
    B::cut(B::cut(view, range.start).1, range.len()).0
}

/// As [`part`], exclusively.
fn part_mut<'a, B: ConvolutionOps>(view: &'a mut B::ViewMut<'_>, range: Range<usize>) -> B::ViewMut<'a> {
    B::cut_mut(B::cut_mut(B::reborrow(view), range.start).1, range.len()).0
}

/// [`ConvolutionOps::convolve`].
pub(in crate::backend) fn forward<B: ConvolutionOps>(
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
pub(in crate::backend) fn backward_weight<B: ConvolutionOps>(
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
        let (dweight, dbias) = (B::reborrow(&mut dweight), B::reborrow(&mut dbias));
        b.linear_backward_weight(product, part::<B>(dy, outputs), B::all(&unfolded), dweight, dbias, true)?;
    }
    Ok(())
}

/// [`ConvolutionOps::convolve_backward_input`].
pub(in crate::backend) fn backward_input<B: ConvolutionOps>(
    b: &B,
    s: Convolution,
    dy: B::View<'_>,
    weight: B::View<'_>,
    mut dx: B::ViewMut<'_>,
) -> Result<()> {
    for Part { window, inputs, outputs, product } in parts(s) {
        let mut unfolded = b.alloc(MemoryKind::Activations, product.rows * product.inputs)?;
        b.linear_backward_input(product, part::<B>(dy, outputs), weight, B::all_mut(&mut unfolded))?;
        b.fold(window, s.first, s.channels, B::all(&unfolded), part_mut::<B>(&mut dx, inputs))?;
    }
    Ok(())
}

/// Every kernel against f64 arithmetic, on any device.
#[cfg(test)]
pub(in crate::backend) mod suite {
    use super::*;
    use crate::backend::Kernels;
    use crate::backend::ops::window::suite::each_seen;
    use crate::backend::suite::{Results, close, down, up, up_f32, wide};

    /// `random` draws operands of products.
    pub fn convolutions<B: Kernels>(b: &B, random: fn(&B, u64, usize) -> Vec<f32>) -> Results {
        let mut results = Vec::new();
        for (batch, [height, width, all], size, stride, padding, [first, channels, filters]) in [
            (1, [1, 1, 1], [1, 1], [1, 1], [0, 0], [0, 1, 1]),
            (2, [5, 7, 3], [3, 3], [1, 1], [1, 1], [0, 3, 17]),
            (3, [9, 8, 5], [3, 2], [2, 3], [1, 0], [2, 3, 4]),
            // Several tiles an image, and parts of the gradient of the filters.
            (2, [40, 41, 1], [3, 3], [1, 1], [0, 0], [0, 1, 3]),
            (5, [12, 12, 16], [5, 3], [1, 1], [2, 1], [0, 16, 8]),
            // More filters than tiles are worth it for.
            (1, [4, 3, 128], [3, 3], [1, 1], [1, 1], [0, 128, 60]),
        ] {
            let window = Window { batch, height, width, channels: all, size, stride, padding };
            let s = Convolution { window, first, channels, filters };
            let (rows, seen) = (window.rows(), s.seen());
            let (x, weight, bias) =
                (random(b, 70, window.elements()), random(b, 71, filters * seen), random(b, 72, filters));
            let (dy, dx) = (random(b, 73, rows * filters), random(b, 74, window.elements()));
            let mut want_y: Vec<f64> = (0..rows).flat_map(|_| wide(&bias)).collect();
            let (mut want_dw, mut want_db, mut want_dx) = (vec![0.0; filters * seen], vec![0.0; filters], wide(&dx));
            for channel in 0..channels {
                each_seen(window, first + channel, |place, [i, j], element| {
                    let Some(element) = element else { return };
                    for filter in 0..filters {
                        let at = filter * seen + (i * size[1] + j) * channels + channel;
                        let (y, w, x) = (place * filters + filter, f64::from(weight[at]), f64::from(x[element]));
                        want_y[y] += w * x;
                        want_dw[at] += f64::from(dy[y]) * x;
                        want_dx[element] += f64::from(dy[y]) * w;
                    }
                });
            }
            (0..rows * filters).for_each(|i| want_db[i % filters] += f64::from(dy[i]));
            let [xb, wb, bb, dyb, mut dxb] = [&x, &weight, &bias, &dy, &dx].map(|values| up(b, values));
            let mut y = up(b, &vec![0.0; rows * filters]);
            b.convolve(s, B::all(&xb), B::all(&wb), B::all(&bb), B::all_mut(&mut y)).unwrap();
            close(b, &y, &want_y, "convolution");
            let (mut dw, mut db) = (up_f32(b, &vec![0.0; filters * seen]), up_f32(b, &vec![0.0; filters]));
            let (to_weight, to_bias) = (B::all_mut(&mut dw), B::all_mut(&mut db));
            b.convolve_backward_weight(s, B::all(&dyb), B::all(&xb), to_weight, to_bias).unwrap();
            close(b, &dw, &want_dw, "convolution, weight's gradient");
            close(b, &db, &want_db, "convolution, bias's gradient");
            b.convolve_backward_input(s, B::all(&dyb), B::all(&wb), B::all_mut(&mut dxb)).unwrap();
            close(b, &dxb, &want_dx, "convolution, input's gradient");
            results.extend([down(b, &y), down(b, &dw), down(b, &db), down(b, &dxb)]);
        }
        results
    }
}
