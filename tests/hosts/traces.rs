//! A trace of two hosts uses one clock.

use std::collections::BTreeMap;

use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::runs::{Run, json};

/// The maximum error of a clock measurement in microseconds: half of the fastest round trip, on a
/// busy machine.
const MAX_ERROR: f64 = 2000.0;

#[test]
fn a_trace_of_two_hosts_is_on_one_clock() {
    let Some(hosts) = Hosts::new(2) else { return };
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("trace.json");
    let run = Run::new(
        Alone,
        root.path(),
        "x",
        &["comm.algorithm=halving-doubling", "eval.every=0", "checkpoint.every=0"],
    );
    finish(&mut hosts.across("h0:2,h1:2", run.command().arg("--trace").arg(&path))).succeeded();
    let trace = json(&path);
    let events = trace["traceEvents"].as_array().unwrap();
    let names: Vec<_> = events
        .iter()
        .filter(|event| event["ph"] == "M" && event["name"] == "process_name")
        .map(|event| event["args"]["name"].as_str().unwrap())
        .collect();
    for (rank, name) in names.iter().enumerate() {
        assert!(name.starts_with(&format!("rank {rank} on h{}", rank / 2)), "{name}");
    }
    // No rank finishes a sum before the last rank has begun it.
    let mut sums: BTreeMap<u64, Vec<(f64, f64)>> = BTreeMap::new();
    for event in events.iter().filter(|event| event["cat"] == "all_reduce") {
        let start = event["ts"].as_f64().unwrap();
        let lasts = event["dur"].as_f64().unwrap();
        sums.entry(event["args"]["number"].as_u64().unwrap())
            .or_default()
            .push((start, start + lasts));
    }
    let whole: Vec<_> = sums.values().filter(|ranks| ranks.len() == 4).collect();
    assert!(whole.len() >= 6 * 4, "{} sums of all ranks", whole.len());
    for ranks in whole {
        let begun = ranks.iter().map(|(start, _)| *start).fold(0.0, f64::max);
        let ended = ranks.iter().map(|(_, end)| *end).fold(f64::INFINITY, f64::min);
        assert!(begun < ended + MAX_ERROR, "begun {begun}, ended {ended}");
    }
}
