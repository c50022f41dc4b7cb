//! Operands of matmuls: read unpacked, or packed into panels.

use std::array::from_fn;
use std::ops::Range;

use bytemuck::{Pod, Zeroable, cast_slice_mut};
use ndarray::{ArrayView2, Axis, s};

use crate::matrix::add_columns;
use crate::nontemporal::prefetch;
use crate::transpose::transpose;

/// Columns of a panel: four AVX-512 vectors.
pub const COLUMNS: usize = 64;

/// Rows of the highest tile.
pub const HIGH: usize = 6;

/// Rows that are multiplied by a group of panels together.
pub const ROWS: usize = 8 * HIGH;

/// Neighbouring columns of one row, aligned to a cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
pub struct NrPanel(pub [f32; COLUMNS]);

/// Rows of a panel of the left operand, which is as high as the highest tile.
pub const PANEL: usize = HIGH;

/// A term of the rows of a panel of the left operand.
pub type MrPanel = [f32; PANEL];

/// Terms that are prefetched: the distance to the next row is too large for the hardware
/// prefetcher.
const AHEAD: usize = 8;

/// The left operand, whose elements are broadcast to all columns of a tile.
#[derive(Clone, Copy)]
pub enum LhsView<'a> {
    /// Rows of contiguous terms.
    Rows(ArrayView2<'a, f32>),
    /// Transposed: a row of `width` elements for each term, without padding.
    Transposed { x: &'a [f32], width: usize },
}

impl<'a> LhsView<'a> {
    pub fn terms(self) -> usize {
        match self {
            LhsView::Rows(x) => x.ncols(),
            LhsView::Transposed { x, width } => x.len() / width,
        }
    }

    /// Returns some terms of some rows as tiles read them. A transposed operand is packed into
    /// `panels`, and the terms of each row are added to its sum in `sums`, unless that is empty.
    #[inline(always)]
    pub fn block<'b>(
        self,
        terms: Range<usize>,
        rows: Range<usize>,
        panels: &'b mut [MrPanel],
        sums: &mut [f32],
    ) -> LhsBlock<'b>
    where
        'a: 'b,
    {
        let (x, width) = match self {
            LhsView::Rows(x) => return LhsBlock::Unpacked(x.slice_move(s![.., terms])),
            LhsView::Transposed { x, width } => (x, width),
        };
        let x = &x[terms.start * width..];
        let height = terms.len();
        for (band, panels) in
            rows.clone().step_by(ROWS).zip(panels.chunks_mut(ROWS / PANEL * height))
        {
            let band = band..rows.end.min(band + ROWS);
            for (term, row) in x.chunks_exact(width).take(height).enumerate() {
                prefetch(x, (term + AHEAD) * width + band.start, band.len());
                for (x, panel) in
                    row[band.clone()].chunks(PANEL).zip(panels.chunks_exact_mut(height))
                {
                    match x.first_chunk() {
                        Some(x) => panel[term] = *x,
                        None => panel[term][..x.len()].copy_from_slice(x),
                    }
                }
            }
            if !sums.is_empty() {
                let sums = &mut sums[band.start - rows.start..band.end - rows.start];
                add_columns(&x[..height * width], width, band.start, sums);
            }
        }
        LhsBlock::Packed { terms: panels, height, first: rows.start }
    }
}

/// Some terms of rows of the left operand.
#[derive(Clone, Copy)]
pub enum LhsBlock<'a> {
    /// All rows, unpacked.
    Unpacked(ArrayView2<'a, f32>),
    /// Panels of `height` terms of the rows from `first` on.
    Packed { terms: &'a [MrPanel], height: usize, first: usize },
}

impl<'a> LhsBlock<'a> {
    /// Returns the `HIGH` rows from `row` on; in packed operands a panel begins there.
    #[inline(always)]
    pub fn tile_rows<const HIGH: usize>(self, row: usize) -> TileRows<'a, HIGH> {
        match self {
            LhsBlock::Unpacked(x) => TileRows::Rows(from_fn(|r| {
                x.index_axis_move(Axis(0), row + r).to_slice().expect("terms are contiguous")
            })),
            LhsBlock::Packed { terms, height, first } => {
                TileRows::Panel(&terms[(row - first) / PANEL * height..][..height])
            }
        }
    }
}

/// Some terms of the rows of a tile.
pub enum TileRows<'a, const HIGH: usize> {
    Rows([&'a [f32]; HIGH]),
    Panel(&'a [MrPanel]),
}

/// The right operand, which is packed.
#[derive(Clone, Copy)]
pub enum RhsView<'a> {
    /// A row of contiguous columns for each term.
    Terms(ArrayView2<'a, f32>),
    /// Transposed: a row of contiguous terms for each column, without padding.
    Lines(&'a [f32]),
}

impl RhsView<'_> {
    /// Packs `terms`, of `all`, of the columns of a panel. The contents of padding columns are
    /// unspecified.
    pub fn pack(self, all: usize, terms: Range<usize>, columns: Range<usize>, to: &mut [NrPanel]) {
        match self {
            RhsView::Terms(x) => {
                for (term, to) in terms.zip(to) {
                    if term + AHEAD < all {
                        let ahead = x.row(term + AHEAD).to_slice().expect("columns are contiguous");
                        prefetch(ahead, columns.start, columns.len());
                    }
                    let row =
                        &x.row(term).to_slice().expect("columns are contiguous")[columns.clone()];
                    match row.first_chunk() {
                        Some(row) => to.0 = *row,
                        None => to.0[..row.len()].copy_from_slice(row),
                    }
                }
            }
            RhsView::Lines(x) => {
                transpose(
                    &x[columns.start * all..columns.end * all],
                    all,
                    terms,
                    cast_slice_mut(to),
                    COLUMNS,
                );
            }
        }
    }
}
