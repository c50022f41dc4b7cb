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

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::queue::{Claim, Policy, Queue};
use super::{Evaluator, Metrics, model, validation_set_check};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::signals;
use hpctrain_base::spans::Track;
use hpctrain_checkpoint::run_dir::markers;
use hpctrain_checkpoint::run_dir::markers::{End, Markers};
use hpctrain_checkpoint::run_dir::{RunDirectory, RunOutcome};
use hpctrain_checkpoint::{Checkpoints, Manifest, Reader, name_of};
use hpctrain_comm::{Comm, Group};
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::evaluations::{Evaluation, EvaluationStatus};
use hpctrain_config::telemetry::{logging, say, unix_time};
use hpctrain_config::{Config, ResolvedConfig};
use hpctrain_data::{Mix, Preprocessing, Tokenizer};
use hpctrain_device::Kernels;
use hpctrain_engine::{Model, micro_batches};

/// Time between two reads of the run's directory.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Maximum time between two checks of the trainer's lease.
const LEASE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// How long an evaluator waits for its trainer to create the run.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Number of attempts to evaluate a checkpoint that cannot be read.
const ATTEMPTS: usize = 3;
/// Pause between attempts.
const RETRY_DELAY: Duration = Duration::from_secs(1);

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
    /// Compute threads per rank.
    pub threads: usize,
    /// Whether the trainer belongs to the same job; then they end together.
    pub in_trainer_job: bool,
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

/// Evaluates the checkpoints of a run. Collective over the world of `comm`. `backend` creates the
/// device.
///
/// # Errors
/// Returns an error if there is no such run, the validation data cannot be read, no trainer has
/// held the run for the timeout, or a message between ranks fails. A checkpoint that cannot be
/// evaluated is recorded as failed, and the next one is evaluated.
pub fn watch<B: Kernels>(
    comm: &Comm<B>,
    request: &SidecarOptions,
    backend: impl FnOnce(&ResolvedConfig) -> Result<B> + 'static,
) -> Result<RunOutcome> {
    comm.activity().register_thread(Track::Compute);
    let world = comm.world();
    let root = world.rank() == 0;
    world.all_ok(await_run(request))?;
    let directory = RunDirectory::at(&request.run);
    let logs = directory.logs_path();
    // A copy of a run's checkpoints may have none.
    world.all_ok(std::fs::create_dir_all(&logs).map_err(|e| Error::io("create", &logs, e)))?;
    if !request.in_trainer_job {
        comm.watch_in_own_directory(&[logs.clone(), std::env::temp_dir()])?;
    }
    let log = logs.join(format!("evaluator-{:05}.log", world.rank()));
    world.all_ok(logging::to_file(&log, log::LevelFilter::Info))?;
    let mut sidecar = Sidecar {
        comm,
        request,
        checkpoints: directory.checkpoints(),
        marks: directory.markers(),
        evaluations: directory.evaluations_path(),
        backend: Device::Unmade(Box::new(backend)),
        loaded: None,
        claim: None,
    };
    let watched = match request.policy {
        Policy::Every if root => sidecar.checkpoints.leases().watch_queue(),
        _ => Ok(None),
    };
    let _queue = world.all_ok(watched)?;
    let mut waiting = root.then(|| Waiting::new(sidecar.checkpoints.clone(), request));
    loop {
        let decision = waiting
            .as_mut()
            .map(|waiting| waiting.decide(&sidecar.marks, &mut sidecar.claim))
            .transpose();
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
                    waiting.evaluated();
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

/// Waits a moment for the trainer to create the run, since jobs that are submitted together do not
/// start together.
fn await_run(request: &SidecarOptions) -> Result<()> {
    let run = &request.run;
    let begun = Instant::now();
    let root = run
        .parent()
        .map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
    let may_come = request.watch && !run.exists() && root.is_some_and(Path::is_dir);
    if may_come {
        say(format_args!(
            "evaluator: {} does not exist: waiting {} s for its trainer",
            run.display(),
            START_TIMEOUT.as_secs()
        ));
    }
    while may_come
        && check_run(run).is_err()
        && begun.elapsed() < START_TIMEOUT
        && signals::last_signal().is_none()
    {
        std::thread::sleep(POLL_INTERVAL);
    }
    check_run(run)
}

/// Returns an error if the path is not the directory of a run.
fn check_run(run: &Path) -> Result<()> {
    if run.join("checkpoints").is_dir() || run.join("config.toml").is_file() {
        return Ok(());
    }
    let what = if run.exists() { "is not the directory of a run" } else { "does not exist" };
    Err(Error::input(format!("{} {what}", run.display()))
        .hint("give the directory of a run, such as runs/gpt-char, once its trainer has begun"))
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

/// The state of rank 0 between two evaluations.
struct Waiting<'a> {
    queue: Queue,
    checkpoints: Checkpoints,
    run: RunDirectory,
    request: &'a SidecarOptions,
    /// When a trainer last held the run, or a checkpoint was last evaluated.
    since: Instant,
    /// When the trainer's lease was last checked.
    lease_checked: Option<Instant>,
    /// The last reason for waiting that was printed.
    printed: Option<&'static str>,
    /// Consecutive failures to read the run's directory.
    failed_reads: usize,
}

impl<'a> Waiting<'a> {
    fn new(checkpoints: Checkpoints, request: &'a SidecarOptions) -> Self {
        let queue = Queue::new(checkpoints.clone(), request.policy);
        let run = RunDirectory::at(&request.run);
        Self {
            queue,
            checkpoints,
            run,
            request,
            since: Instant::now(),
            lease_checked: None,
            printed: None,
            failed_reads: 0,
        }
    }

    fn evaluated(&mut self) {
        self.since = Instant::now();
    }

    /// Decides the next action, and puts the checkpoint to evaluate into `claim`. Failed reads are
    /// retried a few times.
    fn decide(&mut self, marks: &Markers, claim: &mut Option<Claim>) -> Result<Decision> {
        match self.decide_once(marks, claim) {
            Err(e) if e.kind() == Kind::Io && self.failed_reads + 1 < ATTEMPTS => {
                self.failed_reads += 1;
                log::warn!("trying again: {e}");
                std::thread::sleep(RETRY_DELAY);
                Ok(Decision::Wait)
            }
            decided => {
                self.failed_reads = 0;
                decided
            }
        }
    }

    /// Decides the next action from the present files, without retries.
    fn decide_once(&mut self, marks: &Markers, claim: &mut Option<Claim>) -> Result<Decision> {
        // The end mark is read first: then all checkpoints published before it are seen.
        let ended = marks.ended();
        if let Some(next) = self.queue.next()? {
            let retries = evaluations::retries(self.checkpoints.evaluated()?.known(), &next.id);
            let decision = Decision::Evaluate(next.step, next.id.clone(), retries);
            *claim = Some(next);
            return Ok(decision);
        }
        let idle = self.queue.is_empty()?;
        let nothing = self.checkpoints.steps()?.is_empty();
        let waits_for = match ended {
            Some(end) if idle && end.status != markers::RunStatus::Preempted => {
                return Ok(Decision::End(format!("the run has ended at step {}", end.step)));
            }
            _ if nothing && !self.request.watch => {
                return Err(Error::input(format!(
                    "{} has no checkpoint",
                    self.request.run.display()
                ))
                .hint("use --watch to wait for one"));
            }
            _ if idle && !self.request.watch && !nothing => {
                return Ok(Decision::End("every checkpoint is evaluated".into()));
            }
            Some(_) if idle => "the trainer was interrupted: waiting for it to resume",
            _ if nothing => "waiting for the first checkpoint",
            _ if idle => "waiting for the next checkpoint",
            _ => "waiting for another evaluator",
        };
        if self.printed != Some(waits_for) {
            self.printed = Some(waits_for);
            say(format_args!("evaluator: {waits_for} of {}", self.request.run.display()));
        }
        let Some(timeout) = self.request.timeout.filter(|_| self.request.watch && idle) else {
            return Ok(Decision::Wait);
        };
        if !self.is_abandoned(timeout)? {
            return Ok(Decision::Wait);
        }
        let run = self.request.run.display();
        let span = humantime::format_duration(timeout);
        let why = match ended {
            Some(End { step, status: markers::RunStatus::Failed, reason: why }) => {
                let why = why.map(|why| format!(": {why}")).unwrap_or_default();
                format!("the last one failed at step {step}{why}")
            }
            Some(End { step, .. }) => format!("the last one was interrupted at step {step}"),
            None if nothing => "none has saved anything".into(),
            None => "the last one ended without a record of it".into(),
        };
        Ok(Decision::GiveUp(format!("no trainer has held {run} for {span} (--timeout): {why}")))
    }

    /// Returns true if no trainer has held the run, and nothing was evaluated here, for `timeout`.
    fn is_abandoned(&mut self, timeout: Duration) -> Result<bool> {
        let pause = LEASE_CHECK_INTERVAL.min(timeout / 10);
        if self.lease_checked.is_none_or(|checked| checked.elapsed() >= pause) {
            self.lease_checked = Some(Instant::now());
            if self.run.has_trainer()? {
                self.since = Instant::now();
            }
        }
        Ok(self.since.elapsed() >= timeout)
    }
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
    backend: Device<B>,
    /// The model in memory, at most one.
    loaded: Option<Loaded<B>>,
    /// The checkpoint under evaluation, on rank 0.
    claim: Option<Claim>,
}

impl<B: Kernels> Sidecar<'_, B> {
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
        let recorded = match self.claim.take() {
            Some(claim) => self.record(step, id, retries, outcome, begun).map(|()| claim.release()),
            None => Ok(()),
        };
        self.comm.world().all_ok(recorded)?;
        if failed {
            std::thread::sleep(RETRY_DELAY);
        }
        Ok(None)
    }

    /// Returns true if this rank was asked to end, or, on rank 0 of a job with a trainer, the
    /// trainer was, since they end together.
    fn is_interrupted(&self) -> bool {
        signals::last_signal().is_some()
            || self.request.in_trainer_job
                && self.comm.rank() == 0
                && self.marks.ended().is_some_and(|end| end.status == markers::RunStatus::Preempted)
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
        let config =
            model::config(&reader.manifest().config, &self.request.overrides).and_then(|config| {
                validation_set_check::check(reader.manifest(), &config).map(|()| config)
            });
        let config = world.all_ok(config)?;
        self.comm.set_watchdog_timeout(Duration::from_secs(config.comm.timeout))?;
        self.prepare(config, reader.manifest())?;
        let Some(mut loaded) = self.loaded.take() else {
            return Err(Error::internal("no model was loaded"));
        };
        if let Err(e) = model::load(&world, &mut loaded.model, &mut reader) {
            return Ok(Err(e));
        }
        let measured =
            loaded.evaluator.measure(&mut loaded.model, &world, || self.is_interrupted())?;
        self.loaded = Some(loaded);
        Ok(Ok(measured))
    }

    /// Creates the model of a configuration and opens the data with the checkpoint's preprocessing,
    /// unless both are loaded.
    fn prepare(&mut self, config: Config, manifest: &Manifest) -> Result<()> {
        let world = self.comm.world();
        let plan =
            world.all_ok(model::plan(config, world.size(), self.request.threads, !B::ON_HOST))?;
        let data_state = (manifest.tokenizer.clone(), manifest.preprocessing.clone());
        if self
            .loaded
            .as_ref()
            .is_some_and(|loaded| loaded.plan == plan && loaded.data_state == data_state)
        {
            return Ok(());
        }
        // The previous model is freed first: memory may suffice for one only.
        self.loaded = None;
        let mut validation = micro_batches::open_together(&world, |shard_index| {
            micro_batches::validation(shard_index, &plan.config)
        })?;
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
