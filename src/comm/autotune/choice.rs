//! The algorithm of each operation and size: set by the configuration, or measured at the start.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::table::AlgorithmTable;
use crate::algorithms::{Algorithm, Operation};
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
    let mut measurable = Vec::with_capacity(operations.len());
    for &operation in operations {
        measurable.push(agreed_candidates(world, group, base, exact && operation.adds())?);
    }
    for (&operation, algorithms) in operations.iter().zip(&measurable) {
        connect(group, backend, operation, algorithms)?;
    }
    let budget = if B::ON_HOST { BUDGET } else { DEVICE_BUDGET };
    let start = Instant::now();
    let mut measured = vec![Vec::new(); operations.len()];
    let mut before = 0.0;
    for (number, &size) in sizes.iter().enumerate() {
        let mut timings = Vec::new();
        for (&operation, algorithms) in operations.iter().zip(&measurable) {
            let mut times = [f64::INFINITY; Algorithm::ALL.len()];
            for &algorithm in algorithms {
                times[algorithm as usize] =
                    time(world, group, backend, operation, algorithm, size)?;
            }
            timings.extend(times);
        }
        // The times of the slowest rank count, also for whether there is time for more.
        timings.push(start.elapsed().as_secs_f64());
        let slowest = slowest(world, &timings)?;
        let (of_algorithms, elapsed) = slowest.split_at(slowest.len() - 1);
        for (measured, times) in measured.iter_mut().zip(of_algorithms.chunks(Algorithm::ALL.len()))
        {
            measured.push((size, times.to_vec()));
        }
        // The next size takes longer than this one by the ratio of the sizes.
        let next = sizes.get(number + 1).map_or(0.0, |next| *next as f64 / size as f64);
        if elapsed[0] + next * (elapsed[0] - before) > budget.as_secs_f64() {
            break;
        }
        before = elapsed[0];
    }
    for (&operation, measured) in operations.iter().zip(&measured) {
        choose(&mut table, operation, base, measured, largest);
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

/// Returns the algorithms to measure, the default first: those that all groups of `world` can run,
/// since they measure together. Collective over the world.
fn agreed_candidates<B: Backend>(
    world: &Group<B>,
    group: &Group<B>,
    base: Algorithm,
    exact: bool,
) -> Result<Vec<Algorithm>> {
    let mine = candidates(group, base, exact);
    let mask = mine.iter().map(|&algorithm| 1 << algorithm as u64).sum();
    let all = world.all_gather_u64(&[mask])?;
    let is_able = |algorithm: &Algorithm| all.iter().all(|of| of[0] >> *algorithm as u64 & 1 == 1);
    Ok(mine.into_iter().filter(is_able).collect())
}

/// Returns the algorithms of a group that may be worth their measurement, `base` first.
fn candidates<B: Backend>(group: &Group<B>, base: Algorithm, exact: bool) -> Vec<Algorithm> {
    let mut candidates = group.algorithms(exact);
    candidates.retain(|&algorithm| group.is_worth_measuring(algorithm, base));
    candidates.sort_by_key(|&algorithm| algorithm != base);
    candidates
}

/// Runs a small collective by each algorithm: the first use connects ranks, which may take seconds,
/// and device memory. Collective over the group.
fn connect<B: Backend>(
    group: &Group<B>,
    backend: &B,
    operation: Operation,
    algorithms: &[Algorithm],
) -> Result<()> {
    for &algorithm in algorithms {
        let group = group.with_algorithms(AlgorithmTable::uniform(algorithm));
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
        connect(group, backend, operation, &algorithms)
    })
}

/// Returns the sizes to measure, in bytes, ascending. The last is that of the largest buffer.
fn sizes(largest: usize) -> Vec<usize> {
    SIZES.into_iter().filter(|size| *size < largest).chain([largest]).collect()
}

/// Sets an operation's rules by the times of all algorithms at the sizes that were measured.
fn choose(
    table: &mut AlgorithmTable,
    operation: Operation,
    base: Algorithm,
    measured: &[(usize, Vec<f64>)],
    largest: usize,
) {
    let fastest: Vec<_> =
        measured.iter().map(|(size, times)| (*size, best(times, base, |_| true))).collect();
    let beyond = match measured.last() {
        // Measuring ended early, and latency does not predict bandwidth.
        Some((size, times)) if *size < largest => best(times, base, Algorithm::moves_least),
        _ => fastest.last().map_or(base, |(_, algorithm)| *algorithm),
    };
    table.set(operation, &fastest, beyond);
}

/// Returns the fastest algorithm of those that `among` accepts, or `base` if none is clearly faster.
fn best(times: &[f64], base: Algorithm, among: impl Fn(Algorithm) -> bool) -> Algorithm {
    let base_time = times[base as usize];
    let all = Algorithm::ALL.iter().zip(times).filter(|(algorithm, _)| among(**algorithm));
    let gain =
        |algorithm: Algorithm| if algorithm == Algorithm::Vendor { GAIN_OF_VENDOR } else { GAIN };
    let faster = all.filter(|(algorithm, time)| **time < gain(**algorithm) * base_time);
    let faster = faster.min_by(|a, b| a.1.total_cmp(b.1));
    faster.map_or(base, |(algorithm, _)| *algorithm)
}

/// Measures one collective. Returns the seconds of the fastest repetition on this rank.
fn time<B: Backend>(
    world: &Group<B>,
    group: &Group<B>,
    backend: &B,
    operation: Operation,
    algorithm: Algorithm,
    bytes: usize,
) -> Result<f64> {
    let len = (bytes / size_of::<f32>()).next_multiple_of(group.size());
    let group = group.with_algorithms(AlgorithmTable::uniform(algorithm));
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
        let pick =
            |mpi, ring| best(&[mpi, ring, 1.0, 2.0, 3.0], Algorithm::HalvingDoubling, |_| true);
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
        let start = (16 << 10, vec![mpi, ring, tree, hierarchical, 5e-4]);
        let pick = |measured: &[(usize, Vec<f64>)], largest, bytes| {
            let mut table = AlgorithmTable::uniform(Algorithm::HalvingDoubling);
            choose(&mut table, Operation::AllReduce, Algorithm::HalvingDoubling, measured, largest);
            table.pick(Operation::AllReduce, bytes)
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
        let library = (16 << 10, vec![1e-4, ring, tree, hierarchical, 5e-4]);
        assert_eq!(pick(&[library], large, large), Algorithm::HalvingDoubling);
        let nodes = (16 << 10, vec![1e-4, 8e-4, tree, 7e-4, 5e-4]);
        assert_eq!(pick(&[nodes], large, large), Algorithm::Hierarchical);
        // All was measured: the winner at the largest size wins.
        let end = (large, vec![mpi, ring, 4.0, hierarchical, 3.0]);
        assert_eq!(pick(&[start.clone(), end.clone()], large, large), Algorithm::ReduceToOne);
        assert_eq!(pick(&[start, end], large + 4, 1 << 40), Algorithm::HalvingDoubling);
        // The only buffers are small ones.
        let only = (4 << 10, vec![mpi, ring, tree, hierarchical, 5e-4]);
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
                let picked = measured[0].pick(operation, bytes);
                assert!(
                    ![Algorithm::Ring, Algorithm::Vendor].contains(&picked),
                    "{operation:?} of {bytes}: {picked}"
                );
            }
        }
    }
}
