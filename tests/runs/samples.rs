//! Which samples the ranks of a run read: `hpctrain data order`, shards that are dealt to ranks, and
//! data with fewer samples than a batch.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hpctrain::config::{Config, Sources, load};
use hpctrain::data::import::{ImportText, import_text};
use hpctrain::data::{Dataset, SampleMut, SampleSizes, Source, TokenizerKind};
use hpctrain::engine::{Splits, micro_batches, on_threads};
use hpctrain::error::Result;
use hpctrain::train::{Customization, TrainRequest, train};
use serde_json::Value;

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, SMALL};

/// The samples that a rank has read, and the files that it has opened.
#[derive(Debug, Clone, Default, PartialEq)]
struct ReadLog {
    samples: Vec<u64>,
    files: BTreeSet<PathBuf>,
}

/// A data set that records what is read of it.
struct Recorded {
    train: Dataset,
    log: Arc<Mutex<ReadLog>>,
}

impl Source for Recorded {
    fn samples(&self) -> u64 {
        self.train.samples()
    }

    fn sizes(&self) -> SampleSizes {
        self.train.sizes()
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        self.read_run(sample, 1, 0, into)
    }

    fn read_run(
        &mut self,
        first: u64,
        count: usize,
        epoch: u64,
        into: SampleMut<'_>,
    ) -> Result<()> {
        self.train.read_run(first, count, epoch, into)?;
        let mut log = self.log.lock().unwrap();
        log.samples.extend(first..first + count as u64);
        log.files.extend(self.train.open_shards().map(Path::to_path_buf));
        Ok(())
    }

    fn parts(&self) -> Vec<u64> {
        self.train.parts().to_vec()
    }

    fn files(&self) -> Vec<u64> {
        self.train.samples_of_shards()
    }

    fn vocabulary(&self) -> usize {
        self.train.vocabulary()
    }
}

/// Imports a text of about 420 samples of 16 tokens into this number of shards below `root`.
fn imported(root: &Path, shards: usize) -> String {
    let input = root.join("text");
    std::fs::write(&input, "all work and no play ".repeat(360)).unwrap();
    let out = root.join(format!("data-{shards}"));
    let mut import = ImportText::new(input, TokenizerKind::Char, out.clone());
    import.to.shards = shards;
    import_text(&import).unwrap();
    format!("data.path={}", out.display())
}

fn settings<'a>(more: &[&'a str]) -> Vec<&'a str> {
    SMALL.iter().chain(more).copied().collect()
}

fn config(root: &Path, settings: &[&str]) -> Config {
    let root = format!("run.root={}", root.display());
    let overrides: Vec<String> =
        settings.iter().copied().chain([&root[..]]).map(String::from).collect();
    load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap().0
}

/// Trains on threads and returns what each rank has read.
fn read_by_ranks(root: &Path, ranks: usize, settings: &[&str]) -> Vec<ReadLog> {
    let config = config(root, settings);
    on_threads(ranks, |comm| {
        let log = Arc::new(Mutex::new(ReadLog::default()));
        let train_set = Recorded { train: micro_batches::open(&config)?.0, log: log.clone() };
        let splits =
            Splits { name: "recorded".into(), train: Box::new(train_set), validation: None };
        let custom = Customization { data: Some(splits), ..Customization::default() };
        let request = TrainRequest { threads: Some(1), ..TrainRequest::new(config.clone(), "x") };
        train(comm, &request, custom, None)?;
        let log = log.lock().unwrap().clone();
        Ok(log)
    })
    .unwrap()
}

/// Returns the object of `hpctrain data order --json`.
fn ordered(ranks: usize, steps: u64, settings: &[&str]) -> Value {
    let mut command = program(["data", "order", "--json"]);
    command.args(["--ranks", &ranks.to_string(), "--steps", &steps.to_string()]);
    settings.iter().for_each(|setting| {
        command.args(["--set", setting]);
    });
    serde_json::from_str(&finish(&mut command).succeeded().stdout).unwrap()
}

/// Returns the samples of a rank, and their files.
fn of_rank(order: &Value, rank: usize) -> ReadLog {
    let micros = order["micro_batches"].as_array().unwrap().iter();
    let own = micros.filter(|micro| micro["rank"] == rank);
    let samples = own.flat_map(|micro| micro["samples"].as_array().unwrap());
    let mut log = ReadLog::default();
    for sample in samples {
        log.samples.push(sample["sample"].as_u64().unwrap());
        log.files.insert(sample["file"].as_str().unwrap().into());
    }
    log
}

#[test]
fn data_order_shows_what_ranks_read() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 5);
    let cases: [(usize, &[&str]); 5] = [
        (1, &[]),
        (2, &["parallel.virtual_ranks=4", "batch.micro=1"]),
        (2, &["data.order=files", "parallel.virtual_ranks=4"]),
        (2, &["data.shuffle=false", "parallel.pipeline=2"]),
        (2, &["local_sgd.sync_every=2", "local_sgd.replicas=4", "checkpoint.every=0"]),
    ];
    for (ranks, more) in cases {
        let settings = [&settings(more)[..], &[&data, "eval.every=0"]].concat();
        let read = read_by_ranks(root.path(), ranks, &settings);
        let order = ordered(ranks, 6, &settings);
        assert_eq!((&order["ranks"], &order["batch"]), (&ranks.into(), &8.into()));
        for (rank, read) in read.iter().enumerate() {
            assert_eq!(of_rank(&order, rank), *read, "{more:?}, rank {rank}");
        }
    }
    // The table of two micro-batches, and the rows in their files.
    let settings = settings(&[&data, "data.shuffle=false", "batch.global=4", "batch.micro=2"]);
    let mut command = program(["data", "order", "--ranks", "2", "--steps", "40"]);
    settings.iter().for_each(|setting| {
        command.args(["--set", setting]);
    });
    command.args(["--set", "run.steps=40"]);
    let text = finish(&mut command).succeeded().stdout;
    let lines: Vec<String> =
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(lines[0], "step rank micro-batch samples file: rows");
    assert_eq!(lines[1], "1 0 0 0 1 train-00000.h5: 0 1");
    assert_eq!(lines[2], "1 1 0 2 3 train-00000.h5: 2 3");
    assert_eq!(lines[3], "2 0 0 4 5 train-00000.h5: 4 5");
    // Shard 1 begins in the middle of a run of samples.
    assert!(lines.iter().any(|line| line.contains("train-00001.h5: 0")), "{text}");
    assert_eq!(lines.len(), 1 + 2 * 40);
}

#[test]
fn each_rank_opens_only_the_files_that_are_dealt_to_it() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 5);
    let opened = |more: &[&str]| -> Vec<Vec<String>> {
        let settings = [&settings(more)[..], &[&data, "eval.every=0", "run.steps=120"]].concat();
        let read = read_by_ranks(root.path(), 2, &settings);
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        read.iter().map(|log| log.files.iter().map(name).collect()).collect()
    };
    let shards = |numbers: &[usize]| -> Vec<String> {
        numbers.iter().map(|number| format!("train-{number:05}.h5")).collect()
    };
    assert_eq!(opened(&["data.order=files"]), [shards(&[0, 2, 4]), shards(&[1, 3])]);
    assert_eq!(
        opened(&["data.order=samples"]),
        [shards(&[0, 1, 2, 3, 4]), shards(&[0, 1, 2, 3, 4])]
    );
}

#[test]
fn a_run_on_dealt_files_resumes_on_the_same_number_of_ranks() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 5);
    let settings = [&data, "data.order=files", "parallel.virtual_ranks=4", "checkpoint.every=3"];
    let run = |name: &str, more: &[&str]| {
        Run::new(Simulate(2), root.path(), name, &[&settings[..], more].concat())
    };
    let whole = run("whole", &[]).ends().succeeded();
    let order = "order        shards are dealt to 2 data-parallel ranks (data.order = files)";
    assert!(whole.stdout.contains(order), "{whole}");
    run("parts", &["run.steps=3", "lr_schedule.kind=constant"]).succeeds();
    let parts = run("parts", &["lr_schedule.kind=constant"]).resume("auto").succeeds();
    let whole = run("constant", &["lr_schedule.kind=constant"]).succeeds();
    assert_eq!(parts.tensors(6), whole.tensors(6));
    // With samples in another order, the losses are others.
    let others = run("samples", &["lr_schedule.kind=constant", "data.order=samples"]).succeeds();
    assert_ne!(others.numbers("metrics.jsonl", "loss"), whole.numbers("metrics.jsonl", "loss"));
    // Processes read the same as threads.
    let spawned = Run::new(
        Spawn(2),
        root.path(),
        "spawned",
        &[&settings[..], &["lr_schedule.kind=constant"]].concat(),
    );
    assert_eq!(spawned.succeeds().tensors(6), whole.tensors(6));
    let one = Run::new(Alone, root.path(), "parts", &[&settings[..], &["run.steps=8"]].concat());
    let refused = one.clone().resume("auto").ends();
    assert_eq!(refused.code(), 2);
    let message =
        "data.order = files has dealt the shards to 2 data-parallel ranks, but there are 1 now\n";
    assert!(refused.stderr.contains(message), "{refused}");
    // The hint works, and the change of the order is reported.
    let mut hinted = one.resume("auto");
    hinted.settings.push("data.order=samples".into());
    let hinted = hinted.ends().succeeded();
    assert!(hinted.stderr.contains("data.order was \"files\", is \"samples\""), "{hinted}");
}

#[test]
fn files_must_suffice_for_the_ranks() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 2);
    let run = |more: &[&str]| {
        let settings = [&[&data[..], "data.order=files", "batch.global=12"][..], more].concat();
        Run::new(Simulate(3), root.path(), "x", &settings).ends()
    };
    let ended = run(&[]);
    assert_eq!(ended.code(), 2);
    let expected = "data.order = files leaves data-parallel rank 2 of 3 without samples: there are 2 \
                    training shards\nhint: import the data with --shards 3 or a multiple";
    assert!(ended.stderr.contains(expected), "{ended}");
    let mixed =
        format!("data.mix=[{{path='{}', weight=1.0}}]", data.trim_start_matches("data.path="));
    assert!(run(&[&mixed]).stderr.contains("data.order = files is not supported with data.mix"));
    let servers = Run::new(Simulate(3), root.path(), "y", &[&data, "data.order=files"]);
    let ended = finish(servers.command().args(["--servers", "1"]));
    assert_eq!(ended.code(), 2);
    assert!(ended.stderr.contains("data.order = files is set, but parameter servers"), "{ended}");
    let verify = finish(program(["verify", "--set", "data.order=files"]).args(["--set", &data]));
    assert_eq!(verify.code(), 2);
    assert!(verify.stderr.contains("\nhint: verify with data.order=samples"), "{verify}");
}

/// Settings of a network of two numbers for a table of ten rows, below `root`.
fn table(root: &Path) -> Vec<String> {
    let rows: Vec<String> =
        (0..10).map(|i| format!("{i},{},{}", i * i % 7, f64::from(i) / 3.0)).collect();
    let input = root.join("table.csv");
    std::fs::write(&input, format!("a,b,y\n{}\n", rows.join("\n"))).unwrap();
    let out = root.join("table");
    let mut import = program(["data", "import", "csv", "--target", "y", "--val-every", "0"]);
    finish(import.arg("--out").arg(&out).arg(&input)).succeeded();
    let settings = [
        "model.kind=layers",
        "model.input=[2]",
        "model.layers=[{kind='dense', units=8}, {kind='tanh'}, {kind='dense', units=1}]",
        "loss.kind=mse",
        "batch.global=64",
        "parallel.virtual_ranks=4",
        &format!("data.path={}", out.display()),
    ];
    settings.map(String::from).to_vec()
}

#[test]
fn a_batch_may_take_samples_again() {
    let root = tempfile::tempdir().unwrap();
    let settings = table(root.path());
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let refused = Run::new(Alone, root.path(), "refused", &settings).ends();
    assert_eq!(refused.code(), 2);
    let expected = "has 10 training samples, fewer than batch.global = 64\nhint: set batch.global to \
                    at most 10, or let a batch take samples again with data.repeat=true\n";
    assert!(refused.stderr.contains(expected), "{refused}");
    let settings = [&settings[..], &["data.repeat=true"]].concat();
    let reference = Run::new(Alone, root.path(), "1", &settings).succeeds();
    let epochs = reference.numbers("metrics.jsonl", "epoch");
    assert_eq!(epochs[..2], [6.4, 12.8]);
    for (name, transport) in [("2", Simulate(2)), ("4", Mpirun(4)), ("zero", Simulate(4))] {
        let zero = if name == "zero" { "parallel.zero=3" } else { "parallel.zero=0" };
        let files = Run::new(transport, root.path(), name, &[&settings[..], &[zero]].concat());
        let files = files.succeeds();
        assert_eq!(files.steps(), reference.steps(), "{name}");
        assert_eq!(files.tensors(6), reference.tensors(6), "{name}");
    }
    // Positions run over epochs: 64 samples are six passes and four samples of the seventh.
    let order = ordered(1, 1, &[&settings[..], &["parallel.virtual_ranks=1"]].concat());
    let mut counts = [0; 10];
    let micros = order["micro_batches"].as_array().unwrap();
    for sample in micros.iter().flat_map(|micro| micro["samples"].as_array().unwrap()) {
        counts[sample["sample"].as_u64().unwrap() as usize] += 1;
    }
    assert!(counts.iter().all(|count| [6, 7].contains(count)), "{counts:?}");
    assert_eq!(counts.iter().sum::<usize>(), 64);
}

#[test]
fn text_that_is_too_short_has_a_hint_of_its_kind() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 1);
    let settings = [&data[..], "batch.global=4096"];
    let refused = Run::new(Alone, root.path(), "x", &settings).ends();
    let expected = "training samples of 16 tokens, fewer than batch.global = 4096\nhint: set \
                    batch.global to at most ";
    assert!(refused.stderr.contains(expected), "{refused}");
    assert!(refused.stderr.contains(", shorten model.context, or let a batch take"), "{refused}");
}
