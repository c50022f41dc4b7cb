//! A training run from the first message to the last checkpoint.

mod finish;
mod in_memory;
mod prepare;
mod shared_ids;
mod work_shares;

pub(crate) use in_memory::bytes_before;
pub use shared_ids::fresh_id;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use self::in_memory::{InMemory, RunObserver};
use crate::elastic::ElasticJob;
use crate::energy::Energy;
use crate::evaluate::{Evaluator, Metrics, RunAnnouncement};
use crate::hang_timeout::{HangTimeout, Phase};
use crate::hooks::{Hook, Hooks};
use crate::io_retry::{IoFailureTolerance, is_outage};
use crate::records::Records;
use crate::save_interval::{Described, SaveInterval};
use crate::step_timers::{Requested, StepTimers};
use crate::stop_requests::StopRequests;
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::fault;
use hpctrain_base::spans::{ActivityKind, Track, span};
use hpctrain_checkpoint::memory::NodeSlots;
use hpctrain_checkpoint::run_dir::{RestoreScope, Resume, RunDirectory, RunOutcome};
use hpctrain_checkpoint::{self as checkpoint, Published, Saver};
use hpctrain_comm::{Comm, Group, Stats, WatchdogGuard};
use hpctrain_config::telemetry::efficiency::Efficiency;
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::evaluations::{Evaluation, Evaluations, LossSplit};
use hpctrain_config::telemetry::goodput::Pauses;
use hpctrain_config::telemetry::metrics::Step;
use hpctrain_config::telemetry::straggler::Straggler;
use hpctrain_config::telemetry::times::{TimeCounters, Times};
use hpctrain_config::telemetry::trace::Trace;
use hpctrain_config::telemetry::unix_time;
use hpctrain_config::topology::Topology;
use hpctrain_config::{Checkpoint, Config, EpochLength, Eval, Loss, Model, ResolvedConfig};
use hpctrain_data::{Tokenizer, TrainedOn};
use hpctrain_device::{DeviceCounters, Kernels};
use hpctrain_engine::memory::BaselineMemory;
use hpctrain_engine::micro_batches::MicroBatches;
use hpctrain_engine::{Engine, Round, Splits, StepResult, train_round};
use hpctrain_nn::CustomModel;
use hpctrain_nn::loss::{CustomLoss, CustomMetric};
use hpctrain_parallel::{AllFlags, ControlFlags, LocalSgd, whole_histograms};

/// Request for a run.
#[derive(Debug, Clone)]
pub struct TrainRequest {
    /// The configuration, not yet resolved.
    pub config: Config,
    /// Name of the run unless the configuration has one.
    pub name: String,
    /// Starting point.
    pub resume: Resume,
    /// The parts of a checkpoint that are restored.
    pub take: RestoreScope,
    /// Whether a resumed run may use other training data than the checkpoint's.
    pub allow_changed_data: bool,
    /// Path of a trace to write, if any.
    pub trace: Option<PathBuf>,
    /// Whether rank 0 measures the time of its kernels.
    pub profile: bool,
    /// Compute threads per rank, if the launcher knows better than the affinity mask.
    pub threads: Option<usize>,
    /// The GPU of this rank, if ranks compute on GPUs.
    pub gpu: Option<RankGpu>,
    /// The devices of all ranks.
    pub devices: DeviceTable,
    /// The part of this process in an elastic job.
    pub elastic: Option<ElasticJob>,
}

impl TrainRequest {
    /// Creates a request for a run from step 0 on CPUs, called `name` unless its configuration has
    /// a name.
    pub fn new(config: Config, name: impl Into<String>) -> Self {
        let resume = Resume::No;
        let take = RestoreScope::Everything;
        Self {
            config,
            name: name.into(),
            resume,
            take,
            allow_changed_data: false,
            trace: None,
            profile: false,
            threads: None,
            gpu: None,
            devices: DeviceTable::default(),
            elastic: None,
        }
    }
}

/// Hooks, data and network supplied by the caller. Empty by default, as in `hpctrain train`.
#[derive(Default)]
pub struct Customization<'h> {
    /// Hooks, called in this order.
    pub hooks: Vec<&'h mut dyn Hook>,
    /// Samples to use instead of the files at `data.path`.
    pub data: Option<Splits>,
    /// A network to use instead of the section `[model]`, whose keys are ignored.
    pub network: Option<CustomModel>,
    /// A loss to use instead of the section `[loss]`, whose keys are ignored.
    pub loss: Option<CustomLoss>,
    /// Metrics that evaluations measure besides those of the loss.
    pub metrics: Vec<CustomMetric>,
}

impl Customization<'_> {
    /// Returns the configuration with the custom network and the custom loss, if there are any.
    pub fn with_custom_network(&self, config: &Config) -> Config {
        let mut config = config.clone();
        if let Some(network) = &self.network {
            config.model = Model::from_custom(network.clone());
        }
        if let Some(loss) = &self.loss {
            config.loss = Loss { own: Some(loss.clone()), ..Loss::default() };
        }
        config
    }
}

/// The GPU of a rank, for the checks of a run and its startup summary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankGpu {
    /// Bytes of its GPU that this rank may use.
    pub memory: usize,
    /// Whether NCCL's buffers count as a part of `memory`.
    pub includes_nccl: bool,
    /// Identifier of this rank's GPU among all GPUs of its node.
    pub id: String,
    /// The number of ranks that share the GPU.
    pub sharers: usize,
}

/// The devices of the ranks of a job, for the startup summary.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceTable {
    /// The device of each rank, one line each; none if all compute on CPUs.
    pub ranks: Vec<String>,
    /// Notes about them, one line each.
    pub notes: Vec<String>,
}

impl RankGpu {
    /// Returns the bytes for this rank's pool if NCCL has taken `taken` bytes.
    pub fn memory_without(&self, taken: usize) -> usize {
        if self.includes_nccl { self.memory.saturating_sub(taken) } else { self.memory }
    }
}

/// Trains. Collective over the world of `comm`. `announcement` sends the evaluators of the job, if
/// it has any, the run's directory; `backend` creates the device of a rank.
///
/// # Errors
/// Returns the error that ended the run. [`Error::is_shared`] is true if all ranks have the same.
pub fn train_on<B: Kernels>(
    comm: &Comm<B>,
    request: &TrainRequest,
    custom: Customization<'_>,
    announcement: Option<&RunAnnouncement>,
    backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
) -> Result<RunOutcome> {
    let request =
        &TrainRequest { config: custom.with_custom_network(&request.config), ..request.clone() };
    comm.activity().register_thread(Track::Compute);
    let trace = request.trace.as_deref().map(|path| Trace::start(comm, path)).transpose()?;
    let result = run(comm, request, custom, announcement, backend);
    match (trace, &result) {
        (Some(trace), Err(e)) if e.is_shared() || comm.size() == 1 => {
            let written = trace.finish(comm);
            result.and_then(|ending| written.map(|()| ending))
        }
        (Some(trace), Ok(_)) => trace.finish(comm).and(result),
        // Writing a trace is collective: ranks without a shared error might not all take part.
        _ => result,
    }
}

/// Makes a run from its preparation to its end.
fn run<B: Kernels>(
    comm: &Comm<B>,
    request: &TrainRequest,
    custom: Customization<'_>,
    announcement: Option<&RunAnnouncement>,
    backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
) -> Result<RunOutcome> {
    let mut run = Run::prepare(comm, request, custom, announcement, backend)?;
    let ended = run.steps(&request.resume).and_then(|()| run.finish());
    match &ended {
        Ok(ending) => {
            let notified = run.notify_hooks(Ok(ending));
            run.world.all_ok(notified).inspect_err(|e| run.mark_failed(e))?;
        }
        // The ranks that are left go on in this process. Before processes join, all publish the save
        // under way.
        Err(e) if e.kind() == Kind::Lost && run.elastic.is_some() => {
            if e.is_shared() {
                let ended = run.saver.finish();
                let published = run.tolerated(ended)?;
                run.note_published(published.flatten());
            }
            run.saver.abandon();
            run.in_memory.iter_mut().for_each(InMemory::abandon);
        }
        // Ranks that share an error can still publish the save that they have begun together.
        Err(e) if e.is_shared() || comm.size() == 1 => {
            // The run ends with its first error, which is often the cause of this one.
            let published = run.saver.finish().inspect_err(|e| log::warn!("{}", e.message()));
            run.note_published(published.ok().flatten());
            run.mark_failed(e);
            run.notify_hooks(Err(e)).unwrap_or_else(|e| log::error!("{e}"));
        }
        Err(_) => {}
    }
    ended
}

/// A run under way on one rank.
struct Run<'h, B: Kernels> {
    comm: Comm<B>,
    world: Group<B>,
    plan: ResolvedConfig,
    topology: Topology,
    engine: Engine<B>,
    feed: MicroBatches<B>,
    /// `None` if there is no validation data.
    evaluator: Option<Evaluator>,
    tokenizer: Option<Tokenizer>,
    train_samples: u64,
    trained_on: Option<TrainedOn>,
    progress: checkpoint::Progress,
    saver: Saver<B>,
    /// `None` if no in-memory checkpoints are taken.
    in_memory: Option<InMemory<B>>,
    /// In-memory checkpoints of earlier starts of a run that takes no more of them, until it has
    /// published a checkpoint.
    earlier_slots: Option<NodeSlots>,
    schedule: Schedule,
    /// The step of this round whose gradients go into histograms, if there is one.
    counted: Option<u64>,
    stop_requests: StopRequests,
    /// The part of this process in an elastic job.
    elastic: Option<ElasticJob>,
    /// The interval between checkpoints, on rank 0, if it follows from measurements.
    save_interval: Option<SaveInterval>,
    /// Pauses of training since the last record of a step.
    pauses: Pauses,
    outages: IoFailureTolerance,
    hooks: Hooks<'h>,
    meters: StepTimers,
    efficiency: Efficiency,
    energy: Energy<B>,
    hang_timeout: HangTimeout,
    /// Memory in use before training, for estimates.
    held: BaselineMemory,
    /// Set on rank 0 only.
    records: Option<Records>,
    _watch: Option<WatchdogGuard>,
    /// Dropped last, which releases the directory to the next trainer.
    directory: RunDirectory,
}

/// The state of a run between its steps.
#[derive(Default)]
struct Schedule {
    /// Step and loss of the last evaluation.
    evaluated: Option<(u64, f64)>,
    /// The metrics of the last evaluation, if this start has made it.
    measures: Option<Metrics>,
    /// Epochs that ended with the last round, each with its last step.
    epochs: Vec<(u64, Step)>,
    /// Step of the last checkpoint that was begun.
    saved: Option<u64>,
    /// Whether the run began at an in-memory checkpoint, of whose step there is no other.
    is_in_memory: bool,
    /// Whether a checkpoint is due by the clock after this step.
    save_is_due: bool,
    /// Whether processes join after this step.
    joins: bool,
    /// Set once training is to end.
    ending: Option<RunOutcome>,
}

impl<'h, B: Kernels> Run<'h, B> {
    /// Runs one round of optimizer steps and records them.
    fn run_round(&mut self) -> Result<()> {
        let start = Instant::now();
        let before = self.spent();
        let began = self.progress;
        self.counted = self.step_to_count();
        self.counted.iter().for_each(|step| self.engine.model.sharded.count_gradients_of(*step));
        let has_failed = self.hooks.has_failed() || self.directory.check_often().is_err();
        let save_is_due = self.save_is_due_after_round();
        let has_joiners = self.elastic.as_ref().is_some_and(ElasticJob::has_joiners);
        let mut flags = || {
            let flags = self.stop_requests.flags(self.saver.is_done())
                | ControlFlags::FAILED.when(has_failed)
                | ControlFlags::DUE.when(save_is_due)
                | ControlFlags::JOIN.when(has_joiners);
            flags.with_longest(self.hang_timeout.longest())
        };
        let observer =
            RunObserver { plan: &self.plan, flags: &mut flags, in_memory: self.in_memory.as_mut() };
        self.engine.model.backend.profile().record(self.meters.profiles());
        let advanced = train_round(
            &self.plan,
            &mut self.engine,
            || self.feed.next_micro(),
            &mut self.progress,
            observer,
        );
        let Round { steps, flags } = advanced.inspect_err(|e| self.mark_checkpoints_suspect(e))?;
        if let Some(in_memory) = &mut self.in_memory {
            let sharded = &mut self.engine.model.sharded;
            let is_skipped = steps.last().is_some_and(StepResult::skipped);
            in_memory.end_round(&self.plan, sharded, self.progress, &flags, is_skipped)?;
            if self.world.rank() == 0 {
                in_memory.update_note(&self.plan, &self.directory);
            }
        }
        self.engine.model.backend.profile().record(false);
        let mut gives_up = None;
        for (taken, step) in steps.iter().zip(began.step + 1..) {
            self.meters.record_step(taken);
            if taken.skipped() {
                let StepResult { loss, norm, skips, .. } = taken;
                let by = match self.plan.local_sgd {
                    None => String::new(),
                    Some(LocalSgd { replicas, .. }) => {
                        format!(" by {skips} of {replicas} replicas")
                    }
                };
                log::warn!("step {step}: loss {loss}, gradient norm {norm}: update skipped{by}");
            }
            let skipped = self.meters.skipped_in_a_row();
            if skipped >= self.plan.config.run.max_skipped {
                gives_up = gives_up.or(Some((step, skipped)));
            }
        }
        self.record(&steps, began, before)?;
        for (taken, step) in steps.iter().zip(began.step + 1..) {
            self.warn_of_stragglers(step, &taken.compute)?;
        }
        self.count_tensors()?;
        self.apply_control_flags(&flags)?;
        self.hang_timeout.note_of_others(flags.longest());
        self.hang_timeout.note(Phase::Steps, start.elapsed());
        if let Some((step, skipped)) = gives_up {
            // The cause may be in them, so the next start begins at a checkpoint in files.
            self.in_memory.iter_mut().for_each(InMemory::remove);
            let message = format!("step {step}: {skipped} steps in a row were not finite");
            return Err(Error::numeric(message)
                .hint(
                    "lower optimizer.lr, lengthen lr_schedule.warmup, or lower optimizer.grad_clip",
                )
                .shared());
        }
        Ok(())
    }

    /// Enters a part of the run, which may change the timeout of the watchdog.
    fn enter(&mut self, phase: Phase) -> Result<()> {
        let timeout = self.hang_timeout.enter(phase);
        // A single rank waits for no other.
        let Some(timeout) = timeout.filter(|_| self.world.size() > 1) else { return Ok(()) };
        log::info!(
            "step {}: a wait for another rank ends the job after {} s (comm.timeout = auto)",
            self.progress.step,
            timeout.as_secs()
        );
        self.comm.set_watchdog_timeout(timeout)
    }

    /// Marks the checkpoints made since replicas were last equal as suspect, after an SDC check has
    /// found a difference.
    fn mark_checkpoints_suspect(&mut self, found: &Error) {
        if let Some(good) = self.engine.model.sharded.suspect_since() {
            self.in_memory.iter_mut().for_each(InMemory::remove);
            let marked = self.saver.mark_suspect_after(good, found.message());
            marked.unwrap_or_else(|e| log::warn!("{e}"));
        }
    }

    /// Returns the time counters of this rank.
    fn spent(&self) -> TimeCounters {
        self.meters.counters(self.comm.stats(), self.feed.waited())
    }

    /// Returns what this rank has requested so far.
    fn requested(&self) -> Requested {
        let DeviceCounters { launches, host_waits } = self.engine.model.backend.device_counters();
        let Stats { messages, sent, host_waits: of_messages, .. } = self.comm.stats();
        [launches, host_waits + of_messages, messages, sent]
    }

    /// Records the steps of a round that began at `began`, each with an equal share of the time
    /// since `before`.
    fn record(
        &mut self,
        steps: &[StepResult],
        began: checkpoint::Progress,
        before: TimeCounters,
    ) -> Result<()> {
        let after = self.spent();
        let seconds = after.total - before.total;
        let times = Times::between(before, after);
        // A run ends only after a whole round, so a round counts as one step here.
        let time = Duration::from_secs_f64(seconds);
        self.stop_requests.note_step(time);
        if let Some(in_memory) = &mut self.in_memory {
            in_memory.note_round(&self.world, steps.len() as u64, time)?;
        }
        if let Some(interval) = &mut self.save_interval {
            interval.note_steps(steps.len() as u64, seconds);
        }
        let is_warm_up = !B::ON_HOST && self.should_continue();
        self.meters.record_round(
            steps.len(),
            seconds,
            times,
            is_warm_up,
            self.engine.model.backend.profile(),
        );
        self.meters.record_requests(self.requested());
        let last = began.step + steps.len() as u64;
        let joules = if self.plan.is_due(self.plan.config.log.every, last) {
            self.energy.joules()?
        } else {
            None
        };
        let count = steps.len() as f64;
        let seconds = seconds / count;
        let times = times / count;
        let tokens = self.plan.tokens_per_step();
        let epoch_length = EpochLength::new(&self.plan.config, self.train_samples);
        for (taken, step) in steps.iter().zip(began.step + 1..) {
            let position = began.position + (step - began.step) * self.plan.config.batch.global;
            let tokens_per_second = tokens as f64 / seconds;
            let record = Step {
                step,
                epoch: epoch_length.passed(step, position),
                tokens: position * self.plan.network.context() as u64,
                loss: taken.loss,
                lr: taken.lr,
                grad_norm: taken.norm,
                skipped: taken.skipped(),
                step_ms: seconds * 1e3,
                tokens_per_second,
                tflops_per_rank: Some(self.efficiency.tflops_per_rank(tokens_per_second)),
                mfu: self.efficiency.mfu(tokens_per_second),
                peak_bytes: self.engine.model.backend.memory_stats().total_peak(),
                hooks_ms: self.hooks.take_ms(),
                eval_ms: Some(std::mem::take(&mut self.pauses.eval_ms)).filter(|ms| *ms > 0.0),
                save_ms: Some(std::mem::take(&mut self.pauses.save_ms)).filter(|ms| *ms > 0.0),
                time: unix_time(),
                ..Step::default()
            };
            let mut record = record.with(times);
            if let Some(records) = &mut self.records {
                if let Some(joules) = joules.filter(|_| step == last) {
                    records.energy.add_to(&mut record, joules);
                }
                let written = records.record_step(&record);
                self.recorded(written)?;
            }
            if let Some(records) = &mut self.records {
                records.progress.step(&record, self.outages.ongoing_failure().as_deref());
            }
            let stop = self.hooks.call(|hook| hook.step(&record));
            self.stop_requests.stop_for(stop);
            let ended = epoch_length.ended(step, position, 1, self.plan.config.batch.global);
            self.schedule.epochs.extend(ended.map(|epoch| (epoch, record)));
        }
        Ok(())
    }

    /// Calls the hooks for the epochs that have ended since they were last called.
    fn notify_epoch_end(&mut self) {
        let evaluated = self.schedule.evaluated.map(|(step, _)| step);
        for (epoch, step) in std::mem::take(&mut self.schedule.epochs) {
            let measures = self.schedule.measures.as_ref().filter(|_| evaluated == Some(step.step));
            let stop = self.hooks.call(|hook| hook.epoch(epoch, &step, measures));
            self.stop_requests.stop_for(stop);
        }
    }

    /// Warns of stragglers, ranks that others wait for. `compute` is the seconds that each rank
    /// computed in step `step`.
    fn warn_of_stragglers(&mut self, step: u64, compute: &[f64]) -> Result<()> {
        let Some(records) = &mut self.records else { return Ok(()) };
        let (stragglers, written) = records.record_compute_times(step, compute);
        let counts = records.virtual_ranks();
        let per_virtual_rank =
            !stragglers.is_empty() && counts.iter().any(|count| *count != counts[0]);
        for Straggler { rank, times } in stragglers {
            log::warn!(
                "rank {rank} (host {}) computes {times:.1} times as long{} as the median rank{} over the last {} steps",
                self.topology.host(rank),
                if per_virtual_rank { " per virtual rank" } else { "" },
                if self.plan.mesh.pipeline > 1 { " of its stage" } else { "" },
                self.plan.config.log.straggler_window
            );
        }
        if written.is_err() { self.recorded(written) } else { Ok(()) }
    }

    /// Returns the step of the next round whose gradients go into histograms, if there is one.
    fn step_to_count(&self) -> Option<u64> {
        let every = self.plan.config.log.histograms;
        let step = self.progress.step;
        let due = if every > 0 { (step + 1).next_multiple_of(every) } else { u64::MAX };
        (due <= self.plan.round_end(step)).then_some(due)
    }

    /// Records histograms of gradients and weights if they are due in this round. Collective.
    fn count_tensors(&mut self) -> Result<()> {
        let Some(step) = self.counted.take() else { return Ok(()) };
        let sharded = &mut self.engine.model.sharded;
        let gradients = whole_histograms(&self.world, &sharded.counted_gradients())?;
        let weights = self.world.all_ok(sharded.counted_parameters())?;
        let weights = whole_histograms(&self.world, &weights)?;
        if let Some(board) = self.records.as_mut().and_then(|records| records.tensorboard.as_mut())
        {
            board.histograms(step, "gradients", &gradients);
            board.histograms(self.progress.step, "weights", &weights);
        }
        Ok(())
    }

    /// Takes the remaining steps, until training ends.
    fn steps(&mut self, resume: &Resume) -> Result<()> {
        self.begin(resume)?;
        while self.should_continue() {
            let start = Instant::now();
            let began = self.progress.step;
            fault::at(self.world.rank(), began + 1);
            self.run_round()?;
            self.evaluate_if_due()?;
            self.notify_epoch_end();
            // The round has recorded, and so reset, the pauses before it.
            let saving = self.pauses.save_ms * 1e-3;
            if let Some(interval) = &mut self.save_interval {
                let seconds = start.elapsed().as_secs_f64() - saving;
                interval.note_all(self.progress.step - began, seconds);
            }
            self.save_if_due()?;
            if let Some(job) = &self.elastic {
                job.note_step(self.progress.step);
            }
            if self.schedule.joins && self.should_continue() {
                return Err(Error::lost("processes join").shared());
            }
            self.enter(Phase::Steps)?;
        }
        Ok(())
    }

    /// Returns true on rank 0 if the measured interval makes a checkpoint due after the next round.
    fn save_is_due_after_round(&self) -> bool {
        let Some(interval) = &self.save_interval else { return false };
        let checkpoint::Progress { step, position, .. } = self.progress;
        let end = self.plan.round_end(step);
        let position = position + self.plan.config.batch.global * (end - step);
        let Eval { every, every_epochs, inline, .. } = self.plan.config.eval;
        let evaluates = inline
            && self.evaluator.is_some()
            && self.is_due_at(end, position, every, every_epochs);
        interval.is_due(end, evaluates)
    }

    /// Notes that a save, which may have ended, has blocked training since `start`.
    fn note_save_pause(&mut self, start: Instant) {
        let seconds = start.elapsed().as_secs_f64();
        self.pauses.save_ms += seconds * 1e3;
        let Some(interval) = &mut self.save_interval else { return };
        interval.note_pause(seconds);
        if !self.saver.is_busy()
            && let Some(chosen) = interval.save_ended()
        {
            log::info!(
                "step {}: checkpoint.every = auto: {}",
                self.progress.step,
                Described(chosen)
            );
        }
    }

    /// Checks requests before the first step, since a signal may have come already, and evaluates a
    /// resumed step whose evaluation is missing.
    fn begin(&mut self, resume: &Resume) -> Result<()> {
        let step = self.progress.step;
        let evaluated = self.world.all_ok(self.directory.checkpoints().evaluated())?;
        if let (Some(_), Err(e)) = (&self.records, evaluated.all()) {
            log::warn!("{}", e.to_string().replace('\n', "; "));
        }
        let evaluated = evaluated.known();
        let found = evaluations::validation_loss(evaluated, step);
        // An evaluation may have asked for early stopping, and the run may have been interrupted
        // before it did so.
        let counts =
            *resume == Resume::Auto && self.records.is_some() && step < self.plan.config.run.steps;
        self.stop_requests
            .stop_for(self.stop_reason(&evaluations::until(evaluated, step)).filter(|_| counts));
        let mine = (self.stop_requests.flags(false).bits(), found.map(f64::to_bits));
        let mine = serde_json::to_vec(&mine).map_err(|e| Error::internal(e.to_string()))?;
        let messages = self.world.gather_bytes(mine).wait()?;
        let states: Vec<(u32, Option<u64>)> = messages
            .iter()
            .map(|bytes| serde_json::from_slice(bytes))
            .collect::<Result<_, _>>()
            .map_err(|e| Error::comm(format!("another rank sent malformed flags: {e}")))?;
        // The file system may show ranks different files; rank 0 wrote them.
        self.schedule.evaluated = states[0].1.map(|bits| (step, f64::from_bits(bits)));
        let flags = states.iter().map(|(bits, _)| ControlFlags::from_bits_retain(*bits));
        self.apply_control_flags(&AllFlags(flags.collect()))?;
        if self.schedule.saved.is_none() && !self.schedule.is_in_memory {
            return self.save();
        }
        if *resume == Resume::Auto && step > 0 && self.schedule.evaluated.is_none() {
            self.evaluate_if_due()?;
        }
        // The job may have been killed before it could save this step.
        match (self.schedule.is_in_memory, &self.earlier_slots) {
            (true, Some(_)) => self.save(),
            (true, None) => self.save_if_due(),
            (false, _) => Ok(()),
        }
    }

    /// Returns true if there is another step to take.
    fn should_continue(&self) -> bool {
        self.schedule.ending.is_none() && self.progress.step < self.plan.config.run.steps
    }

    /// Acts on the flags of all ranks.
    fn apply_control_flags(&mut self, flags: &AllFlags) -> Result<()> {
        if flags.any(ControlFlags::FAILED) {
            let failure = self.hooks.failure().and_then(|()| self.directory.check());
            self.world.all_ok(failure)?;
        }
        if self.saver.is_busy() && flags.all(ControlFlags::WRITTEN) {
            let start = Instant::now();
            let ended = self.saver.advance();
            let published = self.tolerated(ended)?;
            self.note_published(published.flatten());
            self.note_save_pause(start);
            self.hang_timeout.note_writing(self.saver.is_busy());
        }
        self.schedule.save_is_due = flags.any(ControlFlags::DUE);
        self.schedule.joins = flags.any(ControlFlags::JOIN);
        self.schedule.ending = self.stop_requests.outcome(flags);
        if let Some(RunOutcome::Stopped(why)) = &mut self.schedule.ending {
            // Only ranks that asked to stop know the reason.
            let reasons = self.world.gather_bytes(std::mem::take(why).into_bytes()).wait()?;
            let first = reasons.into_iter().find(|why| !why.is_empty()).unwrap_or_default();
            *why = String::from_utf8_lossy(&first).into_owned();
        }
        Ok(())
    }

    /// Returns true if an action with these periods in steps and epochs is due now. A period of 0
    /// disables it.
    fn is_due(&self, steps: u64, epochs: u64) -> bool {
        let checkpoint::Progress { step, position, .. } = self.progress;
        self.is_due_at(step, position, steps, epochs)
    }

    /// Returns true if an action with these periods is due after step `step`, at position `position`
    /// of the data.
    fn is_due_at(&self, step: u64, position: u64, steps: u64, epochs: u64) -> bool {
        self.plan.is_due(steps, step)
            || self.plan.is_due_by_epochs(epochs, step, position, self.train_samples)
    }

    fn evaluate_if_due(&mut self) -> Result<()> {
        let Eval { every, every_epochs, .. } = self.plan.config.eval;
        let due = self.schedule.ending.is_none() && self.is_due(every, every_epochs);
        if due && self.plan.config.eval.inline { self.evaluate() } else { Ok(()) }
    }

    fn evaluate(&mut self) -> Result<()> {
        if self.evaluator.is_none() {
            return Ok(());
        }
        self.enter(Phase::Evaluation)?;
        let start = Instant::now();
        self.measure()?;
        self.pauses.eval_ms += start.elapsed().as_secs_f64() * 1e3;
        self.hang_timeout.note(Phase::Evaluation, start.elapsed());
        Ok(())
    }

    /// Measures the validation loss and records it.
    fn measure(&mut self) -> Result<()> {
        let Some(evaluator) = &mut self.evaluator else { return Ok(()) };
        let step = self.progress.step;
        let _span = span(ActivityKind::Evaluation, None);
        fault::point("evaluation");
        self.engine.model.sharded.swap_ema()?;
        if let Some(counts) = &self.plan.virtual_rank_counts {
            evaluator.deal_by(counts.to_vec());
        }
        let measured = evaluator
            .measure(&mut self.engine.model, &self.world, || self.stop_requests.must_end())?;
        self.engine.model.sharded.swap_ema()?;
        let Some(measures) = measured else {
            // It is made when the run is resumed.
            self.schedule.ending = Some(self.stop_requests.preempted());
            return Ok(());
        };
        let summary = measures.to_string();
        self.schedule.evaluated = Some((step, measures.loss));
        let stop = self.hooks.call(|hook| hook.evaluation(step, &measures));
        self.stop_requests.stop_for(stop);
        log::info!("step {step}: {summary}");
        let held = self.outages.lease_checked(self.directory.check());
        self.world.all_ok(held)?;
        let mut why = None;
        if let Some(records) = &mut self.records {
            let path = self.directory.evaluations_path();
            let found = measures.evaluation(step);
            let written =
                records.record_evaluation(found.with_data(evaluator.digest(), evaluator.samples()));
            records.progress.say(&format!("step {step:>6}  {summary}"));
            self.recorded(written)?;
            match evaluations::read(&path) {
                Ok(all) => {
                    let best = self.directory.checkpoints().point_to_best(&all);
                    best.unwrap_or_else(|e| {
                        log::warn!("cannot update the link to the best checkpoint: {e}")
                    });
                    why = self.stop_reason(&evaluations::until(all.known(), step));
                }
                Err(e) => log::warn!("{e}"),
            }
        }
        self.schedule.measures = Some(measures);
        if self.plan.config.eval.patience > 0 && self.should_continue() {
            // All ranks learn of it at once: the evaluation just made is the last one.
            let reasons = self.world.gather_bytes(why.unwrap_or_default().into_bytes()).wait()?;
            let why = reasons.into_iter().find(|why| !why.is_empty());
            self.schedule.ending =
                why.map(|why| RunOutcome::Stopped(String::from_utf8_lossy(&why).into_owned()));
        }
        Ok(())
    }

    /// Returns the reason for early stopping that these evaluations give, if there is one.
    fn stop_reason(&self, all: &[Evaluation]) -> Option<String> {
        let config = &self.plan.config.eval;
        evaluations::stop_reason(all, config.patience, config.min_delta)
    }

    fn save_if_due(&mut self) -> Result<()> {
        let Checkpoint { every, every_epochs, keep_every, .. } = self.plan.config.checkpoint;
        // With auto, the steps whose checkpoints are kept are saved, too.
        let due = self.is_due(every.number().unwrap_or(keep_every), every_epochs)
            || std::mem::take(&mut self.schedule.save_is_due);
        // The end of training saves anyway.
        if due && self.schedule.ending.is_none() { self.save() } else { Ok(()) }
    }

    fn save(&mut self) -> Result<()> {
        let phase = if self.saver.is_busy() { Phase::BusySave } else { Phase::Save };
        self.enter(phase)?;
        let start = Instant::now();
        let begun = self.begin_save()?;
        self.note_save_pause(start);
        if begun {
            self.hang_timeout.note(phase, start.elapsed());
        }
        self.hang_timeout.note_writing(self.saver.is_busy());
        Ok(())
    }

    /// Begins a save, or makes it if saves are synchronous. Returns false if the one before is still
    /// written and this one is skipped, or if it failed and is made again later.
    fn begin_save(&mut self) -> Result<bool> {
        let _span = span(ActivityKind::Checkpoint, None);
        let recorded =
            self.record_epoch_loss().and_then(|()| self.engine.model.sharded.check_unchanged());
        self.world.all_ok(recorded)?;
        let saved = self.saver.save(&mut self.engine.model.sharded, self.progress);
        let Some((begun, published)) = self.tolerated(saved)? else { return Ok(false) };
        self.note_published(published);
        if begun {
            self.schedule.saved = Some(self.progress.step);
            self.stop_requests.save_begun();
            if let Some(interval) = &mut self.save_interval {
                interval.save_begun(self.progress.step);
            }
        }
        Ok(begun)
    }

    /// Records the mean training loss by which the checkpoint of this step is compared with others,
    /// if there is no validation data.
    fn record_epoch_loss(&mut self) -> Result<()> {
        let step = self.progress.step;
        let Some(Records { epoch_loss: Some(epoch), .. }) = &self.records else { return Ok(()) };
        let mean = epoch.mean();
        self.outages.lease_checked(self.directory.check())?;
        let evaluated = match evaluations::read(&self.directory.evaluations_path()) {
            Ok(evaluated) => evaluated,
            Err(e) => {
                self.recorded(Err(e))?;
                Evaluations::default()
            }
        };
        let is_known = evaluated
            .known()
            .iter()
            .any(|one| one.step == step && one.split == LossSplit::Training);
        if is_known {
            return Ok(());
        }
        let Some(records) = &mut self.records else { return Ok(()) };
        let written = records.record_evaluation(Evaluation::training_epoch(step, mean));
        self.recorded(written)
    }

    /// Tolerates for a while that a record cannot be written. On rank 0.
    fn recorded(&mut self, written: Result<()>) -> Result<()> {
        let is_mine = written.is_err() && self.directory.check().is_ok();
        if let Some(records) = self.records.as_mut().filter(|_| is_mine) {
            // A failure is reported with the next write.
            let _ = records.reopen();
        }
        self.outages.record(written)
    }

    /// Tolerates for a while that a checkpoint cannot be written: returns `None` and schedules a
    /// retry. Collective if there is an error, which is the same on all ranks.
    fn tolerated<T>(&mut self, saved: Result<T>) -> Result<Option<T>> {
        match saved {
            Err(e) if is_outage(&e) && (e.is_shared() || self.world.size() == 1) => {
                let verdict =
                    if self.records.is_some() { self.outages.save_refused(e) } else { Ok(()) };
                self.world.all_ok(verdict)?;
                self.schedule.saved = None;
                self.stop_requests.save_failed(self.outages.pause());
                self.save_interval.iter_mut().for_each(SaveInterval::save_failed);
                Ok(None)
            }
            saved => saved.map(Some),
        }
    }

    fn note_published(&mut self, published: Option<Published>) {
        if let Some(Published { took, progress }) = published {
            self.stop_requests.note_published(took);
            self.hang_timeout.note_published();
            self.save_interval.iter_mut().for_each(|interval| interval.note_published(took));
            self.outages.published();
            if let Some(here) = self.earlier_slots.take() {
                in_memory::remove(&self.world, &self.directory, &here, true);
            }
            let path = self.directory.checkpoints().path(progress.step);
            let stop = self.hooks.call(|hook| hook.checkpoint(progress.step, &path));
            self.stop_requests.stop_for(stop);
        }
    }
}
