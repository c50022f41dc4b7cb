//! `eval.jsonl`: one JSON object per evaluation. A trainer and several evaluators may write it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::classes::Classes;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};

/// The name of the file in a run's directory.
pub const FILE: &str = "eval.jsonl";

/// The outcome of an evaluation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvaluationStatus {
    /// The loss is known.
    #[default]
    Done,
    /// It could not be computed, and will be tried again.
    Retried,
    /// It could not be computed, and will not be tried again.
    Failed,
}

/// The samples over which a loss is averaged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossSplit {
    /// The validation samples.
    #[default]
    Validation,
    /// The training samples of an epoch, if there is no validation data.
    Training,
}

impl LossSplit {
    fn is_validation(&self) -> bool {
        *self == Self::Validation
    }
}

/// One evaluation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps finished.
    pub step: u64,
    /// The outcome.
    #[serde(default)]
    pub status: EvaluationStatus,
    /// The samples over which the loss is averaged.
    #[serde(default, skip_serializing_if = "LossSplit::is_validation")]
    pub split: LossSplit,
    /// The mean loss; null when it is not finite or not known.
    pub loss: Option<f64>,
    /// The exponential of the loss, for language models.
    pub perplexity: Option<f64>,
    /// Metrics by name, for other networks.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// The mean loss of each dataset of a mixture by its name; null when it is not finite.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sets: BTreeMap<String, Option<f64>>,
    /// Per-class results, for classifiers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<Classes>,
    /// The checkpoint that was evaluated; null for the weights in training.
    pub checkpoint: Option<String>,
    /// The name of the save, by which two checkpoints of one step differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Digest of the data that was evaluated, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// The number of samples that were evaluated, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<u64>,
    /// The error, if there is no loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Seconds since 1970.
    pub time: f64,
}

impl Evaluation {
    /// Creates the record of a finished evaluation of the weights in training.
    pub fn done(step: u64, loss: f64, metrics: BTreeMap<String, f64>) -> Self {
        let time = super::unix_time();
        let perplexity = metrics.is_empty().then(|| loss.exp());
        Self { step, loss: Some(loss), perplexity, metrics, time, ..Self::default() }
    }

    /// Sets the digest and the number of samples of the data that was evaluated.
    pub fn with_data(self, data: Option<&str>, samples: u64) -> Self {
        Self { data: data.map(str::to_owned), samples: Some(samples), ..self }
    }

    /// Creates the record of the mean training loss of the epoch that ends with a step.
    pub fn training_epoch(step: u64, loss: Option<f64>) -> Self {
        Self { step, split: LossSplit::Training, loss, time: super::unix_time(), ..Self::default() }
    }

    /// Returns true if a checkpoint was evaluated rather than the weights in training.
    fn is_of_checkpoint(&self) -> bool {
        self.checkpoint.is_some()
    }
}

/// The content of a file of evaluations.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Evaluations {
    /// The evaluations that can be read, in the order in which they ended.
    known: Vec<Evaluation>,
    /// The error of the first line that is damaged, rather than cut short by a kill.
    damaged: Option<Error>,
}

impl Evaluations {
    /// Returns the evaluations that can be read.
    pub fn known(&self) -> &[Evaluation] {
        &self.known
    }

    /// Returns all evaluations.
    ///
    /// # Errors
    /// Returns an error if a line is damaged, because its content is not known.
    pub fn all(&self) -> Result<&[Evaluation]> {
        self.damaged.clone().map_or(Ok(&self.known), Err)
    }
}

/// Reads the evaluations in a file; there are none if the file does not exist. A line that was cut
/// short by a kill is skipped.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn read(path: &Path) -> Result<Evaluations> {
    let bytes = match safe_open::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Evaluations::default()),
        Err(e) => return Err(Error::io("read", path, e)),
    };
    let mut found = Evaluations::default();
    for (number, line) in (1..).zip(bytes.split(|byte| *byte == b'\n')) {
        match serde_json::from_slice(line) {
            Ok(evaluation) => found.known.push(evaluation),
            Err(_) if is_torn(line) => {}
            Err(e) => {
                let damaged = || {
                    Error::damaged(format!("{}, line {number}: {e}", path.display()))
                        .hint("repair that line, or remove it if that evaluation is not needed")
                };
                found.damaged.get_or_insert_with(damaged);
            }
        }
    }
    Ok(found)
}

/// Returns true if a line is empty, or the beginning of a valid line that was cut short by a kill.
pub fn is_torn(line: &[u8]) -> bool {
    let text = match std::str::from_utf8(line) {
        Ok(text) => text,
        // The line was cut in the middle of a character.
        Err(e) if e.error_len().is_none() => {
            std::str::from_utf8(&line[..e.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_err_and(|e| e.is_eof())
}

/// Returns the evaluations that can be compared: of one kind of loss, on the data of the newest
/// step or on unknown data. A run may be resumed with other data, or another `eval.samples`.
fn comparable(all: &[Evaluation]) -> impl DoubleEndedIterator<Item = &Evaluation> {
    let set = |one: &Evaluation| one.samples.map(|samples| (one.data.clone(), samples));
    let newest =
        all.iter().filter(|one| one.samples.is_some()).max_by_key(|one| one.step).and_then(set);
    let over = over(all);
    all.iter()
        .filter(move |one| one.split == over)
        .filter(move |one| set(one).is_none_or(|set| Some(&set) == newest.as_ref()))
}

/// Appends a line and syncs the file to disk.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn append(path: &Path, evaluation: &Evaluation) -> Result<()> {
    let line = line(evaluation)?;
    exclusively(path, || add(path, line))
}

fn line(evaluation: &Evaluation) -> Result<String> {
    let line = serde_json::to_string(evaluation)
        .map_err(|e| Error::internal(format!("evaluation: {e}")))?;
    Ok(line + "\n")
}

fn add(path: &Path, mut line: String) -> std::io::Result<()> {
    let mut file = own_files::append(path)?;
    // A line that was cut short by a kill must not make this one unreadable.
    if std::fs::read(path)?.last().is_some_and(|byte| *byte != b'\n') {
        line.insert(0, '\n');
    }
    file.write_all(line.as_bytes())?;
    file.sync_data()
}

/// The published save of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Save {
    /// There is a save with this name.
    Named(String),
    /// There is a save, but its name cannot be read here.
    Unknown,
    /// The step has no save.
    Gone,
}

/// Appends the evaluation of a checkpoint as [`append`] does, unless its save has been replaced, or
/// was removed because the run went back to an earlier step. `save` returns the present save of the
/// step and the newest step that is saved. Returns true if the line was appended.
///
/// # Errors
/// Returns an error if the file cannot be written, or `save` fails.
pub fn append_for_checkpoint(
    path: &Path,
    evaluation: &Evaluation,
    save: impl FnOnce() -> Result<(Save, u64)>,
) -> Result<bool> {
    let line = line(evaluation)?;
    let mut is_current = Ok(true);
    exclusively(path, || {
        is_current = save().map(|(save, newest)| match save {
            Save::Named(id) => evaluation.id.as_ref().is_none_or(|own| *own == id),
            Save::Unknown => true,
            Save::Gone => evaluation.step <= newest,
        });
        if is_current == Ok(true) { add(path, line) } else { Ok(()) }
    })?;
    is_current
}

/// Removes lines about parameters that no longer exist, because training resumes after step
/// `last`: those of the trainer for later steps, those of removed saves of later steps, and those
/// of saves that were replaced by another save of their step. Lines of saves that retention has
/// removed stay.
///
/// # Errors
/// Returns an error if the file cannot be read or written.
pub fn remove_after(path: &Path, last: u64, save: impl Fn(u64) -> Save) -> Result<()> {
    let mut known: BTreeMap<u64, Save> = BTreeMap::new();
    // Checkpoints are read before the file is locked, because that may take long.
    for one in read(path)?.known.into_iter().filter(Evaluation::is_of_checkpoint) {
        if let Entry::Vacant(vacant) = known.entry(one.step) {
            vacant.insert(save(one.step));
        }
    }
    rewrite(path, |line| match known.get(&line.step) {
        _ if !line.is_of_checkpoint() => line.step <= last,
        Some(Save::Named(id)) => line.id.as_ref().is_none_or(|own| own == id),
        Some(Save::Gone) => line.step <= last,
        // `None`: an evaluator has appended the line meanwhile.
        Some(Save::Unknown) | None => true,
    })
}

/// Removes lines of saves of a step that were replaced by the save called `id`.
///
/// # Errors
/// Returns an error if the file cannot be read or written.
pub fn remove_replaced(path: &Path, step: u64, id: &str) -> Result<()> {
    rewrite(path, |line| line.step != step || line.id.as_ref().is_none_or(|own| own == id))
}

/// Rewrites the file with the lines for which a predicate is true.
fn rewrite(path: &Path, holds: impl Fn(&Evaluation) -> bool) -> Result<()> {
    exclusively(path, || {
        let old = match std::fs::read(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            old => old?,
        };
        let keeps = |line: &&[u8]| match serde_json::from_slice::<Evaluation>(line) {
            Ok(line) => holds(&line),
            // Damaged lines are kept, because their content is not known.
            Err(_) => !is_torn(line),
        };
        let kept: Vec<u8> = old
            .split(|byte| *byte == b'\n')
            .filter(keeps)
            .flat_map(|line| [line, b"\n"])
            .flatten()
            .copied()
            .collect();
        if kept == old {
            return Ok(());
        }
        let temporary = path.with_extension("jsonl.tmp");
        own_files::write(&temporary, kept)?;
        File::open(&temporary)?.sync_all()?;
        std::fs::rename(&temporary, path)?;
        File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
    })
}

/// Runs `work` while holding the lock of the file. If the file system has no locks it runs without:
/// lines are written whole, and only a trainer that is restarted rewrites the file.
fn exclusively(path: &Path, work: impl FnOnce() -> std::io::Result<()>) -> Result<()> {
    let lock = path.with_file_name(".eval.lock");
    let held = own_files::create(&lock).and_then(|file| file.lock().map(|()| file));
    if let Err(e) = &held {
        log::warn!("cannot lock {}: {e}", lock.display());
    }
    work().map_err(|e| Error::io("write", path, e))
}

/// Returns the loss by which a step is compared with others, if known: the validation loss, or the
/// training loss if nothing was ever validated.
pub fn loss(evaluations: &[Evaluation], step: u64) -> Option<f64> {
    comparable(evaluations)
        .rev()
        .find(|one| one.step == step && one.status == EvaluationStatus::Done)?
        .loss
}

/// Returns the loss of the save called `id` of a step, as [`loss`] does for the step.
pub fn loss_of_save(evaluations: &[Evaluation], step: u64, id: &str) -> Option<f64> {
    let is_save =
        |one: &&Evaluation| one.step == step && one.id.as_ref().is_none_or(|own| own == id);
    comparable(evaluations)
        .rev()
        .filter(is_save)
        .find(|one| one.status == EvaluationStatus::Done)?
        .loss
}

/// Returns the evaluations of steps up to `last`: only these count for a run that has gone back to
/// an earlier step.
pub fn until(evaluations: &[Evaluation], last: u64) -> Vec<Evaluation> {
    evaluations.iter().filter(|one| one.step <= last).cloned().collect()
}

/// Returns the validation loss of a step, if it is known.
pub fn validation_loss(evaluations: &[Evaluation], step: u64) -> Option<f64> {
    match over(evaluations) {
        LossSplit::Validation => loss(evaluations, step),
        LossSplit::Training => None,
    }
}

/// Returns the kind of loss by which steps are compared; losses of different kinds cannot be
/// compared.
pub fn over(evaluations: &[Evaluation]) -> LossSplit {
    let validated = evaluations
        .iter()
        .any(|one| one.split == LossSplit::Validation && one.status == EvaluationStatus::Done);
    if validated || evaluations.is_empty() { LossSplit::Validation } else { LossSplit::Training }
}

/// Returns the first step of `steps` with the lowest loss, and this loss.
pub fn best(evaluations: &[Evaluation], steps: &[u64]) -> Option<(u64, f64)> {
    let known = steps.iter().filter_map(|step| Some((*step, loss(evaluations, *step)?)));
    known
        .filter(|(_, loss)| loss.is_finite())
        .min_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)))
}

/// Returns the comparable losses of one kind by step. If a step was evaluated twice, the last
/// evaluation counts.
pub fn losses(evaluations: &[Evaluation], over: LossSplit) -> BTreeMap<u64, Option<f64>> {
    comparable(evaluations)
        .filter(|one| one.status == EvaluationStatus::Done && one.split == over)
        .map(|one| (one.step, one.loss))
        .collect()
}

/// Returns the reason to stop early if none of the last `patience` evaluations found a loss that is
/// lower by more than `min_delta` than the lowest before. A patience of 0 disables early stopping.
pub fn stop_reason(evaluations: &[Evaluation], patience: u64, min_delta: f64) -> Option<String> {
    let losses = losses(evaluations, LossSplit::Validation);
    let mut lowest = None;
    let mut since = 0;
    for (step, loss) in losses {
        match (loss.filter(|loss| loss.is_finite()), lowest) {
            (Some(loss), None) => (lowest, since) = (Some((step, loss)), 0),
            (Some(loss), Some((_, before))) if loss < before - min_delta => {
                (lowest, since) = (Some((step, loss)), 0)
            }
            _ => since += 1,
        }
    }
    (patience > 0 && since >= patience).then(|| match lowest {
        Some((step, loss)) => {
            format!("no validation loss lower than {loss:.4} of step {step} in {since} evaluations")
        }
        None => format!("no finite validation loss in {since} evaluations"),
    })
}

/// Returns true if the save with this name has been evaluated, or has failed for good.
pub fn is_settled(evaluations: &[Evaluation], id: &str) -> bool {
    evaluations
        .iter()
        .any(|one| one.id.as_deref() == Some(id) && one.status != EvaluationStatus::Retried)
}

/// Returns the number of evaluations of the save with this name that could not be computed so far.
pub fn retries(evaluations: &[Evaluation], id: &str) -> usize {
    evaluations
        .iter()
        .filter(|one| one.id.as_deref() == Some(id) && one.status == EvaluationStatus::Retried)
        .count()
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    fn done(step: u64, loss: f64) -> Evaluation {
        Evaluation::done(step, loss, BTreeMap::new())
    }

    fn of_checkpoint(step: u64, status: EvaluationStatus, loss: Option<f64>) -> Evaluation {
        let checkpoint = Some(format!("step-{step:08}"));
        let id = Some(format!("job-{step}"));
        Evaluation { step, status, loss, checkpoint, id, ..Evaluation::default() }
    }

    /// Returns the steps and names of the saves in a file.
    fn saves(path: &Path) -> Vec<(u64, String)> {
        let all = read(path).unwrap();
        all.known().iter().map(|one| (one.step, one.id.clone().unwrap_or_default())).collect()
    }

    #[test]
    fn lines_survive_kills_and_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let all = |path: &Path| read(path).unwrap().all().unwrap().to_vec();
        assert!(all(&path).is_empty());
        for step in [2, 4] {
            append(&path, &done(step, 0.1 + 0.2)).unwrap();
        }
        append(&path, &of_checkpoint(4, EvaluationStatus::Done, Some(1.0))).unwrap();
        let torn = "{\"step\":6,\"lo";
        OpenOptions::new().append(true).open(&path).unwrap().write_all(torn.as_bytes()).unwrap();
        append(&path, &done(6, 2.0)).unwrap();
        let found = all(&path);
        assert_eq!(found.iter().map(|one| one.step).collect::<Vec<_>>(), [2, 4, 4, 6]);
        assert_eq!(found[0].loss.map(f64::to_bits), Some((0.1f64 + 0.2).to_bits()));
        remove_after(&path, 2, |_| Save::Unknown).unwrap();
        assert_eq!(all(&path).iter().map(|one| one.step).collect::<Vec<_>>(), [2, 4]);
        assert!(!std::fs::read_to_string(&path).unwrap().contains(torn));
    }

    /// A run whose saves after step 4 were removed goes back to it; step 2 was saved twice, step 1
    /// removed by retention.
    #[test]
    fn lines_of_removed_saves_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let of = |step, id: &str, loss| Evaluation {
            checkpoint: Some("x".into()),
            id: Some(id.into()),
            ..done(step, loss)
        };
        let lines = [
            of(1, "a-1", 5.0),
            of(2, "a-2", 0.1),
            of(2, "b-2", 4.0),
            of(4, "b-4", 3.0),
            of(6, "b-6", 0.2),
        ];
        let named = |id: &str| Save::Named(id.into());
        let save = |step| match step {
            2 => named("b-2"),
            4 => named("b-4"),
            _ => Save::Gone,
        };
        lines.iter().for_each(|line| append(&path, line).unwrap());
        append(&path, &of(5, "b-5", 0.3)).unwrap();
        remove_after(&path, 4, save).unwrap();
        let expected =
            [(1, "a-1"), (2, "b-2"), (4, "b-4")].map(|(step, id)| (step, id.to_string()));
        assert_eq!(saves(&path), expected);
        assert_eq!(best(read(&path).unwrap().known(), &[2, 4]), Some((4, 3.0)));
        // Evaluations that ended meanwhile.
        assert!(!append_for_checkpoint(&path, &of(6, "b-6", 0.2), || Ok((Save::Gone, 4))).unwrap());
        assert!(
            !append_for_checkpoint(&path, &of(4, "a-4", 0.2), || Ok((named("b-4"), 4))).unwrap()
        );
        assert_eq!(saves(&path), expected);
        assert!(append_for_checkpoint(&path, &of(3, "b-3", 3.5), || Ok((Save::Gone, 4))).unwrap());
        assert!(
            append_for_checkpoint(&path, &of(6, "c-6", 2.0), || Ok((named("c-6"), 6))).unwrap()
        );
        assert!(
            append_for_checkpoint(&path, &of(7, "c-7", 2.0), || Err(Error::input("unreadable")))
                .is_err()
        );
        assert_eq!(saves(&path).len(), 5);
        // A save replaces another one of its step.
        append(&path, &done(6, 1.9)).unwrap();
        remove_replaced(&path, 6, "d-6").unwrap();
        let all = read(&path).unwrap().known().to_vec();
        assert_eq!(
            (
                all.len(),
                loss_of_save(&all, 6, "d-6"),
                loss_of_save(&all, 4, "x"),
                loss_of_save(&all, 4, "b-4")
            ),
            (5, Some(1.9), None, Some(3.0))
        );
        assert_eq!(until(&all, 2).len(), 2);
    }

    /// Losses on different data are not compared.
    #[test]
    fn only_one_set_counts() {
        let on = |step, loss, data: &str, samples| done(step, loss).with_data(Some(data), samples);
        let all = vec![
            done(1, 0.5),
            on(2, 0.1, "a", 9),
            on(3, 3.0, "b", 9),
            on(2, 2.0, "b", 9),
            on(1, 0.2, "b", 8),
        ];
        let steps: Vec<(u64, Option<f64>)> =
            comparable(&all).map(|one| (one.step, one.loss)).collect();
        assert_eq!(steps, [(1, Some(0.5)), (3, Some(3.0)), (2, Some(2.0))]);
        assert_eq!([1, 2, 3].map(|step| loss(&all, step)), [Some(0.5), Some(2.0), Some(3.0)]);
        assert_eq!(best(&all[1..], &[1, 2, 3]), Some((2, 2.0)));
        assert!(stop_reason(&all[1..3], 1, 0.0).is_none() && stop_reason(&all, 2, 0.0).is_some());
        // A checkpoint that was evaluated on other data is settled, too.
        let other = Evaluation {
            checkpoint: Some("x".into()),
            id: Some("job-2".into()),
            ..on(2, 0.1, "a", 9)
        };
        assert!(is_settled(&[other, on(3, 3.0, "b", 9)], "job-2"));
    }

    #[test]
    fn damaged_lines_are_reported_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        append(&path, &done(2, 1.0)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[3] = 0xff;
        for damage in [&b"\xff"[..], &flipped, b"{\"step\":4}garbage", b"\0\0\0\0"] {
            std::fs::write(&path, [damage, b"\n", &whole].concat()).unwrap();
            append(&path, &done(6, 1.0)).unwrap();
            remove_after(&path, 4, |_| Save::Gone).unwrap();
            let found = read(&path).unwrap();
            assert_eq!(found.known().len(), 1);
            let error = found.all().unwrap_err().to_string();
            assert!(error.contains("eval.jsonl, line 1: ") && error.contains("hint: "), "{error}");
        }
        // A line cut in the middle of a character, an empty one, and one of a single byte.
        for torn in [&b"{\"step\":4,\"error\":\"id 70 \xe2\x89"[..], b"", b"{"] {
            std::fs::write(&path, [torn, b"\n", &whole].concat()).unwrap();
            assert_eq!(read(&path).unwrap().all().unwrap().len(), 1);
        }
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
        let forgotten = remove_after(&path, 4, |_| Save::Gone);
        assert!(
            read(&path).is_err() && forgotten.is_err() && append(&path, &done(1, 1.0)).is_err()
        );
    }

    #[test]
    fn patience_ends() {
        let all: Vec<Evaluation> =
            (1..).zip([3.0, 2.0, 2.5, 1.95, 1.96]).map(|(n, loss)| done(n, loss)).collect();
        assert!(stop_reason(&all[..2], 1, 0.0).is_none() && stop_reason(&all, 0, 0.0).is_none());
        assert!(
            stop_reason(&all[..3], 1, 0.0).unwrap().contains("2.0000 of step 2 in 1 evaluations")
        );
        assert!(stop_reason(&all[..4], 2, 0.0).is_none() && stop_reason(&all, 2, 0.0).is_none());
        assert!(stop_reason(&all, 3, 0.1).unwrap().contains("of step 2 in 3"));
        assert!(
            stop_reason(&[Evaluation { loss: None, ..done(1, 0.0) }], 1, 0.0)
                .unwrap()
                .contains("no finite")
        );
    }

    #[test]
    fn training_losses_count_where_nothing_was_validated() {
        let of_epoch = |step, loss| Evaluation::training_epoch(step, Some(loss));
        let mut all = vec![of_epoch(1, 0.9), of_epoch(2, 0.3), of_epoch(3, 0.5)];
        assert_eq!((best(&all, &[1, 2, 3]), over(&all)), (Some((2, 0.3)), LossSplit::Training));
        assert_eq!((loss(&all, 3), validation_loss(&all, 3)), (Some(0.5), None));
        assert_eq!(stop_reason(&all, 1, 0.0), None);
        let line = serde_json::to_string(&all[0]).unwrap();
        assert!(line.contains("\"split\":\"training\""), "{line}");
        assert_eq!(serde_json::from_str::<Evaluation>(&line).unwrap(), all[0]);
        // Losses of training are ignored as soon as there is one of validation.
        all.push(done(3, 2.0));
        assert_eq!((best(&all, &[1, 2, 3]), over(&all)), (Some((3, 2.0)), LossSplit::Validation));
        assert_eq!(validation_loss(&all, 3), Some(2.0));
        assert!(!serde_json::to_string(&all[3]).unwrap().contains("split"));
    }

    #[test]
    fn the_best_is_among_those_that_exist() {
        let nan = Evaluation { loss: None, ..done(5, 0.0) };
        let mut all = vec![done(1, 3.0), done(2, 1.0), done(3, 2.0), nan];
        all.push(of_checkpoint(4, EvaluationStatus::Retried, None));
        assert_eq!(best(&all, &[1, 2, 3, 4, 5]), Some((2, 1.0)));
        assert_eq!(best(&all, &[1, 3]), Some((3, 2.0)));
        assert_eq!(best(&all, &[4, 5]), None);
        assert!(!is_settled(&all, "job-4") && retries(&all, "job-4") == 1);
        all.push(of_checkpoint(4, EvaluationStatus::Done, Some(0.5)));
        assert!(is_settled(&all, "job-4"));
        assert_eq!(best(&all, &[1, 2, 3, 4]), Some((4, 0.5)));
    }
}
