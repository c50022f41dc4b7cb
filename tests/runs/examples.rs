//! Runs the programs in `examples/`, on one rank and on two. `cargo test` builds them; to run a
//! part of the tests, build them with `cargo build --examples` first.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use hpctrain_testkit::launch::{
    Ended, LIMIT, finish, mpirun, program, start, start_without_waiting,
};
use hpctrain_testkit::runs::{json, tensors};

/// Returns the path of an example, which `cargo` builds next to the tests.
fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is not there: cargo build --examples", path.display());
    path
}

/// Runs an example on one rank, without MPI, or on two.
#[track_caller]
fn run(name: &str, ranks: usize, args: &[&str]) -> Ended {
    let mut command = match ranks {
        1 => Command::new(example(name)),
        ranks => {
            let mut command = mpirun(ranks);
            command.arg(example(name));
            command
        }
    };
    // The bundled text is unpacked into this cache, as with the tests' `mpirun`.
    command.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
    finish(command.args(args))
}

/// Settings of a small GPT whose sums have the same tree on one rank and two.
const SMALL: [&str; 6] = [
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "model.context=16",
    "batch.global=8",
    "parallel.virtual_ranks=2",
];

/// Checks that the output of an example is the same on one rank and on two, and returns it.
#[track_caller]
fn same_on_two(name: &str, settings: &[&str], sharded: &str) -> String {
    let args = [&SMALL[..], settings].concat();
    let one = run(name, 1, &args).succeeded().stdout;
    let two = run(name, 2, &[&args[..], &[sharded]].concat()).succeeded().stdout;
    assert_eq!(one, two);
    one
}

#[test]
fn training_loop() {
    let source = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/training_loop.rs"),
    )
    .unwrap();
    assert!(source.lines().count() < 60, "a custom training loop is short");
    let printed = same_on_two("training_loop", &["run.steps=30"], "parallel.zero=3");
    let loss = |line: &str| -> f64 { line.split_whitespace().nth(3).unwrap().parse().unwrap() };
    let losses: Vec<f64> =
        printed.lines().filter(|line| line.starts_with("step ")).map(loss).collect();
    assert!(losses.len() == 3 && losses[2] < losses[0], "{printed}");
    assert!(printed.contains("validation loss ") && printed.contains("perplexity "), "{printed}");
}

#[test]
fn own_block() {
    let printed = same_on_two("own_block", &["run.steps=20"], "parallel.zero=2");
    for tensor in ["adapter.down.weight", "adapter.up.weight", "input"] {
        assert!(
            printed.lines().any(|line| line.starts_with(tensor) && line.contains(" by backward")),
            "{printed}"
        );
    }
    assert_eq!(printed.lines().filter(|line| line.starts_with("step ")).count(), 4, "{printed}");
}

#[test]
fn own_network() {
    let root = tempfile::tempdir().unwrap();
    let place = format!("run.root={}", root.path().display());
    let of = |name: &str| root.path().join(name);
    let settings = ["checkpoint.every=100", "batch.micro=8", &place];
    let layouts = [
        (1, "one", "parallel.zero=0"),
        (2, "two", "parallel.zero=3"),
        (2, "stages", "parallel.pipeline=2"),
    ];
    let mut last_lines = vec![];
    for (ranks, name, layout) in layouts {
        let name = format!("run.name={name}");
        let more = [&settings[..], &[layout, &name]].concat();
        let ended = run("own_network", ranks, &more).succeeded();
        assert_eq!(
            ended.stdout.lines().filter(|line| line.contains(" by backward")).count(),
            3,
            "{ended}"
        );
        let last = ended.stdout.lines().last().unwrap();
        assert!(
            last.starts_with("step 200: validation loss ") && last.contains("ROC AUC "),
            "{ended}"
        );
        last_lines.push(last.to_owned());
    }
    assert!(last_lines.iter().all(|other| *other == last_lines[0]), "{last_lines:#?}");
    let bits =
        |name: &str, step: u64| tensors(&of(name).join(format!("checkpoints/step-{step:08}")));
    let outputs = |name: &str, step: u64| -> Vec<f32> {
        let file = hdf5::File::open(of(name).join(format!("predictions-{step}.h5"))).unwrap();
        file.dataset("outputs").unwrap().read_raw().unwrap()
    };
    for name in ["two", "stages"] {
        assert_eq!(bits(name, 200), bits("one", 200));
        assert_eq!(outputs(name, 200), outputs("one", 200));
    }
    let records = std::fs::read_to_string(of("one").join("eval.jsonl")).unwrap();
    let evaluated: Value = serde_json::from_str(records.lines().last().unwrap()).unwrap();
    assert!(evaluated["metrics"]["accuracy"].as_f64().unwrap() > 0.9, "{evaluated}");
    // It resumes on other ranks.
    let more =
        [&settings[..], &["run.name=one", "run.steps=220", "parallel.zero=1", "--resume"]].concat();
    run("own_network", 2, &more).succeeded();
    assert_eq!(outputs("one", 220).len(), 310);
    // Only the program itself can build its custom network.
    let refused = finish(&mut program(["eval", "--checkpoint", &of("one").display().to_string()]));
    assert_eq!(refused.code(), 2);
    let wanted = "model.own = \"3 residual blocks of width 16\" names a custom model";
    assert!(
        refused.stderr.contains(wanted) && refused.stderr.contains("hint: use that program"),
        "{refused}"
    );
}

#[test]
fn own_data() {
    let root = tempfile::tempdir().unwrap();
    let place = format!("run.root={}", root.path().display());
    for (ranks, name) in [(1, "run.name=one"), (2, "run.name=two")] {
        run("own_data", ranks, &[&place, name, "run.device=cpu"]).succeeded();
    }
    let of = |name: &str| root.path().join(name);
    let accuracy = |name: &str| {
        let text = std::fs::read_to_string(of(name).join("eval.jsonl")).unwrap();
        let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        last["metrics"]["accuracy"].as_f64().unwrap()
    };
    assert_eq!(accuracy("one"), accuracy("two"));
    assert!(accuracy("one") > 0.9, "{}", accuracy("one"));
    let latest = |name: &str| tensors(&of(name).join("checkpoints/latest"));
    assert_eq!(latest("one"), latest("two"));
    let manifest = json(&of("one").join("checkpoints/latest/manifest.json"));
    assert_eq!(manifest["config"]["data"]["path"], "three spirals");
}

#[test]
fn evaluate_predict() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let table: String =
        (0..500).map(|i| format!("{},{}\n", i as f32 / 250.0 - 1.0, i as f32 / 500.0)).collect();
    std::fs::write(at("table.csv"), format!("x,y\n{table}")).unwrap();
    finish(&mut program([
        "data",
        "import",
        "csv",
        &at("table.csv"),
        "--target",
        "y",
        "--out",
        &at("data"),
    ]))
    .succeeded();
    let settings = [
        "model.kind=layers",
        "model.input=[1]",
        "model.layers=[{kind='dense', units=4}, {kind='tanh'}, {kind='dense', units=1}]",
        "loss.kind=mse",
        "run.steps=20",
        "batch.global=8",
        // The last chunk is short.
        "eval.batch=7",
        "run.name=it",
        &format!("data.path={}", at("data")),
        &format!("run.root={}", at("runs")),
    ];
    let train = settings.iter().flat_map(|setting| ["--set", setting]);
    finish(&mut program(["train"].into_iter().chain(train))).succeeded();
    finish(&mut program([
        "predict",
        "--checkpoint",
        &at("runs/it"),
        "--data",
        &at("data"),
        "--out",
        &at("known.h5"),
    ]))
    .succeeded();

    let outputs = |name: &str| -> Vec<f32> {
        hdf5::File::open(at(name)).unwrap().dataset("outputs").unwrap().read_raw().unwrap()
    };
    let card = json(&folder.path().join("runs/it/run.json"));
    let loss =
        format!("step 20: validation loss {:.4}, mae", card["validation_loss"].as_f64().unwrap());
    for (ranks, out) in [(1, "one.h5"), (2, "two.h5")] {
        let ended =
            run("evaluate_predict", ranks, &[&at("runs/it"), &at("data"), &at(out)]).succeeded();
        assert!(ended.stdout.starts_with(&loss), "{loss}: {ended}");
        assert_eq!(outputs(out), outputs("known.h5"));
    }
    let refused = run("evaluate_predict", 2, &[&at("runs/it")]);
    assert_eq!(refused.code(), 2);
    assert_eq!(
        refused.stderr.matches("error: arguments: a run or checkpoint").count(),
        1,
        "{refused}"
    );
}

#[test]
fn hooks() {
    let root = tempfile::tempdir().unwrap();
    let place = format!("run.root={}", root.path().display());
    let settings =
        ["optimizer.lr=0.01", "lr_schedule.warmup=2", "eval.samples=20", "run.device=cpu", &place];
    for (ranks, name) in [(1, "one"), (2, "two")] {
        let ended =
            run("hooks", ranks, &[&SMALL[..], &settings, &[&format!("run.name={name}")]].concat())
                .succeeded();
        assert!(
            ended.stdout.contains("is enough") && ended.stdout.contains("is saved in "),
            "{ended}"
        );
        assert!(
            json(&root.path().join(name).join("END"))["reason"]
                .as_str()
                .unwrap()
                .ends_with(" is enough")
        );
    }
    let table =
        |name: &str| std::fs::read_to_string(root.path().join(name).join("losses.csv")).unwrap();
    assert_eq!(table("one"), table("two"));
    let steps = table("one").lines().count() as u64 - 1;
    assert_eq!(json(&root.path().join("one/END"))["step"], steps);
    assert!(steps < 300 && steps % 20 == 1, "it ends at the step after an evaluation: {steps}");
}

#[test]
fn own_coordinator() {
    let folder = tempfile::tempdir().unwrap();
    let command = |role: &str| {
        let mut command = Command::new(example("own_coordinator"));
        command.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
        command.arg(role).arg(folder.path());
        command
    };
    let coordinator = start(&mut command("coordinate"));
    let [lost, other] = [(); 2].map(|()| start_without_waiting(&coordinator, &mut command("work")));
    // Its call is rescheduled to the other worker.
    std::thread::sleep(Duration::from_millis(300));
    drop(lost);
    let ended = coordinator.finish(LIMIT).succeeded();
    assert_eq!(ended.stdout.matches("learning rate ").count(), 4, "{ended}");
    assert!(ended.stdout.contains("best: 1e-2") || ended.stdout.contains("best: 1e-3"), "{ended}");
    other.finish(LIMIT).succeeded();
}
