//! Runs by epochs: their length and intervals, the end of the schedule, early stopping, and
//! evaluations per class and per data set.

use std::path::Path;

use hpctrain::config::{Config, Sources, load};
use hpctrain::data::{SampleMut, SampleSizes, Source};
use hpctrain::engine::{Splits, on_threads};
use hpctrain::error::Result;
use hpctrain::run_dir::{Resume, RunOutcome};
use hpctrain::train::{Customization, TrainRequest, train};
use serde_json::Value;

use hpctrain_testkit::launch::Transport::Simulate;
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, RunFiles};

/// Points on a circle, as several data sets. The target is the class of a sector, or with `value` a
/// number that is 0 or 1 in turn.
#[derive(Clone)]
struct Circle {
    sets: Vec<u64>,
    sectors: u32,
    value: bool,
}

impl Source for Circle {
    fn samples(&self) -> u64 {
        self.sets.iter().sum()
    }

    fn sizes(&self) -> SampleSizes {
        SampleSizes {
            features: 2,
            classes: usize::from(!self.value),
            values: usize::from(self.value),
            ..SampleSizes::default()
        }
    }

    fn parts(&self) -> Vec<u64> {
        self.sets.clone()
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        let turn = (sample as f64 * 0.618_034) % 1.0;
        let angle = std::f64::consts::TAU * turn;
        into.features.copy_from_slice(&[angle.cos() as f32, angle.sin() as f32]);
        let sector = (turn * f64::from(self.sectors)) as u32;
        into.classes.fill(sector);
        into.values.fill((sector % 2) as f32);
        Ok(())
    }
}

const SETTINGS: [&str; 9] = [
    "model.kind=layers",
    "model.input=[2]",
    "run.device=cpu",
    "batch.global=16",
    "optimizer.lr=0.05",
    "lr_schedule.warmup=2",
    "parallel.virtual_ranks=4",
    // The last chunk is short, and some chunks have samples of both data sets.
    "eval.batch=7",
    "checkpoint.every=0",
];

/// Returns a network of `outputs` outputs, with enough blocks for four stages.
fn network(outputs: u32) -> String {
    let dense = |units: u32| format!("{{kind='dense', units={units}}}");
    let hidden = format!("{}, {{kind='tanh'}}, ", dense(8)).repeat(3);
    format!("model.layers=[{hidden}{}]", dense(outputs))
}

fn config(root: &Path, name: &str, more: &[&str]) -> Config {
    let place = [format!("run.root={}", root.display()), format!("run.name={name}")];
    let settings = SETTINGS.iter().chain(more).map(|setting| setting.to_string());
    let overrides: Vec<String> = settings.chain(place).collect();
    load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap().0
}

fn train_on_circle(
    root: &Path,
    name: &str,
    ranks: usize,
    data: &Circle,
    more: &[&str],
    resume: Resume,
) -> (RunFiles, RunOutcome) {
    let config = config(root, name, more);
    let ended = on_threads(ranks, |comm| {
        let validation: Option<Box<dyn Source>> = Some(Box::new(data.clone()));
        let own = Customization {
            data: Some(Splits {
                name: "a circle".into(),
                train: Box::new(data.clone()),
                validation,
            }),
            ..Customization::default()
        };
        let request = TrainRequest {
            threads: Some(1),
            resume: resume.clone(),
            ..TrainRequest::new(config.clone(), "circle")
        };
        train(comm, &request, own, None)
    });
    (RunFiles(root.join(name)), ended.unwrap().swap_remove(0))
}

fn last(files: &RunFiles, name: &str) -> Value {
    serde_json::from_str(files.text(name).lines().last().unwrap()).unwrap()
}

#[test]
fn epochs_decide_length_evaluations_and_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let data = Circle { sets: vec![40], sectors: 2, value: true };
    let network = network(1);
    let settings_for = |epochs: &str| {
        let settings = [
            &network,
            "loss.kind=binary-cross-entropy",
            "eval.every_epochs=1",
            "checkpoint.every_epochs=2",
        ];
        [&settings[..], &["checkpoint.keep=9", epochs]]
            .concat()
            .into_iter()
            .map(String::from)
            .collect::<Vec<_>>()
    };
    let run = |name: &str, epochs: &str, resume| {
        let settings = settings_for(epochs);
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        train_on_circle(root.path(), name, 2, &data, &settings, resume).0
    };
    // Three epochs of 40 samples are 120 samples, in steps of 16.
    let files = run("x", "run.epochs=3", Resume::No);
    assert_eq!(files.numbers("metrics.jsonl", "step"), (1..=8).map(f64::from).collect::<Vec<_>>());
    assert_eq!(files.numbers("eval.jsonl", "step"), [3.0, 5.0, 8.0]);
    let saved = |step| files.checkpoint(step).exists();
    assert_eq!((1..=8).filter(|step| saved(*step)).collect::<Vec<_>>(), [5, 8]);
    let lr = last(&files, "metrics.jsonl")["lr"].as_f64().unwrap();
    assert_eq!(lr.to_bits(), (0.05f64 * 0.1).to_bits(), "the last step has the minimum");
    let config: toml::Table = toml::from_str(&files.text("config.toml")).unwrap();
    assert_eq!(
        (config["run"]["steps"].as_integer(), config["run"]["epochs"].as_integer()),
        (Some(8), Some(0))
    );
    // The run is extended by an epoch.
    let files = run("x", "run.epochs=4", Resume::Auto);
    assert_eq!(files.numbers("metrics.jsonl", "step").len(), 10);
    assert_eq!(files.numbers("eval.jsonl", "step"), [3.0, 5.0, 8.0, 10.0]);
    // A run is resumed in the middle of an epoch.
    let whole = run("whole", "run.epochs=4", Resume::No);
    run("parts", "run.steps=4", Resume::No);
    let parts = run("parts", "run.epochs=4", Resume::Auto);
    assert_eq!(parts.numbers("eval.jsonl", "step"), [3.0, 4.0, 5.0, 8.0, 10.0]);
    assert_eq!(whole.numbers("eval.jsonl", "step"), [3.0, 5.0, 8.0, 10.0]);
}

/// Epochs of a number of steps, however many samples the data has.
#[test]
fn an_epoch_may_be_a_number_of_steps() {
    let root = tempfile::tempdir().unwrap();
    let data = Circle { sets: vec![40], sectors: 2, value: true };
    let network = network(1);
    let settings = [
        &network[..],
        "loss.kind=binary-cross-entropy",
        "run.steps_per_epoch=3",
        "run.epochs=3",
        "eval.every_epochs=1",
        "checkpoint.every_epochs=2",
        "checkpoint.keep=9",
        "log.tensorboard=true",
    ];
    let run = |name: &str, ranks: usize| {
        train_on_circle(root.path(), name, ranks, &data, &settings, Resume::No).0
    };
    let files = run("x", 2);
    assert_eq!(files.numbers("eval.jsonl", "step"), [3.0, 6.0, 9.0]);
    let saved = |step| files.checkpoint(step).exists();
    assert_eq!((1..=9).filter(|step| saved(*step)).collect::<Vec<_>>(), [6, 9]);
    let epochs: Vec<f64> = (1..=9).map(|step| f64::from(step) / 3.0).collect();
    assert_eq!(files.numbers("metrics.jsonl", "epoch"), epochs);
    // Samples continue over the data, so the length of an epoch changes no loss.
    let by_steps = settings.map(|setting| match setting {
        "run.steps_per_epoch=3" => "run.steps=9",
        "run.epochs=3" => "eval.every=3",
        "eval.every_epochs=1" => "run.seed=1337",
        other => other,
    });
    let plain = train_on_circle(root.path(), "plain", 1, &data, &by_steps, Resume::No).0;
    let losses = |files: &RunFiles| files.numbers("metrics.jsonl", "loss");
    assert_eq!(losses(&files), losses(&plain));
    // Parameter servers count epochs in the same way.
    let served = Run::new(
        Simulate(3),
        root.path(),
        "served",
        &["run.steps=0", "run.epochs=2", "run.steps_per_epoch=2", "eval.every_epochs=1"],
    );
    finish(served.command().args(["--servers", "1"])).succeeded();
    let served = served.files();
    assert_eq!(served.numbers("metrics.jsonl", "epoch"), [0.5, 1.0, 1.5, 2.0]);
    assert_eq!(served.numbers("eval.jsonl", "step"), [2.0, 4.0]);
}

#[test]
fn early_stopping_makes_no_further_evaluation() {
    let root = tempfile::tempdir().unwrap();
    let data = Circle { sets: vec![40], sectors: 3, value: false };
    let network = network(3);
    let settings =
        [&network, "run.steps=500", "optimizer.lr=5.0", "eval.every=4", "eval.patience=2"];
    let mut steps = vec![];
    for ranks in [1, 2] {
        let (files, ending) = train_on_circle(
            root.path(),
            &format!("on-{ranks}"),
            ranks,
            &data,
            &settings,
            Resume::No,
        );
        assert!(
            matches!(&ending, RunOutcome::Stopped(why) if why.contains("no validation loss lower")),
            "{ending:?}"
        );
        let step = last(&files, "metrics.jsonl")["step"].as_u64().unwrap();
        let evaluated: Vec<f64> = (1..=step / 4).map(|n| 4.0 * n as f64).collect();
        assert_eq!(
            (files.numbers("eval.jsonl", "step"), step % 4, step < 500),
            (evaluated, 0, true)
        );
        assert!(files.checkpoint(step).exists());
        steps.push(step);
    }
    assert_eq!(steps[0], steps[1]);
}

/// The results per class and per data set are the same in every layout.
#[test]
fn results_per_class_and_data_set_are_the_same_on_any_ranks() {
    let root = tempfile::tempdir().unwrap();
    let mix = "data.mix=[{path='a', weight=3.0, name='first'}, {path='b/second/', weight=1.0}]";
    let layouts: [(usize, &[&str]); 4] = [
        (1, &[]),
        (2, &["parallel.zero=1"]),
        (4, &["parallel.zero=3", "parallel.shard=2"]),
        (4, &["parallel.pipeline=2", "batch.micro=2"]),
    ];
    for (outputs, data) in [
        (3, Circle { sets: vec![30, 11], sectors: 3, value: false }),
        (2, Circle { sets: vec![30, 11], sectors: 2, value: false }),
        (1, Circle { sets: vec![30, 11], sectors: 2, value: true }),
    ] {
        let network = network(outputs);
        let loss =
            if outputs == 1 { "loss.kind=binary-cross-entropy" } else { "loss.kind=cross-entropy" };
        let settings = [&network, loss, mix, "run.steps=6", "batch.micro=2", "eval.every=3"];
        let mut all = vec![];
        for (number, (ranks, layout)) in layouts.into_iter().enumerate() {
            let name = format!("{outputs}-{number}");
            let (files, _) = train_on_circle(
                root.path(),
                &name,
                ranks,
                &data,
                &[&settings[..], layout].concat(),
                Resume::No,
            );
            all.push(files.evaluations());
        }
        assert!(all.iter().all(|other| *other == all[0]), "{all:#?}");
        let found: Value = serde_json::from_str(all[0].last().unwrap()).unwrap();
        let classes = &found["classes"];
        let counts: Vec<Vec<u64>> = serde_json::from_value(classes["confusion"].clone()).unwrap();
        assert_eq!(
            (counts.len() as u32, counts.iter().flatten().sum::<u64>()),
            (outputs.max(2), 41)
        );
        let right: u64 = (0..counts.len()).map(|class| counts[class][class]).sum();
        let accuracy = found["metrics"]["accuracy"].as_f64().unwrap();
        assert!((accuracy - right as f64 / 41.0).abs() < 1e-12, "{found}");
        assert_eq!(classes["roc_auc"].as_f64().is_some(), outputs < 3, "{found}");
        let number = |value: &Value| value.as_f64().unwrap();
        let [first, second] = ["first", "second"].map(|name| number(&found["sets"][name]));
        assert!(
            ((30.0 * first + 11.0 * second) / 41.0 - number(&found["loss"])).abs() < 1e-6,
            "{found}"
        );
        assert_ne!(first, second);
    }
}

/// A run on parameter servers has the same evaluations: the workers' counts add up to the same
/// sums.
#[test]
fn epochs_and_classes_of_runs_on_servers() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name).display().to_string();
    let row = |i: u64| {
        let turn = (i as f64 * 0.618_034) % 1.0;
        let angle = std::f64::consts::TAU * turn;
        format!("{:.4},{:.4},{}\n", angle.cos(), angle.sin(), (2.0 * turn) as u32)
    };
    std::fs::write(at("circle.csv"), format!("x,y,half\n{}", (0..60).map(row).collect::<String>()))
        .unwrap();
    let import = [
        "data",
        "import",
        "csv",
        &at("circle.csv"),
        "--target",
        "half",
        "--val-every",
        "3",
        "--out",
        &at("data"),
    ];
    finish(&mut program(import)).succeeded();
    let network = network(2);
    let data = format!("data.path={}", at("data"));
    let place = format!("run.root={}", at("runs"));
    let settings = [
        &SETTINGS[..],
        &[
            &network,
            &data,
            &place,
            "run.epochs=3",
            "eval.every_epochs=1",
            "batch.micro=4",
            "log.sample_tokens=0",
        ],
    ];
    let settings: Vec<&str> =
        settings.concat().iter().flat_map(|setting| ["--set", setting]).collect();
    let run = |name: &str, command: &[&str]| {
        let name_it = format!("run.name={name}");
        finish(&mut program([command, &settings, &["--set", &name_it]].concat())).succeeded();
        RunFiles(root.path().join("runs").join(name))
    };
    let alone = run("alone", &["train"]);
    let served = run("served", &["simulate", "--ranks", "3", "--servers", "1"]);
    assert_eq!(alone.numbers("eval.jsonl", "step"), [3.0, 5.0, 8.0]);
    assert_eq!(served.evaluations(), alone.evaluations());
    let classes = &last(&served, "eval.jsonl")["classes"];
    assert!(
        classes["roc_auc"].as_f64().is_some() && classes["names"] == serde_json::json!(["0", "1"]),
        "{classes}"
    );
}
