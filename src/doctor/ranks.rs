//! Where the ranks of a job sit: hosts, cores, GPUs, and how near these are to one another.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::gpu::Gpu;
use super::{Check, Finding};

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
    /// The GPU it would compute on.
    pub gpu: Option<Gpu>,
}

/// Looks at all seats, by rank.
pub(super) fn checks(seats: &[Seat]) -> Vec<Check> {
    let mut checks = vec![hosts(seats).named("ranks"), cores(seats).named("cores")];
    if seats.iter().any(|seat| seat.gpu.is_some()) {
        checks.push(gpus(seats).named("gpu of each rank"));
        checks.extend(memory_nodes(seats).map(|finding| finding.named("gpu and cores")));
    }
    checks
}

fn by_host(seats: &[Seat]) -> BTreeMap<&str, Vec<&Seat>> {
    let mut hosts: BTreeMap<_, Vec<_>> = BTreeMap::new();
    seats.iter().for_each(|seat| hosts.entry(seat.host.as_str()).or_default().push(seat));
    hosts
}

fn hosts(seats: &[Seat]) -> Finding {
    let hosts = by_host(seats);
    let counts: Vec<String> = hosts.iter().map(|(host, seats)| format!("{} on {host}", seats.len())).collect();
    let counts = counts.join(", ");
    let sizes: BTreeSet<usize> = hosts.values().map(Vec::len).collect();
    match sizes.len() > 1 {
        true => Finding::warning(counts, "the fullest node is the slowest: give every node as many ranks"),
        false => Finding::ok(counts),
    }
}

fn cores(seats: &[Seat]) -> Finding {
    let each: Vec<usize> = seats.iter().map(|seat| seat.cores.len()).collect();
    let (least, most) = (each.iter().min().copied().unwrap_or(0), each.iter().max().copied().unwrap_or(0));
    let amount = if least == most { format!("{least}") } else { format!("{least} to {most}") };
    let found = format!("a rank may use {amount}");
    let crowded = by_host(seats).into_iter().find(|(_, seats)| seats.len() > union(seats).len());
    if let Some((host, seats)) = crowded {
        let found = format!("{found}; {} ranks share {} on {host}", seats.len(), union(&seats).len());
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

fn gpus(seats: &[Seat]) -> Finding {
    let map = seats.iter().enumerate().map(|(rank, seat)| match &seat.gpu {
        Some(gpu) => format!("{rank} → {} ({})", gpu.number, gpu.pci),
        None => format!("{rank} → none"),
    });
    let map = format!("rank {}", map.collect::<Vec<_>>().join(", "));
    let without = seats.iter().filter(|seat| seat.gpu.is_none()).count();
    let places: BTreeSet<_> = seats.iter().filter_map(|seat| Some((&seat.host, &seat.gpu.as_ref()?.pci))).collect();
    if without > 0 {
        Finding::warning(map, format!("{without} of {} ranks have no GPU: start ranks where GPUs are", seats.len()))
    } else if places.len() < seats.len() {
        Finding::warning(map, "ranks share a GPU, and its memory: start one rank a GPU")
    } else {
        Finding::ok(map)
    }
}

/// Whether ranks run near the memory that their GPU is attached to; none where the system does not say.
fn memory_nodes(seats: &[Seat]) -> Option<Finding> {
    let known = |seat: &&Seat| seat.gpu.as_ref().is_some_and(|gpu| !gpu.near_cores.is_empty());
    let far = |seat: &Seat| seat.gpu.as_ref().is_some_and(|gpu| gpu.near_cores.is_disjoint(&seat.cores));
    let known: Vec<(usize, &Seat)> = seats.iter().enumerate().filter(|(_, seat)| known(seat)).collect();
    let far: Vec<String> =
        known.iter().filter(|(_, seat)| far(seat)).map(|(rank, _)| format!("rank {rank}")).collect();
    if known.is_empty() {
        return None;
    }
    Some(match far.is_empty() {
        true => Finding::ok("ranks may run on cores of their GPU's memory node"),
        false => Finding::warning(
            format!("no core of {} is on the memory node of its GPU", far.join(", ")),
            "bind ranks near their GPUs: --map-by numa --bind-to numa, or srun --gpu-bind=closest",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::Status::{Ok, Warning};
    use super::*;

    fn seat(host: &str, cores: &[usize], gpu: Option<(&str, &[usize])>) -> Seat {
        let gpu = gpu.map(|(pci, near)| Gpu {
            number: 0,
            name: "x".into(),
            pci: pci.into(),
            numa_node: Some(0),
            near_cores: near.iter().copied().collect(),
        });
        Seat { host: host.into(), local_rank: 0, cores: cores.iter().copied().collect(), spare_cores: true, gpu }
    }

    #[track_caller]
    fn comes_out(finding: &Finding, status: super::super::Status, words: &str) {
        assert!(finding.status == status && finding.found.contains(words), "{finding:?}");
    }

    #[test]
    fn uneven_nodes_and_scarce_cores_are_warned_of() {
        let one = |host| seat(host, &[0, 1], None);
        comes_out(&hosts(&[one("a"), one("b")]), Ok, "1 on a, 1 on b");
        comes_out(&hosts(&[one("a"), one("b"), one("b")]), Warning, "1 on a, 2 on b");
        comes_out(&cores(&[one("a"), one("a")]), Ok, "may use 2");
        comes_out(&cores(&[one("a"), one("a"), one("a")]), Warning, "3 ranks share 2 on a");
        comes_out(&cores(&[seat("a", &[0], None), seat("a", &[1, 2], None)]), Warning, "1 to 2, and others are idle");
    }

    #[test]
    fn shared_missing_and_distant_gpus_are_warned_of() {
        let on = |pci| seat("a", &[0], Some((pci, &[0, 1])));
        comes_out(&gpus(&[on("p"), on("q")]), Ok, "rank 0 → 0 (p), 1 → 0 (q)");
        comes_out(&gpus(&[on("p"), on("p")]), Warning, "1 → 0 (p)");
        comes_out(&gpus(&[on("p"), seat("a", &[0], None)]), Warning, "1 → none");
        // The same place on another host is another GPU.
        comes_out(&gpus(&[on("p"), seat("b", &[0], Some(("p", &[])))]), Ok, "");
        comes_out(&memory_nodes(&[on("p")]).unwrap(), Ok, "");
        comes_out(&memory_nodes(&[on("p"), seat("a", &[7], Some(("q", &[0])))]).unwrap(), Warning, "core of rank 1 is");
        assert_eq!(memory_nodes(&[seat("a", &[0], Some(("p", &[])))]), None);
    }
}
