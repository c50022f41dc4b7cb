//! Counters of the work that the host has requested of a device.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hpctrain_device::DeviceCounters;

/// The counters of a rank's device.
#[derive(Default)]
pub struct Counters {
    launches: AtomicU64,
    host_waits: AtomicU64,
}

impl Counters {
    /// Counts a kernel, a matmul, or a copy or fill within the device.
    pub fn add_launch(&self) {
        self.launches.fetch_add(1, Relaxed);
    }

    /// Counts a wait of the host for kernels.
    pub fn add_host_wait(&self) {
        self.host_waits.fetch_add(1, Relaxed);
    }

    /// Returns the counts so far.
    pub fn now(&self) -> DeviceCounters {
        DeviceCounters {
            launches: self.launches.load(Relaxed),
            host_waits: self.host_waits.load(Relaxed),
        }
    }
}
