//! A worker: takes work from the coordinator, parameters from the servers, and gives gradients
//! back.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use super::address::host_name;
use super::heartbeat::HeartbeatThread;
use super::program::Program;
use super::protocol::{
    CoordinatorRequest, CoordinatorResponse, Pushed, RemoteError, Values, Work, WorkerReport,
    WorkerTimes,
};
use super::push_pull::{Current, Servers, longest};
use super::rendezvous::PsRendezvous;
use super::rpc_client::RpcClient;
use super::run_spec::RunSpec;
use super::trace::Recording;
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::signals;
use hpctrain_base::spans::{Activity, Doing, Track, span};
use hpctrain_comm::{Credentials, single};
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, Environment, Optimizer, OptimizerKind, ResolvedConfig, resolve};
use hpctrain_cpu::Cpu;
use hpctrain_data::Source;
use hpctrain_device::{Kernels, readable};
use hpctrain_engine::micro_batches::MicroBatches;
use hpctrain_engine::{Engine, Geometry, Splits, clip, memory};
use hpctrain_parallel::{ControlFlags, ReducedStep, StepSchedule};
use hpctrain_train::evaluate::{Evaluator, model};

/// Pause before a worker asks again whether the run has begun.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Time within which one that is cut off must come back before the worker joins anew, perhaps at
/// another address.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The start of a worker.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The place of the run.
    pub site: PsRendezvous,
    /// Time within which a coordinator must be there, and come back.
    pub patience: Duration,
    /// Compute threads.
    pub threads: usize,
    /// Whether a signal makes it leave: without, the coordinator hears of it and ends the run.
    pub leaves: bool,
}

/// The end of a worker's membership.
enum WorkerExit {
    /// The run is over: its exit code.
    Over(i32),
    /// It was asked to leave.
    Left,
    /// It is to join again.
    Renew,
}

impl WorkerOptions {
    /// Returns a connection to the coordinator, and the credentials of the run.
    fn coordinator(&self) -> Result<(RpcClient, Credentials)> {
        let contact = self.site.coordinator(self.patience)?;
        let credentials = self.site.credentials(&contact)?;
        let line =
            RpcClient::new("the coordinator", contact.address, credentials.clone(), self.patience);
        Ok((line.comes_back(RECONNECT_TIMEOUT), credentials))
    }

    fn is_to_leave(&self) -> bool {
        self.leaves && signals::came().is_some()
    }

    /// Asks until the run takes workers; none if this one is to leave.
    fn ask(
        &self,
        coordinator: &mut RpcClient,
        request: &CoordinatorRequest,
    ) -> Result<Option<CoordinatorResponse>> {
        while !self.is_to_leave() {
            match coordinator.tell(request)? {
                CoordinatorResponse::NotYet => std::thread::sleep(RETRY_DELAY),
                other => return Ok(Some(other)),
            }
        }
        Ok(None)
    }
}

/// The configuration of the run, once it takes workers; or the exit code of this process, if the
/// run is over or the process is asked to leave before.
///
/// # Errors
/// The coordinator is gone.
pub fn config_of_run(hand: &WorkerOptions) -> Result<std::result::Result<Config, i32>> {
    let since = Instant::now();
    let request = CoordinatorRequest::Terms { host: host_name(), process: std::process::id() };
    loop {
        let asked = hand
            .coordinator()
            .and_then(|(mut coordinator, _)| hand.ask(&mut coordinator, &request));
        match asked {
            Ok(None) => return Ok(Err(0)),
            Ok(Some(CoordinatorResponse::Terms(terms))) => return Ok(Ok(terms.config)),
            Ok(Some(CoordinatorResponse::Work(Work::End(code)))) => return Ok(Err(code)),
            Ok(Some(other)) => return Err(unexpected(&other)),
            Err(_) if hand.is_to_leave() => return Ok(Err(0)),
            Err(e) if e.kind() != Kind::Comm || since.elapsed() > hand.patience => return Err(e),
            Err(_) => {}
        }
    }
}

fn unexpected(answer: &CoordinatorResponse) -> Error {
    Error::comm(format!("the coordinator answered {answer:?}"))
}

/// Works until the run is over, or it is asked to leave; returns the run's exit code. `backend`
/// makes the device; `device` names it with all that decides the bits that it computes.
///
/// # Errors
/// The coordinator is gone, the data cannot be read, or the device failed.
pub fn work<B: Kernels>(
    hand: &WorkerOptions,
    device: &str,
    backend: impl Fn(&ResolvedConfig) -> Result<B>,
) -> Result<i32> {
    // Its checksum takes a moment, which is not to delay the work.
    let program = Program::here(device.into());
    let mut heard = Instant::now();
    loop {
        match join(hand, &program, &backend, &mut heard) {
            Ok(WorkerExit::Over(code)) => return Ok(code),
            Ok(WorkerExit::Left) => return Ok(0),
            Ok(WorkerExit::Renew) => {}
            Err(e) if e.kind() != Kind::Comm => return Err(e),
            Err(e) if heard.elapsed() > hand.patience => return hand.site.ended().ok_or(e),
            Err(e) => log::info!("joining again: {e}"),
        }
        std::thread::sleep(RETRY_DELAY);
    }
}

/// Joins the run and works, as long as this membership lasts. `heard` is set to the last time the
/// coordinator was heard of.
fn join<B: Kernels>(
    hand: &WorkerOptions,
    program: &Program,
    backend: impl Fn(&ResolvedConfig) -> Result<B>,
    heard: &mut Instant,
) -> Result<WorkerExit> {
    let (mut coordinator, credentials) = hand.coordinator()?;
    let join = CoordinatorRequest::Join {
        host: host_name(),
        process: std::process::id(),
        program: program.clone(),
    };
    let (member, terms) = match hand.ask(&mut coordinator, &join)? {
        None => return Ok(WorkerExit::Left),
        Some(CoordinatorResponse::Welcome { member, terms }) => (member, *terms),
        Some(CoordinatorResponse::Work(Work::End(code))) => return Ok(WorkerExit::Over(code)),
        Some(other) => return Err(unexpected(&other)),
    };
    let (mut beats, _) = hand.coordinator()?;
    let is_current = Arc::new(AtomicBool::new(true));
    let current = is_current.clone();
    // A coordinator that is gone is noticed elsewhere.
    let beat = move || {
        let answer = beats.tell_once(&CoordinatorRequest::Beat { member });
        if let Ok(CoordinatorResponse::Work(Work::Renew)) = answer {
            current.store(false, Ordering::Relaxed);
        }
    };
    let heart = HeartbeatThread::start(hand.patience, beat)?;
    let recording = match terms.trace {
        false => None,
        true => Some(Recording::start(
            format!("worker {member} on {}:{}", host_name(), std::process::id()),
            &mut coordinator,
        )?),
    };
    let activity = Activity::default();
    activity.here(Track::Compute);
    activity.record(recording.is_some());
    let line = |address: &str| {
        let current = is_current.clone();
        let line = RpcClient::new("the server", address, credentials.clone(), hand.patience)
            .comes_back(RECONNECT_TIMEOUT);
        line.watched(RECONNECT_TIMEOUT, move || current.load(Ordering::Relaxed))
    };
    let after = Member::begin(hand, &terms, member, line, backend).and_then(|mut own| {
        own.work(&mut coordinator, |coordinator| {
            recording.as_ref().map_or(Ok(()), |recording| recording.send(coordinator, &activity))
        })
    });
    drop(heart);
    *heard = Instant::now();
    match &after {
        Ok(WorkerExit::Left) => {
            coordinator.tell_once::<CoordinatorResponse>(&CoordinatorRequest::Leave { member })?;
        }
        // The error ends the run, and is told there.
        Err(e) if e.kind() != Kind::Comm => {
            let report = Some(WorkerReport::Failed { fault: RemoteError::from(e) });
            let next = CoordinatorRequest::Next {
                member,
                generation: terms.generation,
                data: None,
                report,
            };
            let _ = coordinator.tell_once::<CoordinatorResponse>(&next);
        }
        _ => {}
    }
    after
}

/// A worker of one generation of the run.
struct Member<'a, B: Kernels> {
    hand: &'a WorkerOptions,
    terms: &'a RunSpec,
    member: u64,
    plan: ResolvedConfig,
    engine: Engine<B>,
    schedule: StepSchedule,
    /// Micro-batches to come, for the thread that reads. Dropped before the feed, which waits for
    /// that thread to end.
    wanted: Sender<Range<u64>>,
    feed: MicroBatches<B>,
    evaluator: Option<Evaluator>,
    digest: Option<String>,
    servers: Servers,
    /// Batches that the thread that reads was asked for, in order.
    asked: VecDeque<u64>,
    /// The lease: its ticket, and the batches that are left.
    lease: Option<(u64, Range<u64>)>,
    /// Time spent on the work at hand.
    seconds: WorkerTimes,
}

/// Refuses a worker that does not fit into the memory that it may take of its host, before it
/// allocates any: parameters, gradients, activations, and messages.
fn check_memory<B: Kernels>(
    plan: &ResolvedConfig,
    terms: &RunSpec,
    topology: &Topology,
    data: &[&dyn Source],
) -> Result<()> {
    let mut config = plan.config.clone();
    // The state of the optimizer and checkpoints are the servers'. The one buffer of this rule
    // stands for a pull's values.
    config.optimizer = Optimizer { kind: OptimizerKind::Sgd, ema: 0.0, ..config.optimizer };
    config.checkpoint.async_save = false;
    let facts = Environment {
        ranks: 1,
        threads: plan.threads,
        vocabulary: plan.network.vocabulary(),
        on_gpu: !B::ON_HOST,
    };
    let lean = resolve(config, &facts)?;
    let mut held = memory::Held::now(&single::<B>(), data);
    // One is read, and one is sent.
    held.messages = 2 * longest(&terms.pieces);
    let need = memory::worst::<B>(&lean, held);
    let room = memory::room(plan, topology, held, None);
    if room.holds(&need) {
        return Ok(());
    }
    let told = format!("a worker needs {} ({})", readable(need.host()), need.host_parts());
    Err(Error::input(format!("{told}, and may take {}", readable(room.host)))
        .hint("set a smaller batch.micro, or parallel.recompute = true"))
}

impl<'a, B: Kernels> Member<'a, B> {
    /// Takes the place of a worker; `line` makes connections to servers.
    fn begin(
        hand: &'a WorkerOptions,
        terms: &'a RunSpec,
        member: u64,
        line: impl Fn(&str) -> RpcClient,
        backend: impl Fn(&ResolvedConfig) -> Result<B>,
    ) -> Result<Self> {
        let plan = terms.worker_plan(hand.threads, !B::ON_HOST)?;
        let alone = single::<Cpu>();
        let topology = Topology::gather(&alone.world(), alone.node().host)?;
        let Splits { mut train, mut validation, .. } =
            Splits::open(&plan.config, &alone.world(), &topology)?;
        let digest = train.fingerprint().map(|fingerprint| fingerprint.digest());
        if let Some(preprocessing) = &terms.preprocessing {
            train.conform(preprocessing)?;
            validation
                .as_mut()
                .map_or(Ok(vec![]), |validation| validation.conform(preprocessing))?;
        }
        check_memory::<B>(&plan, terms, &topology, &[&*train])?;
        let model = model::build(&single::<B>(), &plan, backend(&plan)?)?;
        let schedule = plan.step_schedule(0);
        let geometry = Geometry {
            schedule,
            rows: plan.micro as usize * plan.network.context(),
            predictions: plan.tokens_per_step(),
            recompute: plan.config.parallel.recompute,
            seed: plan.config.run.seed,
        };
        let (wanted, ranges) = channel();
        let feed =
            MicroBatches::of(&model, train, &plan, terms.start.position, ranges.into_iter())?;
        let samples = plan.config.eval.samples;
        let chunk = plan.config.eval.batch;
        let evaluator = validation.map(|validation| Evaluator::new(validation, samples, chunk));
        let servers = Servers::new(terms, member, line);
        let engine = Engine { model, geometry, host_inputs: None };
        Ok(Self {
            hand,
            terms,
            member,
            plan,
            engine,
            schedule,
            feed,
            wanted,
            evaluator,
            digest,
            servers,
            asked: VecDeque::new(),
            lease: None,
            seconds: WorkerTimes::default(),
        })
    }

    /// Does the work that the coordinator gives, to its end; `tell` is called after each piece.
    fn work(
        &mut self,
        coordinator: &mut RpcClient,
        tell: impl Fn(&mut RpcClient) -> Result<()>,
    ) -> Result<WorkerExit> {
        let member = self.member;
        let generation = self.terms.generation;
        let mut report = None;
        let mut data = self.digest.clone();
        loop {
            if self.hand.is_to_leave() {
                return Ok(WorkerExit::Left);
            }
            let request = CoordinatorRequest::Next {
                member,
                generation,
                data: data.take(),
                report: report.take(),
            };
            let work = match coordinator.tell(&request)? {
                CoordinatorResponse::Work(work) => work,
                other => return Err(unexpected(&other)),
            };
            let done = match work {
                Work::VirtualRanks { ticket, step, virtual_ranks } => {
                    self.virtual_ranks(ticket, step, &virtual_ranks)?
                }
                Work::Lease { ticket, batches } => {
                    self.lease = Some((ticket, batches));
                    self.batch()?
                }
                Work::GoOn => self.batch()?,
                Work::Evaluate { ticket, cut, chunks } => self.chunks(ticket, cut, chunks)?,
                Work::Wait => continue,
                Work::Renew => return Ok(WorkerExit::Renew),
                Work::End(code) => return Ok(WorkerExit::Over(code)),
            };
            tell(coordinator)?;
            match done {
                Some(done) => report = Some(done),
                None => return Ok(WorkerExit::Renew),
            }
        }
    }

    /// Micro-batches of so many virtual ranks, whose first sample stands there, are to be read.
    fn want(&self, first: u64, virtual_ranks: usize) {
        let end = first + virtual_ranks as u64 * self.plan.virtual_rank_samples;
        for start in (first..end).step_by(self.plan.micro as usize) {
            // A reader that has failed tells so when its batch is asked for.
            let _ = self.wanted.send(start..start + self.plan.micro);
        }
    }

    /// Makes a batch the next one to be read, and asks for the one after it, if the lease has one:
    /// by then another worker may have it, and its samples are left out.
    fn read_ahead(&mut self, batch: u64) -> Result<()> {
        while self.asked.front().is_some_and(|next| *next != batch) {
            self.asked.pop_front();
            (0..self.plan.micros_per_virtual_rank()).try_for_each(|_| self.feed.skip())?;
        }
        let after = self.lease.as_ref().and_then(|(_, left)| left.clone().next());
        for next in [Some(batch), after].into_iter().flatten() {
            if !self.asked.contains(&next) {
                self.want(self.terms.start.position + next * self.plan.config.batch.global, 1);
                self.asked.push_back(next);
            }
        }
        // It is read now.
        self.asked.pop_front();
        Ok(())
    }

    /// Computes the gradient of virtual ranks of a step, and pushes it; none if the generation is over.
    fn virtual_ranks(
        &mut self,
        ticket: u64,
        step: u64,
        virtual_ranks: &Range<usize>,
    ) -> Result<Option<WorkerReport>> {
        let start = self.terms.start;
        let base = start.position + (step - start.step) * self.plan.config.batch.global;
        self.want(
            base + virtual_ranks.start as u64 * self.plan.virtual_rank_samples,
            virtual_ranks.len(),
        );
        self.seconds = WorkerTimes::default();
        if !self.pull(Values::Live)? {
            return Ok(None);
        }
        self.engine.geometry.schedule =
            StepSchedule { virtual_ranks: virtual_ranks.len(), ..self.schedule };
        let reduced = self.gradients(step)?;
        let of = Pushed::VirtualRanks { step, virtual_ranks: virtual_ranks.clone() };
        if self.push(|_, _| of.clone())?.is_none() {
            return Ok(None);
        }
        Ok(Some(WorkerReport::VirtualRanks {
            ticket,
            losses: vec![reduced.loss.to_bits()],
            seconds: self.seconds,
        }))
    }

    /// Computes the gradient of the next batch of the lease, and pushes it; none if the generation
    /// is over.
    fn batch(&mut self) -> Result<Option<WorkerReport>> {
        let lease = self.lease.as_mut().and_then(|(ticket, left)| Some((*ticket, left.next()?)));
        let (ticket, batch) = lease
            .ok_or_else(|| Error::comm("the coordinator goes on with a lease that has ended"))?;
        self.read_ahead(batch)?;
        self.seconds = WorkerTimes::default();
        if !self.pull(Values::Live)? {
            return Ok(None);
        }
        let versions = self.servers.versions();
        let number = self.terms.start.position / self.plan.config.batch.global + batch;
        let reduced = self.gradients(number)?;
        let loss = reduced.loss / self.plan.tokens_per_step() as f64;
        let staleness = if loss.is_finite() && reduced.norm.is_finite() {
            let scale = (clip(self.plan.config.optimizer.grad_clip, reduced.norm) as f32).to_bits();
            let of = |server: usize, pieces: Range<usize>| Pushed::Batch {
                ticket,
                scale,
                versions: versions[server][pieces].to_vec(),
            };
            match self.push(of)? {
                Some(staleness) => Some(staleness),
                None => return Ok(None),
            }
        } else {
            self.engine.model.sharded.skip()?;
            None
        };
        let loss = loss.to_bits();
        let norm = reduced.norm.to_bits();
        let seconds = self.seconds;
        Ok(Some(WorkerReport::Batch { ticket, batch, loss, norm, staleness, seconds }))
    }

    /// The gradient of the micro-batches that were asked for, and the time that it took.
    fn gradients(&mut self, step: u64) -> Result<ReducedStep> {
        let before = self.feed.waited();
        let reduced =
            self.engine.gradients(step, || self.feed.next_micro(), ControlFlags::empty)?;
        self.seconds.loader += (self.feed.waited() - before).as_secs_f64();
        self.seconds.compute += reduced.compute[0];
        Ok(reduced)
    }

    /// Evaluates chunks with the parameters of a cut; none if the generation is over.
    fn chunks(
        &mut self,
        ticket: u64,
        cut: u64,
        chunks: Range<u64>,
    ) -> Result<Option<WorkerReport>> {
        if !self.pull(Values::Cut(cut))? {
            return Ok(None);
        }
        let none = || {
            Error::input("this worker has no validation data, but the run has")
                .hint("give all workers the same files")
        };
        let evaluator = self.evaluator.as_mut().ok_or_else(none)?;
        let mut sums = Vec::new();
        let _span = span(Doing::Evaluation, None);
        for chunk in chunks {
            let of_chunk = evaluator.measure_chunk(&mut self.engine.model, chunk)?;
            sums.push(of_chunk.into_iter().flatten().map(f64::to_bits).collect());
        }
        Ok(Some(WorkerReport::Chunks { ticket, sums }))
    }

    /// Takes values from all servers.
    fn pull(&mut self, of: Values) -> Result<Current> {
        let began = Instant::now();
        let _span = span(Doing::Pulling, None);
        let current = self.servers.pull(&mut self.engine.model, of)?;
        self.seconds.pull += began.elapsed().as_secs_f64();
        Ok(current)
    }

    /// Gives the reduced gradient to all servers; returns the largest staleness, or none if the
    /// generation is over.
    fn push(&mut self, of: impl Fn(usize, Range<usize>) -> Pushed) -> Result<Option<u64>> {
        let began = Instant::now();
        let _span = span(Doing::Pushing, None);
        let staleness = self.servers.push(&self.engine.model, of)?;
        self.engine.model.sharded.skip()?;
        self.seconds.push += began.elapsed().as_secs_f64();
        Ok(staleness)
    }
}
