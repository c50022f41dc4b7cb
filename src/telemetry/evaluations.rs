//! `eval.jsonl`: one JSON object an evaluation. A trainer and several evaluators may write it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Name of the file in a run's directory.
pub const FILE: &str = "eval.jsonl";

/// How an evaluation ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The loss is known.
    #[default]
    Done,
    /// It could not be computed, and will be tried again.
    Retried,
    /// It could not be computed, and will not be tried again.
    Failed,
}

/// One evaluation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps finished.
    pub step: u64,
    /// How it ended.
    #[serde(default)]
    pub status: Status,
    /// Mean validation loss; null when it is not finite or not known.
    pub loss: Option<f64>,
    /// Of language models, its exponential.
    pub perplexity: Option<f64>,
    /// Of other networks, metrics by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// The checkpoint that was evaluated; null for the weights in training.
    pub checkpoint: Option<String>,
    /// The name of the save, by which two checkpoints of one step differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Why there is no loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Seconds since 1970.
    pub time: f64,
}

impl Evaluation {
    /// A finished evaluation of the weights in training.
    pub fn done(step: u64, loss: f64, metrics: BTreeMap<String, f64>) -> Self {
        let time = super::unix_time();
        let perplexity = metrics.is_empty().then(|| loss.exp());
        Self { step, loss: Some(loss), perplexity, metrics, time, ..Self::default() }
    }

    /// Whether it is of a checkpoint rather than of the weights in training.
    fn is_of_checkpoint(&self) -> bool {
        self.checkpoint.is_some()
    }
}

/// All evaluations in a file, in the order of their ends; none when there is no file. A torn line is left out.
pub fn read(path: &Path) -> Vec<Evaluation> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Adds a line, durably.
///
/// # Errors
/// The file system refused.
pub fn append(path: &Path, evaluation: &Evaluation) -> Result<()> {
    let mut line = serde_json::to_string(evaluation).map_err(|e| Error::internal(format!("evaluation: {e}")))?;
    line.push('\n');
    exclusively(path, || {
        let mut file = OpenOptions::new().create(true).append(true).read(true).open(path)?;
        // A line that was torn by a kill must not take this one with it.
        if std::fs::read(path)?.last().is_some_and(|byte| *byte != b'\n') {
            line.insert(0, '\n');
        }
        file.write_all(line.as_bytes())?;
        file.sync_data()
    })
}

/// Drops what the trainer itself found after step `last`: it trains those steps again.
///
/// # Errors
/// The file system refused.
pub fn forget_after(path: &Path, last: u64) -> Result<()> {
    exclusively(path, || {
        let Ok(text) = std::fs::read_to_string(path) else { return Ok(()) };
        let keeps = |line: &&str| {
            serde_json::from_str::<Evaluation>(line).is_ok_and(|line| line.is_of_checkpoint() || line.step <= last)
        };
        let kept: String = text.lines().filter(keeps).flat_map(|line| [line, "\n"]).collect();
        if kept == text {
            return Ok(());
        }
        let temporary = path.with_extension("jsonl.tmp");
        std::fs::write(&temporary, kept)?;
        File::open(&temporary)?.sync_all()?;
        std::fs::rename(&temporary, path)
    })
}

/// Does something that no other process does to the file meanwhile. Where the file system has no locks it is done all
/// the same: lines are written whole, and only a trainer that is started again rewrites the file.
fn exclusively(path: &Path, work: impl FnOnce() -> std::io::Result<()>) -> Result<()> {
    let lock = path.with_file_name(".eval.lock");
    let held = File::create(&lock).and_then(|file| file.lock().map(|()| file));
    if let Err(e) = &held {
        log::warn!("cannot lock {}: {e}", lock.display());
    }
    work().map_err(|e| Error::io("write", path, e))
}

/// The validation loss of a step, if it is known.
pub fn loss(evaluations: &[Evaluation], step: u64) -> Option<f64> {
    evaluations.iter().rev().find(|one| one.step == step && one.status == Status::Done)?.loss
}

/// The lowest loss among `steps`, and the first step that has it.
pub fn best(evaluations: &[Evaluation], steps: &[u64]) -> Option<(u64, f64)> {
    let known = steps.iter().filter_map(|step| Some((*step, loss(evaluations, *step)?)));
    known.filter(|(_, loss)| loss.is_finite()).min_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)))
}

/// Why training more is of no use, if the last `patience` evaluations found no loss that is lower by more than
/// `min_delta` than the lowest before; with a patience of 0 it always is of use.
pub fn no_use(evaluations: &[Evaluation], patience: u64, min_delta: f64) -> Option<String> {
    let done = evaluations.iter().filter(|one| one.status == Status::Done);
    // A step that was evaluated twice counts once; the last one counts.
    let losses: BTreeMap<u64, Option<f64>> = done.map(|one| (one.step, one.loss)).collect();
    let (mut lowest, mut since) = (None, 0);
    for (step, loss) in losses {
        match (loss.filter(|loss| loss.is_finite()), lowest) {
            (Some(loss), None) => (lowest, since) = (Some((step, loss)), 0),
            (Some(loss), Some((_, before))) if loss < before - min_delta => (lowest, since) = (Some((step, loss)), 0),
            _ => since += 1,
        }
    }
    (patience > 0 && since >= patience).then(|| match lowest {
        Some((step, loss)) => format!("no validation loss lower than {loss:.4} of step {step} in {since} evaluations"),
        None => format!("no finite validation loss in {since} evaluations"),
    })
}

/// Whether nobody will evaluate the checkpoint with this name any more.
pub fn is_settled(evaluations: &[Evaluation], id: &str) -> bool {
    evaluations.iter().any(|one| one.id.as_deref() == Some(id) && one.status != Status::Retried)
}

/// How often an evaluation of the checkpoint with this name was given up so far.
pub fn retries(evaluations: &[Evaluation], id: &str) -> usize {
    evaluations.iter().filter(|one| one.id.as_deref() == Some(id) && one.status == Status::Retried).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(step: u64, loss: f64) -> Evaluation {
        Evaluation::done(step, loss, BTreeMap::new())
    }

    fn of_checkpoint(step: u64, status: Status, loss: Option<f64>) -> Evaluation {
        let (checkpoint, id) = (Some(format!("step-{step:08}")), Some(format!("job-{step}")));
        Evaluation { step, status, loss, checkpoint, id, ..Evaluation::default() }
    }

    #[test]
    fn lines_survive_kills_and_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        assert!(read(&path).is_empty());
        for step in [2, 4] {
            append(&path, &done(step, 0.1 + 0.2)).unwrap();
        }
        append(&path, &of_checkpoint(4, Status::Done, Some(1.0))).unwrap();
        let torn = "{\"step\":6,\"lo";
        OpenOptions::new().append(true).open(&path).unwrap().write_all(torn.as_bytes()).unwrap();
        append(&path, &done(6, 2.0)).unwrap();
        let all = read(&path);
        assert_eq!(all.iter().map(|one| one.step).collect::<Vec<_>>(), [2, 4, 4, 6]);
        assert_eq!(all[0].loss.map(f64::to_bits), Some((0.1f64 + 0.2).to_bits()));
        forget_after(&path, 2).unwrap();
        assert_eq!(read(&path).iter().map(|one| one.step).collect::<Vec<_>>(), [2, 4]);
        assert!(!std::fs::read_to_string(&path).unwrap().contains(torn));
    }

    #[test]
    fn patience_ends() {
        let all: Vec<Evaluation> = (1..).zip([3.0, 2.0, 2.5, 1.95, 1.96]).map(|(n, loss)| done(n, loss)).collect();
        assert!(no_use(&all[..2], 1, 0.0).is_none() && no_use(&all, 0, 0.0).is_none());
        assert!(no_use(&all[..3], 1, 0.0).unwrap().contains("2.0000 of step 2 in 1 evaluations"));
        assert!(no_use(&all[..4], 2, 0.0).is_none() && no_use(&all, 2, 0.0).is_none());
        assert!(no_use(&all, 3, 0.1).unwrap().contains("of step 2 in 3"));
        assert!(no_use(&[Evaluation { loss: None, ..done(1, 0.0) }], 1, 0.0).unwrap().contains("no finite"));
    }

    #[test]
    fn the_best_is_among_those_that_exist() {
        let nan = Evaluation { loss: None, ..done(5, 0.0) };
        let mut all = vec![done(1, 3.0), done(2, 1.0), done(3, 2.0), nan];
        all.push(of_checkpoint(4, Status::Retried, None));
        assert_eq!(best(&all, &[1, 2, 3, 4, 5]), Some((2, 1.0)));
        assert_eq!(best(&all, &[1, 3]), Some((3, 2.0)));
        assert_eq!(best(&all, &[4, 5]), None);
        assert!(!is_settled(&all, "job-4") && retries(&all, "job-4") == 1);
        all.push(of_checkpoint(4, Status::Done, Some(0.5)));
        assert!(is_settled(&all, "job-4"));
        assert_eq!(best(&all, &[1, 2, 3, 4]), Some((4, 0.5)));
    }
}
