//! The holder of a lease: a process, and whether it is provably gone.
//!
//! A process is proven gone only by the kernel that ran it, or by the scheduler that started its
//! job again. All other evidence, such as a lease that is not touched, is a matter of time and left
//! to the leases.

use std::fs;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// A process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseOwner {
    /// Name of its node.
    pub host: String,
    /// The node's start and the numbering of processes there: containers of one node may have their
    /// own.
    #[serde(default)]
    space: String,
    /// Its process there.
    pub pid: u32,
    /// Start of the process, in ticks since the start of the node: process ids are used again. 0 if
    /// it is not known.
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

/// Whether a process exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It does not exist any more.
    Gone,
    /// It has been killed or is exiting, and is gone as soon as the kernel has finished its pending
    /// work.
    Ends,
    /// It exists.
    Exists,
    /// Nobody here can tell.
    Unknown,
}

impl LeaseOwner {
    /// This process.
    pub fn here() -> Self {
        let pid = std::process::id();
        let started = stat(pid).map_or(0, |stat| stat.started);
        Self {
            host: host(),
            space: space(),
            pid,
            started,
            job: Job::of(|name| std::env::var(name).ok()),
        }
    }

    /// Names the process in names of files: others on its node and elsewhere have other names.
    pub(super) fn nonce(&self) -> String {
        format!("{}-{}", self.host, self.pid)
    }

    /// Whether the process exists, as far as it can be proven from here.
    pub fn life(&self) -> Liveness {
        let life = if self.numbers_mean_the_same() {
            process(self.pid, self.started)
        } else {
            Liveness::Unknown
        };
        let ours = Job::of(|name| std::env::var(name).ok());
        match (life, &self.job, &ours) {
            (Liveness::Unknown, Some(its), Some(ours)) if its.was_started_again_as(ours) => {
                Liveness::Gone
            }
            _ => life,
        }
    }

    /// Whether it runs, or ran, under this kernel since its last start. It may be in another
    /// container.
    pub fn is_of_this_boot(&self) -> bool {
        let its = self.space.split(' ').next().unwrap_or_default();
        let here = boot();
        !its.is_empty() && its == here
    }

    /// Whether numbers of processes mean the same to it and to this process.
    fn numbers_mean_the_same(&self) -> bool {
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
    /// The job that an environment tells of.
    fn of(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let id = variable("SLURM_JOB_ID").filter(|id| !id.is_empty())?;
        // Slurm sets it with the first restart.
        let restarts =
            variable("SLURM_RESTART_COUNT").map_or(Some(0), |count| count.parse().ok())?;
        Some(Self { cluster: variable("SLURM_CLUSTER_NAME").unwrap_or_default(), id, restarts })
    }

    /// Whether `now` is a later start of this job: Slurm has ended the one before.
    fn was_started_again_as(&self, now: &Self) -> bool {
        (&self.cluster, &self.id) == (&now.cluster, &now.id) && self.restarts < now.restarts
    }
}

/// The name of this node.
pub fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "localhost".into(), |name| name.trim().into())
}

/// Names the start of this node's kernel; empty where it does not tell.
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().into())
}

/// Names the space in which numbers and starts of processes mean something: the kernel's start, and
/// the namespaces.
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

/// Of the flags of a process: it is exiting.
const PF_EXITING: u64 = 4;

/// Reads it; none if there is no such process, or nobody may see it.
fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything. After it come the state, as the 7th word the
    // flags, the 18th the threads, the 20th the start.
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

/// Whether a SIGKILL has been sent to a process that it has not yet acted on.
fn is_killed(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")));
    pending
        .filter_map(|set| u64::from_str_radix(set.trim(), 16).ok())
        .any(|set| set & (1 << 8) != 0)
}

/// Whether the process `pid` that started at `started` exists, among those whose numbers mean the
/// same here.
fn process(pid: u32, started: u64) -> Liveness {
    let Some(stat) = stat(pid) else {
        // A process of another user may be hidden, but not from this question.
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        return match number.map(test_kill_process) {
            Some(Err(Errno::SRCH)) => Liveness::Gone,
            _ => Liveness::Unknown,
        };
    };
    // A process that has ended but was not waited for holds nothing once its last thread has ended.
    let first_has_ended = matches!(stat.state.as_str(), "Z" | "X");
    match started {
        0 => Liveness::Unknown,
        _ if stat.started != started => Liveness::Gone,
        _ if first_has_ended && stat.threads <= 1 => Liveness::Gone,
        _ if first_has_ended || stat.exits || is_killed(pid) => Liveness::Ends,
        _ => Liveness::Exists,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A process of this node that does not exist: its number has been used again.
    pub fn gone() -> LeaseOwner {
        LeaseOwner { started: u64::MAX, ..LeaseOwner::here() }
    }

    /// A process of another node.
    pub fn far() -> LeaseOwner {
        LeaseOwner {
            host: "elsewhere".into(),
            space: "another-boot pid:[1]".into(),
            ..LeaseOwner::here()
        }
    }

    impl LeaseOwner {
        /// A process of a node that is only simulated.
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

    /// A process in another container of this node.
    pub fn beside() -> LeaseOwner {
        LeaseOwner { space: format!("{} pid:[1]", boot()), ..LeaseOwner::here() }
    }

    fn job(id: &str, restarts: u64) -> Option<Job> {
        Some(Job { cluster: String::new(), id: id.into(), restarts })
    }

    #[test]
    fn only_the_kernel_that_ran_it_proves_a_process_gone() {
        assert_eq!(LeaseOwner::here().life(), Liveness::Exists);
        assert_eq!(gone().life(), Liveness::Gone);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        let of_child =
            LeaseOwner { pid, started: stat(pid).unwrap().started, ..LeaseOwner::here() };
        assert_eq!(of_child.life(), Liveness::Exists);
        // Killed it is not taken for alive at any moment; then it has ended and was not waited for.
        child.kill().unwrap();
        loop {
            match of_child.life() {
                Liveness::Ends => std::thread::yield_now(),
                Liveness::Gone => break,
                other => panic!("{other:?}: {:?}", stat(pid)),
            }
        }
        child.wait().unwrap();
        assert_eq!(of_child.life(), Liveness::Gone);
        // The same number elsewhere is another process.
        for other in [far(), beside()] {
            let other = LeaseOwner { pid, started: of_child.started, ..other };
            assert_eq!(other.life(), Liveness::Unknown);
        }
        assert!(
            beside().is_of_this_boot()
                && LeaseOwner::here().is_of_this_boot()
                && !far().is_of_this_boot()
        );
        // Of a holder in an unknown space nothing is proven.
        let unknown = LeaseOwner { space: " ".into(), ..gone() };
        assert!(unknown.life() == Liveness::Unknown && !unknown.is_of_this_boot());
        assert_eq!(LeaseOwner { started: 0, ..LeaseOwner::here() }.life(), Liveness::Unknown);
    }

    #[test]
    fn a_restart_of_a_slurm_job_proves_the_one_before_gone() {
        let of = |variables: &[(&str, &str)]| {
            Job::of(|name| {
                variables
                    .iter()
                    .find(|(known, _)| *known == name)
                    .map(|(_, value)| value.to_string())
            })
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("SLURM_JOB_ID", "7")]), job("7", 0));
        assert_eq!(of(&[("SLURM_JOB_ID", "7"), ("SLURM_RESTART_COUNT", "2")]), job("7", 2));
        assert_eq!(of(&[("SLURM_JOB_ID", "7"), ("SLURM_RESTART_COUNT", "x")]), None);
        let [first, second, other] = [job("7", 0), job("7", 1), job("8", 1)].map(Option::unwrap);
        assert!(first.was_started_again_as(&second));
        assert!(!second.was_started_again_as(&first) && !second.was_started_again_as(&second));
        assert!(!first.was_started_again_as(&other));
        assert!(!first.was_started_again_as(&Job { cluster: "b".into(), ..second }));
    }
}
