//! MFU and energy of runs on CPUs.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, RunFiles, json};

/// Model FLOPs per token of the network of [`Run`]: two blocks of width 32, a context of 16, 65
/// characters.
const FLOPS_PER_TOKEN: f64 =
    6.0 * (12.0 * 2.0 * 32.0 * 32.0 + 65.0 * 32.0) + 12.0 * 2.0 * 32.0 * 16.0;

/// Returns the values of `key` in all records of `metrics.jsonl` that have it.
fn known(files: &RunFiles, key: &str) -> Vec<f64> {
    let text = files.text("metrics.jsonl");
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter_map(|record| record[key].as_f64()).collect()
}

#[test]
fn mfu_is_that_of_the_measured_peak() {
    let root = tempfile::tempdir().unwrap();
    let cache = root.path().join("cache");
    let run = |transport, name: &str| {
        let run = Run::new(transport, root.path(), name, &["run.threads=1", "log.every=2"]);
        let ended = finish(run.command().env("XDG_CACHE_HOME", &cache)).succeeded();
        (ended, run.files())
    };
    let (ended, without) = run(Alone, "without");
    assert!(known(&without, "mfu").is_empty() && !ended.stdout.contains("MFU"), "{ended}");
    assert!(ended.stdout.contains("FLOP/s  ETA"), "{ended}");
    let rates = without.numbers("metrics.jsonl", "tokens_per_second");
    for (rate, tflops) in rates.iter().zip(without.numbers("metrics.jsonl", "tflops_per_rank")) {
        assert!(
            (tflops * 1e12 / (rate * FLOPS_PER_TOKEN) - 1.0).abs() < 1e-9,
            "{tflops} at {rate} tokens/s"
        );
    }

    let bench =
        ["bench", "kernels", "--preset", "gpt-char", "--samples", "1", "--steps", "1", "--json"];
    let settings = ["--set", "run.threads=1"];
    let measured = finish(program(bench.into_iter().chain(settings)).env("XDG_CACHE_HOME", &cache))
        .succeeded();
    let measured: Value = serde_json::from_str(&measured.stdout).unwrap();
    let peak = measured["peak_gflops"].as_f64().unwrap() * 1e9;
    let threads = measured["threads"].as_f64().unwrap();
    for (transport, name, ranks) in
        [(Alone, "one", 1.0), (Mpirun(2), "two", 2.0), (Simulate(2), "threads", 2.0)]
    {
        let (ended, files) = run(transport, name);
        assert!(ended.stdout.contains("MFU"), "{ended}");
        let rates = files.numbers("metrics.jsonl", "tokens_per_second");
        let mfu = known(&files, "mfu");
        assert_eq!(rates.len(), mfu.len());
        for (rate, mfu) in rates.iter().zip(mfu) {
            let by_hand = rate * FLOPS_PER_TOKEN / (ranks * peak / threads);
            assert!((mfu / by_hand - 1.0).abs() < 1e-6, "{name}: {mfu}, by hand {by_hand}");
        }
        let card = json(&files.path("run.json"));
        let by_hand = card["tokens_per_second"].as_f64().unwrap() * FLOPS_PER_TOKEN
            / (ranks * peak / threads);
        assert!((card["mfu"].as_f64().unwrap() / by_hand - 1.0).abs() < 1e-6, "{card}");
    }
}

/// µJ at which the fake counter wraps to 0.
const RANGE: u64 = 100_000;
/// µJ by which it grows at a time.
const GROWS: u64 = 700;

/// Creates a fake counter of a CPU package, in the format of Linux.
fn plant(root: &Path) {
    let zone = root.join("intel-rapl:0");
    std::fs::create_dir_all(&zone).unwrap();
    std::fs::write(zone.join("name"), "package-0\n").unwrap();
    std::fs::write(zone.join("max_energy_range_uj"), format!("{RANGE}\n")).unwrap();
    std::fs::write(zone.join("energy_uj"), "99990\n").unwrap();
}

/// Runs `work` while the fake counter grows and wraps. Returns the µJ that it grew by.
fn while_it_grows(root: &Path, work: impl FnOnce()) -> u64 {
    let is_over = AtomicBool::new(false);
    let grown = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = root.join("intel-rapl:0/energy_uj");
            let new = root.join("new");
            while !is_over.load(Ordering::Relaxed) {
                let all = 99_990 + grown.fetch_add(GROWS, Ordering::Relaxed) + GROWS;
                std::fs::write(&new, format!("{}\n", all % RANGE)).unwrap();
                std::fs::rename(&new, &file).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        work();
        is_over.store(true, Ordering::Relaxed);
    });
    grown.load(Ordering::Relaxed)
}

#[test]
fn energy_of_counters_that_wrap_is_recorded_across_starts() {
    let root = tempfile::tempdir().unwrap();
    let counters = tempfile::tempdir().unwrap();
    plant(counters.path());
    let run = |transport, steps: &str| {
        Run::new(
            transport,
            root.path(),
            "run",
            &[steps, "log.every=2", "checkpoint.every=2", "log.tensorboard=true"],
        )
    };
    let start = |run: &Run| {
        while_it_grows(counters.path(), || {
            let ended =
                finish(run.command().env("HPCTRAIN_POWERCAP_ROOT", counters.path())).succeeded();
            assert!(
                ended.stdout.contains(" J/token") && ended.stdout.contains("energy  0.000 kWh"),
                "{ended}"
            );
        })
    };
    let joules = |files: &RunFiles| {
        known(files, "energy_kwh").iter().map(|kwh| kwh * 3.6e6).collect::<Vec<f64>>()
    };

    let grown = start(&run(Mpirun(2), "run.steps=6")) as f64 * 1e-6;
    let files = run(Alone, "").files();
    let first = joules(&files);
    assert_eq!((first.len(), known(&files, "joules_per_token").len()), (3, 3));
    assert!(first.is_sorted() && first[0] > 0.0 && first[2] <= grown, "{first:?} of {grown} J");
    let per_token = known(&files, "joules_per_token");
    let tokens = 2.0 * 8.0 * 16.0;
    assert!(
        (per_token[2] * tokens / (first[2] - first[1]) - 1.0).abs() < 1e-6,
        "{per_token:?} {first:?}"
    );
    let card = json(&files.path("run.json"))["energy"].clone();
    assert_eq!(card["sources"], serde_json::json!(["cpu"]));
    assert!(card["kwh"].as_f64().unwrap() * 3.6e6 >= first[2], "{card}");

    // A second start continues the sum of the first one.
    let grown = grown + start(&run(Alone, "run.steps=12").resume("auto")) as f64 * 1e-6;
    let all = joules(&files);
    assert_eq!((all.len(), &all[..3]), (6, &first[..]));
    assert!(all.is_sorted() && all[3] > first[2] && all[5] <= grown, "{all:?} of {grown} J");

    let report = root.path().join("report.html");
    let directory = files.path("");
    finish(program(["report", "--out"]).args([&report, &directory])).succeeded();
    let page = std::fs::read_to_string(report).unwrap();
    assert!(page.contains("J/token") && page.contains("kWh"), "the report has no energy");
}

#[test]
fn without_counters_there_is_no_energy() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Mpirun(2), root.path(), "run", &["log.every=2"]);
    let ended =
        finish(run.command().env("HPCTRAIN_POWERCAP_ROOT", root.path().join("none"))).succeeded();
    assert!(!ended.stdout.contains("J/token") && !ended.stdout.contains("kWh"), "{ended}");
    let records = run.files().text("metrics.jsonl") + &run.files().text("run.json");
    assert!(!records.contains("joules") && !records.contains("energy"), "{records}");
}
