//! The holder of a lease: a process, and whether it is provably gone.
//!
//! Only the kernel that ran a process, or the scheduler that restarted its job, can prove that it
//! is gone. All other evidence, such as a lease without heartbeats, is a matter of timeouts and
//! left to the leases.

use std::fs;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// A process that holds a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseOwner {
    /// The name of its node.
    pub host: String,
    /// The boot of the node and its PID and time namespaces, within which process ids are valid.
    #[serde(default)]
    space: String,
    /// The process id.
    pub pid: u32,
    /// The start of the process, in clock ticks since boot, because process ids are reused. 0 if
    /// unknown.
    started: u64,
    /// The Slurm job that it belongs to.
    #[serde(default)]
    job: Option<Job>,
}

/// A Slurm job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Job {
    cluster: String,
    id: String,
    /// Number of times Slurm has restarted it.
    restarts: u64,
}

/// The processes, by host and id, without which the other ranks of their job go on.
static GONE: Mutex<Vec<(String, u32)>> = Mutex::new(Vec::new());

/// Declares that the other ranks of a job go on without a process: its leases may be taken. It will
/// not change anything that a lease protects, since it checks its lease before.
pub fn declare_gone(host: &str, pid: u32) {
    GONE.lock().unwrap_or_else(PoisonError::into_inner).push((host.to_owned(), pid));
}

/// Whether a process exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It no longer exists.
    Gone,
    /// It has been killed or is exiting, and is gone once the kernel has finished its pending work.
    Exiting,
    /// It exists.
    Exists,
    /// It cannot be determined from here.
    Unknown,
}

impl LeaseOwner {
    /// Returns this process.
    pub fn here() -> Self {
        let pid = std::process::id();
        let started = stat(pid).map_or(0, |stat| stat.started);
        Self {
            host: host(),
            space: space(),
            pid,
            started,
            job: Job::from_env(|name| std::env::var(name).ok()),
        }
    }

    /// Returns a string for file names that is unique to this process among all nodes.
    pub(super) fn nonce(&self) -> String {
        format!("{}-{}", self.host, self.pid)
    }

    /// Returns whether the process exists, as far as it can be proven from here.
    pub fn liveness(&self) -> Liveness {
        let gone = GONE.lock().unwrap_or_else(PoisonError::into_inner);
        if gone.iter().any(|(host, pid)| *host == self.host && *pid == self.pid) {
            return Liveness::Gone;
        }
        drop(gone);
        let life = if self.shares_pid_namespace() {
            process(self.pid, self.started)
        } else {
            Liveness::Unknown
        };
        let ours = Job::from_env(|name| std::env::var(name).ok());
        match (life, &self.job, &ours) {
            (Liveness::Unknown, Some(its), Some(ours)) if its.was_restarted_as(ours) => {
                Liveness::Gone
            }
            _ => life,
        }
    }

    /// Returns true if it runs, or ran, under this kernel since its last boot. It may be in another
    /// container.
    pub fn is_of_this_boot(&self) -> bool {
        let its = self.space.split(' ').next().unwrap_or_default();
        let here = boot();
        !its.is_empty() && its == here
    }

    /// Returns true if its process ids are valid in this process's namespace.
    fn shares_pid_namespace(&self) -> bool {
        let known = self
            .space
            .split_once(' ')
            .is_some_and(|(boot, pids)| !boot.is_empty() && !pids.is_empty());
        known && self.space == space()
    }
}

impl std::fmt::Display for LeaseOwner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} on {}", self.pid, self.host)?;
        self.job.as_ref().map_or(Ok(()), |job| write!(f, " (Slurm job {})", job.id))
    }
}

impl Job {
    /// Returns the Slurm job that environment variables name.
    fn from_env(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let id = variable("SLURM_JOB_ID").filter(|id| !id.is_empty())?;
        // Slurm sets it at the first restart.
        let restarts =
            variable("SLURM_RESTART_COUNT").map_or(Some(0), |count| count.parse().ok())?;
        Some(Self { cluster: variable("SLURM_CLUSTER_NAME").unwrap_or_default(), id, restarts })
    }

    /// Returns true if `now` is a later start of this job: Slurm has ended this one.
    fn was_restarted_as(&self, now: &Self) -> bool {
        (&self.cluster, &self.id) == (&now.cluster, &now.id) && self.restarts < now.restarts
    }
}

/// Returns the name of this node.
pub fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "localhost".into(), |name| name.trim().into())
}

/// Returns the id of this node's boot; empty if it is unknown.
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().into())
}

/// Returns the boot and the namespaces within which process ids and start times are valid.
fn space() -> String {
    // Without time namespaces, all processes count from the same moment.
    let named = |name: &str| fs::read_link(format!("/proc/self/ns/{name}")).unwrap_or_default();
    format!("{} {}{}", boot(), named("pid").display(), named("time").display())
}

/// Fields of `/proc/PID/stat`.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    state: String,
    exits: bool,
    threads: u64,
    started: u64,
}

/// The process flag for an exiting process.
const PF_EXITING: u64 = 4;

/// Reads `/proc/PID/stat`. Returns `None` if the process does not exist or is not visible.
fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything. After it come the state, and as 7th, 18th and
    // 20th word the flags, the threads and the start.
    let words: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |word: usize| words.get(word).and_then(|word| word.parse::<u64>().ok());
    let exits = number(6)? & PF_EXITING != 0;
    Some(Stat {
        state: (*words.first()?).into(),
        exits,
        threads: number(17)?,
        started: number(19)?,
    })
}

/// Returns true if a SIGKILL is pending for the process.
fn is_killed(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")));
    pending
        .filter_map(|set| u64::from_str_radix(set.trim(), 16).ok())
        .any(|set| set & (1 << 8) != 0)
}

/// Returns whether the process `pid` that started at `started` exists in this namespace.
fn process(pid: u32, started: u64) -> Liveness {
    let Some(stat) = stat(pid) else {
        // `/proc` may hide a process of another user, but `kill` reports it.
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        return match number.map(test_kill_process) {
            Some(Err(Errno::SRCH)) => Liveness::Gone,
            _ => Liveness::Unknown,
        };
    };
    // A zombie holds no resources once its last thread has ended.
    let first_has_ended = matches!(stat.state.as_str(), "Z" | "X");
    match started {
        0 => Liveness::Unknown,
        _ if stat.started != started => Liveness::Gone,
        _ if first_has_ended && stat.threads <= 1 => Liveness::Gone,
        _ if first_has_ended || stat.exits || is_killed(pid) => Liveness::Exiting,
        _ => Liveness::Exists,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a process of this node that does not exist: its id has been reused.
    pub fn gone() -> LeaseOwner {
        LeaseOwner { started: u64::MAX, ..LeaseOwner::here() }
    }

    /// Returns a process of another node.
    pub fn far() -> LeaseOwner {
        LeaseOwner {
            host: "elsewhere".into(),
            space: "another-boot pid:[1]".into(),
            ..LeaseOwner::here()
        }
    }

    impl LeaseOwner {
        /// Returns a process of a simulated node.
        pub fn of_node(host: &str, pid: u32) -> Self {
            Self {
                host: host.into(),
                space: format!("boot-of-{host} pid:[1]"),
                pid,
                started: 1,
                job: None,
            }
        }
    }

    /// Returns a process in another container of this node.
    pub fn in_other_container() -> LeaseOwner {
        LeaseOwner { space: format!("{} pid:[1]", boot()), ..LeaseOwner::here() }
    }

    fn job(id: &str, restarts: u64) -> Option<Job> {
        Some(Job { cluster: String::new(), id: id.into(), restarts })
    }

    #[test]
    fn declared_processes_are_gone() {
        let other = LeaseOwner { host: "cut-off".into(), ..far() };
        assert_eq!(other.liveness(), Liveness::Unknown);
        declare_gone("cut-off", other.pid);
        assert_eq!(other.liveness(), Liveness::Gone);
        assert_eq!(far().liveness(), Liveness::Unknown);
    }

    #[test]
    fn only_the_kernel_that_ran_it_proves_a_process_gone() {
        assert_eq!(LeaseOwner::here().liveness(), Liveness::Exists);
        assert_eq!(gone().liveness(), Liveness::Gone);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        let of_child =
            LeaseOwner { pid, started: stat(pid).unwrap().started, ..LeaseOwner::here() };
        assert_eq!(of_child.liveness(), Liveness::Exists);
        // Once killed, it is never taken for alive; then it is a zombie.
        child.kill().unwrap();
        loop {
            match of_child.liveness() {
                Liveness::Exiting => std::thread::yield_now(),
                Liveness::Gone => break,
                other => panic!("{other:?}: {:?}", stat(pid)),
            }
        }
        child.wait().unwrap();
        assert_eq!(of_child.liveness(), Liveness::Gone);
        // The same process id elsewhere is another process.
        for other in [far(), in_other_container()] {
            let other = LeaseOwner { pid, started: of_child.started, ..other };
            assert_eq!(other.liveness(), Liveness::Unknown);
        }
        assert!(
            in_other_container().is_of_this_boot()
                && LeaseOwner::here().is_of_this_boot()
                && !far().is_of_this_boot()
        );
        // Nothing is proven about a holder in an unknown namespace.
        let unknown = LeaseOwner { space: " ".into(), ..gone() };
        assert!(unknown.liveness() == Liveness::Unknown && !unknown.is_of_this_boot());
        assert_eq!(LeaseOwner { started: 0, ..LeaseOwner::here() }.liveness(), Liveness::Unknown);
    }

    /// Returns the job that these environment variables describe.
    fn from_variables(variables: &[(&str, &str)]) -> Option<Job> {
        Job::from_env(|name| {
            let variable = variables.iter().find(|(known, _)| *known == name);
            variable.map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn a_restart_of_a_slurm_job_proves_the_one_before_gone() {
        assert_eq!(from_variables(&[]), None);
        assert_eq!(from_variables(&[("SLURM_JOB_ID", "7")]), job("7", 0));
        assert_eq!(
            from_variables(&[("SLURM_JOB_ID", "7"), ("SLURM_RESTART_COUNT", "2")]),
            job("7", 2)
        );
        assert_eq!(from_variables(&[("SLURM_JOB_ID", "7"), ("SLURM_RESTART_COUNT", "x")]), None);
        let [first, second, other] = [job("7", 0), job("7", 1), job("8", 1)].map(Option::unwrap);
        assert!(first.was_restarted_as(&second));
        assert!(!second.was_restarted_as(&first) && !second.was_restarted_as(&second));
        assert!(!first.was_restarted_as(&other));
        assert!(!first.was_restarted_as(&Job { cluster: "b".into(), ..second }));
    }
}
