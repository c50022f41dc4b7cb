//! Checks of the placement of ranks: hosts, cores, GPUs, and whether these are near one another.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Check, Finding};
use crate::backend::cuda::Device;
use crate::gpu_assignment::near_cores;

/// The GPU that a rank computes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The name of the model.
    pub name: String,
    /// The PCI address.
    pub pci: String,
    /// The cores of the processor that it is attached to; empty if the system does not know them.
    pub near_cores: BTreeSet<usize>,
}

impl Gpu {
    pub(super) fn new(device: &Device) -> Self {
        let near_cores = near_cores(&device.pci).unwrap_or_default();
        Self { name: device.name.clone(), pci: device.pci.clone(), near_cores }
    }
}

/// The resources of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankResources {
    /// The name of its node.
    pub host: String,
    /// The number of the rank on its node.
    pub local_rank: usize,
    /// The cores that it may run on.
    pub cores: BTreeSet<usize>,
    /// Whether its node has cores that no rank may run on.
    pub spare_cores: bool,
    /// The GPU that it would compute on; `None` if it would compute on the CPU.
    pub gpu: Option<Gpu>,
}

/// Checks the placement of all ranks.
pub(super) fn checks(ranks: &[RankResources]) -> Vec<Check> {
    let mut checks = vec![hosts(ranks).named("ranks"), cores(ranks).named("cores")];
    checks.extend(gpu_affinity(ranks).map(|finding| finding.named("gpus and cores")));
    checks
}

fn by_host(ranks: &[RankResources]) -> BTreeMap<&str, Vec<&RankResources>> {
    let mut hosts: BTreeMap<_, Vec<_>> = BTreeMap::new();
    ranks.iter().for_each(|rank| hosts.entry(rank.host.as_str()).or_default().push(rank));
    hosts
}

fn hosts(ranks: &[RankResources]) -> Finding {
    let hosts = by_host(ranks);
    let counts: Vec<String> =
        hosts.iter().map(|(host, ranks)| format!("{} on {host}", ranks.len())).collect();
    let counts = counts.join(", ");
    let sizes: BTreeSet<usize> = hosts.values().map(Vec::len).collect();
    match sizes.len() > 1 {
        true => Finding::warning(
            counts,
            "the node with the most ranks is the slowest: start equally many ranks on each node",
        ),
        false => Finding::ok(counts),
    }
}

fn cores(ranks: &[RankResources]) -> Finding {
    let each: Vec<usize> = ranks.iter().map(|rank| rank.cores.len()).collect();
    let least = each.iter().min().copied().unwrap_or(0);
    let most = each.iter().max().copied().unwrap_or(0);
    let amount = if least == most { format!("{least}") } else { format!("{least} to {most}") };
    let found = format!("a rank may use {amount}");
    let crowded = by_host(ranks).into_iter().find(|(_, ranks)| ranks.len() > union(ranks).len());
    if let Some((host, ranks)) = crowded {
        let found =
            format!("{found}; {} ranks share {} on {host}", ranks.len(), union(&ranks).len());
        return Finding::warning(found, "start as many ranks as there are cores, or fewer");
    }
    match ranks.iter().any(|rank| rank.cores.len() == 1 && rank.spare_cores) {
        true => Finding::warning(
            format!("{found}, and others are idle"),
            "mpirun binds each rank of a small job to one core: --bind-to none, or --map-by slot:PE=4 for four per rank",
        ),
        false => Finding::ok(found),
    }
}

fn union(ranks: &[&RankResources]) -> BTreeSet<usize> {
    ranks.iter().flat_map(|rank| &rank.cores).copied().collect()
}

/// Checks whether ranks run on the processor that their GPU is attached to; returns `None` if the
/// system does not know it.
fn gpu_affinity(ranks: &[RankResources]) -> Option<Finding> {
    let known: Vec<(usize, &RankResources, &Gpu)> = ranks
        .iter()
        .enumerate()
        .filter_map(|(number, rank)| Some((number, rank, rank.gpu.as_ref()?)))
        .filter(|(.., gpu)| !gpu.near_cores.is_empty())
        .collect();
    let far: Vec<String> = known
        .iter()
        .filter(|(_, rank, gpu)| gpu.near_cores.is_disjoint(&rank.cores))
        .map(|(number, ..)| format!("rank {number}"))
        .collect();
    if known.is_empty() {
        return None;
    }
    Some(match far.is_empty() {
        true => Finding::ok("each rank runs on the processor that its GPU is attached to"),
        false => Finding::warning(
            format!(
                "no core of {} is on the processor that its GPU is attached to",
                far.join(", ")
            ),
            "bind ranks near their GPUs: --map-by numa --bind-to numa, or srun --cpu-bind=cores --distribution=block:cyclic",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus::{Ok, Warning};
    use super::*;

    fn rank(host: &str, cores: &[usize], gpu: Option<(&str, &[usize])>) -> RankResources {
        let gpu = gpu.map(|(pci, near)| Gpu {
            name: "x".into(),
            pci: pci.into(),
            near_cores: near.iter().copied().collect(),
        });
        RankResources {
            host: host.into(),
            local_rank: 0,
            cores: cores.iter().copied().collect(),
            spare_cores: true,
            gpu,
        }
    }

    #[track_caller]
    fn has(finding: &Finding, status: super::super::CheckStatus, words: &str) {
        assert!(finding.status == status && finding.found.contains(words), "{finding:?}");
    }

    #[test]
    fn uneven_nodes_and_scarce_cores_are_warned_of() {
        let one = |host| rank(host, &[0, 1], None);
        has(&hosts(&[one("a"), one("b")]), Ok, "1 on a, 1 on b");
        has(&hosts(&[one("a"), one("b"), one("b")]), Warning, "1 on a, 2 on b");
        has(&cores(&[one("a"), one("a")]), Ok, "may use 2");
        has(&cores(&[one("a"), one("a"), one("a")]), Warning, "3 ranks share 2 on a");
        has(
            &cores(&[rank("a", &[0], None), rank("a", &[1, 2], None)]),
            Warning,
            "1 to 2, and others are idle",
        );
    }

    #[test]
    fn distant_gpus_are_warned_of() {
        let on = |core, near: &[usize]| rank("a", &[core], Some(("p", near)));
        has(&gpu_affinity(&[on(0, &[0, 1])]).unwrap(), Ok, "each rank");
        has(&gpu_affinity(&[on(0, &[0, 1]), on(7, &[0])]).unwrap(), Warning, "core of rank 1 is");
        assert_eq!(gpu_affinity(&[on(0, &[]), rank("a", &[0], None)]), None);
    }
}
