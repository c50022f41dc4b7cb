//! Tests of the choice of collective algorithms, and of `hpctrain bench comm`.

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{finish, mpirun, program};
use hpctrain_testkit::runs::Run;

/// Returns the line about collectives of the startup summary.
fn collectives_line(stdout: &str) -> Option<&str> {
    stdout.lines().find_map(|line| line.strip_prefix("collectives "))
}

#[test]
fn a_choice_is_measured_printed_kept_and_overridden() {
    let root = tempfile::tempdir().unwrap();
    for (transport, name) in [(Mpirun(2), "mpi"), (Simulate(2), "threads")] {
        let run = Run::new(transport, root.path(), name, &["parallel.zero=1", "run.steps=2"]);
        let ended = run.ends().succeeded();
        let line =
            collectives_line(&ended.stdout).unwrap_or_else(|| panic!("{ended}")).trim().to_string();
        assert!(
            line.starts_with("2 shards: reduce_scatter ") && line.ends_with(" (measured)"),
            "{line}"
        );
        assert!(!line.contains("ring,") && !line.contains("replicas"), "{line}");
        let kept = run.files().text("collectives.json");

        let resumed = run.clone().resume("auto").ends().succeeded();
        let again = collectives_line(&resumed.stdout).unwrap().trim().to_string();
        assert_eq!(again, line.replace("(measured)", "(measured before)"));
        assert_eq!(run.files().text("collectives.json"), kept);

        let mut other = run.clone().resume("auto");
        other.settings.push("comm.algorithm=ring".into());
        let line = collectives_line(&other.ends().succeeded().stdout).unwrap().trim().to_string();
        assert_eq!(line, "2 shards: reduce_scatter and all_gather by ring (as configured)");
        assert_eq!(run.files().text("collectives.json"), kept);
    }
    let alone = Run::new(Alone, root.path(), "alone", &["run.steps=1"]);
    assert_eq!(collectives_line(&alone.ends().succeeded().stdout), None);
    assert!(!alone.files().path("collectives.json").exists());
}

/// Every number of the report follows from bytes and time.
#[test]
fn the_benchmark_reports_every_operation_algorithm_and_size() {
    let arguments = ["bench", "comm", "--sizes", "1KiB,100000", "--batches", "1", "--json"];
    let ended = finish(mpirun(3).arg(hpctrain_testkit::program()).args(arguments)).succeeded();
    let report: Value =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {ended}"));
    assert_eq!(report["ranks"], 3);
    assert_eq!(report["shared_memory"], true);
    let copy = report["copy_bandwidth"].as_f64().unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5 * 5 * 2);
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"));
        // Rounded up to equal parts of whole elements.
        assert!([1032.0, 100_008.0].contains(&number("bytes")), "{row}");
        let algorithm = number("bytes") / number("microseconds") / 1e3;
        let factor = match row["operation"].as_str().unwrap() {
            "all_reduce" => 4.0 / 3.0,
            "reduce" | "broadcast" => 1.0,
            _ => 2.0 / 3.0,
        };
        let near = |got: f64, wanted: f64| (got / wanted - 1.0).abs() < 1e-9;
        assert!(near(number("algorithm_bandwidth"), algorithm), "{row}");
        assert!(near(number("bus_bandwidth"), algorithm * factor), "{row}");
        assert!(near(number("of_copy"), algorithm * factor / copy), "{row}");
    }

    let some = [
        "bench",
        "comm",
        "--sizes",
        "4KiB",
        "--batches",
        "1",
        "--operations",
        "broadcast",
        "--algorithms",
        "ring",
    ];
    let ended = finish(mpirun(2).arg(hpctrain_testkit::program()).args(some)).succeeded();
    let rows: Vec<_> = ended.stdout.lines().filter(|line| line.starts_with("broadcast ")).collect();
    assert!(rows.len() == 1 && rows[0].contains("ring") && rows[0].contains("4.0 KiB"), "{ended}");
}

#[test]
fn what_cannot_be_benchmarked_is_refused() {
    let ended = finish(&mut program(["bench", "comm"]));
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stderr.contains("at least two ranks") && ended.stderr.contains("hint: mpirun -np 2"),
        "{ended}"
    );
    for (arguments, words) in [
        (
            ["--algorithms", "nccl"],
            "one of vendor, ring, halving-doubling, hierarchical, reduce-to-one",
        ),
        (["--operations", "gather"], "one of all_reduce, reduce, reduce_scatter"),
        (["--sizes", "1 potato"], "--sizes"),
    ] {
        let ended = finish(program(["bench", "comm"]).args(arguments));
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(ended.stderr.contains(words), "{ended}");
    }
}
