//! Windows that move over images: what convolutions multiply, and pooling. An image is one task.

use std::ops::Range;

use super::math::simd;
use super::threads::Threads;
use crate::backend::Window;

/// What a window sees along one axis at a place: its own elements, and the first of the image's.
fn seen(w: &Window, axis: usize, place: usize) -> (Range<usize>, usize) {
    let len = if axis == 0 { w.height } else { w.width };
    let at = place * w.stride[axis];
    let first = w.padding[axis].saturating_sub(at).min(w.size[axis]);
    let last = (len + w.padding[axis]).saturating_sub(at).min(w.size[axis]).max(first);
    (first..last, (at + first).saturating_sub(w.padding[axis]))
}

/// Elements of an image.
fn image(w: &Window) -> usize {
    w.height * w.width * w.channels
}

/// Places of an image, in order.
fn places(w: &Window) -> impl Iterator<Item = [usize; 2]> {
    let [high, wide] = w.places();
    (0..high).flat_map(move |row| (0..wide).map(move |column| [row, column]))
}

pub fn unfold(threads: &Threads, w: Window, first: usize, channels: usize, x: &[f32], y: &mut [f32]) {
    let row = w.size[0] * w.size[1] * channels;
    let [high, wide] = w.places();
    assert!(x.len() == w.elements() && y.len() == w.rows() * row, "{w:?}");
    threads.each(x.chunks(image(&w)).zip(y.chunks_mut(high * wide * row)), |(x, y)| {
        for ([high, wide], y) in places(&w).zip(y.chunks_exact_mut(row)) {
            let ((rows, top), (columns, left)) = (seen(&w, 0, high), seen(&w, 1, wide));
            if rows.len() < w.size[0] || columns.len() < w.size[1] {
                y.fill(0.0);
            }
            for (i, from) in rows.zip(top..) {
                for (j, at) in columns.clone().zip(left..) {
                    let x = &x[(from * w.width + at) * w.channels + first..][..channels];
                    y[(i * w.size[1] + j) * channels..][..channels].copy_from_slice(x);
                }
            }
        }
    });
}

pub fn fold(threads: &Threads, w: Window, first: usize, channels: usize, dy: &[f32], dx: &mut [f32]) {
    let row = w.size[0] * w.size[1] * channels;
    let [high, wide] = w.places();
    assert!(dx.len() == w.elements() && dy.len() == w.rows() * row, "{w:?}");
    threads.each(dy.chunks(high * wide * row).zip(dx.chunks_mut(image(&w))), |(dy, dx)| {
        simd(
            #[inline(always)]
            || {
                for ([high, wide], dy) in places(&w).zip(dy.chunks_exact(row)) {
                    let ((rows, top), (columns, left)) = (seen(&w, 0, high), seen(&w, 1, wide));
                    for (i, from) in rows.zip(top..) {
                        for (j, at) in columns.clone().zip(left..) {
                            let dx = &mut dx[(from * w.width + at) * w.channels + first..][..channels];
                            let dy = &dy[(i * w.size[1] + j) * channels..][..channels];
                            for (dx, dy) in dx.iter_mut().zip(dy) {
                                *dx += dy;
                            }
                        }
                    }
                }
            },
        );
    });
}

pub fn max_pool(threads: &Threads, w: Window, x: &[f32], y: &mut [f32]) {
    let [high, wide] = w.places();
    threads.each(x.chunks(image(&w)).zip(y.chunks_mut(high * wide * w.channels)), |(x, y)| {
        simd(
            #[inline(always)]
            || {
                for ([high, wide], y) in places(&w).zip(y.chunks_exact_mut(w.channels)) {
                    let ((rows, top), (columns, left)) = (seen(&w, 0, high), seen(&w, 1, wide));
                    y.fill(f32::NEG_INFINITY);
                    for row in top..top + rows.len() {
                        for column in left..left + columns.len() {
                            let x = &x[(row * w.width + column) * w.channels..][..w.channels];
                            for (y, &x) in y.iter_mut().zip(x) {
                                *y = if x > *y { x } else { *y };
                            }
                        }
                    }
                }
            },
        );
    });
}

pub fn max_pool_backward(threads: &Threads, w: Window, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    let [high, wide] = w.places();
    let images = x.chunks(image(&w)).zip(dy.chunks(high * wide * w.channels)).zip(dx.chunks_mut(image(&w)));
    threads.each(images, |((x, dy), dx)| {
        dx.fill(0.0);
        for ([high, wide], dy) in places(&w).zip(dy.chunks_exact(w.channels)) {
            let ((rows, top), (columns, left)) = (seen(&w, 0, high), seen(&w, 1, wide));
            for (channel, dy) in dy.iter().enumerate() {
                let (mut largest, mut at) = (f32::NEG_INFINITY, None);
                for row in top..top + rows.len() {
                    for column in left..left + columns.len() {
                        let place = (row * w.width + column) * w.channels + channel;
                        if at.is_none() || x[place] > largest {
                            (largest, at) = (x[place], Some(place));
                        }
                    }
                }
                if let Some(at) = at {
                    dx[at] += dy;
                }
            }
        }
    });
}

pub fn average_pool(threads: &Threads, w: Window, x: &[f32], y: &mut [f32]) {
    let [high, wide] = w.places();
    threads.each(x.chunks(image(&w)).zip(y.chunks_mut(high * wide * w.channels)), |(x, y)| {
        simd(
            #[inline(always)]
            || {
                for ([high, wide], y) in places(&w).zip(y.chunks_exact_mut(w.channels)) {
                    let ((rows, top), (columns, left)) = (seen(&w, 0, high), seen(&w, 1, wide));
                    let factor = 1.0 / (rows.len() * columns.len()) as f32;
                    y.fill(0.0);
                    for row in top..top + rows.len() {
                        for column in left..left + columns.len() {
                            let x = &x[(row * w.width + column) * w.channels..][..w.channels];
                            for (y, &x) in y.iter_mut().zip(x) {
                                *y += x;
                            }
                        }
                    }
                    y.iter_mut().for_each(|y| *y *= factor);
                }
            },
        );
    });
}

pub fn average_pool_backward(threads: &Threads, w: Window, dy: &[f32], dx: &mut [f32]) {
    let [high, wide] = w.places();
    threads.each(dy.chunks(high * wide * w.channels).zip(dx.chunks_mut(image(&w))), |(dy, dx)| {
        simd(
            #[inline(always)]
            || {
                dx.fill(0.0);
                for ([high, wide], dy) in places(&w).zip(dy.chunks_exact(w.channels)) {
                    let ((rows, top), (columns, left)) = (seen(&w, 0, high), seen(&w, 1, wide));
                    let factor = 1.0 / (rows.len() * columns.len()) as f32;
                    for row in top..top + rows.len() {
                        for column in left..left + columns.len() {
                            let dx = &mut dx[(row * w.width + column) * w.channels..][..w.channels];
                            for (dx, &dy) in dx.iter_mut().zip(dy) {
                                *dx += dy * factor;
                            }
                        }
                    }
                }
            },
        );
    });
}
