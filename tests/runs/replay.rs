//! `hpctrain replay`: the bits of the records, records and data that were changed, and the first
//! bad tensor of planted faults.

use std::path::Path;

use hpctrain::data::SampleOrder;
use hpctrain::random::{Stream, derive};
use hpctrain_testkit::launch::Transport::{self, Alone, Simulate};
use hpctrain_testkit::launch::{Ended, finish, program};
use hpctrain_testkit::runs::{Run, RunFiles};
use serde_json::Value;

use super::samples::which;

/// Settings of a run that keeps its checkpoints.
const KEPT: [&str; 5] = [
    "run.steps=60",
    "parallel.virtual_ranks=8",
    "model.dropout=0.1",
    "checkpoint.every=10",
    "checkpoint.keep=9",
];

/// Replays a run.
#[track_caller]
fn replay(files: &RunFiles, args: &[&str]) -> Ended {
    let mut command = program(["replay"]);
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    finish(command.arg(&files.0).args(args))
}

/// Returns the JSON object of a replay with this exit code.
#[track_caller]
fn report(files: &RunFiles, code: i32, args: &[&str]) -> Value {
    let ended = replay(files, &[args, &["--json"]].concat());
    assert_eq!(ended.code(), code, "{ended}");
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {ended}"))
}

/// Changes the records of a run: `change` gets each step.
fn change_records(files: &RunFiles, change: impl Fn(u64, &mut Value)) {
    let changed: String = files
        .text("metrics.jsonl")
        .lines()
        .map(|line| {
            let mut record: Value = serde_json::from_str(line).unwrap();
            change(record["step"].as_u64().unwrap(), &mut record);
            format!("{record}\n")
        })
        .collect();
    std::fs::write(files.path("metrics.jsonl"), changed).unwrap();
}

/// Flips the last bit of a number of a record.
fn flip(record: &mut Value, number: &str) {
    let bits = record[number].as_f64().unwrap().to_bits() ^ 1;
    record[number] = f64::from_bits(bits).into();
}

#[test]
fn steps_have_the_bits_of_the_run_on_any_ranks() {
    let root = tempfile::tempdir().unwrap();
    let settings = [&KEPT[..], &["parallel.zero=3"]].concat();
    let files = Run::new(Simulate(4), root.path(), "sharded", &settings).shared();
    let before = files.text("metrics.jsonl");
    for ranks in ["1", "2", "4"] {
        let ended = replay(&files, &["--steps", "11..60", "--ranks", ranks]).succeeded();
        assert!(ended.stdout.ends_with("\n0 of 50 steps differ\n"), "{ended}");
        assert!(ended.stdout.contains("steps 11 to 60 from the state of step 10"), "{ended}");
        assert!(ended.stdout.contains("the run had 4 ranks"), "{ended}");
        assert_eq!(ended.stderr, "");
    }
    let ended = replay(&files, &["--steps", "51..60", "--ranks", "2", "--mpi"]).succeeded();
    assert!(ended.stdout.ends_with("\n0 of 10 steps differ\n"), "{ended}");
    // The newest checkpoint before the steps, or the beginning.
    let found = report(&files, 0, &["--steps", "35..36"]);
    assert_eq!((&found["from"], &found["compared"]), (&30.into(), &2.into()));
    let found = report(&files, 0, &["--steps", "35..36", "--from-start"]);
    assert_eq!((&found["from"], &found["differing"]), (&0.into(), &0.into()));
    let found = report(&files, 0, &["--steps", "1..2"]);
    assert_eq!((&found["from"], &found["compared"]), (&0.into(), &2.into()));
    assert_eq!(files.text("metrics.jsonl"), before);
}

/// Three ranks have three, three and two of the eight virtual ranks.
#[test]
fn steps_have_the_bits_of_the_run_on_ranks_with_unequal_shares() {
    let root = tempfile::tempdir().unwrap();
    let settings =
        ["run.steps=50", "parallel.virtual_ranks=8", "parallel.zero=3", "model.layers=1"];
    let files = Run::new(Simulate(4), root.path(), "unequal", &settings).shared();
    for ranks in ["3", "1"] {
        let ended = replay(&files, &["--steps", "1..50", "--ranks", ranks]).succeeded();
        assert!(ended.stdout.ends_with("\n0 of 50 steps differ\n"), "{ended}");
        assert!(ended.stdout.contains("steps 1 to 50 from the state of step 0"), "{ended}");
        assert!(ended.stdout.contains("the run had 4 ranks"), "{ended}");
    }
}

/// Runs with pipeline stages, tensor parallelism and averaged replicas are replayed on one rank.
#[test]
fn other_layouts_are_replayed_on_one_rank() {
    let root = tempfile::tempdir().unwrap();
    let saves = ["run.steps=8", "checkpoint.every=4", "parallel.virtual_ranks=4"];
    let layouts = [
        (4, "parallel.pipeline=2 batch.micro=1 parallel.schedule=zero-bubble"),
        (2, "parallel.tensor=2 parallel.sequence=true"),
        (2, "local_sgd.sync_every=4 local_sgd.replicas=2 local_sgd.outer_lr=0.7"),
    ];
    for (ranks, layout) in layouts {
        let settings: Vec<&str> = saves.into_iter().chain(layout.split(' ')).collect();
        let files = Run::new(Simulate(ranks), root.path(), "any", &settings).shared();
        // Steps inside a round of local SGD, too.
        let found = report(&files, 0, &["--steps", "6..7"]);
        assert_eq!((&found["compared"], &found["from"]), (&2.into(), &4.into()), "{layout}");
        if layout.starts_with("local_sgd") {
            let ended = replay(&files, &["--steps", "6..7", "--stop-at-first", "inf"]);
            assert!(ended.code() == 2 && ended.stderr.contains("local SGD"), "{ended}");
        }
    }
}

/// Steps after a start with another configuration, and those of a run that began at a checkpoint of
/// another one.
#[test]
fn later_starts_and_branches_are_replayed() {
    let root = tempfile::tempdir().unwrap();
    let saves = ["checkpoint.every=4", "checkpoint.keep=9", "parallel.virtual_ranks=4"];
    let run = |name: &str, more: &[&str]| {
        Run::new(Simulate(2), root.path(), name, &[&saves[..], more].concat())
    };
    let first = run("first", &["run.steps=8"]).succeeds();
    let again = ["run.steps=16", "optimizer.lr=0.003"];
    let files = run("first", &again).resume("auto").succeeds();
    for steps in ["5..8", "9..12", "15..16"] {
        let found = report(&files, 0, &["--steps", steps]);
        assert_eq!(found["differing"], 0, "{steps}: {found:#}");
    }
    // The newest checkpoint before the steps is of another run, with other settings.
    let from = first.checkpoint(8).display().to_string();
    let branch = run("branch", &["run.steps=15", "optimizer.lr=0.002"]).resume(&from).succeeds();
    let found = report(&branch, 0, &["--steps", "9..15", "--from-start"]);
    assert_eq!((&found["from"], &found["compared"]), (&8.into(), &7.into()), "{found:#}");
    // Without its own checkpoints, a branch is repeated from its beginning.
    let more = ["run.steps=15", "checkpoint.keep=1"];
    let branch = run("bare", &more).resume(&from).succeeds();
    let found = report(&branch, 0, &["--steps", "10..11"]);
    assert_eq!((&found["from"], &found["compared"]), (&8.into(), &2.into()), "{found:#}");
    for more in [&[][..], &["--from-start"]] {
        let ended = replay(&branch, &[&["--steps", "8..9"], more].concat());
        assert!(ended.code() == 2 && ended.stderr.contains("the run began at step 8"), "{ended}");
    }
    let ended = replay(&branch, &["--steps", "14..14"]);
    assert!(ended.code() == 2 && ended.stderr.contains("keep_every=4 would have"), "{ended}");
    // A damaged beginning is not tried again.
    let origin = first.checkpoint(8);
    let shard = origin.join("rank-00000.h5");
    let mut bytes = std::fs::read(&shard).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let ended = replay(&branch, &["--steps", "10..11"]);
    assert!(!ended.status.success() && ended.stderr.contains("damaged"), "{ended}");
    // Without the origin, the missing checkpoints of the run itself are named.
    std::fs::remove_dir_all(&origin).unwrap();
    let ended = replay(&branch, &["--steps", "14..14"]);
    assert!(ended.code() == 2 && ended.stderr.contains("keep_every=4 would have"), "{ended}");
    assert!(ended.stderr.contains("no whole checkpoint before step 14"), "{ended}");
    assert!(!ended.stderr.contains("--from-start"), "{ended}");
}

/// Steps have the configuration of the start that took them, also if no checkpoint of it is left.
#[test]
fn the_start_that_took_the_steps_is_replayed() {
    let root = tempfile::tempdir().unwrap();
    let saves = ["checkpoint.every=8", "checkpoint.keep=1", "parallel.virtual_ranks=4"];
    let run = |ranks, more: &[&str]| {
        Run::new(Simulate(ranks), root.path(), "starts", &[&saves[..], more].concat())
    };
    run(2, &["run.steps=8"]).succeeds();
    let again = ["run.steps=16", "optimizer.lr=0.003"];
    let files = run(4, &again).resume("auto").succeeds();
    let found = report(&files, 0, &["--steps", "5..6", "--from-start"]);
    assert_eq!((&found["ranks_of_run"], &found["compared"]), (&2.into(), &2.into()));
    let found = report(&files, 1, &["--steps", "9..10", "--from-start"]);
    let causes = found["causes"].to_string();
    assert!(causes.contains("the start of the run at step 0 had another"), "{causes}");
    assert!(causes.contains("optimizer.lr"), "{causes}");
    assert_eq!(found["ranks_of_run"], 4);
}

#[test]
fn a_changed_record_is_named() {
    let root = tempfile::tempdir().unwrap();
    let settings = [&KEPT[..], &["parallel.zero=3"]].concat();
    let run = Run::new(Simulate(4), root.path(), "changed", &settings);
    for number in ["loss", "grad_norm", "lr"] {
        let files = run.copied();
        change_records(&files, |step, record| {
            if step == 43 {
                flip(record, number);
            }
        });
        let found = report(&files, 1, &["--steps", "41..50"]);
        assert_eq!((&found["differing"], &found["compared"]), (&1.into(), &10.into()));
        let difference = &found["differences"][0];
        assert_eq!((&difference["step"], &difference["number"]), (&43.into(), &number.into()));
        assert_ne!(difference["recorded"], difference["replayed"]);
        assert!(found["causes"][0].as_str().unwrap().contains("step 43 differs alone"), "{found}");
        let ended = replay(&files, &["--steps", "41..50"]);
        assert_eq!(ended.code(), 1);
        assert!(ended.stdout.contains(&format!("step 43      {number} is ")), "{ended}");
        assert!(ended.stdout.ends_with("\n1 of 10 steps differs\n"), "{ended}");
        std::fs::remove_dir_all(&files.0).unwrap();
    }
    // All steps from one on: the conditions of equal bits are met, so a machine is suspected.
    let files = run.copied();
    change_records(&files, |step, record| {
        if step >= 43 {
            flip(record, "loss");
        }
    });
    let found = report(&files, 1, &["--steps", "41..50"]);
    assert_eq!(found["differing"], 8);
    assert!(found["causes"][0].as_str().unwrap().contains("run.sdc_check_every"), "{found}");
    // Without a record of the start, its version and hosts are unknown.
    std::fs::remove_file(files.path("starts.jsonl")).unwrap();
    let found = report(&files, 1, &["--steps", "41..50"]);
    let causes = found["causes"].to_string();
    assert!(causes.contains("starts.jsonl has no record"), "{causes}");
    assert!(!causes.contains("sdc_check_every"), "{causes}");
    // A damaged line is a gap.
    let text = files.text("metrics.jsonl").replacen("\"step\":42,", "\"step\":4x2,", 1);
    std::fs::write(files.path("metrics.jsonl"), text).unwrap();
    let found = report(&files, 1, &["--steps", "41..50"]);
    assert_eq!((&found["missing"], &found["compared"]), (&serde_json::json!([42]), &9.into()));
    let found = report(&files, 1, &["--steps", "41..42"]);
    assert_eq!((&found["differing"], &found["compared"]), (&0.into(), &1.into()));
}

/// The causes of differences are the conditions of equal bits that the run did not meet.
#[test]
fn unmet_conditions_are_named() {
    let root = tempfile::tempdir().unwrap();
    let settings =
        ["run.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "comm.algorithm=ring"];
    let run = Run::new(Simulate(3), root.path(), "ring", &settings);
    let run = Run { settings: [&run.settings[..], &["batch.global=9".into()]].concat(), ..run };
    let files = run.copied();
    change_records(&files, |_, record| flip(record, "grad_norm"));
    let found = report(&files, 1, &["--steps", "3..6"]);
    let causes = found["causes"].to_string();
    assert!(causes.contains("comm.algorithm = ring adds in another order"), "{causes}");
    assert!(!causes.contains("sdc_check_every"), "{causes}");
}

#[test]
fn ranges_that_cannot_be_replayed_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let settings = [&KEPT[..], &["parallel.zero=3", "checkpoint.keep=2"]].concat();
    let files = Run::new(Simulate(4), root.path(), "few", &settings).shared();
    let refusals: [(&[&str], &[&str]); 6] = [
        (&[], &["replay needs a range of steps", "--steps 1..60"]),
        (&["--steps", "50..61"], &["--steps 50..61", "has the steps 1 to 60", "--steps 1..60"]),
        (
            &["--steps", "35..36"],
            &[
                "no whole checkpoint before step 35: the oldest is of step 50",
                "--from-start",
                "checkpoint.keep_every=10 would have kept the checkpoint of step 30",
            ],
        ),
        (
            &["--stop-at-first", "nan"],
            &["has no step with a loss or gradient norm", "--steps 1..60"],
        ),
        (&["--steps", "52..53", "--ranks", "16"], &["hint:"]),
        (&["--steps", "5..4"], &["A..B with 1 ≤ A ≤ B"]),
    ];
    for (args, words) in refusals {
        let ended = replay(&files, args);
        assert_eq!(ended.code(), 2, "{ended}");
        for word in words {
            assert!(ended.stderr.contains(word), "{word}: {ended}");
        }
    }
    let found = report(&files, 0, &["--steps", "35..36", "--from-start"]);
    assert_eq!((&found["from"], &found["differing"]), (&0.into(), &0.into()));
    let ended = finish(&mut program(["replay", "--stop-at-first", "huge", "x"]));
    assert!(ended.code() == 2 && ended.stderr.contains("one of nan, inf, spike"), "{ended}");
    let ended = finish(program(["replay", "--steps", "1..2"]).arg(root.path()));
    assert!(ended.code() == 2 && ended.stderr.contains("hint:"), "{ended}");
    // Steps of asynchronous workers are not a function of the data.
    let files = Run::new(Simulate(4), root.path(), "served", &settings).copied();
    let config = files.text("config.toml").replace("staleness = 0", "staleness = 3");
    std::fs::write(files.path("config.toml"), config).unwrap();
    std::fs::write(files.path("workers.jsonl"), "").unwrap();
    let ended = replay(&files, &["--steps", "52..53"]);
    assert!(ended.code() == 2 && ended.stderr.contains("staleness = 3"), "{ended}");
    // A damaged checkpoint is skipped.
    let files = Run::new(Simulate(4), root.path(), "damaged", &settings).copied();
    let shard = files.checkpoint(60).join("manifest.json");
    std::fs::write(&shard, "{}").unwrap();
    let found = report(&files, 0, &["--steps", "60..60"]);
    assert_eq!(found["from"], 50);
}

/// Samples of the data with a planted fault, those of a step, and the virtual ranks.
const ROWS: u64 = 96;
const BATCH: u64 = 8;
const VIRTUAL_RANKS: u64 = 4;
const SEED: u64 = 7;
/// Features of a row.
const WIDTH: usize = 64;

/// A fault that is planted in a row of the data.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// A target whose squared error overflows.
    InfiniteLoss,
    /// A target that is wrong, but finite.
    HugeTarget,
    /// Features whose sum overflows in the first layer.
    HugeFeatures,
    /// A weight that makes the loss overflow.
    HugeWeight,
}

/// Writes rows for a regression, one of which has a fault.
fn write_data(path: &Path, row: u64, fault: Fault) {
    let rows = ROWS as usize;
    let mut inputs = vec![0.0; rows * WIDTH];
    Stream::new(derive(SEED, &[row])).fill_normal(&mut inputs);
    let mut targets: Vec<f32> = inputs.iter().step_by(WIDTH).copied().collect();
    let mut weights = vec![1.0f32; rows];
    let at = row as usize;
    match fault {
        Fault::InfiniteLoss => targets[at] = 1e30,
        Fault::HugeTarget => targets[at] = 3000.0,
        Fault::HugeFeatures => inputs[at * WIDTH..][..WIDTH].fill(3e38),
        Fault::HugeWeight => {
            weights[at] = 3e38;
            targets[at] = 30.0;
        }
    }
    let file = hdf5::File::create(path).unwrap();
    for (name, values, shape) in
        [("inputs", &inputs, &[rows, WIDTH][..]), ("targets", &targets, &[rows, 1])]
    {
        let dataset = file.new_dataset::<f32>().shape(shape.to_vec()).create(name).unwrap();
        dataset.write_raw(values).unwrap();
    }
    let dataset = file.new_dataset::<f32>().shape([rows]).create("weights").unwrap();
    dataset.write_raw(&weights).unwrap();
}

/// Trains a small regression on a file, on these ranks.
#[track_caller]
fn regression(
    transport: Transport,
    root: &Path,
    name: &str,
    data: &Path,
    more: &[&str],
) -> RunFiles {
    let data = format!("data.path={}", data.display());
    let settings = [
        &data,
        "data.weights=/weights",
        "model.kind=layers",
        "model.input=[64]",
        "model.layers=[{kind='dense', units=16}, {kind='tanh'}, {kind='dense', units=1}]",
        "loss.kind=mse",
        "run.steps=12",
        "parallel.virtual_ranks=4",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        "optimizer.grad_clip=1.0",
    ];
    // These keys of the small language model have no meaning here.
    let mut command = transport.train();
    let place = [format!("run.root={}", root.display()), format!("run.name={name}")];
    let common = ["batch.global=8", "lr_schedule.warmup=2", "optimizer.lr=0.01", "run.seed=7"];
    for setting in place.iter().map(String::as_str).chain(common).chain(settings) {
        command.args(["--set", setting]);
    }
    for setting in more {
        command.args(["--set", setting]);
    }
    finish(&mut command).succeeded();
    RunFiles(root.join(name))
}

/// Returns the step that reads a row, counted from 1, and the index of the row in its batch.
fn place_of(row: u64) -> (u64, u64) {
    let order = SampleOrder::mixed(&[ROWS], &[1.0], Some(SEED)).unwrap();
    let position = (0..ROWS).find(|position| order.draw(*position).sample == row).unwrap();
    (position / BATCH + 1, position % BATCH)
}

/// Twenty faults at random rows are found on any number of ranks: step, virtual rank, tensor and
/// sample.
#[test]
fn planted_faults_are_found() {
    let root = tempfile::tempdir().unwrap();
    let kinds = [Fault::InfiniteLoss, Fault::HugeTarget, Fault::HugeFeatures, Fault::HugeWeight];
    let mut random = [0.0; 20];
    Stream::new(derive(46, &[])).fill_normal(&mut random);
    for (number, random) in random.into_iter().enumerate() {
        let fault = kinds[number % kinds.len()];
        // A row of the third step or later, so that a spike has steps before it.
        let mut row = (f64::from(random.abs()) * 1e6) as u64 % ROWS;
        while place_of(row).0 < 3 {
            row = (row + 7) % ROWS;
        }
        let (step, index) = place_of(row);
        let data = root.path().join(format!("{number}.h5"));
        write_data(&data, row, fault);
        let ranks = [1, 2, 4][number % 3];
        let transport = if ranks == 1 { Alone } else { Simulate(ranks) };
        let files = regression(transport, root.path(), &format!("run-{number}"), &data, &[]);
        let stop = if fault == Fault::HugeTarget { "spike" } else { "inf" };
        let ranks_now = ["1", "4", "2"][number % 3];
        let launch = ["--ranks", ranks_now, "--mpi"];
        let launch = &launch[..if number == 1 { 3 } else { 2 }];
        let found = report(&files, 0, &[&["--stop-at-first", stop], launch].concat());
        let about = format!("{fault:?} in row {row}, {ranks} ranks: {found:#}");
        let bad = &found["first_bad"];
        assert_eq!(bad["step"], step, "{about}");
        let virtual_rank = index / (BATCH / VIRTUAL_RANKS);
        assert_eq!(bad["virtual_rank"], virtual_rank, "{about}");
        assert_eq!(bad["rank"], virtual_rank / (VIRTUAL_RANKS / ranks as u64), "{about}");
        let tensor = if fault == Fault::HugeFeatures { "output" } else { "loss" };
        assert_eq!(bad["kind"], tensor, "{about}");
        if fault == Fault::HugeFeatures {
            assert_eq!(bad["unit"], first_block(&files), "{about}");
        }
        let samples = bad["samples"].as_array().unwrap();
        assert_eq!(samples.len(), 1, "{about}");
        assert_eq!(samples[0]["sample"], row, "{about}");
        assert_eq!(samples[0]["row"], row, "{about}");
        assert_eq!(samples[0]["file"], data.display().to_string(), "{about}");
    }
}

/// Ranks with unequal numbers of virtual ranks run the samples of a micro-batch alone, too.
#[test]
fn samples_of_unequal_ranks_are_found() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data.h5");
    let order = SampleOrder::mixed(&[ROWS], &[1.0], Some(SEED)).unwrap();
    // Batches of 24 samples, three of each of eight virtual ranks.
    let position = 2 * 24 + 3 * 6 + 1;
    let row = order.draw(position).sample;
    write_data(&data, row, Fault::InfiniteLoss);
    let more = ["parallel.virtual_ranks=8", "batch.global=24", "batch.micro=3"];
    let files = regression(Simulate(3), root.path(), "unequal", &data, &more);
    for ranks in ["1", "3"] {
        let found = report(&files, 0, &["--stop-at-first", "inf", "--ranks", ranks]);
        let bad = &found["first_bad"];
        assert_eq!((&bad["step"], &bad["kind"]), (&3.into(), &"loss".into()), "{found:#}");
        let of_run = &which(&files.0, 3, &["--virtual-rank", "6"])[0];
        assert_eq!((&bad["virtual_rank"], &bad["rank"]), (&6.into(), &of_run["rank"]), "{found:#}");
        assert!(bad["host"].is_string() && bad["is_set"] == false, "{found:#}");
        let samples = bad["samples"].as_array().unwrap();
        assert_eq!(samples.len(), 1, "{found:#}");
        assert_eq!(
            (&samples[0]["sample"], &samples[0]["position"]),
            (&row.into(), &position.into())
        );
        // The loss is infinite, and nothing is NaN.
        let found = report(&files, 0, &["--stop-at-first", "nan", "--ranks", ranks]);
        assert_eq!(found["first_bad"], Value::Null, "{found:#}");
        assert!(found["note"].as_str().unwrap().contains("--stop-at-first inf"), "{found:#}");
    }
}

/// Returns the name of the first unit of a run's network: that of its first tensor.
fn first_block(files: &RunFiles) -> String {
    let name = files.tensors(2)[0].0.clone();
    name.rsplit_once(".bias").unwrap().0.into()
}

/// An update that overflows the parameters is named, not the samples of the next step.
#[test]
fn an_exploding_update_is_found() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data.h5");
    write_data(&data, 0, Fault::HugeTarget);
    let explode = ["optimizer.lr=1e38", "lr_schedule.warmup=0", "optimizer.kind=sgd"];
    let more = [&explode[..], &["run.max_skipped=100"]].concat();
    let files = regression(Simulate(2), root.path(), "exploding", &data, &more);
    let found = report(&files, 0, &["--stop-at-first", "inf"]);
    let bad = &found["first_bad"];
    assert_eq!((&bad["kind"], &bad["is_set"]), (&"loss".into(), &true.into()), "{found:#}");
    assert!(bad["note"].as_str().unwrap().contains("the update of step 1 has grown"), "{found:#}");
    for ranks in ["1", "2"] {
        let found = report(&files, 0, &["--stop-at-first", "spike", "--ranks", ranks]);
        let bad = &found["first_bad"];
        assert_eq!((&bad["kind"], &bad["step"]), (&"parameter".into(), &1.into()), "{found:#}");
        assert_eq!(bad["virtual_rank"], Value::Null, "{found:#}");
        assert!(bad["note"].as_str().unwrap().contains("lower optimizer.lr"), "{found:#}");
    }
}

/// Samples that see each other are named as a set.
#[test]
fn mixed_samples_are_named_as_a_set() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data.h5");
    let row = (0..ROWS).find(|row| place_of(*row).0 == 5).unwrap();
    write_data(&data, row, Fault::InfiniteLoss);
    let layers = "model.layers=[{kind='dense', units=16}, {kind='batch_norm', synchronised=false}, \
                  {kind='dense', units=1}]";
    let files = regression(Alone, root.path(), "normed", &data, &[layers]);
    let found = report(&files, 0, &["--stop-at-first", "inf"]);
    let bad = &found["first_bad"];
    assert!(bad["note"].as_str().unwrap().contains("batch_norm mixes"), "{found:#}");
    assert!(bad["is_set"] == true && bad["step"] == 5, "{found:#}");
    let samples: Vec<u64> = bad["samples"]
        .as_array()
        .unwrap()
        .iter()
        .map(|sample| sample["sample"].as_u64().unwrap())
        .collect();
    assert!(samples.len() == 2 && samples.contains(&row), "{found:#}");
}

/// Runs whose numbers depend on the ranks, and data that has changed, are refused.
#[test]
fn other_samples_and_statistics_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data.h5");
    write_data(&data, 0, Fault::HugeTarget);
    let layers = "model.layers=[{kind='dense', units=16}, {kind='batch_norm'}, \
                  {kind='dense', units=1}]";
    let more = [layers, "parallel.virtual_ranks=2"];
    let files = regression(Simulate(2), root.path(), "synchronised", &data, &more);
    let ended = replay(&files, &["--steps", "5..6"]);
    assert!(ended.code() == 2 && ended.stderr.contains("hint: --ranks 2"), "{ended}");
    let found = report(&files, 0, &["--steps", "5..6", "--ranks", "2"]);
    assert_eq!((&found["compared"], &found["differing"]), (&2.into(), &0.into()));
    // Data that was moved, and other keys of its section.
    let moved = root.path().join("moved.h5");
    std::fs::rename(&data, &moved).unwrap();
    let there = moved.display().to_string();
    let steps = ["--steps", "5..6", "--ranks", "2"];
    let ended = replay(&files, &steps);
    let hint = "hint: if it was moved, give its place: --data PATH";
    assert!(ended.code() == 2 && ended.stderr.contains(hint), "{ended}");
    let path = format!("data.path={there}");
    for more in [["--data", &there], ["--set", &path]] {
        let more = [&steps[..], &more, &["--set", "run.device=cpu"]].concat();
        assert_eq!(report(&files, 0, &more)["compared"], 2);
    }
    let ended = replay(&files, &[&steps[..], &["--set", "run.seed=8"]].concat());
    assert!(ended.code() == 2 && ended.stderr.contains("--set run.seed=8: only keys"), "{ended}");
    write_data(&data, 1, Fault::HugeTarget);
    let ended = replay(&files, &["--steps", "5..6", "--ranks", "2"]);
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("the training data has changed"), "{ended}");
    // Without a checkpoint, the record of the start knows the data.
    let ended = replay(&files, &["--steps", "5..6", "--ranks", "2", "--from-start"]);
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("the data of the run has changed"), "{ended}");
}

/// A replay that records tensors takes the same steps as one that does not, and finds nothing in
/// good ones.
#[test]
fn observed_steps_have_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let settings = [&KEPT[..], &["parallel.zero=3"]].concat();
    let files = Run::new(Simulate(4), root.path(), "observed", &settings).shared();
    for (ranks, stop) in [("1", "nan"), ("4", "spike:1e9")] {
        let args = ["--steps", "53..60", "--stop-at-first", stop, "--ranks", ranks];
        let found = report(&files, 0, &args);
        assert_eq!((&found["differing"], &found["compared"]), (&0.into(), &8.into()), "{found:#}");
        assert_eq!(found["first_bad"], Value::Null, "{found:#}");
    }
    let ended = replay(&files, &["--steps", "53..54", "--stop-at-first", "inf"]).succeeded();
    assert!(ended.stdout.contains("first bad    no tensor"), "{ended}");
}
