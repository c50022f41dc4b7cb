//! Register-tiled f32 micro-kernels.

use std::array::from_fn;
use std::ops::Range;

use pulp::Simd;

use super::pack::{COLUMNS, HIGH, LhsBlock, NrPanel, TileRows};

/// Terms of a row that a tile reads at once.
const TERMS: usize = 8;

/// Stores the sums of a block.
pub trait TileStore<S: Simd> {
    /// Stores the vectors `vector` to `vector + WIDE` of the sums of a row.
    fn store<const WIDE: usize>(&mut self, row: usize, vector: usize, sums: [S::f32s; WIDE]);
}

/// Computes a block: the first `columns` columns of a panel for some rows of the left operand.
#[inline(always)]
pub fn multiply_block<S: Simd>(
    simd: S,
    lines: LhsBlock<'_>,
    rows: Range<usize>,
    strips: &[NrPanel],
    columns: usize,
    sink: &mut impl TileStore<S>,
) {
    let mut row = rows.start;
    while row < rows.end {
        let of_block = row - rows.start;
        // Panels are always whole; the sums of rows after the last one are ignored.
        let left = if let LhsBlock::Packed { .. } = lines { HIGH } else { rows.end - row };
        row += match left {
            HIGH.. => {
                tiles::<S, HIGH>(simd, &lines.tile_rows(row), strips, columns, of_block, sink)
            }
            4.. => tiles::<S, 4>(simd, &lines.tile_rows(row), strips, columns, of_block, sink),
            2.. => tiles::<S, 2>(simd, &lines.tile_rows(row), strips, columns, of_block, sink),
            _ => tiles::<S, 1>(simd, &lines.tile_rows(row), strips, columns, of_block, sink),
        };
    }
}

/// Computes `columns` columns of `HIGH` rows, the first of which is row `first` of the block, in
/// tiles as wide as the registers allow.
#[inline(always)]
fn tiles<S: Simd, const HIGH: usize>(
    simd: S,
    rows: &TileRows<'_, HIGH>,
    strips: &[NrPanel],
    columns: usize,
    first: usize,
    sink: &mut impl TileStore<S>,
) -> usize {
    let vectors = columns.div_ceil(S::F32_LANES);
    if S::REGISTER_COUNT >= 32 && 4 * S::F32_LANES >= COLUMNS {
        // AVX-512: a panel is one tile. Its first vector is a constant, so indices are not checked.
        up_to_four::<S, HIGH>(simd, rows, strips, 0..vectors, first, sink);
    } else if S::REGISTER_COUNT >= 32 {
        for vector in (0..vectors).step_by(4) {
            up_to_four::<S, HIGH>(simd, rows, strips, vector..vectors, first, sink);
        }
    } else {
        for vector in (0..vectors).step_by(2) {
            if vector + 1 < vectors {
                tile::<S, HIGH, 2>(simd, rows, strips, vector, first, sink);
            } else {
                tile::<S, HIGH, 1>(simd, rows, strips, vector, first, sink);
            }
        }
    }
    HIGH
}

/// Computes `HIGH` rows, the first of which is row `first` of the block, and the first four of some
/// vectors, or all if there are fewer.
#[inline(always)]
fn up_to_four<S: Simd, const HIGH: usize>(
    simd: S,
    rows: &TileRows<'_, HIGH>,
    strips: &[NrPanel],
    vectors: Range<usize>,
    first: usize,
    sink: &mut impl TileStore<S>,
) {
    let vector = vectors.start;
    match vectors.len() {
        1 => tile::<S, HIGH, 1>(simd, rows, strips, vector, first, sink),
        2 => tile::<S, HIGH, 2>(simd, rows, strips, vector, first, sink),
        3 => tile::<S, HIGH, 3>(simd, rows, strips, vector, first, sink),
        _ => tile::<S, HIGH, 4>(simd, rows, strips, vector, first, sink),
    }
}

/// Computes `HIGH` rows, the first of which is row `first` of the block, and `WIDE` vectors.
#[inline(always)]
fn tile<S: Simd, const HIGH: usize, const WIDE: usize>(
    simd: S,
    rows: &TileRows<'_, HIGH>,
    strips: &[NrPanel],
    vector: usize,
    first: usize,
    sink: &mut impl TileStore<S>,
) {
    let mut sums = [[simd.splat_f32s(0.0); WIDE]; HIGH];
    match rows {
        TileRows::Rows(rows) => {
            let (many, rest) = strips.as_chunks::<TERMS>();
            let mut at = 0;
            for strips in many {
                let terms: [&[f32; TERMS]; HIGH] = from_fn(|r| {
                    rows[r][at..].first_chunk().expect("a row has a term for each strip")
                });
                for term in 0..TERMS {
                    add(
                        simd,
                        &mut sums,
                        #[inline(always)]
                        |r| terms[r][term],
                        &strips[term],
                        vector,
                    );
                }
                at += TERMS;
            }
            for strip in rest {
                add(
                    simd,
                    &mut sums,
                    #[inline(always)]
                    |r| rows[r][at],
                    strip,
                    vector,
                );
                at += 1;
            }
        }
        TileRows::Panel(terms) => {
            for (term, strip) in terms.iter().zip(strips) {
                add(
                    simd,
                    &mut sums,
                    #[inline(always)]
                    |r| term[r],
                    strip,
                    vector,
                );
            }
        }
    }
    for r in 0..HIGH {
        sink.store(first + r, vector, sums[r]);
    }
}

/// Adds the outer product of a term of `HIGH` rows and `WIDE` vectors.
#[inline(always)]
fn add<S: Simd, const HIGH: usize, const WIDE: usize>(
    simd: S,
    sums: &mut [[S::f32s; WIDE]; HIGH],
    term: impl Fn(usize) -> f32,
    strip: &NrPanel,
    vector: usize,
) {
    let strip = &S::as_simd_f32s(&strip.0).0[vector..vector + WIDE];
    for r in 0..HIGH {
        let x = simd.splat_f32s(term(r));
        for c in 0..WIDE {
            sums[r][c] = simd.mul_add_e_f32s(x, strip[c], sums[r][c]);
        }
    }
}
