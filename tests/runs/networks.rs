//! Every family of networks in every layout gives the bits of one rank, on CPUs and simulated GPUs,
//! resumed and evaluated.

use std::path::Path;

use hpctrain::data::import::{
    Categories, CategoryIds, ImportCsv, ImportIdx, ImportOptions, NotFinite, import_csv, import_idx,
};

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::launch::{finish, mpirun, program};
use hpctrain_testkit::runs::{Run, RunFiles, copy, json};
use hpctrain_testkit::simulator::with_simulator;

/// A network: its name and its settings.
struct Network {
    name: &'static str,
    settings: Vec<String>,
}

/// Encodes bytes in the IDX format.
fn idx(shape: &[u32], elements: Vec<u8>) -> Vec<u8> {
    let axes = shape.iter().flat_map(|extent| extent.to_be_bytes());
    [0, 0, 8, shape.len() as u8].into_iter().chain(axes).chain(elements).collect()
}

/// Imports small images of four classes, a table with weights, and a table with categories into the
/// folder.
pub fn data(folder: &Path) {
    let kept = |name: &str| ImportOptions {
        not_finite: NotFinite::Error,
        every: 5,
        shards: 2,
        normalize: true,
        out: folder.join(name),
    };
    let pixel = |i: usize| (i * 37 % 101 + i / 42 % 4 * 30) as u8;
    std::fs::write(folder.join("images"), idx(&[60, 7, 6], (0..60 * 42).map(pixel).collect()))
        .unwrap();
    std::fs::write(folder.join("labels"), idx(&[60], (0..60).map(|i| i % 4).collect())).unwrap();
    let images = folder.join("images");
    let labels = folder.join("labels");
    import_idx(&ImportIdx { images, labels, options: kept("pictures") }).unwrap();
    let line = |i: u32| {
        let [a, b, c] = [i * 7 % 11, i * 5 % 13, i * 3 % 17].map(f64::from);
        format!("{a},{b},{c},{},{},{}\n", a * 0.3 - b * 0.1, (c - a) * 0.2, i % 4)
    };
    let table: String =
        std::iter::once("a,b,c,up,down,weight\n".to_string()).chain((0..60).map(line)).collect();
    std::fs::write(folder.join("table.csv"), table).unwrap();
    let targets = ["up", "down"].map(String::from).to_vec();
    let input = folder.join("table.csv");
    let weight = Some("weight".to_owned());
    import_csv(&ImportCsv { targets, weight, ..ImportCsv::new(input, kept("table")) }).unwrap();
    let line = |i: u32| {
        format!(
            "{},{},{},{}\n",
            i % 2,
            ["x", "y", "z"][(i * 7 % 3) as usize],
            i * 5 % 11,
            i * 3 % 7
        )
    };
    let clicks: String =
        std::iter::once("clicked,site,age,device\n".to_string()).chain((0..60).map(line)).collect();
    std::fs::write(folder.join("clicks.csv"), clicks).unwrap();
    let columns = ["site", "device"].map(String::from).to_vec();
    let categories = Categories::Named { columns, ids: CategoryIds::APPEARANCE };
    let input = folder.join("clicks.csv");
    let targets = vec!["clicked".into()];
    import_csv(&ImportCsv { targets, categories, ..ImportCsv::new(input, kept("clicks")) })
        .unwrap();
}

fn networks(folder: &Path) -> Vec<Network> {
    let network = |name, settings: &[String]| Network { name, settings: settings.to_vec() };
    let at = |name: &str| format!("data.path={}", folder.join(name).display());
    let text =
        |settings: &[&str]| settings.iter().map(|setting| setting.to_string()).collect::<Vec<_>>();
    vec![
        network("llama", &text(&["model.kind=llama", "model.kv_heads=1", "model.hidden=24", "model.dropout=0.1"])),
        network(
            "convolutions",
            &[
                text(&[
                    "model.kind=layers",
                    "model.input=[7, 6, 1]",
                    "model.layers=[{kind='conv2d', filters=4, kernel=3, padding='same'}, {kind='relu'}, \
                     {kind='max_pool2d', kernel=2}, {kind='residual', layers=[{kind='conv2d', filters=4, kernel=3, \
                     padding=1, groups=2}, {kind='gelu'}]}, {kind='batch_norm', synchronised=false}, {kind='group_norm', groups=2}, {kind='flatten'}, {kind='dropout', rate=0.2}, \
                     {kind='dense', units=8}, {kind='layer_norm'}, {kind='tanh'}, {kind='dense', units=4}]",
                    "loss.label_smoothing=0.1",
                    "loss.class_weights=[1.0, 2.0, 0.5, 1.0]",
                    "data.augment.flip=true",
                    "data.augment.shift=1",
                    "data.augment.crop=2",
                ]),
                vec![at("pictures")],
            ]
            .concat(),
        ),
        network(
            "contrastive",
            &[
                text(&[
                    "model.kind=layers",
                    "model.input=[7, 6, 1]",
                    "model.layers=[{kind='flatten'}, {kind='dense', units=9}, {kind='gelu'}, {kind='dense', units=5}]",
                    "loss.kind=contrastive",
                    "loss.temperature=0.5",
                ]),
                vec![at("pictures")],
            ]
            .concat(),
        ),
        network(
            "regression",
            &[
                text(&[
                    "model.kind=layers",
                    "model.input=[3]",
                    "model.layers=[{kind='layer_norm'}, {kind='dense', units=6}, {kind='silu'}, {kind='dense', units=2}]",
                    "loss.kind=huber",
                ]),
                vec![at("table")],
            ]
            .concat(),
        ),
        network(
            "recommender",
            &[
                text(&[
                    "model.kind=layers",
                    "model.input=[1]",
                    "model.layers=[{kind='embedding_tables', ids=[4, 8], width=6, dense=[{kind='dense', units=5}, \
                     {kind='relu'}, {kind='dense', units=6}]}, {kind='dot_interaction'}, {kind='dropout', rate=0.1}, \
                     {kind='dense', units=7}, {kind='relu'}, {kind='dense', units=1}]",
                    "loss.kind=binary-cross-entropy",
                ]),
                vec![at("clicks")],
            ]
            .concat(),
        ),
    ]
}

/// Returns a run of a network with eight virtual ranks.
fn run(network: &Network, transport: Transport, root: &Path, name: &str, settings: &str) -> Run {
    let virtual_ranks = ["parallel.virtual_ranks=8", "eval.samples=10"].map(String::from).to_vec();
    let settings = settings.split_whitespace().map(String::from).collect();
    let settings = [virtual_ranks, network.settings.clone(), settings].concat();
    Run { settings, ..Run::new(transport, root, &format!("{}-{name}", network.name), &[]) }
}

/// A layout that also saves in the middle of the run.
const IN_THE_MIDDLE: &str = "parallel.zero=2 parallel.recompute=true checkpoint.every=3";

const LAYOUTS: [(Transport, &str); 13] = [
    (Alone, "run.threads=3 parallel.recompute=true"),
    (Alone, "parallel.zero=3"),
    (Mpirun(2), "parallel.zero=0"),
    (Mpirun(2), "parallel.zero=1"),
    (Mpirun(2), IN_THE_MIDDLE),
    (Mpirun(2), "parallel.zero=3"),
    (Mpirun(4), "parallel.zero=3 parallel.shard=2 parallel.recompute=true"),
    (Mpirun(4), "parallel.zero=2 comm.algorithm=hierarchical"),
    (Simulate(8), "parallel.zero=1"),
    (Simulate(8), "parallel.zero=3 parallel.prefetch=2"),
    (Mpirun(2), "parallel.pipeline=2"),
    (Simulate(4), "parallel.pipeline=2 parallel.schedule=zero-bubble parallel.zero=1"),
    (Simulate(8), "parallel.pipeline=2 parallel.shard=2 parallel.zero=3 parallel.recompute=true"),
];

#[test]
fn every_network_in_every_layout_has_the_bits_of_one_rank() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    for network in networks(root.path()) {
        let reference = run(&network, Alone, root.path(), "reference", "").succeeds();
        let losses = reference.numbers("metrics.jsonl", "loss");
        assert!(losses.windows(2).any(|pair| pair[0] != pair[1]), "{}: {losses:?}", network.name);
        for (i, (transport, settings)) in LAYOUTS.into_iter().enumerate() {
            if network.name == "contrastive" && settings.contains("zero-bubble") {
                continue;
            }
            let files = run(&network, transport, root.path(), &i.to_string(), settings).succeeds();
            files.same_as(&reference, 6, &format!("{}, {settings}", network.name));
            if settings == IN_THE_MIDDLE {
                // It resumes from there, on another number of ranks.
                let middle = files.checkpoint(3).display().to_string();
                let again =
                    run(&network, Alone, root.path(), "again", "").resume(&middle).succeeds();
                assert_eq!(again.tensors(6), reference.tensors(6), "{}, resumed", network.name);
            }
        }
    }
}

fn on_gpu(
    network: &Network,
    transport: Transport,
    root: &Path,
    name: &str,
    settings: &str,
) -> RunFiles {
    let gpu = "run.device=cuda run.steps=3 device.memory_limit=64MiB device.ranks_per_gpu=2";
    let run = run(network, transport, root, name, &format!("{gpu} {settings}"));
    finish(with_simulator(&mut run.command()).env("CUDASIM_HOST_ACCESS", "0")).succeeded();
    run.files()
}

#[test]
fn every_network_trains_on_gpus() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    for network in networks(root.path()) {
        let cpu = run(&network, Alone, root.path(), "cpu", "run.steps=3").succeeds();
        for (precision, bound) in [("f32", 1e-4), ("bf16", 2e-2)] {
            let settings = format!("precision.dtype={precision}");
            let one = on_gpu(&network, Alone, root.path(), precision, &settings);
            for (file, key) in [("metrics.jsonl", "loss"), ("eval.jsonl", "loss")] {
                let got = one.numbers(file, key);
                let want = cpu.numbers(file, key);
                let off = got
                    .iter()
                    .zip(&want)
                    .map(|(got, want)| (got / want - 1.0).abs())
                    .fold(0.0, f64::max);
                assert!(
                    got.len() == want.len() && off < bound,
                    "{} in {precision}: {key} {off:e}",
                    network.name
                );
            }
            let name = format!("{precision}-sharded");
            let two = on_gpu(
                &network,
                Mpirun(2),
                root.path(),
                &name,
                &format!("{settings} parallel.zero=3"),
            );
            two.same_as(&one, 3, &format!("{} in {precision}", network.name));
            let name = format!("{precision}-stages");
            let two = on_gpu(
                &network,
                Mpirun(2),
                root.path(),
                &name,
                &format!("{settings} parallel.pipeline=2"),
            );
            two.same_as(&one, 3, &format!("{} in {precision}, in stages", network.name));
        }
    }
}

/// Synchronised batch statistics are those of all ranks' samples, however the state is sharded, and
/// running statistics are resumed.
#[test]
fn ranks_share_the_statistics_of_a_batch() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    let network = |synchronised: bool| {
        let layers = format!(
            "model.layers=[{{kind='conv2d', filters=4, kernel=3, bias=false}}, {{kind='batch_norm', \
             synchronised={synchronised}}}, {{kind='gelu'}}, {{kind='flatten'}}, {{kind='dense', units=4}}]"
        );
        let path = format!("data.path={}", root.path().join("pictures").display());
        let rest =
            ["model.kind=layers", "model.input=[7, 6, 1]", "batch.global=8", "optimizer.kind=sgd"];
        let settings = rest.map(String::from).into_iter().chain([layers, path]).collect();
        Network { name: if synchronised { "shared" } else { "separate" }, settings }
    };
    let shared = network(true);
    let losses = |files: &RunFiles| {
        [files.numbers("metrics.jsonl", "loss"), files.numbers("eval.jsonl", "loss")].concat()
    };
    let off = |a: &[f64], b: &[f64]| {
        a.iter().zip(b).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max)
    };
    let one = run(&shared, Alone, root.path(), "one", "parallel.virtual_ranks=1").succeeds();
    let two = run(&shared, Mpirun(2), root.path(), "two", "parallel.virtual_ranks=2").succeeds();
    let far = off(&losses(&one), &losses(&two));
    assert!(far < 1e-5, "{far:e}");
    let separate =
        run(&network(false), Mpirun(2), root.path(), "two", "parallel.virtual_ranks=2").succeeds();
    let far = off(&losses(&one), &losses(&separate));
    assert!(far > 1e-3, "{far:e}: statistics of each rank's samples must differ");
    // A sum of two terms does not depend on their order, so other layouts have the same bits.
    let layouts = [
        (2, "zero=1"),
        (2, "zero=2 parallel.recompute=true checkpoint.every=3"),
        (2, "zero=3 parallel.prefetch=0"),
        // In a pipeline, the ranks of a stage share the statistics.
        (4, "pipeline=2 parallel.zero=1 batch.micro=4"),
    ];
    for (i, (ranks, layout)) in layouts.into_iter().enumerate() {
        let settings = format!("parallel.virtual_ranks=2 parallel.{layout}");
        let files = run(&shared, Mpirun(ranks), root.path(), &i.to_string(), &settings).succeeds();
        files.same_as(&two, 6, layout);
    }
    let middle = root.path().join("shared-1/checkpoints/step-00000003").display().to_string();
    let on = run(&shared, Mpirun(2), root.path(), "on", "parallel.virtual_ranks=2")
        .resume(&middle)
        .succeeds();
    assert_eq!(on.tensors(6), two.tensors(6));
    // On GPUs as well.
    let gpus = on_gpu(
        &shared,
        Mpirun(2),
        root.path(),
        "gpus",
        "parallel.virtual_ranks=2 parallel.zero=3 precision.dtype=f32",
    );
    let far = off(&gpus.numbers("metrics.jsonl", "loss"), &two.numbers("metrics.jsonl", "loss"));
    assert!(far < 1e-4, "{far:e}");
    let tensors = two.tensors(6);
    let running =
        tensors.iter().find(|(name, _)| name.contains("layers.1.running_var, part 0")).unwrap();
    let moved = |bits: &u32| f32::from_bits(*bits) > 0.0 && f32::from_bits(*bits) != 1.0;
    assert!(running.1.iter().all(moved), "{:?}", running.1);
}

/// Tests every update rule, with its state sharded by every ZeRO stage.
#[test]
fn every_optimizer_in_every_stage_has_the_bits_of_one_rank() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    let networks = networks(root.path());
    let network = networks.iter().find(|network| network.name == "regression").unwrap();
    let groups = "optimizer.groups=[{names='*.bias',lr_factor=2.0,weight_decay=0.3},{names='layers.1.*',lr_factor=0.0}]";
    for (kind, more) in ["adam", "adagrad", "rmsprop", "lamb", "lars", "lion", "sgd"]
        .map(|kind| (kind, ""))
        .into_iter()
        .chain([("adamw", groups)])
    {
        let settings = format!("optimizer.kind={kind} {more}");
        let one = run(network, Alone, root.path(), kind, &settings).succeeds();
        for zero in 0..4 {
            let settings = format!("{settings} parallel.zero={zero}");
            let two = run(network, Mpirun(2), root.path(), &format!("{kind}-{zero}"), &settings)
                .succeeds();
            two.same_as(&one, 6, &settings);
        }
        let settings = format!("{settings} parallel.pipeline=2");
        run(network, Mpirun(2), root.path(), &format!("{kind}-stages"), &settings)
            .succeeds()
            .same_as(&one, 6, &settings);
    }
    // Tensors of a group with learning rate 0 keep their initial values; their bias is in another
    // group.
    let start = run(
        network,
        Alone,
        root.path(),
        "start",
        &format!("{groups} optimizer.lr=1e-30 run.steps=1"),
    )
    .succeeds();
    let of = |files: &RunFiles, step, name: &str| {
        let tensors = files.tensors(step);
        tensors.into_iter().find(|(tensor, _)| tensor == name).unwrap().1
    };
    let grouped = RunFiles(root.path().join("regression-adamw"));
    let [weight, bias] = ["layers.1.weight, part 0", "layers.1.bias, part 0"];
    assert_eq!(of(&grouped, 6, weight), of(&start, 1, weight));
    assert_ne!(of(&grouped, 6, bias), of(&start, 1, bias));
}

/// Every row is written once and in order, whichever rank computed it. Targets are not needed.
#[test]
fn predictions_are_in_the_order_of_the_rows() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    for network in networks(root.path()).iter().filter(|network| network.name != "llama") {
        let files = run(network, Alone, root.path(), "run", "").succeeds();
        let (folder, width) = match network.name {
            "regression" => ("table", 2),
            "recommender" => ("clicks", 1),
            "contrastive" => ("pictures", 5),
            _ => ("pictures", 4),
        };
        let shard = root.path().join(folder).join("train-00000.h5");
        let unlabelled = root.path().join(format!("{}.h5", network.name));
        std::fs::copy(&shard, &unlabelled).unwrap();
        hdf5::File::append(&unlabelled).unwrap().unlink("targets").unwrap();
        let predicted = |transport: Option<usize>, name: &str, settings: &[&str]| {
            let out = root.path().join(format!("{}-{name}", network.name));
            let mut args: Vec<String> = vec!["predict".into()];
            for (key, value) in
                [("--checkpoint", &files.0), ("--data", &unlabelled), ("--out", &out)]
            {
                args.extend([key.into(), value.display().to_string()]);
            }
            args.extend(settings.iter().flat_map(|setting| ["--set".into(), setting.to_string()]));
            let mut command = match transport {
                None => program(&args),
                Some(ranks) => {
                    let mut command = mpirun(ranks);
                    command.arg(hpctrain_testkit::program()).args(&args);
                    command
                }
            };
            finish(&mut command).succeeded();
            let file = hdf5::File::open(&out).unwrap();
            let outputs: Vec<f32> = file.dataset("outputs").unwrap().read_raw().unwrap();
            let classes: Option<Vec<u32>> =
                file.dataset("classes").ok().map(|classes| classes.read_raw().unwrap());
            (outputs, classes)
        };
        let (outputs, classes) = predicted(None, "whole.h5", &["eval.batch=1000"]);
        let rows = hdf5::File::open(&shard).unwrap().dataset("inputs").unwrap().shape()[0];
        assert_eq!(outputs.len(), rows * width, "{}", network.name);
        let has_classes = !["regression", "contrastive"].contains(&network.name);
        assert_eq!(classes.is_some(), has_classes, "{}", network.name);
        if network.name == "recommender" {
            // With one logit, the class is its sign.
            assert_eq!(classes, Some(outputs.iter().map(|x| u32::from(*x > 0.0)).collect()));
        } else if let Some(classes) = &classes {
            let best = |row: &[f32]| {
                (0..4).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32
            };
            assert_eq!(*classes, outputs.chunks(4).map(best).collect::<Vec<_>>());
        }
        for (ranks, name) in [(2, "two.h5"), (3, "three.h5")] {
            let several = predicted(Some(ranks), name, &["eval.batch=5"]);
            let off =
                several.0.iter().zip(&outputs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(
                several.0.len() == outputs.len() && off < 1e-5 && several.1 == classes,
                "{}: {off:e}",
                network.name
            );
        }
    }
}

/// Returns the bits of the outputs and the classes that `predict` writes, and its stderr.
fn outputs(
    checkpoint: &Path,
    data: &Path,
    out: &Path,
    more: &[&str],
) -> (Vec<u32>, Option<Vec<u32>>, String) {
    let args = [
        Path::new("predict"),
        "--checkpoint".as_ref(),
        checkpoint,
        "--data".as_ref(),
        data,
        "--out".as_ref(),
        out,
    ];
    let ended = finish(program(args).args(more)).succeeded();
    let file = hdf5::File::open(out).unwrap();
    let outputs: Vec<f32> = file.dataset("outputs").unwrap().read_raw().unwrap();
    let classes: Option<Vec<u32>> =
        file.dataset("classes").ok().map(|classes| classes.read_raw().unwrap());
    drop(file);
    std::fs::remove_file(out).unwrap();
    (outputs.into_iter().map(f32::to_bits).collect(), classes, ended.stderr)
}

/// Returns the object that `eval --checkpoint --json` prints.
fn measured(checkpoint: &Path, data: &Path, more: &[&str]) -> serde_json::Value {
    let args = [
        Path::new("eval"),
        "--checkpoint".as_ref(),
        checkpoint,
        "--data".as_ref(),
        data,
        "--json".as_ref(),
    ];
    let ended = finish(program(args).args(more)).succeeded();
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {ended}"))
}

/// Copies the checkpoint in `from`, without its preprocessing.
fn without_preprocessing(from: &Path, to: &Path) {
    copy(from, to);
    let mut manifest = json(&to.join("manifest.json"));
    manifest.as_object_mut().unwrap().remove("preprocessing").unwrap();
    let text = manifest.to_string();
    std::fs::write(
        to.join("manifest.crc32"),
        format!("{:08x}  manifest.json\n", crc32fast::hash(text.as_bytes())),
    )
    .unwrap();
    std::fs::write(to.join("manifest.json"), text).unwrap();
}

/// Inputs are scaled as in training, whether rows come from the training's shards, from a separate
/// import, or from a file of another tool without a scale.
#[test]
fn inputs_get_the_scale_of_training() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    data(root.path());
    let networks = networks(root.path());
    let network = networks.iter().find(|network| network.name == "convolutions").unwrap();
    let run_of = |name: &str, settings: &str| run(network, Alone, root.path(), name, settings);
    let files = run_of("run", "run.steps=20 checkpoint.every=10").succeeds();
    let checkpoint = files.checkpoint(20);

    // The validation rows are imported separately.
    let kept = hdf5::File::open(at("pictures/val-00000.h5")).unwrap();
    let pixels: Vec<u8> = kept.dataset("inputs").unwrap().read_raw().unwrap();
    let classes: Vec<u32> = kept.dataset("targets").unwrap().read_raw().unwrap();
    drop(kept);
    std::fs::write(at("few"), idx(&[12, 7, 6], pixels.clone())).unwrap();
    std::fs::write(at("their"), idx(&[12], classes.iter().map(|class| *class as u8).collect()))
        .unwrap();
    let kept = ImportOptions {
        not_finite: NotFinite::Error,
        every: 0,
        shards: 1,
        normalize: true,
        out: at("few-imported"),
    };
    import_idx(&ImportIdx { images: at("few"), labels: at("their"), options: kept }).unwrap();
    let raw = hdf5::File::create(at("raw.h5")).unwrap();
    raw.new_dataset::<u8>().shape([12, 7, 6]).create("inputs").unwrap().write_raw(&pixels).unwrap();
    raw.new_dataset::<u32>().shape(12).create("targets").unwrap().write_raw(&classes).unwrap();
    drop(raw);

    let sets = [at("pictures"), at("few-imported"), at("raw.h5")];
    let [own, imported, raw] =
        sets.each_ref().map(|data| outputs(&checkpoint, data, &at("out.h5"), &[]));
    assert_eq!(own.0.len(), 12 * 4);
    assert_eq!((&imported.0, &imported.1), (&own.0, &own.1), "imported separately");
    assert_eq!((&raw.0, &raw.1), (&own.0, &own.1), "without a scale");
    for (stderr, words) in [
        (&imported.2, "learned with (its own in the data)"),
        (&raw.2, "learned with (none in the data)"),
    ] {
        assert!(stderr.contains(words), "{stderr}");
    }
    assert!(!own.2.contains("learned"), "{}", own.2);
    // The loss equals that of the run, on the first ten of the twelve rows; all can be used, too.
    let loss = files.numbers("eval.jsonl", "loss").pop().unwrap();
    for data in &sets {
        let found = measured(&checkpoint, data, &[]);
        assert_eq!(
            (found["loss"].as_f64().unwrap().to_bits(), &found["samples"]),
            (loss.to_bits(), &10.into()),
            "{found}"
        );
        assert_eq!(measured(&checkpoint, data, &["--set", "eval.samples=12"])["samples"], 12);
    }

    // Runs that start from the weights, or resume, keep the scale of the checkpoint and say so.
    let tuned = |name: &str, more: &[&str]| {
        let path = format!("data.path={} data.validation=train-*.h5", at("few-imported").display());
        let run = run_of(name, &format!("{path} run.steps=22 parallel.virtual_ranks=1"))
            .resume(&checkpoint.display().to_string());
        finish(run.command().args(more).args(["--set", "parallel.virtual_ranks=1"])).succeeded()
    };
    for (name, more) in [("tuned", &["--weights-only"][..]), ("on", &["--allow-changed-data"])] {
        let ended = tuned(name, more);
        assert!(
            ended.stdout.contains(
                "inputs get the scale that the network learned with (its own in the data)"
            ),
            "{ended}"
        );
        let of = |dir: &Path| json(&dir.join("manifest.json"))["preprocessing"].clone();
        let written = root.path().join(format!("convolutions-{name}/checkpoints/latest"));
        assert_eq!(of(&written), of(&checkpoint));
        assert_eq!(of(&written)["scales"][0]["mean"].as_array().unwrap().len(), 1);
    }

    // With data.scale = unit, bytes and floats give the same inputs.
    let floats: Vec<f32> = pixels.iter().map(|pixel| f32::from(*pixel)).collect();
    let file = hdf5::File::create(at("floats.h5")).unwrap();
    file.new_dataset::<f32>()
        .shape([12, 7, 6])
        .create("inputs")
        .unwrap()
        .write_raw(&floats)
        .unwrap();
    drop(file);
    let unit = format!("data.path={} data.scale=unit run.steps=2", at("raw.h5").display());
    let unit = run_of("unit", &unit).succeeds().checkpoint(2);
    let [bytes, scaled, floats] = ["raw.h5", "few-imported", "floats.h5"]
        .map(|data| outputs(&unit, &at(data), &at("out.h5"), &[]).0);
    assert_eq!((&scaled, &floats), (&bytes, &bytes));

    // A checkpoint without preprocessing is used with the scale of the data, and a warning.
    without_preprocessing(&checkpoint, &at("old"));
    let before = outputs(&at("old"), &sets[0], &at("out.h5"), &[]);
    assert_eq!((&before.0, &before.1), (&own.0, &own.1));
    assert!(before.2.contains("the checkpoint does not record the scale"), "{}", before.2);
    assert_ne!(outputs(&at("old"), &sets[2], &at("out.h5"), &[]).0, own.0);
}

/// Tables may have another order of columns and values, and another scale.
#[test]
fn tables_get_the_preprocessing_of_training() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    data(root.path());
    let networks = networks(root.path());
    let network = networks.iter().find(|network| network.name == "recommender").unwrap();
    let files = run(network, Alone, root.path(), "run", "").succeeds();
    let import = |name: &str, table: &str, categories: Categories| {
        std::fs::write(at(name).with_extension("csv"), table).unwrap();
        let kept = ImportOptions {
            not_finite: NotFinite::Error,
            every: 0,
            shards: 1,
            normalize: true,
            out: at(name),
        };
        let input = at(name).with_extension("csv");
        let targets = vec!["clicked".into()];
        import_csv(&ImportCsv { targets, categories, ..ImportCsv::new(input, kept) }).unwrap();
    };
    let named = |columns: &[&str], hash: Option<u32>| Categories::Named {
        columns: columns.iter().map(|name| name.to_string()).collect(),
        ids: hash.map_or(CategoryIds::APPEARANCE, CategoryIds::Hashed),
    };
    let rows = [["z", "2", "6"], ["x", "9", "3"], ["new", "4", "0"], ["", "5", "6"]];
    let table = |order: [usize; 3]| {
        let names = ["site", "age", "device"];
        let line = |row: [&str; 3]| format!("0,{}\n", order.map(|i| row[i]).join(","));
        format!("clicked,{}\n", order.map(|i| names[i]).join(",")) + &rows.map(line).concat()
    };
    import("like", &table([0, 1, 2]), Categories::Like(at("clicks")));
    import("own", &table([2, 1, 0]), named(&["device", "site"], None));
    let [like, own] = ["like", "own"].map(|name| outputs(&files.0, &at(name), &at("out.h5"), &[]));
    assert_eq!((like.0.len(), &like.0), (4, &own.0));
    for words in ["get the ids that the network learned", "categories are taken in the order"] {
        assert!(own.2.contains(words) && !like.2.contains(words), "{} / {}", own.2, like.2);
    }
    // Rows without targets are imported on the command line.
    let unlabelled: String = table([1, 0, 2])
        .lines()
        .map(|line| line.split_once(',').unwrap().1.to_owned() + "\n")
        .collect();
    std::fs::write(at("new.csv"), unlabelled).unwrap();
    let args = ["new.csv", "--like", "clicks", "--out", "new"];
    let args = args.map(|arg| {
        if arg == "--like" || arg == "--out" { arg.into() } else { at(arg).display().to_string() }
    });
    let ended = finish(program(["data", "import", "csv"]).args(args)).succeeded();
    assert!(ended.stdout.contains("without targets: for hpctrain predict"), "{ended}");
    assert_eq!(outputs(&files.0, &at("new"), &at("out.h5"), &[]).0, like.0);
    let ended =
        finish(program(["eval", "--checkpoint"]).arg(&files.0).arg("--data").arg(at("new")));
    assert!(ended.code() == 2 && ended.stderr.contains("has no dataset /targets"), "{ended}");
    // Hashed values cannot be mapped back.
    import("hashed", &table([0, 1, 2]), named(&["site", "device"], Some(4)));
    for verb in ["predict", "eval"] {
        let mut command = program([verb, "--checkpoint"]);
        command.arg(&files.0).arg("--data").arg(at("hashed"));
        command.args(
            (verb == "predict")
                .then(|| ["--out".to_string(), at("out.h5").display().to_string()])
                .iter()
                .flatten(),
        );
        let ended = finish(&mut command);
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(
            ended.stderr.contains("column \"site\" are hashed to 4 ids")
                && ended.stderr.contains("--like"),
            "{ended}"
        );
        assert_eq!(ended.stderr.matches("error: ").count(), 1, "{ended}");
    }
}

/// `eval --checkpoint` gives the same results as the run, on any ranks, and changes no file.
#[test]
fn any_checkpoint_is_evaluated_on_any_data_without_changes() {
    let root = tempfile::tempdir().unwrap();
    data(root.path());
    let networks = networks(root.path());
    for network in networks.iter().filter(|network| ["llama", "regression"].contains(&network.name))
    {
        let files = run(network, Alone, root.path(), "run", "").succeeds();
        let tree = || {
            let ended = finish(
                std::process::Command::new("find")
                    .arg(&files.0)
                    .args(["-printf", "%p %y %l %s %T@\n"]),
            );
            let mut lines: Vec<String> =
                ended.succeeded().stdout.lines().map(str::to_owned).collect();
            // Leases are created and removed in a separate directory, so modification times of
            // directories are ignored.
            let is_place = |line: &str| {
                let places = ["/.leases d", "/.leases/.turn f", "/checkpoints d", "/logs d"];
                places.iter().any(|place| line.contains(place))
            };
            lines.retain(|line| !is_place(line));
            lines.sort();
            lines
        };
        let before = tree();
        let recorded = files.text("eval.jsonl");
        let own: serde_json::Value =
            serde_json::from_str(recorded.lines().last().unwrap()).unwrap();
        for ranks in [1, 2, 3] {
            let mut command = if ranks == 1 { program(["eval"]) } else { mpirun(ranks) };
            if ranks > 1 {
                command.arg(hpctrain_testkit::program()).arg("eval");
            }
            let ended = finish(command.arg("--checkpoint").arg(&files.0).arg("--json")).succeeded();
            let found: serde_json::Value =
                serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {ended}"));
            assert_eq!(
                found["loss"].as_f64().map(f64::to_bits),
                own["loss"].as_f64().map(f64::to_bits),
                "{found}"
            );
            assert_eq!(
                (&found["samples"], &found["step"], &found["split"]),
                (&10.into(), &6.into(), &"validation".into())
            );
            match network.name {
                "llama" => assert_eq!(found["perplexity"], own["perplexity"]),
                _ => assert_eq!(
                    (&found["metrics"], found.get("perplexity")),
                    (&own["metrics"], None)
                ),
            }
        }
        let ended =
            finish(program(["eval", "--split", "train", "--checkpoint"]).arg(files.checkpoint(6)))
                .succeeded();
        let words = [
            "step-00000006: loss ",
            "over 10 samples of ",
            "(train)",
            if network.name == "llama" { "perplexity" } else { "mae" },
        ];
        assert!(words.iter().all(|words| ended.stdout.contains(words)), "{ended}");
        assert_eq!(tree(), before);

        // Evaluations on another validation set are not recorded for the run, but the same data at
        // another path is accepted.
        assert_eq!(
            (&own["samples"], own["data"].as_str().map(str::len)),
            (&10.into(), Some(16)),
            "{own}"
        );
        let eval = |settings: &[&str]| {
            let mut command = program(["eval", "--run"]);
            command.arg(&files.0).args(settings.iter().flat_map(|setting| ["--set", setting]));
            finish(&mut command)
        };
        let other = format!("data.path={}", root.path().join("pictures").display());
        for settings in [&["eval.samples=3"][..], &[&other], &["data.validation=train-*.h5"]] {
            let ended = eval(settings);
            assert_eq!(ended.code(), 2, "{ended}");
            if settings[0] != other {
                assert!(
                    ended
                        .stderr
                        .contains("\nhint: hpctrain eval --checkpoint CHECKPOINT --data PATH"),
                    "{ended}"
                );
            }
        }
        assert_eq!(files.text("eval.jsonl"), recorded);
        if network.name == "regression" {
            let ended = finish(program(["sample", "--checkpoint"]).arg(&files.0));
            let words = ["is not a language model\nhint: hpctrain predict", "eval --checkpoint"];
            assert!(
                ended.code() == 2 && words.iter().all(|words| ended.stderr.contains(words)),
                "{ended}"
            );
            copy(&root.path().join("table"), &root.path().join("moved"));
            let ended =
                eval(&[&format!("data.path={}", root.path().join("moved").display())]).succeeded();
            assert!(ended.stdout.contains("validation loss"), "{ended}");
            let last: serde_json::Value =
                serde_json::from_str(files.text("eval.jsonl").lines().last().unwrap()).unwrap();
            assert_eq!(
                (&last["loss"], &last["data"], &last["samples"]),
                (&own["loss"], &own["data"], &own["samples"])
            );
        }
    }
}
