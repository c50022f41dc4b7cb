//! Named parameters on servers, for custom functions.
//!
//! The servers are those of training runs, in an asynchronous session without batches: each push
//! updates the parameters when it arrives. Their processes find one another in the directory
//! `parameters` of the [`Coordinator`]'s directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::address::listen;
use super::checkpoint_task;
use super::cluster_coordinator::Coordinator;
use super::coordinator_service::{CoordinatorService, LivenessTimeouts, SessionError};
use super::network_spec::NetworkSpec;
use super::parameters::{Parameters, cores, directory, place, places, plan};
use super::partitioner::ParamRange;
use super::protocol::{Assignment, ServerRequest, ServerResponse};
use super::rendezvous::{Contact, PsRendezvous};
use super::rpc_server::RpcServer;
use super::run_spec::{RunSpec, layouts, ranges_of_servers};
use super::scheduler::WorkScheduler;
use super::server::{ServerOptions, serve};
use super::server_clients::ServerClients;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::Tensor;
use hpctrain_base::signals;
use hpctrain_checkpoint::{Checkpoints, Origin, Progress, Reader, SaveContext};
use hpctrain_comm::Credentials;
use hpctrain_config::telemetry::unix_time;
use hpctrain_config::{Config, Model, OptimizerKind, ResolvedConfig, Staleness, TableUpdates};
use hpctrain_parallel::state_names;
use hpctrain_train::fresh_id;

/// The time in which servers must receive the end of the coordinator.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Runs a server for the parameters of the [`Coordinator`] of the directory `run` until it ends.
///
/// # Errors
/// Returns an error if the coordinator does not create parameters within `timeout`, or cannot be
/// reached for that time.
pub fn run_server(run: &Path, timeout: Duration) -> Result<()> {
    serve(&ServerOptions {
        rendezvous: PsRendezvous::for_run(&directory(run)),
        address: None,
        timeout,
        threads: cores(),
    })
}

/// The parameters that servers hold for custom functions.
#[derive(Debug, Clone)]
pub struct ParameterOptions {
    /// The settings: `[optimizer]`, `[lr_schedule]`, whose steps are pushes, `[parameter_server]`
    /// and `run.seed`.
    pub config: Config,
    /// The number of servers.
    pub servers: usize,
    tensors: Option<Vec<Tensor>>,
    values: BTreeMap<String, Vec<f32>>,
    from: Option<PathBuf>,
}

impl ParameterOptions {
    /// Creates the options of these tensors, which are initialized by their [`Tensor::init`] and
    /// `run.seed`.
    pub fn tensors(config: Config, servers: usize, tensors: Vec<Tensor>) -> Self {
        Self { tensors: Some(tensors), ..Self::model(config, servers) }
    }

    /// Creates the options of the tensors of the configuration's model, for
    /// [`Parameters::pull_model`] and [`Parameters::push_model`]. `batch.global` is the number of
    /// samples of a push.
    pub fn model(config: Config, servers: usize) -> Self {
        Self { config, servers, tensors: None, values: BTreeMap::new(), from: None }
    }

    /// Sets the initial values of a tensor, row-major.
    #[must_use]
    pub fn with_values(mut self, tensor: impl Into<String>, values: Vec<f32>) -> Self {
        self.values.insert(tensor.into(), values);
        self
    }

    /// Starts with the values and the optimizer state of a checkpoint.
    #[must_use]
    pub fn from_checkpoint(self, checkpoint: impl Into<PathBuf>) -> Self {
        Self { from: Some(checkpoint.into()), ..self }
    }

    /// Returns the configuration of the servers, and the tensors if they are not those of its
    /// model.
    fn settings(&self) -> Result<(Config, Option<NetworkSpec>)> {
        let mut config = self.config.clone();
        match config.parameter_server.staleness {
            Staleness::None | Staleness::Bound(0) => {}
            bound @ Staleness::Bound(_) => {
                return Err(Error::input(format!(
                    "parameter_server.staleness = {bound}, but each push of a function is applied \
                     when it arrives"
                ))
                .hint("omit the key, or set it to \"none\""));
            }
        }
        config.parameter_server.staleness = Staleness::None;
        if config.optimizer.tables == TableUpdates::Sparse {
            return Err(Error::input(
                "optimizer.tables = sparse, but functions pull and push whole tensors",
            )
            .hint("omit the key"));
        }
        config.optimizer.tables = TableUpdates::Dense;
        if matches!(config.optimizer.kind, OptimizerKind::Lamb | OptimizerKind::Lars) {
            return Err(Error::input(
                "optimizer.kind = lamb and lars require norms of whole tensors, which no server \
                 has",
            )
            .hint("use another optimizer, such as adamw"));
        }
        let network = match &self.tensors {
            None => config.model.own.as_ref().and_then(NetworkSpec::from_network),
            Some(tensors) => {
                check_tensors(tensors)?;
                let network = NetworkSpec::from_tensors(tensors.clone());
                config.model = Model::from_custom(network.model());
                Some(network)
            }
        };
        Ok((config, network))
    }
}

/// Refuses tensors that have no elements or the same name.
fn check_tensors(tensors: &[Tensor]) -> Result<()> {
    if tensors.is_empty() {
        return Err(Error::input("there are no parameters").hint("give at least one tensor"));
    }
    let mut names = std::collections::BTreeSet::new();
    for tensor in tensors {
        let Tensor { name, shape, .. } = tensor;
        if tensor.is_empty() {
            return Err(Error::input(format!("the parameter {name} of shape {shape:?} is empty"))
                .hint("each dimension must be at least 1"));
        }
        if !names.insert(name) {
            return Err(Error::input(format!("two parameters have the name {name}"))
                .hint("give each tensor another name"));
        }
    }
    Ok(())
}

/// The coordinator's side of [parameters on servers](Coordinator::create_parameters). When it is
/// dropped, the servers end.
///
/// ```
/// use std::time::Duration;
///
/// use hpctrain_base::error::Result;
/// use hpctrain_base::layout::{Init, Tensor};
/// use hpctrain_config::{Sources, load};
/// use hpctrain_parameter_server::{
///     Coordinator, Functions, ParameterOptions, run_server, run_worker,
/// };
///
/// # fn main() -> Result<()> {
/// let folder = tempfile::tempdir().unwrap();
/// let run = folder.path();
/// let timeout = Duration::from_secs(10);
/// let settings = ["optimizer.kind=sgd", "optimizer.lr=0.1", "lr_schedule.kind=constant",
///                 "lr_schedule.warmup=0", "optimizer.weight_decay=0.0"];
/// let overrides = settings.map(String::from);
/// let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() })?;
/// let values: Vec<f32> = std::thread::scope(|scope| -> Result<_> {
///     // Servers and workers are usually other processes.
///     scope.spawn(|| run_server(run, timeout));
///     scope.spawn(|| {
///         // One step towards the minimum of (w - target)² / 2.
///         let functions = Functions::with_state(|worker| worker.parameters()).with_context(
///             "step",
///             |parameters, target: f32, _| {
///                 parameters.pull()?;
///                 let distance = parameters.values("w")?[0] - target;
///                 parameters.gradient("w")?[0] = distance;
///                 parameters.push()
///             },
///         );
///         run_worker(run, timeout, functions)
///     });
///     let coordinator = Coordinator::open(run, None, timeout)?;
///     let tensors = vec![Tensor::new("w", &[1], Init::Zeros)];
///     let options = ParameterOptions::tensors(config, 1, tensors).with_values("w", vec![9.0]);
///     let servers = coordinator.create_parameters(options)?;
///     for _ in 0..100 {
///         coordinator.schedule("step", &4.0)?;
///     }
///     coordinator.join()?;
///     let mut parameters = servers.connect()?;
///     parameters.pull()?;
///     coordinator.end();
///     Ok(parameters.values("w")?.to_vec())
/// })?;
/// assert!((values[0] - 4.0).abs() < 0.01, "{values:?}");
/// # Ok(())
/// # }
/// ```
pub struct ParameterServers {
    run: PathBuf,
    timeout: Duration,
    servers: usize,
    config: Config,
    network: Option<NetworkSpec>,
    plan: ResolvedConfig,
    service: Arc<CoordinatorService>,
    credentials: Credentials,
    session: Option<ServerSession>,
    generations: u64,
    _listener: RpcServer,
}

/// The servers that hold the parameters.
struct ServerSession {
    terms: RunSpec,
    clients: Mutex<ServerClients>,
    /// The number of snapshots so far.
    snapshots: u64,
}

impl Coordinator {
    /// Waits for servers, which [`run_server`] runs, and creates parameters on them. Functions of
    /// workers reach the parameters by [`WorkerContext::parameters`](super::WorkerContext), and
    /// the coordinator by [`ParameterServers::connect`].
    ///
    /// The parameters are divided among the servers as `parameter_server.partition` says. Each push
    /// updates them when it arrives, so that pushes of several workers do not wait for one another,
    /// and the result depends on their order.
    ///
    /// # Errors
    /// Returns an error if too few servers come within the coordinator's timeout, a setting is not
    /// supported, or the checkpoint has other tensors. Returns an error if the directory has
    /// checkpoints of earlier parameters and the options do not start from a checkpoint.
    pub fn create_parameters(&self, options: ParameterOptions) -> Result<ParameterServers> {
        let (config, network) = options.settings()?;
        let plan = plan(&config)?;
        // An error must come before the servers are waited for.
        ranges_of_servers(&plan, options.servers)?;
        let places = places(&layouts(&plan));
        for (name, values) in &options.values {
            check_values(&places, name, values)?;
        }
        let checkpoints = Checkpoints::new(checkpoint_root(self.run()));
        if options.from.is_some() && !options.values.is_empty() {
            return Err(Error::input("both initial values and a checkpoint are given")
                .hint("omit one of them"));
        }
        if options.from.is_none()
            && let Some(step) = checkpoints.steps()?.last()
        {
            let path = checkpoints.path(*step);
            return Err(Error::input(format!(
                "{} is a checkpoint of earlier parameters",
                path.display()
            ))
            .hint("start from it with ParameterOptions::from_checkpoint, or use a new directory"));
        }
        let site = PsRendezvous::for_run(&directory(self.run()));
        let (listener, address) =
            listen(config.parameter_server.address.as_deref(), config.comm.interface.as_deref())?;
        site.open()?;
        let contact = Contact {
            address,
            encrypt: config.comm.encrypt,
            interface: config.comm.interface.clone(),
        };
        let credentials = site.credentials(&contact)?;
        let timeout = self.timeout();
        let limits = LivenessTimeouts { silent: timeout, stuck: timeout };
        let first_peer = (unix_time() * 1e3) as u64;
        let idle = WorkScheduler::new(Staleness::None, 1, 0);
        let service = CoordinatorService::new(idle, credentials.clone(), limits, None, first_peer);
        let listener =
            RpcServer::open(listener, credentials.clone(), service.clone(), timeout * 10)?;
        site.publish(&contact)?;
        let mut created = ParameterServers {
            run: self.run().into(),
            timeout,
            servers: options.servers,
            config,
            network,
            plan,
            service,
            credentials,
            session: None,
            generations: 0,
            _listener: listener,
        };
        created.assign(options.from.as_deref())?;
        if !options.values.is_empty() {
            created.connect()?.write(&options.values)?;
        }
        Ok(created)
    }
}

/// Returns the error of parameters whose restore has failed.
fn unassigned() -> Error {
    Error::comm("no servers hold the parameters")
        .hint("restore them from a checkpoint with ParameterServers::restore")
}

/// Returns the directory of the checkpoints.
fn checkpoint_root(run: &Path) -> PathBuf {
    run.join("checkpoints")
}

impl ParameterServers {
    /// Waits for servers, and assigns them the parameters.
    fn assign(&mut self, from: Option<&Path>) -> Result<()> {
        let start = from.map(Reader::open).transpose()?.map_or_else(Progress::default, |reader| {
            Progress { position: 0, ..reader.manifest().progress() }
        });
        // From here on the servers hold nothing until they are assigned the parameters anew.
        self.session = None;
        let addresses = self.wait_for_servers()?;
        self.generations += 1;
        let terms = RunSpec {
            generation: (unix_time() * 1e3) as u64 + self.generations,
            config: self.config.clone(),
            network: self.network.clone(),
            workers: 1,
            vocabulary: None,
            preprocessing: None,
            start,
            pieces: ranges_of_servers(&self.plan, self.servers)?,
            row_width: None,
            addresses,
            trace: false,
            metrics: vec![],
        };
        let service = self.service.clone();
        let credentials = self.credentials.clone();
        let mut clients = ServerClients::new(&terms, service, credentials, self.timeout);
        clients
            .assign(|server| Assignment {
                terms: terms.clone(),
                server,
                from: from.map(Into::into),
                with_state: true,
                part: 0,
            })
            .map_err(failure)?;
        let idle = WorkScheduler::new(Staleness::None, 1, 0);
        self.service.with(|state| state.open(terms.clone(), idle));
        self.session = Some(ServerSession { terms, clients: Mutex::new(clients), snapshots: 0 });
        Ok(())
    }

    /// Waits for servers, and returns their addresses.
    fn wait_for_servers(&self) -> Result<Vec<String>> {
        self.service.with(|state| {
            state.close();
            state.clear_lost();
        });
        let since = Instant::now();
        let found = self.service.wait(|state| match state.register_servers(self.servers) {
            Some(addresses) => Some(Ok(addresses)),
            None if since.elapsed() > self.timeout || signals::last_signal().is_some() => {
                Some(Err(state.servers()))
            }
            None => None,
        });
        found.map_err(failure)?.map_err(|present| {
            Error::comm(format!(
                "{present} of {} parameter servers came within {} s",
                self.servers,
                self.timeout.as_secs()
            ))
            .hint("start as many processes that call servers::run_server with this directory")
        })
    }

    fn session(&self) -> Result<&ServerSession> {
        self.session.as_ref().ok_or_else(unassigned)
    }

    /// Returns a connection to the parameters, as workers have it.
    ///
    /// # Errors
    /// Returns an error if the servers were lost and the parameters are not restored.
    pub fn connect(&self) -> Result<Parameters> {
        self.session()?;
        Parameters::connect(&self.run, self.timeout)
    }

    /// Saves parameters and optimizer state as a checkpoint, whose step is the number of pushes so
    /// far, in the directory `checkpoints` of the coordinator's directory; returns its path. The
    /// last `checkpoint.keep` ones are kept. Pushes that arrive during the copy may be in a part of
    /// it, so wait with [`Coordinator::join`] for a state between two calls.
    ///
    /// # Errors
    /// Returns an error if a server is lost, or a file cannot be written.
    pub fn save(&mut self) -> Result<PathBuf> {
        let session = self.session.as_mut().ok_or_else(unassigned)?;
        session.snapshots += 1;
        let cut = session.snapshots;
        let RunSpec { generation, start, ref addresses, .. } = session.terms;
        let clients = session.clients.get_mut().unwrap_or_else(PoisonError::into_inner);
        let copied = clients.all(|_| ServerRequest::Cut { generation, cut }).map_err(failure)?;
        let updates = copied.iter().filter_map(|answer| match answer {
            ServerResponse::Copied { updates } => Some(*updates),
            _ => None,
        });
        let updates = updates.max().unwrap_or(0);
        let progress =
            Progress { step: start.step + updates, updates: start.updates + updates, position: 0 };
        let job = SaveContext {
            checkpoints: Checkpoints::new(checkpoint_root(&self.run)),
            config: self.plan.config.clone(),
            preprocessing: None,
            data: None,
            origin: Origin {
                ranks: addresses.len(),
                hosts: addresses.clone(),
                mpi: "servers over TCP".into(),
                ..Origin::default()
            },
            id: fresh_id(),
            records: vec![],
            state: state_names(Some(self.plan.update_rule), self.plan.ema, None),
        };
        let root = job.checkpoints.root();
        std::fs::create_dir_all(root).map_err(|e| Error::io("create", root, e))?;
        let started = Instant::now();
        checkpoint_task::write(&job, &session.clients, generation, cut, progress, started)
            .map_err(failure)?;
        Ok(job.checkpoints.path(progress.step))
    }

    /// Waits for servers, also new ones, and gives them the parameters and the optimizer state of a
    /// checkpoint: after a server was lost, or to go back. Workers connect again with their next
    /// pull.
    ///
    /// # Errors
    /// Returns an error if too few servers come in time, or the checkpoint cannot be read.
    pub fn restore(&mut self, checkpoint: &Path) -> Result<()> {
        self.assign(Some(checkpoint))
    }
}

impl Drop for ParameterServers {
    fn drop(&mut self) {
        self.service.with(|state| state.end(0));
        let since = Instant::now();
        while since.elapsed() < SHUTDOWN_GRACE && !self.service.with(|state| state.is_empty()) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Returns the error of a request to servers.
fn failure(error: SessionError) -> Error {
    match error {
        SessionError::Failed(e) => e,
        SessionError::Lost(server) => {
            Error::comm(format!("a parameter server was lost ({server})"))
                .hint("start another server, and restore the parameters from their last checkpoint")
        }
    }
}

/// Refuses initial values of a tensor that does not exist, or of another length.
fn check_values(places: &BTreeMap<String, ParamRange>, name: &str, values: &[f32]) -> Result<()> {
    let expected = place(places, name)?.range.len();
    if values.len() == expected {
        return Ok(());
    }
    Err(Error::input(format!(
        "{} initial values for the parameter {name} of {expected} elements",
        values.len()
    ))
    .hint("give all elements of the tensor, row-major"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Functions, run_worker};
    use hpctrain_base::error::Kind;
    use hpctrain_base::layout::Init;
    use hpctrain_config::{Sources, load};

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn config(more: &[&str]) -> Config {
        let settings = [
            "optimizer.kind=sgd",
            "optimizer.momentum=0.0",
            "optimizer.lr=0.5",
            "optimizer.weight_decay=0.0",
            "optimizer.grad_clip=0",
            "lr_schedule.kind=constant",
            "lr_schedule.warmup=0",
            "parameter_server.address='127.0.0.1'",
        ];
        let overrides: Vec<String> =
            settings.iter().chain(more).map(|setting| (*setting).into()).collect();
        load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap().0
    }

    fn tensors() -> Vec<Tensor> {
        vec![Tensor::new("w", &[30, 4], Init::Normal(1.0)), Tensor::new("b", &[5], Init::Zeros)]
    }

    /// Runs `test` with a coordinator and this number of servers.
    fn with_servers(servers: usize, test: impl FnOnce(&Coordinator)) {
        let folder = tempfile::tempdir().unwrap();
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), TIMEOUT).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..servers {
                scope.spawn(|| run_server(folder.path(), TIMEOUT).unwrap());
            }
            test(&coordinator);
        });
    }

    /// Adds the distance of each parameter from a target to its gradient.
    fn add_distance(parameters: &mut Parameters, target: f32) -> Result<()> {
        parameters.pull()?;
        for name in ["w", "b"] {
            let distances: Vec<f32> =
                parameters.values(name)?.iter().map(|value| value - target).collect();
            let gradient = parameters.gradient(name)?;
            gradient.iter_mut().zip(distances).for_each(|(to, distance)| *to += distance);
        }
        Ok(())
    }

    #[test]
    fn functions_pull_and_push_parameters_that_checkpoints_keep() {
        with_servers(2, |coordinator| {
            let options =
                ParameterOptions::tensors(config(&[]), 2, tensors()).with_values("b", vec![9.0; 5]);
            let mut servers = coordinator.create_parameters(options).unwrap();
            let pieces = &servers.session().unwrap().terms.pieces;
            assert!(pieces.iter().all(|of_server| !of_server.is_empty()), "{pieces:?}");
            let mut parameters = servers.connect().unwrap();
            parameters.pull().unwrap();
            assert_eq!(parameters.values("b").unwrap(), [9.0; 5]);
            let initial = parameters.values("w").unwrap().to_vec();
            assert!(initial.iter().any(|value| value.abs() > 0.5), "{initial:?}");
            let names: Vec<&str> =
                parameters.tensors().map(|tensor| tensor.name.as_str()).collect();
            assert_eq!(names, ["w", "b"]);

            let functions = || {
                Functions::with_state(|worker| worker.parameters()).with_context(
                    "step",
                    |parameters, target: f32, _| {
                        add_distance(parameters, target)?;
                        parameters.push()
                    },
                )
            };
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    let worker = || run_worker(coordinator.run(), TIMEOUT, functions()).unwrap();
                    scope.spawn(worker);
                }
                for _ in 0..60 {
                    coordinator.schedule("step", &3.0).unwrap();
                }
                coordinator.join().unwrap();
                coordinator.end();
            });
            parameters.pull().unwrap();
            for name in ["w", "b"] {
                let values = parameters.values(name).unwrap();
                assert!(values.iter().all(|value| (value - 3.0).abs() < 1e-3), "{values:?}");
            }
            let trained = parameters.values("w").unwrap().to_vec();
            let saved = servers.save().unwrap();
            assert!(saved.ends_with("checkpoints/step-00000060"), "{}", saved.display());
            let mut read = vec![0.0; 120];
            Reader::open(&saved).unwrap().read("w", 0, None, 0..120, &mut read).unwrap();
            assert_eq!(read, trained);

            // The pushes of two connections of one process both count.
            let mut other = servers.connect().unwrap();
            for connection in [&mut parameters, &mut other] {
                connection.pull().unwrap();
                connection.gradient("b").unwrap().fill(1.0);
            }
            assert_eq!(parameters.push(), Ok(0));
            assert_eq!(other.push(), Ok(1));
            parameters.pull().unwrap();
            let moved = parameters.values("b").unwrap()[0];
            assert!((moved - 2.0).abs() < 1e-3, "{moved}");
            // A push clears the gradients.
            parameters.push().unwrap();
            parameters.pull().unwrap();
            assert_eq!(parameters.values("b").unwrap()[0], moved);

            servers.restore(&saved).unwrap();
            // The pull connects again.
            parameters.pull().unwrap();
            assert_eq!(parameters.values("w").unwrap(), trained);
            parameters.push().unwrap();
            assert!(servers.save().unwrap().ends_with("step-00000061"));
            drop(servers);

            let again = ParameterOptions::tensors(config(&[]), 2, tensors());
            let error = coordinator.create_parameters(again).map(drop).unwrap_err().to_string();
            assert!(
                error.contains("step-00000061 is a checkpoint of earlier parameters\nhint: start"),
                "{error}"
            );
        });
    }

    #[test]
    fn gradients_are_clipped_and_must_be_finite() {
        with_servers(1, |coordinator| {
            let config = config(&["optimizer.grad_clip=1.0", "optimizer.lr=1.0"]);
            let options = ParameterOptions::tensors(config, 1, tensors());
            let servers = coordinator.create_parameters(options).unwrap();
            let mut parameters = servers.connect().unwrap();
            let message = |result: Result<u64>| result.unwrap_err().to_string();
            assert!(message(parameters.push()).contains("were not pulled"));
            let error = parameters.values("b").unwrap_err().to_string();
            assert!(error.contains("the parameter b was not pulled"), "{error}");
            parameters.pull().unwrap();
            let error = parameters.values("c").unwrap_err().to_string();
            assert_eq!(error, "there is no parameter c\nhint: the parameters are b, w");
            parameters.gradient("b").unwrap().copy_from_slice(&[3.0, 0.0, 4.0, 0.0, 0.0]);
            parameters.push().unwrap();
            parameters.pull().unwrap();
            let values = parameters.values("b").unwrap();
            let expected = [-0.6, 0.0, -0.8, 0.0, 0.0];
            assert!(values.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-4), "{values:?}");
            parameters.gradient("w").unwrap()[7] = f32::NAN;
            let error = parameters.push().unwrap_err();
            assert_eq!(error.kind(), Kind::Numeric);
            assert_eq!(error.message(), "the gradient of w is not finite");
            parameters.push().unwrap();
        });
    }

    #[test]
    fn unusable_options_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let second = Duration::from_secs(1);
        let coordinator = Coordinator::open(folder.path(), Some("127.0.0.1"), second).unwrap();
        let refused = |options: ParameterOptions| {
            coordinator.create_parameters(options).map(drop).unwrap_err().to_string()
        };
        let with = |more: &[&str]| ParameterOptions::tensors(config(more), 1, tensors());
        let cases = [
            (with(&["parameter_server.staleness=4"]), "staleness = 4, but each push of a function"),
            (with(&["optimizer.kind=lamb"]), "lamb and lars require norms of whole tensors"),
            (with(&[]).with_values("c", vec![1.0]), "there is no parameter c\nhint: the param"),
            (with(&[]).with_values("b", vec![1.0]), "1 initial values for the parameter b of 5"),
            (
                with(&[]).with_values("b", vec![1.0; 5]).from_checkpoint("x"),
                "both initial values and a checkpoint",
            ),
            (ParameterOptions::tensors(config(&[]), 1, vec![]), "there are no parameters"),
            (
                ParameterOptions::tensors(config(&[]), 1, [tensors(), tensors()].concat()),
                "two parameters have the name w",
            ),
            (
                ParameterOptions::tensors(
                    config(&[]),
                    1,
                    vec![Tensor::new("e", &[2, 0], Init::Ones)],
                ),
                "the parameter e of shape [2, 0] is empty",
            ),
            (with(&[]), "0 of 1 parameter servers came within 1 s"),
        ];
        for (options, expected) in cases {
            let error = refused(options);
            assert!(error.contains(expected) && error.contains("\nhint: "), "{error}");
        }
        let nowhere = tempfile::tempdir().unwrap();
        let error = Parameters::connect(nowhere.path(), second).map(drop).unwrap_err().to_string();
        assert!(error.contains("must call Coordinator::create_parameters"), "{error}");
    }
}
