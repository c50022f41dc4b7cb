//! Peak rates of CPUs measured by `hpctrain bench`: the denominator of MFU. A training run does not
//! measure them: it would slow other processes on the host down, and the denominator would differ
//! between runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::user_dirs;

/// The name of the file in the user's cache directory.
const FILE: &str = "cpu-peaks.json";

/// The lines of /proc/cpuinfo that identify a model of CPU, on x86-64 and ARM.
const KEYS: [&str; 8] = [
    "vendor_id",
    "model name",
    "cpu family",
    "model",
    "stepping",
    "CPU implementer",
    "CPU variant",
    "CPU part",
];

/// Measurements by model of CPU, then by number format.
type Peaks = BTreeMap<String, BTreeMap<String, Peak>>;

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Peak {
    gflops_per_thread: f64,
    /// The number of threads of the rank that measured.
    threads: usize,
}

/// Records the peak of `threads` threads in FLOP/s, replacing an earlier one, and returns the file.
pub(super) fn record(format: &str, flops: f64, threads: usize) -> Result<PathBuf> {
    let mut refused = None;
    for (root, name) in user_dirs::cache_roots() {
        let written = user_dirs::below(&root, &[&name]).and_then(|directory| {
            record_in(&directory.join(FILE), &kind_of_cpu(), format, flops, threads)
        });
        match written {
            Ok(file) => return Ok(file),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or_else(|| Error::internal("no cache directory")))
}

fn record_in(file: &Path, cpu: &str, format: &str, flops: f64, threads: usize) -> Result<PathBuf> {
    let mut peaks = read(file);
    let peak = Peak { gflops_per_thread: flops / 1e9 / threads as f64, threads };
    peaks.entry(cpu.to_owned()).or_default().insert(format.to_owned(), peak);
    let text = serde_json::to_string_pretty(&peaks).map_err(|e| Error::internal(e.to_string()))?;
    // Another process may do the same, so each renames a file that only it writes.
    let new = file.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&new, text + "\n").map_err(|e| Error::io("write", &new, e))?;
    fs::rename(&new, file).map_err(|e| Error::io("rename", &new, e))?;
    Ok(file.to_owned())
}

/// Returns the recorded peak of `threads` threads of this CPU in FLOP/s, if there is one.
pub(super) fn find(format: &str, threads: usize) -> Option<f64> {
    let cpu = kind_of_cpu();
    let files = user_dirs::cache_roots().into_iter().map(|(root, name)| root.join(name).join(FILE));
    files
        .filter(|file| user_dirs::is_own_file(file))
        .find_map(|file| find_in(&file, &cpu, format, threads))
}

fn find_in(file: &Path, cpu: &str, format: &str, threads: usize) -> Option<f64> {
    let peak = *read(file).get(cpu)?.get(format)?;
    let flops = peak.gflops_per_thread * 1e9 * threads as f64;
    (flops.is_finite() && flops > 0.0).then_some(flops)
}

/// Returns the measurements in a file; none if it is missing or damaged: the next record replaces
/// it.
fn read(file: &Path) -> Peaks {
    fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// Returns the model of this machine's CPU.
fn kind_of_cpu() -> String {
    kind_in(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// Returns the model of the first processor in the text of /proc/cpuinfo.
fn kind_in(cpuinfo: &str) -> String {
    let first = cpuinfo.split("\n\n").next().unwrap_or_default();
    let lines = first.lines().filter_map(|line| line.split_once(':'));
    let named: Vec<String> = lines
        .filter(|(key, _)| KEYS.contains(&key.trim()))
        .map(|(key, value)| format!("{}: {}", key.trim(), value.trim()))
        .collect();
    named.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_found_for_any_number_of_threads_of_the_same_cpu() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        assert_eq!(find_in(&file, "one", "f32", 1), None);
        record_in(&file, "one", "f32", 3e11, 4).unwrap();
        record_in(&file, "one", "bf16", 8e11, 4).unwrap();
        record_in(&file, "one", "f32", 2e11, 2).unwrap();
        assert_eq!(find_in(&file, "one", "f32", 2), Some(2e11));
        assert_eq!(find_in(&file, "one", "f32", 8), Some(8e11));
        assert_eq!(find_in(&file, "one", "bf16", 4), Some(8e11));
        assert_eq!(find_in(&file, "other", "f32", 2), None);
        // The temporary file is gone, and a damaged file is replaced.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        fs::write(&file, "{").unwrap();
        assert_eq!(find_in(&file, "one", "f32", 2), None);
        record_in(&file, "one", "f32", 1e11, 1).unwrap();
        assert_eq!(find_in(&file, "one", "f32", 1), Some(1e11));
    }

    #[test]
    fn kinds_of_cpus_differ() {
        let x86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\
                   stepping\t: 1\ncpu MHz\t\t: 2596.1\n\nprocessor\t: 1\nvendor_id\t: other\n";
        let kind =
            "vendor_id: AuthenticAMD, cpu family: 26, model: 2, model name: AMD EPYC, stepping: 1";
        assert_eq!(kind_in(x86), kind);
        let arm = "processor\t: 0\nBogoMIPS\t: 50\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n";
        assert_eq!(kind_in(arm), "CPU implementer: 0x41, CPU part: 0xd4f");
        assert_eq!(kind_in(""), "");
    }
}
