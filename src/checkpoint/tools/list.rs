//! The checkpoints of a run, as a table or as a JSON object.

use std::path::PathBuf;

use serde::Serialize;

use crate::names::name_of;
use crate::{Checkpoints, Manifest};
use hpctrain_base::error::{Kind, Result};
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::evaluations::{Evaluation, LossSplit};
use hpctrain_config::telemetry::{bytes, utc};
use hpctrain_data::inspect::table;

/// The checkpoints of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckpointList {
    /// The directory of the checkpoints.
    pub directory: PathBuf,
    /// The kind of loss in the list.
    pub loss_over: LossSplit,
    /// The published checkpoints, ascending by step.
    pub checkpoints: Vec<ListedCheckpoint>,
}

/// A published checkpoint. Without a readable manifest the optional fields are `None`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ListedCheckpoint {
    /// The number of finished steps.
    pub step: u64,
    /// The id of the save.
    pub id: Option<String>,
    /// The size of its files in bytes.
    pub bytes: Option<u64>,
    /// The time at which it was written, in seconds since 1970.
    pub time: Option<f64>,
    /// The loss of the checkpoint, if it was evaluated.
    pub loss: Option<f64>,
    /// Whether `latest` points to it.
    pub latest: bool,
    /// Whether `best` points to it.
    pub best: bool,
    /// Whether a process holds a lease on it.
    pub leased: bool,
    /// The fault of the checkpoint, if it has one.
    pub fault: Option<String>,
}

/// Lists all published checkpoints of a run.
///
/// # Errors
/// Returns an error if the directory, `latest`, `best` or a lease cannot be read.
pub fn list(checkpoints: &Checkpoints) -> Result<CheckpointList> {
    let evaluated = checkpoints.evaluated()?;
    if let Err(e) = evaluated.all() {
        log::warn!("{}", e.to_string().replace('\n', "; "));
    }
    let known = evaluated.known();
    let latest = checkpoints.latest_step()?;
    let best = checkpoints.best_step()?;
    let all = checkpoints
        .steps()?
        .into_iter()
        .map(|step| ListedCheckpoint::read(checkpoints, known, step, latest, best))
        .collect::<Result<_>>()?;
    let directory = checkpoints.root().to_path_buf();
    Ok(CheckpointList { directory, loss_over: evaluations::over(known), checkpoints: all })
}

impl CheckpointList {
    /// Formats a table with one line for each checkpoint.
    pub fn to_table(&self) -> String {
        let loss = match self.loss_over {
            LossSplit::Validation => "validation loss",
            LossSplit::Training => "training loss",
        };
        let mut rows = vec![["step", "size", "written", loss, "marks", "id"].map(str::to_owned)];
        rows.extend(self.checkpoints.iter().map(ListedCheckpoint::row));
        match rows.len() {
            1 => format!("no checkpoint in {}", self.directory.display()),
            _ => table(&rows),
        }
    }
}

impl ListedCheckpoint {
    /// Returns the entry of the checkpoint of a step; `latest` and `best` point to these steps.
    fn read(
        checkpoints: &Checkpoints,
        known: &[Evaluation],
        step: u64,
        latest: Option<u64>,
        best: Option<u64>,
    ) -> Result<Self> {
        let found = checkpoints.read_intact(step);
        let name = name_of(step);
        let loss = match &found {
            Ok(manifest) => evaluations::loss_of_save(known, step, &manifest.id),
            Err(_) => evaluations::loss(known, step),
        };
        let fault = found.as_ref().err().map(|e| match e.kind() {
            Kind::Damaged => format!("damaged: {}", e.message()),
            _ => e.message().to_string(),
        });
        let manifest = found.ok();
        Ok(Self {
            step,
            bytes: manifest.as_ref().map(Manifest::bytes),
            time: manifest.as_ref().map(|manifest| manifest.origin.time),
            id: manifest.map(|manifest| manifest.id),
            loss,
            latest: latest == Some(step),
            best: best == Some(step),
            leased: checkpoints.leases().holds(&name)?,
            fault,
        })
    }

    fn row(&self) -> [String; 6] {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let marks = [("latest", self.latest), ("best", self.best), ("leased", self.leased)];
        let marks = marks.into_iter().filter(|(_, holds)| *holds).map(|(mark, _)| mark.to_owned());
        let marks: Vec<String> = marks.chain(self.fault.clone()).collect();
        [
            self.step.to_string(),
            or_none(self.bytes.map(|size| bytes(size as usize))),
            or_none(self.time.map(written)),
            or_none(self.loss.map(|loss| format!("{loss:.4}"))),
            marks.join(", "),
            or_none(self.id.clone()),
        ]
    }
}

/// Formats the time at which a checkpoint was written, in UTC.
pub(super) fn written(time: f64) -> String {
    utc(time).unwrap_or_else(|| "-".into())
}
