//! Weights that stay in panels while they do not change: micro-batches of one step share them.
//!
//! `Backend::begin_weight_reuse` announces parameters that several micro-batches multiply before
//! they change. Weights are kept as panels, in the order in which the kernel reads them, within a
//! fixed number of bytes that the estimate of memory counts. Only weights within announced
//! parameters are kept: a weight that a block computes anew may have the address of an earlier one.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::HostPool;
use super::packed_matrix::PackedMatrix;
use super::threads::Threads;
use hpctrain_base::error::Result;
use hpctrain_device::Gemm;

/// Rows of a micro-batch for which it pays: with fewer the kernel has other ways, with more a
/// product's own packing is small beside its work.
const ROWS: Range<usize> = 64..257;

/// Least terms and columns: parts of smaller products may be vectors, which are summed in another
/// order.
const LEAST: usize = 48;

/// Bytes that a rank spends on it: panels that no cache holds are hardly faster than the weights
/// themselves.
const ROOM: usize = 16 << 20;

/// As [`hpctrain_device::Backend::reuse_bytes`]: each weight once for the forward and once for the
/// backward.
pub fn bytes(elements: usize, rows: usize) -> usize {
    if ROWS.contains(&rows) { (2 * elements * size_of::<f32>()).min(ROOM) } else { 0 }
}

/// Key of panels: the weight's address, and the layout in which it is read.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    address: usize,
    k: usize,
    n: usize,
    tb: bool,
}

/// The weights that do not change now, and their panels.
#[derive(Default)]
pub struct PackedCache(Mutex<State>);

#[derive(Default)]
struct State {
    /// Addresses of parameters. A weight at any other address may be another one next time.
    steady: Vec<Range<usize>>,
    panels: HashMap<Key, Arc<PackedMatrix>>,
    bytes: usize,
}

impl PackedCache {
    /// These parameters stay as they are until [`PackedCache::clear`].
    pub fn announce(&self, parameters: &[f32]) {
        let range = addresses(parameters);
        let mut state = self.state();
        if !state.steady.contains(&range) {
            state.steady.push(range);
        }
    }

    /// Parameters may change.
    pub fn clear(&self) {
        let mut state = self.state();
        state.steady.clear();
        state.panels.clear();
        state.bytes = 0;
    }

    /// The weight in panels, for these products, if that pays and there is room: from before, or
    /// made now.
    ///
    /// # Errors
    /// The system has no such memory.
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
        if state.bytes + bytes > ROOM {
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
                let kept = PackedCache::default();
                kept.announce(&b);
                let panels = kept.panels(&pool, &threads, shape, &b).unwrap().unwrap();
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
        let kept = PackedCache::default();
        let mut weights = numbers(3 * 64 * 64, 3);
        let of = |kept: &PackedCache, shape: Gemm, weight: &[f32]| {
            kept.panels(&pool, &threads, shape, weight).unwrap()
        };
        assert!(of(&kept, shape, &weights[..4096]).is_none(), "nobody has announced it");
        kept.announce(&weights[..8192]);
        assert!(of(&kept, shape, &weights[8192..]).is_none(), "this part was not announced");
        assert!(of(&kept, Gemm { m: 63, ..shape }, &weights[..4096]).is_none(), "too few rows");
        assert!(
            of(&kept, Gemm { m: 257, ..shape }, &weights[..4096]).is_none(),
            "so many that it does not pay"
        );
        let first = of(&kept, shape, &weights[4096..8192]).unwrap();
        assert!(Arc::ptr_eq(&first, &of(&kept, shape, &weights[4096..8192]).unwrap()));
        let other = of(&kept, Gemm { tb: false, ..shape }, &weights[4096..8192]).unwrap();
        assert!(!Arc::ptr_eq(&first, &other), "read the other way");
        drop((first, other));
        kept.clear();
        assert_eq!(pool.ledger.live(hpctrain_device::MemoryKind::Workspace), 0);
        assert!(of(&kept, shape, &weights[4096..8192]).is_none(), "it may have changed");

        weights.fill(2.0);
        kept.announce(&weights);
        let ones = vec![1.0; 4096];
        let mut sums = vec![0.0; 4096];
        let panels = of(&kept, shape, &weights[4096..8192]).unwrap();
        panels.multiply(
            &threads,
            left(shape, &ones),
            matrix_mut(&mut sums, 64, 64),
            OutputInit::Nothing,
        );
        assert!(sums.iter().all(|sum| *sum == 128.0));
    }

    #[test]
    fn room_is_limited() {
        let pool = Arc::new(HostPool::default());
        let threads = Threads::new(1);
        let kept = PackedCache::default();
        let weights = numbers(2 * 64 * 64, 3);
        kept.announce(&weights);
        kept.state().bytes = ROOM - 64 * 64 * size_of::<f32>();
        let shape = Gemm { m: 64, n: 64, k: 64, ta: false, tb: true, acc: false };
        assert!(kept.panels(&pool, &threads, shape, &weights[..4096]).unwrap().is_some());
        assert!(kept.panels(&pool, &threads, shape, &weights[4096..]).unwrap().is_none());
        assert_eq!(
            [bytes(1 << 20, 64), bytes(1 << 30, 256), bytes(1 << 20, 257)],
            [8 << 20, ROOM, 0]
        );
    }
}
