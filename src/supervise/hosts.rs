//! The hosts of a supervised job: those that answer, and the ranks that they may have.

use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::system::uname;

use crate::error::{Error, Result};

/// Time within which a host must answer.
const ANSWER: Duration = Duration::from_secs(20);

/// Interval at which answers are looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The agent where none is given. It asks for no password, and gives up before an answer is given
/// up.
pub const AGENT: &str = "ssh -o BatchMode=yes -o ConnectTimeout=10";

/// In the command of a job: the place of the hosts with their ranks.
pub const HOSTS: &str = "{hosts}";
/// In the command of a job: the place of the number of all ranks.
pub const RANKS: &str = "{ranks}";

/// A host, and the ranks that it has room for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSlots {
    /// The name by which the agent and the launcher reach it.
    pub name: String,
    /// Ranks at most.
    pub slots: usize,
}

/// Hosts in the order in which they are taken, such as `h0:2,h1:2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostList(pub Vec<HostSlots>);

impl HostList {
    /// Ranks at most.
    pub fn slots(&self) -> usize {
        self.0.iter().map(|host| host.slots).sum()
    }
}

impl FromStr for HostList {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::input(format!("--hosts {text}: not a list of hosts with their ranks"))
                .hint("such as --hosts node1:8,node2:8, each host once")
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
    /// All of them.
    pub list: HostList,
    /// The program that runs a command on another host, with its first arguments.
    pub agent: Vec<String>,
    /// The numbers of ranks that the layout allows, ascending.
    pub allowed: Vec<usize>,
}

/// The ranks of a start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seats {
    /// Each host with its ranks, as launchers take them.
    pub hosts: String,
    /// All ranks.
    pub ranks: usize,
}

impl Seats {
    /// A job's command with these in the places of `{hosts}` and `{ranks}`.
    pub fn fill(&self, command: &[String]) -> Vec<String> {
        let ranks = self.ranks.to_string();
        command.iter().map(|word| word.replace(HOSTS, &self.hosts).replace(RANKS, &ranks)).collect()
    }
}

impl Hosts {
    /// The agent's program, as the system names its processes.
    pub fn agent_name(&self) -> Option<&str> {
        self.agent.first()?.rsplit('/').next()
    }

    /// The most ranks that the layout allows on hosts that answer; else the reason why there are
    /// none.
    pub fn seats(&self) -> Result<Seats, String> {
        let present = self.present();
        let names = |hosts: &[&HostSlots]| {
            hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(", ")
        };
        let gone: Vec<&HostSlots> =
            self.list.0.iter().filter(|host| !present.contains(host)).collect();
        if !gone.is_empty() {
            log::warn!("no answer from {}", names(&gone));
        }
        let room: usize = present.iter().map(|host| host.slots).sum();
        let ranks = self.allowed.iter().rev().find(|ranks| **ranks <= room);
        match ranks {
            Some(ranks) => Ok(share(&present, *ranks)),
            None if present.is_empty() => {
                Err(format!("none of the hosts {} answers", names(&gone)))
            }
            None => {
                Err(format!("the layout allows no number of ranks that {} hold", names(&present)))
            }
        }
    }

    /// The hosts that answer, in their order. This one needs not be asked.
    fn present(&self) -> Vec<&HostSlots> {
        let here = uname();
        let here = here.nodename().to_string_lossy();
        let asked: Vec<(&HostSlots, Option<Child>)> =
            self.list.0.iter().map(|host| (host, self.ask(host, &here))).collect();
        let begun = Instant::now();
        let answers = |(host, child): (&'_ HostSlots, Option<Child>)| match child {
            None => is_here(&host.name, &here),
            Some(child) => succeeds(child, begun),
        };
        asked
            .into_iter()
            .map(|(host, child)| (host, answers((host, child))))
            .filter(|one| one.1)
            .map(|one| one.0)
            .collect()
    }

    /// Starts a question to another host.
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

/// Whether a name is that of this host, with or without its domain.
fn is_here(name: &str, here: &str) -> bool {
    let first = |name: &str| name.split('.').next().unwrap_or_default().to_string();
    name == "localhost" || first(name) == first(here)
}

/// Whether a process ends in time and well.
fn succeeds(mut child: Child, begun: Instant) -> bool {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if begun.elapsed() < ANSWER => std::thread::sleep(POLL_INTERVAL),
            _ => {
                // It may have ended just now.
                let _ = child.kill();
                let _ = child.wait();
                return false;
            }
        }
    }
}

/// So many ranks on as few hosts as hold them: equally many on each where that is possible, else
/// the first hosts are filled.
fn share(hosts: &[&HostSlots], ranks: usize) -> Seats {
    let even = (1..=hosts.len()).filter(|count| ranks.is_multiple_of(*count)).find_map(|count| {
        let each = ranks / count;
        let chosen: Vec<_> = hosts.iter().filter(|host| host.slots >= each).take(count).collect();
        (chosen.len() == count)
            .then(|| chosen.into_iter().map(|host| (host.name.as_str(), each)).collect::<Vec<_>>())
    });
    let filled = || {
        let mut left = ranks;
        let mut take = |host: &&'_ HostSlots| {
            let here = host.slots.min(left);
            left -= here;
            here
        };
        let all = hosts.iter().map(|host| (host.name.as_str(), take(host)));
        all.filter(|(_, here)| *here > 0).collect()
    };
    let seats = even.unwrap_or_else(filled);
    let words: Vec<String> = seats.iter().map(|(name, ranks)| format!("{name}:{ranks}")).collect();
    Seats { hosts: words.join(","), ranks }
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
    fn ranks_are_shared_among_few_hosts() {
        let told = |list: &str, ranks| {
            let list: HostList = list.parse().unwrap();
            share(&list.0.iter().collect::<Vec<_>>(), ranks).hosts
        };
        assert_eq!(told("a:2,b:2", 4), "a:2,b:2");
        assert_eq!(told("a:2,b:2", 2), "a:2");
        assert_eq!(told("a:1,b:4,c:4", 4), "b:4");
        assert_eq!(told("a:4,b:4,c:4", 8), "a:4,b:4");
        assert_eq!(told("a:1,b:3", 4), "a:1,b:3");
        assert_eq!(told("a:3,b:3", 4), "a:2,b:2");
        assert_eq!(told("a:3,b:3", 5), "a:3,b:2");
    }

    #[test]
    fn the_most_ranks_that_the_layout_allows_are_taken() {
        // Every host but `gone` answers.
        let agent = ["sh", "-c", "[ \"$0\" != gone ]"];
        let seats = |list| hosts(list, &agent, &[1, 2, 4, 8]).seats();
        let command = ["mpirun", "--host", HOSTS, "-np", RANKS, "x"].map(String::from);
        let words = |seats: Seats| seats.fill(&command).join(" ");
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
        let error = hosts("far:2,gone:2", &agent, &[4]).seats().unwrap_err();
        assert_eq!(error, "the layout allows no number of ranks that far hold");
        let error = hosts("far:2", &["/no/such/agent"], &[1]).seats().unwrap_err();
        assert_eq!(error, "none of the hosts far answers");
    }
}
