//! The hosts of a supervised job: finds those that answer, and distributes ranks over them.

use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::system::uname;

use crate::error::{Error, Result};

/// The time within which a host must answer.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The interval at which answers are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The default agent. It does not ask for a password, and gives up after 10 seconds.
pub const AGENT: &str = "ssh -o BatchMode=yes -o ConnectTimeout=10";

/// The placeholder in the command of a job for the hosts with their ranks.
pub const HOSTS_PLACEHOLDER: &str = "{hosts}";
/// The placeholder in the command of a job for the number of ranks.
pub const RANKS_PLACEHOLDER: &str = "{ranks}";

/// A host with its slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSlots {
    /// The name by which the agent and the launcher reach it.
    pub name: String,
    /// The most ranks that it may have.
    pub slots: usize,
}

/// A list of hosts in order of preference, such as `h0:2,h1:2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostList(pub Vec<HostSlots>);

impl HostList {
    /// Returns the number of slots of all hosts.
    pub fn slots(&self) -> usize {
        self.0.iter().map(|host| host.slots).sum()
    }
}

impl FromStr for HostList {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::input(format!("--hosts {text} is not a list of hosts with their ranks"))
                .hint("write, for example, --hosts node1:8,node2:8, each host once")
        };
        let mut hosts: Vec<HostSlots> = Vec::new();
        for word in text.split(',') {
            let (name, slots) = word.split_once(':').unwrap_or((word, "1"));
            let slots = slots.parse().ok().filter(|slots| *slots > 0).ok_or_else(wrong)?;
            if name.is_empty()
                || name.starts_with('-')
                || hosts.iter().any(|host| host.name == name)
            {
                return Err(wrong());
            }
            hosts.push(HostSlots { name: name.into(), slots });
        }
        Ok(Self(hosts))
    }
}

/// The hosts that a job may have.
#[derive(Debug, Clone)]
pub struct Hosts {
    /// All hosts.
    pub list: HostList,
    /// The program that runs a command on another host, with its first arguments.
    pub agent: Vec<String>,
    /// The numbers of ranks that the layout allows, in ascending order.
    pub allowed: Vec<usize>,
}

/// The hosts and ranks of a start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The hosts with their ranks, in the syntax of launchers.
    pub hosts: String,
    /// The number of ranks.
    pub ranks: usize,
}

impl Allocation {
    /// Replaces `{hosts}` and `{ranks}` in the command of a job.
    pub fn fill(&self, command: &[String]) -> Vec<String> {
        let ranks = self.ranks.to_string();
        command
            .iter()
            .map(|word| {
                word.replace(HOSTS_PLACEHOLDER, &self.hosts).replace(RANKS_PLACEHOLDER, &ranks)
            })
            .collect()
    }
}

impl Hosts {
    /// Returns the name of the agent's program, as the system names its processes.
    pub fn agent_name(&self) -> Option<&str> {
        self.agent.first()?.rsplit('/').next()
    }

    /// Distributes the most ranks that the layout allows over the hosts that answer.
    ///
    /// # Errors
    /// Returns a message if no host answers, or the layout does not allow so few ranks.
    pub fn allocate(&self) -> Result<Allocation, String> {
        let present = self.reachable();
        let names = |hosts: &[&HostSlots]| {
            hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(", ")
        };
        let gone: Vec<&HostSlots> =
            self.list.0.iter().filter(|host| !present.contains(host)).collect();
        if !gone.is_empty() {
            log::warn!("no answer from {}", names(&gone));
        }
        let slots: usize = present.iter().map(|host| host.slots).sum();
        let ranks = self.allowed.iter().rev().find(|ranks| **ranks <= slots);
        match ranks {
            Some(ranks) => Ok(distribute(&present, *ranks)),
            None if present.is_empty() => {
                Err(format!("none of the hosts {} answers", names(&gone)))
            }
            None => Err(format!(
                "no number of ranks that the layout allows fits into the {slots} slots of {}",
                names(&present)
            )),
        }
    }

    /// Returns the hosts that answer, in order. This host is not asked.
    fn reachable(&self) -> Vec<&HostSlots> {
        let here = uname();
        let here = here.nodename().to_string_lossy();
        let asked: Vec<(&HostSlots, Option<Child>)> =
            self.list.0.iter().map(|host| (host, self.ask(host, &here))).collect();
        let begun = Instant::now();
        let answering = asked.into_iter().filter_map(|(host, child)| {
            let answers = match child {
                None => is_here(&host.name, &here),
                Some(child) => succeeds(child, begun),
            };
            answers.then_some(host)
        });
        answering.collect()
    }

    /// Starts the agent to check whether another host answers.
    fn ask(&self, host: &HostSlots, here: &str) -> Option<Child> {
        let [program, arguments @ ..] = &self.agent[..] else { return None };
        if is_here(&host.name, here) {
            return None;
        }
        let mut command = Command::new(program);
        command
            .args(arguments)
            .args([&host.name, "true"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        match command.spawn() {
            Ok(child) => Some(child),
            Err(e) => {
                log::warn!("cannot start {program} to ask {}: {e}", host.name);
                None
            }
        }
    }
}

/// A check whether a host answers.
pub struct Asking {
    child: Option<Child>,
    since: Instant,
}

impl Asking {
    /// Starts to run `true` on a host with the words of the command that runs another one there.
    pub fn start(launcher: &[String]) -> Self {
        let mut words = launcher.iter();
        let child = words.next().and_then(|program| {
            let mut command = Command::new(program);
            command.args(words).arg("true");
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().ok()
        });
        Self { child, since: Instant::now() }
    }

    /// Returns whether the host answers, once it is known.
    pub fn answered(&mut self) -> Option<bool> {
        let Some(child) = &mut self.child else { return Some(false) };
        match child.try_wait() {
            Ok(Some(status)) => Some(status.success()),
            Ok(None) if self.since.elapsed() < TIMEOUT => None,
            _ => {
                // The process may have ended just now.
                let _ = child.kill();
                let _ = child.wait();
                Some(false)
            }
        }
    }
}

/// Returns true if a name is that of this host.
pub fn is_this_host(name: &str) -> bool {
    is_here(name, &uname().nodename().to_string_lossy())
}

/// Returns those of the hosts that answer, in order. `launcher` returns the words of the command
/// that runs another one on a host.
pub fn answering(list: &HostList, launcher: impl Fn(&str) -> Vec<String>) -> Vec<HostSlots> {
    let mut asked: Vec<(&HostSlots, Option<Asking>)> = list
        .0
        .iter()
        .map(|host| {
            let asking = (!is_this_host(&host.name)).then(|| Asking::start(&launcher(&host.name)));
            (host, asking)
        })
        .collect();
    let mut answers: Vec<Option<bool>> = vec![None; asked.len()];
    while answers.contains(&None) {
        for ((_, asking), answer) in asked.iter_mut().zip(&mut answers) {
            let now = || asking.as_mut().map_or(Some(true), Asking::answered);
            *answer = answer.or_else(now);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let found = asked.into_iter().zip(answers).filter(|(_, answer)| *answer == Some(true));
    found.map(|((host, _), _)| host.clone()).collect()
}

/// Returns true if a name is that of this host, with or without its domain.
fn is_here(name: &str, here: &str) -> bool {
    let first = |name: &str| name.split('.').next().unwrap_or_default().to_string();
    name == "localhost" || first(name) == first(here)
}

/// Returns true if a process succeeds within [`TIMEOUT`].
fn succeeds(mut child: Child, begun: Instant) -> bool {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if begun.elapsed() < TIMEOUT => std::thread::sleep(POLL_INTERVAL),
            _ => {
                // The process may have ended just now.
                let _ = child.kill();
                let _ = child.wait();
                return false;
            }
        }
    }
}

/// Distributes `ranks` ranks over the fewest hosts that can have equally many each; if that is not
/// possible, fills the first hosts.
fn distribute(hosts: &[&HostSlots], ranks: usize) -> Allocation {
    let even = (1..=hosts.len()).filter(|count| ranks.is_multiple_of(*count)).find_map(|count| {
        let each = ranks / count;
        let chosen: Vec<_> = hosts.iter().filter(|host| host.slots >= each).take(count).collect();
        (chosen.len() == count)
            .then(|| chosen.into_iter().map(|host| (host.name.as_str(), each)).collect::<Vec<_>>())
    });
    let chosen = even.unwrap_or_else(|| fill(hosts, ranks));
    let words: Vec<String> = chosen.iter().map(|(name, ranks)| format!("{name}:{ranks}")).collect();
    Allocation { hosts: words.join(","), ranks }
}

/// Returns the first hosts with their slots, until these are enough for `ranks` ranks.
fn fill<'a>(hosts: &[&'a HostSlots], ranks: usize) -> Vec<(&'a str, usize)> {
    let mut filled = Vec::new();
    let mut left = ranks;
    for host in hosts {
        let here = host.slots.min(left);
        if here > 0 {
            filled.push((host.name.as_str(), here));
        }
        left -= here;
    }
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(list: &str, agent: &[&str], allowed: &[usize]) -> Hosts {
        let agent = agent.iter().map(|word| word.to_string()).collect();
        Hosts { list: list.parse().unwrap(), agent, allowed: allowed.to_vec() }
    }

    #[test]
    fn lists_are_read_or_refused() {
        let list: HostList = "h0:2,h1".parse().unwrap();
        assert_eq!(
            list.0,
            [("h0", 2), ("h1", 1)].map(|(name, slots)| HostSlots { name: name.into(), slots })
        );
        assert_eq!(list.slots(), 3);
        for wrong in ["", "h0:", "h0:0", "h0:x", ":2", "h0,h0", "h0,,h1", "-o:2"] {
            let error = wrong.parse::<HostList>().unwrap_err().to_string();
            assert!(error.contains(&format!("--hosts {wrong}")), "{error}");
        }
    }

    #[test]
    fn ranks_are_distributed_over_few_hosts() {
        let distributed = |list: &str, ranks| {
            let list: HostList = list.parse().unwrap();
            distribute(&list.0.iter().collect::<Vec<_>>(), ranks).hosts
        };
        assert_eq!(distributed("a:2,b:2", 4), "a:2,b:2");
        assert_eq!(distributed("a:2,b:2", 2), "a:2");
        assert_eq!(distributed("a:1,b:4,c:4", 4), "b:4");
        assert_eq!(distributed("a:4,b:4,c:4", 8), "a:4,b:4");
        assert_eq!(distributed("a:1,b:3", 4), "a:1,b:3");
        assert_eq!(distributed("a:3,b:3", 4), "a:2,b:2");
        assert_eq!(distributed("a:3,b:3", 5), "a:3,b:2");
    }

    #[test]
    fn the_most_ranks_that_the_layout_allows_are_taken() {
        // Every host but `gone` answers.
        let agent = ["sh", "-c", "[ \"$0\" != gone ]"];
        let seats = |list| hosts(list, &agent, &[1, 2, 4, 8]).allocate();
        let command = ["mpirun", "--host", HOSTS_PLACEHOLDER, "-np", RANKS_PLACEHOLDER, "x"]
            .map(String::from);
        let words = |seats: Allocation| seats.fill(&command).join(" ");
        assert_eq!(words(seats("far:2,near:2").unwrap()), "mpirun --host far:2,near:2 -np 4 x");
        assert_eq!(
            words(seats("far:3,gone:5,near:3").unwrap()),
            "mpirun --host far:2,near:2 -np 4 x"
        );
        assert_eq!(
            words(seats("gone:2,localhost:1").unwrap()),
            "mpirun --host localhost:1 -np 1 x"
        );
        assert_eq!(seats("gone:2").unwrap_err(), "none of the hosts gone answers");
        let error = hosts("far:2,gone:2", &agent, &[4]).allocate().unwrap_err();
        assert_eq!(error, "no number of ranks that the layout allows fits into the 2 slots of far");
        let error = hosts("far:2", &["/no/such/agent"], &[1]).allocate().unwrap_err();
        assert_eq!(error, "none of the hosts far answers");
    }
}
