//! Checksums, also fused into updates: each element is added while it is in a register.

use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::Cpu;
use super::math::simd;
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::ops::checksum::{CHUNK, weight};
use hpctrain_device::{DigestOps, KernelCost, UpdateChecksums};

/// Returns the checksum of chunk `number`.
fn of_chunk(number: usize, x: &[f32]) -> u32 {
    let first = (number * CHUNK) as u32;
    simd(
        #[inline(always)]
        || {
            let mut sum = 0u32;
            for (i, x) in x.iter().enumerate() {
                sum = sum
                    .wrapping_add(x.to_bits().wrapping_mul(weight(first.wrapping_add(i as u32))));
            }
            sum
        },
    )
}

/// Checksums of an update's buffers, accumulated by all threads.
#[derive(Default)]
pub struct ChecksumTotals {
    found: AtomicU64,
    left: AtomicU64,
}

/// Observes the elements of a chunk before and after an update.
pub trait UpdateObserver<const N: usize> {
    /// Observes element `i` of each buffer before the update.
    fn found(&mut self, i: usize, elements: &[f32; N]);
    /// Observes element `i` of each buffer after the update.
    fn left(&mut self, i: usize, elements: &[f32; N]);
}

/// An observer that does nothing.
pub struct NoChecksum;

impl<const N: usize> UpdateObserver<N> for NoChecksum {
    #[inline(always)]
    fn found(&mut self, _: usize, _: &[f32; N]) {}
    #[inline(always)]
    fn left(&mut self, _: usize, _: &[f32; N]) {}
}

/// The checksums of a chunk of each of `N` buffers.
pub struct ChunkChecksum<'a, const N: usize> {
    counts: &'a ChecksumTotals,
    /// The index of the chunk's first element.
    first: u32,
    found: [u32; N],
    left: [u32; N],
}

impl<'a, const N: usize> ChunkChecksum<'a, N> {
    /// Creates the checksums of chunk `number`; they are added to `counts` when it is dropped.
    pub fn new(counts: &'a ChecksumTotals, number: usize) -> Self {
        Self { counts, first: (number * CHUNK) as u32, found: [0; N], left: [0; N] }
    }

    #[inline(always)]
    fn add(sums: &mut [u32; N], index: u32, elements: &[f32; N]) {
        let weight = weight(index);
        for n in 0..N {
            sums[n] = sums[n].wrapping_add(elements[n].to_bits().wrapping_mul(weight));
        }
    }
}

impl<const N: usize> UpdateObserver<N> for ChunkChecksum<'_, N> {
    #[inline(always)]
    fn found(&mut self, i: usize, elements: &[f32; N]) {
        Self::add(&mut self.found, self.first.wrapping_add(i as u32), elements);
    }

    #[inline(always)]
    fn left(&mut self, i: usize, elements: &[f32; N]) {
        Self::add(&mut self.left, self.first.wrapping_add(i as u32), elements);
    }
}

impl<const N: usize> Drop for ChunkChecksum<'_, N> {
    fn drop(&mut self) {
        for (count, sums) in [(&self.counts.found, &self.found), (&self.counts.left, &self.left)] {
            count.fetch_add(sums.iter().map(|&sum| u64::from(sum)).sum(), Ordering::Relaxed);
        }
    }
}

/// Runs an update, and adds the checksums of its buffers to `checksums`, if given.
pub fn with_checksums(
    checksums: Option<&mut UpdateChecksums<f64>>,
    update: impl FnOnce(Option<&ChecksumTotals>),
) {
    let Some(checksums) = checksums else { return update(None) };
    let counts = ChecksumTotals::default();
    update(Some(&counts));
    // An integer below 2⁵³, which f64 holds exactly.
    checksums.before.push(counts.found.into_inner() as f64);
    checksums.after.push(counts.left.into_inner() as f64);
}

fn digest(threads: &Threads, x: &[f32]) -> f64 {
    let sum = AtomicU64::new(0);
    threads.each(x.par_chunks(CHUNK).enumerate(), |(number, chunk)| {
        sum.fetch_add(u64::from(of_chunk(number, chunk)), Ordering::Relaxed);
    });
    sum.into_inner() as f64
}

impl DigestOps for Cpu {
    fn digest(&self, x: &[f32]) -> Result<f64> {
        let _launch = self.start_kernel(KernelCost::digest(x.len()));
        Ok(digest(&self.threads, x))
    }
}
