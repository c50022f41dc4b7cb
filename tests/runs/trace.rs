//! `--trace`: one file with the spans of all ranks, on one clock.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::runs::{Run, json};

/// A span on a thread of a rank, in microseconds.
struct Span {
    name: String,
    kind: String,
    rank: u64,
    thread: String,
    start: f64,
    end: f64,
    args: Value,
}

/// Trains a few steps, and returns the spans of the trace.
fn trace(transport: Transport, settings: &[&str]) -> Vec<Span> {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("trace.json");
    std::fs::write(&path, "an older trace, longer than nothing").unwrap();
    let run = Run::new(
        transport,
        root.path(),
        "x",
        &[&["eval.every=3", "checkpoint.every=3"], settings].concat(),
    );
    finish(run.command().arg("--trace").arg(&path)).succeeded();
    let file = json(&path);
    assert_eq!(file["otherData"]["lost_events"], 0);
    let events = file["traceEvents"].as_array().unwrap();
    let named = |event: &Value, kind: &str| event["ph"] == "M" && event["name"] == kind;
    let place = |event: &Value| (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
    let threads: BTreeMap<_, _> = events
        .iter()
        .filter(|event| named(event, "thread_name"))
        .map(|event| (place(event), event["args"]["name"].as_str().unwrap().to_owned()))
        .collect();
    let processes: Vec<_> = events.iter().filter(|event| named(event, "process_name")).collect();
    for (rank, process) in processes.iter().enumerate() {
        assert_eq!(process["pid"], rank);
        assert!(
            process["args"]["name"].as_str().unwrap().starts_with(&format!("rank {rank} on ")),
            "{process}"
        );
    }
    let spans = events.iter().filter(|event| event["ph"] != "M").map(|event| {
        assert_eq!(event["ph"], "X");
        let start = event["ts"].as_f64().unwrap();
        let lasts = event["dur"].as_f64().unwrap();
        assert!(start >= 0.0 && lasts >= 0.0, "{event}");
        Span {
            name: event["name"].as_str().unwrap().into(),
            kind: event["cat"].as_str().unwrap().into(),
            rank: place(event).0,
            thread: threads[&place(event)].clone(),
            start,
            end: start + lasts,
            args: event["args"].clone(),
        }
    });
    spans.collect()
}

/// Checks that every rank has each kind of span, on the right thread, for all units.
fn check_work(spans: &[Span], ranks: u64) {
    let units = BTreeSet::from(["embedding", "h.0", "h.1", "head"]);
    for rank in 0..ranks {
        let mine: Vec<_> = spans.iter().filter(|span| span.rank == rank).collect();
        for kind in ["forward", "backward", "update"] {
            let found: Vec<_> = mine.iter().filter(|span| span.kind == kind).collect();
            assert_eq!(found.len(), 6 * units.len(), "{kind} on rank {rank}: six steps");
            let of: BTreeSet<_> =
                found.iter().map(|span| span.args["unit"].as_str().unwrap()).collect();
            assert_eq!(of, units, "{kind}");
            assert!(found.iter().all(|span| span.thread == "compute"));
            assert!(found.iter().any(|span| span.name == format!("{kind} h.1")));
        }
        for (kind, thread, times) in [
            ("wait for data", "compute", 6),
            ("read", "loader", 6),
            ("evaluation", "compute", 2),
            ("checkpoint", "compute", 2),
        ] {
            let found =
                mine.iter().filter(|span| span.kind == kind && span.thread == thread).count();
            assert_eq!(found, times, "{kind} on rank {rank}");
        }
    }
    // The spans of a thread are disjoint or nested.
    for rank in 0..ranks {
        for thread in ["compute", "communication", "loader"] {
            let mut open: Vec<f64> = Vec::new();
            let mut mine: Vec<_> =
                spans.iter().filter(|span| span.rank == rank && span.thread == thread).collect();
            mine.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.end.total_cmp(&a.end)));
            for span in mine {
                open.retain(|end| *end > span.start);
                // The file has a resolution of a thousandth of a microsecond.
                assert!(
                    open.iter().all(|end| span.end <= end + 1e-2),
                    "{} of rank {rank}",
                    span.name
                );
                open.push(span.end);
            }
        }
    }
}

/// Checks that every collective is on all ranks, with its arguments, and overlaps in time.
fn check_messages(spans: &[Span], ranks: u64, algorithm: &str) {
    let mut collectives: BTreeMap<u64, Vec<&Span>> = BTreeMap::new();
    for span in spans.iter().filter(|span| span.thread == "communication") {
        collectives.entry(span.args["number"].as_u64().unwrap()).or_default().push(span);
    }
    let mut reduced = 0;
    for (number, of_ranks) in &collectives {
        let who: BTreeSet<_> = of_ranks.iter().map(|span| span.rank).collect();
        if who.len() < ranks as usize {
            // The recording begins and ends a little earlier on one rank than on another.
            let last = *collectives.keys().next_back().unwrap();
            assert!(
                *number <= 5 || number + 1 >= last,
                "collective {number} was seen by ranks {who:?}"
            );
            continue;
        }
        let begun = of_ranks.iter().map(|span| span.start).fold(0.0, f64::max);
        let ended = of_ranks.iter().map(|span| span.end).fold(f64::INFINITY, f64::min);
        // No rank finishes before the last one has begun. Clocks are read a little late.
        assert!(begun < ended + 50.0, "collective {number}: {begun} {ended}");
        assert!(of_ranks.iter().all(|span| span.name == of_ranks[0].name), "collective {number}");
        if of_ranks[0].kind == "all_reduce" {
            reduced += 1;
            for span in of_ranks {
                let args = &span.args;
                assert!(args["bytes"].as_u64() > Some(0) && args["unit"].is_string(), "{args}");
                assert_eq!(
                    (&args["algorithm"], &args["ranks"]),
                    (&algorithm.into(), &ranks.into())
                );
                assert_eq!(args["group"], "replica");
            }
        }
    }
    assert_eq!(reduced, 6 * 4, "a reduction for each unit and step");
    assert!(spans.iter().any(|span| span.kind == "wait for messages" && span.thread == "compute"));
}

#[test]
fn a_trace_has_all_ranks_on_one_clock() {
    for (transport, algorithm) in
        [(Mpirun(2), "ring"), (Mpirun(2), "halving-doubling"), (Simulate(2), "halving-doubling")]
    {
        let spans = trace(transport, &[&format!("comm.algorithm={algorithm}")]);
        check_work(&spans, 2);
        check_messages(&spans, 2, algorithm);
    }
}

/// With local SGD, replicas communicate only in averages: one message per unit, and one about the
/// steps.
#[test]
fn local_sgd_does_not_communicate_between_averages() {
    let of_replicas = |settings: &[&str]| {
        let spans = trace(Simulate(4), settings);
        let counted = |group: &str, kind: &str| {
            spans
                .iter()
                .filter(|span| span.rank == 0 && span.kind == kind && span.args["group"] == group)
                .count()
        };
        (counted("replica", "all_reduce"), counted("world", "gather_bytes"))
    };
    let hybrid = [
        "parallel.zero=1",
        "parallel.shard=2",
        "comm.algorithm=halving-doubling",
        "checkpoint.every=6",
        "eval.every=6",
    ];
    let (reduced, gathered) = of_replicas(&hybrid);
    assert_eq!(reduced, 6 * 4);
    let (averaged, gathered_less) =
        of_replicas(&[&hybrid[..], &["local_sgd.sync_every=3"]].concat());
    assert_eq!(
        (averaged, gathered - gathered_less),
        (reduced / 3, 6 - 2),
        "two averages of four units"
    );
}

#[test]
fn one_rank_has_a_trace_too() {
    let spans = trace(Alone, &[]);
    check_work(&spans, 1);
    assert!(spans.iter().all(|span| span.thread != "communication"));
}

#[test]
fn an_early_end_leaves_a_trace() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("trace.json");
    let settings =
        ["optimizer.lr=1e30", "run.max_skipped=2", "optimizer.grad_clip=0", "run.steps=500"];
    let run = Run::new(Mpirun(2), root.path(), "x", &settings);
    let ended = finish(run.command().arg("--trace").arg(&path));
    assert_eq!(ended.code(), 1, "{ended}");
    let events = json(&path)["traceEvents"].as_array().unwrap().len();
    assert!(events > 20, "{events}");
}
