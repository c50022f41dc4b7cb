//! Measures the energy of a machine while a program runs, by counters of its GPUs (NVML) and of its
//! CPU packages and their DRAM (RAPL).
//!
//! The counters cover the whole machine, not one process: one process per machine reads them, and
//! they include other programs on the same devices.

mod gpus;
mod rapl;

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use gpus::Gpus;
use rapl::Rapl;

/// The longest interval between two readings, short enough that no counter wraps twice: RAPL's 32
/// bits hold 262 kJ, six minutes at 700 W.
const POLL_INTERVAL: Duration = Duration::from_secs(30);

/// The devices whose energy is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EnergySource {
    /// The GPUs, by their NVML counters.
    Gpu,
    /// The CPU packages and DRAM, by RAPL.
    Cpu,
}

/// The energy counters of a machine, or the reasons why they are not available.
pub struct Counters {
    gpus: Result<Gpus, String>,
    cpus: Result<Rapl, String>,
}

impl Counters {
    /// Opens the counters of this machine's CPUs, and of the GPUs with these CUDA ids (32
    /// hexadecimal digits).
    pub fn open(gpus: &[String]) -> Self {
        let gpus = if gpus.is_empty() { Err("no GPU is in use".into()) } else { Gpus::open(gpus) };
        Self { gpus, cpus: Rapl::open(&rapl::root()) }
    }

    /// Checks that the energy of `source` can be measured.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn has(&self, source: EnergySource) -> Result<(), &str> {
        let missing = match source {
            EnergySource::Gpu => self.gpus.as_ref().err(),
            EnergySource::Cpu => self.cpus.as_ref().err(),
        };
        missing.map_or(Ok(()), |why| Err(why))
    }

    /// Starts to measure the energy of those `sources` that are available.
    pub fn start(self, sources: &[EnergySource]) -> Meter {
        let gpus = self.gpus.ok().filter(|_| sources.contains(&EnergySource::Gpu));
        let cpus = self.cpus.ok().filter(|_| sources.contains(&EnergySource::Cpu));
        Meter::start(Reading { gpus, cpus, joules: Ok(0.0) })
    }
}

/// The last reading of the counters.
struct Reading {
    gpus: Option<Gpus>,
    cpus: Option<Rapl>,
    /// The energy since the start, or the reason why a counter could not be read.
    joules: Result<f64, String>,
}

impl Reading {
    fn update(&mut self) {
        if self.joules.is_err() {
            return;
        }
        let gpus = self.gpus.as_mut().map_or(Ok(0.0), Gpus::joules);
        let cpus = self.cpus.as_mut().map_or(Ok(0.0), Rapl::joules);
        self.joules = gpus.and_then(|gpus| Ok(gpus + cpus?));
        if let Err(why) = &self.joules {
            log::warn!("energy is no longer measured: {why}");
        }
    }
}

/// The state that the meter shares with its thread.
struct Shared {
    reading: Mutex<Reading>,
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl Shared {
    /// Reads the counters at intervals until the meter is dropped.
    fn poll(&self) {
        let mut stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        while !*stopped {
            let waited = self
                .wake
                .wait_timeout(stopped, POLL_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner);
            stopped = waited.0;
            self.reading.lock().unwrap_or_else(PoisonError::into_inner).update();
        }
    }
}

/// Measures the energy of this machine since the meter's creation.
pub struct Meter {
    shared: Arc<Shared>,
    poller: Option<JoinHandle<()>>,
}

impl Meter {
    fn start(reading: Reading) -> Self {
        let shared = Arc::new(Shared {
            reading: Mutex::new(reading),
            stopped: Mutex::new(false),
            wake: Condvar::new(),
        });
        let thread_shared = shared.clone();
        // Without the thread, only counters that wrap twice between two readings are wrong.
        let poller =
            std::thread::Builder::new().name("energy".into()).spawn(move || thread_shared.poll());
        Self {
            shared,
            poller: poller
                .inspect_err(|e| {
                    log::warn!("cannot start the thread that reads energy counters: {e}")
                })
                .ok(),
        }
    }

    /// Returns the joules since the start, or `None` after a counter could not be read.
    pub fn joules(&self) -> Option<f64> {
        let mut reading = self.shared.reading.lock().unwrap_or_else(PoisonError::into_inner);
        reading.update();
        reading.joules.as_ref().ok().copied()
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        *self.shared.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.wake.notify_all();
        if let Some(poller) = self.poller.take() {
            drop(poller.join());
        }
    }
}

/// Returns an identifier of the machine that is the same for all processes on it, also in
/// containers: the boot id, or `host` if it cannot be read.
pub fn machine(host: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    boot.map_or_else(|_| host.to_owned(), |id| id.trim().to_owned())
}
