//! Records and progress output of rank 0.

use std::collections::VecDeque;
use std::path::PathBuf;

use crate::config::Plan;
use crate::error::{Error, Result};
use crate::run_dir::RunDirectory;
use crate::telemetry::epoch_loss::EpochLoss;
use crate::telemetry::evaluations::{self, Evaluation};
use crate::telemetry::metrics::JsonLines;
use crate::telemetry::progress::Progress;
use crate::telemetry::straggler::Stragglers;

/// The records of rank 0.
pub struct Records {
    /// `metrics.jsonl`.
    pub metrics: JsonLines,
    /// The progress line.
    pub progress: Progress,
    /// Detection of slow ranks.
    pub stragglers: Stragglers,
    /// Without validation data: the training loss by which checkpoints are compared.
    pub epoch_loss: Option<EpochLoss>,
    /// `eval.jsonl`, and the evaluations that are not in it yet.
    evaluations: (PathBuf, VecDeque<Evaluation>),
}

impl Records {
    /// Opens the records of a run that is at `step`: records of later steps are dropped, and will be written again.
    /// `choices` is the result of a measurement of collectives; `epoch_loss` is given where there is no validation
    /// data.
    ///
    /// # Errors
    /// The file system refused.
    pub fn open(
        directory: &RunDirectory,
        plan: &Plan,
        step: u64,
        choices: Option<String>,
        epoch_loss: Option<EpochLoss>,
    ) -> Result<Self> {
        directory.write_config(&plan.config)?;
        if let Some(choices) = choices {
            let path = directory.collectives_path();
            std::fs::write(&path, choices).map_err(|e| Error::io("write", &path, e))?;
        }
        let checkpoints = directory.checkpoints();
        evaluations::forget_after(&directory.evaluations_path(), step, |step| checkpoints.save(step))?;
        let metrics = JsonLines::open(&directory.metrics_path(), step)?;
        Ok(Self {
            metrics,
            evaluations: (directory.evaluations_path(), VecDeque::new()),
            epoch_loss: epoch_loss.map(|epoch| epoch.with(&directory.metrics_path())),
            progress: Progress::new(step, plan.config.run.steps, plan.config.log.every, plan.network.predictions()),
            stragglers: Stragglers::new(
                plan.config.log.straggler_factor,
                plan.mesh.data(),
                plan.config.log.straggler_window,
            ),
        })
    }

    /// Appends an evaluation.
    ///
    /// # Errors
    /// The file system refused. The evaluation waits for [`Records::flush`].
    pub fn evaluated(&mut self, evaluation: Evaluation) -> Result<()> {
        // One that waits may be told again with the next attempt to save.
        let is_same = |one: &Evaluation| (one.step, one.over) == (evaluation.step, evaluation.over);
        if !self.evaluations.1.iter().any(is_same) {
            self.evaluations.1.push_back(evaluation);
        }
        self.flush()
    }

    /// Writes all that waits because the file system has refused it.
    ///
    /// # Errors
    /// It refused again.
    pub fn flush(&mut self) -> Result<()> {
        self.metrics.flush()?;
        let (path, waiting) = &mut self.evaluations;
        while let Some(first) = waiting.front() {
            evaluations::append(path, first)?;
            waiting.pop_front();
        }
        Ok(())
    }
}
