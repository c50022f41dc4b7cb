//! Register-tiled bf16 micro-kernels.
//!
//! bf16 dot products are an instruction for which `pulp` has no function. The `unsafe` code runs
//! only on CPUs that were found to have it.

use std::arch::x86_64::{__m512, __m512bh, _mm512_dpbf16_ps};
use std::array::from_fn;
use std::mem::transmute;
use std::ops::Range;

use ndarray::ArrayViewMut2;
use pulp::x86::V4;
use pulp::{Simd as _, f32x16};

use super::{Left, OutputInit, ROWS, Right};
use crate::small_gemm::{COLUMNS, Strip};

/// Words of a row that are read at once.
const WORDS: usize = 8;

/// Elements of a vector.
const LANES: usize = 16;

/// A token of AVX512-BF16: a value exists only on CPUs that have it.
#[derive(Clone, Copy)]
pub struct Instructions(V4);

impl Instructions {
    /// Returns the instructions if the CPU has them.
    pub fn find() -> Option<Self> {
        V4::try_new().filter(|_| is_x86_feature_detected!("avx512bf16")).map(Self)
    }

    /// Returns `sum` plus the dot products of pairs of terms in `x` and `y`.
    #[inline(always)]
    fn dot(self, x: f32, y: f32x16, sum: f32x16) -> f32x16 {
        let x = self.0.splat_f32s(x);
        // SAFETY: the CPU has the instruction, or there would be no `self`; all types are 64 bytes
        // of plain numbers.
        unsafe {
            let [x, y] = [x, y].map(|words| transmute::<f32x16, __m512bh>(words));
            transmute::<__m512, f32x16>(_mm512_dpbf16_ps(transmute::<f32x16, __m512>(sum), x, y))
        }
    }
}

/// Rounds of dot products on each register in [`Instructions::multiply_add`]: some milliseconds.
const ROUNDS: usize = 1 << 20;

/// Registers that [`Instructions::multiply_add`] accumulates in in turn, because the latency of an
/// addition exceeds its throughput.
const REGISTERS: usize = 12;

impl Instructions {
    /// Multiplies and adds on registers alone; returns the number of floating-point operations, and
    /// a sum that depends on all of them.
    pub fn multiply_add(self, factor: f32) -> (usize, f32) {
        // SAFETY: the CPU has the instructions, or there would be no `self`.
        unsafe { self.multiply_add_by(factor) }
    }

    #[target_feature(
        enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi1,bmi2,lzcnt,popcnt"
    )]
    fn multiply_add_by(self, factor: f32) -> (usize, f32) {
        let words = self.0.splat_f32s(factor);
        let mut sums = [self.0.splat_f32s(0.0); REGISTERS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = self.dot(factor, words, *sum);
            }
        }
        let total =
            sums.into_iter().fold(self.0.splat_f32s(0.0), |total, sum| self.0.add_f32s(total, sum));
        // A word is two terms, each a multiplication and an addition.
        (ROUNDS * REGISTERS * LANES * 4, self.0.reduce_sum_f32s(total))
    }
}

/// A part of the output of a matmul.
pub struct OutputPart<'a> {
    pub left: Left<'a>,
    pub right: Right<'a>,
    /// Its first row; a multiple of the panel height if the left operand is packed.
    pub row: usize,
    /// Its first panel of columns.
    pub panel: usize,
    /// Its rows and columns of the output.
    pub c: ArrayViewMut2<'a, f32>,
    /// The initial value of the output; columns are numbered within the block.
    pub start: OutputInit<'a>,
}

impl OutputPart<'_> {
    /// Computes the whole part.
    ///
    /// # Panics
    /// Panics if the CPU does not have the instructions.
    pub fn compute(self) {
        let by = Instructions::find().expect("the CPU has AVX512-BF16");
        // SAFETY: the CPU has them, as `by` shows.
        unsafe { self.compute_by(by) };
    }

    #[target_feature(
        enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi1,bmi2,lzcnt,popcnt"
    )]
    fn compute_by(mut self, by: Instructions) {
        let rows = self.c.nrows();
        let mut row = 0;
        while row < rows {
            row += match rows - row {
                ROWS.. => self.across::<ROWS>(by, row),
                6.. => self.across::<6>(by, row),
                3.. => self.across::<3>(by, row),
                _ => self.across::<1>(by, row),
            };
        }
    }

    /// Computes `HIGH` rows of all columns.
    #[inline(always)]
    fn across<const HIGH: usize>(&mut self, by: Instructions, row: usize) -> usize {
        for (panel, first) in (0..self.c.ncols()).step_by(COLUMNS).enumerate() {
            let columns = first..self.c.ncols().min(first + COLUMNS);
            if columns.len() > LANES {
                self.tile::<HIGH, 2>(by, row, panel, columns);
            } else {
                self.tile::<HIGH, 1>(by, row, panel, columns);
            }
        }
        HIGH
    }

    /// Computes `HIGH` rows and `WIDE` vectors of a panel.
    #[inline(always)]
    fn tile<const HIGH: usize, const WIDE: usize>(
        &mut self,
        by: Instructions,
        row: usize,
        panel: usize,
        columns: Range<usize>,
    ) {
        let mut sums = [[by.0.splat_f32s(0.0); WIDE]; HIGH];
        let strips = self.right.panel(self.panel + panel);
        let first = self.row + row;
        match self.left {
            Left::Rows { words, stride } => {
                let (many, rest) = strips.as_chunks::<WORDS>();
                let mut at = 0;
                for strips in many {
                    let rows: [&[f32; WORDS]; HIGH] = from_fn(|r| {
                        words[(first + r) * stride + at..]
                            .first_chunk()
                            .expect("a row has all words")
                    });
                    for word in 0..WORDS {
                        add(
                            by,
                            &mut sums,
                            #[inline(always)]
                            |r| rows[r][word],
                            &strips[word],
                        );
                    }
                    at += WORDS;
                }
                for strip in rest {
                    add(
                        by,
                        &mut sums,
                        #[inline(always)]
                        |r| words[(first + r) * stride + at],
                        strip,
                    );
                    at += 1;
                }
            }
            Left::Panels { words, height } => {
                let words = words.get(first / ROWS * height..).unwrap_or_default();
                for (words, strip) in words.iter().zip(strips) {
                    let words: &[f32; HIGH] =
                        words[first % ROWS..].first_chunk().expect("rows of a panel");
                    add(
                        by,
                        &mut sums,
                        #[inline(always)]
                        |r| words[r],
                        strip,
                    );
                }
            }
        }
        // A copy in memory: sums that are indexed in a loop would not stay in registers before it.
        let mut out = [Strip([0.0; COLUMNS]); HIGH];
        for r in 0..HIGH {
            out[r].vectors_mut::<V4>()[..WIDE].copy_from_slice(&sums[r]);
        }
        let first = self.panel * COLUMNS;
        let start = self.start.for_columns(first + columns.start..first + columns.end);
        for (r, out) in out.iter().enumerate() {
            let to = &mut self.c.row_mut(row + r).into_slice().expect("rows are contiguous")
                [columns.clone()];
            start.store(to, &out.0);
        }
    }
}

/// Adds the outer product of a word of `HIGH` rows and `WIDE` vectors.
#[inline(always)]
fn add<const HIGH: usize, const WIDE: usize>(
    by: Instructions,
    sums: &mut [[f32x16; WIDE]; HIGH],
    word: impl Fn(usize) -> f32,
    strip: &Strip,
) {
    let strip = &strip.vectors::<V4>()[..WIDE];
    for r in 0..HIGH {
        let x = word(r);
        for c in 0..WIDE {
            sums[r][c] = by.dot(x, strip[c], sums[r][c]);
        }
    }
}
