//! MFU and energy of runs on GPUs, in their simulator.

use std::time::Instant;

use serde_json::Value;

use hpctrain_testkit::launch::Transport::Mpirun;
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, json};
use hpctrain_testkit::simulator::with_simulator;

/// Power of a simulated device, and the peak of an H100 SXM in bf16.
const WATTS: f64 = 700.0;
const PEAK: f64 = 989.4e12;

/// Model FLOPs per token of the network below.
const FLOPS_PER_TOKEN: f64 =
    6.0 * (12.0 * 2.0 * 16.0 * 16.0 + 65.0 * 16.0) + 12.0 * 2.0 * 16.0 * 8.0;

/// A run on two ranks, each with its own device or both with one.
fn run(
    root: &std::path::Path,
    name: &str,
    devices: &str,
    watts: Option<f64>,
) -> (Value, Vec<Value>, f64) {
    let settings = [
        "run.device=cuda",
        "comm.transport=host-staged",
        "run.steps=4",
        "log.every=2",
        "model.width=16",
        "model.context=8",
        "eval.samples=8",
        "device.memory_limit=48MiB",
        "device.ranks_per_gpu=2",
    ];
    let run = Run::new(Mpirun(2), root, name, &settings);
    let mut command = run.command();
    with_simulator(&mut command)
        .env("CUDASIM_DEVICES", devices)
        .env("CUDASIM_NAME", "NVIDIA H100 80GB HBM3");
    command.env("HPCTRAIN_POWERCAP_ROOT", root.join("none"));
    command.envs(watts.map(|watts| ("CUDASIM_WATTS", watts.to_string())));
    let begun = Instant::now();
    finish(&mut command).succeeded();
    let seconds = begun.elapsed().as_secs_f64();
    let text = run.files().text("metrics.jsonl");
    let records = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (json(&run.files().path("run.json")), records, seconds)
}

#[test]
fn the_peak_is_that_of_the_sku_and_the_energy_that_of_all_devices() {
    let root = tempfile::tempdir().unwrap();
    for (devices, count) in [("2", 2.0), ("1", 1.0)] {
        let (card, records, seconds) =
            run(root.path(), &format!("on-{devices}"), devices, Some(WATTS));
        for record in &records {
            let rate = record["tokens_per_second"].as_f64().unwrap();
            let by_hand = rate * FLOPS_PER_TOKEN / (count * PEAK);
            assert!(
                (record["mfu"].as_f64().unwrap() / by_hand - 1.0).abs() < 1e-6,
                "{record}: by hand {by_hand}"
            );
        }
        let energy = &card["energy"];
        assert_eq!(energy["sources"], serde_json::json!(["gpu"]));
        let joules = energy["kwh"].as_f64().unwrap() * 3.6e6;
        let steps: f64 =
            records.iter().map(|record| record["step_ms"].as_f64().unwrap() * 1e-3).sum();
        // NVML counts in millijoules, and a reading may be some milliseconds old.
        assert!(joules > 0.9 * count * WATTS * (steps - 0.1), "{joules} J in {steps} s of steps");
        assert!(joules < count * WATTS * seconds, "{joules} J in {seconds} s");
        assert!(
            records[1]["joules_per_token"].as_f64().unwrap() > 0.0
                && records[0]["energy_kwh"].is_null()
        );
    }
}

#[test]
fn devices_without_a_counter_have_no_energy() {
    let root = tempfile::tempdir().unwrap();
    let (card, records, _) = run(root.path(), "run", "2", None);
    assert!(
        card["energy"].is_null() && records.iter().all(|record| record["energy_kwh"].is_null()),
        "{card}"
    );
    let mut doctor = program(["doctor", "--run-root", root.path().to_str().unwrap()]);
    let ended = finish(with_simulator(&mut doctor));
    assert!(ended.stdout.contains("has no energy counter"), "{ended}");
    let ended = finish(doctor.env("CUDASIM_WATTS", "700"));
    assert!(ended.stdout.contains("NVML measures its energy"), "{ended}");
}
