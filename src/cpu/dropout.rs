//! Dropout (Srivastava et al., 2014) with masks computed from a counter.

use rayon::prelude::*;

use super::Cpu;
use super::elementwise::CHUNK;
use super::math::simd;
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_base::random::Stream;
use hpctrain_device::{Dropout, DropoutOps, KernelCost};

/// Blocks of random words that are computed together.
const BLOCKS: usize = 64;

pub fn dropout(threads: &Threads, mask: Dropout, x: &mut [f32]) {
    if mask.rate == 0.0 {
        return;
    }
    let stream = Stream::new(mask.key);
    let dropped_below = (f64::from(mask.rate) * 4_294_967_296.0) as u32;
    let kept = 1.0 / (1.0 - mask.rate);
    threads.each(x.par_chunks_mut(CHUNK).enumerate(), |(i, x)| {
        let first = mask.offset + (i * CHUNK) as u64;
        simd(
            #[inline(always)]
            || {
                // Four elements share a counter block; the window may begin inside one.
                let lead = ((4 - first % 4) % 4).min(x.len() as u64) as usize;
                let (head, body) = x.split_at_mut(lead);
                let words = stream.block(first / 4);
                for (j, x) in head.iter_mut().enumerate() {
                    *x *= if words[(first % 4) as usize + j] < dropped_below { 0.0 } else { kept };
                }
                let mut block = first.div_ceil(4);
                let (groups, rest) = body.as_chunks_mut::<{ 4 * BLOCKS }>();
                for group in groups {
                    let words = stream.blocks::<BLOCKS>(block);
                    let mut factors = [[0.0; BLOCKS]; 4];
                    for (factors, words) in factors.iter_mut().zip(&words) {
                        for (factor, &word) in factors.iter_mut().zip(words) {
                            // A conditional would become a branch, which is mispredicted for many
                            // elements.
                            *factor = f32::from(u8::from(word >= dropped_below)) * kept;
                        }
                    }
                    let (quads, _) = group.as_chunks_mut::<4>();
                    for (j, quad) in quads.iter_mut().enumerate() {
                        for i in 0..4 {
                            quad[i] *= factors[i][j];
                        }
                    }
                    block += BLOCKS as u64;
                }
                for (j, quad) in rest.chunks_mut(4).enumerate() {
                    let words = stream.block(block + j as u64);
                    for (x, word) in quad.iter_mut().zip(words) {
                        *x *= if word < dropped_below { 0.0 } else { kept };
                    }
                }
            },
        );
    });
}

impl DropoutOps for Cpu {
    fn dropout(&self, mask: Dropout, x: &mut [f32]) -> Result<()> {
        let _launch = self.start_kernel(KernelCost::dropout(x.len()));
        dropout(&self.threads, mask, x);
        Ok(())
    }
}
