//! Energy of a machine while a program runs: counters of its GPUs (NVML) and of its CPU packages
//! and their DRAM (RAPL).
//!
//! Counters belong to the machine, not to a process: one process per machine reads them, and other
//! programs on the same devices count too.

mod gpus;
mod rapl;

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use gpus::Gpus;
use rapl::Rapl;

/// Counters are read at least this often, before one can wrap twice: RAPL's 32 bits hold 262 kJ,
/// six minutes at 700 W.
const KEEP_UP: Duration = Duration::from_secs(30);

/// The devices whose energy is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EnergySource {
    /// GPUs, by NVML's counter of each.
    Gpu,
    /// CPU packages and DRAM, by RAPL.
    Cpu,
}

/// The energy counters of a machine, each there or with the reason why it is not.
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

    /// Whether the energy of `source` can be counted, and if not, why.
    ///
    /// # Errors
    /// Returns the reason.
    pub fn has(&self, source: EnergySource) -> Result<(), &str> {
        let missing = match source {
            EnergySource::Gpu => self.gpus.as_ref().err(),
            EnergySource::Cpu => self.cpus.as_ref().err(),
        };
        missing.map_or(Ok(()), |why| Err(why))
    }

    /// Starts to count the energy of `sources`, of those that are there.
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
    /// Since the start, or the reason why a counter could not be read.
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
            log::warn!("energy is no longer counted: {why}");
        }
    }
}

/// State that the meter shares with its thread.
struct Shared {
    reading: Mutex<Reading>,
    is_over: Mutex<bool>,
    ends: Condvar,
}

/// Counts the energy of this machine from its start on.
pub struct Meter {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

impl Meter {
    fn start(reading: Reading) -> Self {
        let shared = Arc::new(Shared {
            reading: Mutex::new(reading),
            is_over: Mutex::new(false),
            ends: Condvar::new(),
        });
        let kept = shared.clone();
        let keep_up = move || {
            let mut is_over = kept.is_over.lock().unwrap_or_else(PoisonError::into_inner);
            while !*is_over {
                let waited = kept
                    .ends
                    .wait_timeout(is_over, KEEP_UP)
                    .unwrap_or_else(PoisonError::into_inner);
                is_over = waited.0;
                kept.reading.lock().unwrap_or_else(PoisonError::into_inner).update();
            }
        };
        // Without the thread only a counter that wraps twice between two readings is wrong.
        let keeper = std::thread::Builder::new().name("energy".into()).spawn(keep_up);
        Self {
            shared,
            keeper: keeper.inspect_err(|e| log::warn!("no thread reads energy counters: {e}")).ok(),
        }
    }

    /// Joules since the start; none once a counter could not be read.
    pub fn joules(&self) -> Option<f64> {
        let mut reading = self.shared.reading.lock().unwrap_or_else(PoisonError::into_inner);
        reading.update();
        reading.joules.as_ref().ok().copied()
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        *self.shared.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.ends.notify_all();
        if let Some(keeper) = self.keeper.take() {
            drop(keeper.join());
        }
    }
}

/// A machine's identity, the same for all processes on it, also in containers; the host's name
/// where the system does not say.
pub fn machine(host: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    boot.map_or_else(|_| host.to_owned(), |id| id.trim().to_owned())
}
