//! A worker: requests work from the coordinator, pulls parameters from the servers, and pushes
//! gradients.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use super::heartbeat::HeartbeatThread;
use super::program::Program;
use super::protocol::{
    CoordinatorRequest, CoordinatorResponse, Pushed, RemoteError, Values, Work, WorkerReport,
    WorkerTimes,
};
use super::push_pull::{Current, ServerConnections, max_message_bytes};
use super::rendezvous::PsRendezvous;
use super::row_client::{RowClient, SharedRowClient};
use super::rpc_client::RpcClient;
use super::run_spec::RunSpec;
use super::shared_splits::SharedSplits;
use super::trace::TraceSender;
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::signals;
use hpctrain_base::spans::{Activity, ActivityKind, Track, span};
use hpctrain_comm::{Credentials, host_name, single};
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, Environment, Optimizer, OptimizerKind, ResolvedConfig, resolve};
use hpctrain_cpu::Cpu;
use hpctrain_data::Source;
use hpctrain_device::{Kernels, format_bytes};
use hpctrain_engine::micro_batches::MicroBatches;
use hpctrain_engine::{Engine, Geometry, Splits, clip, memory, with_tables_elsewhere};
use hpctrain_nn::CustomModel;
use hpctrain_nn::loss::{CustomLoss, CustomMetric};
use hpctrain_parallel::{ControlFlags, ReducedStep, StepSchedule};
use hpctrain_train::Customization;
use hpctrain_train::evaluate::{Evaluator, model};

/// The delay before a worker asks again whether the run has started.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// The time in which a lost connection must be restored before the worker joins again, perhaps at
/// another address.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Options of a worker.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The rendezvous directory of the run.
    pub rendezvous: PsRendezvous,
    /// The time to wait for the coordinator to start, and to come back after a lost connection.
    pub timeout: Duration,
    /// The number of compute threads.
    pub threads: usize,
    /// Whether a signal makes the worker leave; otherwise the coordinator handles it and ends the
    /// run.
    pub leaves_on_signal: bool,
}

/// The reason why a worker stops working.
enum WorkerExit {
    /// The run is over, with this exit code.
    Over(i32),
    /// A signal asked the worker to leave.
    Left,
    /// The worker must join again.
    Renew,
}

impl WorkerOptions {
    /// Creates a client of the coordinator; returns it with the credentials of the run.
    fn coordinator(&self) -> Result<(RpcClient, Credentials)> {
        let contact = self.rendezvous.coordinator(self.timeout)?;
        let credentials = self.rendezvous.credentials(&contact)?;
        let client =
            RpcClient::new("the coordinator", contact.address, credentials.clone(), self.timeout);
        Ok((client.with_reconnect_timeout(RECONNECT_TIMEOUT), credentials))
    }

    /// Creates a client of a server, whose requests fail once the generation is not current.
    fn server_client(
        &self,
        address: &str,
        credentials: &Credentials,
        is_current: &Arc<AtomicBool>,
    ) -> RpcClient {
        let current = is_current.clone();
        let client = RpcClient::new("the server", address, credentials.clone(), self.timeout)
            .with_reconnect_timeout(RECONNECT_TIMEOUT);
        client.with_liveness_check(RECONNECT_TIMEOUT, move || current.load(Ordering::Relaxed))
    }

    fn must_leave(&self) -> bool {
        self.leaves_on_signal && signals::last_signal().is_some()
    }

    /// Repeats a request until the run accepts workers; returns none if this worker must leave.
    fn ask(
        &self,
        coordinator: &mut RpcClient,
        request: &CoordinatorRequest,
    ) -> Result<Option<CoordinatorResponse>> {
        while !self.must_leave() {
            match coordinator.call(request)? {
                CoordinatorResponse::NotYet => std::thread::sleep(RETRY_DELAY),
                other => return Ok(Some(other)),
            }
        }
        Ok(None)
    }
}

/// Waits until the run accepts workers and returns its configuration; or returns the exit code of
/// this process, if the run ends or the process is asked to leave before.
///
/// # Errors
/// Returns an error if the coordinator cannot be reached for longer than the timeout.
pub fn config_of_run(options: &WorkerOptions) -> Result<std::result::Result<Config, i32>> {
    let since = Instant::now();
    let request = CoordinatorRequest::Terms { host: host_name(), process: std::process::id() };
    loop {
        let answer = options
            .coordinator()
            .and_then(|(mut coordinator, _)| options.ask(&mut coordinator, &request));
        match answer {
            Ok(None) => return Ok(Err(0)),
            Ok(Some(CoordinatorResponse::Terms(terms))) => return Ok(Ok(terms.config)),
            Ok(Some(CoordinatorResponse::Work(Work::End(code)))) => return Ok(Err(code)),
            Ok(Some(other)) => return Err(unexpected(&other)),
            Err(_) if options.must_leave() => return Ok(Err(0)),
            Err(e) if e.kind() != Kind::Comm || since.elapsed() > options.timeout => {
                return Err(e);
            }
            Err(_) => {}
        }
    }
}

fn unexpected(answer: &CoordinatorResponse) -> Error {
    Error::comm(format!("the coordinator answered {answer:?}"))
}

/// The program of a worker, with its data, network, loss and metrics.
struct WorkerProgram {
    program: Program,
    data: Option<SharedSplits>,
    network: Option<CustomModel>,
    loss: Option<CustomLoss>,
    metrics: Vec<CustomMetric>,
}

/// Runs a worker until the run is over or a signal asks it to leave; returns the exit code of the
/// run. `backend` creates the device; `device` is its name, with everything that determines the
/// bits that it computes. `custom` has the data, network, loss and metrics of this program, which
/// must be those of the coordinator's; its hooks are not called.
///
/// # Errors
/// Returns an error if the coordinator cannot be reached for longer than the timeout, the data
/// cannot be read, the run trains another network, or the device fails.
pub fn work<B: Kernels>(
    options: &WorkerOptions,
    custom: Customization<'_>,
    device: &str,
    backend: impl Fn(&ResolvedConfig) -> Result<B>,
) -> Result<i32> {
    // Computing the checksum of the program takes time, so it is done before joining.
    let program = WorkerProgram {
        program: Program::here(device.into()),
        data: custom.data.map(SharedSplits::new),
        network: custom.network,
        loss: custom.loss,
        metrics: custom.metrics,
    };
    let mut heard = Instant::now();
    loop {
        match join(options, &program, &backend, &mut heard) {
            Ok(WorkerExit::Over(code)) => return Ok(code),
            Ok(WorkerExit::Left) => return Ok(0),
            Ok(WorkerExit::Renew) => {}
            Err(e) if e.kind() != Kind::Comm => return Err(e),
            Err(e) if heard.elapsed() > options.timeout => {
                return options.rendezvous.exit_code().ok_or(e);
            }
            Err(e) => log::info!("joining again: {e}"),
        }
        std::thread::sleep(RETRY_DELAY);
    }
}

/// Joins the run and works until the worker leaves or must join again. `heard` is set to the time
/// of the last contact with the coordinator.
fn join<B: Kernels>(
    options: &WorkerOptions,
    program: &WorkerProgram,
    backend: impl Fn(&ResolvedConfig) -> Result<B>,
    heard: &mut Instant,
) -> Result<WorkerExit> {
    let (mut coordinator, credentials) = options.coordinator()?;
    let join = CoordinatorRequest::Join {
        host: host_name(),
        process: std::process::id(),
        program: program.program.clone(),
    };
    let (member, terms) = match options.ask(&mut coordinator, &join)? {
        None => return Ok(WorkerExit::Left),
        Some(CoordinatorResponse::Welcome { member, terms }) => (member, *terms),
        Some(CoordinatorResponse::Work(Work::End(code))) => return Ok(WorkerExit::Over(code)),
        Some(other) => return Err(unexpected(&other)),
    };
    let generation = terms.generation;
    let terms = terms
        .check_metrics(&program.metrics)
        .and_then(|()| terms.with_program(program.network.as_ref(), program.loss.as_ref()));
    let terms = match terms {
        Ok(terms) => terms,
        // The run goes on without this worker, unless it has a fixed number of workers.
        Err(e) => {
            let last = match options.leaves_on_signal {
                true => CoordinatorRequest::Leave { member },
                false => failure(member, generation, &e),
            };
            drop(coordinator.call_once::<CoordinatorResponse>(&last));
            return Err(e);
        }
    };
    let (mut heartbeats, _) = options.coordinator()?;
    let is_current = Arc::new(AtomicBool::new(true));
    let current = is_current.clone();
    // A lost coordinator is detected by the next request for work.
    let heartbeat_thread = HeartbeatThread::start(options.timeout, move || {
        let answer = heartbeats.call_once(&CoordinatorRequest::Beat { member });
        if let Ok(CoordinatorResponse::Work(Work::Renew)) = answer {
            current.store(false, Ordering::Relaxed);
        }
    })?;
    let recording = match terms.trace {
        false => None,
        true => Some(TraceSender::start(
            format!("worker {member} on {}:{}", host_name(), std::process::id()),
            &mut coordinator,
        )?),
    };
    let activity = Activity::default();
    activity.register_thread(Track::Compute);
    activity.record(recording.is_some());
    let session = WorkerSession::begin(
        options,
        &terms,
        program,
        member,
        |address| options.server_client(address, &credentials, &is_current),
        backend,
    );
    let exit = session.and_then(|mut worker| {
        worker.work(&mut coordinator, |coordinator| {
            recording.as_ref().map_or(Ok(()), |recording| recording.send(coordinator, &activity))
        })
    });
    drop(heartbeat_thread);
    *heard = Instant::now();
    match &exit {
        Ok(WorkerExit::Left) => {
            coordinator.call_once::<CoordinatorResponse>(&CoordinatorRequest::Leave { member })?;
        }
        // The coordinator ends the run with this error.
        Err(e) if e.kind() != Kind::Comm => {
            let next = failure(member, generation, e);
            let _ = coordinator.call_once::<CoordinatorResponse>(&next);
        }
        _ => {}
    }
    exit
}

/// Returns the request that reports an error of a worker, which ends the run.
fn failure(member: u64, generation: u64, error: &Error) -> CoordinatorRequest {
    let report = Some(WorkerReport::Failed { fault: RemoteError::from(error) });
    CoordinatorRequest::Next { member, generation, data: None, report }
}

/// A worker of one generation of the run.
struct WorkerSession<'a, B: Kernels> {
    options: &'a WorkerOptions,
    terms: &'a RunSpec,
    member: u64,
    plan: ResolvedConfig,
    engine: Engine<B>,
    schedule: StepSchedule,
    /// Requests micro-batches of the loader thread. It is declared before `feed`, so that it is
    /// dropped first and the thread ends.
    wanted: Sender<Range<u64>>,
    feed: MicroBatches<B>,
    evaluator: Option<Evaluator>,
    digest: Option<String>,
    servers: ServerConnections,
    /// The connections for rows of embedding tables, if their updates are sparse.
    rows: Option<SharedRowClient>,
    /// The batches requested of the loader thread, in order.
    asked: VecDeque<u64>,
    /// The ticket of the lease, and the batches that are left.
    lease: Option<(u64, Range<u64>)>,
    /// The time spent on the current work.
    seconds: WorkerTimes,
}

/// Refuses a worker whose parameters, gradients, activations and messages do not fit into the
/// available memory of its host, before they are allocated.
fn check_memory<B: Kernels>(
    plan: &ResolvedConfig,
    terms: &RunSpec,
    topology: &Topology,
    data: &[&dyn Source],
) -> Result<()> {
    let mut config = plan.config.clone();
    // The servers have the optimizer state and the snapshots for checkpoints. The one state buffer
    // of SGD stands for the values of a pull.
    config.optimizer = Optimizer { kind: OptimizerKind::Sgd, ema: 0.0, ..config.optimizer };
    config.checkpoint.async_save = false;
    let facts = Environment {
        ranks: 1,
        threads: plan.threads,
        vocabulary: plan.network.vocabulary(),
        on_gpu: !B::ON_HOST,
    };
    let mut lean = resolve(config, &facts)?;
    lean.sparse_tables = plan.sparse_tables;
    let mut held = memory::BaselineMemory::now(&single::<B>(), data);
    // One message is received while another is sent, unless both are f32 on CPUs, which need no
    // copies.
    held.messages = 2 * max_message_bytes(terms);
    let need = memory::worst::<B>(&lean, held);
    let room = memory::budget(plan, topology, held, None);
    if room.holds(&need) {
        return Ok(());
    }
    let message = format!(
        "a worker needs {} ({}), but only {} is available",
        format_bytes(need.host()),
        need.host_parts(),
        format_bytes(room.host)
    );
    Err(Error::input(message).hint("set a smaller batch.micro, or parallel.recompute = true"))
}

impl<'a, B: Kernels> WorkerSession<'a, B> {
    /// Creates a worker; `client` creates clients of servers.
    fn begin(
        options: &'a WorkerOptions,
        terms: &'a RunSpec,
        program: &WorkerProgram,
        member: u64,
        client: impl Fn(&str) -> RpcClient,
        backend: impl Fn(&ResolvedConfig) -> Result<B>,
    ) -> Result<Self> {
        let mut plan = terms.worker_plan(options.threads, !B::ON_HOST)?;
        plan.metrics.clone_from(&program.metrics);
        log::info!("worker {member} computes on {} threads", plan.threads);
        let comm = single::<Cpu>();
        let topology = Topology::gather(&comm.world(), comm.node().host)?;
        let splits = match &program.data {
            Some(data) => data.splits().checked(&plan)?,
            None => Splits::open(&plan.config, &comm.world(), &topology)?,
        };
        let Splits { mut train, mut validation, .. } = splits;
        let digest = train.fingerprint().map(|fingerprint| fingerprint.digest());
        if let Some(preprocessing) = &terms.preprocessing {
            train.conform(preprocessing)?;
            validation
                .as_mut()
                .map_or(Ok(vec![]), |validation| validation.conform(preprocessing))?;
        }
        check_memory::<B>(&plan, terms, &topology, &[&*train])?;
        let rows = RowClient::new(terms, member, &client).map(SharedRowClient::new);
        let world = single::<B>();
        let model = model::build_blocks(&world, &plan, backend(&plan)?)?;
        let model = match &rows {
            Some(rows) => with_tables_elsewhere(&world, &plan, model, Box::new(rows.clone()))?,
            None => model,
        };
        let schedule = plan.step_schedule(0);
        let geometry = Geometry {
            schedule,
            idle_virtual_ranks: 0,
            rows: plan.micro as usize * plan.network.context(),
            predictions: plan.tokens_per_step(),
            recompute: plan.config.parallel.recompute,
            seed: plan.config.run.seed,
        };
        let (wanted, ranges) = channel();
        let feed =
            MicroBatches::start_at(&model, train, &plan, terms.start.position, ranges.into_iter())?;
        let samples = plan.config.eval.samples;
        let chunk = plan.config.eval.batch;
        let evaluator = validation.map(|validation| Evaluator::new(validation, samples, chunk));
        let servers = ServerConnections::new(terms, member, &client);
        let engine = Engine { model, geometry, activation_offload: None, observer: None };
        Ok(Self {
            options,
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
            rows,
            asked: VecDeque::new(),
            lease: None,
            seconds: WorkerTimes::default(),
        })
    }

    /// Does the work that the coordinator assigns until the worker stops; calls `after_work` after
    /// each piece of work.
    fn work(
        &mut self,
        coordinator: &mut RpcClient,
        after_work: impl Fn(&mut RpcClient) -> Result<()>,
    ) -> Result<WorkerExit> {
        let member = self.member;
        let generation = self.terms.generation;
        let mut report = None;
        let mut data = self.digest.clone();
        loop {
            if self.options.must_leave() {
                return Ok(WorkerExit::Left);
            }
            let request = CoordinatorRequest::Next {
                member,
                generation,
                data: data.take(),
                report: report.take(),
            };
            let work = match coordinator.call(&request)? {
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
                Work::ContinueLease => self.batch()?,
                Work::Evaluate { ticket, cut, chunks } => self.chunks(ticket, cut, chunks)?,
                Work::Wait => continue,
                Work::Renew => return Ok(WorkerExit::Renew),
                Work::End(code) => return Ok(WorkerExit::Over(code)),
            };
            after_work(coordinator)?;
            match done {
                Some(done) => report = Some(done),
                None => return Ok(WorkerExit::Renew),
            }
        }
    }

    /// Requests the micro-batches of `virtual_ranks` virtual ranks from sample `first` on.
    fn request_samples(&self, first: u64, virtual_ranks: usize) {
        let end = first + virtual_ranks as u64 * self.plan.virtual_rank_samples;
        for start in (first..end).step_by(self.plan.micro as usize) {
            // A failed loader thread returns its error when the micro-batch is taken.
            let _ = self.wanted.send(start..start + self.plan.micro);
        }
    }

    /// Makes a batch the next one of the loader, and prefetches the one after it in the lease. If
    /// another worker takes that batch, its samples are skipped.
    fn read_ahead(&mut self, batch: u64) -> Result<()> {
        while self.asked.front().is_some_and(|next| *next != batch) {
            self.asked.pop_front();
            (0..self.plan.micros_per_virtual_rank()).try_for_each(|_| self.feed.skip())?;
        }
        let after = self.lease.as_ref().and_then(|(_, left)| left.clone().next());
        for next in [Some(batch), after].into_iter().flatten() {
            if !self.asked.contains(&next) {
                self.request_samples(
                    self.terms.start.position + next * self.plan.config.batch.global,
                    1,
                );
                self.asked.push_back(next);
            }
        }
        // The caller takes this batch now.
        self.asked.pop_front();
        Ok(())
    }

    /// Computes the gradient of virtual ranks of a step and pushes it; returns none if the
    /// generation is over.
    fn virtual_ranks(
        &mut self,
        ticket: u64,
        step: u64,
        virtual_ranks: &Range<usize>,
    ) -> Result<Option<WorkerReport>> {
        let start = self.terms.start;
        let base = start.position + (step - start.step) * self.plan.config.batch.global;
        self.request_samples(
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
        if self.push(|_, _| of.clone(), |_| of.clone())?.is_none() {
            return Ok(None);
        }
        Ok(Some(WorkerReport::VirtualRanks {
            ticket,
            losses: vec![reduced.loss.to_bits()],
            seconds: self.seconds,
        }))
    }

    /// Computes the gradient of the next batch of the lease and pushes it; returns none if the
    /// generation is over.
    fn batch(&mut self) -> Result<Option<WorkerReport>> {
        let lease = self.lease.as_mut().and_then(|(ticket, left)| Some((*ticket, left.next()?)));
        let (ticket, batch) =
            lease.ok_or_else(|| Error::comm("the coordinator continued a lease that has ended"))?;
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
            let of_batch = |versions| Pushed::Batch { ticket, scale, versions };
            let staleness =
                self.push(|server, pieces| of_batch(versions[server][pieces].to_vec()), of_batch)?;
            if staleness.is_none() {
                return Ok(None);
            }
            staleness
        } else {
            self.engine.model.sharded.skip()?;
            None
        };
        let loss = loss.to_bits();
        let norm = reduced.norm.to_bits();
        let seconds = self.seconds;
        Ok(Some(WorkerReport::Batch { ticket, batch, loss, norm, staleness, seconds }))
    }

    /// Computes the gradient of the requested micro-batches, and records the time it took.
    fn gradients(&mut self, step: u64) -> Result<ReducedStep> {
        let before = self.feed.waited();
        let reduced =
            self.engine.gradients(step, || self.feed.next_micro(), ControlFlags::empty)?;
        self.seconds.loader += (self.feed.waited() - before).as_secs_f64();
        self.seconds.compute += reduced.compute[0];
        Ok(reduced)
    }

    /// Evaluates chunks with the parameters of a snapshot; returns none if the generation is over.
    fn chunks(
        &mut self,
        ticket: u64,
        cut: u64,
        chunks: Range<u64>,
    ) -> Result<Option<WorkerReport>> {
        if !self.pull(Values::Cut(cut))? {
            return Ok(None);
        }
        let evaluator = self.evaluator.as_mut().ok_or_else(|| {
            Error::input("this worker has no validation data, but the run has")
                .hint("give all workers the same files")
        })?;
        let mut sums = Vec::new();
        let _span = span(ActivityKind::Evaluation, None);
        for chunk in chunks {
            let of_chunk = evaluator.measure_chunk(&mut self.engine.model, chunk)?;
            sums.push(of_chunk.into_iter().flatten().map(f64::to_bits).collect());
        }
        Ok(Some(WorkerReport::Chunks { ticket, sums }))
    }

    /// Pulls values from all servers.
    fn pull(&mut self, of: Values) -> Result<Current> {
        let began = Instant::now();
        let _span = span(ActivityKind::Pulling, None);
        if let Some(rows) = &self.rows {
            rows.client().begin(of);
        }
        let current = self.servers.pull(&mut self.engine.model, of)?;
        self.seconds.pull += began.elapsed().as_secs_f64();
        Ok(current)
    }

    /// Pushes the reduced gradient to all servers; `of` describes its samples for given ranges of a
    /// server, `of_rows` for rows of these versions. Returns the largest staleness, or none if the
    /// generation is over.
    fn push(
        &mut self,
        of: impl Fn(usize, Range<usize>) -> Pushed,
        of_rows: impl Fn(Vec<u64>) -> Pushed,
    ) -> Result<Option<u64>> {
        let began = Instant::now();
        let _span = span(ActivityKind::Pushing, None);
        let mut rows = match &self.rows {
            Some(rows) => {
                let mut rows = rows.client();
                let sent = rows.send_push(self.engine.model.sharded.table_gradient()?, of_rows);
                Some((rows, sent))
            }
            None => None,
        };
        // The servers receive the rows meanwhile.
        let mut staleness = self.servers.push(&self.engine.model, of)?;
        if let Some((rows, sent)) = &mut rows {
            let of_tables = rows.receive_push(sent)?;
            staleness = staleness.and_then(|most| Some(most.max(of_tables?)));
        }
        drop(rows);
        self.engine.model.sharded.skip()?;
        self.seconds.push += began.elapsed().as_secs_f64();
        Ok(staleness)
    }
}
