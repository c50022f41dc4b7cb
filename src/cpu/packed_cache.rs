//! A cache of packed weights, which the micro-batches of a step share while they do not change.
//!
//! `Backend::begin_weight_reuse` announces parameters that several micro-batches multiply before
//! they change. Weights are cached as panels, in the order in which the kernel reads them, within a
//! fixed number of bytes that the memory estimate includes. Only weights within announced
//! parameters are cached: a weight that a block computes may have the address of an earlier one.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::HostPool;
use super::packed_matrix::PackedMatrix;
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::Gemm;

/// The rows of a micro-batch for which weights are cached: with fewer rows the kernel is different,
/// with more the packing is cheap compared to the matmul.
const ROWS: Range<usize> = 64..257;

/// The least terms and columns: parts of smaller matmuls may be vectors, which are summed in
/// another order.
const LEAST: usize = 48;

/// The most bytes that a rank caches: panels that do not fit in the CPU's caches are hardly faster
/// than the weights themselves.
const MAX_BYTES: usize = 16 << 20;

/// Returns the bytes for [`hpctrain_device::Backend::reuse_bytes`]: each weight is packed once for
/// the forward and once for the backward.
pub fn cache_bytes(elements: usize, rows: usize) -> usize {
    if ROWS.contains(&rows) { (2 * elements * size_of::<f32>()).min(MAX_BYTES) } else { 0 }
}

/// The key of packed panels: the weight's address, and the layout in which it is read.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    address: usize,
    k: usize,
    n: usize,
    tb: bool,
}

/// The weights that do not change at present, and their packed panels.
#[derive(Default)]
pub struct PackedCache(Mutex<State>);

#[derive(Default)]
struct State {
    /// Addresses of announced parameters. Weights at other addresses may be temporary.
    steady: Vec<Range<usize>>,
    panels: HashMap<Key, Arc<PackedMatrix>>,
    bytes: usize,
}

impl PackedCache {
    /// Announces that these parameters do not change until [`PackedCache::clear`].
    pub fn announce(&self, parameters: &[f32]) {
        let range = addresses(parameters);
        let mut state = self.state();
        if !state.steady.contains(&range) {
            state.steady.push(range);
        }
    }

    /// Empties the cache, because parameters may change.
    pub fn clear(&self) {
        let mut state = self.state();
        state.steady.clear();
        state.panels.clear();
        state.bytes = 0;
    }

    /// Returns the packed panels of a weight for matmuls of this shape, from the cache or packed
    /// now. Returns `None` if caching is not worthwhile or the cache is full.
    ///
    /// # Errors
    /// Returns an error if the system cannot allocate the memory.
    pub fn panels(
        &self,
        pool: &Arc<HostPool>,
        threads: &Threads,
        shape: Gemm,
        weight: &[f32],
    ) -> Result<Option<Arc<PackedMatrix>>> {
        let Gemm { m, n, k, tb, .. } = shape;
        if !ROWS.contains(&m) || n < LEAST || k < LEAST {
            return Ok(None);
        }
        let range = addresses(weight);
        let mut state = self.state();
        if !state.steady.iter().any(|steady| steady.start <= range.start && range.end <= steady.end)
        {
            return Ok(None);
        }
        let key = Key { address: range.start, k, n, tb };
        if let Some(panels) = state.panels.get(&key) {
            return Ok(Some(panels.clone()));
        }
        let bytes = PackedMatrix::elements(k, n) * size_of::<f32>();
        if state.bytes + bytes > MAX_BYTES {
            return Ok(None);
        }
        let panels = Arc::new(PackedMatrix::new(pool, threads, shape, weight)?);
        state.bytes += bytes;
        state.panels.insert(key, panels.clone());
        Ok(Some(panels))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn addresses(x: &[f32]) -> Range<usize> {
    let range = x.as_ptr_range();
    range.start as usize..range.end as usize
}

#[cfg(test)]
mod tests {
    use super::super::linear::gemm;
    use super::super::matrix::{left, matrix_mut};
    use super::super::output_init::OutputInit;
    use super::*;

    fn numbers(len: usize, step: usize) -> Vec<f32> {
        (0..len).map(|i| (i * step % 1009) as f32 / 504.0 - 1.0).collect()
    }

    #[test]
    fn panels_have_the_bits_of_the_plain_product() {
        let pool = Arc::new(HostPool::default());
        let threads = Threads::new(2);
        for (m, k, n) in
            [(64, 48, 48), (65, 1025, 49), (130, 513, 257), (256, 96, 100), (100, 4000, 64)]
        {
            for (tb, acc) in [(false, false), (false, true), (true, false), (true, true)] {
                let shape = Gemm { m, n, k, ta: false, tb, acc };
                let a = numbers(m * k, 7);
                let b = numbers(k * n, 13);
                let mut want = vec![0.5; m * n];
                let mut got = vec![0.5; m * n];
                gemm(&threads, shape, &a, &b, &mut want, &[]);
                let cache = PackedCache::default();
                cache.announce(&b);
                let panels = cache.panels(&pool, &threads, shape, &b).unwrap().unwrap();
                panels.multiply(
                    &threads,
                    left(shape, &a),
                    matrix_mut(&mut got, m, n),
                    OutputInit::new(acc, &[]),
                );
                assert!(got == want, "{shape:?}");
            }
        }
    }

    #[test]
    fn only_what_does_not_change_is_kept() {
        let pool = Arc::new(HostPool::default());
        let threads = Threads::new(1);
        let shape = Gemm { m: 64, n: 64, k: 64, ta: false, tb: true, acc: false };
        let cache = PackedCache::default();
        let mut weights = numbers(3 * 64 * 64, 3);
        let get = |cache: &PackedCache, shape: Gemm, weight: &[f32]| {
            cache.panels(&pool, &threads, shape, weight).unwrap()
        };
        assert!(get(&cache, shape, &weights[..4096]).is_none(), "not announced");
        cache.announce(&weights[..8192]);
        assert!(get(&cache, shape, &weights[8192..]).is_none(), "this part was not announced");
        assert!(get(&cache, Gemm { m: 63, ..shape }, &weights[..4096]).is_none(), "too few rows");
        assert!(get(&cache, Gemm { m: 257, ..shape }, &weights[..4096]).is_none(), "too many rows");
        let first = get(&cache, shape, &weights[4096..8192]).unwrap();
        assert!(Arc::ptr_eq(&first, &get(&cache, shape, &weights[4096..8192]).unwrap()));
        let other = get(&cache, Gemm { tb: false, ..shape }, &weights[4096..8192]).unwrap();
        assert!(!Arc::ptr_eq(&first, &other), "the layout differs");
        drop((first, other));
        cache.clear();
        assert_eq!(pool.stats.live(hpctrain_device::MemoryKind::Workspace), 0);
        assert!(get(&cache, shape, &weights[4096..8192]).is_none(), "it may have changed");

        weights.fill(2.0);
        cache.announce(&weights);
        let ones = vec![1.0; 4096];
        let mut sums = vec![0.0; 4096];
        let panels = get(&cache, shape, &weights[4096..8192]).unwrap();
        panels.multiply(
            &threads,
            left(shape, &ones),
            matrix_mut(&mut sums, 64, 64),
            OutputInit::Zero,
        );
        assert!(sums.iter().all(|sum| *sum == 128.0));
    }

    #[test]
    fn room_is_limited() {
        let pool = Arc::new(HostPool::default());
        let threads = Threads::new(1);
        let cache = PackedCache::default();
        let weights = numbers(2 * 64 * 64, 3);
        cache.announce(&weights);
        cache.state().bytes = MAX_BYTES - 64 * 64 * size_of::<f32>();
        let shape = Gemm { m: 64, n: 64, k: 64, ta: false, tb: true, acc: false };
        assert!(cache.panels(&pool, &threads, shape, &weights[..4096]).unwrap().is_some());
        assert!(cache.panels(&pool, &threads, shape, &weights[4096..]).unwrap().is_none());
        assert_eq!(
            [cache_bytes(1 << 20, 64), cache_bytes(1 << 30, 256), cache_bytes(1 << 20, 257)],
            [8 << 20, MAX_BYTES, 0]
        );
    }
}
