//! Work that must not grow with the number of ranks, or only as the formula beside it says: counted, on ranks that are
//! threads. A program of its own, because the counts are those of the process.
//!
//! `HPCTRAIN_SCALE=64,96,256` counts on other numbers of ranks, and prints the table of docs/cluster.md.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;

use hpctrain::checkpoint::{looked_at, parsed};
use hpctrain::config::{Sources, load};
use hpctrain::data::import::{ImportText, import_text};
use hpctrain::data::{TokenizerKind, described};
use hpctrain::engine::on_threads;
use hpctrain::error::Result;
use hpctrain::run_dir::Resume;
use hpctrain::telemetry::metrics::Step;
use hpctrain::train::{Hook, Own, Request, train_on_device};

/// Shards of the data, one of them for validation.
const SHARDS: usize = 7;

/// Counts of the process.
fn counts() -> [u64; 3] {
    [described(), parsed(), looked_at()]
}

/// Files of heartbeats at a step.
struct Heartbeats<'a>(&'a Path, &'a Mutex<usize>);

impl Hook for Heartbeats<'_> {
    fn step(&mut self, _: &Step) -> Result<ControlFlow<String>> {
        let names = self.0.read_dir().unwrap().map(|entry| entry.unwrap().file_name());
        *self.1.lock().unwrap() = names.filter(|name| name.to_string_lossy().starts_with("heartbeat-")).count();
        Ok(ControlFlow::Continue(()))
    }
}

/// Trains on threads to a step; what that cost, and the files of heartbeats.
fn trains(root: &Path, ranks: usize, steps: u64, resume: Resume) -> ([u64; 3], usize) {
    let settings = [
        &format!("run.root={}", root.display())[..],
        &format!("run.name=x{ranks}"),
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
        "log.sample=0",
    ];
    let overrides: Vec<String> = settings.map(String::from).to_vec();
    let (config, name) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
    let request = Request { resume, threads: Some(1), ..Request::new(config, name) };
    let logs = root.join(format!("x{ranks}/logs"));
    let (before, found) = (counts(), Mutex::new(0));
    on_threads(ranks, |comm| {
        let mut hook = Heartbeats(&logs, &found);
        let hooks: Vec<&mut dyn Hook> = if comm.rank() == 0 { vec![&mut hook] } else { vec![] };
        train_on_device(comm, &request, Own { hooks, ..Own::default() }, None)
    })
    .unwrap();
    let after = counts();
    (std::array::from_fn(|i| after[i] - before[i]), found.into_inner().unwrap())
}

/// As the program does at its start: these ranks share the limit of one process.
fn raise_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is live; a limit is only raised as far as it may be.
    let code = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit)
    };
    assert_eq!(code, 0);
}

#[test]
fn files_are_opened_and_read_as_often_as_the_formulas_say() {
    raise_limit();
    let root = tempfile::tempdir().unwrap();
    let input = root.path().join("text");
    std::fs::write(&input, "all work and no play ".repeat(4000)).unwrap();
    let out = root.path().join("data");
    let mut import = ImportText::new(input, TokenizerKind::Char, out);
    import.to.shards = SHARDS - 1;
    import_text(&import).unwrap();
    let asked = std::env::var("HPCTRAIN_SCALE").ok();
    let all: Vec<usize> = match &asked {
        Some(all) => all.split(',').map(|ranks| ranks.parse().unwrap()).collect(),
        None => vec![4, 24],
    };
    println!(
        "| ranks | shards opened at a start | heartbeat files | manifests parsed in 4 saves | files looked at in 4 saves | manifests parsed by a resume |"
    );
    for ranks in all {
        let ([shards, manifests, files], heartbeats) = trains(root.path(), ranks, 4, Resume::No);
        let ([again, resumed, _], _) = trains(root.path(), ranks, 5, Resume::Auto);
        println!("| {ranks} | {shards} | {heartbeats} | {manifests} | {files} | {resumed} |");
        // One rank describes the data.
        assert_eq!((shards, again), (SHARDS as u64, SHARDS as u64), "{ranks} ranks");
        // These ranks are on one node.
        assert_eq!(heartbeats, 1, "{ranks} ranks");
        // Retention reads each save once, with a file of each rank.
        assert_eq!((manifests, files), (4, 4 * ranks as u64), "{ranks} ranks");
        // The one it resumes from, once in this process, and the one that it saves.
        assert_eq!(resumed, 2, "{ranks} ranks");
    }
}
