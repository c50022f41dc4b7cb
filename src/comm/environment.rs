//! Environment variables that a process sets for MPI, CUDA and NCCL before it has other threads.
//!
//! A variable that the user has set is kept. Child processes, such as those that probe transports,
//! inherit the variables.

use std::num::NonZero;
use std::sync::Once;

/// A variable and the value that it gets unless it is set.
type Setting = (&'static str, &'static str);

/// Makes Open MPI, and hpctrain too, yield the core while waiting. It is set where `mpirun` starts
/// more ranks on a node than there are cores.
pub(crate) const YIELD: &str = "OMPI_MCA_mpi_yield_when_idle";

/// Names the MPI library to open, in programs that open it at run time.
pub(crate) const MPI_LIBRARY: &str = "HPCTRAIN_MPI_LIBRARY";

/// The number of hardware queues that the CUDA driver distributes the streams of a process over.
/// Streams that share a queue wait for each other. The driver's default is 8; a rank has nine
/// streams or more, and up to 20 with NCCL communicators.
const QUEUES: Setting = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// Whether NCCL may sum in the switches of NVLink (NVLS). Each communicator then reserves device
/// memory for it, but only NCCL's own collectives use it, not its point-to-point messages. It is
/// not set for runs that may use those collectives.
const NVLS: Setting = ("NCCL_NVLS_ENABLE", "0");

/// The most channels that NCCL uses for the messages of a pair of ranks. NCCL allocates buffers for
/// each channel of each connected pair, and groups of messages connect all pairs: with its default
/// of up to 32, each of eight H100 is reported to hold 4.3 GB after the first all-to-all
/// (<https://github.com/NVIDIA/nccl/issues/1685>).
const P2P_CHANNELS: Setting = ("NCCL_MAX_P2P_NCHANNELS", "8");

/// Sets environment variables for libraries, unless they are set already. In a process with other
/// threads, which may read the environment at the same time, it sets none. Only the first call in a
/// process has an effect; every start of a communicator makes one, so call it before to pass
/// `uses_vendor`: whether the process may run NCCL's own collectives.
pub fn prepare_environment(uses_vendor: bool) {
    static PREPARED: Once = Once::new();
    PREPARED.call_once(|| set_missing(settings(uses_vendor, is_crowded())));
}

/// Returns the variables of a process.
fn settings(uses_vendor: bool, is_crowded: bool) -> impl Iterator<Item = Setting> {
    [
        Some((YIELD, "1")).filter(|_| is_crowded),
        Some(QUEUES),
        Some(NVLS).filter(|_| !uses_vendor),
        Some(P2P_CHANNELS),
    ]
    .into_iter()
    .flatten()
}

/// Sets those of the variables that are not set, if this process has no other threads.
fn set_missing(settings: impl Iterator<Item = Setting>) {
    let is_alone = is_alone();
    for (name, value) in settings.filter(|(name, _)| std::env::var_os(name).is_none()) {
        if !is_alone {
            log::info!("{name}={value} is not set, because this process already has other threads");
            continue;
        }
        // SAFETY: this thread is the only one of the process, so that no other reads or changes the
        // environment.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Returns true if `mpirun` has started more ranks on this node than there are cores.
fn is_crowded() -> bool {
    let ranks = std::env::var("OMPI_COMM_WORLD_LOCAL_SIZE").ok();
    ranks.and_then(|ranks| ranks.parse::<usize>().ok()).is_some_and(|ranks| ranks > cores())
}

/// Returns the number of cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Returns true if this thread is the only one of the process, and false if that cannot be found
/// out.
fn is_alone() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_may_use_nccls_collectives_keep_nvls() {
        let names = |uses_vendor, is_crowded| {
            settings(uses_vendor, is_crowded).map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(false, false), [QUEUES.0, NVLS.0, P2P_CHANNELS.0]);
        assert_eq!(names(true, false), [QUEUES.0, P2P_CHANNELS.0]);
        assert_eq!(names(true, true), [YIELD, QUEUES.0, P2P_CHANNELS.0]);
    }

    /// Other threads may read the environment at any time.
    #[test]
    fn a_process_with_other_threads_keeps_its_environment() {
        // The harness has one.
        assert!(!is_alone());
        let name = "HPCTRAIN_TEST_IS_NOT_SET";
        set_missing([(name, "1")].into_iter());
        assert_eq!(std::env::var(name).ok(), None);
    }
}
