//! Packing of operands, which are rounded to bf16.

use std::ops::Range;

use bytemuck::cast_slice_mut;

use crate::math::{simd, to_bf16};
use crate::nontemporal::prefetch;
use crate::transpose::transpose;

/// Words of a line that are rounded before they are transposed.
const FEW: usize = 64;

/// Rows of memory that are prefetched: the distance to the next row is too large for the hardware
/// prefetcher.
const AHEAD: usize = 8;

/// Returns the words of `terms` terms: each holds two, the first in its lower half.
pub fn words(terms: usize) -> usize {
    terms.div_ceil(2)
}

/// An operand: rows of the left one or columns of the right one, called lines, with the same number
/// of terms each.
#[derive(Clone, Copy)]
pub struct Operand<'a> {
    pub x: &'a [f32],
    pub lines: usize,
    pub terms: usize,
    /// Whether the operand is stored transposed: neighbours in memory belong to different lines.
    pub is_transposed: bool,
}

impl<'a> Operand<'a> {
    /// Creates an operand of `lines` lines of `terms` terms.
    pub fn new(x: &'a [f32], lines: usize, terms: usize, is_transposed: bool) -> Self {
        assert_eq!(x.len(), lines * terms, "an operand's elements");
        Self { x, lines, terms, is_transposed }
    }

    /// Returns the terms of `words`.
    fn terms_of(self, words: Range<usize>) -> Range<usize> {
        2 * words.start..self.terms.min(2 * words.end)
    }

    /// Returns `words` of all lines of a transposed operand: rows of a term each.
    pub fn rows_of_terms(self, words: Range<usize>) -> &'a [f32] {
        let terms = self.terms_of(words);
        &self.x[terms.start * self.lines..terms.end * self.lines]
    }

    /// Packs `words` of `lines` of a transposed operand into panels of `WIDE` lines, one after the
    /// other: the words of all lines of a panel are interleaved. Missing lines of the last panel
    /// are zero.
    pub fn pack_panels<const WIDE: usize>(
        self,
        lines: Range<usize>,
        words: Range<usize>,
        to: &mut [[f32; WIDE]],
    ) {
        let height = words.len();
        let rows = self.rows_of_terms(words);
        simd(
            #[inline(always)]
            || {
                for (word, pair_of_rows) in rows.chunks(2 * self.lines).enumerate() {
                    for next in 2 * word + AHEAD..2 * word + AHEAD + 2 {
                        prefetch(rows, next * self.lines + lines.start, lines.len());
                    }
                    let (one, two) = pair_of_rows.split_at(self.lines);
                    let mut two = two.get(lines.clone()).unwrap_or_default().chunks(WIDE);
                    for (panel, x) in one[lines.clone()].chunks(WIDE).enumerate() {
                        pair(x, two.next().unwrap_or_default(), &mut to[panel * height + word]);
                    }
                }
            },
        );
    }

    /// Packs `words` of at most `WIDE` lines into a panel, laid out as in [`Operand::pack_panels`].
    pub fn pack<const WIDE: usize>(
        self,
        lines: Range<usize>,
        words: Range<usize>,
        to: &mut [[f32; WIDE]],
    ) {
        if self.is_transposed {
            return self.pack_panels(lines, words, to);
        }
        if lines.len() < WIDE {
            to.fill([0.0; WIDE]);
        }
        let terms = self.terms_of(words);
        let x = &self.x[lines.start * self.terms..lines.end * self.terms];
        let mut few = [[0.0; FEW]; WIDE];
        for (i, to) in to.chunks_mut(FEW).enumerate() {
            let first = terms.start + 2 * i * FEW;
            for (x, few) in x.chunks_exact(self.terms).zip(&mut few) {
                round(&x[first..terms.end.min(first + 2 * FEW)], few);
            }
            transpose(
                few[..lines.len()].as_flattened(),
                FEW,
                0..to.len(),
                to.as_flattened_mut(),
                WIDE,
            );
        }
    }

    /// Rounds `words` of `lines`, one line after the other.
    pub fn round(self, lines: Range<usize>, words: Range<usize>, to: &mut [f32]) {
        let each = words.len().max(1);
        let terms = self.terms_of(words);
        let x = &self.x[lines.start * self.terms..lines.end * self.terms];
        for (x, to) in x.chunks_exact(self.terms.max(1)).zip(to.chunks_exact_mut(each)) {
            round(&x[terms.clone()], to);
        }
    }
}

/// Rounds two terms of each of some lines; the second may be missing.
#[inline(always)]
fn pair<const WIDE: usize>(one: &[f32], two: &[f32], to: &mut [f32; WIDE]) {
    if let (Some(one), Some(two)) = (one.first_chunk::<WIDE>(), two.first_chunk::<WIDE>()) {
        for i in 0..WIDE {
            to[i] = join(one[i], two[i]);
        }
    } else {
        *to = [0.0; WIDE];
        for (i, to) in to.iter_mut().enumerate().take(one.len()) {
            *to = join(one[i], two.get(i).copied().unwrap_or_default());
        }
    }
}

#[inline(always)]
fn join(one: f32, two: f32) -> f32 {
    f32::from_bits(u32::from(to_bf16(one)) | u32::from(to_bf16(two)) << 16)
}

/// Rounds terms of one line; the last may be unpaired.
fn round(x: &[f32], to: &mut [f32]) {
    simd(
        #[inline(always)]
        || {
            let to: &mut [u16] = cast_slice_mut(to);
            if let Some(last) = to.get_mut(x.len()) {
                *last = 0;
            }
            for (to, x) in to.iter_mut().zip(x) {
                *to = to_bf16(*x);
            }
        },
    );
}
