//! Runs the programs in `examples/`, on one rank and on two. `cargo test` builds them; to run a
//! part of the tests, build them with `cargo build --examples` first.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use hpctrain_testkit::launch::{
    Ended, LIMIT, Running, finish, mpirun, processes, program, rank_of, send, start,
    start_without_waiting,
};
use hpctrain_testkit::runs::{json, tensors};
use hpctrain_testkit::simulator::with_simulator;

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
    // A process of the same program evaluates the checkpoints of another one, and finds the same
    // bits.
    let name = "run.name=watched";
    let mut evaluator = Command::new(example("own_network"));
    let evaluator = start(evaluator.args(["--evaluate", &place, name]));
    let mut trainer = Command::new(example("own_network"));
    let more = [&settings[..], &["eval.inline=false", "checkpoint.keep=9", name]].concat();
    start_without_waiting(&evaluator, trainer.args(&more)).finish(LIMIT).succeeded();
    evaluator.finish(LIMIT).succeeded();
    let records = |name: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(of(name).join("eval.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let watched = records("watched");
    let steps: Vec<_> = watched.iter().map(|one| one["step"].as_u64()).collect();
    assert_eq!(steps, [Some(100), Some(200)]);
    assert_eq!(watched[1]["checkpoint"], "step-00000200");
    assert_eq!(watched[1]["loss"], records("one").last().unwrap()["loss"]);
    // It resumes on other ranks.
    let more =
        [&settings[..], &["run.name=one", "run.steps=220", "parallel.zero=1", "--resume"]].concat();
    run("own_network", 2, &more).succeeded();
    assert_eq!(outputs("one", 220).len(), 310);
    // Its tensors can be exported, as they are.
    let export = |format: &str| {
        let [run, out] = [of("one"), of("exported")].map(|path| path.display().to_string());
        finish(&mut program(["checkpoint", "export", &run, "--format", format, "--out", &out]))
    };
    let refused = export("onnx");
    let wanted = "--format onnx is for layer-list models, but this is a custom model";
    assert!(refused.code() == 2 && refused.stderr.contains(wanted), "{refused}");
    export("safetensors").succeeded();
    let bytes = std::fs::read(of("exported/model.safetensors")).unwrap();
    let exported = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for (name, bits) in bits("one", 220) {
        let Some(name) = name.strip_suffix(", part 0") else { continue };
        let found: Vec<u32> = bytemuck::pod_collect_to_vec(exported.tensor(name).unwrap().data());
        assert_eq!(found, bits, "{name}");
    }
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
fn own_loss() {
    let root = tempfile::tempdir().unwrap();
    let place = format!("run.root={}", root.path().display());
    let layouts = [
        (1, "one", "parallel.zero=0"),
        (2, "two", "parallel.zero=3"),
        (4, "four", "parallel.zero=2"),
        (4, "hybrid", "parallel.zero=1 parallel.shard=2"),
        (1, "recomputed", "parallel.recompute=true"),
    ];
    let evaluations = |name: &str| -> Vec<[Value; 2]> {
        let text = std::fs::read_to_string(root.path().join(name).join("eval.jsonl")).unwrap();
        let lines = text.lines().map(|line| -> Value { serde_json::from_str(line).unwrap() });
        lines.map(|one| [one["loss"].clone(), one["metrics"].clone()]).collect()
    };
    let bits = |name: &str| tensors(&root.path().join(name).join("checkpoints/latest"));
    let mut printed = vec![];
    for (ranks, name, layout) in layouts {
        let named = format!("run.name={name}");
        let settings: Vec<&str> = layout.split_whitespace().chain([&place[..], &named]).collect();
        printed.push(run("own_loss", ranks, &settings).succeeded().stdout);
        assert_eq!(evaluations(name), evaluations("one"), "{name}");
        assert_eq!(bits(name), bits("one"), "{name}");
    }
    let records = std::fs::read_to_string(root.path().join("one/eval.jsonl")).unwrap();
    let last: Value = serde_json::from_str(records.lines().last().unwrap()).unwrap();
    assert!(last["metrics"]["recall_at_1"].as_f64().unwrap() > 0.7, "{last}");
    // It is not a cross-entropy of tokens.
    assert!(last["perplexity"].is_null() && !printed[0].contains("perplexity"), "{last}");
    // Modules and losses run on GPUs, too: in f32 as on CPUs, in bf16 nearly so.
    let on_gpus = |ranks: usize, name: &str, dtype: &str| {
        let mut command = mpirun(ranks);
        let gpu = ["run.device=cuda", "device.memory_limit=64MiB", "device.ranks_per_gpu=2"];
        let named = [format!("run.name={name}"), format!("precision.dtype={dtype}")];
        command.arg(example("own_loss")).args(gpu).args(named);
        command.args([&place[..], "run.steps=3", "comm.transport=host-staged"]);
        finish(with_simulator(&mut command)).succeeded();
        let text = std::fs::read_to_string(root.path().join(name).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| -> Value { serde_json::from_str(line).unwrap() });
        lines.map(|one| one["loss"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    run("own_loss", 1, &[&place, "run.name=short", "run.steps=3"]).succeeded();
    let text = std::fs::read_to_string(root.path().join("short/metrics.jsonl")).unwrap();
    let cpu: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (dtype, bound) in [("f32", 1e-4), ("bf16", 2e-2)] {
        let one = on_gpus(1, &format!("gpu-{dtype}"), dtype);
        let two = on_gpus(2, &format!("gpus-{dtype}"), dtype);
        assert_eq!(one, two, "{dtype}");
        for (loss, cpu) in one.iter().zip(&cpu) {
            let wanted = cpu["loss"].as_f64().unwrap();
            assert!((loss / wanted - 1.0).abs() < bound, "{dtype}: {loss}, on a CPU {wanted}");
        }
    }
}

#[test]
fn own_data() {
    let root = tempfile::tempdir().unwrap();
    let place = format!("run.root={}", root.path().display());
    for (ranks, args) in [
        (1, &["run.name=one"][..]),
        (2, &["run.name=two"]),
        (3, &["run.name=served", "--servers=1"]),
    ] {
        let settings = [&place, "run.device=cpu"];
        run("own_data", ranks, &[&settings, args].concat()).succeeded();
    }
    let refused = run("own_data", 2, &[&place, "run.name=none", "--servers=2"]);
    assert_eq!(refused.code(), 2);
    let wanted = "error: 2 servers of 2 ranks leave none to train\nhint: start 3 ranks or more";
    assert_eq!(refused.stderr.matches(wanted).count(), 1, "{refused}");
    let of = |name: &str| root.path().join(name);
    let accuracy = |name: &str| {
        let text = std::fs::read_to_string(of(name).join("eval.jsonl")).unwrap();
        let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        last["metrics"]["accuracy"].as_f64().unwrap()
    };
    assert_eq!(accuracy("one"), accuracy("two"));
    assert_eq!(accuracy("one"), accuracy("served"));
    assert!(accuracy("one") > 0.9, "{}", accuracy("one"));
    let latest = |name: &str| tensors(&of(name).join("checkpoints/latest"));
    assert_eq!(latest("one"), latest("two"));
    assert_eq!(latest("one"), latest("served"));
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

#[test]
fn arrays() {
    let root = tempfile::tempdir().unwrap();
    let place = format!("run.root={}", root.path().display());
    let of = |name: &str| root.path().join(name);
    let layouts = [
        (1, "one", "parallel.zero=0"),
        (2, "two", "parallel.zero=3"),
        (2, "stages", "parallel.pipeline=2"),
    ];
    for (ranks, name, layout) in layouts {
        let name = format!("run.name={name}");
        let settings = [&place, &name, layout, "batch.micro=8", "run.device=cpu"];
        let ended = run("arrays", ranks, &settings).succeeded();
        let last: Vec<&str> = ended.stdout.lines().rev().take(2).collect();
        assert!(last[1].starts_with("layers.0.weight is [16, 2], norm "), "{ended}");
        let right: usize = last[0].split(' ').next().unwrap().parse().unwrap();
        assert!(last[0].ends_with(" of 90 new points are in the right class"), "{ended}");
        assert!(right > 80, "{ended}");
    }
    let bits = |name: &str| tensors(&of(name).join("checkpoints/latest"));
    assert_eq!(bits("two"), bits("one"));
    assert_eq!(bits("stages"), bits("one"));
    let manifest = json(&of("one").join("checkpoints/latest/manifest.json"));
    assert_eq!(manifest["config"]["data"]["path"], "three ellipses");
    assert_eq!(
        manifest["preprocessing"]["classes"],
        serde_json::json!(["left", "right", "bottom"])
    );
    let shard = &manifest["data"]["shards"][0];
    assert_eq!((&shard["file"], &shard["rows"]), (&"arrays".into(), &3000.into()));
}

#[test]
fn spawn() {
    let printed = |command: &mut Command| finish(command).succeeded().stdout;
    let expected = |ranks: usize| format!("{ranks} ranks: the integral is 3.141592654\n");
    assert_eq!(printed(&mut Command::new(example("spawn"))), expected(2));
    assert_eq!(printed(Command::new(example("spawn")).arg("3")), expected(3));
    // In a job that another launcher has started, the program does not start ranks.
    assert_eq!(printed(program(["spawn", "-n", "4"]).arg(example("spawn")).arg("7")), expected(4));
    assert_eq!(printed(mpirun(2).arg(example("spawn")).arg("7")), expected(2));
    let refused = finish(Command::new(example("spawn")).arg("0"));
    assert_eq!(refused.code(), 2);
    assert!(refused.stderr.contains("a job of 0 ranks\nhint: "), "{refused}");
}

#[test]
fn any_program_is_spawned_as_ranks() {
    let command = |settings: &[&str]| {
        let mut command = program(["spawn", "-n", "2"]);
        command.arg(example("training_loop")).args([&SMALL[..], settings].concat());
        command
    };
    let one = run("training_loop", 1, &[&SMALL[..], &["run.steps=10"]].concat());
    assert_eq!(finish(&mut command(&["run.steps=10"])).succeeded().stdout, one.succeeded().stdout);
    let refused = finish(&mut command(&["run.steps=x"]));
    assert_eq!(refused.code(), 2);
    assert_eq!(refused.stderr.matches("error:").count(), 1, "{refused}");
    // A rank that is killed ends the job, and so does a signal to the launcher.
    for (signal, to_launcher) in [(libc::SIGKILL, false), (libc::SIGTERM, true)] {
        let steps = format!("run.steps={}", 100_000_000 + std::process::id() + signal as u32);
        let mut job = start(&mut command(&[&steps]));
        while !job.printed().contains("step   10") {
            assert!(job.runs(), "{}", job.printed());
            std::thread::sleep(Duration::from_millis(10));
        }
        let of_job = processes(&steps);
        let ranks: Vec<u32> = of_job.into_iter().filter(|pid| rank_of(*pid).is_some()).collect();
        assert_eq!(ranks.len(), 2);
        send(if to_launcher { job.id() } else { ranks[1] }, signal);
        let ended = job.finish(LIMIT);
        // The other rank may be the first to end, because its connection has.
        let is_expected = ended.code() == 128 + signal || !to_launcher && ended.code() == 1;
        assert!(is_expected, "{ended}");
        assert_eq!(processes(&steps), [0; 0], "{ended}");
    }
}

/// Waits until a program has printed a text.
fn wait_for_output(program: &mut Running, text: &str) {
    let since = Instant::now();
    while !program.printed().contains(text) {
        assert!(program.runs() && since.elapsed() < LIMIT, "{}", program.printed());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn own_parameters() {
    // All roles as threads of one process.
    let ended = finish(&mut Command::new(example("own_parameters"))).succeeded();
    let accuracy = |ended: &Ended| -> f64 {
        let line = ended.stdout.lines().find_map(|line| line.strip_prefix("accuracy "));
        line.unwrap_or_else(|| panic!("{ended}")).parse().unwrap()
    };
    assert!(accuracy(&ended) > 0.95, "{ended}");

    // Processes, of which a server and a worker are lost and replaced.
    let folder = tempfile::tempdir().unwrap();
    let command = |role: &str| {
        let mut command = Command::new(example("own_parameters"));
        command.arg(role).arg(folder.path());
        command
    };
    let mut coordinator = start(&mut command("coordinate"));
    let [lost, kept] = [(); 2].map(|()| start_without_waiting(&coordinator, &mut command("serve")));
    wait_for_output(&mut coordinator, "2 servers hold the parameters");
    // The first step fails, since its worker finds that a server is lost.
    drop(lost);
    let spare = start_without_waiting(&coordinator, &mut command("serve"));
    let [gone, workers @ ..] =
        [(); 4].map(|()| start_without_waiting(&coordinator, &mut command("work")));
    wait_for_output(&mut coordinator, "restored ");
    drop(gone);
    let ended = coordinator.finish(LIMIT).succeeded();
    assert!(accuracy(&ended) > 0.95, "{ended}");
    assert!(ended.stderr.contains("a parameter server was lost: the server at "), "{ended}");
    assert_eq!(ended.stdout.lines().filter(|line| line.starts_with("round ")).count(), 4);
    for process in [kept, spare].into_iter().chain(workers) {
        process.finish(LIMIT).succeeded();
    }
}
