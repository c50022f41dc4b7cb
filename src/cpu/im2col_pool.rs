//! Sliding windows over images: im2col for convolutions, and pooling. An image is one task.

use std::ops::Range;

use rayon::prelude::*;

use super::Cpu;
use super::math::{LANES, simd};
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{Im2colShape, KernelCost, WindowOps};

/// Returns the elements under a window along one axis at a position: their range in the window, and
/// the index of the first one in the image.
fn seen(w: &Im2colShape, axis: usize, place: usize) -> (Range<usize>, usize) {
    let len = if axis == 0 { w.height } else { w.width };
    let at = place * w.stride[axis];
    let first = w.padding[axis].saturating_sub(at).min(w.size[axis]);
    let last = (len + w.padding[axis]).saturating_sub(at).min(w.size[axis]).max(first);
    (first..last, (at + first).saturating_sub(w.padding[axis]))
}

/// Returns the elements of an image.
fn image(w: &Im2colShape) -> usize {
    w.height * w.width * w.channels
}

/// The part of an image under a window at a position: rows and columns of the window, and the first
/// ones in the image.
#[derive(Clone)]
struct WindowView {
    rows: Range<usize>,
    top: usize,
    columns: Range<usize>,
    left: usize,
}

/// Calls `see` with the part under the window at each position of an image, in order from the
/// position `place` on, until it returns false; returns whether it did.
#[inline(always)]
fn each_place(w: &Im2colShape, place: usize, mut see: impl FnMut(WindowView) -> bool) -> bool {
    let [high, wide] = w.output_size();
    let mut begin = place % wide.max(1);
    for row in place / wide.max(1)..high {
        let (rows, top) = seen(w, 0, row);
        for column in begin..wide {
            let (columns, left) = seen(w, 1, column);
            if !see(WindowView { rows: rows.clone(), top, columns, left }) {
                return true;
            }
        }
        begin = 0;
    }
    false
}

impl WindowView {
    /// Returns whether the window reaches into the padding.
    #[inline(always)]
    fn is_clipped(&self, w: &Im2colShape) -> bool {
        self.rows.len() < w.size[0] || self.columns.len() < w.size[1]
    }

    /// Calls `see` for each contiguous run of the elements under the window of `channels`
    /// neighbouring channels, with the start in the im2col row, the start in the image if the
    /// channels are the first, and the length.
    #[inline(always)]
    fn each_run(&self, w: &Im2colShape, channels: usize, mut see: impl FnMut(usize, usize, usize)) {
        let height = self.rows.len();
        let width = self.columns.len();
        for i in 0..height {
            let to = ((self.rows.start + i) * w.size[1] + self.columns.start) * channels;
            let from = ((self.top + i) * w.width + self.left) * w.channels;
            if channels == w.channels {
                // Neighbouring columns of all channels are contiguous.
                see(to, from, width * channels);
            } else {
                (0..width).for_each(
                    #[inline(always)]
                    |j| see(to + j * channels, from + j * w.channels, channels),
                );
            }
        }
    }

    /// Returns the reciprocal of the number of elements under the window.
    #[inline(always)]
    fn share(&self) -> f32 {
        1.0 / (self.rows.len() * self.columns.len()) as f32
    }

    /// Calls `see` for each element of channel 0 under the window, in order, with the number of
    /// elements before it and its index in the image.
    #[inline(always)]
    fn each_element(&self, w: &Im2colShape, mut see: impl FnMut(u32, usize)) {
        let mut number = 0;
        for i in 0..self.rows.len() {
            for j in 0..self.columns.len() {
                see(number, ((self.top + i) * w.width + self.left + j) * w.channels);
                number += 1;
            }
        }
    }
}

/// Copies a run that may be short.
#[inline(always)]
fn copy(x: &[f32], y: &mut [f32]) {
    if x.len() >= LANES {
        return y.copy_from_slice(x);
    }
    // A call would take longer than copies of constant size.
    let mut at = 0;
    macro_rules! piece {
        ($size:literal) => {
            if x.len() & $size != 0 {
                y[at..at + $size].copy_from_slice(&x[at..at + $size]);
                at += $size;
            }
        };
    }
    piece!(8);
    piece!(4);
    piece!(2);
    piece!(1);
    debug_assert_eq!(at, y.len());
}

/// Computes rows of [`unfold`] for the positions from `place` on; `x` is all images.
pub fn unfold_rows(
    w: &Im2colShape,
    first: usize,
    channels: usize,
    place: usize,
    x: &[f32],
    y: &mut [f32],
) {
    let row = w.size[0] * w.size[1] * channels;
    let mut rows = y.chunks_exact_mut(row);
    let whole = image(w);
    let image_rows = w.rows() / w.batch;
    for image in place / image_rows..w.batch {
        let x = &x[image * whole..][..whole];
        let done = each_place(w, place.saturating_sub(image * image_rows), |view| {
            let Some(y) = rows.next() else { return false };
            if view.is_clipped(w) {
                y.fill(0.0);
            }
            view.each_run(w, channels, |to, from, len| {
                copy(&x[from + first..][..len], &mut y[to..to + len])
            });
            true
        });
        if done {
            break;
        }
    }
}

pub fn unfold(
    threads: &Threads,
    w: Im2colShape,
    first: usize,
    channels: usize,
    x: &[f32],
    y: &mut [f32],
) {
    let row = w.size[0] * w.size[1] * channels;
    let [high, wide] = w.output_size();
    assert!(x.len() == w.elements() && y.len() == w.rows() * row, "{w:?}");
    let images = y.par_chunks_mut(high * wide * row).enumerate();
    threads.each(images, |(image, y)| unfold_rows(&w, first, channels, image * high * wide, x, y));
}

/// Computes rows of [`fold`] for the positions of one image from `place` on.
pub fn fold_rows(
    w: &Im2colShape,
    first: usize,
    channels: usize,
    place: usize,
    dy: &[f32],
    dx: &mut [f32],
) {
    let row = w.size[0] * w.size[1] * channels;
    simd(
        #[inline(always)]
        || {
            let mut rows = dy.chunks_exact(row);
            each_place(
                w,
                place,
                #[inline(always)]
                |view| {
                    let Some(dy) = rows.next() else { return false };
                    view.each_run(
                        w,
                        channels,
                        #[inline(always)]
                        |from, to, len| {
                            for (dx, dy) in
                                dx[to + first..][..len].iter_mut().zip(&dy[from..from + len])
                            {
                                *dx += dy;
                            }
                        },
                    );
                    true
                },
            );
        },
    );
}

pub fn fold(
    threads: &Threads,
    w: Im2colShape,
    first: usize,
    channels: usize,
    dy: &[f32],
    dx: &mut [f32],
) {
    let row = w.size[0] * w.size[1] * channels;
    let [high, wide] = w.output_size();
    assert!(dx.len() == w.elements() && dy.len() == w.rows() * row, "{w:?}");
    let images = dy.par_chunks(high * wide * row).zip(dx.par_chunks_mut(image(&w)));
    threads.each(images, |(dy, dx)| fold_rows(&w, first, channels, 0, dy, dx));
}

/// Returns `N` neighbouring elements from `at` on.
#[inline(always)]
fn neighbours<const N: usize>(x: &[f32], at: usize) -> &[f32; N] {
    x[at..].first_chunk().expect("channels of an element")
}

/// Returns the largest elements under the window, for `N` channels from `first` on. NaN is ignored.
#[inline(always)]
fn largest<const N: usize>(
    w: &Im2colShape,
    view: &WindowView,
    first: usize,
    x: &[f32],
) -> [f32; N] {
    let mut largest = [f32::NEG_INFINITY; N];
    view.each_element(
        w,
        #[inline(always)]
        |_, at| {
            let x = neighbours::<N>(x, at + first);
            for i in 0..N {
                largest[i] = if x[i] > largest[i] { x[i] } else { largest[i] };
            }
        },
    );
    largest
}

pub fn max_pool(threads: &Threads, w: Im2colShape, x: &[f32], y: &mut [f32]) {
    let [high, wide] = w.output_size();
    threads.each(
        x.par_chunks(image(&w)).zip(y.par_chunks_mut(high * wide * w.channels)),
        |(x, y)| {
            simd(
                #[inline(always)]
                || {
                    let mut rows = y.chunks_exact_mut(w.channels);
                    each_place(
                        &w,
                        0,
                        #[inline(always)]
                        |view| {
                            let (blocks, tail) =
                                rows.next().unwrap_or(&mut []).as_chunks_mut::<LANES>();
                            let whole = blocks.len() * LANES;
                            for (i, y) in blocks.iter_mut().enumerate() {
                                *y = largest(&w, &view, i * LANES, x);
                            }
                            for (i, y) in tail.iter_mut().enumerate() {
                                [*y] = largest(&w, &view, whole + i, x);
                            }
                            true
                        },
                    );
                },
            );
        },
    );
}

/// Channels whose largest elements are searched at once.
const CHANNELS: usize = 64;

/// Adds the gradients of up to [`CHANNELS`] channels from `first` on to the first of their largest
/// elements.
#[inline(always)]
fn give(w: &Im2colShape, view: &WindowView, first: usize, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    let mut largest = [0.0; CHANNELS];
    let mut chosen = [0; CHANNELS];
    let largest = &mut largest[..dy.len()];
    let chosen = &mut chosen[..dy.len()];
    view.each_element(
        w,
        #[inline(always)]
        |number, at| {
            let x = &x[at + first..][..dy.len()];
            // The first element wins until there is a larger one, even if it is NaN.
            if number == 0 {
                largest.copy_from_slice(x);
                return;
            }
            for ((largest, chosen), &x) in largest.iter_mut().zip(chosen.iter_mut()).zip(x) {
                *chosen = if x > *largest { number } else { *chosen };
                *largest = if x > *largest { x } else { *largest };
            }
        },
    );
    view.each_element(
        w,
        #[inline(always)]
        |number, at| {
            for ((dx, &chosen), &dy) in
                dx[at + first..][..dy.len()].iter_mut().zip(chosen.iter()).zip(dy)
            {
                *dx += if chosen == number { dy } else { 0.0 };
            }
        },
    );
}

pub fn max_pool_backward(threads: &Threads, w: Im2colShape, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    let [high, wide] = w.output_size();
    let images = x
        .par_chunks(image(&w))
        .zip(dy.par_chunks(high * wide * w.channels))
        .zip(dx.par_chunks_mut(image(&w)));
    threads.each(images, |((x, dy), dx)| {
        simd(
            #[inline(always)]
            || {
                dx.fill(0.0);
                let mut rows = dy.chunks_exact(w.channels);
                each_place(
                    &w,
                    0,
                    #[inline(always)]
                    |view| {
                        let dy = rows.next().unwrap_or(&[]);
                        for (i, dy) in dy.chunks(CHANNELS).enumerate() {
                            give(&w, &view, i * CHANNELS, x, dy, dx);
                        }
                        true
                    },
                );
            },
        );
    });
}

pub fn average_pool(threads: &Threads, w: Im2colShape, x: &[f32], y: &mut [f32]) {
    let [high, wide] = w.output_size();
    threads.each(
        x.par_chunks(image(&w)).zip(y.par_chunks_mut(high * wide * w.channels)),
        |(x, y)| {
            simd(
                #[inline(always)]
                || {
                    let mut rows = y.chunks_exact_mut(w.channels);
                    each_place(
                        &w,
                        0,
                        #[inline(always)]
                        |view| {
                            let y = rows.next().unwrap_or(&mut []);
                            y.fill(0.0);
                            view.each_element(
                                &w,
                                #[inline(always)]
                                |_, at| y.iter_mut().zip(&x[at..]).for_each(|(y, &x)| *y += x),
                            );
                            let factor = view.share();
                            y.iter_mut().for_each(|y| *y *= factor);
                            true
                        },
                    );
                },
            );
        },
    );
}

pub fn average_pool_backward(threads: &Threads, w: Im2colShape, dy: &[f32], dx: &mut [f32]) {
    let [high, wide] = w.output_size();
    threads.each(
        dy.par_chunks(high * wide * w.channels).zip(dx.par_chunks_mut(image(&w))),
        |(dy, dx)| {
            simd(
                #[inline(always)]
                || {
                    dx.fill(0.0);
                    let mut rows = dy.chunks_exact(w.channels);
                    each_place(
                        &w,
                        0,
                        #[inline(always)]
                        |view| {
                            let dy = rows.next().unwrap_or(&[]);
                            let factor = view.share();
                            view.each_element(
                                &w,
                                #[inline(always)]
                                |_, at| {
                                    dx[at..]
                                        .iter_mut()
                                        .zip(dy)
                                        .for_each(|(dx, &dy)| *dx += dy * factor)
                                },
                            );
                            true
                        },
                    );
                },
            );
        },
    );
}

impl WindowOps for Cpu {
    fn unfold(
        &self,
        window: Im2colShape,
        first: usize,
        channels: usize,
        x: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::unfold(window, channels));
        unfold(&self.threads, window, first, channels, x, y);
        Ok(())
    }

    fn fold(
        &self,
        window: Im2colShape,
        first: usize,
        channels: usize,
        dy: &[f32],
        dx: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::fold(window, channels));
        fold(&self.threads, window, first, channels, dy, dx);
        Ok(())
    }

    fn max_pool(&self, window: Im2colShape, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::pool("max pool", window));
        max_pool(&self.threads, window, x, y);
        Ok(())
    }

    fn max_pool_backward(
        &self,
        window: Im2colShape,
        x: &[f32],
        dy: &[f32],
        dx: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::max_pool_backward(window));
        max_pool_backward(&self.threads, window, x, dy, dx);
        Ok(())
    }

    fn average_pool(&self, window: Im2colShape, x: &[f32], y: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::pool("average pool", window));
        average_pool(&self.threads, window, x, y);
        Ok(())
    }

    fn average_pool_backward(&self, window: Im2colShape, dy: &[f32], dx: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::pool("average pool, backward", window));
        average_pool_backward(&self.threads, window, dy, dx);
        Ok(())
    }
}
