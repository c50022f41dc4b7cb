//! The evaluator of a running training: waits for checkpoints, evaluates each once, and records the
//! results.
//!
//! Trainer and evaluator communicate only through the run's directory, so they may belong to one
//! job or to two. Rank 0 of the evaluator decides; all of its ranks evaluate.
//!
//! They may also be ranks of one program: an all-gather of roles (`cli/rank_roles.rs`) splits the
//! world, and each role uses its own sub-world (`Comm::role`). Each decision reaches all ranks of
//! the evaluator in one gather, which also carries signals. A checkpoint is claimed with a lease,
//! measured by the trainer's own code ([`Evaluator::measure`]), recorded by a line in `eval.jsonl`,
//! and only then is the lease released: lease and line together make each evaluation happen once. A
//! killed evaluator leaves a stale lease and no line, and the next one repeats that checkpoint.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::queue::{
    ATTEMPTS, CheckpointWatch, Claim, NextCheckpoint, POLL_INTERVAL, Policy, Queue, RETRY_DELAY,
    await_run,
};
use super::{Evaluator, Metrics, model, validation_set_check};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::signals;
use hpctrain_base::spans::Track;
use hpctrain_checkpoint::run_dir::markers::{Markers, RunStatus};
use hpctrain_checkpoint::run_dir::{RunDirectory, RunOutcome};
use hpctrain_checkpoint::{Checkpoints, Manifest, Reader, name_of};
use hpctrain_comm::{Comm, Group};
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::evaluations::{Evaluation, EvaluationStatus};
use hpctrain_config::telemetry::{logging, say, tensorboard, unix_time};
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, Loss as LossSection, Model as ModelSection, ResolvedConfig};
use hpctrain_data::{Fingerprint, Mix, Preprocessing, Source, Tokenizer};
use hpctrain_device::Kernels;
use hpctrain_engine::{Model, Splits, check_source, micro_batches};
use hpctrain_nn::CustomModel;
use hpctrain_nn::loss::{CustomLoss, CustomMetric};

/// The default time without a trainer after which an evaluator gives up: longer than a job waits in
/// a queue or backs off before it is restarted.
pub const TRAINER_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Request to an evaluator.
#[derive(Debug, Clone)]
pub struct SidecarOptions {
    /// The directory of the run.
    pub run: PathBuf,
    /// Whether to wait for further checkpoints until the run ends.
    pub watch: bool,
    /// Selection of checkpoints.
    pub policy: Policy,
    /// How long to wait while no trainer holds the run before giving up. `None` if the trainer
    /// belongs to the same job.
    pub timeout: Option<Duration>,
    /// Settings that override those of the run, such as `eval.samples=100`.
    pub overrides: Vec<String>,
    /// Compute threads per rank; 0 distributes the cores of a node over its ranks.
    pub threads: usize,
    /// Whether the trainer belongs to the same job; then they end together.
    pub in_trainer_job: bool,
    /// How long to wait for the directory of the run, whether or not the directory above it exists.
    /// `None`: half a minute if that one exists, since the path may be misspelled.
    pub start_timeout: Option<Duration>,
}

impl SidecarOptions {
    /// Creates the options of an evaluator that evaluates the newest checkpoints of the run in a
    /// directory until it ends, in a job of its own.
    pub fn new(run: impl Into<PathBuf>) -> Self {
        Self {
            run: run.into(),
            watch: true,
            policy: Policy::Latest,
            timeout: Some(TRAINER_TIMEOUT),
            overrides: vec![],
            threads: 0,
            in_trainer_job: false,
            start_timeout: None,
        }
    }
}

/// A decision of rank 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Decision {
    /// There is nothing to do yet.
    Wait,
    /// Evaluate a checkpoint: its step, the id of its save, and the number of earlier failed
    /// attempts.
    Evaluate(u64, String, usize),
    /// End, for this reason: no more checkpoints will come, or none are waited for.
    End(String),
    /// Fail, for this reason: more checkpoints are expected, but there is no trainer.
    GiveUp(String),
}

/// The message of a rank to the others before each decision is carried out.
#[derive(Serialize, Deserialize)]
struct RankMessage {
    interrupted: bool,
    /// Set by rank 0 only.
    decision: Option<Decision>,
}

/// Is called after each evaluation that this process has made, on all ranks, with its step. A reason
/// to stop is passed to the trainer.
pub type Evaluated<'a> = dyn FnMut(u64, &Metrics) -> Result<Option<String>> + 'a;

/// Data and network of a custom evaluator. Empty by default: both are those of the checkpoint.
#[derive(Default)]
pub struct CustomEvaluation<'a> {
    /// The samples that the trainer was given, of which those for validation are evaluated.
    pub data: Option<Splits>,
    /// The network that the trainer was given.
    pub network: Option<CustomModel>,
    /// The loss that the trainer was given.
    pub loss: Option<CustomLoss>,
    /// Metrics to measure besides those of the loss.
    pub metrics: Vec<CustomMetric>,
    /// Is called after each evaluation.
    pub evaluated: Option<Box<Evaluated<'a>>>,
}

/// Evaluates the checkpoints of a run. Collective over the world of `comm`. `backend` creates the
/// device.
///
/// # Errors
/// Returns an error if there is no such run, the validation data cannot be read or is not that of
/// the run, `custom` has another network, no trainer has held the run for the timeout, or a message
/// between ranks fails. A checkpoint that cannot be evaluated is recorded as failed, and the next
/// one is evaluated.
pub fn watch<B: Kernels>(
    comm: &Comm<B>,
    request: &SidecarOptions,
    custom: CustomEvaluation<'_>,
    backend: impl FnOnce(&ResolvedConfig) -> Result<B> + 'static,
) -> Result<RunOutcome> {
    comm.activity().register_thread(Track::Compute);
    let world = comm.world();
    let root = world.rank() == 0;
    let SidecarOptions { run, start_timeout, .. } = request;
    world.all_ok(await_run(run, request.watch, *start_timeout, Some("evaluator")))?;
    let directory = RunDirectory::at(&request.run);
    let logs = directory.logs_path();
    // A copy of a run's checkpoints may have none.
    world.all_ok(std::fs::create_dir_all(&logs).map_err(|e| Error::io("create", &logs, e)))?;
    if !request.in_trainer_job {
        comm.watch_in_own_directory(&[logs.clone(), std::env::temp_dir()])?;
    }
    let log = logs.join(format!("evaluator-{:05}.log", world.rank()));
    world.all_ok(logging::to_file(&log, log::LevelFilter::Info))?;
    let threads = match request.threads {
        0 => Topology::gather(&world, comm.node().host)?.threads(),
        threads => threads,
    };
    let CustomEvaluation { data, network, loss, metrics, evaluated } = custom;
    let data = world.all_ok(data.map(CustomData::new).transpose())?;
    let mut sidecar = Sidecar {
        comm,
        request,
        checkpoints: directory.checkpoints(),
        marks: directory.markers(),
        evaluations: directory.evaluations_path(),
        events: directory.evaluator_tensorboard_path(),
        backend: Device::Unmade(Box::new(backend)),
        loaded: None,
        claim: None,
        threads,
        data,
        network,
        loss,
        metrics,
        evaluated,
    };
    let watched = match request.policy {
        Policy::Every if root => sidecar.checkpoints.leases().watch_queue(),
        _ => Ok(None),
    };
    let _queue = world.all_ok(watched)?;
    let mut waiting = root.then(|| {
        let queue = Queue::recorded(sidecar.checkpoints.clone(), request.policy);
        let watch = CheckpointWatch::new(run, queue, request.timeout).with_notes("evaluator");
        if request.watch { watch } else { watch.without_waiting() }
    });
    loop {
        let next = waiting.as_mut().map(CheckpointWatch::next).transpose();
        let decision = next.and_then(|next| next.map(|next| sidecar.decide(next)).transpose());
        let mine = RankMessage {
            interrupted: sidecar.is_interrupted(),
            decision: world.all_ok(decision)?,
        };
        let (interrupted, decision) = exchange(&world, &mine)?;
        if interrupted {
            // The lease expires with this process, and the next evaluator starts over.
            return Ok(preempted());
        }
        match decision {
            Decision::Wait => std::thread::sleep(POLL_INTERVAL),
            Decision::End(why) => {
                if root {
                    // An evaluator that was killed may not have added its last one.
                    sidecar.write_events();
                    say(format_args!("evaluator: {why}"));
                }
                return Ok(RunOutcome::Finished);
            }
            Decision::GiveUp(why) => {
                return Err(Error::comm(why)
                    .hint("start the trainer again with --resume auto, or give the evaluator more time with --timeout")
                    .shared());
            }
            Decision::Evaluate(step, id, retries) => {
                if let Some(ending) = sidecar.evaluate(step, &id, retries)? {
                    return Ok(ending);
                }
                if let Some(waiting) = &mut waiting {
                    waiting.is_done();
                }
            }
        }
    }
}

/// Returns the outcome of an evaluator that was asked to end, or whose trainer was.
fn preempted() -> RunOutcome {
    RunOutcome::Preempted(
        signals::last_signal()
            .map_or("the job was asked to end".into(), |signal| format!("{signal} came")),
    )
}

/// Exchanges the messages of all ranks. Returns whether any was interrupted, and the decision of
/// rank 0.
fn exchange<B: Kernels>(world: &Group<B>, mine: &RankMessage) -> Result<(bool, Decision)> {
    let message = serde_json::to_vec(mine).map_err(|e| Error::internal(e.to_string()))?;
    let mut interrupted = false;
    let mut decision = None;
    for bytes in world.gather_bytes(message).wait()? {
        let message: RankMessage = serde_json::from_slice(&bytes)
            .map_err(|e| Error::comm(format!("an evaluator rank sent a malformed message: {e}")))?;
        interrupted |= message.interrupted;
        decision = decision.or(message.decision);
    }
    Ok((interrupted, decision.ok_or_else(|| Error::internal("rank 0 sent no decision"))?))
}

/// A model in memory and the data it is evaluated on.
struct Loaded<B: Kernels> {
    plan: ResolvedConfig,
    /// The tokenizer and preprocessing of the checkpoint.
    data_state: (Option<Tokenizer>, Option<Preprocessing>),
    model: Model<B>,
    evaluator: Evaluator,
}

/// Creates the device of a plan.
type Make<B> = Box<dyn FnOnce(&ResolvedConfig) -> Result<B>>;

/// The device of a rank, created when the first plan is known.
enum Device<B: Kernels> {
    Unmade(Make<B>),
    Made(Result<B>),
}

/// Custom samples.
struct CustomData {
    /// Replaces `data.path` in messages.
    name: String,
    /// The fingerprint of the training samples.
    fingerprint: Option<Fingerprint>,
    /// The validation samples, while no evaluator has them.
    validation: Option<Box<dyn Source>>,
    /// Whether these check themselves as they are read.
    is_checked: bool,
}

impl CustomData {
    fn new(data: Splits) -> Result<Self> {
        let fingerprint = data.train.fingerprint();
        let Splits { name, validation, .. } = data;
        if validation.is_none() {
            return Err(Error::input(format!("{name} has no validation samples to evaluate"))
                .hint("set validation of the Splits"));
        }
        Ok(Self { name, fingerprint, validation, is_checked: false })
    }
}

impl<B: Kernels> Device<B> {
    fn get(&mut self, plan: &ResolvedConfig) -> Result<B> {
        let unused = Device::Made(Err(Error::internal("no device")));
        let made = match std::mem::replace(self, unused) {
            Device::Unmade(make) => make(plan),
            Device::Made(made) => made,
        };
        *self = Device::Made(made.clone());
        made
    }
}

/// An evaluator on one rank.
struct Sidecar<'a, B: Kernels> {
    comm: &'a Comm<B>,
    request: &'a SidecarOptions,
    checkpoints: Checkpoints,
    marks: Markers,
    /// `eval.jsonl`.
    evaluations: PathBuf,
    /// The directory of the evaluators' events for TensorBoard.
    events: PathBuf,
    backend: Device<B>,
    /// The model in memory, at most one.
    loaded: Option<Loaded<B>>,
    /// The checkpoint under evaluation, on rank 0.
    claim: Option<Claim>,
    /// Compute threads of this rank.
    threads: usize,
    /// Samples to use instead of the files at `data.path`.
    data: Option<CustomData>,
    /// A network to use instead of that of the checkpoint's configuration.
    network: Option<CustomModel>,
    /// A loss to use instead of that of the checkpoint's configuration.
    loss: Option<CustomLoss>,
    /// Metrics to measure besides those of the loss.
    metrics: Vec<CustomMetric>,
    evaluated: Option<Box<Evaluated<'a>>>,
}

impl<B: Kernels> Sidecar<'_, B> {
    /// Decides the next action, and keeps the checkpoint to evaluate. On rank 0.
    fn decide(&mut self, next: NextCheckpoint) -> Result<Decision> {
        Ok(match next {
            NextCheckpoint::Claimed(claim) => {
                let evaluated = evaluations::read(&self.evaluations)?;
                let retries = evaluations::retries(evaluated.known(), &claim.id);
                let decision = Decision::Evaluate(claim.step, claim.id.clone(), retries);
                self.claim = Some(claim);
                decision
            }
            NextCheckpoint::Wait => Decision::Wait,
            NextCheckpoint::End(why) => Decision::End(why),
            NextCheckpoint::GiveUp(why) => Decision::GiveUp(why),
        })
    }

    /// Evaluates one checkpoint and records the result. Returns the outcome if any rank is asked to
    /// end.
    fn evaluate(&mut self, step: u64, id: &str, retries: usize) -> Result<Option<RunOutcome>> {
        let begun = Instant::now();
        let outcome = match self.measure(step, id)? {
            Ok(None) => return Ok(Some(preempted())),
            Ok(Some(measures)) => Ok(measures),
            Err(e) => Err(e),
        };
        let failed = outcome.is_err();
        let measures = outcome.as_ref().ok().cloned();
        let recorded = match self.claim.take() {
            Some(claim) => self.record(step, id, retries, outcome, begun).map(|()| claim.release()),
            None => Ok(()),
        };
        self.comm.world().all_ok(recorded)?;
        if let Some(measures) = measures {
            self.notify(step, &measures)?;
        }
        if failed {
            std::thread::sleep(RETRY_DELAY);
        }
        Ok(None)
    }

    /// Reports an evaluation to the program, and passes a reason to stop to the trainer.
    fn notify(&mut self, step: u64, measures: &Metrics) -> Result<()> {
        let Some(evaluated) = &mut self.evaluated else { return Ok(()) };
        let world = self.comm.world();
        let mine = world.all_ok(evaluated(step, measures))?;
        let reasons = world.gather_bytes(mine.unwrap_or_default().into_bytes()).wait()?;
        let why = reasons.iter().find(|why| !why.is_empty()).filter(|_| world.rank() == 0);
        let asked = why.map(|why| self.marks.ask_to_stop(&String::from_utf8_lossy(why)));
        world.all_ok(asked.unwrap_or(Ok(())))
    }

    /// Returns true if this rank was asked to end, or, on rank 0 of a job with a trainer, the
    /// trainer was, since they end together.
    fn is_interrupted(&self) -> bool {
        signals::last_signal().is_some()
            || self.request.in_trainer_job
                && self.comm.rank() == 0
                && self.marks.ended().is_some_and(|end| end.status == RunStatus::Preempted)
    }

    /// Returns the metrics of a checkpoint or its error, or `None` if a rank was interrupted.
    ///
    /// # Errors
    /// Returns an error if the settings, the data or the job fail rather than the checkpoint.
    fn measure(&mut self, step: u64, id: &str) -> Result<Result<Option<Metrics>>> {
        let world = self.comm.world();
        let opened = Reader::open_collective(&world, &self.checkpoints.path(step), || {
            self.checkpoints.open(step).and_then(|reader| is_save(reader, id))
        });
        let mut reader = match opened {
            Ok(reader) => reader,
            Err(e) => return Ok(Err(e)),
        };
        let config = world.all_ok(self.config(reader.manifest()))?;
        self.comm.set_watchdog_timeout(config.comm.unmeasured_timeout())?;
        self.prepare(config, reader.manifest())?;
        let Some(mut loaded) = self.loaded.take() else {
            return Err(Error::internal("no model was loaded"));
        };
        if let Err(e) = model::load(&world, &mut loaded.model, &mut reader) {
            self.unload(loaded);
            return Ok(Err(e));
        }
        let measured =
            loaded.evaluator.measure(&mut loaded.model, &world, || self.is_interrupted())?;
        self.loaded = Some(loaded);
        Ok(Ok(measured))
    }

    /// Returns the configuration of an evaluation, and checks that it uses the network and the
    /// validation set of the run.
    fn config(&self, manifest: &Manifest) -> Result<Config> {
        let mut config = model::config(&manifest.config, &self.request.overrides)?;
        if let Some(network) = &self.network {
            let of_run = config.model.own.as_ref().map(CustomModel::name);
            check_same("network", network.name(), of_run)?;
            config.model = ModelSection::from_custom(network.clone());
        }
        if let Some(loss) = &self.loss {
            check_same("loss", loss.name(), config.loss.own.as_ref().map(CustomLoss::name))?;
            config.loss = LossSection { own: Some(loss.clone()), ..LossSection::default() };
        }
        match &self.data {
            None => validation_set_check::check(manifest, &config)?,
            Some(data) => validation_set_check::check_custom(
                manifest,
                &config,
                &data.name,
                data.fingerprint.as_ref(),
            )?,
        }
        Ok(config)
    }

    /// Opens the validation data of a configuration, or takes the custom validation data.
    fn validation(&mut self, plan: &ResolvedConfig) -> Result<Box<dyn Source>> {
        let world = self.comm.world();
        let Some(custom) = &mut self.data else {
            let validation = micro_batches::open_together(&world, |shard_index| {
                micro_batches::validation(shard_index, &plan.config)
            })?;
            return Ok(Box::new(validation));
        };
        let source = custom
            .validation
            .take()
            .ok_or_else(|| Error::internal("the custom samples are in use"))?;
        if std::mem::replace(&mut custom.is_checked, true) {
            return Ok(source);
        }
        world.all_ok(check_source(source, plan, &custom.name))
    }

    /// Frees what is loaded; keeps the custom validation data.
    fn unload(&mut self, loaded: Loaded<B>) {
        if let Some(custom) = &mut self.data {
            custom.validation = loaded.evaluator.into_source();
        }
    }

    /// Creates the model of a configuration and opens the data with the checkpoint's preprocessing,
    /// unless both are loaded.
    fn prepare(&mut self, config: Config, manifest: &Manifest) -> Result<()> {
        let world = self.comm.world();
        let mut plan =
            world.all_ok(model::plan(config, world.size(), self.threads, !B::ON_HOST))?;
        world.all_ok(plan.set_metrics(self.metrics.clone()))?;
        let data_state = (manifest.tokenizer.clone(), manifest.preprocessing.clone());
        if self
            .loaded
            .as_ref()
            .is_some_and(|loaded| loaded.plan == plan && loaded.data_state == data_state)
        {
            return Ok(());
        }
        // The previous model is freed first: memory may suffice for one only.
        if let Some(loaded) = self.loaded.take() {
            self.unload(loaded);
        }
        let mut validation = self.validation(&plan)?;
        let notes = world.all_ok(manifest.conform(&mut validation))?;
        if world.rank() == 0 {
            notes.iter().for_each(|note| log::warn!("data: {note}"));
        }
        let evaluator =
            Evaluator::new(validation, plan.config.eval.samples, plan.config.eval.batch);
        let evaluator = evaluator.with_set_names(Mix::names(&plan.config.data.mix));
        let backend = world.all_ok(self.backend.get(&plan))?;
        backend.trim();
        let model = model::build(self.comm, &plan, backend)?;
        self.loaded = Some(Loaded { plan, data_state, model, evaluator });
        Ok(())
    }

    /// Records the outcome of an evaluation. On rank 0.
    fn record(
        &self,
        step: u64,
        id: &str,
        retries: usize,
        outcome: Result<Metrics>,
        begun: Instant,
    ) -> Result<()> {
        if evaluations::is_settled(evaluations::read(&self.evaluations)?.known(), id) {
            // This process was suspended for so long that another took its claim.
            log::warn!("step {step}: evaluated by another evaluator meanwhile");
            return Ok(());
        }
        let record = Evaluation {
            checkpoint: Some(name_of(step)),
            id: Some(id.into()),
            ..outcome.as_ref().map_or_else(
                |_| Evaluation { step, time: unix_time(), ..Evaluation::default() },
                |found| match &self.loaded {
                    Some(Loaded { evaluator, .. }) => {
                        found.evaluation(step).with_data(evaluator.digest(), evaluator.samples())
                    }
                    None => found.evaluation(step),
                },
            )
        };
        match outcome {
            Ok(measures) => {
                if !self.add(&record)? {
                    return Ok(());
                }
                self.write_events();
                let seconds = begun.elapsed().as_secs_f64();
                say(format_args!("evaluator: step {step:>6}  {measures}  ({seconds:.1} s)"));
                let all = evaluations::read(&self.evaluations)?;
                // An unreadable record of earlier evaluations does not end this one.
                let best = self.checkpoints.point_to_best(&all);
                best.unwrap_or_else(|e| {
                    log::warn!("cannot update the link to the best checkpoint: {e}")
                });
                let eval = self.loaded.as_ref().map(|loaded| &loaded.plan.config.eval);
                // The trainer decides itself about checkpoints that it has skipped.
                let last = self.checkpoints.last_step()?.unwrap_or(step);
                let all = evaluations::until(all.known(), last);
                let why = eval
                    .and_then(|eval| evaluations::stop_reason(&all, eval.patience, eval.min_delta));
                why.map_or(Ok(()), |why| self.marks.ask_to_stop(&why))
            }
            // The checkpoint may be intact: another evaluator, or this one later, can evaluate it.
            Err(e) if e.kind() == Kind::Io && retries + 1 >= ATTEMPTS => Err(e),
            Err(e) => {
                let status = if retries + 1 < ATTEMPTS {
                    EvaluationStatus::Retried
                } else {
                    EvaluationStatus::Failed
                };
                log::warn!("step {step}: cannot be evaluated ({status:?}): {e}");
                let error = Some(e.to_string().replace('\n', "; "));
                self.add(&Evaluation { status, error, ..record }).map(drop)
            }
        }
    }

    /// Adds the evaluations of `eval.jsonl` that TensorBoard's events lack to them, if the run has
    /// such events. A failure does not end the evaluator. On rank 0.
    fn write_events(&self) {
        let with_overrides = |config: &Config| model::config(config, &self.request.overrides).ok();
        let of_latest = || {
            let step = self.checkpoints.latest_step().ok()??;
            with_overrides(&Manifest::read(&self.checkpoints.path(step)).ok()?.config)
        };
        let is_on = match &self.loaded {
            Some(loaded) => loaded.plan.config.log.tensorboard,
            None => of_latest().is_some_and(|config| config.log.tensorboard),
        };
        if !is_on {
            return;
        }
        let written = evaluations::read(&self.evaluations)
            .and_then(|all| tensorboard::write_evaluations(&self.events, all.known()));
        written.unwrap_or_else(|e| log::warn!("{}", e.message()));
    }

    /// Adds a line to `eval.jsonl`, unless the run was rewound to before the save, or has replaced
    /// it. Returns true if the line was added.
    fn add(&self, evaluation: &Evaluation) -> Result<bool> {
        let checkpoints = &self.checkpoints;
        let step = evaluation.step;
        let current_saves =
            || Ok((checkpoints.save(step), checkpoints.last_step()?.unwrap_or(step)));
        let added =
            evaluations::append_for_checkpoint(&self.evaluations, evaluation, current_saves)?;
        if !added {
            log::warn!("step {step}: evaluated, but not recorded: the run no longer has this save");
        }
        Ok(added)
    }
}

/// Checks that the custom part `what` of this program is that of the run.
fn check_same(what: &str, own: &str, of_run: Option<&str>) -> Result<()> {
    if Some(own) == of_run {
        return Ok(());
    }
    let of_run = of_run.map_or("not a custom one".into(), |name| format!("{name:?}"));
    Err(Error::input(format!(
        "the custom {what} of this program is {own:?}, that of the run is {of_run}"
    ))
    .hint(format!("evaluate with the {what} that the run was started with")))
}

/// Checks that a checkpoint is the save that was claimed, not one that has replaced it.
fn is_save(reader: Reader, id: &str) -> Result<Reader> {
    let found = &reader.manifest().id;
    if found != id {
        return Err(Error::input(format!(
            "{} was replaced by another save, {found}",
            reader.dir().display()
        )));
    }
    Ok(reader)
}
