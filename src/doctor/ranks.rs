//! Places of the ranks of a job: hosts, cores, GPUs, and whether these are near one another.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Check, Finding};
use crate::backend::cuda::Device;
use crate::gpu_assignment::near_cores;

/// The GPU that a rank computes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Its place on the bus.
    pub pci: String,
    /// The cores of the processor that it hangs on; empty where the system does not know.
    pub near_cores: BTreeSet<usize>,
}

impl Gpu {
    pub(super) fn new(device: &Device) -> Self {
        let near_cores = near_cores(&device.pci).unwrap_or_default();
        Self { name: device.name.clone(), pci: device.pci.clone(), near_cores }
    }
}

/// A rank's place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Its node.
    pub host: String,
    /// Its number on the node.
    pub local_rank: usize,
    /// Cores it may run on.
    pub cores: BTreeSet<usize>,
    /// Whether its node has cores that no rank may run on.
    pub spare_cores: bool,
    /// The GPU it would compute on; none where it is the CPU.
    pub gpu: Option<Gpu>,
}

/// Looks at all seats, by rank.
pub(super) fn checks(seats: &[Seat]) -> Vec<Check> {
    let mut checks = vec![hosts(seats).named("ranks"), cores(seats).named("cores")];
    checks.extend(nearness(seats).map(|finding| finding.named("gpus and cores")));
    checks
}

fn by_host(seats: &[Seat]) -> BTreeMap<&str, Vec<&Seat>> {
    let mut hosts: BTreeMap<_, Vec<_>> = BTreeMap::new();
    seats.iter().for_each(|seat| hosts.entry(seat.host.as_str()).or_default().push(seat));
    hosts
}

fn hosts(seats: &[Seat]) -> Finding {
    let hosts = by_host(seats);
    let counts: Vec<String> =
        hosts.iter().map(|(host, seats)| format!("{} on {host}", seats.len())).collect();
    let counts = counts.join(", ");
    let sizes: BTreeSet<usize> = hosts.values().map(Vec::len).collect();
    match sizes.len() > 1 {
        true => Finding::warning(
            counts,
            "the fullest node is the slowest: give every node as many ranks",
        ),
        false => Finding::ok(counts),
    }
}

fn cores(seats: &[Seat]) -> Finding {
    let each: Vec<usize> = seats.iter().map(|seat| seat.cores.len()).collect();
    let least = each.iter().min().copied().unwrap_or(0);
    let most = each.iter().max().copied().unwrap_or(0);
    let amount = if least == most { format!("{least}") } else { format!("{least} to {most}") };
    let found = format!("a rank may use {amount}");
    let crowded = by_host(seats).into_iter().find(|(_, seats)| seats.len() > union(seats).len());
    if let Some((host, seats)) = crowded {
        let found =
            format!("{found}; {} ranks share {} on {host}", seats.len(), union(&seats).len());
        return Finding::warning(found, "start as many ranks as there are cores, or fewer");
    }
    match seats.iter().any(|seat| seat.cores.len() == 1 && seat.spare_cores) {
        true => Finding::warning(
            format!("{found}, and others are idle"),
            "mpirun binds each rank of a small job to one core: --bind-to none, or --map-by slot:PE=4 for four a rank",
        ),
        false => Finding::ok(found),
    }
}

fn union(seats: &[&Seat]) -> BTreeSet<usize> {
    seats.iter().flat_map(|seat| &seat.cores).copied().collect()
}

/// Whether ranks run on the processor that their GPU hangs on; none where the system does not say.
fn nearness(seats: &[Seat]) -> Option<Finding> {
    let known = |seat: &&Seat| seat.gpu.as_ref().is_some_and(|gpu| !gpu.near_cores.is_empty());
    let far =
        |seat: &Seat| seat.gpu.as_ref().is_some_and(|gpu| gpu.near_cores.is_disjoint(&seat.cores));
    let known: Vec<(usize, &Seat)> =
        seats.iter().enumerate().filter(|(_, seat)| known(seat)).collect();
    let far: Vec<String> = known
        .iter()
        .filter(|(_, seat)| far(seat))
        .map(|(rank, _)| format!("rank {rank}"))
        .collect();
    if known.is_empty() {
        return None;
    }
    Some(match far.is_empty() {
        true => Finding::ok("each rank runs on the processor that its GPU hangs on"),
        false => Finding::warning(
            format!("no core of {} is on the processor that its GPU hangs on", far.join(", ")),
            "bind ranks near their GPUs: --map-by numa --bind-to numa, or srun --gpu-bind=closest",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus::{Ok, Warning};
    use super::*;

    fn seat(host: &str, cores: &[usize], gpu: Option<(&str, &[usize])>) -> Seat {
        let gpu = gpu.map(|(pci, near)| Gpu {
            name: "x".into(),
            pci: pci.into(),
            near_cores: near.iter().copied().collect(),
        });
        Seat {
            host: host.into(),
            local_rank: 0,
            cores: cores.iter().copied().collect(),
            spare_cores: true,
            gpu,
        }
    }

    #[track_caller]
    fn comes_out(finding: &Finding, status: super::super::CheckStatus, words: &str) {
        assert!(finding.status == status && finding.found.contains(words), "{finding:?}");
    }

    #[test]
    fn uneven_nodes_and_scarce_cores_are_warned_of() {
        let one = |host| seat(host, &[0, 1], None);
        comes_out(&hosts(&[one("a"), one("b")]), Ok, "1 on a, 1 on b");
        comes_out(&hosts(&[one("a"), one("b"), one("b")]), Warning, "1 on a, 2 on b");
        comes_out(&cores(&[one("a"), one("a")]), Ok, "may use 2");
        comes_out(&cores(&[one("a"), one("a"), one("a")]), Warning, "3 ranks share 2 on a");
        comes_out(
            &cores(&[seat("a", &[0], None), seat("a", &[1, 2], None)]),
            Warning,
            "1 to 2, and others are idle",
        );
    }

    #[test]
    fn distant_gpus_are_warned_of() {
        let on = |core, near: &[usize]| seat("a", &[core], Some(("p", near)));
        comes_out(&nearness(&[on(0, &[0, 1])]).unwrap(), Ok, "each rank");
        comes_out(&nearness(&[on(0, &[0, 1]), on(7, &[0])]).unwrap(), Warning, "core of rank 1 is");
        assert_eq!(nearness(&[on(0, &[]), seat("a", &[0], None)]), None);
    }
}
