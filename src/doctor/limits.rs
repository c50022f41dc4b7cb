//! Checks of the system's limits on a process: memory, shared memory, open files, locked memory.

use std::fs;

use rustix::fs::statvfs;
use rustix::io::Errno;

use super::probe::ProbeReporter;
use super::{Finding, gpu};
use crate::energy::{Counters, EnergySource};
use crate::engine::memory::available;
use crate::telemetry::bytes;

/// The system's message for a counter that exists but may not be read.
const UNREADABLE: &str = "Permission denied";

/// With less memory than this hardly any run fits.
const LITTLE_MEMORY: usize = 1 << 30;

/// The directory of shared memory, which MPI and NCCL use.
const SHARED: &str = "/dev/shm";

/// With less space there than this, MPI or NCCL may use slower transports inside a node.
const LITTLE_SHARED: u64 = 64 << 20;

/// Advice about space in [`SHARED`].
const SHARED_HINT: &str = "docker run --shm-size=1g, in Kubernetes an emptyDir of medium Memory at /dev/shm; remove files of jobs that \
                           crashed";

/// A lower limit of open files is warned of: ranks keep shards open.
const FEW_FILES: usize = 1024;

pub(super) fn probe(reporter: &ProbeReporter) {
    reporter.attempt("memory", || {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        memory(available(0), total(&meminfo))
    });
    reporter.attempt(SHARED, || {
        statvfs(SHARED).map_or_else(no_shared, |space| shared(space.f_bavail * space.f_frsize))
    });
    reporter.attempt("cpu energy", cpu_energy);
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    reporter.attempt("open files", || open_files(limit(&limits, "Max open files")));
    let infiniband =
        fs::read_dir("/sys/class/infiniband").is_ok_and(|mut cards| cards.next().is_some());
    if infiniband || !gpu::on_bus().is_empty() {
        reporter.attempt("locked memory", || {
            locked_memory(limit(&limits, "Max locked memory"), infiniband)
        });
    }
}

/// Checks whether runs can record the energy of the CPUs.
fn cpu_energy() -> Finding {
    match Counters::open(&[]).has(EnergySource::Cpu) {
        Ok(()) => Finding::ok("RAPL counters are readable: runs record joules per token"),
        Err(why) if why.contains(UNREADABLE) => Finding::warning(
            format!("runs do not record the energy of CPUs: {why}"),
            "only root may read RAPL since CVE-2020-8694: ask an administrator for chmod o+r on energy_uj",
        ),
        Err(why) => Finding::ok(format!("runs do not record the energy of CPUs: {why}")),
    }
}

fn memory(available: Option<usize>, total: Option<usize>) -> Finding {
    let Some(available) = available else { return Finding::ok("unknown to the system") };
    let of_total =
        total.map(|total| format!(" of the node's {}", bytes(total))).unwrap_or_default();
    let found = format!("{} available{of_total}", bytes(available));
    match available < LITTLE_MEMORY {
        true => {
            Finding::warning(found, "request more: --mem for a Slurm job, --memory for a container")
        }
        false => Finding::ok(found),
    }
}

fn no_shared(e: Errno) -> Finding {
    Finding::warning(
        format!("{e}: MPI and NCCL use it for shared memory between the ranks of a node"),
        SHARED_HINT,
    )
}

/// Checks the free space for shared memory.
fn shared(free: u64) -> Finding {
    let found = format!("{} free", bytes(usize::try_from(free).unwrap_or(usize::MAX)));
    match free < LITTLE_SHARED {
        true => {
            let found = format!(
                "{found}: MPI and NCCL may use slower transports between the ranks of a node, or fail"
            );
            Finding::warning(found, SHARED_HINT)
        }
        false => Finding::ok(found),
    }
}

fn open_files(limit: Option<usize>) -> Finding {
    match limit {
        None => Finding::ok("no limit"),
        Some(limit) if limit < FEW_FILES => Finding::warning(
            format!("{limit} per process"),
            "ulimit -n 4096, before mpirun and on every node",
        ),
        Some(limit) => Finding::ok(format!("{limit} per process")),
    }
}

/// Checks the limit of locked memory: messages over InfiniBand count against it, memory that CUDA
/// pins does not.
fn locked_memory(limit: Option<usize>, infiniband: bool) -> Finding {
    match limit {
        None => Finding::ok("no limit"),
        Some(limit) if infiniband => Finding::warning(
            format!("{} per process, and messages over InfiniBand lock memory", bytes(limit)),
            "ulimit -l unlimited, in /etc/security/limits.conf, or where Slurm's slurmd is started",
        ),
        Some(limit) => Finding::ok(format!(
            "{} per process; memory pinned by CUDA does not count",
            bytes(limit)
        )),
    }
}

/// Returns the memory of the node in bytes.
fn total(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.split_whitespace().next()?.parse().ok().map(|kib: usize| kib << 10)
}

/// Returns the soft limit in a line of /proc/self/limits; `None` if it is unlimited.
fn limit(limits: &str, name: &str) -> Option<usize> {
    limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus::{Ok, Warning};
    use super::*;

    #[test]
    fn limits_are_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max open files            1024                 524288               files     \n\
                      Max locked memory         unlimited            unlimited            bytes     \n";
        assert_eq!(
            (limit(limits, "Max open files"), limit(limits, "Max locked memory")),
            (Some(1024), None)
        );
        assert_eq!(total("MemFree: 1 kB\nMemTotal:       2048 kB\n"), Some(2 << 20));
    }

    #[test]
    fn narrow_limits_are_warned_of() {
        assert_eq!((open_files(Some(256)).status, open_files(None).status), (Warning, Ok));
        assert_eq!((shared(64 << 10).status, shared(1 << 30).status), (Warning, Ok));
        assert_eq!((memory(Some(1 << 20), None).status, memory(None, None).status), (Warning, Ok));
        let locked = |limit, infiniband| locked_memory(limit, infiniband).status;
        assert_eq!(
            (locked(Some(65536), true), locked(Some(65536), false), locked(None, true)),
            (Warning, Ok, Ok)
        );
    }
}
