//! `hpctrain plan`, and runs with `parallel.layout=auto`.

use serde_json::Value;

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{finish, mpirun, program};
use hpctrain_testkit::runs::Run;

/// Settings with which evaluations need no more memory than steps.
const SETTINGS: [&str; 7] = [
    "model.layers=2",
    "model.width=64",
    "model.heads=2",
    "model.context=16",
    "batch.global=8",
    "eval.batch=1",
    "run.threads=1",
];

fn sets() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().flat_map(|setting| ["--set", setting])
}

/// Returns the object that a command prints.
fn json(command: &mut std::process::Command) -> Value {
    let ended = finish(command.args(sets()).arg("--json"));
    assert_eq!(ended.code(), 0, "{ended}");
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {ended}"))
}

#[test]
fn measured_layouts_are_listed_and_tried() {
    let threads = json(&mut program(["plan", "--ranks", "2", "--measure", "--try", "3"]));
    let mut ranks = mpirun(2);
    ranks.arg(hpctrain_testkit::program()).args([
        "plan",
        "--measure",
        "--try",
        "8",
        "--set",
        "batch.micro=2",
    ]);
    let ranks = json(&mut ranks);
    for (plan, tried) in [(&threads, 3), (&ranks, 8)] {
        let layouts = plan["layouts"].as_array().unwrap();
        // Replicas, ZeRO 1 to 3, tensor parallelism with and without sequence parallelism, and
        // both pipeline schedules, each with several micro-batches.
        let shape = |layout: &Value| {
            format!(
                "{} {} {} {} {}",
                layout["pipeline"],
                layout["schedule"],
                layout["tensor"],
                layout["sequence"],
                layout["zero"]
            )
        };
        let mut shapes: Vec<String> = layouts.iter().map(shape).collect();
        shapes.sort();
        shapes.dedup();
        assert_eq!(shapes.len(), 8, "{shapes:?}");
        for (number, layout) in layouts.iter().enumerate() {
            let positive = |value: &Value| value.as_f64().unwrap() > 0.0;
            assert!(positive(&layout["step_ms"]) && positive(&layout["memory_bytes"]), "{layout}");
            assert_eq!(layout.get("tried").is_some(), number < tried, "{number}: {layout}");
        }
        // They are sorted by measured time.
        let times: Vec<f64> =
            layouts.iter().filter_map(|layout| layout["tried"]["step_ms"].as_f64()).collect();
        assert_eq!(times.len(), tried.min(layouts.len()));
        assert!(times.is_sorted(), "{times:?}");
        for layout in layouts.iter().filter(|layout| layout.get("tried").is_some()) {
            let bytes = |key: &str| layout["tried"][key].as_f64().unwrap();
            let off = bytes("estimated_bytes") / bytes("counted_bytes") - 1.0;
            // A late reduction keeps its buffer longer.
            assert!(off.abs() < 0.1, "memory is off by {off}: {layout}");
        }
    }
}

#[test]
fn runs_use_the_first_layout_and_print_it() {
    let root = tempfile::tempdir().unwrap();
    let steps = ["run.steps=4", "parallel.layout=auto"];
    let settings = [&SETTINGS[..], &steps].concat();
    for (number, transport) in [Mpirun(2), Simulate(2), Alone].into_iter().enumerate() {
        let run = Run::new(transport, root.path(), &format!("auto-{number}"), &settings);
        let ended = run.ends().succeeded();
        assert_eq!(ended.stdout.matches("parallel.layout = auto: ").count(), 1, "{ended}");
        // The configuration of the run has the chosen layout, and gives the same bits.
        let files = run.files();
        assert!(files.text("config.toml").contains("layout = \"given\""), "{ended}");
        let again = Run::new(transport, root.path(), &format!("again-{number}"), &SETTINGS);
        let mut command = again.command();
        let ended = finish(
            command.args(["--set", "run.steps=4", "--config"]).arg(files.path("config.toml")),
        )
        .succeeded();
        assert!(!ended.stdout.contains("layout = auto"), "{ended}");
        again.files().same_as(&files, 4, "the layout of its own choice");
    }
}

#[test]
fn a_given_key_stays() {
    let root = tempfile::tempdir().unwrap();
    let pipeline = ["parallel.pipeline=2", "parallel.schedule=zero-bubble", "batch.micro=1"];
    let keys = [&["run.steps=2", "parallel.layout=auto"], &pipeline[..]].concat();
    let run = Run::new(Simulate(4), root.path(), "x", &[&SETTINGS[..], &keys].concat());
    let ended = finish(&mut run.command());
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.stdout.contains("parallel.layout = auto: pipeline 2"), "{ended}");
}

/// A GPU with room for the parameters and gradients of a network, but not for its optimizer state.
const SMALL_GPU: &str = r#"
name = "a small GPU"
source = "none"
gpu = true
ranks_per_node = 1
memory = "200MiB"
host_memory = "8GiB"
flops = { bf16 = 1e14, f32 = 1e13 }
bandwidth = 1e12
node = { latency = 1e-5, bandwidth = 1e10 }
network = { latency = 1e-5, bandwidth = 1e10 }
overlap = 0.9
"#;

#[test]
fn offloading_is_proposed_if_a_gpu_is_too_small() {
    let root = tempfile::tempdir().unwrap();
    let machine = root.path().join("machine.toml");
    std::fs::write(&machine, SMALL_GPU).unwrap();
    let plan = |more: &[&str]| {
        let sizes = [
            "model.layers=6",
            "model.width=512",
            "model.heads=8",
            "batch.global=1",
            "eval.batch=1",
        ];
        let sets = sizes.iter().flat_map(|setting| ["--set", setting]);
        let mut command = program(["plan", "--ranks", "1", "--machine"]);
        finish(command.arg(&machine).args(sets).args(more))
    };
    let ended = plan(&["--json"]).succeeded();
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let best = &report["layouts"][0];
    assert!(best["offload_optimizer"] == true && best["offload_params"] == false, "{best}");
    assert!(best["memory_bytes"].as_u64().unwrap() <= 200 << 20, "{best}");
    // Master weights, moments and a slot for copies of 19 million parameters.
    assert!(best["host_bytes"].as_u64().unwrap() > 19_000_000 * 16, "{best}");
    assert!(
        best["toml"]
            .as_str()
            .unwrap()
            .ends_with("[offload]\noptimizer = true\n\n[batch]\nmicro = 1"),
        "{best}"
    );
    let text = plan(&[]).succeeded().stdout;
    assert!(
        text.contains("one rank, optimizer on the host, micro 1") && text.contains(", host "),
        "{text}"
    );
    assert!(text.contains("  > ") && text.contains("do not include copies to the host"), "{text}");
    // Layouts with embedding tables on the host.
    let tables =
        ["model.kind=llama", "model.layers=1", "model.vocabulary=20000", "model.place.tables=host"];
    let tables: Vec<&str> = tables.iter().flat_map(|setting| ["--set", setting]).collect();
    let ended = plan(&[&tables[..], &["--json"]].concat()).succeeded();
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let best = &report["layouts"][0];
    // Parameters, gradients and moments of 10 million elements.
    assert!(best["host_bytes"].as_u64().unwrap() > 10_240_000 * 16, "{best}");
    let text = plan(&tables).succeeded().stdout;
    assert!(
        text.contains("  > ")
            && text.contains("do not include the messages and updates of embedding tables"),
        "{text}"
    );
    let ended = plan(&["--set", "offload.optimizer=false"]);
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("no layout fits: of 1 ranks the smallest needs "), "{ended}");
    assert!(ended.stderr.contains("hint: offload.optimizer=true takes "), "{ended}");
}
