//! Tiled convolution: im2col rows of some window positions are computed and multiplied while they
//! are in a core's cache.
//!
//! Tiles, and the parts in which gradients of filters are summed, depend on the shape alone.

use std::cell::RefCell;

use ndarray::ArrayView2;
use rayon::prelude::*;

use super::Cpu;
use super::elementwise::{CHUNK, add_serial};
use super::gemm::multiply;
use super::im2col_pool::{fold_rows, unfold_rows};
use super::matrix::{add_rows, matrix, matrix_mut};
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{
    Backend, Convolution, ConvolutionOps, Im2colShape, KernelCost, MemoryKind, ops,
};

/// Elements of an im2col tile: 128 KiB.
const TILE: usize = 1 << 15;

/// The most elements of filters for which tiles are used: each tile reads them all, and each
/// partial gradient has as many.
const FILTERS: usize = 1 << 16;

/// The number of partial sums of the gradients of filters.
const PARTS: usize = 32;

thread_local! {
    /// An im2col tile, kept between calls because a fresh allocation would cause page faults.
    static UNFOLDED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Filters, transposed.
    static TRANSPOSED_FILTERS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Returns whether a convolution is computed in tiles.
pub fn is_tiled(s: Convolution) -> bool {
    s.filter_len() * s.filters <= FILTERS && (1..=TILE / 16).contains(&s.filter_len())
}

/// Returns the window positions of a tile.
fn tile(s: Convolution) -> usize {
    (TILE / s.filter_len()).min(1024)
}

/// Returns the number of elements of the partial gradients of [`backward_weight`].
pub fn partial_elements(s: Convolution) -> usize {
    s.window.rows().div_ceil(tile(s)).min(PARTS) * s.filter_len() * s.filters
}

/// Returns `len` elements of the scratch, which grows as needed, with unspecified contents.
fn reserve(scratch: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    &mut scratch[..len]
}

/// Calls `work` with the im2col rows of `rows` window positions from `first` on.
fn unfolded(
    s: Convolution,
    first: usize,
    rows: usize,
    x: &[f32],
    work: impl FnOnce(ArrayView2<'_, f32>),
) {
    UNFOLDED.with_borrow_mut(|scratch| {
        let unfolded = reserve(scratch, rows * s.filter_len());
        unfold_rows(&s.window, s.first_channel, s.channels, first, x, unfolded);
        work(matrix(unfolded, rows, s.filter_len()));
    });
}

pub fn forward(
    threads: &Threads,
    s: Convolution,
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    y: &mut [f32],
) {
    let seen = s.filter_len();
    let tile = tile(s);
    assert!(x.len() == s.window.elements() && y.len() == s.window.rows() * s.filters, "{s:?}");
    TRANSPOSED_FILTERS.with_borrow_mut(|transposed| {
        // With the filters transposed no tile needs to pack them.
        let transposed = reserve(transposed, weight.len());
        for (filter, weight) in weight.chunks_exact(seen).enumerate() {
            weight
                .iter()
                .zip(transposed[filter..].iter_mut().step_by(s.filters))
                .for_each(|(from, to)| *to = *from);
        }
        let transposed = matrix(transposed, seen, s.filters);
        threads.each(y.par_chunks_mut(tile * s.filters).enumerate(), |(i, y)| {
            let rows = y.len() / s.filters;
            if !bias.is_empty() {
                y.chunks_exact_mut(s.filters).for_each(|y| y.copy_from_slice(bias));
            }
            unfolded(s, i * tile, rows, x, |unfolded| {
                multiply(unfolded, transposed, matrix_mut(y, rows, s.filters), !bias.is_empty());
            });
        });
    });
}

/// Computes the gradients of filters and bias. `partial` has [`partial`] elements with any
/// contents.
pub fn backward_weight(
    threads: &Threads,
    s: Convolution,
    dy: &[f32],
    x: &[f32],
    partial: &mut [f32],
    dweight: &mut [f32],
    dbias: &mut [f32],
) {
    let seen = s.filter_len();
    let tile = tile(s);
    assert!(x.len() == s.window.elements() && dy.len() == s.window.rows() * s.filters, "{s:?}");
    let tiles = s.window.rows().div_ceil(tile);
    let parts = tiles.min(PARTS);
    threads.each(partial.par_chunks_exact_mut(seen * s.filters).enumerate(), |(part, sum)| {
        let own = part * tiles / parts..(part + 1) * tiles / parts;
        for i in own.clone() {
            let dy = &dy[i * tile * s.filters..];
            let dy = &dy[..dy.len().min(tile * s.filters)];
            let rows = dy.len() / s.filters;
            unfolded(s, i * tile, rows, x, |unfolded| {
                let dy = matrix(dy, rows, s.filters).reversed_axes();
                multiply(dy, unfolded, matrix_mut(sum, s.filters, seen), i > own.start);
            });
        }
    });
    threads.each(dweight.par_chunks_mut(CHUNK).enumerate(), |(i, dweight)| {
        for sum in partial.chunks_exact(seen * s.filters) {
            add_serial(&sum[i * CHUNK..][..dweight.len()], dweight);
        }
    });
    add_rows(threads, dy, s.filters, dbias);
}

pub fn backward_input(
    threads: &Threads,
    s: Convolution,
    dy: &[f32],
    weight: &[f32],
    dx: &mut [f32],
) {
    let seen = s.filter_len();
    let tile = tile(s);
    assert!(dx.len() == s.window.elements() && dy.len() == s.window.rows() * s.filters, "{s:?}");
    let image = Im2colShape { batch: 1, ..s.window };
    let weight = matrix(weight, s.filters, seen);
    // Windows overlap, so an image belongs to one task, which processes tile after tile.
    threads.each(
        dy.par_chunks(image.rows() * s.filters).zip(dx.par_chunks_mut(image.elements())),
        |(dy, dx)| {
            UNFOLDED.with_borrow_mut(|scratch| {
                for (i, dy) in dy.chunks(tile * s.filters).enumerate() {
                    let rows = dy.len() / s.filters;
                    let unfolded = reserve(scratch, rows * seen);
                    multiply(
                        matrix(dy, rows, s.filters),
                        weight,
                        matrix_mut(unfolded, rows, seen),
                        false,
                    );
                    fold_rows(&image, s.first_channel, s.channels, i * tile, unfolded, dx);
                }
            });
        },
    );
}

impl ConvolutionOps for Cpu {
    fn convolve(
        &self,
        shape: Convolution,
        x: &[f32],
        weight: &[f32],
        bias: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        if !is_tiled(shape) {
            return ops::convolution::forward(self, shape, x, weight, bias, y);
        }
        let _launch = self.start_kernel(KernelCost::convolve(shape, bias.len()));
        forward(&self.threads, shape, x, weight, bias, y);
        Ok(())
    }

    fn convolve_backward_weight(
        &self,
        shape: Convolution,
        dy: &[f32],
        x: &[f32],
        dweight: &mut [f32],
        dbias: &mut [f32],
    ) -> Result<()> {
        if !is_tiled(shape) {
            return ops::convolution::backward_weight(self, shape, dy, x, dweight, dbias);
        }
        let _launch = self.start_kernel(KernelCost::convolve_backward_weight(shape, dbias.len()));
        let mut partial = self.alloc(MemoryKind::Activations, partial_elements(shape))?;
        backward_weight(&self.threads, shape, dy, x, partial.as_mut_slice(), dweight, dbias);
        Ok(())
    }

    fn convolve_backward_input(
        &self,
        shape: Convolution,
        dy: &[f32],
        weight: &[f32],
        dx: &mut [f32],
    ) -> Result<()> {
        if !is_tiled(shape) {
            return ops::convolution::backward_input(self, shape, dy, weight, dx);
        }
        let _launch = self.start_kernel(KernelCost::convolve_backward_input(shape));
        backward_input(&self.threads, shape, dy, weight, dx);
        Ok(())
    }
}
