//! Token and position embeddings, added.

use rayon::prelude::*;

use super::math::simd;
use super::threads::Threads;
use super::{Cpu, CpuInts};
use hpctrain_base::error::Result;
use hpctrain_device::{EmbeddingOps, KernelCost};

/// Rows of one task.
const ROWS: usize = 64;
/// Table columns of one task in the backward.
const COLUMNS: usize = 32;

/// Returns the width of the tables, given the number of rows of `y`.
fn width(rows: usize, y: &[f32]) -> usize {
    y.len() / rows.max(1)
}

/// Returns the row of a token in a table of consecutive tokens from `first` on.
#[inline(always)]
fn row_of(token: u32, first: usize, rows: usize) -> Option<usize> {
    (token as usize).checked_sub(first).filter(|row| *row < rows)
}

pub fn forward(
    threads: &Threads,
    tokens: &[u32],
    first: usize,
    token_table: &[f32],
    position_table: &[f32],
    y: &mut [f32],
) {
    let d = width(tokens.len(), y);
    let words = token_table.len() / d.max(1);
    let context = position_table.len() / d.max(1);
    // Without positions every row is its token's embedding.
    let place = |row: usize| (context > 0).then(|| &position_table[row % context * d..][..d]);
    threads.each(
        y.par_chunks_mut(ROWS * d).zip(tokens.par_chunks(ROWS)).enumerate(),
        |(i, (y, tokens))| {
            simd(
                #[inline(always)]
                || {
                    for (row, (y, &token)) in y.chunks_exact_mut(d).zip(tokens).enumerate() {
                        match row_of(token, first, words) {
                            Some(word) => y.copy_from_slice(&token_table[word * d..][..d]),
                            None => y.fill(0.0),
                        }
                        for (y, place) in y.iter_mut().zip(place(i * ROWS + row).unwrap_or(&[])) {
                            *y += place;
                        }
                    }
                },
            );
        },
    );
}

pub fn backward(
    threads: &Threads,
    tokens: &[u32],
    first: usize,
    dy: &[f32],
    dtoken_table: &mut [f32],
    dposition_table: &mut [f32],
) {
    let d = width(tokens.len(), dy);
    let words = dtoken_table.len() / d.max(1);
    let context = dposition_table.len() / d.max(1);
    add_rows_at(threads, d, dy, dtoken_table, |row| row_of(tokens[row], first, words));
    if context > 0 {
        add_rows_at(threads, d, dy, dposition_table, |row| Some(row % context));
    }
}

/// Computes `table[at(row)] += dy[row]` for the rows for which `at` returns an index. Each task
/// owns some columns of the table and walks all rows in order, so tasks do not conflict and the
/// order of every sum is fixed.
fn add_rows_at(
    threads: &Threads,
    d: usize,
    dy: &[f32],
    table: &mut [f32],
    at: impl Fn(usize) -> Option<usize> + Sync,
) {
    let mut table = ndarray::ArrayViewMut2::from_shape((table.len() / d.max(1), d), table)
        .expect("rows of width d");
    let parts: Vec<_> = table.axis_chunks_iter_mut(ndarray::Axis(1), COLUMNS).collect();
    threads.each(parts.into_par_iter().enumerate(), |(i, mut part)| {
        simd(
            #[inline(always)]
            || {
                for (row, dy) in dy.chunks_exact(d).enumerate() {
                    let Some(at) = at(row) else { continue };
                    let mut sum = part.row_mut(at);
                    let dy = &dy[i * COLUMNS..][..sum.len()];
                    if let Some(sum) = sum.as_slice_mut() {
                        for (sum, dy) in sum.iter_mut().zip(dy) {
                            *sum += dy;
                        }
                    }
                }
            },
        );
    });
}

impl EmbeddingOps for Cpu {
    fn embedding(
        &self,
        tokens: &CpuInts,
        first: usize,
        token_table: &[f32],
        position_table: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::embedding(y.len(), position_table.len()));
        forward(&self.threads, tokens, first, token_table, position_table, y);
        Ok(())
    }

    fn embedding_backward(
        &self,
        tokens: &CpuInts,
        first: usize,
        dy: &[f32],
        dtoken_table: &mut [f32],
        dposition_table: &mut [f32],
    ) -> Result<()> {
        let _launch =
            self.start_kernel(KernelCost::embedding_backward(dy.len(), dposition_table.len()));
        backward(&self.threads, tokens, first, dy, dtoken_table, dposition_table);
        Ok(())
    }
}
