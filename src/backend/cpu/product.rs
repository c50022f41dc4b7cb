//! Matrix products: the single-threaded kernel of `gemm`, a pure-Rust crate, on fixed parts of the output.

use ndarray::{ArrayView2, ArrayViewMut2, Axis};

use super::threads::Threads;

/// Work of one task: large enough to hide the hand-over, small enough to balance.
const TASK_FLOPS: usize = 8 << 20;
const MAX_TASKS: usize = 64;

/// A part is at least so many rows or columns wide: less leaves the kernel's tiles half empty.
const MIN_PART: usize = 48;

/// Columns of the kernel's tiles; parts are whole ones.
const TILE_COLUMNS: usize = 16;

/// The kernel copies `a` into a packed form from this many tiles on; below, reading it in place is faster.
const PACK_FROM_TILES: usize = 64;

/// Tells the kernel what suits the shapes of small networks. Process-wide.
pub fn configure() {
    gemm_common::gemm::set_rhs_packing_threshold(PACK_FROM_TILES);
}

/// `c = a·b`, or `c += a·b` with `acc`; any strides. One thread.
pub fn multiply(a: ArrayView2<'_, f32>, b: ArrayView2<'_, f32>, mut c: ArrayViewMut2<'_, f32>, acc: bool) {
    let (m, k) = a.dim();
    let (kb, n) = b.dim();
    assert!(kb == k && c.dim() == (m, n), "product of {:?} and {:?} into {:?}", a.dim(), b.dim(), c.dim());
    let [a_strides, b_strides, c_strides] = [a.strides(), b.strides(), c.strides()].map(|s| [s[0], s[1]]);
    let kernel = gemm_f32::gemm::f32::get_gemm_fn();
    // SAFETY: the views guarantee that every element addressed by their dimensions and strides is valid, and that
    // `c` is exclusive, hence overlaps neither `a` nor `b`; the dimensions agree.
    unsafe {
        // The kernel wants columns of its result contiguous, ours are the rows: it computes cᵀ = bᵀ·aᵀ.
        kernel(
            n,
            m,
            k,
            c.as_mut_ptr(),
            c_strides[0],
            c_strides[1],
            acc,
            b.as_ptr(),
            b_strides[0],
            b_strides[1],
            a.as_ptr(),
            a_strides[0],
            a_strides[1],
            1.0,
            1.0,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}

/// As [`multiply`], on all threads. The output is cut into parts that depend on its shape alone, so its bits do not
/// depend on the number of threads.
pub fn multiply_parallel(
    threads: &Threads,
    a: ArrayView2<'_, f32>,
    b: ArrayView2<'_, f32>,
    mut c: ArrayViewMut2<'_, f32>,
    acc: bool,
) {
    let (m, n) = c.dim();
    // The kernel repacks `b` in every task when its rows are not contiguous: then each task should take its own
    // columns of `b`, unless there are too few.
    let packs_b = b.strides()[1] != 1;
    let by_columns = if packs_b { n >= 2 * MIN_PART } else { n > m };
    let len = if by_columns { n } else { m };
    // A power of two divides evenly over the usual numbers of threads.
    let mut tasks = (2 * m * n * a.ncols()).div_ceil(TASK_FLOPS).clamp(1, MAX_TASKS).next_power_of_two();
    while tasks > 1 && len < tasks * MIN_PART {
        tasks /= 2;
    }
    if tasks == 1 {
        multiply(a, b, c, acc);
    } else if by_columns {
        let part = n.div_ceil(tasks).next_multiple_of(TILE_COLUMNS);
        let (b, c) = (b.axis_chunks_iter(Axis(1), part), c.axis_chunks_iter_mut(Axis(1), part));
        threads.each(b.zip(c), |(b, c)| multiply(a, b, c, acc));
    } else {
        let part = m.div_ceil(tasks);
        let (a, c) = (a.axis_chunks_iter(Axis(0), part), c.axis_chunks_iter_mut(Axis(0), part));
        threads.each(a.zip(c), |(a, c)| multiply(a, b, c, acc));
    }
}
