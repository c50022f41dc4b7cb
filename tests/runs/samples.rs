//! Which samples the ranks of a run read: `hpctrain data order`, `hpctrain data which`, shards that
//! are dealt to ranks, and data with fewer samples than a batch.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hpctrain::checkpoint::Progress;
use hpctrain::config::{Config, Environment, Sources, load};
use hpctrain::data::import::{ImportText, import_text};
use hpctrain::data::{Dataset, Draw, Loader, SampleMut, SampleSizes, Source, TokenizerKind};
use hpctrain::engine::{Splits, StepSample, micro_batches, on_threads, plan_for, samples_of_step};
use hpctrain::error::Result;
use hpctrain::random::derive;
use hpctrain::train::{Customization, TrainRequest, train};
use serde_json::Value;

use hpctrain_testkit::launch::Transport::{Alone, Mpirun, Simulate, Spawn};
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, SMALL};

/// The samples that a rank has read, and the files that it has opened.
#[derive(Debug, Clone, Default, PartialEq)]
struct ReadLog {
    samples: Vec<u64>,
    epochs: Vec<u64>,
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
        log.epochs.extend(vec![epoch; count]);
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

/// The text of the data, which is repeated.
const TEXT: &str = "all work and no play ";

/// Imports a text of about 420 samples of 16 tokens into this number of shards below `root`.
pub fn imported(root: &Path, shards: usize) -> String {
    let input = root.join("text");
    std::fs::write(&input, TEXT.repeat(360)).unwrap();
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
        log.epochs.push(sample["epoch"].as_u64().unwrap());
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

/// Settings of a mixture of `data` and of the same text in one shard.
fn mixture(root: &Path, data: &str) -> String {
    let [five, one] = [data, &imported(root, 1)].map(|setting| setting.replace("data.path=", ""));
    format!("data.mix=[{{path='{five}', weight=2}}, {{path='{one}', weight=1, name='one'}}]")
}

/// Reads steps `1..=steps` of a rank with its loader, and returns the positions of its
/// micro-batches and what was read.
fn loaded(
    config: &Config,
    plan: &hpctrain::config::ResolvedConfig,
    data_rank: usize,
    steps: u64,
) -> (Vec<(u64, u64)>, ReadLog) {
    let log = Arc::new(Mutex::new(ReadLog::default()));
    let source = Recorded { train: micro_batches::open(config).unwrap().0, log: log.clone() };
    let start = Progress::default();
    let (positions, order) = micro_batches::read_schedule(plan, &source, data_rank, start).unwrap();
    let micros = positions.micros_per_step();
    let mut loader = Loader::start(source, order, positions, 1).unwrap();
    let mut read = Vec::new();
    for micro in 0..steps * micros {
        let batch = loader.next().unwrap();
        read.extend(batch.positions.clone().map(|position| (position, micro % micros)));
        loader.recycle(batch);
    }
    drop(loader);
    let log = log.lock().unwrap().clone();
    (read, log)
}

/// The samples of 1,000 random steps are those that the loaders of all ranks read, over several
/// passes over the data.
#[test]
fn samples_of_a_step_are_those_that_were_read() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 5);
    let mix = mixture(root.path(), &data);
    let exclude = root.path().join("exclude");
    std::fs::write(&exclude, "3\n17\n100\n101\n300\n400\n").unwrap();
    let exclude = format!("data.exclude={}", exclude.display());
    let cases: [(usize, &[&str]); 8] = [
        (1, &[&data]),
        (1, &[&mix, "parallel.virtual_ranks=4", "batch.micro=1"]),
        (1, &[&mix, &exclude, "parallel.virtual_ranks=4"]),
        (4, &[&mix, "parallel.shard=2", "parallel.zero=3"]),
        (4, &[&mix, &exclude, "parallel.virtual_ranks=8", "parallel.pipeline=2"]),
        (2, &[&data, &exclude, "data.order=files", "parallel.virtual_ranks=4"]),
        (4, &[&data, "local_sgd.sync_every=2", "local_sgd.replicas=4", "checkpoint.every=0"]),
        (2, &[&data, "data.shuffle=false", "parallel.tensor=2"]),
    ];
    let steps = 400;
    let length = format!("run.steps={steps}");
    for (number, (ranks, more)) in cases.into_iter().enumerate() {
        let config = config(root.path(), &[&settings(more)[..], &[&length]].concat());
        let train = micro_batches::open(&config).unwrap().0;
        let vocabulary = Some(train.vocabulary());
        let facts = Environment { ranks, threads: 1, vocabulary, on_gpu: false };
        let plan = plan_for(config.clone(), &facts, &train).unwrap();
        let all: Vec<_> =
            (0..plan.mesh.data()).map(|rank| loaded(&config, &plan, rank, steps)).collect();
        let excluded = plan.excluded.as_ref();
        for (_, log) in &all {
            assert!(log.epochs.iter().max().is_some_and(|epoch| *epoch >= 5), "{more:?}");
            let read = log.samples.iter().find(|it| excluded.is_some_and(|ex| ex.contains(**it)));
            assert_eq!(read, None, "{more:?}");
        }
        for random in 0..125 {
            let step = 1 + derive(number as u64, &[random]) % steps;
            let position = (step - 1) * 8;
            let progress = Progress { step: step - 1, updates: step - 1, position };
            let samples = samples_of_step(&plan, &train, progress).unwrap();
            assert!(samples.iter().map(|it| it.position).eq(position..position + 8), "{more:?}");
            for sample in samples {
                let StepSample { position, rank, micro_batch, draw, .. } = sample;
                let coordinates = plan.mesh.coordinates(rank);
                let data_rank = coordinates[1] * plan.mesh.shard + coordinates[2];
                let (read, log) = &all[data_rank];
                let place = read.iter().position(|it| it.0 == position).expect("read by the rank");
                let Draw { sample: number, epoch } = draw;
                assert_eq!(
                    (read[place].1, log.samples[place], log.epochs[place]),
                    (micro_batch, number, epoch),
                    "{more:?}, step {step}, position {position}"
                );
                assert_eq!(train.locate(number), (&*sample.file, sample.row));
                assert_eq!(sample.data_set, usize::from(number >= train.parts()[0]));
                let within = position - progress.position;
                assert_eq!(sample.virtual_rank as u64, within / plan.virtual_rank_samples);
            }
        }
    }
}

/// Returns the objects of `hpctrain data which --json`.
pub fn which(run: &Path, step: u64, more: &[&str]) -> Vec<Value> {
    let mut command = program(["data", "which", "--json", "--step", &step.to_string()]);
    let text = finish(command.arg(run).args(more)).succeeded().stdout;
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Runs with one to four ranks: `data which` prints what `data order` prints for their
/// configuration.
#[test]
fn data_which_shows_the_samples_of_a_run() {
    let root = tempfile::tempdir().unwrap();
    let mix = mixture(root.path(), &imported(root.path(), 5));
    let cases = [
        (Alone, 1, vec!["parallel.virtual_ranks=4"]),
        (Mpirun(2), 2, vec!["parallel.pipeline=2", "parallel.virtual_ranks=2"]),
        (Simulate(4), 4, vec!["parallel.virtual_ranks=8", "parallel.zero=3", "parallel.shard=2"]),
    ];
    for (transport, ranks, more) in cases {
        let name = format!("run-{ranks}");
        let settings = [&[&mix[..], "checkpoint.every=2", "checkpoint.keep=2"][..], &more].concat();
        let files = Run::new(transport, root.path(), &name, &settings).succeeds();
        let all = SMALL.iter().chain(&settings).copied().collect::<Vec<_>>();
        let order = ordered(ranks, 6, &all);
        for step in 1..=6 {
            let samples = which(&files.0, step, &[]);
            assert_eq!(samples.len(), 8);
            for (index, sample) in samples.iter().enumerate() {
                assert_eq!(sample["step"], step);
                assert_eq!(sample["position"], (step - 1) * 8 + index as u64);
                let in_first = sample["file"].as_str().unwrap().contains("/data-5/");
                assert_eq!(sample["data_set"], if in_first { "data-5" } else { "one" });
                let micro = order["micro_batches"].as_array().unwrap().iter().find(|micro| {
                    ["step", "rank", "micro_batch"].iter().all(|key| micro[*key] == sample[*key])
                });
                let found = micro.unwrap()["samples"].as_array().unwrap().iter().find(|found| {
                    ["sample", "epoch", "file", "row"].iter().all(|key| found[*key] == sample[*key])
                });
                assert!(found.is_some(), "{sample}");
            }
        }
        // A checkpoint stands for its run.
        assert_eq!(which(&files.checkpoint(6), 3, &[]), which(&files.0, 3, &[]));
        let of_one = which(&files.0, 2, &["--virtual-rank", "1"]);
        assert!(!of_one.is_empty() && of_one.iter().all(|sample| sample["virtual_rank"] == 1));
        let part: Vec<Value> =
            which(&files.0, 2, &[]).into_iter().filter(|it| it["virtual_rank"] == 1).collect();
        assert_eq!(of_one, part);
    }
}

#[test]
fn data_which_shows_text_and_columns() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 2);
    let files = Run::new(Alone, root.path(), "run", &[&data]).succeeds();
    let whole = TEXT.repeat(360);
    let samples = which(&files.0, 4, &["--text"]);
    for sample in &samples {
        let text = sample["text"].as_str().unwrap();
        assert_eq!(text.len(), 17, "{text:?}");
        if sample["file"].as_str().unwrap().ends_with("train-00000.h5") {
            let start = sample["row"].as_u64().unwrap() as usize * 16;
            assert_eq!(text, &whole[start..start + 17]);
        }
    }
    let mut command = program(["data", "which", "--step", "4", "--text"]);
    let table = finish(command.arg(&files.0)).succeeded().stdout;
    let mut lines = table.lines();
    let header = lines.next().unwrap().split("  ").filter(|it| !it.is_empty()).map(str::trim);
    assert!(header.eq([
        "position",
        "virtual rank",
        "rank",
        "micro-batch",
        "epoch",
        "sample",
        "file",
        "row",
        "text"
    ]));
    for (line, sample) in lines.zip(&samples) {
        assert!(line.ends_with(sample["text"].as_str().unwrap().trim_end()), "{line}");
    }
    let mut command = program(["data", "which", "--step", "4", "--numbers"]);
    let numbers = finish(command.arg(&files.0)).succeeded().stdout;
    let wanted: Vec<String> = samples.iter().map(|sample| sample["sample"].to_string()).collect();
    assert_eq!(numbers, wanted.join("\n") + "\n");

    // Numbers as they are in the table, though the network sees them scaled.
    let table = root.path().join("rows.csv");
    let rows: Vec<String> = (0..40)
        .map(|i| {
            format!("{i}.5,{},{},{}", ["red", "green", ""][i % 3], i * i, ["no", "yes"][i % 2])
        })
        .collect();
    std::fs::write(&table, format!("a,colour,b,y\n{}\n", rows.join("\n"))).unwrap();
    let out = root.path().join("rows");
    let mut import = program(["data", "import", "csv", "--target", "y", "--val-every", "0"]);
    finish(import.args(["--categorical", "colour", "--out"]).arg(&out).arg(&table)).succeeded();
    let settings = [
        "model.kind=layers",
        "model.input=[2]",
        "model.layers=[{kind='embedding_tables', ids=[3], width=2, dense=[{kind='dense', units=2}]}, {kind='flatten'}, {kind='dense', units=2}]",
        &format!("data.path={}", out.display()),
    ];
    let files = Run::new(Simulate(2), root.path(), "table", &settings).succeeds();
    for sample in which(&files.0, 6, &["--text"]) {
        let row = sample["row"].as_u64().unwrap() as usize;
        let cells: Vec<&str> = rows[row].split(',').collect();
        let columns = &sample["text"];
        assert_eq!(columns["a"], cells[0].parse::<f64>().unwrap(), "{sample}");
        assert_eq!(columns["b"], cells[2].parse::<f64>().unwrap(), "{sample}");
        assert_eq!(columns["y"], cells[3], "{sample}");
        match cells[1] {
            "" => assert!(columns["colour"].is_null(), "{sample}"),
            colour => assert_eq!(columns["colour"], colour, "{sample}"),
        }
    }
}

#[test]
fn data_which_refuses_what_it_cannot_know() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 2);
    let files = Run::new(Alone, root.path(), "run", &[&data, "checkpoint.every=2"]).succeeds();
    let refused = |run: &Path, step: &str, more: &[&str]| {
        let mut command = program(["data", "which", "--step", step]);
        let ended = finish(command.arg(run).args(more));
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(ended.stdout.is_empty(), "{ended}");
        ended.stderr
    };
    let error = refused(&files.0, "7", &[]);
    assert!(error.contains("has no step 7\nhint: its steps are 1 to 6 (run.steps)"), "{error}");
    assert!(refused(&files.0, "0", &[]).contains("--step"));
    let error = refused(&files.0, "1", &["--virtual-rank", "1"]);
    assert!(
        error.contains("the run has 1 virtual ranks\nhint: give a number from 0 to 0"),
        "{error}"
    );
    let error = refused(&files.0, "1", &["--set", "batch.global=4"]);
    assert!(error.contains("only keys of [data] can be set\nhint: hpctrain data order"), "{error}");
    assert!(refused(&root.path().join("none"), "1", &[]).contains("does not exist\nhint: "));

    // Steps before a branch are those of the other run; the hint works.
    let from = files.checkpoint(4);
    let branch = Run::new(Alone, root.path(), "branch", &[&data, "run.steps=8"]);
    let branch = branch.resume(&from.display().to_string()).succeeds();
    assert_eq!(which(&branch.0, 5, &[]), which(&files.0, 5, &[]));
    let error = refused(&branch.0, "4", &[]);
    assert!(error.contains("began after step 4 of "), "{error}");
    let hint = error.trim().split("hint: hpctrain ").nth(1).unwrap();
    let words: Vec<&str> = hint.split_whitespace().collect();
    finish(&mut program(words)).succeeded();

    // Other data, and data that was moved.
    let other = imported(root.path(), 3).replace("data.path=", "");
    let error = refused(&files.0, "1", &["--data", &other]);
    assert!(error.contains("the data of the run has changed: 3 shards, trained on 2"), "{error}");
    let path = data.replace("data.path=", "");
    let moved = root.path().join("moved");
    let before = which(&files.0, 5, &[]);
    std::fs::rename(&path, &moved).unwrap();
    let error = refused(&files.0, "5", &[]);
    let expected = "does not exist\nhint: if it was moved, give its place: --data PATH";
    assert!(error.contains("error: the data of the run: ") && error.contains(expected), "{error}");
    let now = which(&files.0, 5, &["--data", &moved.display().to_string()]);
    let samples = |lines: &[Value]| lines.iter().map(|it| it["sample"].clone()).collect::<Vec<_>>();
    assert_eq!(samples(&now), samples(&before));
}

/// A step has the batch and the position of the start that took it, also if only a checkpoint of a
/// later start is left.
#[test]
fn data_which_shows_the_start_that_took_the_step() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 2);
    let run = |steps: &str, batch: &str| {
        let settings = [&data[..], "checkpoint.every=3", "checkpoint.keep=1", steps, batch];
        Run::new(Alone, root.path(), "run", &settings)
    };
    let first = run("run.steps=3", "batch.global=8").succeeds();
    let before = which(&first.0, 2, &[]);
    let files = run("run.steps=6", "batch.global=4").resume("auto").succeeds();
    assert!(!files.checkpoint(3).exists());
    assert_eq!(which(&files.0, 2, &[]), before);
    let positions = |step| -> Vec<u64> {
        let samples = which(&files.0, step, &[]);
        samples.iter().map(|sample| sample["position"].as_u64().unwrap()).collect()
    };
    assert_eq!(positions(5), [28, 29, 30, 31]);
    // Without the record of the starts, the batch of step 2 is unknown.
    std::fs::remove_file(files.path("starts.jsonl")).unwrap();
    let ended = finish(program(["data", "which", "--step", "2"]).arg(&files.0));
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("batch.global has changed"), "{ended}");
}

/// Workers of synchronous parameter servers take virtual ranks as they come, so that these have
/// samples but no ranks; batches of asynchronous workers are not recorded.
#[test]
fn data_which_of_runs_with_parameter_servers() {
    let root = tempfile::tempdir().unwrap();
    let data = imported(root.path(), 2);
    let serve = |name: &str, more: &[&str]| {
        let run = Run::new(Simulate(3), root.path(), name, &[&[&data[..]][..], more].concat());
        finish(run.command().args(["--servers", "1"])).succeeded();
        run.files()
    };
    let shared = ["parallel.virtual_ranks=4"];
    let served = serve("served", &shared);
    let alone =
        Run::new(Alone, root.path(), "alone", &[&[&data[..]][..], &shared].concat()).succeeds();
    let of_alone = which(&alone.0, 3, &[]);
    let of_served = which(&served.0, 3, &[]);
    assert_eq!(of_alone.len(), of_served.len());
    for (alone, served) in of_alone.iter().zip(&of_served) {
        for key in ["position", "virtual_rank", "sample", "epoch", "file", "row"] {
            assert_eq!(alone[key], served[key]);
        }
        assert!(served["rank"].is_null() && alone["rank"] == 0);
    }
    let free = serve("free", &["parameter_server.staleness=4"]);
    let ended = finish(program(["data", "which", "--step", "2"]).arg(&free.0));
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("no record has the batches of a step\nhint: "), "{ended}");
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
