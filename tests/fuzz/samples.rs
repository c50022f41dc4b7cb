//! Real files, as the program writes them.

use std::path::PathBuf;
use std::sync::OnceLock;

use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::{Run, RunFiles};

/// A run of four steps with its own evaluations and those of its checkpoints, and its network in
/// Hugging Face's format.
pub struct Sample {
    _root: tempfile::TempDir,
    pub run: RunFiles,
    pub model: PathBuf,
}

/// Returns the sample run, which is created on first use.
pub fn sample() -> &'static Sample {
    static SAMPLE: OnceLock<Sample> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let root = tempfile::tempdir().unwrap();
        let settings = ["run.steps=4", "checkpoint.every=2", "eval.every=2", "model.width=16"];
        let run = Run::new(Alone, root.path(), "x", &settings).succeeds();
        finish(program(["eval", "--run"]).arg(&run.0)).succeeded();
        let model = root.path().join("model");
        finish(program(["checkpoint", "export", "--out"]).arg(&model).arg(&run.0)).succeeded();
        Sample { _root: root, run, model }
    })
}
