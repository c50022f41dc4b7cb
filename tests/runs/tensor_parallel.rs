//! Tensor parallelism: runs resume in any other layout, exports have the same bytes, and trained
//! networks can be used in other layouts than those of their training.

use std::path::Path;
use std::process::Command;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{finish, mpirun, program};
use hpctrain_testkit::runs::{Run, RunFiles, copy};

/// Four virtual tensor ranks, which do not divide the vocabulary of 65 and the hidden width of 25.
const SETTINGS: [&str; 14] = [
    "model.kind=llama",
    "model.layers=2",
    "model.width=32",
    "model.heads=4",
    "model.kv_heads=4",
    "model.hidden=25",
    "model.context=16",
    "model.dropout=0.1",
    "run.steps=6",
    "checkpoint.every=3",
    "checkpoint.keep=9",
    "parallel.virtual_ranks=2",
    "batch.micro=1",
    "parallel.virtual_tensor_ranks=4",
];

fn run(transport: Transport, root: &Path, name: &str, layout: &str) -> Run {
    let layout: Vec<&str> = layout.split_whitespace().collect();
    Run::new(transport, root, name, &[&SETTINGS[..], &layout].concat())
}

/// Returns a command on `ranks` ranks, with settings.
fn command(ranks: usize, args: &[&str], settings: &str) -> Command {
    let mut command = if ranks == 1 { program(&args[..1]) } else { mpirun(ranks) };
    if ranks > 1 {
        command.arg(hpctrain_testkit::program()).arg(args[0]);
    }
    command
        .args(&args[1..])
        .args(settings.split_whitespace().flat_map(|setting| ["--set", setting]));
    command
}

#[test]
fn runs_resume_on_other_tensor_ranks_and_exports_are_equal() {
    let root = tempfile::tempdir().unwrap();
    let whole = run(Alone, root.path(), "whole", "").succeeds();
    let layouts = [
        (Mpirun(2), "parallel.tensor=2"),
        (Simulate(4), "parallel.tensor=4 parallel.sequence=true"),
        (Simulate(8), "parallel.tensor=2 parallel.pipeline=2 parallel.zero=3"),
        (Alone, ""),
    ];
    for (i, (transport, layout)) in layouts.into_iter().enumerate() {
        let files = run(transport, root.path(), &format!("cut-{i}"), layout).succeeds();
        files.same_as(&whole, 6, layout);
        // Resume it as if it had been killed before its second checkpoint.
        let (other, settings) = layouts[(i + 1) % layouts.len()];
        let name = format!("on-{i}");
        copy(&files.0, &root.path().join(&name));
        let on = RunFiles(root.path().join(&name));
        std::fs::remove_dir_all(on.checkpoint(6)).unwrap();
        std::fs::remove_file(on.path("run.json")).unwrap();
        let on = run(other, root.path(), &name, settings).resume("auto").succeeds();
        on.same_as(&whole, 6, &format!("{layout:?}, then {settings:?}"));
        let exported = |files: &RunFiles, name: &str| {
            let out = root.path().join(name);
            finish(program(["checkpoint", "export", "--out"]).arg(&out).arg(files.checkpoint(6)))
                .succeeded();
            std::fs::read(out.join("model.safetensors")).unwrap()
        };
        assert!(
            exported(&files, &format!("export-{i}")) == exported(&whole, &format!("whole-{i}")),
            "{layout}"
        );
        finish(program(["checkpoint", "verify"]).arg(files.checkpoint(6))).succeeded();
    }
}

#[test]
fn trained_networks_are_used_in_any_layout() {
    let root = tempfile::tempdir().unwrap();
    let trained = run(Simulate(4), root.path(), "trained", "parallel.tensor=2 parallel.pipeline=2")
        .succeeds();
    let checkpoint = trained.checkpoint(6);
    let output = |ranks: usize, args: &[&str], settings: &str| {
        let args =
            [&args[..1], &["--checkpoint", checkpoint.to_str().unwrap()], &args[1..]].concat();
        finish(&mut command(ranks, &args, settings)).succeeded().stdout
    };
    let eval = |ranks, settings: &str| {
        let found: serde_json::Value =
            serde_json::from_str(&output(ranks, &["eval", "--json"], settings)).unwrap();
        found["loss"].as_f64().unwrap().to_bits()
    };
    let sample = |ranks, settings: &str| {
        output(ranks, &["sample", "--tokens", "30", "--prompt", "ab"], settings)
    };
    for (virtual_ranks, layouts) in [
        ("", [(2, ""), (2, "parallel.pipeline=2"), (2, "parallel.zero=0")]),
        (
            " parallel.virtual_tensor_ranks=2",
            [
                (2, "parallel.tensor=2"),
                (2, "parallel.tensor=2 parallel.sequence=true"),
                (4, "parallel.tensor=2 parallel.pipeline=2"),
            ],
        ),
    ] {
        let measured = eval(1, virtual_ranks);
        let drawn = sample(1, virtual_ranks);
        for (ranks, layout) in layouts {
            let settings = format!("{layout}{virtual_ranks}");
            assert_eq!(eval(ranks, &settings), measured, "{settings}");
            assert_eq!(sample(ranks, &settings), drawn, "{settings}");
        }
    }
    // An evaluator may have another layout, too.
    let mut watch =
        command(2, &["eval", "--run", trained.0.to_str().unwrap()], "parallel.tensor=2");
    finish(&mut watch).succeeded();
}

#[test]
fn outputs_of_a_pipeline_are_those_of_one_rank() {
    let root = tempfile::tempdir().unwrap();
    crate::networks::data(root.path());
    let pictures = format!("data.path={}", root.path().join("pictures").display());
    let layers = "model.layers=[{kind='flatten'}, {kind='dense', units=8}, {kind='tanh'}, {kind='dense', units=4}]";
    let settings = [
        "model.kind=layers",
        "model.input=[7, 6, 1]",
        layers,
        &pictures,
        "run.steps=2",
        "optimizer.lr=0.01",
    ];
    let files = Run::new(Alone, root.path(), "x", &settings).succeeds();
    let outputs = |ranks: usize, layout: &str| {
        let out = root.path().join(format!("out-{ranks}-{}.h5", layout.len()));
        let checkpoint = files.checkpoint(2);
        let data = root.path().join("pictures");
        let args = [
            "predict",
            "--checkpoint",
            checkpoint.to_str().unwrap(),
            "--data",
            data.to_str().unwrap(),
        ];
        let args = [&args[..], &["--out", out.to_str().unwrap()]].concat();
        finish(&mut command(ranks, &args, layout)).succeeded();
        hdf5::File::open(&out).unwrap().dataset("outputs").unwrap().read_raw::<f32>().unwrap()
    };
    let alone = outputs(1, "");
    assert!(!alone.is_empty() && alone.iter().all(|x| x.is_finite()));
    for (ranks, layout) in
        [(2, "parallel.pipeline=2"), (4, "parallel.pipeline=2 eval.batch=3"), (2, "eval.batch=3")]
    {
        assert!(outputs(ranks, layout) == alone, "{ranks} ranks, {layout}");
    }
}
