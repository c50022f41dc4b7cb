//! `model.place.tables = host` on GPUs, in their simulator: embedding tables that are stored, read
//! and updated on the host.

use std::path::Path;

use hpctrain::data::import::{
    Categories, CategoryIds, ImportCsv, ImportOptions, NotFinite, import_csv,
};
use serde_json::Value;

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, RunFiles, json};
use hpctrain_testkit::simulator::{Settings, with_simulator};

const STEPS: u64 = 4;
const HOST: &str = "model.place.tables=host";

const LAZY: (&str, &str) = ("CUDASIM_STREAMS", "lazy");
const REVERSE: (&str, &str) = ("CUDASIM_ORDER", "reverse");
/// Host code cannot access device memory.
const NO_HOST_ACCESS: (&str, &str) = ("CUDASIM_HOST_ACCESS", "0");
const CHECK: (&str, &str) = ("CUDASIM_CHECK", "1");

/// Writes a table of clicks with a dense feature and two categories, some of whose values are
/// frequent.
fn clicks(folder: &Path) {
    let line = |i: u32| {
        format!(
            "{},{},{},{}\n",
            i % 2,
            ["x", "y", "z"][(i * 7 % 3) as usize],
            i * 5 % 11,
            i * 3 % 7
        )
    };
    let columns = ["site", "device"].map(String::from).to_vec();
    for (name, head) in
        [("clicks", "clicked,site,age,device\n"), ("sites", "clicked,site,device\n")]
    {
        let lines = (0..60).map(line).map(|line| match name {
            "clicks" => line,
            _ => line
                .split(',')
                .enumerate()
                .filter(|(at, _)| *at != 2)
                .map(|(_, word)| word)
                .collect::<Vec<_>>()
                .join(","),
        });
        let table: String = std::iter::once(head.to_string()).chain(lines).collect();
        let input = folder.join(format!("{name}.csv"));
        std::fs::write(&input, table).unwrap();
        let not_finite = NotFinite::Error;
        let out = folder.join(name);
        let kept = ImportOptions { not_finite, every: 5, shards: 2, normalize: true, out };
        let categories =
            Categories::Named { columns: columns.clone(), ids: CategoryIds::APPEARANCE };
        import_csv(&ImportCsv {
            targets: vec!["clicked".into()],
            categories,
            ..ImportCsv::new(input, kept)
        })
        .unwrap();
    }
}

/// Networks with embedding tables: with dense features, without, and a language model.
const NETWORKS: [&str; 3] = ["recommender", "categories", "llama"];

/// Returns the settings of a small run with eight samples per step in two virtual ranks, which
/// saves a checkpoint halfway. Without gradient clipping no value depends on the gradient norm.
fn network(name: &str, root: &Path) -> Vec<String> {
    let layers = |tables: &str| {
        format!(
            "model.layers=[{tables}, {{kind='dot_interaction'}}, {{kind='dropout', rate=0.1}}, {{kind='dense', units=7}}, \
             {{kind='relu'}}, {{kind='dense', units=1}}]"
        )
    };
    let of_layers = |data: &str, input: &str, tables: &str| {
        let path = format!("data.path={}", root.join(data).display());
        [path, format!("model.input=[{input}]"), layers(tables), "model.kind=layers".into()]
            .into_iter()
            .chain(["loss.kind=binary-cross-entropy".into()])
            .collect::<Vec<String>>()
    };
    let own = match name {
        "recommender" => of_layers(
            "clicks",
            "1",
            "{kind='embedding_tables', ids=[4, 8], width=6, dense=[{kind='dense', units=5}, {kind='relu'}, {kind='dense', units=6}]}",
        ),
        "categories" => of_layers("sites", "0", "{kind='embedding_tables', ids=[4, 8], width=6}"),
        _ => ["model.kind=llama", "model.kv_heads=1", "model.hidden=24", "model.context=8"]
            .map(String::from)
            .to_vec(),
    };
    let ours = [
        "run.device=cuda",
        "comm.transport=host-staged",
        "run.steps=4",
        "parallel.virtual_ranks=2",
        "optimizer.grad_clip=0",
        "optimizer.weight_decay=0.1",
        "eval.samples=8",
        "checkpoint.every=2",
        "checkpoint.keep=5",
        "device.memory_limit=48MiB",
        "device.ranks_per_gpu=2",
    ];
    ours.map(String::from).into_iter().chain(own).collect()
}

struct Files {
    files: RunFiles,
    card: Value,
}

impl Files {
    /// Panics unless everything but the gradient norms is bitwise equal: norms of tables on the
    /// host are summed in another order.
    #[track_caller]
    fn same_as(&self, other: &Files, what: &str) {
        let without_norm = |files: &RunFiles| -> Vec<String> {
            let without = |line: &String| {
                let mut line: Value = serde_json::from_str(line).unwrap();
                line.as_object_mut().unwrap().remove("grad_norm").unwrap();
                line.to_string()
            };
            files.steps().iter().map(without).collect()
        };
        assert_eq!(without_norm(&self.files), without_norm(&other.files), "{what}: metrics");
        assert_eq!(self.files.evaluated(), other.files.evaluated(), "{what}: evaluations");
        assert_eq!(
            self.files.tensors(STEPS),
            other.files.tensors(STEPS),
            "{what}: the last checkpoint"
        );
        let norms = |files: &RunFiles| files.numbers("metrics.jsonl", "grad_norm");
        for (one, other) in norms(&self.files).iter().zip(norms(&other.files)) {
            assert!((one - other).abs() <= 1e-6 * other, "{what}: norms {one} and {other}");
        }
    }

    fn bytes(&self, of: &str, category: &str) -> u64 {
        self.card["stages"][0][of][category].as_u64().unwrap()
    }
}

#[track_caller]
fn trains(run: &Run, sim: Settings) -> Files {
    finish(with_simulator(&mut run.command()).envs(sim.iter().copied())).succeeded();
    let files = run.files();
    let card = json(&files.path("run.json"));
    Files { files, card }
}

fn run(transport: Transport, root: &Path, name: &str, network: &[String], more: &[&str]) -> Run {
    let more = more.iter().map(|setting| setting.to_string());
    Run {
        settings: network.iter().cloned().chain(more).collect(),
        ..Run::new(transport, root, name, &[])
    }
}

/// Runs every network on one rank and two, in every ZeRO stage, with changing settings of the
/// simulator that reveal mistakes.
fn every_layout(precision: &str) {
    let root = tempfile::tempdir().unwrap();
    clicks(root.path());
    for name in NETWORKS {
        let network = network(name, root.path());
        let with = |transport, what: &str, more: &[&str], sim| {
            let run = run(
                transport,
                root.path(),
                &format!("{name}-{what}"),
                &network,
                &[&[precision], more].concat(),
            );
            trains(&run, sim)
        };
        let here = with(Alone, "here", &[], &[]);
        assert_eq!(here.bytes("peak_bytes", "offloaded"), 0);
        for (what, transport, layout, sim) in [
            ("alone", Alone, &["parallel.zero=0"][..], &[LAZY, NO_HOST_ACCESS][..]),
            ("checked", Alone, &["parallel.recompute=true", "offload.activations=true"], &[CHECK]),
            ("two", Mpirun(2), &["parallel.zero=0"], &[LAZY, REVERSE]),
            (
                "one",
                Mpirun(2),
                &["parallel.zero=1", "offload.optimizer=true"],
                &[LAZY, NO_HOST_ACCESS],
            ),
            ("three", Mpirun(2), &["parallel.zero=3"], &[LAZY]),
        ] {
            let there = with(transport, what, &[&[HOST], layout].concat(), sim);
            there.same_as(&here, &format!("{name}, {precision}, {what}, {sim:?}"));
            assert_eq!(
                there.files.tensors(2),
                here.files.tensors(2),
                "{name} {what}: the checkpoint before the last"
            );
            let [promised, taken] =
                ["estimated_bytes", "peak_bytes"].map(|of| there.bytes(of, "offloaded"));
            assert!(
                taken > 0 && promised == taken,
                "{name}, {what}: {promised} promised, {taken} taken"
            );
            if what == "alone" {
                for category in ["parameters", "gradients", "optimizer"] {
                    let [there, here] =
                        [&there, &here].map(|files| files.bytes("peak_bytes", category));
                    assert!(there < here, "{name}: {category}: {there} of {here}");
                }
            }
        }
    }
}

#[test]
fn tables_on_the_host_train_as_on_the_gpu_in_f32() {
    every_layout("precision.dtype=f32");
}

#[test]
fn tables_on_the_host_train_as_on_the_gpu_in_bf16() {
    every_layout("precision.dtype=bf16");
}

/// With several micro-batches per virtual rank, rows are added to the gradient of tables in another
/// order than on the GPU, but in the same order on any number of ranks.
#[test]
fn micro_batches_and_clips_have_the_bits_of_any_ranks() {
    let root = tempfile::tempdir().unwrap();
    clicks(root.path());
    for name in NETWORKS {
        let network = network(name, root.path());
        let common = [
            "precision.dtype=f32",
            "batch.micro=2",
            "optimizer.grad_clip=0.05",
            "optimizer.kind=lamb",
        ];
        let with = |transport, what: &str, more: &[&str], sim| {
            let run = run(
                transport,
                root.path(),
                &format!("{name}-{what}"),
                &network,
                &[&common, more].concat(),
            );
            trains(&run, sim)
        };
        let here = with(Alone, "here", &[], &[]);
        let there = with(Alone, "there", &[HOST], &[LAZY, NO_HOST_ACCESS]);
        let near = |key: &str| {
            let [one, other] =
                [&here, &there].map(|files| files.files.numbers("metrics.jsonl", key));
            one.iter().zip(&other).all(|(one, other)| (one - other).abs() < 1e-4)
        };
        assert!(
            near("loss") && near("grad_norm"),
            "{name}: {:?}, {:?}",
            here.files.steps(),
            there.files.steps()
        );
        for zero in ["parallel.zero=0", "parallel.zero=2", "parallel.zero=3"] {
            let two = with(Mpirun(2), zero, &[HOST, zero], &[LAZY, REVERSE]);
            two.files.same_as(&there.files, STEPS, &format!("{name} {zero}"));
        }
    }
}

/// Checkpoints do not depend on where the tables were: a run resumes with either placement, and is
/// evaluated on any device.
#[test]
fn checkpoints_are_of_either_place() {
    let root = tempfile::tempdir().unwrap();
    clicks(root.path());
    for name in NETWORKS {
        let network = network(name, root.path());
        let base = ["precision.dtype=f32", "optimizer.ema=0.9", "run.sdc_check_every=1"];
        let more = ["log.tensorboard=true", "log.histograms=1"];
        let with = |transport, what: &str, more: &[&str]| {
            run(
                transport,
                root.path(),
                &format!("{name}-{what}"),
                &network,
                &[&base, more].concat(),
            )
        };
        let here = trains(&with(Alone, "here", &more), &[]);
        let there = trains(
            &with(Mpirun(2), "there", &[&[HOST, "parallel.zero=3"], &more[..]].concat()),
            &[LAZY],
        );
        there.same_as(&here, name);
        for (what, from, transport, place) in [
            ("to-host", &here, Mpirun(2), HOST),
            ("to-device", &there, Alone, "model.place.tables=device"),
        ] {
            let run =
                with(transport, what, &[place]).resume(from.files.checkpoint(2).to_str().unwrap());
            let files = trains(&run, &[LAZY]).files;
            assert_eq!(files.tensors(STEPS), here.files.tensors(STEPS), "{name} {what}");
            assert!(
                !files.text("logs/rank-00000.log").contains("have changed in memory"),
                "{name} {what}"
            );
        }
        let loss = |settings: &[&str]| {
            let checkpoint = there.files.checkpoint(STEPS);
            let mut asked =
                program(["eval", "--checkpoint", checkpoint.to_str().unwrap(), "--json"]);
            asked.args(settings.iter().flat_map(|setting| ["--set", setting]));
            let output = finish(with_simulator(&mut asked)).succeeded().stdout;
            serde_json::from_str::<Value>(&output).unwrap()["loss"].as_f64().unwrap()
        };
        let trained = *there.files.numbers("eval.jsonl", "loss").last().unwrap();
        assert_eq!(loss(&["run.device=cuda"]), trained, "{name}");
        assert_eq!(loss(&["run.device=cuda", "model.place.tables=device"]), trained, "{name}");
        assert!((loss(&["run.device=cpu"]) - trained).abs() < 1e-4, "{name}");
    }
    // Text is generated one position at a time.
    let drawn = |of: &str| {
        let checkpoint = root.path().join(of).join("checkpoints/step-00000004");
        let mut asked =
            program(["sample", "--checkpoint", checkpoint.to_str().unwrap(), "--temperature", "0"]);
        asked.args(["--tokens", "12", "--prompt", "the", "--set", "run.device=cuda"]);
        finish(with_simulator(&mut asked)).succeeded().stdout
    };
    assert_eq!(drawn("llama-there"), drawn("llama-here"));
}
