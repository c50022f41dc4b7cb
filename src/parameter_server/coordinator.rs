//! The coordinator of a run on servers: takes servers and workers in, and begins the run again when
//! a server is lost.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::listen;
use super::coordinator_service::{CoordinatorService, Limits, SessionError};
use super::protocol::{Assignment, ServerRequest, ServerResponse};
use super::rendezvous::{Contact, PsRendezvous};
use super::rpc_server::RpcServer;
use super::run_spec::{RunSpec, division, layouts};
use super::scheduler::WorkScheduler;
use super::server_clients::ServerClients;
use super::session::{Session, SessionContext, StartPoint};
use super::trace::Collected;
use super::wal::{WalEntry, WalHeader};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_checkpoint::lease::LeaseGuard;
use hpctrain_checkpoint::run_dir::markers::{End, RunStatus};
use hpctrain_checkpoint::run_dir::{
    Branch, RestoreOptions, RestoreScope, Resume, RunDirectory, RunOutcome, data_changes,
};
use hpctrain_checkpoint::tools::resolve_path;
use hpctrain_checkpoint::{Progress, Reader};
use hpctrain_comm::{Credentials, single};
use hpctrain_config::telemetry::trace_file::TraceFile;
use hpctrain_config::telemetry::{logging, unix_time};
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, ResolvedConfig};
use hpctrain_cpu::Cpu;
use hpctrain_data::{Fingerprint, TrainedOn};
use hpctrain_engine::{Splits, check_size};
use hpctrain_parallel::state_names;
use hpctrain_train::TrainRequest;

/// Time without a newcomer after which a run that was not told its workers begins.
const QUIET_PERIOD: Duration = Duration::from_secs(2);

/// Time within which servers come, that were there before: two of the intervals at which they look
/// for the coordinator.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Time that workers and servers have to hear of the end.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Request for a run on servers.
#[derive(Debug, Clone)]
pub struct CoordinatorOptions {
    /// The run.
    pub run: TrainRequest,
    /// Servers.
    pub servers: usize,
    /// Workers that the run is meant for; without them, `parameter_server.workers`, or those that
    /// come at the start.
    pub workers: Option<usize>,
    /// Name of the log.
    pub log: String,
}

/// A coordinator that has begun to listen.
pub struct CoordinatorRun {
    call: CoordinatorOptions,
    directory: RunDirectory,
    hub: Arc<CoordinatorService>,
    site: PsRendezvous,
    credentials: Credentials,
    _listener: RpcServer,
    splits: Splits,
    data: Option<Fingerprint>,
    trained_on: Option<TrainedOn>,
    vocabulary: Option<usize>,
    patience: Duration,
    started: Instant,
    /// Keeps the checkpoint of another run that this one begins at.
    _from: Option<LeaseGuard>,
}

impl CoordinatorRun {
    /// Opens data and directory of the run, and listens.
    ///
    /// # Errors
    /// The configuration, the data or the directory cannot be used, or the address not be listened
    /// on.
    pub fn open(call: CoordinatorOptions) -> Result<Self> {
        let started = Instant::now();
        if call.run.profile {
            return Err(Error::input("--profile is for runs without servers")
                .hint("workers.jsonl in the run's directory has the times of workers, and --trace what they did"));
        }
        let mut config = call.run.config.clone();
        let alone = single::<Cpu>();
        let topology = Topology::gather(&alone.world(), alone.node().host)?;
        let splits = Splits::open(&config, &alone.world(), &topology)?;
        let vocabulary = Some(splits.train.vocabulary()).filter(|ids| *ids > 0);
        let workers = call.workers.or(config.parameter_server.workers);
        // Errors of the configuration leave no directory behind.
        let samples = splits.train.samples();
        let few = workers.unwrap_or(1);
        let plan = RunSpec::plan(&RunSpec::counted(&config, few, samples), few, vocabulary, 1)?;
        check_size(&plan, &splits.train)?;
        division(&plan, call.servers)?;
        if splits.validation.is_none() && plan.config.eval.patience > 0 {
            return Err(hpctrain_engine::micro_batches::no_validation(
                "eval.patience cannot tell when to stop",
                &plan.config,
            ));
        }
        let trace = call.run.trace.as_deref().map(TraceFile::create).transpose()?;
        let (listener, address) =
            listen(config.parameter_server.address.as_deref(), config.comm.interface.as_deref())?;
        let resume = match call.run.resume {
            Resume::From(path) => Resume::From(resolve_path::checkpoint(&path)?),
            other => other,
        };
        let from = if let Resume::From(path) = &resume { resolve_path::hold(path) } else { None };
        let directory = RunDirectory::prepare(&plan.config, &call.run.name, &resume)?;
        config.run.name = Some(directory.name());
        logging::to_file(
            &directory.logs_path().join(format!("{}.log", call.log)),
            config.log.level.into(),
        )?;
        config.log_aliases();
        let site = PsRendezvous::of(directory.path());
        site.open()?;
        let contact = Contact {
            address,
            encrypt: config.comm.encrypt,
            interface: config.comm.interface.clone(),
        };
        let credentials = site.credentials(&contact)?;
        let patience = Duration::from_secs(config.parameter_server.timeout);
        let pool = WorkScheduler::new(
            config.parameter_server.staleness,
            config.parameter_server.batches_per_lease,
            0,
        );
        let stuck = match config.comm.timeout {
            0 => Duration::MAX,
            seconds => Duration::from_secs(seconds),
        };
        let limits = Limits { silent: patience, stuck };
        let trace = trace.map(Collected::begin).transpose()?;
        let first_caller = (unix_time() * 1e3) as u64;
        let hub = CoordinatorService::new(pool, credentials.clone(), limits, trace, first_caller);
        let listener = RpcServer::open(listener, credentials.clone(), hub.clone(), patience * 10)?;
        site.publish(&contact)?;
        let data = splits.train.fingerprint();
        let call = CoordinatorOptions {
            run: TrainRequest { config, resume, ..call.run },
            workers,
            ..call
        };
        Ok(Self {
            call,
            directory,
            hub,
            site,
            credentials,
            _listener: listener,
            splits,
            data,
            trained_on: None,
            vocabulary,
            patience,
            started,
            _from: from,
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
    pub fn run(mut self) -> Result<RunOutcome> {
        let mut generation = 0;
        let mut resume = self.call.run.resume.clone();
        let ended = loop {
            generation += 1;
            match self.generation(generation, &resume) {
                Ok(ending) => break Ok(ending),
                Err(SessionError::Failed(e)) => break Err(e),
                Err(SessionError::Lost(server)) => {
                    log::warn!(
                        "a server was lost ({server}): all begin again at the last checkpoint"
                    );
                    self.hub.with(|state| {
                        state.close();
                        state.clear_lost();
                    });
                    if resume == Resume::No || !self.directory.checkpoints().steps()?.is_empty() {
                        resume = Resume::Auto;
                    }
                }
            }
        };
        let code = match &ended {
            Ok(ending) => ending.exit_code(),
            Err(e) => e.exit_code(),
        };
        self.hub.with(|state| state.end(code));
        let since = Instant::now();
        while since.elapsed() < SHUTDOWN_GRACE && !self.hub.with(|state| state.is_empty()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Some(trace) = &self.hub.trace {
            trace.end().unwrap_or_else(|e| log::warn!("{e}"));
        }
        if let Err(e) = &ended {
            let step =
                self.hub.with(|state| state.told.get("step").and_then(serde_json::Value::as_u64));
            let failed = End {
                step: step.unwrap_or(0),
                status: RunStatus::Failed,
                why: Some(e.message().into()),
            };
            // A start that is refused leaves the run as it was.
            let end =
                self.directory.ended_before().filter(|_| step.is_none()).cloned().unwrap_or(failed);
            self.directory.marks().end(&end).unwrap_or_else(|e| log::warn!("{e}"));
        }
        ended
    }

    /// The run on one set of servers, from its last checkpoint or the step that they have come to,
    /// to its end.
    fn generation(&mut self, generation: u64, resume: &Resume) -> Result<RunOutcome, SessionError> {
        let before = if generation == 1 && *resume == Resume::Auto { self.before()? } else { None };
        let config = self.call.run.config.clone();
        let threads = config.run.threads.unwrap_or(1);
        let (servers, workers) =
            match self.gather(before.as_ref().map(|(grounds, _)| &grounds.terms))? {
                None => return Ok(self.asked_to_end()?),
                Some(Gathered { servers, workers, holds: false }) => (servers, workers),
                Some(Gathered { .. }) => {
                    let before = before.ok_or_else(|| Error::internal("servers of no run"))?;
                    return self.go_on(before, threads);
                }
            };
        let config = RunSpec::counted(&config, workers, self.splits.train.samples());
        let plan = RunSpec::plan(&config, workers, self.vocabulary, threads)?;
        let origin = self.origin(&plan, resume)?;
        let terms = RunSpec {
            generation: (unix_time() * 1e3) as u64 + generation,
            config: Config { run: plan.config.run.clone(), ..config },
            workers,
            vocabulary: self.vocabulary,
            preprocessing: Some(self.splits.train.preprocessing()),
            start: origin.progress,
            pieces: division(&plan, servers.len())?,
            addresses: servers,
            trace: self.hub.trace.is_some(),
        };
        let mut fleet = self.fleet(&terms);
        fleet.assign(|server| Assignment {
            terms: terms.clone(),
            server,
            from: origin.from.clone(),
            with_state: origin.take == RestoreScope::Everything,
            part: origin.part,
        })?;
        let grounds = WalHeader { terms: terms.clone(), trained_on: self.trained_on.clone() };
        self.site.journal().begin(&grounds)?;
        let from = origin.from.as_deref().map_or(StartPoint::Seed, StartPoint::Checkpoint);
        self.course(plan, terms, fleet, from)
    }

    fn fleet(&self, terms: &RunSpec) -> ServerClients {
        ServerClients::new(terms, self.hub.clone(), self.credentials.clone(), self.patience)
    }

    fn course(
        &self,
        plan: ResolvedConfig,
        terms: RunSpec,
        fleet: ServerClients,
        from: StartPoint<'_>,
    ) -> Result<RunOutcome, SessionError> {
        let journal = self.site.journal();
        let basis = SessionContext {
            hub: &self.hub,
            directory: &self.directory,
            splits: &self.splits,
            trained_on: self.trained_on.clone(),
            started: self.started,
            journal: &journal,
        };
        Session::begin(basis, plan, terms, fleet, from)?.run(from)
    }

    /// The last step of a coordinator before this one, if it was of the same run.
    ///
    /// # Errors
    /// Returns an error if the journal cannot be read.
    fn before(&self) -> Result<Option<(WalHeader, WalEntry)>> {
        let Some((grounds, entry)) = self.site.journal().read()? else { return Ok(None) };
        let RunSpec { config, workers, addresses, vocabulary, trace, .. } = &grounds.terms;
        let given = &RunSpec::counted(&self.call.run.config, *workers, self.splits.train.samples());
        let Ok(plan) =
            RunSpec::plan(given, *workers, self.vocabulary, given.run.threads.unwrap_or(1))
        else {
            return Ok(None);
        };
        let data = grounds.trained_on.as_ref().map(|trained_on| &trained_on.fingerprint);
        let mut wanted = Config { run: plan.config.run, ..given.clone() };
        // Files do not tell which keys were given.
        wanted.parallel.given.clone_from(&config.parallel.given);
        let is_same = *config == wanted
            && self.call.workers.is_none_or(|called| called == *workers)
            && addresses.len() == self.call.servers
            && (vocabulary, *trace, data)
                == (&self.vocabulary, self.hub.trace.is_some(), self.data.as_ref());
        if !is_same {
            log::info!(
                "the journal is of other settings or data: the run goes on from its last checkpoint"
            );
        }
        Ok(is_same.then_some((grounds, entry)))
    }

    /// Goes on with servers that have their ranges since a coordinator before this one.
    fn go_on(
        &mut self,
        (grounds, entry): (WalHeader, WalEntry),
        threads: usize,
    ) -> Result<RunOutcome, SessionError> {
        let WalHeader { terms, trained_on } = grounds;
        let plan = RunSpec::plan(&terms.config, terms.workers, terms.vocabulary, threads)?;
        if let Some(preprocessing) = &terms.preprocessing {
            self.splits.train.conform(preprocessing)?;
            self.splits
                .validation
                .as_mut()
                .map_or(Ok(vec![]), |validation| validation.conform(preprocessing))?;
        }
        let mut fleet = self.fleet(&terms);
        let generation = terms.generation;
        let step = entry.before.step;
        for answer in fleet.all(|_| ServerRequest::At { generation })? {
            match answer {
                ServerResponse::At(first, last)
                    if !terms.is_synchronous() || (first >= step && last <= step + 1) => {}
                other => {
                    return Err(SessionError::Lost(format!(
                        "a server is at {other:?}, and the journal at step {step}"
                    )));
                }
            }
        }
        log::info!("going on at step {step} with servers that have it still");
        self.trained_on = trained_on;
        self.course(plan, terms, fleet, StartPoint::Journal(&entry))
    }

    /// The end before all have come: what was saved is still there.
    fn asked_to_end(&self) -> Result<RunOutcome> {
        let why = format!(
            "{} came before all servers and workers were there",
            hpctrain_base::signals::came().unwrap_or("a signal")
        );
        let step = self.directory.checkpoints().steps()?.last().copied().unwrap_or(0);
        self.directory.marks().end(&End {
            step,
            status: RunStatus::Preempted,
            why: Some(why.clone()),
        })?;
        log::info!("ended at step {step}: {why}");
        Ok(RunOutcome::Preempted(why))
    }

    /// Waits for servers and, where their number is not known, for workers; none if the job is
    /// asked to end. Servers that have the ranges of the terms are those that are taken.
    fn gather(&self, before: Option<&RunSpec>) -> Result<Option<Gathered>, SessionError> {
        let wanted = self.call.servers;
        let since = Instant::now();
        let is_told = self.call.workers;
        let late = |there: usize| {
            Error::comm(format!(
                "{there} of {wanted} servers have come within {} s",
                self.patience.as_secs()
            ))
            .hint("start as many as hpctrain ps coordinator --servers says: hpctrain ps server --run RUN")
        };
        let found = self.hub.wait(|state| {
            if let Some(RunSpec { addresses, generation, workers, .. }) = before
                && state.seat_again(addresses, *generation)
            {
                return Some(Ok(Some(Gathered {
                    servers: addresses.clone(),
                    workers: *workers,
                    holds: true,
                })));
            }
            let (waiting, settled) = state.waiting();
            let workers =
                is_told.or_else(|| (waiting > 0 && settled > QUIET_PERIOD).then_some(waiting));
            let may_come_back = before.is_some() && since.elapsed() < RECONNECT_TIMEOUT;
            match workers {
                Some(workers) if state.servers() >= wanted && !may_come_back => state
                    .register_servers(wanted)
                    .map(|servers| Ok(Some(Gathered { servers, workers, holds: false }))),
                _ if hpctrain_base::signals::came().is_some() => Some(Ok(None)),
                _ if state.servers() < wanted && since.elapsed() > self.patience => {
                    Some(Err(late(state.servers())))
                }
                _ => None,
            }
        })?;
        Ok(found?)
    }

    /// The starting point: step 0, or a checkpoint that proves whole.
    fn origin(&mut self, plan: &ResolvedConfig, resume: &Resume) -> Result<Start> {
        let fresh = Start {
            progress: Progress::default(),
            from: None,
            take: RestoreScope::Everything,
            part: 0,
        };
        let (path, take) = match resume {
            Resume::No => (None, RestoreScope::Everything),
            Resume::From(path) => (Some(path.clone()), self.call.run.take),
            Resume::Auto => match (self.newest()?, self.directory.branch()?) {
                // It began at a checkpoint of another run, and has saved none of its own.
                (None, Some(Branch { from, take })) => (Some(from), take),
                (newest, _) => (newest, RestoreScope::Everything),
            },
        };
        self.trained_on =
            self.data.clone().map(|fingerprint| TrainedOn { fingerprint, changes: vec![] });
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
        manifest.check(
            &path,
            &layouts(plan),
            (take == RestoreScope::Everything).then_some(&names[..]),
        )?;
        let taking = RestoreOptions {
            take,
            data: self.data.clone(),
            allow_changed_data: self.call.run.allow_changed_data,
        };
        let progress = match take {
            RestoreScope::Everything => manifest.progress(),
            RestoreScope::NoOptimizer => Progress { updates: 0, ..manifest.progress() },
            RestoreScope::Weights => Progress::default(),
        };
        if take != RestoreScope::Weights
            && let Some(trained_on) = &mut self.trained_on
        {
            trained_on.changes = data_changes(&path, manifest, &taking)?;
        }
        if progress.step > plan.config.run.steps {
            let at = progress.step;
            let asked = plan.config.run.steps;
            let told = format!("{} is at step {at}, beyond run.steps = {asked}", path.display());
            return Err(Error::input(told).hint("raise run.steps"));
        }
        if *resume != Resume::Auto {
            self.directory.write_branch(Branch { from: path.clone(), take })?;
        }
        let part = if take == RestoreScope::Weights { reader.used() } else { 0 };
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
    reader.check_files()?;
    let files: Vec<String> = reader.manifest().files.keys().cloned().collect();
    files.iter().try_for_each(|file| reader.verify(file))
}

/// The servers of a generation.
struct Gathered {
    /// Host and port of each.
    servers: Vec<String>,
    /// Workers that the run is meant for.
    workers: usize,
    /// Whether they have the ranges of the coordinator before.
    holds: bool,
}

/// A starting point.
struct Start {
    progress: Progress,
    from: Option<PathBuf>,
    take: RestoreScope,
    /// The part of the checkpoint that parameters are taken from.
    part: usize,
}
