//! Blocking of matmuls: parts of the output for threads, and K blocks of the sums.
//!
//! Parts depend on shapes and may depend on threads; K blocks, and therefore bits, depend on the
//! number of terms alone.

use std::ops::Range;

use ndarray::{ArrayViewMut2, Axis};

use super::threads::Threads;

/// The most terms that a kernel sums before it adds them to the result. `gemm` would choose by the
/// shape and the machine's caches; with a limit below its own, the order of sums and so the bits
/// depend on the number of terms alone.
pub const MAX_BLOCK_DEPTH: usize = 512;

/// Returns the terms of a K block if `terms` are divided evenly into blocks of at most [`DEPTH`].
pub fn block_depth(terms: usize) -> usize {
    terms.div_ceil(terms.div_ceil(MAX_BLOCK_DEPTH).max(1))
}

/// Divides `terms` terms into K blocks of `depth`; no terms are one empty block.
pub fn blocks(terms: usize, depth: usize) -> impl Iterator<Item = Range<usize>> {
    let count = terms.div_ceil(depth.max(1)).max(1);
    (0..count).map(move |piece| piece * depth..((piece + 1) * depth).min(terms))
}

/// Returns the K blocks of a sum of `terms` terms, of any matmul.
pub fn k_blocks(terms: usize) -> impl Iterator<Item = Range<usize>> {
    blocks(terms, block_depth(terms))
}

/// Calls `f` with the parts of an output and their rows and columns, distributed over the threads:
/// the output is divided into `high` by `wide` parts of whole tiles.
pub fn each_output_part(
    threads: &Threads,
    c: ArrayViewMut2<'_, f32>,
    [high, wide]: [usize; 2],
    [tile_rows, tile_columns]: [usize; 2],
    f: impl Fn(Range<usize>, Range<usize>, ArrayViewMut2<'_, f32>) + Sync,
) {
    if high * wide == 1 {
        let (m, n) = c.dim();
        return f(0..m, 0..n, c);
    }
    let all = parts(c, Axis(0), high, tile_rows).flat_map(|(rows, c)| {
        parts(c, Axis(1), wide, tile_columns).map(move |(columns, c)| (rows.clone(), columns, c))
    });
    threads.each(all.collect::<Vec<_>>(), |(rows, columns, c)| f(rows, columns, c));
}

/// Divides a matrix along an axis into `count` parts of whole tiles, none more than a tile larger
/// than another: a smaller last part would leave threads idle.
fn parts(
    c: ArrayViewMut2<'_, f32>,
    axis: Axis,
    count: usize,
    tile: usize,
) -> impl Iterator<Item = (Range<usize>, ArrayViewMut2<'_, f32>)> + Send {
    let len = c.len_of(axis);
    let tiles = c.len_of(axis).div_ceil(tile);
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
            let sizes: Vec<usize> =
                ends.windows(2).map(|pair| (pair[1] - pair[0]).div_ceil(tile)).collect();
            assert!(
                sizes.len() <= count
                    && sizes.iter().max() <= sizes.iter().min().map(|least| least + 1).as_ref()
            );
        }
    }
}
