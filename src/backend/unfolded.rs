//! Convolution on devices that have no kernel of their own for it: the elements that the window sees are unfolded, some
//! images at a time, and multiplied (im2col).

use std::ops::Range;

use super::{Convolution, Kernels, Linear, MemoryKind, Window};
use crate::error::Result;

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
fn part<B: Kernels>(view: B::View<'_>, range: Range<usize>) -> B::View<'_> {
    B::cut(B::cut(view, range.start).1, range.len()).0
}

/// As [`part`], exclusively.
fn part_mut<'a, B: Kernels>(view: &'a mut B::ViewMut<'_>, range: Range<usize>) -> B::ViewMut<'a> {
    B::cut_mut(B::cut_mut(B::reborrow(view), range.start).1, range.len()).0
}

/// [`Kernels::convolve`].
pub fn forward<B: Kernels>(
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

/// [`Kernels::convolve_backward_weight`].
pub fn backward_weight<B: Kernels>(
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

/// [`Kernels::convolve_backward_input`].
pub fn backward_input<B: Kernels>(
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
