//! The coordinator of a run with parameter servers: admits servers and workers, and restarts the
//! run from its last checkpoint when a server is lost.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::listen;
use super::coordinator_service::{CoordinatorService, LivenessTimeouts, SessionError};
use super::network_spec::NetworkSpec;
use super::protocol::{Assignment, ServerRequest, ServerResponse};
use super::rendezvous::{Contact, PsRendezvous};
use super::rpc_server::RpcServer;
use super::run_spec::{RunSpec, layouts, oversized_range, placement, ranges_of_servers, row_width};
use super::scheduler::WorkScheduler;
use super::server_clients::ServerClients;
use super::session::{RunHooks, Session, SessionContext, StartPoint};
use super::trace::TraceCollector;
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
use hpctrain_config::ResolvedConfig;
use hpctrain_config::telemetry::trace_file::TraceFile;
use hpctrain_config::telemetry::{logging, say, unix_time};
use hpctrain_config::topology::Topology;
use hpctrain_cpu::Cpu;
use hpctrain_data::{Fingerprint, TrainedOn};
use hpctrain_engine::{Splits, check_size};
use hpctrain_nn::CustomModel;
use hpctrain_nn::loss::{CustomLoss, CustomMetric};
use hpctrain_parallel::state_names;
use hpctrain_train::{Customization, Hooks, Outcome, TrainRequest};

/// The time without a new worker after which a run whose number of workers is not given starts.
const QUIET_PERIOD: Duration = Duration::from_secs(2);

/// The time in which the servers of the previous coordinator reconnect.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The time in which workers and servers must receive the end of the run.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Options of a coordinator.
#[derive(Debug, Clone)]
pub struct CoordinatorOptions {
    /// The run.
    pub run: TrainRequest,
    /// The number of servers.
    pub servers: usize,
    /// The number of workers the run is planned for; default: `parameter_server.workers`, else the
    /// number of workers connected at the start.
    pub workers: Option<usize>,
    /// The name of the log file, without its extension.
    pub log: String,
}

/// A coordinator that is listening.
pub struct CoordinatorRun<'h> {
    options: CoordinatorOptions,
    directory: RunDirectory,
    service: Arc<CoordinatorService>,
    rendezvous: PsRendezvous,
    credentials: Credentials,
    _listener: RpcServer,
    splits: Splits,
    data: Option<Fingerprint>,
    /// The custom network, loss and metrics of this program.
    network: Option<CustomModel>,
    loss: Option<CustomLoss>,
    metrics: Vec<CustomMetric>,
    hooks: RunHooks<'h>,
    trained_on: Option<TrainedOn>,
    vocabulary: Option<usize>,
    timeout: Duration,
    started: Instant,
    /// The last server that was lost, with the reason.
    lost: Option<String>,
    /// The lease on the checkpoint of another run that this one starts from.
    _from: Option<LeaseGuard>,
}

impl<'h> CoordinatorRun<'h> {
    /// Opens the data and the directory of the run, and starts to listen. The hooks of `custom` are
    /// called by this process alone; workers need the same data, network, loss and metrics in their
    /// own [`Customization`].
    ///
    /// # Errors
    /// Returns an error if the configuration is invalid, the data or the directory cannot be used,
    /// or the address cannot be listened on.
    pub fn open(options: CoordinatorOptions, custom: Customization<'h>) -> Result<Self> {
        let started = Instant::now();
        if options.run.profile {
            return Err(Error::input("--profile is not supported with parameter servers").hint(
                "see the times of workers in workers.jsonl in the run's directory, or use --trace",
            ));
        }
        if options.run.config.elastic.on {
            return Err(Error::input("elastic.on = true is not supported with parameter servers")
                .hint("remove it: workers may join and leave in any case"));
        }
        let mut config = custom.with_custom_network(&options.run.config);
        let comm = single::<Cpu>();
        let topology = Topology::gather(&comm.world(), comm.node().host)?;
        let is_custom = custom.data.is_some();
        let mut splits = match custom.data {
            Some(splits) => splits,
            None => Splits::open(&config, &comm.world(), &topology)?,
        };
        config.data.path = splits.name.clone();
        let vocabulary = Some(splits.train.vocabulary()).filter(|ids| *ids > 0);
        let workers = options.workers.or(config.parameter_server.workers);
        // Check the configuration before the directory is created.
        let samples = splits.train.samples();
        let assumed = workers.unwrap_or(1);
        let config_in_steps = RunSpec::with_epochs_in_steps(&config, assumed, samples);
        let plan = RunSpec::plan(&config_in_steps, assumed, vocabulary, 1)?;
        if is_custom {
            splits = splits.checked(&plan)?;
        }
        check_size(&plan, &splits.train)?;
        ranges_of_servers(&plan, options.servers)?;
        if splits.validation.is_none() && plan.config.eval.patience > 0 {
            return Err(hpctrain_engine::micro_batches::no_validation(
                "eval.patience requires it",
                &plan.config,
            ));
        }
        let trace = options.run.trace.as_deref().map(TraceFile::create).transpose()?;
        let (listener, address) =
            listen(config.parameter_server.address.as_deref(), config.comm.interface.as_deref())?;
        let resume = match options.run.resume {
            Resume::From(path) => Resume::From(resolve_path::checkpoint(&path)?),
            other => other,
        };
        let from = if let Resume::From(path) = &resume { resolve_path::lease(path) } else { None };
        let directory = RunDirectory::prepare(&plan.config, &options.run.name, &resume)?;
        config.run.name = Some(directory.name());
        logging::to_file(
            &directory.logs_path().join(format!("{}.log", options.log)),
            config.log.level.into(),
        )?;
        config.log_aliases();
        let site = PsRendezvous::for_run(directory.path());
        site.open()?;
        let contact = Contact {
            address,
            encrypt: config.comm.encrypt,
            interface: config.comm.interface.clone(),
        };
        let credentials = site.credentials(&contact)?;
        let timeout = Duration::from_secs(config.parameter_server.timeout);
        let pool = WorkScheduler::new(
            config.parameter_server.staleness,
            config.parameter_server.batches_per_lease,
            0,
        );
        let stuck = match config.comm.unmeasured_timeout() {
            Duration::ZERO => Duration::MAX,
            timeout => timeout,
        };
        let limits = LivenessTimeouts { silent: timeout, stuck };
        let trace = trace.map(TraceCollector::begin).transpose()?;
        let first_caller = (unix_time() * 1e3) as u64;
        let hub = CoordinatorService::new(pool, credentials.clone(), limits, trace, first_caller);
        let listener = RpcServer::open(listener, credentials.clone(), hub.clone(), timeout * 10)?;
        site.publish(&contact)?;
        let data = splits.train.fingerprint();
        let options = CoordinatorOptions {
            run: TrainRequest { config, resume, ..options.run },
            workers,
            ..options
        };
        Ok(Self {
            options,
            directory,
            service: hub,
            rendezvous: site,
            credentials,
            _listener: listener,
            splits,
            data,
            network: custom.network,
            loss: custom.loss,
            metrics: custom.metrics,
            hooks: RunHooks { hooks: Hooks::new(custom.hooks), step: 0 },
            trained_on: None,
            vocabulary,
            timeout,
            started,
            lost: None,
            _from: from,
        })
    }

    /// Returns the directory of the run.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the outcome of a run that had finished before and is resumed with no steps left, and
    /// prints it. Such a run requires no servers.
    ///
    /// # Errors
    /// Returns an error if a checkpoint cannot be read, or the directory cannot be written.
    pub fn finished_before(&mut self) -> Result<Option<RunOutcome>> {
        let TrainRequest { config, resume, .. } = &self.options.run;
        let assumed = self.options.workers.unwrap_or(1);
        let samples = self.splits.train.samples();
        let steps = RunSpec::with_epochs_in_steps(config, assumed, samples).run.steps;
        let Some(end) = self.directory.ended_before().cloned().filter(|end| {
            *resume == Resume::Auto && end.status == RunStatus::Finished && end.step == steps
        }) else {
            return Ok(None);
        };
        if self.newest()? != Some(self.directory.checkpoints().path(steps)) {
            return Ok(None);
        }
        self.directory.markers().end(&end)?;
        say(format_args!("the run has ended: all {steps} steps are done (run.steps)"));
        self.hooks.step = steps;
        self.notify_hooks(Ok(RunOutcome::Finished)).map(Some)
    }

    /// Trains to the end of the run. After a server was lost, hooks are called again for the steps
    /// since the last checkpoint.
    ///
    /// # Errors
    /// Returns an error if a worker or a hook fails, a server is lost and not replaced in time, the
    /// run diverges, or its directory cannot be written.
    pub fn run(mut self) -> Result<RunOutcome> {
        let mut generation = 0;
        let mut resume = self.options.run.resume.clone();
        let ended = loop {
            generation += 1;
            match self.generation(generation, &resume) {
                Ok(outcome) => break Ok(outcome),
                Err(SessionError::Failed(e)) => break Err(e),
                Err(SessionError::Lost(server)) => {
                    log::warn!("a server was lost ({server}): restarting from the last checkpoint");
                    self.lost = Some(server);
                    self.service.with(|state| {
                        state.close();
                        state.clear_lost();
                    });
                    if resume == Resume::No || !self.directory.checkpoints().steps()?.is_empty() {
                        resume = Resume::Auto;
                    }
                }
            }
        };
        if let Err(e) = &ended {
            self.mark_failed(e);
        }
        let had_ended = ended.is_ok();
        let ended = self.notify_hooks(ended);
        if let (Err(e), true) = (&ended, had_ended) {
            self.mark_failed(e);
        }
        let code = match &ended {
            Ok(outcome) => outcome.exit_code(),
            Err(e) => e.exit_code(),
        };
        self.service.with(|state| state.end(code));
        let since = Instant::now();
        while since.elapsed() < SHUTDOWN_GRACE && !self.service.with(|state| state.is_empty()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Some(trace) = &self.service.trace {
            trace.end().unwrap_or_else(|e| log::warn!("{e}"));
        }
        ended
    }

    /// Records that the run has failed.
    fn mark_failed(&self, error: &Error) {
        let step = self
            .service
            .with(|state| state.progress.get("step").and_then(serde_json::Value::as_u64));
        let failed = End {
            step: step.unwrap_or(0),
            status: RunStatus::Failed,
            reason: Some(error.message().into()),
        };
        // A start that fails before its first step keeps the recorded end of the run.
        let end =
            self.directory.ended_before().filter(|_| step.is_none()).cloned().unwrap_or(failed);
        self.directory.markers().end(&end).unwrap_or_else(|e| log::warn!("{e}"));
    }

    /// Reports the end of the run to the hooks, and returns it; an error of a hook fails a run that
    /// has ended well.
    fn notify_hooks(&mut self, ended: Result<RunOutcome>) -> Result<RunOutcome> {
        let RunHooks { hooks, step } = &mut self.hooks;
        let outcome =
            Outcome { step: *step, directory: self.directory.path(), result: ended.as_ref() };
        match (hooks.end(&outcome), ended) {
            (Err(e), Ok(_)) => Err(e),
            (Err(e), ended) => {
                log::error!("{e}");
                ended
            }
            (Ok(()), ended) => ended,
        }
    }

    /// Runs on one set of servers to the end, from the last checkpoint or from the step that the
    /// servers have reached.
    fn generation(&mut self, generation: u64, resume: &Resume) -> Result<RunOutcome, SessionError> {
        let before =
            if generation == 1 && *resume == Resume::Auto { self.previous()? } else { None };
        let config = self.options.run.config.clone();
        let threads = config.run.threads.unwrap_or(1);
        let (servers, workers) =
            match self.gather(before.as_ref().map(|(grounds, _)| &grounds.terms))? {
                None => return Ok(self.end_before_start()?),
                Some(Gathered { servers, workers, holds: false }) => (servers, workers),
                Some(Gathered { .. }) => {
                    let before =
                        before.ok_or_else(|| Error::internal("the servers belong to no run"))?;
                    return self.resume_on_servers(before, threads);
                }
            };
        let config = RunSpec::with_epochs_in_steps(&config, workers, self.splits.train.samples());
        let plan = RunSpec::plan(&config, workers, self.vocabulary, threads)?;
        let origin = self.origin(&plan, resume)?;
        let pieces = ranges_of_servers(&plan, servers.len())?;
        if generation == 1
            && let Some(warning) = oversized_range(&plan, &pieces)
        {
            log::warn!("{warning}");
        }
        let terms = RunSpec {
            generation: (unix_time() * 1e3) as u64 + generation,
            network: config.model.own.as_ref().and_then(NetworkSpec::from_network),
            config,
            workers,
            vocabulary: self.vocabulary,
            preprocessing: Some(self.splits.train.preprocessing()),
            start: origin.progress,
            pieces,
            row_width: row_width(&plan),
            addresses: servers,
            trace: self.service.trace.is_some(),
            metrics: self.metrics.iter().map(|metric| metric.name().to_owned()).collect(),
        };
        if plan.config.log.placement {
            for server in placement(&plan, &terms.pieces, &terms.addresses) {
                log::info!("placement: {server}");
            }
        }
        let mut fleet = self.fleet(&terms);
        fleet.assign(|server| Assignment {
            terms: terms.clone(),
            server,
            from: origin.from.clone(),
            with_state: origin.take == RestoreScope::Everything,
            part: origin.part,
        })?;
        let grounds = WalHeader { terms: terms.clone(), trained_on: self.trained_on.clone() };
        self.rendezvous.journal().begin(&grounds)?;
        let from = origin.from.as_deref().map_or(StartPoint::Seed, StartPoint::Checkpoint);
        self.run_session(plan, terms, fleet, from)
    }

    fn fleet(&self, terms: &RunSpec) -> ServerClients {
        ServerClients::new(terms, self.service.clone(), self.credentials.clone(), self.timeout)
    }

    fn run_session(
        &mut self,
        mut plan: ResolvedConfig,
        terms: RunSpec,
        fleet: ServerClients,
        from: StartPoint<'_>,
    ) -> Result<RunOutcome, SessionError> {
        plan.metrics.clone_from(&self.metrics);
        let journal = self.rendezvous.journal();
        let context = SessionContext {
            service: &self.service,
            directory: &self.directory,
            splits: &self.splits,
            trained_on: self.trained_on.clone(),
            started: self.started,
            journal: &journal,
            hooks: &mut self.hooks,
        };
        Session::begin(context, plan, terms, fleet, from)?.run(from)
    }

    /// Returns the last step of the previous coordinator, if it had the same settings and data.
    ///
    /// # Errors
    /// Returns an error if the write-ahead log cannot be read.
    fn previous(&self) -> Result<Option<(WalHeader, WalEntry)>> {
        let Some((grounds, entry)) = self.rendezvous.journal().read()? else { return Ok(None) };
        let RunSpec { config, workers, addresses, vocabulary, trace, .. } = &grounds.terms;
        let given = &RunSpec::with_epochs_in_steps(
            &self.options.run.config,
            *workers,
            self.splits.train.samples(),
        );
        let data = grounds.trained_on.as_ref().map(|trained_on| &trained_on.fingerprint);
        let mut expected = given.clone();
        // The file does not record which keys were given.
        expected.parallel.given.clone_from(&config.parallel.given);
        let is_same = *config == expected
            && self.options.workers.is_none_or(|count| count == *workers)
            && addresses.len() == self.options.servers
            && (vocabulary, *trace, data)
                == (&self.vocabulary, self.service.trace.is_some(), self.data.as_ref());
        if !is_same {
            log::info!(
                "the journal has other settings or data: the run resumes from its last checkpoint"
            );
        }
        Ok(is_same.then_some((grounds, entry)))
    }

    /// Resumes with servers that still hold the ranges that the previous coordinator assigned.
    fn resume_on_servers(
        &mut self,
        (grounds, entry): (WalHeader, WalEntry),
        threads: usize,
    ) -> Result<RunOutcome, SessionError> {
        let WalHeader { terms, trained_on } = grounds;
        let terms = terms.with_program(self.network.as_ref(), self.loss.as_ref())?;
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
        let answers = fleet.all(|_| ServerRequest::At { generation })?;
        for (answer, address) in answers.into_iter().zip(&terms.addresses) {
            match answer {
                ServerResponse::At(first, last)
                    if !terms.is_synchronous() || (first >= step && last <= step + 1) => {}
                other => {
                    return Err(SessionError::Lost(format!(
                        "{address}: it is at {other:?}, but the journal at step {step}"
                    )));
                }
            }
        }
        log::info!("resuming at step {step} with servers that still hold its state");
        self.trained_on = trained_on;
        self.run_session(plan, terms, fleet, StartPoint::Journal(&entry))
    }

    /// Ends the run on a signal that arrives before all servers and workers have joined.
    /// Checkpoints are kept.
    fn end_before_start(&self) -> Result<RunOutcome> {
        let why = format!(
            "{} arrived before all servers and workers joined",
            hpctrain_base::signals::last_signal().unwrap_or("a signal")
        );
        let step = self.directory.checkpoints().steps()?.last().copied().unwrap_or(0);
        self.directory.markers().end(&End {
            step,
            status: RunStatus::Preempted,
            reason: Some(why.clone()),
        })?;
        log::info!("ended at step {step}: {why}");
        Ok(RunOutcome::Preempted(why))
    }

    /// Waits for servers and, if their number is not given, for workers. Prefers the servers of
    /// `before`, if they still hold their ranges. Returns none if a signal asks the job to end.
    fn gather(&self, before: Option<&RunSpec>) -> Result<Option<Gathered>, SessionError> {
        let wanted = self.options.servers;
        let since = Instant::now();
        let given_workers = self.options.workers;
        let found = self.service.wait(|state| {
            if let Some(RunSpec { addresses, generation, workers, .. }) = before
                && state.select_previous_servers(addresses, *generation)
            {
                return Some(Ok(Some(Gathered {
                    servers: addresses.clone(),
                    workers: *workers,
                    holds: true,
                })));
            }
            let (waiting, settled) = state.waiting();
            let workers = given_workers
                .or_else(|| (waiting > 0 && settled > QUIET_PERIOD).then_some(waiting));
            let may_come_back = before.is_some() && since.elapsed() < RECONNECT_TIMEOUT;
            match workers {
                Some(workers) if state.servers() >= wanted && !may_come_back => state
                    .register_servers(wanted)
                    .map(|servers| Ok(Some(Gathered { servers, workers, holds: false }))),
                _ if hpctrain_base::signals::last_signal().is_some() => Some(Ok(None)),
                _ if state.servers() < wanted && since.elapsed() > self.timeout => {
                    let lost = self.lost.as_deref();
                    Some(Err(too_few_servers(state.servers(), wanted, self.timeout, lost)))
                }
                _ => None,
            }
        })?;
        Ok(found?)
    }

    /// Returns the starting point: step 0, or a checkpoint, which `Resume::Auto` verifies.
    fn origin(&mut self, plan: &ResolvedConfig, resume: &Resume) -> Result<Start> {
        let fresh = Start {
            progress: Progress::default(),
            from: None,
            take: RestoreScope::Everything,
            part: 0,
        };
        let (path, take) = match resume {
            Resume::No => (None, RestoreScope::Everything),
            Resume::From(path) => (Some(path.clone()), self.options.run.take),
            Resume::Auto => match (self.newest()?, self.directory.branch()?) {
                // The run started from a checkpoint of another run, and has not saved one yet.
                (None, Some(Branch { from, take })) => (Some(from), take),
                (newest, _) => (newest, RestoreScope::Everything),
            },
        };
        self.trained_on = self.data.clone().map(|fingerprint| TrainedOn {
            fingerprint,
            excluded: None,
            changes: vec![],
        });
        let Some(path) = path else { return Ok(fresh) };
        let reader = Reader::open(&path)?;
        let manifest = reader.manifest();
        for note in manifest.conform(&mut self.splits.train)? {
            log::info!("data: {note}");
        }
        if let Some(validation) = &mut self.splits.validation {
            manifest.conform(validation)?;
        }
        let names = state_names(Some(plan.update_rule), plan.ema, None);
        manifest.check(
            &path,
            &layouts(plan),
            (take == RestoreScope::Everything).then_some(&names[..]),
        )?;
        let taking = RestoreOptions {
            take,
            data: self.data.clone(),
            excluded: None,
            allow_changed_data: self.options.run.allow_changed_data,
            memory: None,
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
            let steps = plan.config.run.steps;
            let message = format!("{} is at step {at}, beyond run.steps = {steps}", path.display());
            return Err(Error::input(message).hint("raise run.steps"));
        }
        if *resume != Resume::Auto {
            self.directory.write_branch(Branch { from: path.clone(), take })?;
        }
        let part = if take == RestoreScope::Weights { reader.inference_part() } else { 0 };
        Ok(Start { progress, from: Some(path), take, part })
    }

    /// Returns the newest valid checkpoint; damaged checkpoints are skipped with a warning.
    fn newest(&self) -> Result<Option<PathBuf>> {
        let checkpoints = self.directory.checkpoints();
        let mut last = None;
        for step in checkpoints.steps()?.into_iter().rev() {
            let path = checkpoints.path(step);
            match verify(&path) {
                Ok(()) => return Ok(Some(path)),
                Err(e) if e.kind() != Kind::Damaged => return Err(e),
                Err(e) => {
                    log::warn!("skipping {}: {}", path.display(), e.message());
                    last = Some(e);
                }
            }
        }
        match last {
            None => Ok(None),
            Some(e) => Err(e
                .at("all checkpoints are damaged; the oldest")
                .hint("start a new run under another run.name, or restore a copy of a checkpoint")),
        }
    }
}

/// Returns the error if only `present` of `wanted` servers joined within the timeout. `lost` is the
/// address of a server that was lost before, with the reason.
fn too_few_servers(present: usize, wanted: usize, timeout: Duration, lost: Option<&str>) -> Error {
    let joined = format!(
        "{present} of {wanted} servers joined within {} s (parameter_server.timeout)",
        timeout.as_secs()
    );
    match lost {
        Some(server) => Error::comm(format!(
            "a server was lost ({server}), and no other replaced it: {joined}"
        ))
        .hint(
            "see why it ended; start hpctrain ps server --run RUN again, and then the coordinator \
             with --resume auto",
        ),
        None => Error::comm(joined).hint(
            "start as many servers as hpctrain ps coordinator --servers expects: hpctrain ps \
             server --run RUN",
        ),
    }
}

/// Reads all data of a checkpoint and verifies its checksums.
fn verify(path: &Path) -> Result<()> {
    let mut reader = Reader::open(path)?;
    reader.check_files()?;
    let files: Vec<String> = reader.manifest().files.keys().cloned().collect();
    files.iter().try_for_each(|file| reader.verify(file))
}

/// The servers of a generation.
struct Gathered {
    /// The host and port of each.
    servers: Vec<String>,
    /// The number of workers the run is planned for.
    workers: usize,
    /// Whether the servers hold the ranges that the previous coordinator assigned.
    holds: bool,
}

/// The starting point of a session.
struct Start {
    progress: Progress,
    from: Option<PathBuf>,
    take: RestoreScope,
    /// The part of the checkpoint that parameters are loaded from.
    part: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_missing_servers_names_the_lost_one() {
        let timeout = Duration::from_secs(5);
        let lost = Some("node7:2222: its connection ended");
        let error = too_few_servers(0, 1, timeout, lost).to_string();
        assert!(
            error.contains("a server was lost (node7:2222: its connection ended)")
                && error.contains("0 of 1 servers joined within 5 s"),
            "{error}"
        );
        let error = too_few_servers(1, 2, timeout, None).to_string();
        assert!(error.starts_with("1 of 2 servers joined within 5 s"), "{error}");
    }
}
