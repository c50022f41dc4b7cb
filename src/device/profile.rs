//! Profile of the kernels: counts of launches, seconds, and the work that was done in them.
//!
//! Off, a kernel costs the reading of one flag. On, a device that computes beside the host is
//! waited for after every kernel, so that its time is its own; the run is slower for it.
//!
//! Every kernel begins with a `KernelCost`, and the guard that it returns ends the measurement when
//! it is dropped. A kernel that is a default of `Kernels`, composed of others, counts as those.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::kernel_cost::KernelCost;

/// Launches of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelStats {
    /// Launches.
    pub calls: u64,
    /// Their time.
    pub seconds: f64,
    /// Time of the fastest.
    pub fastest: f64,
    /// Multiplications and additions, of products and attention.
    pub flops: f64,
    /// Bytes that had to be read and written.
    pub bytes: f64,
}

impl KernelStats {
    /// Nothing yet.
    const NONE: Self =
        Self { calls: 0, seconds: 0.0, fastest: f64::INFINITY, flops: 0.0, bytes: 0.0 };

    /// Both together.
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

/// Launches by kernel and shape.
pub type Tallies = BTreeMap<(&'static str, [usize; 4]), KernelStats>;

/// The kernels of a backend. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Profile(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    on: AtomicBool,
    tallies: Mutex<Tallies>,
}

impl Profile {
    /// Counts from now on, or no longer.
    pub fn record(&self, on: bool) {
        self.0.on.store(on, Ordering::Relaxed);
    }

    /// The counts since they were last taken.
    pub fn take(&self) -> Tallies {
        std::mem::take(&mut *self.0.tallies.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A kernel begins; it ends where the returned value is dropped. Elements of the compute type
    /// have `width` bytes; `settle` waits until the device is done.
    pub fn launch<S: Fn()>(&self, width: usize, settle: S, work: KernelCost) -> Launch<'_, S> {
        let open = self.0.on.load(Ordering::Relaxed).then(|| {
            // Work queued before is not this kernel's.
            settle();
            Open { profile: self, work, width, settle, begun: Instant::now() }
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

/// A kernel under way.
#[must_use = "the kernel ends where this is dropped"]
pub struct Launch<'a, S: Fn()>(Option<Open<'a, S>>);

struct Open<'a, S> {
    profile: &'a Profile,
    work: KernelCost,
    width: usize,
    settle: S,
    begun: Instant,
}

impl<S: Fn()> Drop for Launch<'_, S> {
    fn drop(&mut self) {
        let Some(Open { profile, work, width, settle, begun }) = self.0.take() else { return };
        settle();
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
        let settle = || waits.set(waits.get() + 1);
        drop(profile.launch(4, settle, KernelCost::zero(1)));
        assert_eq!(waits.get(), 0);
        profile.record(true);
        drop(profile.launch(4, settle, KernelCost::zero(1)));
        assert_eq!(waits.get(), 2);
    }
}
