//! A right operand of matmuls, packed in the order in which the kernel reads it.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use ndarray::{ArrayView2, ArrayViewMut2, Axis, ShapeBuilder as _, s};
use rayon::prelude::*;

use super::gemm::{TILE_ROWS, multiply};
use super::gemm_blocking::{each_output_part, k_blocks};
use super::memory::{CpuBuf, HostPool};
use super::output_init::OutputInit;
use super::threads::Threads;
use super::transpose::transpose;
use hpctrain_base::error::Result;
use hpctrain_device::{Gemm, MemoryKind};

/// Columns of a panel, which the kernel computes at once: four vectors of 16 elements or two of 8.
/// They are those of AVX-512 on ARM, too: the width decides where parts of one row occur, whose
/// sums have another order.
static WIDTH: LazyLock<usize> = LazyLock::new(|| {
    #[cfg(target_arch = "x86_64")]
    if !is_x86_feature_detected!("avx512f") {
        return 16;
    }
    64
});

/// Panels that one task processes for some rows before it takes the next rows: they fit in the
/// caches.
const GROUP: usize = 8;

/// Rows that are multiplied at once. With more rows the kernel would pack the panel again.
const ROWS: usize = 8 * TILE_ROWS;

/// Least number of tasks per thread, if there is enough work.
const TASKS: usize = 2;

/// The right operand, k×n, packed into panels of its columns; a row of a panel is contiguous.
pub struct PackedMatrix {
    elements: CpuBuf,
    k: usize,
    n: usize,
}

impl PackedMatrix {
    /// Returns the elements of packed panels, including the padding of the last one.
    pub fn elements(k: usize, n: usize) -> usize {
        n.next_multiple_of(*WIDTH) * k
    }

    /// Packs the right operand `b` of matmuls of this shape.
    ///
    /// # Errors
    /// Returns an error if the system cannot allocate the memory.
    pub fn new(pool: &Arc<HostPool>, threads: &Threads, shape: Gemm, b: &[f32]) -> Result<Self> {
        let Gemm { k, n, tb, .. } = shape;
        assert_eq!(b.len(), k * n, "the right operand's elements");
        let mut elements = pool.take(MemoryKind::Workspace, Self::elements(k, n))?;
        let panels = elements.as_mut_slice().par_chunks_mut(k * *WIDTH).enumerate();
        threads.each(panels, |(panel, to)| {
            let columns = panel * *WIDTH..((panel + 1) * *WIDTH).min(n);
            if tb {
                transpose(&b[columns.start * k..columns.end * k], k, 0..k, to, *WIDTH);
            } else {
                for (row, to) in b.chunks_exact(n).zip(to.chunks_exact_mut(*WIDTH)) {
                    to[..columns.len()].copy_from_slice(&row[columns.clone()]);
                }
            }
        });
        Ok(Self { elements, k, n })
    }

    /// Adds `a·b` to the initial value `start` of `c`, with the bits of
    /// [`super::gemm::multiply_parallel`] unless a part has only one row or column. The division
    /// depends on the number of threads; the bits do not.
    pub fn multiply(
        &self,
        threads: &Threads,
        a: ArrayView2<'_, f32>,
        c: ArrayViewMut2<'_, f32>,
        start: OutputInit<'_>,
    ) {
        let panels = self.n.div_ceil(*WIDTH);
        let wanted = TASKS * threads.count();
        let wide = panels.div_ceil(GROUP).max(wanted.min(panels));
        let high = wanted.div_ceil(wide).min(a.nrows().div_ceil(ROWS));
        each_output_part(threads, c, [high, wide], [TILE_ROWS, *WIDTH], |rows, columns, mut c| {
            let acc = start.for_columns(columns.clone()).write_bias(c.view_mut());
            self.part(a.slice(s![rows, ..]), columns, c, acc);
        });
    }

    /// Computes one task: some rows, and columns of whole panels.
    fn part(
        &self,
        a: ArrayView2<'_, f32>,
        columns: Range<usize>,
        mut c: ArrayViewMut2<'_, f32>,
        acc: bool,
    ) {
        for terms in k_blocks(self.k) {
            let acc = acc || terms.start > 0;
            for (a, mut c) in
                a.axis_chunks_iter(Axis(0), ROWS).zip(c.axis_chunks_iter_mut(Axis(0), ROWS))
            {
                let a = a.slice(s![.., terms.clone()]);
                for (panel, c) in c.axis_chunks_iter_mut(Axis(1), *WIDTH).enumerate() {
                    multiply(
                        a,
                        self.panel(columns.start / *WIDTH + panel, terms.clone(), c.ncols()),
                        c,
                        acc,
                    );
                }
            }
        }
    }

    /// Returns some rows of a panel, without its padding columns.
    fn panel(&self, panel: usize, rows: Range<usize>, columns: usize) -> ArrayView2<'_, f32> {
        let first = (panel * self.k + rows.start) * *WIDTH;
        let shape = (rows.len(), columns).strides((*WIDTH, 1));
        ArrayView2::from_shape(shape, &self.elements.as_slice()[first..])
            .expect("a panel has all rows")
    }
}
