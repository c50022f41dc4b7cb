//! Interrupted runs: resumed, they give the same bits as the uninterrupted run.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hpctrain::checkpoint::Reader;
use hpctrain::data::TokenizerKind;
use hpctrain::data::import::{ImportText, import_text};

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{Ended, LIMIT, finish, processes, program, rank_of, send, start};
use hpctrain_testkit::runs::{Run, RunFiles, copy, json};

/// Steps of the uninterrupted run, which saves and evaluates every third step.
const STEPS: u64 = 9;
/// With eight virtual ranks, any number of ranks gives the same bits.
const SETTINGS: [&str; 8] = [
    "run.steps=9",
    "checkpoint.every=3",
    "checkpoint.keep=9",
    "eval.every=3",
    "parallel.virtual_ranks=8",
    "model.dropout=0.1",
    "batch.global=16",
    // Sums depend on the micro-batch, and a pipeline would choose a smaller one.
    "batch.micro=2",
];

fn run(transport: Transport, root: &Path, name: &str, more: &[&str]) -> Run {
    Run::new(transport, root, name, &[&SETTINGS, more].concat())
}

/// Returns the uninterrupted run on these ranks.
fn whole(transport: Transport, more: &[&str]) -> RunFiles {
    run(transport, Path::new(""), "", more).shared()
}

/// Copies the run `from` to `to`, as if it had been killed between the checkpoint of step `step`
/// and the next one.
fn interrupted(from: &RunFiles, step: u64, to: &Path) -> RunFiles {
    copy(&from.0, to);
    let files = RunFiles(to.to_path_buf());
    for newer in (step + 1..=STEPS).filter(|newer| files.checkpoint(*newer).exists()) {
        std::fs::remove_dir_all(files.checkpoint(newer)).unwrap();
    }
    std::fs::remove_file(files.path("run.json")).unwrap();
    files
}

/// Layouts before and after the interruption, and the step of the checkpoint.
const PAIRS: [(Transport, &str, Transport, &str, u64); 16] = [
    (Alone, "", Alone, "parallel.zero=0", 3),
    (Alone, "", Mpirun(4), "parallel.zero=1", 6),
    (Alone, "parallel.zero=3", Simulate(8), "parallel.zero=2", 3),
    (Mpirun(4), "parallel.zero=3", Mpirun(4), "parallel.zero=3", 6),
    (Mpirun(4), "parallel.zero=3", Mpirun(2), "parallel.zero=0", 3),
    (Mpirun(4), "parallel.zero=2 parallel.shard=2", Alone, "parallel.zero=0", 6),
    (
        Mpirun(2),
        "parallel.zero=1",
        Mpirun(4),
        "parallel.zero=3 parallel.shard=2 parallel.recompute=true",
        3,
    ),
    (Simulate(4), "parallel.zero=0", Mpirun(2), "parallel.zero=3", 6),
    (Simulate(8), "parallel.zero=3", Simulate(2), "parallel.zero=1", 3),
    (Mpirun(4), "parallel.storage=central", Mpirun(2), "parallel.zero=3", 3),
    (Mpirun(2), "parallel.zero=1", Simulate(4), "parallel.storage=central parallel.owners=2", 6),
    // Unequal numbers of virtual ranks.
    (Mpirun(3), "parallel.zero=3", Simulate(5), "parallel.zero=1", 3),
    (Mpirun(4), "parallel.zero=2", Mpirun(3), "parallel.zero=0", 6),
    // From stages to one rank, from one rank to stages, from stages to other stages.
    (Mpirun(4), "parallel.pipeline=4", Alone, "parallel.zero=0", 3),
    (Alone, "", Mpirun(4), "parallel.pipeline=2 parallel.zero=1", 6),
    (
        Mpirun(2),
        "parallel.pipeline=2 parallel.stages=[3,1]",
        Simulate(8),
        "parallel.pipeline=4 parallel.zero=3",
        3,
    ),
];

#[test]
fn resumed_runs_equal_uninterrupted_ones_on_any_ranks() {
    let root = tempfile::tempdir().unwrap();
    let reference = whole(Alone, &[]);
    assert_eq!(reference.steps().len() as u64, STEPS);
    assert_eq!(reference.numbers("eval.jsonl", "step"), [3.0, 6.0, 9.0]);
    for (i, (before, zero_before, after, zero_after, step)) in PAIRS.into_iter().enumerate() {
        let what =
            format!("{before:?} {zero_before} until step {step}, then {after:?} {zero_after}");
        let settings = |zero: &'static str| zero.split_whitespace().collect::<Vec<_>>();
        let name = format!("resumed-{i}");
        interrupted(&whole(before, &settings(zero_before)), step, &root.path().join(&name));
        let resumed = run(after, root.path(), &name, &settings(zero_after)).resume("auto");
        let ended = resumed.ends().succeeded();
        let resumed = resumed.files();
        assert!(ended.stdout.contains(&format!("at step {step} from")), "{what}: {ended}");
        resumed.same_as(&reference, STEPS, &what);
        assert_eq!(
            resumed.path("checkpoints/latest").canonicalize().unwrap(),
            resumed.checkpoint(STEPS),
            "{what}"
        );
        assert!(resumed.path("run.json").exists(), "{what}");
    }
}

#[test]
fn a_path_starts_another_run_from_a_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let reference = whole(Alone, &[]);
    let kept = reference.steps();
    let from = reference.checkpoint(6);
    let branch = run(Alone, root.path(), "branch", &[]).resume(from.to_str().unwrap()).succeeds();
    assert_eq!(branch.steps(), reference.steps()[6..]);
    assert_eq!(branch.tensors(STEPS), reference.tensors(STEPS));
    assert_eq!(reference.steps(), kept);

    // A link to a checkpoint is accepted as a source; a directory that has a run is refused as a
    // target.
    let latest = reference.path("checkpoints/latest");
    let latest = latest.to_str().unwrap();
    let more = run(Mpirun(2), root.path(), "more", &["run.steps=12"]).resume(latest).succeeds();
    assert_eq!(more.numbers("metrics.jsonl", "step"), [10.0, 11.0, 12.0]);
    let ended = run(Alone, root.path(), "branch", &[]).resume(latest).ends();
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("branch holds another run"), "{ended}");
    assert_eq!(branch.steps(), reference.steps()[6..]);
}

/// Runs with a flag of `hpctrain train`.
fn flagged(run: &Run, flag: &str) -> Ended {
    let mut command = run.command();
    command.arg(flag);
    finish(&mut command)
}

#[test]
fn weights_alone_begin_another_run() {
    let root = tempfile::tempdir().unwrap();
    let base = run(Mpirun(2), root.path(), "base", &["parallel.zero=1"]).copied();
    let from = base.0.to_str().unwrap();
    // It has another seed and so another data order, and another optimizer.
    let other = ["run.seed=8", "optimizer.kind=sgd", "run.steps=3"];
    let tuned = run(Mpirun(2), root.path(), "tuned", &other).resume(from);
    let ended = flagged(&tuned, "--weights-only").succeeded();
    assert!(ended.stdout.contains("at step 0 from"), "{ended}");
    let files = tuned.files();
    assert_eq!(files.numbers("metrics.jsonl", "step"), [1.0, 2.0, 3.0]);
    // It saved at once, since a restart reads its own directory only, and can resume from there.
    let parameters = |files: &RunFiles, step| {
        let all = files.tensors(step);
        all.into_iter().filter(|(name, _)| name.ends_with("part 0")).collect::<Vec<_>>()
    };
    assert_eq!(parameters(&files, 0), parameters(&base, STEPS));
    let whole = RunFiles(root.path().join("whole"));
    copy(&files.0, &whole.0);
    std::fs::remove_dir_all(files.checkpoint(3)).unwrap();
    run(Alone, root.path(), "tuned", &other).resume("auto").succeeds();
    files.same_as(&whole, 3, "weights alone, then killed");
    // Killed even before that, it begins at the given checkpoint, not at random weights.
    for step in [0, 3] {
        std::fs::remove_dir_all(files.checkpoint(step)).unwrap();
    }
    let ended = run(Mpirun(2), root.path(), "tuned", &other).resume("auto").ends().succeeded();
    assert!(
        ended.stdout.contains("at step 0 from") && ended.stdout.contains("base/checkpoints"),
        "{ended}"
    );
    files.same_as(&whole, 3, "weights alone, then killed before its first save");
    // With both flags, every restart of a job script would begin the run again.
    let ended = flagged(&run(Alone, root.path(), "tuned", &other).resume("auto"), "--weights-only");
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("--resume auto alone afterwards"), "{ended}");
}

#[test]
fn the_optimizer_state_can_be_skipped() {
    let root = tempfile::tempdir().unwrap();
    let base = whole(Alone, &[]);
    let from = base.checkpoint(6);
    let asked = run(Mpirun(2), root.path(), "fresh", &["optimizer.kind=sgd"])
        .resume(from.to_str().unwrap());
    let ended = asked.ends();
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stderr.contains("checkpoint of another optimizer")
            && ended.stderr.contains("--skip-optimizer"),
        "{ended}"
    );
    flagged(&asked, "--skip-optimizer").succeeded();
    let files = asked.files();
    assert_eq!(files.numbers("metrics.jsonl", "step"), [7.0, 8.0, 9.0]);
    let manifest = Reader::open(&files.checkpoint(STEPS)).unwrap().manifest().clone();
    assert_eq!((manifest.step, manifest.updates, manifest.position), (9, 3, 9 * 16));
}

/// Imports a text as four training shards and one for validation. Letters from `from` on differ.
fn import(folder: &Path, name: &str, from: usize) -> PathBuf {
    let input = folder.join("text");
    let out = folder.join(name);
    let letter = |i: usize| char::from(b'a' + ((i * i + i / 7 + usize::from(i >= from)) % 7) as u8);
    std::fs::write(&input, (0..4000).map(letter).collect::<String>()).unwrap();
    let mut import = ImportText::new(input, TokenizerKind::Char, &out);
    (import.to.shards, import.to.val_fraction) = (4, 0.2);
    import_text(&import).unwrap();
    out
}

#[test]
fn changed_data_is_refused_unless_it_is_meant() {
    let root = tempfile::tempdir().unwrap();
    let data = import(root.path(), "data", usize::MAX);
    // The third training shard has other letters.
    let other = import(root.path(), "other", 2000);
    let at = |path: &Path| format!("data.path={}", path.display());
    let reference = run(Alone, root.path(), "reference", &[&at(&data)]).succeeds();
    let resumed = |transport, name: &str, path: &Path| {
        interrupted(&reference, 6, &root.path().join(name));
        run(transport, root.path(), name, &[&at(path)]).resume("auto")
    };

    // The same shards at another path are the same data.
    let moved = root.path().join("moved");
    copy(&data, &moved);
    resumed(Mpirun(2), "moved-run", &moved).succeeds().same_as(
        &reference,
        STEPS,
        "the data was moved",
    );

    for transport in [Alone, Mpirun(2)] {
        let name = format!("refused-{transport:?}");
        let ended = resumed(transport, &name, &other).ends();
        assert_eq!(ended.code(), 2, "{ended}");
        let message = "step-00000006: the training data has changed: train-00002.h5 has other content\nhint: ";
        assert_eq!(ended.stderr.matches(message).count(), 1, "{ended}");
        assert!(ended.stderr.contains("--allow-changed-data"), "{ended}");
    }
    let from = reference.checkpoint(6);
    let branch = run(Alone, root.path(), "branch", &[&at(&other)]).resume(from.to_str().unwrap());
    assert_eq!(flagged(&branch, "--skip-optimizer").code(), 2);
    // A new run from the weights alone may use other data.
    flagged(
        &run(Alone, root.path(), "tuned", &[&at(&other)]).resume(from.to_str().unwrap()),
        "--weights-only",
    )
    .succeeded();

    let meant = resumed(Mpirun(2), "meant", &other);
    let ended = flagged(&meant, "--allow-changed-data").succeeded();
    assert!(
        ended.stderr.contains("other training data: train-00002.h5 has other content"),
        "{ended}"
    );
    let files = meant.files();
    let changed = |files: &RunFiles, step| {
        Reader::open(&files.checkpoint(step)).unwrap().manifest().data.clone().unwrap()
    };
    let before = changed(&reference, STEPS);
    let after = changed(&files, STEPS);
    assert!(before.changes.is_empty() && before.fingerprint != after.fingerprint);
    let [change] = &after.changes[..] else { panic!("{:?}", after.changes) };
    assert_eq!((change.step, &change.what[..]), (6, "train-00002.h5 has other content"));
    assert_eq!(change.before, before.fingerprint.digest());
    let card = json(&files.path("run.json"));
    assert_eq!(card["data"], after.fingerprint.digest().as_str());
    assert_eq!(card["data_changes"][0]["step"], 6);
    // From then on this is its data, without a flag or another warning.
    let more =
        run(Alone, root.path(), "meant", &[&at(&other), "run.steps=12"]).resume("auto").succeeds();
    assert_eq!(changed(&more, 12).changes.len(), 1);
    let shown =
        finish(&mut program(["checkpoint", "inspect", more.checkpoint(12).to_str().unwrap()]))
            .succeeded();
    assert!(shown.stdout.contains(" samples of 4 shards"), "{shown}");
    assert!(
        shown.stdout.contains("until step 6 ")
            && shown.stdout.contains("train-00002.h5 has other content"),
        "{shown}"
    );
}

/// Imports a text of `tokens` letters as training shards, with none for validation.
fn without_validation(root: &Path, tokens: usize) -> PathBuf {
    let input = root.join("text");
    let out = root.join("only-train");
    std::fs::write(
        &input,
        (0..tokens).map(|i| char::from(b'a' + (i * i % 7) as u8)).collect::<String>(),
    )
    .unwrap();
    let mut import = ImportText::new(input, TokenizerKind::Char, &out);
    (import.to.shards, import.to.val_fraction) = (2, 0.0);
    import_text(&import).unwrap();
    out
}

/// Without validation data nothing is evaluated, and the best checkpoint is the one with the lowest
/// mean training loss of an epoch.
#[test]
fn a_run_needs_no_validation_data() {
    let root = tempfile::tempdir().unwrap();
    // The text has 62 windows of 16 ids, so an epoch is four steps.
    let data = format!("data.path={}", without_validation(root.path(), 1000).display());
    let settings = [
        &data[..],
        "checkpoint.keep=1",
        "checkpoint.keep_best=1",
        "optimizer.lr=0.3",
        "lr_schedule.warmup=0",
    ];
    let reference = run(Mpirun(2), root.path(), "reference", &settings);
    let ended = reference.ends().succeeded();
    assert!(
        ended.stdout.contains("62 training samples (1,000 tokens), no validation data"),
        "{ended}"
    );
    assert!(!ended.stdout.contains("validation loss"), "{ended}");
    let files = reference.files();
    let losses: Vec<f64> = files
        .text("metrics.jsonl")
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap()
        })
        .collect();
    let found: Vec<serde_json::Value> =
        files.text("eval.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps: Vec<u64> = found.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [3, 6, 9]);
    let mut best = (f64::INFINITY, 0);
    for (line, step) in found.iter().zip(steps) {
        let epoch = &losses[(step as usize).saturating_sub(4)..step as usize];
        let mean = epoch.iter().sum::<f64>() / epoch.len() as f64;
        assert_eq!(
            (line["split"].as_str(), line["loss"].as_f64()),
            (Some("training"), Some(mean)),
            "{line}"
        );
        best = if mean < best.0 { (mean, step) } else { best };
    }
    let link = std::fs::read_link(files.path("checkpoints/best")).unwrap();
    assert_eq!(link.to_str(), Some(&format!("step-{:08}", best.1)[..]), "{found:?}");
    assert!(files.checkpoint(best.1).exists());
    let listed =
        finish(&mut program(["checkpoint", "list", files.0.to_str().unwrap()])).succeeded();
    assert!(listed.stdout.contains("training loss"), "{listed}");

    let all = run(Alone, root.path(), "all", &[&settings[..], &["checkpoint.keep=9"]].concat())
        .succeeds();
    for (name, transport) in [("resumed-alone", Alone), ("resumed", Mpirun(2))] {
        interrupted(&all, 6, &root.path().join(name));
        let again =
            run(transport, root.path(), name, &[&settings[..], &["checkpoint.keep=9"]].concat())
                .resume("auto");
        let again = again.succeeds();
        again.same_as(&all, STEPS, name);
        assert_eq!(again.evaluations(), all.evaluations());
    }

    for (settings, message) in [
        (&["eval.patience=2"][..], "has no validation data: eval.patience requires it\nhint: "),
        (&["data.validation=test-*.h5"], "matches test-*.h5\nhint: "),
    ] {
        let ended =
            run(Mpirun(2), root.path(), "refused", &[&[&data[..]], settings].concat()).ends();
        assert_eq!((ended.code(), ended.stderr.matches(message).count()), (2, 1), "{ended}");
    }
    let evaluator = finish(&mut program(["eval", "--run", files.0.to_str().unwrap()]));
    assert_ne!(evaluator.code(), 0, "{evaluator}");
    assert_eq!(
        evaluator.stderr.matches("has no validation data: evaluation requires it").count(),
        1,
        "{evaluator}"
    );
}

/// A fraction of the samples is kept for validation. Another fraction counts as other data.
#[test]
fn a_fraction_of_the_samples_is_for_validation() {
    let root = tempfile::tempdir().unwrap();
    let data = format!("data.path={}", without_validation(root.path(), 1000).display());
    let of = |transport, name: &str, fraction: &str| {
        run(
            transport,
            root.path(),
            name,
            &[&data, &format!("data.val_fraction={fraction}"), "eval.samples=6"],
        )
    };
    let reference = of(Alone, "reference", "0.1");
    let ended = reference.ends().succeeded();
    assert!(ended.stdout.contains("56 training samples (903 tokens), 6 for validation"), "{ended}");
    assert!(ended.stdout.contains("validation loss"), "{ended}");
    // The same samples on any ranks.
    of(Mpirun(2), "two", "0.1").succeeds().same_as(&reference.files(), STEPS, "two ranks");
    interrupted(&reference.files(), 6, &root.path().join("other"));
    let ended = of(Mpirun(2), "other", "0.2").resume("auto").ends();
    let message =
        "the training data has changed: data.val_fraction = 0.2, trained with 0.1\nhint: ";
    assert_eq!((ended.code(), ended.stderr.matches(message).count()), (2, 1), "{ended}");
    // Validation shards exclude a fraction.
    let ended = run(Alone, root.path(), "both", &["data.val_fraction=0.1"]).ends();
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stderr.contains("data.val_fraction = 0.1, but ")
            && ended.stderr.contains("has validation shards"),
        "{ended}"
    );
}

/// An evaluation asks for early stopping, and the run is killed before it stops.
#[test]
fn a_stop_survives_a_kill() {
    let root = tempfile::tempdir().unwrap();
    // A huge learning rate keeps the loss from falling.
    let settings = ["run.steps=90", "optimizer.lr=0.5", "eval.patience=1"];
    let reference = run(Alone, root.path(), "reference", &settings).succeeds();
    let steps = reference.steps().len() as u64;
    assert!(steps < 90 && steps.is_multiple_of(3), "stopped at an evaluation: {steps}");
    assert!(
        reference.text("END").contains("no validation loss lower"),
        "{}",
        reference.text("END")
    );
    for (transport, name, saved) in [(Mpirun(2), "before", steps - 3), (Alone, "after", steps)] {
        let files = interrupted(&reference, saved, &root.path().join(name));
        if saved < steps {
            let _ = std::fs::remove_dir_all(files.checkpoint(steps));
        }
        run(transport, root.path(), name, &settings).resume("auto").succeeds();
        files.same_as(&reference, steps, &format!("killed {name} the last save"));
        assert!(files.text("END").contains("no validation loss lower"), "{}", files.text("END"));
        // Once stopped, it does not continue.
        run(Alone, root.path(), name, &settings).resume("auto").succeeds();
        assert_eq!(
            (files.steps().len(), files.evaluations().len()),
            (steps as usize, steps as usize / 3)
        );
    }
}

#[test]
fn a_finished_run_resumes_to_itself() {
    let root = tempfile::tempdir().unwrap();
    let asked = run(Alone, root.path(), "x", &["parallel.zero=0"]);
    let files = asked.succeeds();
    let steps = files.steps();
    let evaluations = files.evaluations();
    let tensors = files.tensors(STEPS);
    let written = files.checkpoint(STEPS).metadata().unwrap().modified().unwrap();
    asked.clone().resume("auto").succeeds();
    assert_eq!((files.steps(), files.evaluations()), (steps.clone(), evaluations));
    assert_eq!(files.checkpoint(STEPS).metadata().unwrap().modified().unwrap(), written);
    assert_eq!(files.tensors(STEPS), tensors);
    // Fewer steps than it has done are refused.
    let ended = run(Alone, root.path(), "x", &["run.steps=5"]).resume("auto").ends();
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("at step 9, beyond run.steps = 5"), "{ended}");
    assert_eq!(files.steps(), steps);
    assert_eq!(
        json(&files.path("END"))["status"],
        "finished",
        "a refused start must not change the run"
    );
    // More steps continue it.
    let files = run(Alone, root.path(), "x", &["run.steps=12"]).resume("auto").succeeds();
    assert_eq!(files.numbers("metrics.jsonl", "step"), (1..=12).map(f64::from).collect::<Vec<_>>());
    assert_eq!(files.numbers("eval.jsonl", "step"), [3.0, 6.0, 9.0, 12.0]);
}

#[test]
fn a_checkpoint_with_a_damaged_manifest_is_skipped() {
    let root = tempfile::tempdir().unwrap();
    let reference = whole(Alone, &[]);
    for (i, damage) in ["", "{\"version\": 1, \"step\": 6", "not JSON"].into_iter().enumerate() {
        let name = format!("damaged-{i}");
        let files = interrupted(&reference, 6, &root.path().join(&name));
        std::fs::write(files.checkpoint(6).join("manifest.json"), damage).unwrap();
        let resumed = run(Mpirun(2), root.path(), &name, &[]).resume("auto");
        let ended = resumed.ends().succeeded();
        let warnings: Vec<_> =
            ended.stderr.lines().filter(|line| line.starts_with("warn: ")).collect();
        assert_eq!(warnings.len(), 1, "{ended}");
        assert!(
            warnings[0].contains("skipping") && warnings[0].contains("step-00000006"),
            "{ended}"
        );
        assert!(ended.stdout.contains("at step 3 from"), "{ended}");
        files.same_as(&reference, STEPS, "after a damaged manifest");
    }
}

/// Panics unless a job ended with exit code 2, one error with these words, and a hint.
#[track_caller]
fn refuses(run: &Run, words: &[&str]) {
    let ended = run.ends();
    assert_eq!(ended.code(), 2, "{ended}");
    assert_eq!(ended.stderr.matches("error: ").count(), 1, "{ended}");
    assert!(ended.stderr.contains("\nhint: "), "{ended}");
    for word in words {
        assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}");
    }
}

#[test]
fn flipped_bits_are_found_and_named() {
    let root = tempfile::tempdir().unwrap();
    let whole = whole(Mpirun(2), &["parallel.zero=1"]);
    let files = interrupted(&whole, 6, &root.path().join("y"));
    let damaged = files.checkpoint(6).join("rank-00001.h5");
    // Flip a bit in the middle of the values of one tensor.
    let (offset, tensor) = {
        let file = hdf5::File::open(&damaged).unwrap();
        let names = file.group("params").unwrap().member_names().unwrap();
        let name = names.iter().find(|name| name.contains("mlp.c_proj.weight")).unwrap().clone();
        let dataset = file.dataset(&format!("params/{name}")).unwrap();
        (dataset.offset().unwrap() + dataset.size() as u64 * 2, name)
    };
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&damaged).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 4], offset).unwrap();
    drop(file);

    // The run resumes from the previous checkpoint, with a warning.
    let all = |transport, files: &RunFiles, why: &str| {
        let name = files.0.file_name().unwrap().to_str().unwrap();
        let ended = run(transport, root.path(), name, &[]).resume("auto").ends().succeeded();
        assert!(ended.stdout.contains("at step 3 from"), "{ended}");
        let warnings: Vec<_> =
            ended.stderr.lines().filter(|line| line.starts_with("warn: ")).collect();
        assert_eq!(warnings.len(), 1, "{ended}");
        assert!(
            warnings[0].contains("skipping") && warnings[0].contains("step-00000006/rank-00001.h5"),
            "{ended}"
        );
        assert!(warnings[0].contains(why), "{ended}");
        files.same_as(&whole, STEPS, why);
    };
    let before = RunFiles(root.path().join("before"));
    copy(&files.0, &before.0);
    for (i, transport) in [Alone, Mpirun(2), Simulate(2)].into_iter().enumerate() {
        let copied = RunFiles(root.path().join(format!("copy-{i}")));
        copy(&before.0, &copied.0);
        all(transport, &copied, &format!("/params/{tensor}"));
    }
    // If the damaged checkpoint is given explicitly, it is refused and nothing is changed.
    let steps = files.steps();
    let damaged_one = files.checkpoint(6);
    let named = run(Alone, root.path(), "z", &[]).resume(damaged_one.to_str().unwrap());
    refuses(
        &named,
        &["step-00000006/rank-00001.h5", &format!("/params/{tensor}"), "older checkpoint"],
    );
    assert_eq!(files.steps(), steps);

    // A bit of HDF5's metadata, a truncated file, and a missing file.
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path));
    let damages: [Damage<'_>; 3] = [
        ("HDF5 structure: checksum", &|path| {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
            file.write_all_at(&[0xff], 12).unwrap();
        }),
        ("5000 bytes where the manifest says", &|path| {
            std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(5000).unwrap();
        }),
        ("cannot open", &|path| std::fs::remove_file(path).unwrap()),
    ];
    for (i, (why, damage)) in damages.into_iter().enumerate() {
        let copied = RunFiles(root.path().join(format!("damage-{i}")));
        interrupted(&whole, 6, &copied.0);
        damage(&copied.checkpoint(6).join("rank-00001.h5"));
        all(Mpirun(2), &copied, why);
    }
    // If no checkpoint is intact, the run does not start over silently.
    let none = interrupted(&whole, 3, &root.path().join("none"));
    std::fs::remove_file(none.checkpoint(3).join("rank-00000.h5")).unwrap();
    let resumed = run(Alone, root.path(), "none", &[]).resume("auto");
    refuses(&resumed, &["none of 1 checkpoints is intact", "step-00000003/rank-00000.h5"]);
}

#[test]
fn a_checkpoint_of_another_model_names_the_tensor() {
    let root = tempfile::tempdir().unwrap();
    let files = run(Alone, root.path(), "x", &[]).copied();
    let latest = files.path("checkpoints/latest");
    let latest = latest.to_str().unwrap();
    let steps = files.steps();
    let config = files.text("config.toml");
    for (setting, words) in [
        ("model.width=64", ["wte.weight is [65, 32] there", "[65, 64] here"]),
        ("model.context=8", ["wpe.weight is [16, 32] there", "[8, 32] here"]),
        ("model.layers=3", ["it has no tensor h.2.", "another model"]),
        ("model.layers=1", ["tensors, the model", "another model"]),
        ("optimizer.kind=sgd", ["its optimizer state is [\"m\", \"v\"]", "[\"momentum\"]"]),
    ] {
        refuses(&run(Alone, root.path(), "y", &[setting]).resume(latest), &words);
        refuses(&run(Alone, root.path(), "x", &[setting]).resume("auto"), &words);
    }
    refuses(
        &run(Mpirun(2), root.path(), "y", &["model.width=64"]).resume(latest),
        &["wte.weight is [65, 32] there"],
    );
    assert_eq!((files.steps(), files.text("config.toml")), (steps, config));
    // A failed start leaves no directory.
    assert!(!root.path().join("y").exists());
    run(Alone, root.path(), "y", &[]).succeeds();
}

/// A checkpoint that cannot be read may be intact, so it is neither skipped nor replaced later.
/// Even root cannot read a link to itself.
#[test]
fn an_unreadable_checkpoint_is_not_damaged() {
    let root = tempfile::tempdir().unwrap();
    let whole = whole(Mpirun(2), &["parallel.zero=1"]);
    for (i, (transport, name)) in [
        (Alone, "manifest.json"),
        (Mpirun(2), "rank-00001.h5"),
        (Simulate(2), "rank-00000.h5"),
        (Alone, "manifest.crc32"),
    ]
    .into_iter()
    .enumerate()
    {
        let files = interrupted(&whole, 6, &root.path().join(format!("x-{i}")));
        let file = files.checkpoint(6).join(name);
        let aside = root.path().join(format!("aside-{i}"));
        std::fs::rename(&file, &aside).unwrap();
        std::os::unix::fs::symlink(&file, &file).unwrap();
        let asked = run(transport, root.path(), &format!("x-{i}"), &[]).resume("auto");
        let ended = asked.ends();
        assert_eq!((ended.code(), ended.stderr.matches("error: ").count()), (2, 1), "{ended}");
        assert!(ended.stderr.matches("trying again").count() >= 3, "{ended}");
        assert!(
            ended.stderr.contains(&format!("step-00000006/{name}: Too many levels")),
            "{ended}"
        );
        assert!(ended.stderr.contains("\nhint: ") && !ended.stderr.contains("skipping"), "{ended}");
        // Once it can be read again, nothing is lost.
        std::fs::remove_file(&file).unwrap();
        std::fs::rename(&aside, &file).unwrap();
        asked.succeeds().same_as(&whole, STEPS, name);
    }
}

/// A newer program wrote the checkpoint, and can resume from it.
#[test]
fn a_newer_format_is_refused_rather_than_skipped() {
    let root = tempfile::tempdir().unwrap();
    let whole = whole(Alone, &[]);
    for (i, (from, to, words)) in [
        ("\"version\":3", "\"version\":9", "format version 9 is newer than 3"),
        ("\"beta1\"", "\"beta_one\"", "unknown field `beta_one`"),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("x-{i}");
        let files = interrupted(&whole, 6, &root.path().join(&name));
        let manifest = files.checkpoint(6).join("manifest.json");
        let text = std::fs::read_to_string(&manifest).unwrap().replacen(from, to, 1);
        let seal = format!("{:08x}  manifest.json\n", crc32fast::hash(text.as_bytes()));
        std::fs::write(&manifest, text).unwrap();
        std::fs::write(manifest.with_file_name("manifest.crc32"), seal).unwrap();
        let before = files.steps();
        refuses(
            &run(Mpirun(2), root.path(), &name, &[]).resume("auto"),
            &["step-00000006/manifest.json", words],
        );
        assert_eq!(files.steps(), before);
    }
}

#[test]
fn resuming_with_other_settings_warns() {
    let root = tempfile::tempdir().unwrap();
    let whole = whole(Mpirun(2), &["parallel.zero=1"]);
    let warnings = |name: &str, transport, more: &[&str]| {
        interrupted(&whole, 6, &root.path().join(name));
        let ended = run(transport, root.path(), name, more).resume("auto").ends().succeeded();
        ended
            .stderr
            .lines()
            .filter(|line| line.starts_with("warn: "))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let warned = warnings(
        "a",
        Mpirun(2),
        &["loss.label_smoothing=0.5", "model.dropout=0.5", "parallel.virtual_ranks=4"],
    );
    assert_eq!(warned.len(), 2, "{warned:?}");
    assert!(warned[0].contains(
        "another configuration: loss.label_smoothing was 0.0, is 0.5; model.dropout was 0.1"
    ));
    assert!(
        warned[1].contains("in their last bits: ")
            && warned[1].contains("parallel.virtual_ranks was 8, is 4"),
        "{warned:?}"
    );
    // Another layout gives no warning.
    assert_eq!(warnings("b", Alone, &[]), [""; 0]);
    let log = RunFiles(root.path().join("b")).text("logs/rank-00000.log");
    assert!(
        log.contains("another layout, which changes no numbers: ")
            && log.contains("parallel.zero was 1, is 0")
    );
}

#[test]
fn a_killed_rank_ends_the_job_and_the_run_continues() {
    const LONG: u64 = 400;
    let root = tempfile::tempdir().unwrap();
    let settings = ["run.steps=400", "checkpoint.every=20", "eval.every=0", "parallel.zero=2"];
    let reference = run(Alone, root.path(), "reference", &settings).succeeds();

    let asked = run(Mpirun(2), root.path(), "x", &settings);
    let files = asked.files();
    let mut job = start(&mut asked.command());
    let begun = Instant::now();
    while !files.checkpoint(20).exists() {
        assert!(job.runs() && begun.elapsed() < LIMIT, "no checkpoint of step 20");
        std::thread::sleep(Duration::from_millis(2));
    }
    let ranks = processes(asked.root.to_str().unwrap());
    send(ranks.into_iter().find(|pid| rank_of(*pid) == Some(1)).unwrap(), libc::SIGKILL);
    let ended = job.finish(LIMIT);
    assert!(!ended.status.success(), "{ended}");
    assert!(
        !files.path("run.json").exists() && !files.checkpoint(LONG).exists(),
        "the run had ended: {ended}"
    );

    asked.resume("auto").succeeds().same_as(&reference, LONG, "after a rank was killed");
}

/// Leftovers of a kill between two renames are not taken for a checkpoint, and are removed.
#[test]
fn leftovers_of_a_kill_are_ignored() {
    let root = tempfile::tempdir().unwrap();
    let reference = whole(Alone, &[]);
    let files = interrupted(&reference, 3, &root.path().join("x"));
    let checkpoints = files.path("checkpoints");
    copy(&files.checkpoint(3), &checkpoints.join("step-00000006.tmp"));
    std::fs::create_dir(checkpoints.join(".trash-step-00000003")).unwrap();
    std::os::unix::fs::symlink("step-00000003", checkpoints.join(".latest.tmp")).unwrap();
    // The last line is incomplete.
    let torn = files.text("metrics.jsonl");
    std::fs::write(files.path("metrics.jsonl"), &torn[..torn.len() - 30]).unwrap();
    run(Mpirun(2), root.path(), "x", &[]).resume("auto").succeeds();
    files.same_as(&reference, STEPS, "after a kill while saving");
    assert!(
        !checkpoints.join("step-00000006.tmp").exists()
            && !checkpoints.join(".latest.tmp").exists()
    );
    assert_eq!(Reader::open(&files.checkpoint(6)).unwrap().manifest().step, 6);
}

/// A run that reduced gradients once per step, with a virtual rank for each rank, goes on so, although
/// a new one reduces them after each micro-batch, with a virtual rank for each of those.
#[test]
fn the_default_reduction_is_that_of_the_run_so_far() {
    let root = tempfile::tempdir().unwrap();
    let settings = [
        "parallel.zero=2",
        "batch.micro=1",
        "run.steps=6",
        "lr_schedule.decay=6",
        "checkpoint.every=2",
        "checkpoint.keep=9",
    ];
    let on = |name: &str, more: &[&str]| {
        Run::new(Mpirun(4), root.path(), name, &[&settings, more].concat())
    };
    let reduction = |files: &RunFiles| {
        let record = json(&files.path("run.json"))["reduce"].clone();
        let manifest = json(&files.checkpoint(6).join("manifest.json"));
        let parallel = &manifest["config"]["parallel"];
        assert_eq!(parallel["reduce"], record);
        (record.as_str().unwrap().to_owned(), parallel["virtual_ranks"].as_u64().unwrap())
    };
    let new = on("new", &[]).succeeds();
    assert_eq!(reduction(&new), ("micro".into(), 8));
    let whole = on("whole", &["parallel.reduce=step"]).succeeds();
    assert_eq!(reduction(&whole), ("step".into(), 4));
    on("resumed", &["parallel.reduce=step", "run.steps=4"]).succeeds();
    let resumed = on("resumed", &[]).resume("auto").succeeds();
    assert_eq!(reduction(&resumed), ("step".into(), 4));
    // A reduction that is set is used, also where it adds in another order.
    let asked =
        on("asked", &["parallel.reduce=micro"]).resume(whole.checkpoint(4).to_str().unwrap());
    assert_eq!(reduction(&asked.succeeds()), ("micro".into(), 8));
    // So is the order of a branch that ended before its first save.
    let branch =
        on("branch", &["checkpoint.every=0"]).resume(whole.checkpoint(4).to_str().unwrap());
    assert_eq!(reduction(&branch.succeeds()), ("step".into(), 4));
}
