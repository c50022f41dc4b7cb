//! Digests, also in the pass of an update: each chunk is read while the caches have it.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Cpu;
use super::math::simd;
use super::threads::Threads;
use crate::backend::ops::digest::{CHUNK, weight};
use crate::backend::{Audit, DigestOps, Work};
use crate::error::Result;

/// The digest of chunk `number`.
fn of_chunk(number: usize, x: &[f32]) -> u32 {
    let first = (number * CHUNK) as u32;
    simd(
        #[inline(always)]
        || {
            let mut sum = 0u32;
            for (i, x) in x.iter().enumerate() {
                sum = sum.wrapping_add(x.to_bits().wrapping_mul(weight(first.wrapping_add(i as u32))));
            }
            sum
        },
    )
}

/// Digests of the chunks of an update, from all threads.
#[derive(Default)]
pub struct Counts {
    found: AtomicU64,
    left: AtomicU64,
}

impl Counts {
    fn add<const N: usize>(to: &AtomicU64, number: usize, buffers: &[&mut [f32]; N]) {
        let sum = buffers.iter().map(|chunk| u64::from(of_chunk(number, chunk))).sum();
        to.fetch_add(sum, Ordering::Relaxed);
    }
}

/// Changes chunk `number` of some buffers by `update`, with a digest before and after if they are counted.
#[inline(always)]
pub fn watched<const N: usize>(
    counts: Option<&Counts>,
    number: usize,
    mut buffers: [&mut [f32]; N],
    update: impl FnOnce(&mut [&mut [f32]; N]),
) {
    if let Some(counts) = counts {
        Counts::add(&counts.found, number, &buffers);
    }
    update(&mut buffers);
    if let Some(counts) = counts {
        Counts::add(&counts.left, number, &buffers);
    }
}

/// Runs an update whose digests are counted if there is an audit.
pub fn audited(audit: Option<&mut Audit<f64>>, update: impl FnOnce(Option<&Counts>)) {
    let Some(audit) = audit else { return update(None) };
    let counts = Counts::default();
    update(Some(&counts));
    // An integer below 2⁵³.
    audit.found.push(counts.found.into_inner() as f64);
    audit.left.push(counts.left.into_inner() as f64);
}

fn digest(threads: &Threads, x: &[f32]) -> f64 {
    let sum = AtomicU64::new(0);
    threads.each(x.chunks(CHUNK).enumerate(), |(number, chunk)| {
        sum.fetch_add(u64::from(of_chunk(number, chunk)), Ordering::Relaxed);
    });
    sum.into_inner() as f64
}

impl DigestOps for Cpu {
    fn digest(&self, x: &[f32]) -> Result<f64> {
        let _launch = self.launched(Work::digest(x.len()));
        Ok(digest(&self.threads, x))
    }
}
