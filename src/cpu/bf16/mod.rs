//! Matmuls of f32 operands rounded to bf16, with sums in f32, by AVX512-BF16.
//!
//! The output is divided into blocks whose operands fit in the caches. All threads round and pack
//! both operands, in the order in which tiles read them: a word has two neighbouring terms. Then
//! they compute tiles of the output, whose sums stay in registers (`microkernel.rs`). Words are
//! added one after the other, in K blocks of fixed length, so bits depend neither on the division
//! nor on the number of threads. The scheme is that of K. Goto and R. van de Geijn, "Anatomy of
//! high-performance matrix multiplication" (ACM TOMS 34, 2008), with packed operands shared among
//! threads. Operands in f32 are read unpacked (`../sgemm/`).

mod microkernel;
mod pack;

use std::cell::RefCell;
use std::hint::black_box;
use std::ops::Range;

use bytemuck::{Zeroable, cast_slice_mut};
use ndarray::{ArrayViewMut2, Axis};
use rayon::prelude::*;

use super::gemm_blocking::{each_output_part, k_blocks};
use super::matrix::{add_columns, matrix_mut};
use super::output_init::OutputInit;
use super::small_gemm::{COLUMNS, Strip};
use super::threads::{Threads, with_chunks};

use pack::words;

pub use pack::Operand;

/// Rows of the highest tile, and of a panel of the left operand.
const ROWS: usize = 12;

/// Words of an operand that are packed at once: 4 MiB.
const PACKED_WORDS: usize = 1 << 20;

/// Panels of columns that a task processes for a tile's rows before it takes the next rows: half of
/// a small L2 cache.
const GROUP: usize = 4;

/// Panels of rows that one task packs.
const BAND: usize = 8;

/// Tasks per thread, if there is enough work: threads that are late by one task lose little.
const TASKS: usize = 8;

/// The least rows of a task, and the least words that it multiplies: dispatching a task costs as
/// much as some thousands.
const LEAST_ROWS: usize = 2 * ROWS;
const LEAST_WORDS: usize = 1 << 18;

/// Returns whether the CPU has the instructions.
pub fn is_supported() -> bool {
    microkernel::Instructions::find().is_some()
}

/// Measures the FLOP/s of dot products of bf16 pairs, accumulated in f32, on all threads. Returns
/// `None` if the CPU lacks the instructions.
pub fn peak(threads: &Threads) -> Option<f64> {
    let by = microkernel::Instructions::find()?;
    let (operations, _) = by.multiply_add(1.0);
    let seconds = super::peak::best_seconds(|| {
        threads.run(threads.count(), |_, _| {
            black_box(by.multiply_add(black_box(1.0)));
        });
    });
    Some((operations * threads.count()) as f64 / seconds)
}

/// A range of words of rows of the left operand.
#[derive(Clone, Copy)]
enum Left<'a> {
    /// Rows with a leading dimension of `stride` words.
    Rows { words: &'a [f32], stride: usize },
    /// Panels of [`ROWS`] rows and `height` words; words of all rows of a panel are interleaved.
    Panels { words: &'a [[f32; ROWS]], height: usize },
}

impl Left<'_> {
    /// Returns the words from `word` on.
    fn words_from(self, word: usize) -> Self {
        match self {
            Left::Rows { words, stride } => {
                Left::Rows { words: words.get(word..).unwrap_or_default(), stride }
            }
            Left::Panels { words, height } => {
                Left::Panels { words: words.get(word..).unwrap_or_default(), height }
            }
        }
    }
}

/// A range of words of columns of the right operand: panels that begin `stride` strips apart.
#[derive(Clone, Copy)]
struct Right<'a> {
    strips: &'a [Strip],
    stride: usize,
    /// The number of strips of a panel that are multiplied.
    height: usize,
}

impl<'a> Right<'a> {
    /// Returns a range of the words.
    fn words(self, words: Range<usize>) -> Self {
        Self {
            strips: self.strips.get(words.start..).unwrap_or_default(),
            height: words.len(),
            ..self
        }
    }

    /// Returns panel `panel`.
    fn panel(self, panel: usize) -> &'a [Strip] {
        self.strips
            .get(panel * self.stride..)
            .unwrap_or_default()
            .get(..self.height)
            .unwrap_or_default()
    }
}

/// Buffers of packed words, kept between calls because a fresh allocation would cause page faults.
struct PackBuffers {
    right: Vec<Strip>,
    left: Vec<[f32; ROWS]>,
}

thread_local! {
    static PACK_BUFFERS: RefCell<PackBuffers> =
        const { RefCell::new(PackBuffers { right: Vec::new(), left: Vec::new() }) };
}

/// Returns `len` elements of a buffer, which grows as needed.
fn take<T: Zeroable + Clone>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::zeroed());
    }
    &mut buffer[..len]
}

/// Adds the matmul of all rows and columns to the initial value `start` of the output `c`. Adds the
/// sums of the terms of each row of the left operand, not rounded, to `sums`, unless it is empty;
/// this requires a transposed left operand.
///
/// # Panics
/// Panics if the CPU does not have the instructions.
pub fn multiply(
    threads: &Threads,
    left: Operand<'_>,
    right: Operand<'_>,
    c: &mut [f32],
    start: OutputInit<'_>,
    sums: &mut [f32],
) {
    let m = left.lines;
    let n = right.lines;
    let words = words(left.terms);
    assert!(
        sums.is_empty() || (left.is_transposed && sums.len() == m),
        "row sums require a transposed left operand"
    );
    // All words at once if they fit, or else a K block.
    let block_words = k_blocks(words).next().map_or(0, |block| block.len());
    let height = if m.max(n).next_multiple_of(BAND * ROWS) * words <= PACKED_WORDS {
        words
    } else {
        block_words
    }
    .max(1);
    let whole = |lines: usize| PACKED_WORDS / height / lines * lines;
    let wide = whole(COLUMNS);
    let high = whole(BAND * ROWS);
    PACK_BUFFERS.with_borrow_mut(|buffers| {
        for (block, mut c) in matrix_mut(c, m, n).axis_chunks_iter_mut(Axis(1), wide).enumerate() {
            let columns = block * wide..block * wide + c.ncols();
            for first in (0..words.max(1)).step_by(height) {
                let start = start.for_columns(columns.clone()).at_term(first);
                for (i, c) in c.axis_chunks_iter_mut(Axis(0), high).enumerate() {
                    let rows = i * high..i * high + c.nrows();
                    let words = first..words.min(first + height);
                    let packing =
                        PackedBlock { rows: rows.clone(), columns: columns.clone(), words };
                    let sums =
                        if block == 0 && !sums.is_empty() { &mut sums[rows] } else { &mut [] };
                    let (left, right) = packing.pack(threads, left, right, i == 0, buffers, sums);
                    tiles(threads, left, right, c, start);
                }
            }
        }
    });
}

/// Words of some rows and columns that are packed at once.
struct PackedBlock {
    rows: Range<usize>,
    columns: Range<usize>,
    words: Range<usize>,
}

/// A packing task.
enum Pack<'a> {
    /// The columns of this panel.
    Columns(usize, &'a mut [Strip]),
    /// The rows of this band, and their sums.
    Rows(usize, &'a mut [[f32; ROWS]], Option<&'a mut [f32]>),
}

impl PackedBlock {
    /// Packs the rows, and the columns if they are `new`.
    fn pack<'a>(
        &self,
        threads: &Threads,
        left: Operand<'_>,
        right: Operand<'_>,
        new: bool,
        buffers: &'a mut PackBuffers,
        sums: &mut [f32],
    ) -> (Left<'a>, Right<'a>) {
        let height = self.words.len();
        let strips = take(&mut buffers.right, self.columns.len().div_ceil(COLUMNS) * height);
        let packed = take(&mut buffers.left, self.rows.len().div_ceil(ROWS) * height);
        let panels =
            if new { &mut strips[..] } else { &mut [] }.par_chunks_mut(height.max(1)).enumerate();
        let bands = with_chunks(packed.par_chunks_mut((BAND * height).max(1)), sums, BAND * ROWS)
            .enumerate();
        let panels = panels.map(|(panel, to)| Pack::Columns(panel, to));
        let bands = bands.map(|(band, (to, sums))| Pack::Rows(band, to, sums));
        threads.each(panels.chain(bands), |task| match task {
            Pack::Columns(panel, to) => {
                let first = self.columns.start + panel * COLUMNS;
                let columns = first..self.columns.end.min(first + COLUMNS);
                right.pack::<COLUMNS>(columns, self.words.clone(), cast_slice_mut(to));
            }
            Pack::Rows(band, to, sums) => {
                let first = self.rows.start + band * BAND * ROWS;
                let rows = first..self.rows.end.min(first + BAND * ROWS);
                if left.is_transposed {
                    left.pack_panels(rows, self.words.clone(), to);
                } else {
                    left.round(rows, self.words.clone(), to.as_flattened_mut());
                }
                if let Some(sums) = sums {
                    add_columns(left.rows_of_terms(self.words.clone()), left.lines, first, sums);
                }
            }
        });
        let left = if left.is_transposed {
            Left::Panels { words: packed, height }
        } else {
            Left::Rows { words: packed.as_flattened(), stride: height }
        };
        (left, Right { strips, stride: height, height })
    }
}

/// Computes all tiles of a block, distributed over the threads, one K block after the other.
fn tiles(
    threads: &Threads,
    left: Left<'_>,
    right: Right<'_>,
    c: ArrayViewMut2<'_, f32>,
    start: OutputInit<'_>,
) {
    let (m, n) = c.dim();
    each_output_part(
        threads,
        c,
        cut(threads.count(), m, n, right.height),
        [ROWS, COLUMNS],
        |rows, columns, mut c| {
            let row = rows.start;
            let panel = columns.start / COLUMNS;
            for words in k_blocks(right.height) {
                let start = start.at_term(words.start);
                let left = left.words_from(words.start);
                let right = right.words(words);
                let c = c.view_mut();
                microkernel::OutputPart { left, right, row, panel, c, start }.compute();
            }
        },
    );
}

/// Returns the parts of a block along rows and along columns for `threads` threads.
fn cut(threads: usize, m: usize, n: usize, words: usize) -> [usize; 2] {
    let most = (m * n * words / LEAST_WORDS).clamp(1, TASKS * threads);
    let wide = n.div_ceil(COLUMNS).div_ceil(GROUP).max(1);
    let high = most.div_ceil(wide).next_multiple_of(threads).min(m.div_ceil(LEAST_ROWS)).max(1);
    if most == 1 { [1, 1] } else { [high, wide] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::add_rows;
    use hpctrain_base::random::Stream;

    fn numbers(len: usize, seed: u64) -> Vec<f32> {
        let mut numbers = vec![0.0; len];
        Stream::new(seed).fill_normal(&mut numbers);
        numbers
    }

    /// Shapes with partial tiles, panels, bands, words and K blocks, and with more than is packed
    /// at once.
    const SHAPES: [[usize; 3]; 9] = [
        [1, 1, 1],
        [17, 33, 7],
        [48, 64, 1024],
        [97, 31, 1025],
        [130, 257, 2051],
        [25, PACKED_WORDS / 512 + 70, 1021],
        [PACKED_WORDS / 512 + 130, 20, 1200],
        [300, 40, 2],
        [20, 100, 0],
    ];

    /// Returns the elements transposed.
    fn transposed(x: &[f32], lines: usize) -> Vec<f32> {
        let terms = x.len() / lines;
        (0..terms).flat_map(|term| (0..lines).map(move |line| x[line * terms + term])).collect()
    }

    #[test]
    fn products_are_those_of_rounded_operands_whichever_way_they_lie() {
        if !is_supported() {
            return eprintln!("skipped: the CPU has no AVX512-BF16");
        }
        let rounded = |x: f32| f64::from(half::bf16::from_f32(x).to_f32());
        for [m, n, k] in SHAPES {
            let a = numbers(m * k, 1);
            let b = numbers(k * n, 2);
            let bias = numbers(n, 3);
            let a_across = transposed(&a, m);
            let b_across = transposed(&b, n);
            let mut bits = None;
            for [of_a, of_b] in [[false, false], [false, true], [true, false], [true, true]] {
                let left = Operand::new(if of_a { &a_across } else { &a }, m, k, of_a);
                let right = Operand::new(if of_b { &b_across } else { &b }, n, k, of_b);
                let mut got = vec![f32::NAN; m * n];
                let mut sums = if of_a { vec![0.5; m] } else { Vec::new() };
                let threads = Threads::new(1 + 2 * usize::from(of_b));
                multiply(&threads, left, right, &mut got, OutputInit::Bias(&bias), &mut sums);
                for at in (0..m * n).step_by(1 + m * n / 97) {
                    let row = at / n;
                    let column = at % n;
                    let first = f64::from(bias[column]);
                    let (want, size) = (0..k)
                        .map(|l| rounded(a[row * k + l]) * rounded(b[column * k + l]))
                        .fold((first, first.abs()), |(sum, size), x| (sum + x, size + f64::abs(x)));
                    assert!(
                        (f64::from(got[at]) - want).abs() <= 1e-6 * size,
                        "{m} × {n} × {k} at {row}, {column}"
                    );
                }
                let mut again = vec![f32::NAN; m * n];
                multiply(&threads, left, right, &mut again, OutputInit::Zero, &mut []);
                multiply(&threads, left, right, &mut again, OutputInit::Accumulate, &mut []);
                let twice =
                    got.iter().zip(bias.iter().cycle()).map(|(got, bias)| 2.0 * (got - bias));
                assert!(
                    twice.zip(&again).all(|(want, got)| (want - got).abs() < 1e-3),
                    "{m} × {n} × {k}, twice"
                );
                if of_a {
                    let mut want = vec![0.5; m];
                    add_rows(&threads, left.x, m, &mut want);
                    assert!(sums == want, "sums of rows, {m} × {n} × {k}");
                }
                let got: Vec<u32> = got.into_iter().map(f32::to_bits).collect();
                assert!(
                    *bits.get_or_insert_with(|| got.clone()) == got,
                    "{m} × {n} × {k}, across: {of_a}, {of_b}"
                );
            }
        }
    }

    #[test]
    fn blocks_are_cut_for_the_threads() {
        // Dividing columns alone would leave a thread idle; little work stays in one part.
        assert_eq!(cut(2, 2048, 384, 256), [6, 3]);
        assert_eq!(cut(1, 2048, 384, 256), [3, 3]);
        assert_eq!(cut(2, 32, 64, 64), [1, 1]);
        assert_eq!(cut(64, 100, 1536, 512), [5, 12]);
    }
}
