//! The coordinator of a run on servers: takes servers and workers in, gives work out, decides on each step, and keeps the records.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;

use super::fleet::Fleet;
use super::hub::{Halt, Hub};
use super::listener::Listener;
use super::message::{Assignment, FromServer, ToServer};
use super::pool::{Batch, Pool};
use super::saving::{Saving, begin};
use super::site::{Site, listen};
use super::terms::{Terms, division, layouts};
use crate::backend::cpu::Cpu;
use crate::checkpoint::{Job, Origin, Progress, Published, Reader};
use crate::comm::single;
use crate::config::{Config, Plan, WhenBusy};
use crate::data::{Fingerprint, TrainedOn};
use crate::engine::{Splits, check_size, clip};
use crate::error::{Error, Kind, Result};
use crate::evaluate::{Evaluator, Measures};
use crate::nn::loss::Objective;
use crate::parallel::{AllFlags, Hyper, Norms, Squares, state_names, sum_of_squares, whole_norms};
use crate::run_dir::markers::{End, Status};
use crate::run_dir::{Ending, Resume, RunDirectory, Take, Taking, data_changes};
use crate::telemetry::epoch_loss::EpochLoss;
use crate::telemetry::evaluations::{self, Evaluation};
use crate::telemetry::metrics::Step;
use crate::telemetry::{logging, say, unix_time};
use crate::topology::Topology;
use crate::train::{Budget, Records, Request, StopRequests, fresh_id};

/// Time without a newcomer after which a run that was not told its workers begins.
const SETTLED: Duration = Duration::from_secs(2);

/// Time that workers and servers have to hear of the end.
const FAREWELL: Duration = Duration::from_secs(5);

/// Request for a run on servers.
#[derive(Debug, Clone)]
pub struct Call {
    /// The run.
    pub run: Request,
    /// Servers.
    pub servers: usize,
    /// Workers that the run is meant for; without them, `servers.workers`, or those that come at the start.
    pub workers: Option<usize>,
    /// Name of the log.
    pub log: String,
}

/// A coordinator that has begun to listen.
pub struct ServedRun {
    call: Call,
    directory: RunDirectory,
    hub: Arc<Hub>,
    site: Site,
    _listener: Listener,
    splits: Splits,
    data: Option<Fingerprint>,
    trained_on: Option<TrainedOn>,
    vocabulary: Option<usize>,
    patience: Duration,
    started: Instant,
}

impl ServedRun {
    /// Opens data and directory of the run, and listens.
    ///
    /// # Errors
    /// The configuration, the data or the directory cannot be used, or the address not be listened on.
    pub fn open(call: Call) -> Result<Self> {
        let started = Instant::now();
        for (flag, is_set) in [("--trace", call.run.trace.is_some()), ("--profile", call.run.profile)] {
            if is_set {
                return Err(Error::input(format!("{flag} is for runs without servers"))
                    .hint("hpctrain status --run RUN shows the times of workers and servers"));
            }
        }
        let mut config = call.run.config.clone();
        let alone = single::<Cpu>();
        let topology = Topology::gather(&alone.world(), alone.node().host)?;
        let splits = Splits::open(&config, &alone.world(), &topology)?;
        let vocabulary = Some(splits.train.vocabulary()).filter(|ids| *ids > 0);
        let workers = call.workers.or(config.servers.workers);
        // Errors of the configuration leave no directory behind.
        let plan = Terms::plan(&config, workers.unwrap_or(1), vocabulary, 1)?;
        check_size(&plan, &splits.train)?;
        division(&plan, call.servers)?;
        if splits.validation.is_none() && plan.config.eval.patience > 0 {
            return Err(crate::engine::feed::no_validation("eval.patience cannot tell when to stop", &plan.config));
        }
        let (listener, address) = listen(config.servers.address.as_deref())?;
        let directory = RunDirectory::prepare(&plan.config, &call.run.name, &call.run.resume)?;
        config.run.name = Some(directory.name());
        logging::to_file(&directory.logs_path().join(format!("{}.log", call.log)), config.log.level.into())?;
        let site = Site::of(directory.path());
        let secret = site.open()?;
        let patience = Duration::from_secs(config.servers.timeout);
        let pool = Pool::new(config.servers.staleness, config.servers.lease);
        let hub = Hub::new(pool, secret.clone(), patience);
        let listener = Listener::open(listener, secret, hub.clone(), patience * 10)?;
        site.tell(&address)?;
        let data = splits.train.fingerprint();
        let call = Call { run: Request { config, ..call.run }, workers, ..call };
        Ok(Self {
            call,
            directory,
            hub,
            site,
            _listener: listener,
            splits,
            data,
            trained_on: None,
            vocabulary,
            patience,
            started,
        })
    }

    /// The directory of the run.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Runs to the end of training.
    ///
    /// # Errors
    /// A worker failed, a server was lost for good, or the run diverged.
    pub fn run(mut self) -> Result<Ending> {
        let mut generation = 0;
        let mut resume = self.call.run.resume.clone();
        let ended = loop {
            generation += 1;
            match self.generation(generation, &resume) {
                Ok(ending) => break Ok(ending),
                Err(Halt::Failed(e)) => break Err(e),
                Err(Halt::Lost(server)) => {
                    log::warn!("a server was lost ({server}): all begin again at the last checkpoint");
                    self.hub.with(|state| {
                        state.close();
                        state.forgive();
                    });
                    if resume == Resume::No || !self.directory.checkpoints().steps()?.is_empty() {
                        resume = Resume::Auto;
                    }
                }
            }
        };
        let code = match &ended {
            Ok(Ending::Finished | Ending::Stopped(_)) => 0,
            Ok(Ending::Preempted(_)) => 75,
            Err(e) => e.exit_code(),
        };
        self.hub.with(|state| state.end(code));
        let since = Instant::now();
        while since.elapsed() < FAREWELL && !self.hub.with(|state| state.is_empty()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Err(e) = &ended {
            let step = self.hub.with(|state| state.told.get("step").and_then(serde_json::Value::as_u64)).unwrap_or(0);
            let end = End { step, status: Status::Failed, why: Some(e.message().into()) };
            self.directory.marks().end(&end).unwrap_or_else(|e| log::warn!("{e}"));
        }
        ended
    }

    /// The run on one set of servers, from its last checkpoint to its end.
    fn generation(&mut self, generation: u64, resume: &Resume) -> Result<Ending, Halt> {
        let (servers, workers) = self.gather()?;
        let config = self.call.run.config.clone();
        let threads = config.run.threads.unwrap_or(1);
        let plan = Terms::plan(&config, workers, self.vocabulary, threads)?;
        let origin = self.origin(&plan, resume)?;
        let terms = Terms {
            generation: (unix_time() * 1e3) as u64 + generation,
            config: Config { run: plan.config.run.clone(), ..config },
            workers,
            vocabulary: self.vocabulary,
            preprocessing: Some(self.splits.train.preprocessing()),
            start: origin.progress,
            pieces: division(&plan, servers.len())?,
            addresses: servers,
        };
        let mut fleet = Fleet::new(&terms, self.hub.clone(), self.site.secret()?, self.patience);
        fleet.assign(|server| Assignment {
            terms: terms.clone(),
            server,
            from: origin.from.clone(),
            with_state: origin.take == Take::Everything,
            part: origin.part,
        })?;
        let mut course = Course::begin(self, plan, terms, fleet, origin.progress)?;
        course.banner(origin.from.as_deref());
        let ended = course.steps().and_then(|ending| course.finish(ending));
        if let Some(saving) = course.saving.take() {
            // It ends by itself, and leaves nothing unfinished behind.
            saving.wait().map_or_else(|_| log::warn!("a checkpoint was given up"), drop);
        }
        ended
    }

    /// Waits for servers and, where their number is not known, for workers.
    fn gather(&self) -> Result<(Vec<String>, usize), Halt> {
        let (wanted, since) = (self.call.servers, Instant::now());
        let is_told = self.call.workers;
        let late = |there: usize| {
            Error::comm(format!("{there} of {wanted} servers have come within {} s", self.patience.as_secs()))
                .hint("start as many as hpctrain coordinate --servers says: hpctrain server --run RUN")
        };
        let found = self.hub.wait(|state| {
            let (waiting, settled) = state.waiting();
            let workers = is_told.or_else(|| (waiting > 0 && settled > SETTLED).then_some(waiting));
            match workers {
                Some(workers) if state.servers() >= wanted => state.seat(wanted).map(|seats| Ok((seats, workers))),
                _ if crate::signals::came().is_some() => Some(Err(Error::comm("it was asked to end"))),
                _ if state.servers() < wanted && since.elapsed() > self.patience => Some(Err(late(state.servers()))),
                _ => None,
            }
        })?;
        Ok(found?)
    }

    /// The starting point: step 0, or a checkpoint that proves whole.
    fn origin(&mut self, plan: &Plan, resume: &Resume) -> Result<Start> {
        let fresh = Start { progress: Progress::default(), from: None, take: Take::Everything, part: 0 };
        let (path, take) = match resume {
            Resume::No => (None, Take::Everything),
            Resume::From(path) => (Some(path.clone()), self.call.run.take),
            Resume::Auto => (self.newest()?, Take::Everything),
        };
        self.trained_on = self.data.clone().map(|fingerprint| TrainedOn { fingerprint, changes: vec![] });
        let Some(path) = path else { return Ok(fresh) };
        let reader = Reader::open(&path)?;
        let manifest = reader.manifest();
        for note in manifest.conform(&mut self.splits.train)? {
            log::info!("data: {note}");
        }
        if let Some(validation) = &mut self.splits.validation {
            manifest.conform(validation)?;
        }
        let names = state_names(Some(plan.rule), plan.average, None);
        manifest.check(&path, &layouts(plan), (take == Take::Everything).then_some(&names[..]))?;
        let taking = Taking { take, data: self.data.clone(), allow_changed_data: self.call.run.allow_changed_data };
        let progress = match take {
            Take::Everything => manifest.progress(),
            Take::NoOptimizer => Progress { updates: 0, ..manifest.progress() },
            Take::Weights => Progress::default(),
        };
        if take != Take::Weights
            && let Some(trained_on) = &mut self.trained_on
        {
            trained_on.changes = data_changes(&path, manifest, &taking)?;
        }
        if progress.step > plan.config.run.steps {
            let (at, asked) = (progress.step, plan.config.run.steps);
            let told = format!("{} is at step {at}, beyond run.steps = {asked}", path.display());
            return Err(Error::input(told).hint("raise run.steps"));
        }
        let part = if take == Take::Weights { reader.used() } else { 0 };
        Ok(Start { progress, from: Some(path), take, part })
    }

    /// The newest checkpoint that is whole; those that are proven damaged are passed over.
    fn newest(&self) -> Result<Option<PathBuf>> {
        let checkpoints = self.directory.checkpoints();
        let mut last = None;
        for step in checkpoints.steps()?.into_iter().rev() {
            let path = checkpoints.path(step);
            match whole(&path) {
                Ok(()) => return Ok(Some(path)),
                Err(e) if e.kind() != Kind::Damaged => return Err(e),
                Err(e) => {
                    log::warn!("passing over {}: {}", path.display(), e.message());
                    last = Some(e);
                }
            }
        }
        match last {
            None => Ok(None),
            Some(e) => Err(e
                .at("no checkpoint is whole; the oldest")
                .hint("start again under another run.name, or restore a copy")),
        }
    }
}

/// Reads and checks all of a checkpoint.
fn whole(path: &Path) -> Result<()> {
    let mut reader = Reader::open(path)?;
    reader.check_files(0, 1)?;
    let files: Vec<String> = reader.manifest().files.keys().cloned().collect();
    files.iter().try_for_each(|file| reader.verify(file))
}

/// A starting point.
struct Start {
    progress: Progress,
    from: Option<PathBuf>,
    take: Take,
    /// The part of the checkpoint that parameters are taken from.
    part: usize,
}

/// The run on one set of servers.
struct Course<'a> {
    hub: &'a Hub,
    directory: &'a RunDirectory,
    plan: Plan,
    terms: Terms,
    fleet: Fleet,
    records: Records,
    stop_requests: StopRequests,
    job: Arc<Job>,
    evaluator: Option<Evaluator>,
    objective: Objective<Cpu>,
    train_samples: u64,
    progress: Progress,
    /// Step and number of the last cut, and of the last evaluation and checkpoint.
    cut: Option<(u64, u64)>,
    evaluated: Option<(u64, f64)>,
    saved: Option<u64>,
    saving: Option<Saving>,
    /// Whether a checkpoint is due by the clock.
    save_now: bool,
    skipped_in_a_row: u64,
    ending: Option<Ending>,
}

/// A step's results.
struct Taken {
    loss: f64,
    norm: f64,
    lr: f64,
    skipped: bool,
    compute: f64,
}

impl<'a> Course<'a> {
    fn begin(of: &'a mut ServedRun, plan: Plan, terms: Terms, fleet: Fleet, progress: Progress) -> Result<Self> {
        let ServedRun { hub, directory, splits, trained_on, started, .. } = of;
        let samples = splits.train.samples();
        let epoch_loss = splits.validation.is_none().then(|| EpochLoss::new(samples, plan.config.batch.global));
        let records = Records::open(directory, &plan, progress.step, None, epoch_loss)?;
        let parameters: u64 = layouts(&plan).iter().map(|unit| unit.padded as u64).sum();
        let budget = Budget::new(plan.config.run.time_limit, *started, 12 * parameters);
        budget.check()?;
        let stop_requests = StopRequests::new(true, budget, directory.marks(), plan.config.checkpoint.every_seconds);
        let job = Job {
            checkpoints: directory.checkpoints(),
            config: plan.config.clone(),
            preprocessing: Some(splits.train.preprocessing()),
            data: trained_on.clone(),
            origin: Origin {
                ranks: terms.addresses.len(),
                hosts: terms.addresses.clone(),
                mpi: "servers over TCP".into(),
                ..Origin::default()
            },
            id: fresh_id(),
            records: vec![directory.metrics_path()],
            state: state_names(Some(plan.rule), plan.average, None),
        };
        let (of_eval, chunk) = (plan.config.eval.samples, plan.config.eval.batch);
        // The workers read the samples; here they are counted.
        let evaluator = splits.validation.as_ref().map(|validation| Evaluator::counting(&**validation, of_eval, chunk));
        let mut pool = Pool::new(plan.config.servers.staleness, plan.config.servers.lease);
        if !terms.is_synchronous() {
            let left = (plan.config.run.steps - progress.step) * terms.workers as u64;
            pool.begin_batches(0..left);
        }
        let digest = splits.train.fingerprint().map(|fingerprint| fingerprint.digest());
        hub.with(|state| {
            state.digest = digest;
            state.open(terms.clone(), pool);
        });
        let found = evaluations::read(&directory.evaluations_path())?;
        let evaluated = evaluations::validation_loss(found.known(), progress.step).map(|loss| (progress.step, loss));
        Ok(Self {
            hub,
            directory,
            objective: plan.objective(),
            plan,
            terms,
            fleet,
            records,
            stop_requests,
            job: Arc::new(job),
            evaluator,
            train_samples: samples,
            progress,
            cut: None,
            evaluated,
            saved: Some(progress.step),
            saving: None,
            save_now: false,
            skipped_in_a_row: 0,
            ending: None,
        })
    }

    fn banner(&self, from: Option<&Path>) {
        let Terms { workers, addresses, pieces, .. } = &self.terms;
        let ranges: usize = pieces.iter().map(Vec::len).sum();
        let staleness = &self.plan.config.servers.staleness;
        say(format_args!("run        {}", self.directory.path().display()));
        say(format_args!("servers    {}, {ranges} ranges, on {}", addresses.len(), addresses.join(", ")));
        let lanes =
            if self.terms.is_synchronous() { format!(", {} lanes a step", self.plan.lanes) } else { String::new() };
        say(format_args!("workers    {workers}, staleness {staleness}{lanes}"));
        if let Some(from) = from {
            say(format_args!("resumed    step {} of {}", self.progress.step, from.display()));
        }
        say("");
    }

    /// Takes steps until training is to end.
    fn steps(&mut self) -> Result<Ending, Halt> {
        while self.ending.is_none() && self.progress.step < self.plan.config.run.steps {
            let began = Instant::now();
            let taken = if self.terms.is_synchronous() { self.step_together()? } else { self.step_apart()? };
            let Some(taken) = taken else { break };
            self.progress.step += 1;
            self.record(&taken, began.elapsed())?;
            self.obey(&taken)?;
            self.evaluate_if_due()?;
            self.save_if_due()?;
        }
        Ok(self.ending.take().unwrap_or(Ending::Finished))
    }

    /// A step that all workers take together; none if the run is to end before.
    fn step_together(&mut self) -> Result<Option<Taken>, Halt> {
        let (step, lanes) = (self.progress.step, self.plan.lanes);
        self.hub.with(|state| state.pool.begin_step(step, lanes));
        let stop_requests = &self.stop_requests;
        let done = self.hub.wait(|state| match state.pool.step_result() {
            Some(result) => Some(Some(result)),
            None => (state.pool.members().is_empty() && stop_requests.must_end()).then_some(None),
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
            Some(hyper) if self.plan.rule.is_layerwise() => self.trust(hyper)?,
            _ => vec![],
        };
        let generation = self.terms.generation;
        self.fleet.all(|_| ToServer::Update {
            generation,
            step,
            hyper: hyper.map(Into::into),
            trust: trust.clone(),
        })?;
        self.progress.updates += u64::from(!skipped);
        self.progress.position += self.plan.config.batch.global;
        Ok(Some(Taken { loss, norm, lr, skipped, compute }))
    }

    /// The norm of the gradient of a step, whose lanes have all come.
    fn norm(&mut self, step: u64) -> Result<f64, Halt> {
        let generation = self.terms.generation;
        let (answers, lanes) = (self.fleet.all(|_| ToServer::Squares { generation, step })?, self.plan.lanes);
        let layouts = layouts(&self.plan);
        let mut told = Vec::new();
        for (pieces, answer) in self.terms.pieces.iter().zip(answers) {
            let FromServer::Squares(squares) = answer else { return Err(unexpected(&answer)) };
            for (piece, bits) in pieces.iter().zip(squares) {
                let size = layouts[piece.unit].padded / lanes;
                let values: Vec<f64> = bits.into_iter().map(f64::from_bits).collect();
                let (first_unit, first_shard, shards) = (piece.unit, piece.range.start / size, values.len());
                told.push(Squares { first_unit, first_shard, shards, values });
            }
        }
        Ok(sum_of_squares(told.iter(), layouts.len(), lanes)?.sqrt())
    }

    /// The factor on the step of every tensor of every unit, where the rule scales them by norms: bits.
    fn trust(&mut self, hyper: Hyper) -> Result<Vec<Vec<u32>>, Halt> {
        let (generation, lanes) = (self.terms.generation, self.plan.lanes);
        let answers = self.fleet.all(|_| ToServer::Norms { generation, hyper: hyper.into() })?;
        let layouts = layouts(&self.plan);
        let tensors: usize = layouts.iter().map(|layout| layout.tensors.len()).sum();
        let mut norms = Norms::new(0..lanes, tensors);
        for answer in answers {
            let FromServer::Norms(of_server) = answer else { return Err(unexpected(&answer)) };
            for (shard, tensor, squares) in of_server {
                norms.set(shard, tensor, squares.map(f64::from_bits));
            }
        }
        let mut squares = whole_norms(&[norms.encode()], lanes, tensors)?.into_iter();
        let groups = &self.plan.config.optimizer.groups;
        let factor = |tensor: &crate::layout::Tensor| {
            let part = crate::optim::Part::of(tensor, groups);
            let of_tensor = squares.next().unwrap_or_default();
            self.plan.rule.trust(of_tensor, part.decay(hyper.weight_decay), hyper.grad_scale).to_bits()
        };
        let mut factor = factor;
        Ok(layouts.iter().map(|layout| layout.tensors.iter().map(&mut factor).collect()).collect())
    }

    /// As many batches as there are workers: a step, where each goes on by itself. None if the run is to end before.
    fn step_apart(&mut self) -> Result<Option<Taken>, Halt> {
        let (workers, generation) = (self.terms.workers, self.terms.generation);
        let batches = loop {
            let stop_requests = &self.stop_requests;
            let found = self.hub.wait(|state| {
                let revoked = state.pool.take_revoked();
                if !revoked.is_empty() {
                    return Some(Err(revoked));
                }
                match state.pool.take_batches(workers) {
                    Some(batches) => Some(Ok(Some(batches))),
                    None => (state.pool.members().is_empty() && stop_requests.must_end()).then_some(Ok(None)),
                }
            })?;
            match found {
                Ok(batches) => break batches,
                Err(tickets) => {
                    for ticket in tickets {
                        self.fleet.all(|_| ToServer::Revoke { generation, ticket })?;
                    }
                }
            }
        };
        let Some(batches) = batches else { return Ok(self.interrupted()) };
        let mean = |of: fn(&Batch) -> f64| batches.iter().map(of).sum::<f64>() / workers as f64;
        let skips = batches.iter().filter(|batch| batch.staleness.is_none()).count();
        let of_batch = self.samples() / workers as u64;
        self.progress.position = self.terms.start.position + self.hub.with(|state| state.pool.low()) * of_batch;
        Ok(Some(Taken {
            loss: mean(|batch| batch.loss),
            norm: mean(|batch| batch.norm),
            lr: self.plan.schedule.rate(self.progress.step),
            skipped: skips > 0,
            compute: mean(|batch| batch.compute),
        }))
    }

    /// Nobody is left to take a step, and the run was asked to end.
    fn interrupted(&mut self) -> Option<Taken> {
        self.ending = Some(self.stop_requests.preempted());
        None
    }

    /// Samples of a step.
    fn samples(&self) -> u64 {
        self.plan.config.batch.global
    }

    fn record(&mut self, taken: &Taken, took: Duration) -> Result<()> {
        let step = self.progress.step;
        let trained = self.terms.start.position + (step - self.terms.start.step) * self.samples();
        let context = self.plan.network.context() as u64;
        let seconds = took.as_secs_f64();
        let record = Step {
            step,
            epoch: trained as f64 / self.train_samples as f64,
            tokens: trained * context,
            loss: taken.loss,
            lr: taken.lr,
            grad_norm: taken.norm,
            skipped: taken.skipped,
            step_ms: seconds * 1e3,
            compute_ms: taken.compute * 1e3,
            tokens_per_second: (self.samples() * context) as f64 / seconds,
            time: unix_time(),
            ..Step::default()
        };
        self.records.metrics.write(&record)?;
        self.records.epoch_loss.iter_mut().for_each(|epoch| epoch.push(record.loss));
        self.records.progress.step(&record);
        self.stop_requests.stepped(took);
        let told = [
            ("step", json!(step)),
            ("steps", json!(self.plan.config.run.steps)),
            ("loss", json!(taken.loss)),
            ("samples_per_second", json!(self.samples() as f64 / seconds)),
        ];
        self.hub.with(|state| state.told.extend(told));
        Ok(())
    }

    /// Acts on requests to end, and on steps that are not finite.
    fn obey(&mut self, taken: &Taken) -> Result<()> {
        let step = self.progress.step;
        self.skipped_in_a_row = if taken.skipped { self.skipped_in_a_row + 1 } else { 0 };
        if taken.skipped {
            log::warn!("step {step}: loss {}, gradient norm {}: update skipped", taken.loss, taken.norm);
        }
        if self.skipped_in_a_row >= self.plan.config.run.max_skipped {
            let message = format!("step {step}: {} steps in a row were not finite", self.skipped_in_a_row);
            return Err(Error::numeric(message)
                .hint("lower optimizer.lr, lengthen schedule.warmup, or lower optimizer.grad_clip"));
        }
        self.directory.check_often()?;
        let flags = self.stop_requests.flags(false);
        if flags.contains(crate::parallel::ControlFlags::DUE) {
            self.save_now = true;
        }
        self.ending = self.stop_requests.ending(&AllFlags(vec![flags]));
        Ok(())
    }

    /// The number of a cut of the parameters as they are now.
    fn cut(&mut self) -> Result<u64, Halt> {
        if let Some((step, number)) = self.cut
            && step == self.progress.step
            && self.terms.is_synchronous()
        {
            return Ok(number);
        }
        let (generation, number) = (self.terms.generation, self.cut.map_or(1, |(_, number)| number + 1));
        let copied = self.fleet.all(|_| ToServer::Cut { generation, cut: number })?;
        // Where workers go on meanwhile, it has updates of steps to come.
        let updates = copied.iter().filter_map(|answer| match answer {
            FromServer::Copied { updates } => Some(self.terms.start.updates + updates),
            _ => None,
        });
        self.progress.updates = updates.max().unwrap_or(self.progress.updates);
        self.cut = Some((self.progress.step, number));
        Ok(number)
    }

    fn evaluate_if_due(&mut self) -> Result<(), Halt> {
        let every = self.plan.config.eval.every;
        let due = self.ending.is_none() && self.plan.is_due(every, self.progress.step);
        if due && self.plan.config.eval.inline { self.evaluate() } else { Ok(()) }
    }

    /// Lets the workers evaluate the parameters as they are now.
    fn evaluate(&mut self) -> Result<(), Halt> {
        let Some(chunks) = self.evaluator.as_ref().map(Evaluator::chunks) else { return Ok(()) };
        // A cut that is being written must not be replaced.
        self.await_saving()?;
        let cut = self.cut()?;
        self.hub.with(|state| state.pool.begin_evaluation(cut, chunks));
        let stop_requests = &self.stop_requests;
        let found = self.hub.wait(|state| match state.pool.take_evaluation() {
            Some(sums) => Some(Some(sums)),
            None if stop_requests.must_end() => {
                state.pool.drop_evaluation();
                Some(None)
            }
            None => None,
        })?;
        let Some(sums) = found else {
            self.ending = Some(self.stop_requests.preempted());
            return Ok(());
        };
        let Some(evaluator) = &self.evaluator else { return Ok(()) };
        let measures = evaluator.measures(self.objective.metrics(), &sums);
        let (step, told) = (self.progress.step, measures.to_string());
        let Measures { loss, metrics } = measures;
        self.evaluated = Some((step, loss));
        log::info!("step {step}: {told}");
        self.directory.check()?;
        let path = self.directory.evaluations_path();
        evaluations::append(&path, &Evaluation::done(step, loss, metrics).on(evaluator.digest(), evaluator.samples()))?;
        self.records.progress.say(&format!("step {step:>6}  {told}"));
        let all = evaluations::read(&path)?;
        let best = self.directory.checkpoints().point_to_best(&all);
        best.unwrap_or_else(|e| log::warn!("the link to the best checkpoint stays: {e}"));
        let config = &self.plan.config.eval;
        self.stop_requests.stop_for(evaluations::stop_reason(all.known(), config.patience, config.min_delta));
        Ok(())
    }

    fn save_if_due(&mut self) -> Result<(), Halt> {
        self.note_saved(false)?;
        let every = self.plan.config.checkpoint.every;
        let due = self.plan.is_due(every, self.progress.step) || std::mem::take(&mut self.save_now);
        // The end of training saves by itself.
        if due && self.ending.is_none() { self.save() } else { Ok(()) }
    }

    /// Begins to save the parameters and the state as they are now.
    fn save(&mut self) -> Result<(), Halt> {
        let step = self.progress.step;
        if self.saving.is_some() {
            if self.plan.config.checkpoint.when_busy == WhenBusy::Skip {
                log::warn!("step {step}: not saved: an earlier checkpoint is still being written");
                return Ok(());
            }
            self.await_saving()?;
        }
        self.record_epoch_loss()?;
        let cut = self.cut()?;
        self.saving = Some(begin(&self.job, &self.fleet, self.terms.generation, cut, self.progress)?);
        (self.saved, self.save_now) = (Some(step), false);
        self.stop_requests.save_begun();
        if !self.plan.config.checkpoint.asynchronous {
            self.await_saving()?;
        }
        Ok(())
    }

    /// Without validation data, notes the loss by which the checkpoint of this step is compared with others.
    fn record_epoch_loss(&self) -> Result<()> {
        let Records { epoch_loss: Some(epoch), .. } = &self.records else { return Ok(()) };
        evaluations::append(&self.directory.evaluations_path(), &Evaluation::of_epoch(self.progress.step, epoch.mean()))
    }

    fn await_saving(&mut self) -> Result<(), Halt> {
        self.note_saved(true)
    }

    /// Notes the end of the save under way, for which it may wait.
    fn note_saved(&mut self, waits: bool) -> Result<(), Halt> {
        let Some(saving) = self.saving.take_if(|saving| waits || saving.is_done()) else { return Ok(()) };
        let Published { took, progress } = saving.wait()?;
        self.stop_requests.published(took);
        log::info!(
            "saved {} in {:.2} s",
            self.directory.checkpoints().path(progress.step).display(),
            took.as_secs_f64()
        );
        Ok(())
    }

    /// Last evaluation, last checkpoint, the end on record.
    fn finish(&mut self, ending: Ending) -> Result<Ending, Halt> {
        let step = self.progress.step;
        let is_evaluated = self.evaluated.is_some_and(|(at, _)| at == step);
        if self.plan.config.eval.inline && !is_evaluated && !matches!(ending, Ending::Preempted(_)) {
            self.evaluate()?;
        }
        self.await_saving()?;
        if self.saved != Some(step) {
            self.save()?;
            self.await_saving()?;
        }
        self.directory.check()?;
        self.records.progress.finish();
        let (status, why) = match &ending {
            Ending::Finished => (Status::Finished, None),
            Ending::Stopped(why) => (Status::Finished, Some(why.clone())),
            Ending::Preempted(why) => (Status::Preempted, Some(why.clone())),
        };
        if let Some(why) = &why {
            say(format_args!("\nended at step {step}: {why}"));
        }
        if let (Some((_, loss)), Some(evaluator)) = (self.evaluated.filter(|(at, _)| *at == step), &self.evaluator) {
            say(format_args!("\nvalidation loss {loss:.4} over {} samples at step {step}", evaluator.samples()));
        }
        if !self.terms.is_synchronous() {
            say(format_args!("staleness  {}", self.hub.with(|state| told(state.pool.histogram()))));
        }
        let latest = self.directory.checkpoints().latest();
        if latest.exists() {
            say(format_args!("checkpoint in {}", latest.display()));
        }
        if status == Status::Preempted {
            say(format_args!("continue with --resume auto --set run.name={}", self.directory.name()));
        }
        self.directory.marks().end(&End { step, status, why })?;
        log::info!("ended at step {step}: {ending:?}");
        Ok(ending)
    }
}

/// A histogram of staleness for people: mean, and the share of each.
fn told(histogram: &std::collections::BTreeMap<u64, u64>) -> String {
    let all: u64 = histogram.values().sum();
    if all == 0 {
        return "of no push".into();
    }
    let mean = histogram.iter().map(|(staleness, count)| staleness * count).sum::<u64>() as f64 / all as f64;
    let share = |(staleness, count): (&u64, &u64)| format!("{staleness}: {:.1} %", 100.0 * *count as f64 / all as f64);
    let most: Vec<String> = histogram.iter().take(8).map(share).collect();
    format!("{mean:.2} updates in the mean ({})", most.join(", "))
}

fn unexpected(answer: &FromServer) -> Halt {
    match answer {
        FromServer::Stale => Halt::Lost("a server has begun anew".into()),
        other => Halt::Failed(Error::internal(format!("a server answered {other:?}"))),
    }
}
