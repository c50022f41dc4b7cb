//! Step times: the parts of every step, and stragglers.

use std::time::Duration;

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{LIMIT, signal, start};
use hpctrain_testkit::runs::Run;

#[test]
fn the_parts_of_a_step_add_up() {
    let root = tempfile::tempdir().unwrap();
    let layouts: [(Transport, &str); 4] = [
        (Alone, "parallel.zero=0"),
        (Mpirun(2), "parallel.zero=1"),
        (Mpirun(2), "parallel.zero=3"),
        (Simulate(4), "parallel.zero=3 parallel.shard=2"),
    ];
    for (i, (transport, layout)) in layouts.into_iter().enumerate() {
        let settings: Vec<&str> =
            ["eval.every=2"].into_iter().chain(layout.split_whitespace()).collect();
        let run = Run::new(transport, root.path(), &format!("x-{i}"), &settings);
        let ended = run.ends().succeeded();
        let files = run.files();
        let what = format!("{transport:?} {layout}");
        let of = |key: &str| files.numbers("metrics.jsonl", key);
        let parts = ["compute_ms", "comm_exposed_ms", "loader_ms", "optimizer_ms"].map(of);
        let hidden = of("comm_hidden_ms");
        let steps = of("step_ms");
        for (step, &whole) in steps.iter().enumerate() {
            let sum: f64 = parts.iter().map(|part| part[step]).sum();
            assert!(
                (sum - whole).abs() <= 0.01 * whole + 0.05,
                "{what}, step {step}: {sum} of {whole} ms"
            );
            assert!(
                parts.iter().all(|part| part[step] >= 0.0) && hidden[step] >= 0.0,
                "{what}, step {step}"
            );
            assert!(
                parts[0][step] > 0.0 && parts[3][step] > 0.0,
                "{what}, step {step}: nothing computed or updated"
            );
        }
        let waits: f64 = parts[1].iter().chain(&hidden).sum();
        assert_eq!(waits > 0.0, transport != Alone, "{what}: {waits} ms of communication");

        let card: Value = serde_json::from_str(&files.text("run.json")).unwrap();
        let total = |key: &str| card["step_seconds"][key].as_f64().unwrap();
        for (key, part) in ["compute", "comm_exposed", "loader", "optimizer"].iter().zip(&parts) {
            let sum = part.iter().sum::<f64>() * 1e-3;
            assert!(
                (total(key) - sum).abs() < 1e-9,
                "{what}: {key} is {} s of {sum} s",
                total(key)
            );
        }
        assert!((total("comm_hidden") - hidden.iter().sum::<f64>() * 1e-3).abs() < 1e-9, "{what}");
        let lines: Vec<&str> =
            ended.stdout.lines().filter(|line| line.starts_with("time  compute ")).collect();
        let [line] = lines[..] else { panic!("{what}: {ended}") };
        for word in ["exposed communication", "(hidden", "loader", "optimizer"] {
            assert!(line.contains(word), "{what}: {line}");
        }
    }
}

/// Returns the process of rank `rank` among those whose command line contains `word`.
fn process(word: &str, rank: usize) -> Option<String> {
    let variable = format!("OMPI_COMM_WORLD_RANK={rank}");
    let is_it = |id: &str| {
        let has = |file: &str, word: &str| {
            let text = std::fs::read(format!("/proc/{id}/{file}")).unwrap_or_default();
            text.split(|&byte| byte == 0).any(|part| String::from_utf8_lossy(part).contains(word))
        };
        has("cmdline", word) && has("environ", &variable)
    };
    let entries = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    entries.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).find(|id| is_it(id))
}

#[test]
fn a_slow_rank_is_named() {
    let root = tempfile::tempdir().unwrap();
    // Steps spend more time computing than communicating.
    let settings = [
        "model.width=64",
        "model.context=32",
        "batch.global=32",
        "run.steps=80",
        "run.threads=1",
        "log.straggler_window=20",
        "checkpoint.every=0",
    ];
    let run = Run::new(Mpirun(2), root.path(), "slow", &settings);
    let word = format!("run.root={}", root.path().display());
    let mut job = start(&mut run.command());
    // Rank 1 sleeps for most of the time.
    while job.runs() {
        if let Some(id) = process(&word, 1) {
            signal("STOP", &id);
            std::thread::sleep(Duration::from_millis(40));
            signal("CONT", &id);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let ended = job.finish(LIMIT).succeeded();
    let named =
        |rank: usize| ended.stderr.matches(&format!("warn: rank 0: rank {rank} (host ")).count();
    assert!(named(1) >= 1 && named(1) <= 4 && named(0) == 0, "{ended}");
    assert!(
        ended.stderr.contains(" times as long as the median rank over the last 20 steps"),
        "{ended}"
    );
    assert!(run.files().text("logs/rank-00000.log").contains("rank 1 (host "));
}
