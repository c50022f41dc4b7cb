//! Small runs and their files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use hpctrain::checkpoint::Reader;
use serde_json::Value;
use tempfile::TempDir;

use super::launch::{Ended, Transport, finish};

/// A network and a batch that train in milliseconds, with a learning rate that changes the weights
/// from the first step.
pub const SMALL: [&str; 12] = [
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.context=16",
    "batch.global=8",
    "run.steps=6",
    "lr_schedule.warmup=2",
    "optimizer.lr=0.01",
    // Eight evaluation batches, the last one short.
    "eval.samples=30",
    "eval.batch=4",
    "log.sample_tokens=0",
    "run.seed=7",
];

/// A run of a test: a directory, ranks, and settings on top of [`SMALL`].
#[derive(Debug, Clone)]
pub struct Run {
    pub transport: Transport,
    pub root: PathBuf,
    pub name: String,
    pub settings: Vec<String>,
    pub resume: Option<String>,
}

impl Run {
    /// Creates a run in directory `name` below `root`.
    pub fn new(transport: Transport, root: &Path, name: &str, settings: &[&str]) -> Self {
        let settings = settings.iter().map(|setting| setting.to_string()).collect();
        Self { transport, root: root.to_path_buf(), name: name.into(), settings, resume: None }
    }

    /// Lets the run resume from a checkpoint or `auto`.
    pub fn resume(mut self, from: &str) -> Self {
        self.resume = Some(from.into());
        self
    }

    /// Returns the command line.
    pub fn command(&self) -> Command {
        let mut command = self.transport.train();
        let place =
            [format!("run.root={}", self.root.display()), format!("run.name={}", self.name)];
        let settings = SMALL.iter().map(|setting| setting.to_string()).chain(place);
        for setting in settings.chain(self.settings.iter().cloned()) {
            command.args(["--set", &setting]);
        }
        command.args(self.resume.iter().flat_map(|from| ["--resume", from]));
        command
    }

    /// Runs to the end, which may be a failure.
    #[track_caller]
    pub fn ends(&self) -> Ended {
        finish(&mut self.command())
    }

    /// Runs successfully and returns the files of the run.
    #[track_caller]
    pub fn succeeds(&self) -> RunFiles {
        self.ends().succeeded();
        self.files()
    }

    /// Returns a successful run that all tests of a program with the same ranks and settings share:
    /// they read it and do not change it. It is started once, in another directory.
    #[track_caller]
    pub fn shared(&self) -> RunFiles {
        let key = format!("{:?} {:?}", self.transport, self.settings);
        let cell =
            SHARED.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone();
        let run = cell.get_or_init(|| {
            let root = super::target().join("shared");
            std::fs::create_dir_all(&root).unwrap();
            let root = tempfile::tempdir_in(root).unwrap();
            let files =
                Self { root: root.path().to_path_buf(), name: "shared".into(), ..self.clone() }
                    .succeeds();
            (root, files)
        });
        run.1.clone()
    }

    /// Copies [`Run::shared`] into this run's own directory.
    #[track_caller]
    pub fn copied(&self) -> RunFiles {
        copy(&self.shared().0, &self.files().0);
        self.files()
    }

    /// Returns the files of the run.
    pub fn files(&self) -> RunFiles {
        RunFiles(self.root.join(&self.name))
    }
}

/// Shared runs by ranks and settings. Their directories stay in the target directory.
static SHARED: Mutex<BTreeMap<String, Arc<SharedRun>>> = Mutex::new(BTreeMap::new());

type SharedRun = OnceLock<(TempDir, RunFiles)>;

/// A run's directory.
#[derive(Debug, Clone)]
pub struct RunFiles(pub PathBuf);

impl RunFiles {
    /// Returns the path of a file of the run.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Reads a text file of the run.
    #[track_caller]
    pub fn text(&self, name: &str) -> String {
        let path = self.path(name);
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    /// Returns the host and port of its coordinator.
    #[track_caller]
    pub fn coordinator(&self) -> String {
        json(&self.path("servers/coordinator"))["address"].as_str().unwrap().into()
    }

    /// Returns the path of a checkpoint of the run.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.path(&format!("checkpoints/step-{step:08}"))
    }

    /// Returns the lines of `metrics.jsonl` without times, memory, and the rates and energy that
    /// only some machines record. Numbers with other bits are printed differently.
    pub fn steps(&self) -> Vec<String> {
        let parts =
            ["compute_ms", "comm_exposed_ms", "comm_hidden_ms", "loader_ms", "optimizer_ms"];
        let always = [&["step_ms", "tokens_per_second", "peak_bytes", "time"], &parts[..]].concat();
        self.lines(
            "metrics.jsonl",
            &always,
            &["tflops_per_rank", "mfu", "joules_per_token", "energy_kwh", "eval_ms", "save_ms"],
        )
    }

    /// Returns the lines of `eval.jsonl` without times.
    pub fn evaluations(&self) -> Vec<String> {
        self.lines("eval.jsonl", &["time"], &[])
    }

    /// Returns the lines of `eval.jsonl` without times and the digest of the data, which differs
    /// for other files of the same samples.
    pub fn evaluated(&self) -> Vec<String> {
        let nameless = |line: &String| {
            let mut line: Value = serde_json::from_str(line).unwrap();
            line.as_object_mut().unwrap().remove("data");
            line.to_string()
        };
        self.evaluations().iter().map(nameless).collect()
    }

    /// Returns the lines of a file without the keys `without`, which each line must have, and
    /// `nor`, which it may have.
    fn lines(&self, name: &str, without: &[&str], nor: &[&str]) -> Vec<String> {
        let text = self.text(name);
        let lines = text.lines().map(|line| {
            let mut value: Value =
                serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
            for key in without {
                value
                    .as_object_mut()
                    .unwrap()
                    .remove(*key)
                    .unwrap_or_else(|| panic!("no {key}: {line}"));
            }
            value.as_object_mut().unwrap().retain(|key, _| !nor.contains(&key.as_str()));
            value.to_string()
        });
        lines.collect()
    }

    /// Returns a number of every line of a JSON lines file.
    pub fn numbers(&self, name: &str, key: &str) -> Vec<f64> {
        self.lines(name, &[], &[])
            .iter()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()[key].as_f64().unwrap())
            .collect()
    }

    /// Returns every tensor and buffer of a checkpoint, as bits.
    pub fn tensors(&self, step: u64) -> Vec<(String, Vec<u32>)> {
        tensors(&self.checkpoint(step))
    }

    /// Panics unless metrics, evaluations and the last checkpoint are bitwise equal to those of
    /// `other`.
    #[track_caller]
    pub fn same_as(&self, other: &RunFiles, steps: u64, what: &str) {
        assert_eq!(self.evaluations(), other.evaluations(), "{what}: evaluations");
        self.same_numbers_as(other, steps, what);
    }

    /// Does the same as [`RunFiles::same_as`], for a run on other files of the same samples.
    #[track_caller]
    pub fn same_numbers_as(&self, other: &RunFiles, steps: u64, what: &str) {
        assert_eq!(self.steps(), other.steps(), "{what}: metrics");
        assert_eq!(self.steps().len() as u64, steps, "{what}");
        assert_eq!(self.evaluated(), other.evaluated(), "{what}: evaluations");
        let mine = self.tensors(steps);
        let others = other.tensors(steps);
        assert_eq!(mine.len(), others.len(), "{what}");
        for ((name, mine), (other_name, other)) in mine.iter().zip(&others) {
            assert_eq!(name, other_name, "{what}");
            let differ = mine.iter().zip(other).filter(|(a, b)| a != b).count();
            assert!(
                mine.len() == other.len() && differ == 0,
                "{what}: {differ} elements of {name} differ"
            );
        }
    }
}

/// Reads a JSON file.
pub fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns every tensor and buffer of the checkpoint in `dir`, as bits.
pub fn tensors(dir: &Path) -> Vec<(String, Vec<u32>)> {
    let mut reader = Reader::open(dir).unwrap();
    let manifest = reader.manifest().clone();
    let mut all = Vec::new();
    for (name, entry) in &manifest.tensors {
        for part in 0..=manifest.state.len() {
            let mut values = vec![f32::NAN; entry.shape.iter().product()];
            reader.read(name, part, None, 0..values.len(), &mut values).unwrap();
            all.push((
                format!("{name}, part {part}"),
                values.into_iter().map(f32::to_bits).collect(),
            ));
        }
    }
    all
}

/// Copies a directory, links as links.
pub fn copy(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(status.success(), "cp -a {} {}", from.display(), to.display());
}
