//! Records and progress output, written by rank 0.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Instant;

use crate::energy::EnergyAccount;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::own_files;
use hpctrain_checkpoint::run_dir::RunDirectory;
use hpctrain_checkpoint::run_dir::markers::RunStatus;
use hpctrain_config::ResolvedConfig;
use hpctrain_config::telemetry::epoch_loss::EpochLoss;
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::evaluations::Evaluation;
use hpctrain_config::telemetry::json_lines::JsonLines;
use hpctrain_config::telemetry::metrics::{Step, energy_so_far};
use hpctrain_config::telemetry::progress::Progress;
use hpctrain_config::telemetry::rank_times::RankTimes;
use hpctrain_config::telemetry::restarts;
use hpctrain_config::telemetry::starts::{self, Start, StartEnd, StartedJob};
use hpctrain_config::telemetry::straggler::{Straggler, Stragglers};
use hpctrain_config::telemetry::tensorboard::{self, TensorBoard};
use hpctrain_config::telemetry::text_samples::TextSample;
use hpctrain_config::telemetry::unix_time;

/// The record files of a run. Rank 0 has them.
pub struct Records {
    /// `metrics.jsonl`.
    pub metrics: JsonLines,
    /// The progress line.
    pub progress: Progress,
    /// The TensorBoard event file, if `log.tensorboard` is set.
    pub tensorboard: Option<TensorBoard>,
    /// The energy of the run so far.
    pub energy: EnergyAccount,
    /// Detection of slow ranks.
    stragglers: Stragglers,
    /// `rank_times.jsonl`, where there are several ranks.
    rank_times: Option<JsonLines>,
    /// `samples.jsonl`, where texts are sampled.
    samples: Option<JsonLines>,
    /// The training loss by which checkpoints are compared if there is no validation data.
    pub epoch_loss: Option<EpochLoss>,
    /// `eval.jsonl`, and the evaluations that are not in it yet.
    evaluations: (PathBuf, VecDeque<Evaluation>),
}

/// Records in `starts.jsonl` that a run goes on from `step`, before its later records are removed.
/// Its process, or that of its coordinator, began at `started`; `job` is its job. `was_asked` is
/// whether the start before it has ended for processes that join. Returns all starts of the run.
///
/// # Errors
/// Returns an error if a file cannot be read or written.
pub fn record_start(
    directory: &RunDirectory,
    step: u64,
    started: Instant,
    job: StartedJob,
    was_asked: bool,
) -> Result<Vec<Start>> {
    let startup = started.elapsed().as_secs_f64();
    // A coordinator that has lost a server starts again in the same process.
    let began = unix_time() - startup;
    let is_same_process =
        starts::read(directory.path())?.last().is_some_and(|last| last.time > began);
    let end = match directory.ended_before() {
        _ if was_asked => StartEnd::Preempted,
        _ if is_same_process => StartEnd::Failed,
        None => StartEnd::Killed,
        Some(end) => match end.status {
            RunStatus::Finished => StartEnd::Finished,
            RunStatus::Preempted => StartEnd::Preempted,
            RunStatus::Failed => StartEnd::Failed,
        },
    };
    starts::record(directory.path(), &directory.metrics_path(), step, startup, end, Some(job))
}

impl Records {
    /// Opens the records of a run that is at `step`. Records of later steps are dropped, and will
    /// be written again. `choices` is the result of a benchmark of collectives; `epoch_loss` is
    /// given if there is no validation data.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or written.
    pub fn open(
        directory: &RunDirectory,
        plan: &ResolvedConfig,
        step: u64,
        choices: Option<String>,
        epoch_loss: Option<EpochLoss>,
    ) -> Result<Self> {
        directory.write_config(&plan.config)?;
        if let Some(choices) = choices {
            let path = directory.collectives_path();
            own_files::write(&path, choices).map_err(|e| Error::io("write", &path, e))?;
        }
        let checkpoints = directory.checkpoints();
        evaluations::remove_after(&directory.evaluations_path(), step, |step| {
            checkpoints.save(step)
        })?;
        let of_evaluators = directory.evaluator_tensorboard_path();
        if of_evaluators.exists() {
            let all = evaluations::read(&directory.evaluations_path())?;
            let written = tensorboard::write_evaluations(&of_evaluators, all.known());
            // They are the evaluators' to write, and do not hold up the run.
            written.unwrap_or_else(|e| log::warn!("{}", e.message()));
        }
        let kwh = energy_so_far(&directory.metrics_path(), plan.config.log.every)?;
        let energy = EnergyAccount::new(kwh, step, plan.tokens_per_step());
        let metrics = JsonLines::open(&directory.metrics_path(), step)?;
        let optional = |is_wanted: bool, path: PathBuf| {
            is_wanted.then(|| JsonLines::open(&path, step)).transpose()
        };
        let rank_times = optional(plan.mesh.ranks() > 1, directory.rank_times_path())?;
        let samples = optional(
            plan.network.is_language() && plan.config.log.sample_tokens > 0,
            directory.samples_path(),
        )?;
        let begin =
            || TensorBoard::begin(&directory.tensorboard_path(), step, plan.network.is_language());
        let mut tensorboard = plan.config.log.tensorboard.then(begin).transpose()?;
        if let Some(board) = &mut tensorboard {
            let settings = plan.config.to_toml()?;
            // Texts of a start are of the first step that it takes, which a later start may take
            // again.
            board.text(step + 1, "texts/configuration", &settings);
            match restarts::read_run(directory.path())? {
                restarts if restarts.is_empty() => {}
                restarts => board.restarts(step + 1, restarts.len()),
            }
        }
        Ok(Self {
            metrics,
            tensorboard,
            energy,
            rank_times,
            samples,
            evaluations: (directory.evaluations_path(), VecDeque::new()),
            epoch_loss: epoch_loss
                .map(|epoch| epoch.with_records(&directory.metrics_path()))
                .transpose()?,
            progress: Progress::new(
                step,
                plan.config.run.steps,
                plan.config.log.every,
                plan.network.predictions(),
            ),
            stragglers: Stragglers::new(
                plan.config.log.straggler_factor,
                plan.mesh.data(),
                plan.config.log.straggler_window,
                plan.virtual_ranks_of_all(),
            ),
        })
    }

    /// Adds the record of a step.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The record waits for [`Records::flush`].
    pub fn record_step(&mut self, record: &Step) -> Result<()> {
        if let Some(board) = &mut self.tensorboard {
            board.step(record);
        }
        self.epoch_loss.iter_mut().for_each(|epoch| epoch.push(record.loss));
        self.metrics.write(record).and_then(|()| self.flush())
    }

    /// Returns the number of virtual ranks of every rank.
    pub fn virtual_ranks(&self) -> &[usize] {
        self.stragglers.virtual_ranks()
    }

    /// Adds the seconds that each rank computed in step `step`. When a window of steps is complete,
    /// returns its stragglers and the result of writing its record; a record that could not be
    /// written waits for [`Records::flush`].
    pub fn record_compute_times(
        &mut self,
        step: u64,
        seconds: &[f64],
    ) -> (Vec<Straggler>, Result<()>) {
        let Some(window) = self.stragglers.step(seconds) else { return (Vec::new(), Ok(())) };
        let ms = |seconds: &f64| 1e3 * seconds / window.steps as f64;
        let times = RankTimes::new(step, window.steps, window.seconds.iter().map(ms).collect())
            .with_virtual_ranks(self.virtual_ranks());
        let written = self.rank_times.as_mut().map_or(Ok(()), |file| file.write(&times));
        (window.stragglers, written)
    }

    /// Adds a text that the model has generated.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The record waits for [`Records::flush`].
    pub fn record_sample(&mut self, step: u64, text: &str) -> Result<()> {
        if let Some(board) = &mut self.tensorboard {
            board.text(step, "texts/sample", text);
        }
        let sample = TextSample { step, text: text.into(), time: unix_time() };
        self.samples.as_mut().map_or(Ok(()), |samples| samples.write(&sample))
    }

    /// Appends an evaluation.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The evaluation waits for [`Records::flush`].
    pub fn record_evaluation(&mut self, evaluation: Evaluation) -> Result<()> {
        // An evaluation that waits may be added again with the next attempt to save.
        let is_same =
            |one: &Evaluation| (one.step, one.split) == (evaluation.step, evaluation.split);
        if !self.evaluations.1.iter().any(is_same) {
            if let Some(board) = &mut self.tensorboard {
                board.evaluation(&evaluation);
            }
            self.evaluations.1.push_back(evaluation);
        }
        self.flush()
    }

    /// Reopens the record files after one of them could not be written. Only the run's trainer may
    /// do this.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or written.
    pub fn reopen(&mut self) -> Result<()> {
        let optional = self.rank_times.iter_mut().chain(&mut self.samples);
        [&mut self.metrics].into_iter().chain(optional).try_for_each(JsonLines::reopen)
    }

    /// Writes all records that wait because they could not be written.
    ///
    /// # Errors
    /// Returns an error if a file still cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        self.metrics.flush()?;
        self.rank_times.as_mut().map_or(Ok(()), JsonLines::flush)?;
        self.samples.as_mut().map_or(Ok(()), JsonLines::flush)?;
        let (path, waiting) = &mut self.evaluations;
        while let Some(first) = waiting.front() {
            evaluations::append(path, first)?;
            waiting.pop_front();
        }
        Ok(())
    }
}
