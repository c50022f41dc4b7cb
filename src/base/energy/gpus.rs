//! Reads the energy counters of GPUs by NVML: millijoules since the driver was loaded, from Volta
//! on.

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

/// The energy counters of some GPUs of this machine.
pub struct Gpus {
    nvml: Nvml,
    counters: Vec<Counter>,
}

struct Counter {
    uuid: String,
    /// The last value, in mJ.
    last: u64,
    joules: f64,
}

impl Gpus {
    /// Opens the counters of the GPUs with these CUDA ids.
    pub fn open(ids: &[String]) -> Result<Self, String> {
        let nvml = Nvml::init().map_err(|e| format!("libnvidia-ml.so.1: {e}"))?;
        let uuids = ids.iter().map(|id| uuid(id));
        let counters =
            uuids.map(|uuid| Ok(Counter { last: read(&nvml, &uuid)?, uuid, joules: 0.0 }));
        let counters = counters.collect::<Result<_, String>>()?;
        Ok(Self { nvml, counters })
    }

    /// Returns the joules of all GPUs since the counters were opened.
    pub fn joules(&mut self) -> Result<f64, String> {
        for counter in &mut self.counters {
            let now = read(&self.nvml, &counter.uuid)?;
            // The counter restarts at 0 when the driver is reloaded.
            let used = if now >= counter.last { now - counter.last } else { now };
            counter.joules += used as f64 * 1e-3;
            counter.last = now;
        }
        Ok(self.counters.iter().map(|counter| counter.joules).sum())
    }
}

fn read(nvml: &Nvml, uuid: &str) -> Result<u64, String> {
    let millijoules = nvml.device_by_uuid(uuid).and_then(|gpu| gpu.total_energy_consumption());
    millijoules.map_err(|e| match e {
        NvmlError::NotSupported => {
            format!(
                "{uuid} has no energy counter (GPUs from Volta on have one, MIG instances do not)"
            )
        }
        other => format!("{uuid}: {other}"),
    })
}

/// Returns NVML's name of the GPU with this CUDA id of 32 hexadecimal digits.
fn uuid(id: &str) -> String {
    let groups = [0..8, 8..12, 12..16, 16..20, 20..id.len()];
    let groups = groups.map(|part| id.get(part).unwrap_or_default());
    format!("GPU-{}", groups.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_cuda_become_names_of_nvml() {
        let id = "c2b49a06e7f14d6a8a0d4f0b6a3e5d17";
        assert_eq!(uuid(id), "GPU-c2b49a06-e7f1-4d6a-8a0d-4f0b6a3e5d17");
        assert_eq!(uuid("ab"), "GPU-----");
    }
}
