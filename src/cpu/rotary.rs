//! Rotary position embeddings (Su et al., 2021).

use rayon::prelude::*;

use super::Cpu;
use super::math::simd;
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::{KernelCost, Rotary, RotaryOps};

/// Rows of one task.
const ROWS: usize = 16;

pub fn rotary(threads: &Threads, s: Rotary, table: &[f32], x: &mut [f32]) {
    let half = s.head_width / 2;
    assert!(x.len() == s.batch * s.time * s.width && table.len() >= s.time * s.head_width, "{s:?}");
    threads.each(x.par_chunks_mut(ROWS * s.width).enumerate(), |(task, x)| {
        simd(
            #[inline(always)]
            || {
                for (row, x) in x.chunks_exact_mut(s.width).enumerate() {
                    let position = (task * ROWS + row) % s.time;
                    let (cos, sin) =
                        table[position * s.head_width..][..s.head_width].split_at(half);
                    for head in x[..s.heads * s.head_width].chunks_exact_mut(s.head_width) {
                        let (first, second) = head.split_at_mut(half);
                        for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin)
                        {
                            let sin = if s.inverse { -sin } else { sin };
                            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                        }
                    }
                }
            },
        );
    });
}

impl RotaryOps for Cpu {
    fn rotary(&self, shape: Rotary, table: &[f32], x: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::rotary(
            shape.batch * shape.time * shape.heads * shape.head_width,
        ));
        rotary(&self.threads, shape, table, x);
        Ok(())
    }
}
