//! The training session of a run on one set of servers: the coordinator's steps, evaluations and
//! checkpoints.

mod checkpoints;
mod finish;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;

use super::checkpoint_task::Saving;
use super::coordinator_service::{CoordinatorService, SessionError};
use super::protocol::{ServerRequest, ServerResponse};
use super::run_spec::{RunSpec, TABLES, layouts};
use super::scheduler::{BatchResult, FinishedBatches, WorkScheduler};
use super::server_clients::ServerClients;
use super::wal::{CommittedStep, Update, WalEntry, WalWriter, WriteAheadLog};
use super::worker_metrics::WorkerMetrics;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::{Tensor, UnitLayout};
use hpctrain_base::spans::now;
use hpctrain_checkpoint::run_dir::{RunDirectory, RunOutcome};
use hpctrain_checkpoint::{Origin, Progress, SaveContext, SaveThread};
use hpctrain_config::telemetry::epoch_loss::EpochLoss;
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::goodput::Pauses;
use hpctrain_config::telemetry::metrics::Step;
use hpctrain_config::telemetry::starts::StartedJob;
use hpctrain_config::telemetry::{say, unix_time};
use hpctrain_config::{EpochLength, Eval, ResolvedConfig};
use hpctrain_cpu::Cpu;
use hpctrain_data::{Mix, TrainedOn};
use hpctrain_engine::{Splits, clip};
use hpctrain_nn::loss::Objective;
use hpctrain_nn::optim::GroupRun;
use hpctrain_parallel::{
    AllFlags, ControlFlags, Hyper, Norms, SquareSum, Squares, state_names, sum_of_squares,
    whole_norms,
};
use hpctrain_train::evaluate::Evaluator;
use hpctrain_train::evaluate::Metrics;
use hpctrain_train::{
    Hooks, IoFailureTolerance, Records, StopRequests, TimeLimit, fresh_id, record_start,
};

/// The parts of a run that outlive a session.
pub struct SessionContext<'a, 'h> {
    pub service: &'a CoordinatorService,
    pub directory: &'a RunDirectory,
    pub splits: &'a Splits,
    pub trained_on: Option<TrainedOn>,
    pub started: Instant,
    pub journal: &'a WriteAheadLog,
    pub hooks: &'a mut RunHooks<'h>,
}

/// The hooks of a run, and its last step.
pub struct RunHooks<'h> {
    pub hooks: Hooks<'h>,
    pub step: u64,
}

/// The point at which a session starts.
#[derive(Clone, Copy)]
pub enum StartPoint<'a> {
    /// Parameters initialized from the seed.
    Seed,
    /// A checkpoint.
    Checkpoint(&'a Path),
    /// The last step of the previous coordinator, with servers that still hold their ranges.
    Journal(&'a WalEntry),
}

/// A training session on one set of servers.
pub struct Session<'a, 'h> {
    hub: &'a CoordinatorService,
    directory: &'a RunDirectory,
    plan: ResolvedConfig,
    layouts: Vec<UnitLayout>,
    terms: RunSpec,
    clients: ServerClients,
    /// The clients for saves, which run concurrently with training.
    save_clients: Arc<Mutex<ServerClients>>,
    save_thread: SaveThread,
    records: Records,
    worker_metrics: WorkerMetrics,
    started: Instant,
    /// The time of the last record of a step, moved on by the evaluations since then.
    recorded_at: Instant,
    stop_requests: StopRequests,
    outages: IoFailureTolerance,
    job: Arc<SaveContext>,
    journal: WalWriter,
    evaluator: Option<Evaluator>,
    objective: Objective<Cpu>,
    train_samples: u64,
    progress: Progress,
    /// The step and the number of the last snapshot.
    cut: Option<(u64, u64)>,
    /// The step and the loss of the last evaluation.
    last_evaluation: Option<(u64, f64)>,
    /// The metrics of the last evaluation since the servers were assigned their ranges.
    measures: Option<Metrics>,
    hooks: &'a mut RunHooks<'h>,
    /// The epochs that ended with the last step, with its record.
    ended_epochs: Vec<(u64, Step)>,
    /// The step of the last checkpoint.
    last_save: Option<u64>,
    /// The step of the last epoch loss that was recorded.
    epoch_recorded: Option<u64>,
    saving: Option<Saving>,
    /// Whether a checkpoint is due by time.
    save_now: bool,
    /// Evaluations since the last record of a step.
    pauses: Pauses,
    skipped_in_a_row: u64,
    /// The outcome, once training must end.
    outcome: Option<RunOutcome>,
}

impl<'a, 'h> Session<'a, 'h> {
    /// Creates a session with servers that hold their ranges, and lets workers join.
    ///
    /// # Errors
    /// Returns an error if the records cannot be opened, the time limit is exhausted, or a server
    /// is lost.
    pub fn begin(
        context: SessionContext<'a, 'h>,
        plan: ResolvedConfig,
        terms: RunSpec,
        fleet: ServerClients,
        from: StartPoint<'_>,
    ) -> Result<Self, SessionError> {
        let SessionContext { service: hub, directory, splits, trained_on, started, journal, hooks } =
            context;
        // The journaled step is applied again, but its workers are already in workers.jsonl.
        let (progress, first_step, done) = match from {
            StartPoint::Journal(entry) => {
                (entry.before, entry.before.step + 1, entry.batches.clone().unwrap_or_default())
            }
            _ => (terms.start, terms.start.step, FinishedBatches::default()),
        };
        hooks.step = progress.step;
        let samples = splits.train.samples();
        let epoch_steps = EpochLength::new(&plan.config, samples).steps(plan.config.batch.global);
        let epoch_loss = splits.validation.is_none().then(|| EpochLoss::new(epoch_steps));
        // Parameter servers do not support data.exclude, and workers may come from any host.
        let data = splits.train.fingerprint();
        let job =
            StartedJob::new(&plan.config, Vec::new(), progress.position, None, data.as_ref())?;
        record_start(directory, progress.step, started, job, false)?;
        let records = Records::open(directory, &plan, progress.step, None, epoch_loss)?;
        let shares = terms.shares(&plan);
        let is_synchronous = terms.is_synchronous();
        let predictions = if is_synchronous { plan.tokens_per_step() / shares } else { 0 };
        let share_samples = plan.config.batch.global / shares;
        let tally = WorkerMetrics::open(
            &directory.workers_path(),
            first_step,
            &plan.config.log,
            share_samples,
            predictions,
        )?;
        let layouts = layouts(&plan);
        let parameters: u64 = layouts.iter().map(|unit| unit.padded as u64).sum();
        let budget = TimeLimit::new(plan.config.run.time_limit, started, 12 * parameters);
        budget.check()?;
        let stop_requests = StopRequests::new(
            true,
            budget,
            directory.markers(),
            plan.config.checkpoint.every_seconds,
        );
        let job = SaveContext {
            checkpoints: directory.checkpoints(),
            config: plan.config.clone(),
            preprocessing: Some(splits.train.preprocessing()),
            data: trained_on,
            origin: Origin {
                ranks: terms.addresses.len(),
                hosts: terms.addresses.clone(),
                mpi: "servers over TCP".into(),
                ..Origin::default()
            },
            id: fresh_id(),
            records: vec![directory.metrics_path()],
            state: state_names(Some(plan.update_rule), plan.ema, None),
        };
        let eval_samples = plan.config.eval.samples;
        let chunk = plan.config.eval.batch;
        // The workers read the samples; this evaluator only counts them.
        let evaluator = splits
            .validation
            .as_ref()
            .map(|validation| Evaluator::counting_only(&**validation, eval_samples, chunk));
        let evaluator =
            evaluator.map(|evaluator| evaluator.with_set_names(Mix::names(&plan.config.data.mix)));
        let outages =
            IoFailureTolerance::new(plan.config.checkpoint.io_retry_seconds, progress.step > 0);
        let first_ticket = (unix_time() * 1e3) as u64;
        let mut pool = WorkScheduler::new(
            plan.config.parameter_server.staleness,
            plan.config.parameter_server.batches_per_lease,
            first_ticket,
        );
        if !terms.is_synchronous() {
            pool.begin_batches(
                done,
                (plan.config.run.steps - terms.start.step) * terms.workers as u64,
                terms.workers,
            );
        }
        let digest = splits.train.fingerprint().map(|fingerprint| fingerprint.digest());
        hub.with(|state| {
            state.digest = digest;
            state.open(terms.clone(), pool);
        });
        let save_fleet = Arc::new(Mutex::new(fleet.with_long_timeout(terms.generation)?));
        let found = evaluations::read(&directory.evaluations_path())?;
        let evaluated = evaluations::validation_loss(found.known(), progress.step)
            .map(|loss| (progress.step, loss));
        Ok(Self {
            hub,
            directory,
            objective: plan.objective(),
            plan,
            layouts,
            terms,
            clients: fleet,
            save_clients: save_fleet,
            save_thread: SaveThread::start()?,
            records,
            worker_metrics: tally,
            started,
            recorded_at: Instant::now(),
            stop_requests,
            outages,
            job: Arc::new(job),
            journal: journal.writer(),
            evaluator,
            train_samples: samples,
            progress,
            cut: None,
            last_evaluation: evaluated,
            measures: None,
            hooks,
            ended_epochs: vec![],
            last_save: Some(progress.step),
            epoch_recorded: None,
            saving: None,
            save_now: false,
            pauses: Pauses::default(),
            skipped_in_a_row: 0,
            outcome: None,
        })
    }

    /// Trains from the starting point to the end.
    ///
    /// # Errors
    /// Returns an error if a server is lost, a worker fails, the run diverges, or its directory
    /// cannot be written.
    pub fn run(mut self, from: StartPoint<'_>) -> Result<RunOutcome, SessionError> {
        self.print_startup(from);
        self.recorded_at = Instant::now();
        let started = match from {
            StartPoint::Journal(entry) => {
                // The step took some of its time under the previous coordinator.
                let before = Duration::from_secs_f64(entry.decided.seconds);
                self.recorded_at = self.recorded_at.checked_sub(before).unwrap_or(self.recorded_at);
                self.end_step(&entry.decided, now())
            }
            StartPoint::Seed | StartPoint::Checkpoint(_) => Ok(()),
        };
        let ended = started.and_then(|()| self.steps()).and_then(|outcome| self.finish(outcome));
        if let Some(saving) = self.saving.take() {
            // An unfinished save removes its files when it fails.
            saving.wait().map_or_else(|_| log::warn!("a checkpoint was not completed"), drop);
        }
        ended
    }

    /// Prints the startup summary.
    fn print_startup(&self, from: StartPoint<'_>) {
        let RunSpec { workers, addresses, pieces, .. } = &self.terms;
        let ranges: usize = pieces.iter().map(Vec::len).sum();
        let staleness = &self.plan.config.parameter_server.staleness;
        say(format_args!("run        {}", self.directory.path().display()));
        say(format_args!(
            "servers    {}, {ranges} ranges, on {}",
            addresses.len(),
            addresses.join(", ")
        ));
        let virtual_ranks = if self.terms.is_synchronous() {
            format!(", {} virtual ranks per step", self.plan.virtual_ranks)
        } else {
            String::new()
        };
        say(format_args!("workers    {workers}, staleness {staleness}{virtual_ranks}"));
        let step = self.progress.step;
        match from {
            StartPoint::Seed => {}
            StartPoint::Checkpoint(path) => {
                say(format_args!("resumed    step {step} of {}", path.display()))
            }
            StartPoint::Journal(_) => {
                say(format_args!("resumed    step {step}, on servers that still hold its state"))
            }
        }
        say("");
    }

    /// Runs steps until training ends.
    fn steps(&mut self) -> Result<RunOutcome, SessionError> {
        while self.outcome.is_none() && self.progress.step < self.plan.config.run.steps {
            let start = now();
            let decided =
                if self.terms.is_synchronous() { self.sync_step()? } else { self.async_step()? };
            let Some(decided) = decided else { break };
            let seconds = self.recorded_at.elapsed().as_secs_f64();
            let decided = CommittedStep { seconds, ..decided };
            self.append_to_wal(&decided);
            self.end_step(&decided, start)?;
        }
        Ok(self.outcome.take().unwrap_or(RunOutcome::Finished))
    }

    /// Appends a step to the write-ahead log before its update, so that a restarted coordinator can
    /// resume from it.
    fn append_to_wal(&mut self, decided: &CommittedStep) {
        let batches = self.hub.with(|state| state.scheduler.done_batches());
        let generation = self.terms.generation;
        let before = self.progress;
        let decided = decided.clone();
        let written = self.journal.append(&WalEntry { generation, before, decided, batches });
        // An earlier step in the log must not be mistaken for the last one.
        if let Err(e) = written {
            log::warn!("{e}: a restarted coordinator will resume from the last checkpoint");
            self.journal.clear().unwrap_or_else(|e| log::warn!("{e}"));
        }
    }

    /// Applies the update of a step, records it, and does everything that is due after it.
    fn end_step(&mut self, decided: &CommittedStep, start: u64) -> Result<(), SessionError> {
        let generation = self.terms.generation;
        let step = self.progress.step;
        if let Some(Update { hyper, trust }) = &decided.update {
            self.clients.all(|_| ServerRequest::Update {
                generation,
                step,
                hyper: *hyper,
                trust: trust.clone(),
            })?;
            self.progress.updates += u64::from(hyper.is_some());
        }
        self.progress.position = decided.position;
        self.progress.step += 1;
        self.trace("step", start);
        // The time limit adds saves itself.
        self.stop_requests.note_step(Duration::from_nanos(now().saturating_sub(start)));
        // From record to record, so that the times of all steps add up to the time of the run:
        // asynchronous steps end in bursts, and workers wait for the journal and the records, too.
        let recorded_at = Instant::now();
        let took = recorded_at - std::mem::replace(&mut self.recorded_at, recorded_at);
        // As on ranks, a request or a failure of a hook takes effect after the next step.
        let flags = self.stop_requests.flags(false)
            | ControlFlags::FAILED.when(self.hooks.hooks.has_failed());
        self.record(decided, took)?;
        self.apply_control_flags(decided, flags)?;
        self.evaluate_if_due()?;
        self.notify_epoch_end();
        self.save_if_due()
    }

    /// Runs a synchronous step; returns none if the run must end before.
    fn sync_step(&mut self) -> Result<Option<CommittedStep>, SessionError> {
        let step = self.progress.step;
        let virtual_ranks = self.plan.virtual_ranks;
        self.hub.with(|state| state.scheduler.begin_step(step, virtual_ranks));
        let stop_requests = &self.stop_requests;
        let done = self.hub.wait(|state| match state.scheduler.step_result() {
            Some(result) => Some(Some(result)),
            None => {
                (state.scheduler.members().is_empty() && stop_requests.must_end()).then_some(None)
            }
        })?;
        let Some((loss, compute)) = done else { return Ok(self.interrupted()) };
        let loss = loss / self.plan.tokens_per_step() as f64;
        let norm = self.norm(step)?;
        let lr = self.plan.schedule.rate(step);
        let skipped = !(loss.is_finite() && norm.is_finite());
        let hyper = (!skipped).then(|| Hyper {
            lr: lr as f32,
            weight_decay: self.plan.config.optimizer.weight_decay,
            step: self.progress.updates + 1,
            grad_scale: clip(self.plan.config.optimizer.grad_clip, norm) as f32,
        });
        let trust = match hyper {
            Some(hyper) if self.plan.update_rule.is_layerwise() => self.trust(hyper)?,
            _ => vec![],
        };
        let update = Some(Update { hyper: hyper.map(Into::into), trust });
        let position = self.progress.position + self.samples();
        Ok(Some(CommittedStep { loss, norm, lr, skipped, compute, seconds: 0.0, position, update }))
    }

    /// Returns the gradient norm of a step whose virtual ranks were all pushed.
    fn norm(&mut self, step: u64) -> Result<f64, SessionError> {
        let generation = self.terms.generation;
        let answers = self.clients.all(|_| ServerRequest::Squares { generation, step })?;
        let virtual_ranks = self.plan.virtual_ranks;
        let layouts = &self.layouts;
        let mut all = Vec::new();
        let mut of_rows = SquareSum::default();
        if self.terms.row_width.is_some() {
            // The norm of rows does not depend on virtual shards.
            let values = vec![0.0; virtual_ranks];
            let shards = virtual_ranks;
            all.push(Squares { first_unit: TABLES, first_shard: 0, shards, values });
        }
        let servers = self.terms.addresses.iter().zip(&self.terms.pieces);
        for ((address, pieces), answer) in servers.zip(answers) {
            let ServerResponse::Squares(squares) = answer else {
                return Err(unexpected(address, &answer));
            };
            for (piece, bits) in pieces.iter().zip(squares) {
                let values: Vec<f64> = bits.into_iter().map(f64::from_bits).collect();
                if self.terms.row_width.is_some() && piece.unit == TABLES {
                    of_rows.merge(&SquareSum::decode(&values)?);
                    continue;
                }
                let size = layouts[piece.unit].padded / virtual_ranks;
                let first_unit = piece.unit;
                let first_shard = piece.range.start / size;
                let shards = values.len();
                all.push(Squares { first_unit, first_shard, shards, values });
            }
        }
        let squares = sum_of_squares(all.iter(), layouts.len(), virtual_ranks)?;
        Ok((squares + of_rows.value()).sqrt())
    }

    /// Returns the trust ratio of every tensor of every unit, as bits.
    fn trust(&mut self, hyper: Hyper) -> Result<Vec<Vec<u32>>, SessionError> {
        let generation = self.terms.generation;
        let virtual_ranks = self.plan.virtual_ranks;
        let answers =
            self.clients.all(|_| ServerRequest::Norms { generation, hyper: hyper.into() })?;
        let layouts = &self.layouts;
        let tensors: usize = layouts.iter().map(|layout| layout.tensors.len()).sum();
        let mut norms = Norms::new(0..virtual_ranks, tensors);
        for (address, answer) in self.terms.addresses.iter().zip(answers) {
            let ServerResponse::Norms(of_server) = answer else {
                return Err(unexpected(address, &answer));
            };
            for (shard, tensor, squares) in of_server {
                norms.set(shard, tensor, squares.map(f64::from_bits));
            }
        }
        let mut squares = whole_norms(&[norms.encode()], virtual_ranks, tensors)?.into_iter();
        let mut ratio = |tensor: &Tensor| {
            self.trust_ratio(tensor, squares.next().unwrap_or_default(), hyper).to_bits()
        };
        Ok(layouts.iter().map(|layout| layout.tensors.iter().map(&mut ratio).collect()).collect())
    }

    /// Returns the trust ratio of a tensor with these squared norms.
    fn trust_ratio(&self, tensor: &Tensor, squares: [f64; 2], hyper: Hyper) -> f32 {
        let part = GroupRun::from_tensor(tensor, &self.plan.config.optimizer.groups);
        let weight_decay = part.decay(hyper.weight_decay);
        self.plan.update_rule.trust_ratio(squares, weight_decay, hyper.grad_scale)
    }

    /// Waits for as many batches as there are workers, which is a step of asynchronous training;
    /// returns none if the run must end before.
    fn async_step(&mut self) -> Result<Option<CommittedStep>, SessionError> {
        let workers = self.terms.workers;
        let generation = self.terms.generation;
        let batches = loop {
            let stop_requests = &self.stop_requests;
            let found = self.hub.wait(|state| {
                let revoked = state.scheduler.take_revoked();
                if !revoked.is_empty() {
                    return Some(Err(revoked));
                }
                match state.scheduler.take_batches(workers) {
                    Some(batches) => Some(Ok(Some(batches))),
                    None => (state.scheduler.members().is_empty() && stop_requests.must_end())
                        .then_some(Ok(None)),
                }
            })?;
            match found {
                Ok(batches) => break batches,
                Err(tickets) => {
                    for ticket in tickets {
                        self.clients.all(|_| ServerRequest::Revoke { generation, ticket })?;
                    }
                }
            }
        };
        let Some(batches) = batches else { return Ok(self.interrupted()) };
        let mean =
            |of: fn(&BatchResult) -> f64| batches.iter().map(of).sum::<f64>() / workers as f64;
        let skips = batches.iter().filter(|batch| batch.staleness.is_none()).count();
        let batch_samples = self.samples() / workers as u64;
        Ok(Some(CommittedStep {
            loss: mean(|batch| batch.loss),
            norm: mean(|batch| batch.norm),
            lr: self.plan.schedule.rate(self.progress.step),
            skipped: skips > 0,
            compute: mean(|batch| batch.compute),
            seconds: 0.0,
            position: self.terms.start.position
                + self.hub.with(|state| state.scheduler.first_unfinished()) * batch_samples,
            update: None,
        }))
    }

    /// Ends the run on request when no worker is left to compute a step.
    fn interrupted(&mut self) -> Option<CommittedStep> {
        self.outcome = Some(self.stop_requests.preempted());
        None
    }

    /// Returns the number of samples of a step.
    fn samples(&self) -> u64 {
        self.plan.config.batch.global
    }

    /// Records an event since `start` in the trace. An error of the trace does not end the run.
    fn trace(&self, name: &str, start: u64) {
        let Some(trace) = &self.hub.trace else { return };
        let written = trace.own(name, start, json!({ "step": self.progress.step }));
        written.unwrap_or_else(|e| log::warn!("{e}"));
    }

    fn record(&mut self, taken: &CommittedStep, took: Duration) -> Result<()> {
        let step = self.progress.step;
        let trained = self.trained();
        let context = self.plan.network.context() as u64;
        let seconds = took.as_secs_f64();
        let record = Step {
            step,
            epoch: EpochLength::new(&self.plan.config, self.train_samples).passed(step, trained),
            tokens: trained * context,
            loss: taken.loss,
            lr: taken.lr,
            grad_norm: taken.norm,
            skipped: taken.skipped,
            step_ms: seconds * 1e3,
            compute_ms: taken.compute * 1e3,
            tokens_per_second: (self.samples() * context) as f64 / seconds,
            hooks_ms: self.hooks.hooks.take_ms(),
            eval_ms: Some(std::mem::take(&mut self.pauses.eval_ms)).filter(|ms| *ms > 0.0),
            time: unix_time(),
            ..Step::default()
        };
        let written = self.records.record_step(&record);
        let contributions = self.hub.with(|state| state.scheduler.take_contributions());
        if let Some(board) = &mut self.records.tensorboard {
            board.staleness(
                step,
                &contributions.iter().filter_map(|one| one.staleness).collect::<Vec<_>>(),
            );
        }
        let tallied = self.worker_metrics.step(step, took, taken.skipped, &contributions);
        self.tolerate_outage(written.and(tallied))?;
        self.records.progress.step(&record, self.outages.ongoing_failure().as_deref());
        self.hooks.step = step;
        let stop = self.hooks.hooks.call(|hook| hook.step(&record));
        self.stop_requests.stop_for(stop);
        let ended = EpochLength::new(&self.plan.config, self.train_samples).ended(
            step,
            trained,
            1,
            self.samples(),
        );
        self.ended_epochs.extend(ended.map(|epoch| (epoch, record)));
        let status = [
            ("step", json!(step)),
            ("steps", json!(self.plan.config.run.steps)),
            ("loss", json!(taken.loss)),
            ("samples_per_second", json!(self.samples() as f64 / seconds)),
        ];
        self.hub.with(|state| state.progress.extend(status));
        Ok(())
    }

    /// Calls the hooks for the epochs that ended with the last step.
    fn notify_epoch_end(&mut self) {
        let evaluated = self.last_evaluation.map(|(step, _)| step);
        for (epoch, step) in std::mem::take(&mut self.ended_epochs) {
            let measures = self.measures.as_ref().filter(|_| evaluated == Some(step.step));
            let stop = self.hooks.hooks.call(|hook| hook.epoch(epoch, &step, measures));
            self.stop_requests.stop_for(stop);
        }
    }

    /// Handles requests to end, failures of hooks, and steps that are not finite.
    fn apply_control_flags(&mut self, taken: &CommittedStep, flags: ControlFlags) -> Result<()> {
        let step = self.progress.step;
        self.skipped_in_a_row = if taken.skipped { self.skipped_in_a_row + 1 } else { 0 };
        if taken.skipped {
            log::warn!(
                "step {step}: loss {}, gradient norm {}: update skipped",
                taken.loss,
                taken.norm
            );
        }
        if self.skipped_in_a_row >= self.plan.config.run.max_skipped {
            let message =
                format!("step {step}: {} steps in a row were not finite", self.skipped_in_a_row);
            return Err(Error::numeric(message).hint(
                "lower optimizer.lr, lengthen lr_schedule.warmup, or lower optimizer.grad_clip",
            ));
        }
        self.directory.check_often()?;
        if flags.contains(ControlFlags::FAILED) {
            self.hooks.hooks.failure()?;
        }
        if flags.contains(ControlFlags::DUE) {
            self.save_now = true;
        }
        self.outcome = self.stop_requests.outcome(&AllFlags(vec![flags]));
        Ok(())
    }

    /// Returns the number of samples of all steps so far.
    fn trained(&self) -> u64 {
        self.terms.start.position + (self.progress.step - self.terms.start.step) * self.samples()
    }

    /// Returns whether an action with a period of `steps` steps or `epochs` epochs is due now; 0
    /// disables a period.
    fn is_due(&self, steps: u64, epochs: u64) -> bool {
        let step = self.progress.step;
        self.plan.is_due(steps, step)
            || self.plan.is_due_by_epochs(epochs, step, self.trained(), self.train_samples)
    }

    fn evaluate_if_due(&mut self) -> Result<(), SessionError> {
        let Eval { every, every_epochs, .. } = self.plan.config.eval;
        let due = self.outcome.is_none() && self.is_due(every, every_epochs);
        if !(due && self.plan.config.eval.inline) {
            return Ok(());
        }
        let start = now();
        let began = Instant::now();
        self.evaluate()?;
        self.recorded_at += began.elapsed();
        self.pauses.eval_ms += began.elapsed().as_secs_f64() * 1e3;
        self.trace("evaluation", start);
        Ok(())
    }

    /// Lets the workers evaluate the current parameters.
    fn evaluate(&mut self) -> Result<(), SessionError> {
        let Some(chunks) = self.evaluator.as_ref().map(Evaluator::chunks) else { return Ok(()) };
        // A snapshot that is being written must not be replaced.
        self.await_saving()?;
        let cut = self.snapshot()?;
        self.hub.with(|state| state.scheduler.begin_evaluation(cut, chunks));
        let stop_requests = &self.stop_requests;
        let found = self.hub.wait(|state| match state.scheduler.take_evaluation() {
            Some(sums) => Some(Some(sums)),
            None if stop_requests.must_end() => {
                state.scheduler.drop_evaluation();
                Some(None)
            }
            None => None,
        })?;
        let Some(sums) = found else {
            self.outcome = Some(self.stop_requests.preempted());
            return Ok(());
        };
        let Some(evaluator) = &self.evaluator else { return Ok(()) };
        let measures = evaluator.measures(&self.objective, &sums)?;
        let step = self.progress.step;
        let text = measures.to_string();
        self.last_evaluation = Some((step, measures.loss));
        let stop = self.hooks.hooks.call(|hook| hook.evaluation(step, &measures));
        self.stop_requests.stop_for(stop);
        log::info!("step {step}: {text}");
        self.outages.lease_checked(self.directory.check())?;
        let evaluation =
            measures.evaluation(step).with_data(evaluator.digest(), evaluator.samples());
        self.measures = Some(measures);
        let written = self.records.record_evaluation(evaluation);
        self.records.progress.say(&format!("step {step:>6}  {text}"));
        let all = match written.and_then(|()| evaluations::read(&self.directory.evaluations_path()))
        {
            Ok(all) => all,
            Err(e) => return Ok(self.outages.record(Err(e))?),
        };
        let best = self.directory.checkpoints().point_to_best(&all);
        best.unwrap_or_else(|e| log::warn!("cannot update the link to the best checkpoint: {e}"));
        let config = &self.plan.config.eval;
        let all = evaluations::until(all.known(), step);
        let why = evaluations::stop_reason(&all, config.patience, config.min_delta);
        if step < self.plan.config.run.steps && self.outcome.is_none() {
            // This evaluation is also the last one.
            self.outcome = why.map(RunOutcome::Stopped);
        }
        Ok(())
    }
}

fn unexpected(address: &str, answer: &ServerResponse) -> SessionError {
    match answer {
        ServerResponse::Stale => {
            SessionError::Lost(format!("the server at {address} has restarted"))
        }
        other => SessionError::Failed(Error::internal(format!(
            "the server at {address} answered {other:?}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_has_restarted_is_named() {
        let lost = unexpected("node7:2222", &ServerResponse::Stale);
        let SessionError::Lost(why) = lost else { panic!("{lost:?}") };
        assert_eq!(why, "the server at node7:2222 has restarted");
        let failed = unexpected("node8:1", &ServerResponse::Squares(vec![]));
        let SessionError::Failed(e) = failed else { panic!("{failed:?}") };
        assert!(e.to_string().contains("the server at node8:1 answered Squares"), "{e}");
    }
}
