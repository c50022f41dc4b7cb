//! `hpctrain runs` and `compare`, and the output of all tables as JSON.

use std::path::Path;

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{Alone, Mpirun};
use hpctrain_testkit::launch::{LIMIT, finish, program, send, start};
use hpctrain_testkit::runs::{Run, SMALL};

/// Returns the object that a command prints with `--json`.
#[track_caller]
fn object(args: &[&str]) -> Value {
    let ended = finish(&mut program(args.iter().chain(&["--json"]))).succeeded();
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {ended}"))
}

/// Returns a path as an argument.
fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn runs_stand_side_by_side() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["eval.every=3", "parallel.virtual_ranks=2"];
    let one = Run::new(Alone, root.path(), "one", &settings).succeeds();
    let two = Run::new(Mpirun(2), root.path(), "two", &settings).succeeds();
    let fast =
        Run::new(Alone, root.path(), "fast", &[&settings[..], &["optimizer.lr=0.02"]].concat())
            .succeeds();
    // A run that is training, and is then killed.
    let lives = Run::new(Alone, root.path(), "alive", &["run.steps=100000000", "eval.every=0"]);
    let mut trainer = start(&mut lives.command());
    let state = |name: &str| {
        let listing = object(&["runs", text(root.path())]);
        let run =
            listing["runs"].as_array().unwrap().iter().find(|run| run["name"] == name).cloned();
        run.map_or(Value::Null, |run| run["state"].clone())
    };
    let is_training = || {
        std::fs::read_to_string(lives.files().path("metrics.jsonl"))
            .is_ok_and(|text| !text.is_empty())
    };
    trainer.until("its first step", is_training);
    assert_eq!(state("alive"), "running");
    send(trainer.id(), libc::SIGKILL);
    trainer.finish(LIMIT);
    assert_eq!(state("alive"), "stale");

    let listing = object(&["runs", text(root.path()), "--sort", "best"]);
    let runs = listing["runs"].as_array().unwrap();
    let of = |name: &str| runs.iter().find(|run| run["name"] == name).unwrap();
    assert_eq!(
        (runs.len(), runs[3]["name"].as_str()),
        (4, Some("alive")),
        "it was never evaluated: {listing:#}"
    );
    let best: Vec<f64> = runs[..3].iter().map(|run| run["best_loss"].as_f64().unwrap()).collect();
    assert!(best.is_sorted(), "{best:?}");
    let first = of("one");
    let second = of("two");
    assert_eq!(
        (first["state"].as_str(), first["step"].as_u64(), first["steps"].as_u64()),
        (Some("finished"), Some(6), Some(6))
    );
    assert_eq!((&first["loss"], &first["best_loss"]), (&second["loss"], &second["best_loss"]));
    assert_eq!(
        (second["layout"]["ranks"].as_u64(), second["layout"]["replica"].as_u64()),
        (Some(2), Some(2))
    );
    assert!(
        first["bytes"].as_u64().unwrap() > 100_000 && first["per_second"].as_f64().unwrap() > 0.0
    );
    let table = finish(&mut program(["runs", text(root.path())])).succeeded().stdout;
    assert!(
        table.lines().any(
            |line| line.starts_with("two    finished  6/6  ") && line.contains("  replica 2  ")
        ),
        "{table}"
    );

    // The run on two ranks has the same bits; that with another rate differs from step 1 on.
    let same = object(&["compare", text(&one.0), text(&two.0)]);
    assert_eq!(
        (same["common_steps"].as_u64(), &same["first_difference"]),
        (Some(6), &Value::Null),
        "{same:#}"
    );
    assert_eq!(
        (same["same_data"].as_bool(), same["same_network"].as_bool()),
        (Some(true), Some(true))
    );
    let settings = same["settings"].as_array().unwrap();
    assert!(
        settings.iter().any(|one| one["key"] == "parallel.replica" && one["b"] == "2"),
        "{same:#}"
    );
    let other = object(&["compare", text(&one.0), text(&fast.0)]);
    assert_eq!(other["first_difference"]["step"], 1, "the rate of the first step: {other:#}");
    assert_eq!(other["at_evaluations"].as_array().unwrap().len(), 2);
    let compared =
        finish(&mut program(["compare", text(&one.0), text(&fast.0)])).succeeded().stdout;
    assert!(
        compared.contains("optimizer.lr  0.01  0.02\n")
            && compared.contains("bitwise difference is at step 1: learning rate"),
        "{compared}"
    );

    for (args, words) in [
        (["runs", text(&one.0), "--sort=name"], "one is a run itself"),
        (["runs", "no/such", "--sort=name"], "no/such is not a directory"),
        (["compare", text(&one.0), text(root.path())], "is not a run, but contains runs"),
        (["compare", "no/such", text(&one.0)], "no/such: there is no such directory"),
    ] {
        let ended = finish(&mut program(args));
        assert!(
            ended.code() == 2 && ended.stderr.contains(words) && ended.stderr.contains("hint: "),
            "{ended}"
        );
    }
}

#[test]
fn every_table_is_an_object_for_programs() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Alone, root.path(), "x", &["checkpoint.every=3", "eval.every=3"]).succeeds();
    let at = text(&run.0);
    let list = object(&["checkpoint", "list", at]);
    let saved = &list["checkpoints"].as_array().unwrap()[1];
    assert_eq!(
        (saved["step"].as_u64(), saved["latest"].as_bool(), saved["leased"].as_bool()),
        (Some(6), Some(true), Some(false))
    );
    assert!(saved["loss"].as_f64().is_some() && list["loss_over"] == "validation", "{list:#}");
    let described = object(&["checkpoint", "inspect", at]);
    assert_eq!(
        (described["step"].as_u64(), described["tensors"]["ln_f.weight"][0].as_u64()),
        (Some(6), Some(32))
    );
    let verified = object(&["checkpoint", "verify", at]);
    assert_eq!(
        (verified["damaged"].as_u64(), verified["files"].as_array().unwrap().len()),
        (Some(0), 4)
    );
    let earlier = run.checkpoint(3);
    let compared = finish(&mut program(["checkpoint", "diff", text(&earlier), at, "--json"]));
    let compared_as: Value = serde_json::from_str(&compared.stdout).unwrap();
    let first = &compared_as["differences"][0];
    assert_eq!(
        (compared.code(), &first["what"], &first["name"]),
        (1, &"count".into(), &"step".into()),
        "{compared}"
    );
    let pruned =
        object(&["checkpoint", "prune", at, "--keep", "1", "--keep-best", "0", "--dry-run"]);
    assert_eq!(
        (pruned["removed"][0].as_u64(), pruned["dry_run"].as_bool()),
        (Some(3), Some(true)),
        "{pruned}"
    );

    let input = root.path().join("text.txt");
    std::fs::write(&input, "to be or not to be\n".repeat(50)).unwrap();
    let data = root.path().join("data");
    finish(&mut program(["data", "import", "text", text(&input), "--out", text(&data)]))
        .succeeded();
    let inspected = object(&["data", "inspect", text(&data)]);
    let tokens = &inspected["files"][0]["datasets"][0];
    assert_eq!(
        (tokens["name"].as_str(), tokens["shape"][0].as_u64()),
        (Some("/tokens"), Some(855)),
        "{inspected:#}"
    );
    assert_eq!(object(&["data", "verify", text(&data)])["files"], 2);

    let small: Vec<&str> = SMALL.iter().flat_map(|setting| ["--set", setting]).collect();
    let shown = object(&[&["config", "show"], &small[..]].concat());
    assert_eq!(shown["model"]["width"], 32);
    let summary =
        object(&[&["config", "summary", "--set", "parallel.pipeline=2"], &small[..]].concat());
    assert_eq!(
        (summary["layers"].as_array().unwrap().len(), summary["pipeline"]["ranks"].as_u64()),
        (4, Some(2))
    );
    let layouts = [
        "verify",
        "--ranks",
        "2",
        "--zero",
        "0",
        "--steps",
        "1",
        "--set",
        "parallel.virtual_ranks=2",
    ];
    let verified = object(&[&layouts[..], &small[..]].concat());
    let row = &verified["rows"][0];
    assert_eq!(
        (&verified["agrees"], &row["ranks"], &row["curve"], &row["exact"]),
        (&true.into(), &2.into(), &true.into(), &true.into())
    );
    // `--json` of a command that another module implements.
    assert!(object(&["doctor", "--run-root", text(root.path())])["checks"].is_array());
}
