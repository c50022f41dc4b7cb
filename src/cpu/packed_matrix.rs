//! An operand of products in the order in which the kernel reads it.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use ndarray::{ArrayView2, ArrayViewMut2, Axis, ShapeBuilder as _, s};
use rayon::prelude::*;

use super::gemm::{TILE_ROWS, multiply};
use super::gemm_blocking::{depths, each_of};
use super::memory::{CpuBuf, HostPool};
use super::output_init::OutputInit;
use super::threads::Threads;
use super::transpose::transpose;
use hpctrain_base::error::Result;
use hpctrain_device::{Gemm, MemoryKind};

/// Columns of a panel, which the kernel computes at a time: four vectors of 16 elements or two of
/// 8.
static WIDTH: LazyLock<usize> = LazyLock::new(|| {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        return 64;
    }
    16
});

/// Panels that one task goes through for some rows before it takes the next rows: the caches hold
/// so many.
const GROUP: usize = 8;

/// Rows that are multiplied at a time. The kernel takes a panel as it is for no more than that:
/// from there on it would copy it once more.
const ROWS: usize = 8 * TILE_ROWS;

/// Tasks for each thread, at least, while there is enough to cut.
const TASKS: usize = 2;

/// The right operand, k×n, in panels of its columns; the elements of a row of a panel are
/// neighbours.
pub struct PackedMatrix {
    elements: CpuBuf,
    k: usize,
    n: usize,
}

impl PackedMatrix {
    /// Elements of such panels, those included that fill the last one up.
    pub fn elements(k: usize, n: usize) -> usize {
        n.next_multiple_of(*WIDTH) * k
    }

    /// The right operand of these products.
    ///
    /// # Errors
    /// The system has no such memory.
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

    /// Computes `c`, of this start, and `a·b`, with the bits of [`super::gemm::multiply_parallel`]
    /// where no side of a part of that is a vector. The cut suits the threads; the bits do not
    /// depend on it.
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
        each_of(threads, c, [high, wide], [TILE_ROWS, *WIDTH], |rows, columns, mut c| {
            let acc = start.of(columns.clone()).written(c.view_mut());
            self.part(a.slice(s![rows, ..]), columns, c, acc);
        });
    }

    /// One task: some rows, and columns of whole panels.
    fn part(
        &self,
        a: ArrayView2<'_, f32>,
        columns: Range<usize>,
        mut c: ArrayViewMut2<'_, f32>,
        acc: bool,
    ) {
        for terms in depths(self.k) {
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

    /// Some rows of a panel, and as many of its columns as there are.
    fn panel(&self, panel: usize, rows: Range<usize>, columns: usize) -> ArrayView2<'_, f32> {
        let first = (panel * self.k + rows.start) * *WIDTH;
        let shape = (rows.len(), columns).strides((*WIDTH, 1));
        ArrayView2::from_shape(shape, &self.elements.as_slice()[first..])
            .expect("a panel has all rows")
    }
}
