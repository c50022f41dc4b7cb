//! Matrix products: the single-threaded kernel of `gemm`, a pure-Rust crate, on fixed parts of the output.

use std::ops::Range;

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
    c: ArrayViewMut2<'_, f32>,
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
        threads.each(parts(c, Axis(1), tasks, TILE_COLUMNS), |(columns, c)| {
            multiply(a, b.slice_axis(Axis(1), columns.into()), c, acc);
        });
    } else {
        threads.each(parts(c, Axis(0), tasks, 1), |(rows, c)| {
            multiply(a.slice_axis(Axis(0), rows.into()), b, c, acc);
        });
    }
}

/// Cuts a matrix along an axis into so many parts of whole tiles, none more than a tile larger than another: a smaller last
/// part would leave threads without work.
fn parts(
    c: ArrayViewMut2<'_, f32>,
    axis: Axis,
    count: usize,
    tile: usize,
) -> impl Iterator<Item = (Range<usize>, ArrayViewMut2<'_, f32>)> + Send {
    let (len, tiles) = (c.len_of(axis), c.len_of(axis).div_ceil(tile));
    let edge = move |part: usize| (part * tiles / count * tile).min(len);
    let mut rest = Some(c);
    (0..count).filter_map(move |part| {
        let range = edge(part)..edge(part + 1);
        let (own, others) = rest.take()?.split_at(axis, range.len());
        rest = Some(others);
        (!range.is_empty()).then_some((range, own))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_whole_and_even() {
        for (columns, count, tile) in
            [(784, 8, 16), (50_257, 64, 16), (100, 2, 16), (128, 8, 1), (20, 4, 16), (1, 2, 1)]
        {
            let mut matrix = ndarray::Array2::<f32>::zeros((2, columns));
            let mut ends = vec![0];
            for (range, mut part) in parts(matrix.view_mut(), Axis(1), count, tile) {
                assert_eq!((range.start, range.len()), (ends[ends.len() - 1], part.ncols()));
                part += 1.0;
                ends.push(range.end);
            }
            assert!(matrix.iter().all(|x| *x == 1.0));
            let sizes: Vec<usize> = ends.windows(2).map(|pair| (pair[1] - pair[0]).div_ceil(tile)).collect();
            assert!(sizes.len() <= count && sizes.iter().max() <= sizes.iter().min().map(|least| least + 1).as_ref());
        }
    }
}
