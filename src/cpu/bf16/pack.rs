//! Operands of products, rounded to bf16 on their way into panels.

use std::ops::Range;

use bytemuck::cast_slice_mut;

use crate::math::{simd, to_bf16};
use crate::nontemporal::prefetch;
use crate::transpose::transpose;

/// Words of a line that are rounded before they are turned over.
const FEW: usize = 64;

/// Rows of memory that are asked for before they are read: the next lies too far away for the CPU
/// to guess.
const AHEAD: usize = 8;

/// Words of so many terms: each has two, the first in its lower half.
pub fn words(terms: usize) -> usize {
    terms.div_ceil(2)
}

/// An operand: rows of the left one or columns of the right one, which are its lines, with as many
/// terms each.
#[derive(Clone, Copy)]
pub struct Operand<'a> {
    pub x: &'a [f32],
    pub lines: usize,
    pub terms: usize,
    /// Whether neighbours in memory are of different lines, not terms of the same line.
    pub across: bool,
}

impl<'a> Operand<'a> {
    /// An operand of so many lines.
    pub fn new(x: &'a [f32], lines: usize, terms: usize, across: bool) -> Self {
        assert_eq!(x.len(), lines * terms, "an operand's elements");
        Self { x, lines, terms, across }
    }

    /// The terms of such words.
    fn terms_of(self, words: Range<usize>) -> Range<usize> {
        2 * words.start..self.terms.min(2 * words.end)
    }

    /// Such words of all lines, which lie across: rows of a term each.
    pub fn rows_of_terms(self, words: Range<usize>) -> &'a [f32] {
        let terms = self.terms_of(words);
        &self.x[terms.start * self.lines..terms.end * self.lines]
    }

    /// Writes some words of any number of lines, which lie across, to panels of `WIDE` lines, one
    /// after the other: words of one place are neighbours. Lines that are missing in the last panel
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

    /// Writes some words of at most `WIDE` lines to a panel, as [`Operand::pack_panels`].
    pub fn pack<const WIDE: usize>(
        self,
        lines: Range<usize>,
        words: Range<usize>,
        to: &mut [[f32; WIDE]],
    ) {
        if self.across {
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

    /// Writes some words of some lines, one line after the other.
    pub fn round(self, lines: Range<usize>, words: Range<usize>, to: &mut [f32]) {
        let each = words.len().max(1);
        let terms = self.terms_of(words);
        let x = &self.x[lines.start * self.terms..lines.end * self.terms];
        for (x, to) in x.chunks_exact(self.terms.max(1)).zip(to.chunks_exact_mut(each)) {
            round(&x[terms.clone()], to);
        }
    }
}

/// Two terms of each of some lines; the second may be missing.
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

/// Rounds terms of one line; the last may have no partner.
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
