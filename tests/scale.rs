//! Tests of scaling: work that must not grow with the number of ranks, or only as the formula
//! beside it says, is counted on ranks that are threads, and computed by the formula for 1,000 and
//! 10,000 ranks. It is a separate program, because most counts are per process.
//!
//! `HPCTRAIN_SCALE=64,96,256` counts on these numbers of ranks, and prints the table of
//! docs/cluster.md.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use hpctrain::backend::cpu::Cpu;
use hpctrain::backend::{Backend as _, MemoryKind};
use hpctrain::checkpoint::{Checkpoints, files_checked, most_received, parsed};
use hpctrain::comm::{Group, Operation, sorted_by_node};
use hpctrain::config::{Sources, load};
use hpctrain::data::import::{ImportText, import_text};
use hpctrain::data::{TokenizerKind, described};
use hpctrain::engine::on_threads;
use hpctrain::error::Result;
use hpctrain::run_dir::Resume;
use hpctrain::telemetry::metrics::Step;
use hpctrain::train::{Customization, Hook, TrainRequest, train};

/// The number of data shards, one of which is for validation.
const SHARDS: usize = 7;

/// The numbers of ranks for which formulas are computed.
const LARGE: [usize; 2] = [1_000, 10_000];

/// Serialises the tests, because counts are per process.
static TURN: Mutex<()> = Mutex::new(());

/// The counts of the process.
#[derive(Debug, Clone, Copy)]
struct Counts {
    /// The number of shards whose description was read.
    described: u64,
    /// The number of manifests that were parsed.
    parsed: u64,
    /// The number of checkpoint files that retention inspected.
    looked_at: u64,
    /// The number of groups whose ranks were sorted by node.
    sorted: u64,
    /// The number of heartbeat files at the last step.
    heartbeats: usize,
    /// The most bytes of a manifest that a rank received.
    received: u64,
}

impl Counts {
    fn now() -> Self {
        Self {
            described: described(),
            parsed: parsed(),
            looked_at: files_checked(),
            sorted: sorted_by_node(),
            heartbeats: 0,
            received: most_received(),
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            described: self.described - before.described,
            parsed: self.parsed - before.parsed,
            looked_at: self.looked_at - before.looked_at,
            sorted: self.sorted - before.sorted,
            ..self
        }
    }
}

/// Counts the heartbeat files at each step.
struct Heartbeats<'a>(&'a Path, &'a Mutex<usize>);

impl Hook for Heartbeats<'_> {
    fn step(&mut self, _: &Step) -> Result<ControlFlow<String>> {
        let names = self.0.read_dir().unwrap().map(|entry| entry.unwrap().file_name());
        *self.1.lock().unwrap() =
            names.filter(|name| name.to_string_lossy().starts_with("heartbeat-")).count();
        Ok(ControlFlow::Continue(()))
    }
}

/// Trains on threads up to a step. Returns the counts.
fn trains(
    root: &Path,
    run: &str,
    ranks: usize,
    steps: u64,
    resume: Resume,
    more: &[&str],
) -> Counts {
    let settings = [
        &format!("run.root={}", root.display())[..],
        &format!("run.name={run}"),
        &format!("run.steps={steps}"),
        &format!("data.path={}", root.join("data").display()),
        &format!("batch.global={ranks}"),
        "model.layers=1",
        "model.width=16",
        "model.heads=1",
        "model.context=8",
        "parallel.zero=1",
        "eval.samples=8",
        "checkpoint.every=1",
        "checkpoint.keep=3",
        "log.sample_tokens=0",
    ];
    let overrides: Vec<String> =
        settings.iter().chain(more).map(|setting| setting.to_string()).collect();
    let (config, name) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
    let logs = root.join(run).join("logs");
    let request = TrainRequest { resume, threads: Some(1), ..TrainRequest::new(config, name) };
    let before = Counts::now();
    let found = Mutex::new(0);
    on_threads(ranks, |comm| {
        let mut hook = Heartbeats(&logs, &found);
        let hooks: Vec<&mut dyn Hook> = if comm.rank() == 0 { vec![&mut hook] } else { vec![] };
        train(comm, &request, Customization { hooks, ..Customization::default() }, None)
    })
    .unwrap();
    Counts { heartbeats: found.into_inner().unwrap(), ..Counts::now().since(before) }
}

/// Raises the limit on open files as the program does at its start; these ranks share the limit of
/// one process.
fn raise_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is live; the limit is only raised to the permitted maximum.
    let code = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit)
    };
    assert_eq!(code, 0);
}

/// Imports the text to train on.
fn import(root: &Path) {
    let input = root.join("text");
    std::fs::write(&input, "all work and no play ".repeat(4000)).unwrap();
    let mut import = ImportText::new(input, TokenizerKind::Char, root.join("data"));
    import.to.shards = SHARDS - 1;
    import_text(&import).unwrap();
}

/// A bound on a count that is linear in the number of ranks.
#[derive(Debug)]
struct Line {
    base: f64,
    slope: f64,
}

impl Line {
    /// Returns the line through the first two points, and panics if another one lies above it.
    fn above(points: &[(usize, u64)]) -> Self {
        let [first, second] =
            [points[0], points[1]].map(|(ranks, count)| (ranks as f64, count as f64));
        let slope = (second.1 - first.1) / (second.0 - first.0);
        let line = Self { base: first.1 - slope * first.0, slope };
        for (ranks, count) in points {
            assert!(
                *count as f64 <= 1.02 * line.at(*ranks),
                "{ranks} ranks: {count} is above {line:?}"
            );
        }
        line
    }

    fn at(&self, ranks: usize) -> f64 {
        self.base + self.slope * ranks as f64
    }
}

#[test]
fn files_are_opened_and_read_as_often_as_the_formulas_say() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    raise_limit();
    let root = tempfile::tempdir().unwrap();
    import(root.path());
    let asked = std::env::var("HPCTRAIN_SCALE").ok();
    let all: Vec<usize> = match &asked {
        Some(all) => all.split(',').map(|ranks| ranks.parse().unwrap()).collect(),
        None => vec![4, 8, 24],
    };
    println!(
        "| ranks | shards opened at a start | heartbeat files | manifests parsed in 4 saves | files looked at in 4 saves | manifests parsed by a resume and a save | bytes that rank 0 parses at a resume | bytes of them that another rank receives |"
    );
    let mut of_ranks = vec![];
    for &ranks in &all {
        let name = format!("x{ranks}");
        let saved = trains(root.path(), &name, ranks, 4, Resume::No, &[]);
        let manifest = Checkpoints::new(root.path().join(&name).join("checkpoints"))
            .path(4)
            .join("manifest.json");
        let length = manifest.metadata().unwrap().len();
        let resumed = trains(root.path(), &name, ranks, 5, Resume::Auto, &[]);
        let Counts { described, parsed, looked_at, heartbeats, .. } = saved;
        let again = resumed.parsed;
        let received = resumed.received;
        println!(
            "| {ranks} | {described} | {heartbeats} | {parsed} | {looked_at} | {again} | {length} | {received} |"
        );
        // One rank describes the data.
        assert_eq!((described, resumed.described), (SHARDS as u64, SHARDS as u64), "{ranks} ranks");
        // These ranks are on one node.
        assert_eq!(heartbeats, 1, "{ranks} ranks");
        // Retention reads each save once, with a file of each rank.
        assert_eq!((parsed, looked_at), (4, 4 * ranks as u64), "{ranks} ranks");
        // Rank 0 parses the manifest that it resumes from, and the one that it saves.
        assert_eq!(again, 2, "{ranks} ranks");
        of_ranks.push((ranks, length, received));
    }
    // Rank 0 parses a manifest that grows by the entries of each rank.
    let lengths: Vec<(usize, u64)> =
        of_ranks.iter().map(|(ranks, length, _)| (*ranks, *length)).collect();
    let of_manifest = Line::above(&lengths);
    assert!(of_manifest.slope < 500.0 && of_manifest.at(10_000) < 5e6, "{of_manifest:?}");
    // The other ranks receive the part without ranks, and the pieces of their ranges. With more
    // ranks a rank has a smaller part of each unit and no more pieces, so what it receives does not
    // grow.
    let received: Vec<u64> = of_ranks.iter().map(|(.., received)| *received).collect();
    assert!(
        received.iter().all(|bytes| *bytes > 0 && *bytes <= received[0] + received[0] / 50),
        "{received:?}"
    );
}

#[test]
fn ranks_are_sorted_by_nodes_once_for_each_group() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let root = tempfile::tempdir().unwrap();
    import(root.path());
    let hierarchical = &["comm.algorithm=hierarchical"][..];
    let sorted = |ranks: usize, steps| {
        trains(root.path(), &format!("x{ranks}-{steps}"), ranks, steps, Resume::No, hierarchical)
            .sorted
    };
    let of_ranks = [2, 4, 8].map(|ranks| (ranks, sorted(ranks, 2), sorted(ranks, 7)));
    println!("groups sorted by nodes, in 2 and in 7 steps: {of_ranks:?}");
    for (ranks, two, seven) in of_ranks {
        assert_eq!(two, seven, "{ranks} ranks: steps sort again");
    }
    // Each rank sorts a constant number of groups: its world and its shards.
    assert!(of_ranks.iter().all(|(ranks, two, _)| *two <= 2 * *ranks as u64), "{of_ranks:?}");
}

/// Returns the bytes that each rank sends in a collective.
fn sent(ranks: usize, collective: impl Fn(&Group<Cpu>) -> Result<()> + Sync) -> Vec<u64> {
    on_threads(ranks, |comm| {
        let world = comm.world();
        world.barrier().wait()?;
        let before = comm.stats().sent;
        collective(&world)?;
        // Debug builds compare each request with a neighbour's first.
        let compared = if cfg!(debug_assertions) && ranks > 1 { 128 } else { 0 };
        Ok(comm.stats().sent - before - compared)
    })
    .unwrap()
}

/// Returns the number of ranks, itself included, whose bytes a rank of a binomial tree passes on.
fn subtree(rank: usize, ranks: usize) -> usize {
    if rank == 0 { ranks } else { (1 << rank.trailing_zeros()).min(ranks - rank) }
}

#[test]
fn collectives_send_as_many_bytes_as_the_formulas_say() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    const LEN: usize = 1_000;
    /// Every message is preceded by the length of each rank's bytes.
    const HEAD: usize = 8;
    /// The message of a rank without an error: `null`.
    const REPORT: usize = 4;
    let log = |ranks: usize| ranks.next_power_of_two().ilog2() as usize;
    // These are the same on each rank.
    let agree = |ranks: usize| (ranks - 1) * (HEAD + REPORT);
    let gather = |ranks: usize| (ranks - 1) * (HEAD + LEN);
    // These depend on the rank's place in the tree.
    let to_root =
        |rank: usize, ranks: usize| if rank == 0 { 0 } else { subtree(rank, ranks) * (HEAD + LEN) };
    let scatter = |rank: usize, ranks: usize| (subtree(rank, ranks) - 1) * (HEAD + LEN);
    let broadcast = |rank: usize, ranks: usize| log(subtree(rank, ranks)) * (HEAD + LEN);
    for ranks in [2, 3, 4, 7, 8, 16, 24] {
        let each = |formula: &dyn Fn(usize) -> usize| {
            (0..ranks).map(|rank| formula(rank) as u64).collect::<Vec<_>>()
        };
        let of_all =
            |world: &Group<Cpu>| if world.rank() == 0 { vec![vec![0; LEN]; ranks] } else { vec![] };
        let name = format!("{ranks} ranks");
        assert_eq!(sent(ranks, |world| world.all_ok(Ok(()))), each(&|_| agree(ranks)), "{name}");
        assert_eq!(sent(ranks, |world| world.barrier().wait()), each(&|_| log(ranks)), "{name}");
        let gathered = sent(ranks, |world| world.gather_bytes(vec![0; LEN]).wait().map(drop));
        assert_eq!(gathered, each(&|_| gather(ranks)), "{name}");
        let gathered =
            sent(ranks, |world| world.gather_bytes_to_root(vec![0; LEN]).wait().map(drop));
        assert_eq!(gathered, each(&|rank| to_root(rank, ranks)), "{name}");
        let scattered = sent(ranks, |world| world.scatter_bytes(of_all(world)).wait().map(drop));
        assert_eq!(scattered, each(&|rank| scatter(rank, ranks)), "{name}");
        let spread = sent(ranks, |world| world.broadcast_bytes(vec![0; LEN]).wait().map(drop));
        assert_eq!(spread, each(&|rank| broadcast(rank, ranks)), "{name}");
        // An all-reduce sends at most twice the buffer, and more if the ranks are not a power of
        // two.
        let elements = 4096 * ranks;
        let bytes = (elements * size_of::<f32>()) as u64;
        let summed = sent(ranks, |world| {
            let buf = Cpu::new(1).alloc(MemoryKind::Gradients, elements)?;
            world.run(Operation::AllReduce, buf).wait().map(drop)
        });
        let most = if ranks.is_power_of_two() { 2 * bytes } else { 3 * bytes };
        assert!(summed.iter().all(|sent| *sent <= most), "{name}: {summed:?} of {bytes}");
    }
    for ranks in LARGE {
        let per_rank = |formula: &dyn Fn(usize) -> usize| {
            (0..ranks).map(formula).sum::<usize>() as f64 / ranks as f64
        };
        // An error agreement exchanges 12 bytes per rank.
        assert!(agree(ranks) < 13 * ranks && agree(10_000) < 120_000);
        // In a save, rank 0 receives the tables of all ranks, half of the ranks receive none, and
        // the average rank passes on those of log₂ n / 2.
        let tables = per_rank(&|rank| to_root(rank, ranks)) / LEN as f64;
        assert!(
            tables <= 0.5 * log(ranks) as f64 + 1.0 && tables < 8.0,
            "{ranks} ranks: {tables} tables"
        );
        assert!((1..ranks).step_by(2).all(|rank| subtree(rank, ranks) == 1));
        // The excerpts of a resume take the reverse path.
        let excerpts = per_rank(&|rank| scatter(rank, ranks)) / LEN as f64;
        assert!(
            excerpts <= 0.5 * log(ranks) as f64 + 1.0 && excerpts < 8.0,
            "{ranks} ranks: {excerpts} excerpts"
        );
        // Every rank receives the outline, but no rank sends it to more than log₂ n others.
        assert!((0..ranks).all(|rank| broadcast(rank, ranks) <= 14 * (HEAD + LEN)));
    }
}
