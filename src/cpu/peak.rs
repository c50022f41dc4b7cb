//! Peak rates of the cores and the memory without any other work: the reference for kernels.

use std::hint::black_box;
use std::time::Instant;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::threads::Threads;

/// The number of tries, of which the best counts, since other processes may use the machine.
const TRIES: usize = 10;

/// Fused multiply-adds of each register in one try: some milliseconds.
const ROUNDS: usize = 1 << 20;

/// Registers that accumulate in turn, because the latency of an addition exceeds its throughput.
const REGISTERS: usize = 12;

/// Elements of each array of the triad, 64 MiB: larger than the caches.
const ELEMENTS: usize = 1 << 24;

/// Elements of one task.
const CHUNK: usize = 1 << 16;

/// Returns the shortest time of several tries in seconds.
pub(super) fn best_seconds(mut run: impl FnMut()) -> f64 {
    let tries = (0..TRIES).map(|_| {
        let begun = Instant::now();
        run();
        begun.elapsed().as_secs_f64()
    });
    tries.fold(f64::INFINITY, f64::min)
}

/// Fused multiply-adds on registers; returns how many elements it computed.
struct Fused(f32);

impl WithSimd for Fused {
    type Output = (usize, f32);

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
        let factor = simd.splat_f32s(self.0);
        let more = simd.splat_f32s(1.0 - self.0);
        let mut sums = [simd.splat_f32s(1.0); REGISTERS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = simd.mul_add_f32s(*sum, factor, more);
            }
        }
        let total =
            sums.into_iter().fold(simd.splat_f32s(0.0), |total, sum| simd.add_f32s(total, sum));
        (ROUNDS * REGISTERS * S::F32_LANES, simd.reduce_sum_f32s(total))
    }
}

/// Returns the FLOP/s of fused multiply-adds on all threads.
pub fn flops(threads: &Threads) -> f64 {
    let arch = Arch::new();
    let elements = arch.dispatch(Fused(black_box(0.5))).0;
    let seconds = best_seconds(|| {
        threads.run(threads.count(), |_, _| {
            black_box(arch.dispatch(Fused(black_box(0.5))));
        });
    });
    (2 * elements * threads.count()) as f64 / seconds
}

/// Returns the bytes per second that `a = b + 3·c` moves on all threads: McCalpin's triad (STREAM,
/// 1995), every array counted once.
pub fn bandwidth(threads: &Threads) -> f64 {
    let mut a = vec![0.0f32; ELEMENTS];
    let b = vec![1.0f32; ELEMENTS];
    let c = vec![2.0f32; ELEMENTS];
    let seconds = best_seconds(|| {
        let parts = a.par_chunks_mut(CHUNK).zip(b.par_chunks(CHUNK)).zip(c.par_chunks(CHUNK));
        threads.each(parts, |((a, b), c)| {
            super::math::simd(
                #[inline(always)]
                || {
                    for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
                        *a = c.mul_add(3.0, *b);
                    }
                },
            );
        });
    });
    black_box(&a);
    (3 * ELEMENTS * size_of::<f32>()) as f64 / seconds
}
