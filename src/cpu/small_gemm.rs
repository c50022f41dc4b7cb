//! Small matmuls with register-tiled micro-kernels.
//!
//! Matrices are stored as panels of strips, each with some columns of a row, so vectors are
//! contiguous and aligned. The terms of each sum are added one after the other, so its bits depend
//! neither on the vector width nor on the number of rows and columns that are computed together.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use pulp::Simd;

use super::transpose::transpose_square;

/// Columns of a strip: two AVX-512 vectors, four of AVX2.
pub const COLUMNS: usize = 32;

/// Rows of a group, which is computed in tiles as high as the registers allow.
pub const ROWS: usize = 8;

/// Neighbouring columns of one row, aligned to a cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
pub struct Strip(pub [f32; COLUMNS]);

impl Strip {
    /// Returns the columns as vectors.
    #[inline(always)]
    pub fn vectors<S: Simd>(&self) -> &[S::f32s] {
        S::as_simd_f32s(&self.0).0
    }

    /// Returns the columns as exclusive vectors.
    #[inline(always)]
    pub fn vectors_mut<S: Simd>(&mut self) -> &mut [S::f32s] {
        S::as_mut_simd_f32s(&mut self.0).0
    }
}

/// Returns the number of strips that hold a row of `width` elements.
pub fn panels(width: usize) -> usize {
    width.div_ceil(COLUMNS)
}

/// Returns the vectors of panel `panel` that hold elements of rows of `width`.
#[inline(always)]
pub fn vectors_of<S: Simd>(width: usize, panel: usize) -> Range<usize> {
    0..(width - panel * COLUMNS).min(COLUMNS).div_ceil(S::F32_LANES)
}

/// Copies columns of rows with leading dimension `stride` into panels of `height` strips; the
/// padding of the last panel is unchanged.
#[inline(always)]
pub fn pack(x: &[f32], stride: usize, columns: Range<usize>, to: &mut [Strip], height: usize) {
    for (panel, first) in columns.clone().step_by(COLUMNS).enumerate() {
        let last = columns.end.min(first + COLUMNS);
        for (row, to) in x.chunks_exact(stride).zip(&mut to[panel * height..]) {
            let part = &row[first..last];
            match part.first_chunk::<COLUMNS>() {
                Some(part) => to.0 = *part,
                None => to.0[..part.len()].copy_from_slice(part),
            }
        }
    }
}

/// Transposes panels of [`COLUMNS`] strips into a strip for each column.
pub fn transpose_panels(panels: &[Strip], to: &mut [Strip]) {
    let panels = bytemuck::cast_slice::<_, [f32; COLUMNS]>(panels).as_chunks::<COLUMNS>().0;
    let to = bytemuck::cast_slice_mut::<_, [f32; COLUMNS]>(to).as_chunks_mut::<COLUMNS>().0;
    for (panel, to) in panels.iter().zip(to) {
        transpose_square(panel, to);
    }
}

/// Writes row `row` of panels of `height` strips, multiplied by `factor`.
#[inline(always)]
pub fn unpack<S: Simd>(
    simd: S,
    from: &[Strip],
    height: usize,
    row: usize,
    factor: f32,
    to: &mut [f32],
) {
    let factor = simd.splat_f32s(factor);
    for (to, from) in to.chunks_mut(COLUMNS).zip(from[row..].iter().step_by(height)) {
        let (whole, rest) = S::as_mut_simd_f32s(to);
        let mut from = from.vectors::<S>().iter();
        for (to, from) in whole.iter_mut().zip(&mut from) {
            *to = simd.mul_f32s(factor, *from);
        }
        if let (false, Some(from)) = (rest.is_empty(), from.next()) {
            simd.partial_store_f32s(rest, simd.mul_f32s(factor, *from));
        }
    }
}

/// Multiplies two rows elementwise, and adds up the elements that are a multiple of a strip apart.
#[inline(always)]
pub fn column_dot_sums<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> Strip {
    let mut sums = Strip([0.0; COLUMNS]);
    for (x, y) in x.chunks(COLUMNS).zip(y.chunks(COLUMNS)) {
        let ((x, x_rest), (y, y_rest)) = (S::as_simd_f32s(x), S::as_simd_f32s(y));
        let mut sums = sums.vectors_mut::<S>().iter_mut();
        // The sums are zipped last: an iterator that is zipped first loses an element when
        // the others end.
        for ((x, y), sum) in x.iter().zip(y).zip(&mut sums) {
            *sum = simd.mul_add_f32s(*x, *y, *sum);
        }
        if let (false, Some(sum)) = (x_rest.is_empty(), sums.next()) {
            *sum = simd.mul_add_f32s(
                simd.partial_load_f32s(x_rest),
                simd.partial_load_f32s(y_rest),
                *sum,
            );
        }
    }
    sums
}

/// A matmul that is computed in tiles.
trait Tiles<S: Simd> {
    /// Computes `HIGH` rows from `row` of the group on, and `WIDE` vectors from `vector` on.
    fn tile<const HIGH: usize, const WIDE: usize>(&mut self, simd: S, row: usize, vector: usize);
}

/// Computes the vectors `vectors` of a strip for a group of [`ROWS`] rows, or for one row.
#[inline(always)]
fn cover<S: Simd>(simd: S, rows: usize, vectors: Range<usize>, tiles: &mut impl Tiles<S>) {
    if rows == 1 {
        cover_by::<S, 1>(simd, rows, vectors, tiles);
    } else if S::REGISTER_COUNT >= 32 {
        cover_by::<S, ROWS>(simd, ROWS, vectors, tiles);
    } else {
        cover_by::<S, { ROWS / 2 }>(simd, ROWS, vectors, tiles);
    }
}

#[inline(always)]
fn cover_by<S: Simd, const HIGH: usize>(
    simd: S,
    rows: usize,
    vectors: Range<usize>,
    tiles: &mut impl Tiles<S>,
) {
    for row in (0..rows).step_by(HIGH) {
        let mut vector = vectors.start;
        while vector + 2 <= vectors.end {
            tiles.tile::<HIGH, 2>(simd, row, vector);
            vector += 2;
        }
        if vector < vectors.end {
            tiles.tile::<HIGH, 1>(simd, row, vector);
        }
    }
}

/// Accumulators of `HIGH` rows and `WIDE` vectors.
type Sums<S, const HIGH: usize, const WIDE: usize> = [[<S as Simd>::f32s; WIDE]; HIGH];

/// Adds the outer product of `HIGH` elements and `WIDE` vectors of a strip from `vector` on.
#[inline(always)]
fn add<S: Simd, const HIGH: usize, const WIDE: usize>(
    simd: S,
    sums: &mut Sums<S, HIGH, WIDE>,
    element: impl Fn(usize) -> f32,
    strip: &Strip,
    vector: usize,
) {
    let strip = &strip.vectors::<S>()[vector..vector + WIDE];
    for r in 0..HIGH {
        let x = simd.splat_f32s(element(r));
        for c in 0..WIDE {
            sums[r][c] = simd.mul_add_e_f32s(x, strip[c], sums[r][c]);
        }
    }
}

/// Stores accumulators in a group's strips.
#[inline(always)]
fn store<S: Simd, const HIGH: usize, const WIDE: usize>(
    sums: &Sums<S, HIGH, WIDE>,
    to: &mut [Strip],
    (row, vector): (usize, usize),
) {
    let to = to[row..].first_chunk_mut::<HIGH>().expect("rows of a group");
    for r in 0..HIGH {
        to[r].vectors_mut::<S>()[vector..vector + WIDE].copy_from_slice(&sums[r]);
    }
}

/// The matmul of a group of rows and a matrix of one panel. A term is an element of each row.
pub struct RowGroupMatmul<'a> {
    /// The panels of `height` strips, in which the group begins at strip `row`.
    pub a: &'a [Strip],
    pub height: usize,
    pub row: usize,
    /// A strip for each term.
    pub b: &'a [Strip],
    /// The first term that is summed, in the first panel.
    pub from: usize,
    /// The group's strips, to which the result is added if `add`.
    pub to: &'a mut [Strip],
    pub add: bool,
}

impl RowGroupMatmul<'_> {
    /// Computes the vectors `vectors` of the strips.
    #[inline(always)]
    pub fn compute<S: Simd>(mut self, simd: S, vectors: Range<usize>) {
        cover(simd, ROWS, vectors, &mut self);
    }

    /// Computes the vectors `vectors` of the group's first row alone.
    #[inline(always)]
    pub fn compute_row<S: Simd>(mut self, simd: S, vectors: Range<usize>) {
        cover(simd, 1, vectors, &mut self);
    }
}

impl<S: Simd> Tiles<S> for RowGroupMatmul<'_> {
    #[inline(always)]
    fn tile<const HIGH: usize, const WIDE: usize>(&mut self, simd: S, row: usize, vector: usize) {
        let mut sums: Sums<S, HIGH, WIDE> = [[simd.splat_f32s(0.0); WIDE]; HIGH];
        if self.add {
            let to = self.to[row..].first_chunk::<HIGH>().expect("rows of a group");
            for r in 0..HIGH {
                sums[r].copy_from_slice(&to[r].vectors::<S>()[vector..vector + WIDE]);
            }
        }
        let mut from = self.from;
        let mut panel = self.a;
        for b in self.b.chunks(COLUMNS) {
            let a = panel[self.row + row..].first_chunk::<HIGH>().expect("rows of a group");
            for (term, b) in (from..COLUMNS).zip(&b[from..]) {
                add(
                    simd,
                    &mut sums,
                    #[inline(always)]
                    |r| a[r].0[term],
                    b,
                    vector,
                );
            }
            (from, panel) = (0, &panel[self.height..]);
        }
        store::<S, HIGH, WIDE>(&sums, self.to, (row, vector));
    }
}

/// The matmul of the transpose of a group of columns and a matrix of one panel. A term is an
/// element of each column.
pub struct ColumnGroupMatmul<'a> {
    /// A strip for each term, in which the group begins at column `column`.
    pub a: &'a [Strip],
    pub column: usize,
    /// A strip for each term.
    pub b: &'a [Strip],
    /// The group's strips, which are overwritten.
    pub to: &'a mut [Strip],
}

impl ColumnGroupMatmul<'_> {
    /// Computes the vectors `vectors` of the strips.
    #[inline(always)]
    pub fn compute<S: Simd>(mut self, simd: S, vectors: Range<usize>) {
        cover(simd, ROWS, vectors, &mut self);
    }
}

impl<S: Simd> Tiles<S> for ColumnGroupMatmul<'_> {
    #[inline(always)]
    fn tile<const HIGH: usize, const WIDE: usize>(&mut self, simd: S, row: usize, vector: usize) {
        let mut sums: Sums<S, HIGH, WIDE> = [[simd.splat_f32s(0.0); WIDE]; HIGH];
        for (a, b) in self.a.iter().zip(self.b) {
            let a = &a.0[self.column + row..][..HIGH];
            add(
                simd,
                &mut sums,
                #[inline(always)]
                |r| a[r],
                b,
                vector,
            );
        }
        store::<S, HIGH, WIDE>(&sums, self.to, (row, vector));
    }
}
