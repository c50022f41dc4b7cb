//! The batch of each rank, learning rates by batch, and the placement of blocks.

use hpctrain_testkit::launch::Transport::{Alone, Simulate};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, RunFiles};

/// Returns a key of the configuration that a run has written.
fn written(text: &str, section: &str, key: &str) -> Option<toml::Value> {
    let config: toml::Table = toml::from_str(text).unwrap();
    config[section].as_table().unwrap().get(key).cloned()
}

/// Returns the text of all logs of a run.
fn logs(files: &RunFiles) -> String {
    let logs = files.path("logs").read_dir().unwrap();
    logs.filter_map(|log| std::fs::read_to_string(log.unwrap().path()).ok()).collect()
}

/// Settings without `batch.global`, which the settings of small runs have.
fn of_rank(mut run: Run, per_rank: u64) -> Vec<String> {
    run.settings.push("run.name=unnamed".into());
    run.command()
        .get_args()
        .map(|arg| arg.to_str().unwrap().to_owned())
        .map(|arg| match &arg[..] {
            "batch.global=8" => format!("batch.per_rank={per_rank}"),
            _ => arg,
        })
        .collect()
}

#[test]
fn a_resumed_run_keeps_the_batch_that_its_ranks_gave() {
    let root = tempfile::tempdir().unwrap();
    let run = |transport, more: &[&str]| {
        // There is no rate for the batch that one rank would have.
        let rates = "lr_schedule.lr_by_batch={ 10 = 1e-3, 20 = 2e-3 }";
        let settings =
            [&["checkpoint.every=3", "lr_schedule.kind=constant", rates][..], more].concat();
        Run::new(transport, root.path(), "run", &settings)
    };
    let first = run(Simulate(2), &["run.steps=3"]);
    let ended = finish(&mut program(of_rank(first, 5))).succeeded();
    assert!(ended.stdout.contains(", batch.per_rank = 5 on 2 data-parallel ranks\n"), "{ended}");
    let files = RunFiles(root.path().join("unnamed"));
    let text = files.text("config.toml");
    assert_eq!(written(&text, "batch", "global"), Some(10.into()));
    assert_eq!(written(&text, "batch", "per_rank"), Some(0.into()));
    // One rank would have a batch of 5.
    let resumed = run(Alone, &["run.steps=6"]).resume("auto");
    let ended = finish(&mut program(of_rank(resumed, 5))).succeeded();
    let note =
        "batch.global = 10 of the run is kept: batch.per_rank = 5 would make it 5 on these ranks";
    assert!(ended.stderr.contains(note), "{ended}");
    assert_eq!(written(&files.text("config.toml"), "batch", "global"), Some(10.into()));
    let tokens = files.numbers("metrics.jsonl", "tokens");
    assert_eq!(tokens, (1..=6).map(|step| f64::from(160 * step)).collect::<Vec<_>>());
    // The same numbers as with the batch of all ranks.
    let whole = Run::new(
        Simulate(2),
        root.path(),
        "whole",
        &[
            "batch.global=10",
            "checkpoint.every=3",
            "lr_schedule.kind=constant",
            "lr_schedule.lr_by_batch.10=1e-3",
        ],
    );
    let losses = |files: &RunFiles| files.numbers("metrics.jsonl", "loss");
    assert_eq!(losses(&files)[..3], losses(&whole.succeeds())[..3]);
}

/// An unnamed run is found again, although another number of ranks would give another batch.
#[test]
fn an_unnamed_run_is_resumed_with_its_batch() {
    let root = tempfile::tempdir().unwrap();
    let start = |transport, steps: &str| {
        let run = Run::new(transport, root.path(), "x", &[steps, "lr_schedule.kind=constant"]);
        let args = of_rank(run.resume("auto"), 4);
        let named: Vec<usize> = args
            .iter()
            .enumerate()
            .filter(|(_, a)| a.starts_with("run.name="))
            .map(|(i, _)| i)
            .collect();
        let args = args
            .iter()
            .enumerate()
            .filter(|(i, _)| !named.iter().any(|name| *i == *name || *i + 1 == *name))
            .map(|(_, arg)| arg);
        finish(&mut program(args)).succeeded()
    };
    start(Simulate(2), "run.steps=2");
    start(Alone, "run.steps=4");
    let runs: Vec<_> =
        root.path().read_dir().unwrap().map(|run| run.unwrap().file_name()).collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    let files = RunFiles(root.path().join(&runs[0]));
    assert_eq!(files.numbers("metrics.jsonl", "tokens"), [128.0, 256.0, 384.0, 512.0]);
}

#[test]
fn the_batch_of_a_rank_is_refused_where_it_means_nothing() {
    let per_rank = ["--set", "batch.per_rank=4"];
    let both = finish(program(["train", "--set", "batch.global=8"]).args(per_rank));
    assert_eq!(both.code(), 2);
    assert!(both.stderr.contains("batch.global and batch.per_rank are both given"), "{both}");
    for (command, why) in [
        (&["plan", "--ranks", "4"][..], "but the planner compares layouts with the same batch"),
        (&["verify"], "but verify compares numbers of ranks with the same batch"),
        (&["train", "--set", "parallel.layout=auto"], "but the planner compares layouts"),
        (
            &["simulate", "--ranks", "2", "--servers", "1"],
            "but parameter servers do not support it",
        ),
    ] {
        let ended = finish(program(command).args(per_rank));
        assert_eq!(ended.code(), 2, "{ended}");
        let message = format!("batch.per_rank = 4, {why}");
        assert!(ended.stderr.contains(&message), "{ended}");
        assert!(ended.stderr.contains("hint: set batch.global"), "{ended}");
    }
    let alias = ["config", "show", "--ranks", "3", "--set", "batch.per_replica=4"];
    let shown = finish(&mut program(alias)).succeeded();
    assert_eq!(written(&shown.stdout, "batch", "global"), Some(12.into()));
    let meant = finish(&mut program(["train", "--set", "batch.per_device_train_batch_size=4"]));
    assert!(meant.stderr.contains("did you mean `batch.per_rank`?"), "{meant}");
}

#[test]
fn the_learning_rate_is_looked_up_by_the_batch() {
    let root = tempfile::tempdir().unwrap();
    let table = "lr_schedule.lr_by_batch={ 8 = 0.02, 16 = 0.03 }";
    let settings = [table, "lr_schedule.kind=constant", "lr_schedule.warmup=0"];
    let run = Run::new(Simulate(2), root.path(), "x", &settings);
    let ended = run.ends().succeeded();
    assert!(
        ended.stdout.contains("peak lr      0.02 = lr_schedule.lr_by_batch of batch.global = 8\n"),
        "{ended}"
    );
    let files = run.files();
    assert_eq!(files.numbers("metrics.jsonl", "lr"), [0.02; 6]);
    // The same run at that rate; a checkpoint with a table is evaluated on any ranks.
    let given = ["optimizer.lr=0.02", "lr_schedule.kind=constant", "lr_schedule.warmup=0"];
    let given = Run::new(Simulate(2), root.path(), "given", &given).succeeds();
    assert_eq!(files.tensors(6), given.tensors(6));
    let checkpoint = files.checkpoint(6);
    finish(program(["eval", "--checkpoint"]).arg(checkpoint)).succeeded();
    let refused = Run::new(Alone, root.path(), "y", &[table, "batch.global=12"]).ends();
    assert_eq!(refused.code(), 2);
    let expected =
        "batch.global = 12, but lr_schedule.lr_by_batch has rates for 8, 16 only\nhint: ";
    assert!(refused.stderr.contains(expected), "{refused}");
    let show = |setting: &str| {
        finish(&mut program(["config", "show", "--set", setting])).succeeded().stdout
    };
    let shown = show("lr_schedule.lr_by_batch.16=0.03");
    let comment = "[lr_schedule]\n# peak: 0.03 = lr_schedule.lr_by_batch of batch.global = 16\n";
    assert!(shown.contains(comment), "{shown}");
    assert!(
        show("lr_schedule.reference_batch=4")
            .contains("\n# peak: 0.004 = optimizer.lr 0.001 × 16 / 4")
    );
    assert!(!show("run.steps=3").contains("# peak"));
    // Servers update by the same table, unless each worker has a separate batch.
    let with_servers = |staleness: &str| {
        let settings = [table, &format!("parameter_server.staleness={staleness}")];
        let name = format!("served-{}", staleness.trim_matches('\''));
        let served = Run::new(Simulate(3), root.path(), &name, &settings);
        (finish(served.command().args(["--servers", "1"])), served.files())
    };
    let (ended, files) = with_servers("0");
    ended.succeeded();
    let highest = files.numbers("metrics.jsonl", "lr").into_iter().fold(0.0, f64::max);
    assert!((highest - 0.02).abs() < 1e-9, "{highest}");
    let (refused, _) = with_servers("'none'");
    let expected = "lr_schedule.lr_by_batch requires parameter_server.staleness = 0";
    assert!(refused.code() == 2 && refused.stderr.contains(expected), "{refused}");
}

#[test]
fn the_placement_of_every_block_is_logged_on_cpus() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["log.placement=true", "parallel.zero=1"];
    let run = Run::new(Simulate(2), root.path(), "x", &settings);
    let ended = run.ends().succeeded();
    assert!(!ended.stdout.contains("no effect"), "{ended}");
    // Ranks that are threads share the file of the first one that opens it.
    let log = logs(&run.files());
    for rank in 0..2 {
        let of_rank = format!(" of rank {rank} (");
        let lines: Vec<&str> = log
            .lines()
            .filter(|line| line.contains("placement: ") && line.contains(&of_rank))
            .collect();
        // The embedding, two blocks, and the head.
        assert!(lines.len() >= 4, "{log}");
        for line in &lines {
            for part in ["parameters ", "gradient ", "optimizer state "] {
                assert!(line.contains(part) && line.contains(" on CPU"), "{line}");
            }
        }
        assert!(lines.iter().any(|line| line.contains(", activations ")), "{log}");
    }
    let silent = Run::new(Alone, root.path(), "silent", &[]).succeeds();
    assert!(!silent.text("logs/rank-00000.log").contains("placement: "));
    let served = Run::new(Simulate(3), root.path(), "served", &["log.placement=true"]);
    finish(served.command().args(["--servers", "1"])).succeeded();
    let log = logs(&served.files());
    assert!(log.contains("placement: ") && log.contains(" on CPU of server "), "{log}");
}
