//! The algorithm of each operation and size: set by the configuration, or measured at the start.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::table::{AlgorithmTable, Route};
use crate::algorithms::{Algorithm, Operation};
use crate::device::path::DeviceTransport;
use crate::group::Group;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, MemoryKind};

/// `comm.algorithm`: one algorithm for everything, or the fastest ones that were measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AlgorithmChoice {
    /// The fastest for each operation and size.
    Auto,
    /// [`Algorithm::Vendor`]
    #[serde(alias = "mpi")]
    Vendor,
    /// [`Algorithm::Ring`]
    Ring,
    /// [`Algorithm::HalvingDoubling`]
    #[serde(alias = "tree")]
    HalvingDoubling,
    /// [`Algorithm::Hierarchical`]
    Hierarchical,
    /// [`Algorithm::ReduceToOne`]
    ReduceToOne,
}

impl AlgorithmChoice {
    /// Returns the algorithm, or `None` if it is to be measured.
    pub fn fixed(self) -> Option<Algorithm> {
        match self {
            AlgorithmChoice::Auto => None,
            AlgorithmChoice::Vendor => Some(Algorithm::Vendor),
            AlgorithmChoice::Ring => Some(Algorithm::Ring),
            AlgorithmChoice::HalvingDoubling => Some(Algorithm::HalvingDoubling),
            AlgorithmChoice::Hierarchical => Some(Algorithm::Hierarchical),
            AlgorithmChoice::ReduceToOne => Some(Algorithm::ReduceToOne),
        }
    }
}

impl fmt::Display for AlgorithmChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.fixed().map_or("auto", Algorithm::name))
    }
}

/// The sizes that are measured, in bytes of the whole buffer.
const SIZES: [usize; 4] = [16 << 10, 256 << 10, 2 << 20, 16 << 20];

/// Elements for each rank of a collective that connects ranks.
const CONNECTING: usize = 64;

/// Repetitions of a measurement. The fastest counts, since the others were disturbed.
const REPETITIONS: usize = 3;

/// Time limit of the whole measurement on host memory, without the start of each algorithm; sizes
/// beyond it are skipped. Above the last size that was measured, only bandwidth-optimal algorithms
/// are used.
const BUDGET: Duration = Duration::from_millis(500);

/// The time limit on device memory, whose units are large and whose start takes longer anyway.
const DEVICE_BUDGET: Duration = Duration::from_secs(3);

/// An algorithm replaces the [default](Group::default_algorithm) if it takes less than this fraction
/// of its time. Timings at startup are rough.
const GAIN: f64 = 0.9;

/// The fraction for the vendor's algorithm, which must gain more: while it waits it occupies a core
/// that compute needs.
const GAIN_OF_VENDOR: f64 = 0.6;

/// Measures the fastest algorithms of `group` for `operations` on buffers of up to `largest` bytes.
/// With `exact`, sums keep the order of [`Algorithm::HalvingDoubling`]. Collective over `world`, of
/// which every rank is in a group.
///
/// # Errors
/// Returns an error if a message failed, or memory for it cannot be allocated.
pub fn measure<B: Backend>(
    world: &Group<B>,
    group: &Group<B>,
    backend: &B,
    operations: &[Operation],
    largest: usize,
    exact: bool,
) -> Result<AlgorithmTable> {
    let Some(base) = agreed_default(world, group, exact)? else {
        return Ok(AlgorithmTable::uniform(Algorithm::HalvingDoubling));
    };
    let mut table = AlgorithmTable::uniform(base);
    let sizes = sizes(largest);
    let has_peers = group.open_peers(backend)?;
    let mut measurable = Vec::with_capacity(operations.len());
    for &operation in operations {
        let exact = exact && operation.adds();
        measurable.push(agreed_candidates(world, group, base, exact, has_peers)?);
    }
    for (&operation, routes) in operations.iter().zip(&measurable) {
        connect(group, backend, operation, routes)?;
    }
    // The same on all ranks, also where some have device memory and others have not.
    let budget = if B::ON_HOST || group.is_mixed() { BUDGET } else { DEVICE_BUDGET };
    let start = Instant::now();
    let mut measured = vec![Vec::new(); operations.len()];
    let mut before = 0.0;
    for (number, &size) in sizes.iter().enumerate() {
        let mut timings = Vec::new();
        for (&operation, routes) in operations.iter().zip(&measurable) {
            for &route in routes {
                timings.push(time(world, group, backend, operation, route, size)?);
            }
        }
        // The times of the slowest rank count, also for whether there is time for more.
        timings.push(start.elapsed().as_secs_f64());
        let slowest = slowest(world, &timings)?;
        let (mut of_routes, elapsed) = slowest.split_at(slowest.len() - 1);
        for (measured, routes) in measured.iter_mut().zip(&measurable) {
            let times;
            (times, of_routes) = of_routes.split_at(routes.len());
            measured.push((size, times.to_vec()));
        }
        // The next size takes longer than this one by the ratio of the sizes.
        let next = sizes.get(number + 1).map_or(0.0, |next| *next as f64 / size as f64);
        if elapsed[0] + next * (elapsed[0] - before) > budget.as_secs_f64() {
            break;
        }
        before = elapsed[0];
    }
    for ((&operation, routes), measured) in operations.iter().zip(&measurable).zip(&measured) {
        choose(&mut table, operation, routes, measured, largest);
    }
    // Buffers of these sizes may not be needed again.
    backend.trim();
    Ok(table)
}

/// Returns the algorithm that others have to beat, the same in all groups of `world`, or `None` if
/// there is nothing to measure. Collective over the world.
fn agreed_default<B: Backend>(
    world: &Group<B>,
    group: &Group<B>,
    exact: bool,
) -> Result<Option<Algorithm>> {
    if world.size() == 1 {
        return Ok(None);
    }
    let mine = group.default_algorithm(exact);
    let all = world.all_gather_u64(&[mine as u64])?;
    let is_same = all.iter().all(|theirs| theirs[0] == mine as u64);
    Ok(Some(if is_same { mine } else { Algorithm::HalvingDoubling }))
}

/// Returns the routes to measure, the default first: those that all groups of `world` can run, since
/// they measure together. Collective over the world.
fn agreed_candidates<B: Backend>(
    world: &Group<B>,
    group: &Group<B>,
    base: Algorithm,
    exact: bool,
    has_peers: bool,
) -> Result<Vec<Route>> {
    let mut mine: Vec<Route> =
        candidates(group, base, exact).into_iter().map(Route::from).collect();
    if has_peers {
        // The sums of both transports have the same bits.
        mine.push(Route { algorithm: base, transport: Some(DeviceTransport::CudaIpc) });
    }
    let bit = |route: Route| {
        1 << (route.algorithm as usize + route.transport.map_or(0, |_| Algorithm::ALL.len()))
    };
    let mask: u64 = mine.iter().map(|&route| bit(route)).sum();
    let all = world.all_gather_u64(&[mask])?;
    let is_able = |route: &Route| all.iter().all(|of| of[0] & bit(*route) != 0);
    Ok(mine.into_iter().filter(is_able).collect())
}

/// Returns the algorithms of a group that may be worth their measurement, `base` first.
fn candidates<B: Backend>(group: &Group<B>, base: Algorithm, exact: bool) -> Vec<Algorithm> {
    let mut candidates = group.algorithms(exact);
    candidates.retain(|&algorithm| group.is_worth_measuring(algorithm, base));
    candidates.sort_by_key(|&algorithm| algorithm != base);
    candidates
}

/// Runs a small collective by each route: the first use connects ranks, which may take seconds, and
/// device memory. Collective over the group.
fn connect<B: Backend>(
    group: &Group<B>,
    backend: &B,
    operation: Operation,
    routes: &[Route],
) -> Result<()> {
    for &route in routes {
        let group = group.with_algorithms(AlgorithmTable::uniform(route));
        // Every rank sends some to every other.
        let buf = backend.upload(MemoryKind::Gradients, &vec![0.0; CONNECTING * group.size()])?;
        group.run(operation, buf).synchronize()?;
    }
    Ok(())
}

/// Connects the ranks of a group for `operations`: by `algorithm`, or by those that [`measure`]
/// would measure. Collective over the group.
///
/// # Errors
/// Returns an error if a message failed, or memory for it cannot be allocated.
pub fn connect_ranks<B: Backend>(
    group: &Group<B>,
    backend: &B,
    operations: &[Operation],
    algorithm: Option<Algorithm>,
    exact: bool,
) -> Result<()> {
    if group.size() == 1 {
        return Ok(());
    }
    let base = group.default_algorithm(exact);
    operations.iter().try_for_each(|&operation| {
        let algorithms = match algorithm {
            Some(algorithm) => vec![algorithm],
            None => candidates(group, base, exact && operation.adds()),
        };
        let routes: Vec<Route> = algorithms.into_iter().map(Route::from).collect();
        connect(group, backend, operation, &routes)
    })
}

/// Returns the sizes to measure, in bytes, ascending. The last is that of the largest buffer.
fn sizes(largest: usize) -> Vec<usize> {
    SIZES.into_iter().filter(|size| *size < largest).chain([largest]).collect()
}

/// Sets an operation's rules by the times of its routes at the sizes that were measured. The first
/// route is the default.
fn choose(
    table: &mut AlgorithmTable,
    operation: Operation,
    routes: &[Route],
    measured: &[(usize, Vec<f64>)],
    largest: usize,
) {
    let fastest: Vec<_> =
        measured.iter().map(|(size, times)| (*size, best(times, routes, |_| true))).collect();
    let beyond = match measured.last() {
        // Measuring ended early, and latency does not predict bandwidth.
        Some((size, times)) if *size < largest => {
            best(times, routes, |route| route.algorithm.moves_least())
        }
        _ => fastest.last().map_or(routes[0], |(_, route)| *route),
    };
    table.set(operation, &fastest, beyond);
}

/// Returns the fastest of those routes that `among` accepts, or the first if none is clearly faster.
fn best(times: &[f64], routes: &[Route], among: impl Fn(Route) -> bool) -> Route {
    let of_default = times[0];
    let gain = |route: Route| match route.algorithm {
        Algorithm::Vendor => GAIN_OF_VENDOR,
        _ => GAIN,
    };
    let all = routes.iter().zip(times).filter(|(route, _)| among(**route));
    let faster = all.filter(|(route, time)| **time < gain(**route) * of_default);
    faster.min_by(|a, b| a.1.total_cmp(b.1)).map_or(routes[0], |(route, _)| *route)
}

/// Measures one collective. Returns the seconds of the fastest repetition on this rank.
fn time<B: Backend>(
    world: &Group<B>,
    group: &Group<B>,
    backend: &B,
    operation: Operation,
    route: Route,
    bytes: usize,
) -> Result<f64> {
    let len = (bytes / size_of::<f32>()).next_multiple_of(group.size());
    let group = group.with_algorithms(AlgorithmTable::uniform(route));
    // It stands for the gradient of a unit, which is not allocated yet.
    let mut buf = backend.upload(MemoryKind::Gradients, &vec![0.0; len])?;
    let mut fastest = f64::INFINITY;
    // The first one touches memory for the first time.
    for _ in 0..=REPETITIONS {
        world.barrier().wait()?;
        let start = Instant::now();
        buf = group.run(operation, buf).synchronize()?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    Ok(fastest)
}

/// Returns the elementwise maximum of every rank's numbers. Collective.
///
/// # Errors
/// Returns an error if a message failed, or ranks pass different numbers of values.
pub fn slowest<B: Backend>(world: &Group<B>, mine: &[f64]) -> Result<Vec<f64>> {
    let message = mine.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut slowest = vec![0.0; mine.len()];
    for message in world.gather_bytes(message).wait()? {
        let theirs = message.as_chunks().0;
        if theirs.len() != mine.len() {
            return Err(Error::comm("ranks measured different numbers of values"));
        }
        slowest
            .iter_mut()
            .zip(theirs)
            .for_each(|(most, x)| *most = f64::max(*most, f64::from_le_bytes(*x)));
    }
    Ok(slowest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::start_threads;
    use hpctrain_cpu::Cpu;

    /// All algorithms, the default first.
    const ROUTES: [Route; 5] = [
        Route { algorithm: Algorithm::HalvingDoubling, transport: None },
        Route { algorithm: Algorithm::Vendor, transport: None },
        Route { algorithm: Algorithm::Ring, transport: None },
        Route { algorithm: Algorithm::Hierarchical, transport: None },
        Route { algorithm: Algorithm::ReduceToOne, transport: None },
    ];

    #[test]
    fn every_algorithm_can_be_chosen_by_its_name() {
        for algorithm in Algorithm::ALL {
            let choice: AlgorithmChoice =
                serde_json::from_str(&format!("\"{algorithm}\"")).unwrap();
            assert_eq!(choice.fixed(), Some(algorithm));
        }
        assert_eq!(serde_json::from_str::<AlgorithmChoice>("\"auto\"").unwrap().fixed(), None);
    }

    #[test]
    fn the_tree_is_left_for_a_gain_only() {
        let pick = |mpi, ring| best(&[1.0, mpi, ring, 2.0, 3.0], &ROUTES, |_| true).algorithm;
        assert_eq!(
            (pick(9.0, 0.95), pick(9.0, 0.5)),
            (Algorithm::HalvingDoubling, Algorithm::Ring)
        );
        assert_eq!(
            (pick(0.7, 0.95), pick(0.5, 0.95)),
            (Algorithm::HalvingDoubling, Algorithm::Vendor)
        );
    }

    #[test]
    fn the_largest_buffer_is_measured_last() {
        assert_eq!(sizes(100), [100]);
        assert_eq!(sizes(16 << 10), [16 << 10]);
        assert_eq!(sizes(1 << 20), [16 << 10, 256 << 10, 1 << 20]);
        assert_eq!(sizes(150 << 20), [16 << 10, 256 << 10, 2 << 20, 16 << 20, 150 << 20]);
    }

    #[test]
    fn a_fast_start_says_nothing_of_large_buffers() {
        // Times as of 24 ranks on a slow network, where halving-doubling takes 23 steps and
        // reduce-to-one five.
        let mpi = f64::INFINITY;
        let ring = f64::INFINITY;
        let tree = 23e-4;
        let hierarchical = f64::INFINITY;
        let start = (16 << 10, vec![tree, mpi, ring, hierarchical, 5e-4]);
        let pick = |measured: &[(usize, Vec<f64>)], largest, bytes| {
            let mut table = AlgorithmTable::uniform(Algorithm::HalvingDoubling);
            choose(&mut table, Operation::AllReduce, &ROUTES, measured, largest);
            table.pick(Operation::AllReduce, bytes).algorithm
        };
        // Measuring ended early: its winner applies up to the largest measured size.
        let small = 16 << 10;
        let large = 64 << 20;
        assert_eq!(pick(std::slice::from_ref(&start), large, small), Algorithm::ReduceToOne);
        for bytes in [small + 1, 1 << 20, large, 1 << 40] {
            assert_eq!(
                pick(std::slice::from_ref(&start), large, bytes),
                Algorithm::HalvingDoubling,
                "{bytes}"
            );
        }
        // The vendor's algorithm is not extrapolated either; a bandwidth-optimal one is.
        let library = (16 << 10, vec![tree, 1e-4, ring, hierarchical, 5e-4]);
        assert_eq!(pick(&[library], large, large), Algorithm::HalvingDoubling);
        let nodes = (16 << 10, vec![tree, 1e-4, 8e-4, 7e-4, 5e-4]);
        assert_eq!(pick(&[nodes], large, large), Algorithm::Hierarchical);
        // All was measured: the winner at the largest size wins.
        let end = (large, vec![4.0, mpi, ring, hierarchical, 3.0]);
        assert_eq!(pick(&[start.clone(), end.clone()], large, large), Algorithm::ReduceToOne);
        assert_eq!(pick(&[start, end], large + 4, 1 << 40), Algorithm::HalvingDoubling);
        // The only buffers are small ones.
        let only = (4 << 10, vec![tree, mpi, ring, hierarchical, 5e-4]);
        assert_eq!(pick(&[only], 4 << 10, 4 << 10), Algorithm::ReduceToOne);
    }

    #[test]
    fn a_measurement_agrees_on_all_ranks_and_keeps_sums_exact() {
        let measured: Vec<AlgorithmTable> = std::thread::scope(|scope| {
            let rank = |comm: crate::Comm<Cpu>| {
                let world = comm.world();
                let pairs = comm.split(&[0, 0, 1, 1]).unwrap();
                measure(&world, &pairs, &Cpu::new(1), &Operation::ALL, 300_000, true).unwrap()
            };
            let comms = start_threads::<Cpu>(4, Algorithm::Ring).unwrap();
            let ranks: Vec<_> =
                comms.into_iter().map(|comm| scope.spawn(move || rank(comm))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(measured.iter().all(|table| *table == measured[0]), "{measured:?}");
        for operation in Operation::ALL.into_iter().filter(|operation| operation.adds()) {
            for bytes in [0, 1 << 14, 1 << 18, 1 << 30] {
                let picked = measured[0].pick(operation, bytes).algorithm;
                assert!(
                    ![Algorithm::Ring, Algorithm::Vendor].contains(&picked),
                    "{operation:?} of {bytes}: {picked}"
                );
            }
        }
    }
}
