//! A profile of the kernels: number of launches, time, and the work done in them.
//!
//! When off, a kernel pays for reading one flag. When on, a device that computes asynchronously is
//! synchronized after every kernel, so that its time is attributed to it; this slows the run down.
//!
//! Every kernel begins with a `KernelCost`, and dropping the returned guard ends the measurement.
//! An operation whose default in `Kernels` is composed of other operations is counted as those.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::kernel_cost::KernelCost;

/// Statistics of the launches of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelStats {
    /// The number of launches.
    pub calls: u64,
    /// The total time of the launches, in seconds.
    pub seconds: f64,
    /// The time of the fastest launch, in seconds.
    pub fastest: f64,
    /// Floating-point operations of matmuls and attention, multiplications and additions counted
    /// separately.
    pub flops: f64,
    /// Bytes that had to be read and written.
    pub bytes: f64,
}

impl KernelStats {
    /// The statistics of no launches.
    const NONE: Self =
        Self { calls: 0, seconds: 0.0, fastest: f64::INFINITY, flops: 0.0, bytes: 0.0 };

    /// Returns the sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            calls: self.calls + other.calls,
            seconds: self.seconds + other.seconds,
            fastest: self.fastest.min(other.fastest),
            flops: self.flops + other.flops,
            bytes: self.bytes + other.bytes,
        }
    }
}

/// Statistics of launches by kernel and shape.
pub type KernelTotals = BTreeMap<(&'static str, [usize; 4]), KernelStats>;

/// The profile of a backend's kernels. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Profile(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    on: AtomicBool,
    tallies: Mutex<KernelTotals>,
}

impl Profile {
    /// Turns the recording of kernels on or off.
    pub fn record(&self, on: bool) {
        self.0.on.store(on, Ordering::Relaxed);
    }

    /// Returns the statistics since the last call and resets them.
    pub fn take(&self) -> KernelTotals {
        std::mem::take(&mut *self.0.tallies.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Starts the measurement of a kernel; it ends when the returned guard is dropped. Elements of
    /// the compute type have `width` bytes; `synchronize` blocks until the device is idle.
    pub fn launch<S: Fn()>(&self, width: usize, synchronize: S, work: KernelCost) -> Launch<'_, S> {
        let open = self.0.on.load(Ordering::Relaxed).then(|| {
            // Work queued before belongs to other kernels.
            synchronize();
            Open { profile: self, work, width, synchronize, begun: Instant::now() }
        });
        Launch(open)
    }

    fn count(&self, work: &KernelCost, width: usize, took: Duration) {
        let mut tallies = self.0.tallies.lock().unwrap_or_else(PoisonError::into_inner);
        let tally = tallies.entry((work.kernel, work.shape)).or_insert(KernelStats::NONE);
        let seconds = took.as_secs_f64();
        let bytes = work.bytes(width);
        *tally = tally.plus(KernelStats {
            calls: 1,
            seconds,
            fastest: seconds,
            flops: work.flops,
            bytes,
        });
    }
}

/// The measurement of a kernel that is running.
#[must_use = "the measurement ends when this is dropped"]
pub struct Launch<'a, S: Fn()>(Option<Open<'a, S>>);

struct Open<'a, S> {
    profile: &'a Profile,
    work: KernelCost,
    width: usize,
    synchronize: S,
    begun: Instant,
}

impl<S: Fn()> Drop for Launch<'_, S> {
    fn drop(&mut self) {
        let Some(Open { profile, work, width, synchronize, begun }) = self.0.take() else { return };
        synchronize();
        profile.count(&work, width, begun.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_waited_for_before_and_after() {
        let profile = Profile::default();
        let waits = std::cell::Cell::new(0);
        let synchronize = || waits.set(waits.get() + 1);
        drop(profile.launch(4, synchronize, KernelCost::zero(1)));
        assert_eq!(waits.get(), 0);
        profile.record(true);
        drop(profile.launch(4, synchronize, KernelCost::zero(1)));
        assert_eq!(waits.get(), 2);
    }
}
