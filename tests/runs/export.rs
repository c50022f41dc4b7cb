//! Exports of layer-list models: every kind of layer as ONNX, computed by ONNX Runtime where it is
//! installed, gives the outputs of `predict`; safetensors files have the tensors in PyTorch's
//! layout.

use std::path::{Path, PathBuf};

use hpctrain::checkpoint::Reader;
use hpctrain::checkpoint::export::onnx::{self, OnnxOptions};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::networks::data;
use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{Ended, finish, program};
use hpctrain_testkit::python::python_with;
use hpctrain_testkit::runs::{Run, RunFiles, json};
use hpctrain_testkit::shards::open;

/// A model, and the data set in the folder that it learns.
struct Case {
    name: &'static str,
    data: &'static str,
    settings: &'static [&'static str],
}

/// Models that have every kind of layer between them.
const CASES: [Case; 5] = [
    Case {
        name: "convolutions",
        data: "pictures",
        settings: &[
            "model.input=[7, 6, 1]",
            "model.layers=[{kind='conv2d', filters=4, kernel=[3, 2], padding='same'}, \
             {kind='batch_norm', synchronised=false}, {kind='relu'}, {kind='max_pool2d', kernel=3, \
             stride=2, padding=1}, {kind='residual', layers=[{kind='conv2d', filters=4, kernel=3, \
             padding=1, groups=2}, {kind='gelu'}]}, {kind='residual', layers=[{kind='conv2d', \
             filters=6, kernel=3, padding='same', stride=[1, 2]}, {kind='silu'}], \
             shortcut=[{kind='conv2d', filters=6, kernel=1, stride=[1, 2], bias=false}]}, \
             {kind='group_norm', groups=3}, {kind='leaky_relu', slope=0.2}, {kind='avg_pool2d', \
             kernel=2, stride=1, padding=1}, {kind='dropout', rate=0.2}, {kind='layer_norm'}, \
             {kind='dense', units=5}, {kind='flatten'}, {kind='dense', units=8}, {kind='tanh'}, \
             {kind='dense', units=4}]",
            "loss.label_smoothing=0.1",
        ],
    },
    Case {
        name: "pooled",
        data: "pictures",
        settings: &[
            "model.input=[7, 6, 1]",
            "model.layers=[{kind='reshape', shape=[6, 7]}, {kind='dense', units=6}, \
             {kind='batch_norm', synchronised=false, epsilon=1e-3}, {kind='group_norm', groups=2}, \
             {kind='reshape', shape=[3, 4, 3]}, {kind='residual', layers=[{kind='softmax'}], \
             shortcut=[{kind='sigmoid'}]}, {kind='conv2d', filters=9, kernel=2}, \
             {kind='global_avg_pool'}, {kind='group_norm', groups=3}, {kind='batch_norm', \
             synchronised=false}, {kind='dense', units=4, bias=false}]",
            "optimizer.ema=0.5",
            "batch.micro=4",
        ],
    },
    Case {
        name: "regression",
        data: "table",
        settings: &[
            "model.input=[3]",
            "model.layers=[{kind='dense', units=6}, {kind='residual', layers=[{kind='dense', \
             units=6}, {kind='silu'}]}, {kind='dense', units=2}]",
            "loss.kind=huber",
        ],
    },
    Case {
        name: "recommender",
        data: "clicks",
        settings: &[
            "model.input=[1]",
            "model.layers=[{kind='embedding_tables', ids=[4, 8], width=6, dense=[{kind='dense', \
             units=5}, {kind='relu'}, {kind='dense', units=6}]}, {kind='dot_interaction'}, \
             {kind='dense', units=7}, {kind='relu'}, {kind='dense', units=1}]",
            "loss.kind=binary-cross-entropy",
        ],
    },
    Case {
        name: "embedded",
        data: "words",
        settings: &[
            "model.input=[5]",
            "model.layers=[{kind='embedding', ids=9, width=4}, {kind='layer_norm'}, \
             {kind='dense', units=3}, {kind='gelu'}, {kind='flatten'}, {kind='dense', units=2}]",
        ],
    },
];

/// Writes samples of five ids with a class.
fn words(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    for (name, samples) in [("train", 40), ("val", 20)] {
        let file = hdf5::File::create(folder.join(format!("{name}-0.h5"))).unwrap();
        let ids = ndarray::Array2::from_shape_fn((samples, 5), |(i, j)| (i * (j + 3) % 9) as u16);
        let classes = ndarray::Array1::from_shape_fn(samples, |i| (i * 7 % 9 / 5) as u16);
        file.new_dataset_builder().with_data(&ids).create("inputs").unwrap();
        file.new_dataset_builder().with_data(&classes).create("targets").unwrap();
    }
}

/// Runs a command of the program with these arguments.
fn ran(arguments: &[&str]) -> Ended {
    finish(&mut program(arguments))
}

/// Exports a checkpoint to a directory in a format.
fn export(run: &RunFiles, out: &Path, more: &[&str]) -> Ended {
    let [run, out] = [&run.0, out].map(|path| path.display().to_string());
    ran(&[&["checkpoint", "export", &run, "--out", &out][..], more].concat())
}

/// Writes numbers as little-endian bytes and returns the path.
fn raw<T: bytemuck::NoUninit>(path: PathBuf, numbers: &[T]) -> String {
    std::fs::write(&path, bytemuck::cast_slice(numbers)).unwrap();
    path.display().to_string()
}

/// Computes graphs with two sizes of batches and compares the outputs with files.
const COMPUTE: &str = r#"
import json, sys
import numpy as np, onnxruntime
try:
    import onnx
except ImportError:
    onnx = None
for case in json.load(open(sys.argv[1])):
    if onnx:
        onnx.checker.check_model(case["model"], full_check=True)
    session = onnxruntime.InferenceSession(case["model"], providers=["CPUExecutionProvider"])
    samples = case["samples"]
    inputs = {}
    for value in session.get_inputs():
        kind = {"tensor(float)": "<f4", "tensor(int64)": "<i8"}[value.type]
        assert value.shape[0] == "batch", value.shape
        stored = np.fromfile(case["inputs"][value.name], kind)
        inputs[value.name] = stored.reshape(samples, *value.shape[1:])
    assert inputs.keys() == case["inputs"].keys(), (inputs.keys(), case["inputs"].keys())
    expected = np.fromfile(case["expected"], "<f4").reshape(samples, -1)
    names = [value.name for value in session.get_outputs()]
    found = session.run(None, inputs)
    outputs = dict(zip(names, found))
    off = np.abs(outputs["outputs"] - expected).max()
    assert off < 2e-5 * max(1, np.abs(expected).max()), (case["model"], off)
    one = session.run(["outputs"], {name: value[3:4] for name, value in inputs.items()})[0]
    assert np.abs(one - expected[3:4]).max() < 1e-4, case["model"]
    if case["loss"] == "cross-entropy":
        powers = np.exp(expected - expected.max(1, keepdims=True))
        probabilities = powers / powers.sum(1, keepdims=True)
    elif case["loss"] == "binary-cross-entropy":
        probabilities = 1 / (1 + np.exp(-expected))
    else:
        assert names == ["outputs"], names
        probabilities = None
    if probabilities is not None:
        assert np.abs(outputs["probabilities"] - probabilities).max() < 1e-5, case["model"]
    metadata = session.get_modelmeta().custom_metadata_map
    for key, value in case["metadata"].items():
        assert json.loads(metadata[key]) == value, (key, metadata[key])
    print(case["model"], "differs by at most", off)
"#;

#[test]
fn onnx_runtime_computes_what_predict_does() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    data(root.path());
    words(&at("words"));
    let mut cases = Vec::new();
    for Case { name, data, settings } in &CASES {
        let place = format!("data.path={}", at(data).display());
        let always = ["model.kind=layers", "run.steps=6", "eval.every=3", &place];
        let run = Run::new(Alone, root.path(), name, &[&always, *settings].concat()).succeeds();
        let out = at(&format!("{name}-onnx"));
        let ended = export(&run, &out, &["--format", "onnx"]).succeeded();
        assert!(ended.stdout.contains("opset 17") && ended.stdout.contains("[batch, "), "{ended}");
        let config = json(&out.join("config.json"));
        assert_eq!(config["step"], 6);
        let weights = if settings.contains(&"optimizer.ema=0.5") { "ema" } else { "parameters" };
        assert_eq!(config["weights"], weights);
        assert_eq!(config["model"]["kind"], "layers");
        let manifest = json(&run.path("checkpoints/latest/manifest.json"));
        let preprocessing = json(&out.join("preprocessing.json"));
        assert_eq!(preprocessing, manifest["preprocessing"]);

        // The validation samples as the shards have them.
        let outputs = at(&format!("{name}.h5"));
        let predicted = ["--input", &at(data).display().to_string(), "--out"];
        let run_path = run.0.display().to_string();
        let arguments = [&["predict", "--checkpoint", &run_path][..], &predicted].concat();
        ran(&[&arguments[..], &[&outputs.display().to_string()]].concat()).succeeded();
        let outputs: Vec<f32> = open(&outputs).dataset("outputs").unwrap().read_raw().unwrap();
        let mut inputs = serde_json::Map::new();
        let mut features = Vec::<f32>::new();
        let mut ids = Vec::<i64>::new();
        let mut shards: Vec<PathBuf> = std::fs::read_dir(at(data))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("val-"))
            .collect();
        shards.sort();
        let mut samples = 0;
        for shard in shards {
            let file = open(shard);
            let stored = file.dataset("inputs").ok();
            samples +=
                stored.as_ref().or(file.dataset("categories").ok().as_ref()).unwrap().shape()[0];
            match (&stored, *data == "words") {
                (Some(stored), false) => features.extend(stored.read_raw::<f32>().unwrap()),
                (Some(stored), true) => ids.extend(stored.read_raw::<i64>().unwrap()),
                (None, _) => {}
            }
            if let Ok(stored) = file.dataset("categories") {
                ids.extend(stored.read_raw::<i64>().unwrap());
            }
        }
        if !features.is_empty() {
            let path = raw(at(&format!("{name}-features")), &features);
            inputs.insert("features".into(), path.into());
        }
        if !ids.is_empty() {
            inputs.insert("ids".into(), raw(at(&format!("{name}-ids")), &ids).into());
        }
        let mut metadata = serde_json::Map::new();
        metadata.insert("step".into(), 6.into());
        for key in ["features", "categories", "targets"] {
            let columns = &preprocessing["columns"];
            let names = match key {
                "features" => columns["inputs"].clone(),
                "categories" if columns.is_object() => columns[key]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|category| category["name"].clone())
                    .collect(),
                _ => columns[key].clone(),
            };
            if !names.is_null() {
                metadata.insert(key.into(), names);
            }
        }
        let case = |model: &Path, inputs: serde_json::Map<String, Value>| {
            json!({
                "model": model.join("model.onnx"),
                "samples": samples,
                "inputs": inputs,
                "expected": raw(at(&format!("{name}-outputs")), &outputs),
                "loss": config["loss"]["kind"],
                "metadata": metadata,
            })
        };
        cases.push(case(&out, inputs.clone()));

        // Weights in another file, whatever their size.
        let mut reader = Reader::open(&run.path("checkpoints/latest")).unwrap();
        let external = at(&format!("{name}-external"));
        let options = OnnxOptions { inline_limit: 0, ..OnnxOptions::default() };
        let exported = onnx::onnx(&mut reader, &external, options).unwrap();
        let bytes = std::fs::metadata(external.join("model.onnx.data")).unwrap().len();
        assert_eq!(bytes, 4 * exported.elements);
        assert!(!out.join("model.onnx.data").exists());
        cases.push(case(&external, inputs.clone()));

        // A graph without the normalization takes normalized numbers.
        let Some(scale) = preprocessing["scales"][0].as_object() else { continue };
        let normalized = at(&format!("{name}-normalized"));
        let more = ["--format", "onnx", "--normalized-inputs"];
        export(&run, &normalized, &more).succeeded();
        let number = |key: &str, i: usize| {
            let all = scale[key].as_array().unwrap();
            all[i % all.len()].as_f64().unwrap() as f32
        };
        let scaled = features.iter().enumerate();
        let scaled: Vec<f32> =
            scaled.map(|(i, x)| (x - number("mean", i)) / number("std", i)).collect();
        let path = raw(at(&format!("{name}-scaled")), &scaled);
        inputs.insert("features".into(), path.into());
        cases.push(case(&normalized, inputs));
    }
    // Pictures, the table and the numbers of clicks are normalized.
    assert_eq!(cases.len(), 3 * 5 - 1);

    let Some(mut python) = python_with("onnxruntime, numpy") else {
        eprintln!("skipped: no Python with onnxruntime (pip install onnxruntime onnx)");
        return;
    };
    let input = at("cases.json");
    std::fs::write(&input, serde_json::to_string(&cases).unwrap()).unwrap();
    let ended = finish(python.args(["-c", COMPUTE]).arg(input)).succeeded();
    eprintln!("{}", ended.stdout);
    assert_eq!(ended.stdout.lines().count(), cases.len(), "{ended}");
}

#[test]
fn safetensors_have_the_layout_of_pytorch() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    let Case { name, data, settings } = &CASES[0];
    let place = format!("data.path={}", root.path().join(data).display());
    let always = ["model.kind=layers", "run.steps=2", &place];
    let run = Run::new(Alone, root.path(), name, &[&always, *settings].concat()).succeeds();
    let out = root.path().join("exported");
    let ended = export(&run, &out, &["--format", "safetensors"]).succeeded();
    let mut reader = Reader::open(&run.path("checkpoints/latest")).unwrap();
    let count = reader.manifest().tensors.len();
    assert!(ended.stdout.contains(&format!("{count} tensors")), "{ended}");
    let mut files: Vec<String> = std::fs::read_dir(&out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, ["config.json", "model.safetensors", "preprocessing.json"]);
    let bytes = std::fs::read(out.join("model.safetensors")).unwrap();
    let exported = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(exported.len(), count);
    let mut filters = 0;
    for (name, view) in exported.tensors() {
        let mut wanted = reader.tensor(&name, 0).unwrap();
        if wanted.ndim() == 4 {
            filters += 1;
            wanted = wanted.permuted_axes(vec![0, 3, 1, 2]);
        }
        assert_eq!(view.shape(), wanted.shape(), "{name}");
        let found: Vec<f32> = bytemuck::pod_collect_to_vec(view.data());
        assert_eq!(found, wanted.iter().copied().collect::<Vec<_>>(), "{name}");
    }
    assert_eq!(filters, 4);
    assert_eq!(exported.tensor("layers.4.layers.0.weight").unwrap().shape(), [4, 2, 3, 3]);
    assert_eq!(exported.tensor("layers.11.weight").unwrap().shape(), [5, 6]);
    assert_eq!(exported.tensor("layers.1.running_var").unwrap().shape(), [4]);
}

#[test]
fn formats_that_do_not_fit_the_model_are_refused() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    let Case { settings, .. } = &CASES[2];
    let place = format!("data.path={}", root.path().join("table").display());
    let always = ["model.kind=layers", "run.steps=1", &place];
    let list = Run::new(Alone, root.path(), "list", &[&always, *settings].concat()).succeeds();
    let gpt = Run::new(Alone, root.path(), "gpt", &["run.steps=1"]).succeeds();
    let out = root.path().join("out");
    let refusals: [(&RunFiles, &[&str], &str, &str); 6] = [
        (&list, &[], "a layer-list model cannot be written", "--format onnx"),
        (&list, &["--format", "huggingface"], "a layer-list model cannot", "--format safetensors"),
        (
            &list,
            &["--format", "safetensors", "--normalized-inputs"],
            "--normalized-inputs is an option of --format onnx",
            "omit it",
        ),
        (
            &gpt,
            &["--format", "onnx"],
            "--format onnx is for layer-list models, but this is a GPT",
            "--format huggingface",
        ),
        (
            &gpt,
            &["--format", "safetensors"],
            "--format safetensors is for layer-list models, but this is a GPT",
            "--format huggingface",
        ),
        (&list, &["--format", "pickle"], "pickle", "onnx"),
    ];
    for (run, more, message, hint) in refusals {
        let ended = export(run, &out, more);
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(ended.stderr.contains(message) && ended.stderr.contains(hint), "{ended}");
        assert!(!out.exists());
    }
    export(&list, &out, &["--format", "onnx"]).succeeded();
    let ended = export(&list, &out, &["--format", "safetensors"]);
    assert!(ended.code() == 2 && ended.stderr.contains("out exists already"), "{ended}");
}
