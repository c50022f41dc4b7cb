//! Matrix products: the single-threaded kernel of `gemm`, a pure-Rust crate, on fixed parts of the output.

use ndarray::{ArrayView2, ArrayViewMut2, Axis};

use super::threads::Threads;

/// Work of one task: large enough to hide the hand-over, small enough to balance.
const TASK_FLOPS: usize = 4 << 20;
const MAX_TASKS: usize = 64;

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
    let tasks = (2 * m * n * a.ncols() / TASK_FLOPS).clamp(1, MAX_TASKS);
    let (rows, columns) = (Axis(0), Axis(1));
    // Multiples of 16 keep the micro-kernels whole.
    let part = |len: usize| len.div_ceil(tasks).next_multiple_of(16);
    if tasks == 1 {
        multiply(a, b, c, acc);
    } else if m >= n {
        let (a, c) = (a.axis_chunks_iter(rows, part(m)), c.axis_chunks_iter_mut(rows, part(m)));
        threads.each(a.zip(c), |(a, c)| multiply(a, b, c, acc));
    } else {
        let (b, c) = (b.axis_chunks_iter(columns, part(n)), c.axis_chunks_iter_mut(columns, part(n)));
        threads.each(b.zip(c), |(b, c)| multiply(a, b, c, acc));
    }
}
