//! Placement of ranks on hosts and cores, and the number of threads that each may use.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use hpctrain_base::control_groups::{CpuQuota, cpu_quota};
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_device::Backend;

/// The placement of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlacement {
    /// The name of the node.
    pub host: String,
    /// The cores that the rank may run on.
    pub cores: BTreeSet<usize>,
    /// The CPU quota of its control group, if that has one.
    pub quota: Option<CpuQuota>,
}

/// The placement of all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    places: Vec<RankPlacement>,
    rank: usize,
}

impl Topology {
    /// Exchanges the placement of every rank. Collective.
    ///
    /// # Errors
    /// Returns an error if a message fails.
    pub fn gather<B: Backend>(world: &Group<B>, host: String) -> Result<Self> {
        let here = RankPlacement { host, cores: allowed_cores(), quota: cpu_quota(Path::new("/")) };
        let message = serde_json::to_vec(&here).map_err(|e| Error::internal(e.to_string()))?;
        let messages = world.gather_bytes(message).wait()?;
        let places = messages.iter().map(|bytes| serde_json::from_slice(bytes));
        let places = places
            .collect::<Result<_, _>>()
            .map_err(|e| Error::comm(format!("a rank sent a malformed placement: {e}")))?;
        Ok(Self { places, rank: world.rank() })
    }

    /// Returns the placement of this rank.
    pub fn here(&self) -> &RankPlacement {
        &self.places[self.rank]
    }

    /// Returns the host of rank `rank`.
    pub fn host(&self, rank: usize) -> &str {
        self.places.get(rank).map_or("unknown", |place| &place.host)
    }

    /// Returns the cores of rank `rank` as the system lists them: `0-2,5`.
    pub fn cores(&self, rank: usize) -> String {
        self.places.get(rank).map_or(String::new(), |place| list(&place.cores))
    }

    /// Returns the host of every rank.
    pub fn hosts(&self) -> Vec<String> {
        self.places.iter().map(|place| place.host.clone()).collect()
    }

    /// Returns true if cores of this rank's node are used by no rank: mpirun binds each rank of a
    /// small job to one core.
    pub fn has_spare_cores(&self) -> bool {
        let here = self.here();
        let used: BTreeSet<_> = self
            .places
            .iter()
            .filter(|place| place.host == here.host)
            .flat_map(|place| &place.cores)
            .collect();
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        parse_list(online.trim()).is_some_and(|online| online.len() > used.len())
    }

    /// Returns the number of ranks on this rank's node, itself included.
    pub fn ranks_here(&self) -> usize {
        self.places.iter().filter(|place| place.host == self.here().host).count()
    }

    /// Returns the number of distinct hosts.
    pub fn host_count(&self) -> usize {
        self.places.iter().map(|place| &place.host).collect::<BTreeSet<_>>().len()
    }

    /// Returns the number of compute threads for this rank: its cores divided among the ranks of
    /// its node that may use them too, but no more than the quota of its control group allows.
    pub fn threads(&self) -> usize {
        let here = self.here();
        let sharers = self
            .places
            .iter()
            .filter(|other| other.host == here.host && !other.cores.is_disjoint(&here.cores))
            .count()
            .max(1);
        let of_cores = (here.cores.len() / sharers).max(1);
        let group = |place: &RankPlacement| place.quota.map(|quota| quota.group);
        let in_group = self
            .places
            .iter()
            .filter(|other| other.host == here.host && group(other) == group(here))
            .count();
        let of_quota = here.quota.map(|quota| quota.cpus(in_group));
        of_cores.min(of_quota.unwrap_or(usize::MAX))
    }
}

/// Returns the cores in this process's affinity mask.
fn allowed_cores() -> BTreeSet<usize> {
    let listed = std::fs::read_to_string("/proc/self/status").ok().and_then(|status| {
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        parse_list(line.trim())
    });
    // Without /proc the numbers are unknown; the count is not.
    listed.unwrap_or_else(|| {
        (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
    })
}

/// Parses a list of cores such as `0-2,5`.
pub fn parse_list(text: &str) -> Option<BTreeSet<usize>> {
    let mut cores = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cores.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cores)
}

/// Formats a set of cores as `0-2,5`.
fn list(cores: &BTreeSet<usize>) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &core in cores {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == core => *last = core,
            _ => runs.push((core, core)),
        }
    }
    let runs: Vec<String> = runs
        .into_iter()
        .map(|(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        })
        .collect();
    runs.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads(masks: &[(&str, &str)], rank: usize) -> usize {
        Topology {
            places: masks.iter().map(|(host, cores)| place(host, cores, None)).collect(),
            rank,
        }
        .threads()
    }

    fn place(host: &str, cores: &str, quota: Option<CpuQuota>) -> RankPlacement {
        RankPlacement { host: host.into(), cores: parse_list(cores).unwrap(), quota }
    }

    #[test]
    fn a_cpu_quota_limits_threads() {
        let quota = |group| Some(CpuQuota { thousandths: 2500, group: (0, group) });
        let threads =
            |places: &[RankPlacement]| Topology { places: places.to_vec(), rank: 0 }.threads();
        assert_eq!(threads(&[place("a", "0-63", quota(1))]), 3);
        // Ranks of one group share its quota.
        assert_eq!(threads(&[place("a", "0-63", quota(1)), place("a", "0-63", quota(1))]), 2);
        assert_eq!(threads(&[place("a", "0-63", quota(1)), place("a", "0-63", quota(2))]), 3);
        assert_eq!(threads(&[place("a", "0-63", quota(1)), place("b", "0-63", quota(1))]), 3);
        assert_eq!(threads(&[place("a", "0", quota(1))]), 1);
    }

    #[test]
    fn lists_parse() {
        assert_eq!(parse_list("0-2,5"), Some([0, 1, 2, 5].into()));
        assert_eq!(parse_list("7"), Some([7].into()));
        assert_eq!(parse_list("a"), None);
        assert_eq!(list(&[0, 1, 2, 5].into()), "0-2,5");
    }

    #[test]
    fn wide_masks_are_shared_and_bound_ones_are_not() {
        assert_eq!(threads(&[("a", "0-7")], 0), 8);
        assert_eq!(threads(&[("a", "0-7"), ("a", "0-7")], 1), 4);
        assert_eq!(threads(&[("a", "0-3"), ("a", "4-7")], 1), 4);
        assert_eq!(threads(&[("a", "0-7"), ("b", "0-7")], 0), 8);
        assert_eq!(threads(&[("a", "0"), ("a", "0"), ("a", "0")], 2), 1);
    }
}
