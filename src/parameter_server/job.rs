//! Whole runs with parameter servers, with custom data, networks and hooks: as ranks of one job, or
//! as separate processes.

use std::path::Path;
use std::time::Duration;

use super::address::host_of;
use super::coordinator::{CoordinatorOptions, CoordinatorRun};
use super::rendezvous::PsRendezvous;
use super::server::{ServerOptions, serve};
use super::worker::{WorkerOptions, config_of_run, work};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::spawn::spawn_scoped;
use hpctrain_checkpoint::run_dir::RunOutcome;
use hpctrain_comm::{Comm, Group, single};
use hpctrain_config::Config;
use hpctrain_config::gpu_assignment::{Gpu, assign_gpus, check_cpu, cpu_name, open_cpu};
use hpctrain_config::telemetry::say;
use hpctrain_config::telemetry::startup_summary::keys_without_effect;
use hpctrain_config::topology::Topology;
use hpctrain_cpu::Cpu;
use hpctrain_train::evaluate::RunAnnouncement;
use hpctrain_train::{Customization, TrainRequest, check_same_config};

/// The name of the coordinator's log file, without its extension.
const LOG: &str = "coordinator";

/// Runs a whole training with parameter servers: the last `servers` ranks of the job hold the
/// parameters, the first of them also coordinates, and the others compute gradients. Without
/// servers it is the same as [`hpctrain_train::train`]. Collective over the world of `comm`.
///
/// All ranks pass a [`Customization`] with the same data, network, loss and metrics. The hooks of
/// the coordinating rank are called, once for each event; those of other ranks are not. With
/// `parameter_server.staleness = 0`, the default, the run has the same bits as without servers.
///
/// ```
/// use hpctrain_base::error::Result;
/// use hpctrain_config::{Sources, load};
/// use hpctrain_data::{SampleMut, SampleSizes, Source};
/// use hpctrain_engine::{Splits, on_threads};
/// use hpctrain_parameter_server as servers;
/// use hpctrain_train::{Customization, TrainRequest};
///
/// /// Points of a line.
/// struct Line;
///
/// impl Source for Line {
///     fn samples(&self) -> u64 {
///         64
///     }
///
///     fn sizes(&self) -> SampleSizes {
///         SampleSizes { features: 1, values: 1, ..SampleSizes::default() }
///     }
///
///     fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
///         into.features[0] = sample as f32 / 32.0 - 1.0;
///         into.values[0] = 2.0 * into.features[0] + 1.0;
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let root = format!("run.root={}", folder.path().display());
/// let settings = ["model.kind=layers", "model.input=[1]",
///                 "model.layers=[{kind='dense', units=1}]", "loss.kind=mse", "run.steps=3",
/// #               &root,
///                 "batch.global=8"];
/// let overrides = settings.map(String::from);
/// let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() })?;
/// // Two workers and a server, as threads of this process.
/// let ended = on_threads(3, |comm| {
///     let data = Splits { name: "a line".into(), train: Box::new(Line), validation: None };
///     let custom = Customization { data: Some(data), ..Customization::default() };
///     servers::train(comm, &TrainRequest::new(config.clone(), "line"), custom, 1)
/// })?;
/// assert_eq!(ended.len(), 3);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Returns the error that ended the run, on all ranks, or an error if no rank is left to compute
/// gradients.
pub fn train(
    comm: &Comm<Cpu>,
    request: &TrainRequest,
    custom: Customization<'_>,
    servers: usize,
) -> Result<RunOutcome> {
    if servers == 0 {
        return hpctrain_train::train(comm, request, custom, None);
    }
    let world = comm.world();
    check_same_config(&world, &custom.with_custom_network(&request.config))?;
    let order = launch_order(comm)?;
    let workers = order.len().saturating_sub(servers);
    if workers == 0 {
        return Err(Error::input(format!(
            "{servers} servers of {} ranks leave none to train",
            order.len()
        ))
        .hint(format!("start {} ranks or more", servers + 1))
        .shared());
    }
    let topology = Topology::gather(&world, comm.node().host)?;
    let serves = |rank: usize| usize::from(order[rank] >= workers);
    let role = comm.role(&(0..order.len()).map(serves).collect::<Vec<_>>())?;
    let rank = ServedRank {
        announcement: &RunAnnouncement::new(comm),
        peers: comm,
        comm: &role,
        server: order[comm.rank()].checked_sub(workers),
        workers,
        servers,
        threads: request.threads.unwrap_or(topology.threads()),
    };
    let ended = match rank.run(request.clone(), custom)? {
        RankEnd::Coordinator(ended) => Some(ended),
        RankEnd::Other(Ok(_)) => None,
        // The coordinator has the error of a worker or a server as well.
        RankEnd::Other(Err(e)) => {
            log::warn!("{e}");
            None
        }
    };
    share(&world, ended)
}

/// Returns the position of each rank in the order of the launcher's numbers.
fn launch_order(comm: &Comm<Cpu>) -> Result<Vec<usize>> {
    let launched = (comm.launch_rank() as u64).to_le_bytes().to_vec();
    let numbers = comm.world().gather_bytes(launched).wait()?;
    let mut order: Vec<usize> = (0..numbers.len()).collect();
    order.sort_by_key(|rank| numbers[*rank].iter().rev().copied().collect::<Vec<u8>>());
    let mut positions = vec![0; order.len()];
    order.into_iter().enumerate().for_each(|(position, rank)| positions[rank] = position);
    Ok(positions)
}

/// Returns the end of the run, which the coordinator's rank has, on all ranks.
fn share(world: &Group<Cpu>, ended: Option<Result<RunOutcome>>) -> Result<RunOutcome> {
    let mine = match &ended {
        None => vec![],
        Some(ended) => serde_json::to_vec(ended).map_err(|e| Error::internal(e.to_string()))?,
    };
    let all = world.gather_bytes(mine).wait()?;
    let found = all
        .iter()
        .find(|bytes| !bytes.is_empty())
        .ok_or_else(|| Error::internal("no rank coordinated the run"))?;
    let ended: Result<RunOutcome> = serde_json::from_slice(found)
        .map_err(|e| Error::comm(format!("the coordinator sent a malformed end: {e}")))?;
    ended.map_err(Error::shared)
}

/// A rank of a job with parameter servers.
pub struct ServedRank<'a> {
    /// Sends all ranks of the job the directory of the run.
    pub announcement: &'a RunAnnouncement,
    /// The ranks that work or serve.
    pub peers: &'a Comm<Cpu>,
    /// The ranks with the same role as this one.
    pub comm: &'a Comm<Cpu>,
    /// The index of the server that this rank is, unless it is a worker. The first server
    /// coordinates.
    pub server: Option<usize>,
    /// The number of workers.
    pub workers: usize,
    /// The number of servers.
    pub servers: usize,
    /// The number of compute threads of a rank whose configuration has no `run.threads`.
    pub threads: usize,
}

/// The end of a rank.
pub enum RankEnd {
    /// The end of the run, on the rank that coordinates it.
    Coordinator(Result<RunOutcome>),
    /// The exit code of the run on another rank, or the error of that rank.
    Other(Result<i32>),
}

impl ServedRank<'_> {
    /// Works, serves or coordinates until the run has ended.
    ///
    /// # Errors
    /// Returns an error on all ranks if the run cannot start.
    pub fn run(&self, mut request: TrainRequest, custom: Customization<'_>) -> Result<RankEnd> {
        let timeout = Duration::from_secs(request.config.parameter_server.timeout);
        let config = request.config.clone();
        // Ranks may have different numbers: the coordinator's is not for the others.
        let threads = request.config.run.threads.take().unwrap_or(self.threads);
        // No coordinator must wait for workers that have no device.
        let found = match self.server {
            None => find_gpu(self.comm, &config),
            Some(_) => Ok(None),
        };
        let gpu = self.peers.world().all_ok(found)?;
        let (opened, custom) = if self.server == Some(0) {
            let options = CoordinatorOptions {
                run: request,
                servers: self.servers,
                workers: Some(self.workers),
                log: LOG.into(),
            };
            (CoordinatorRun::open(options, custom).map(Some), Customization::default())
        } else {
            (Ok(None), custom)
        };
        let opened = self.peers.world().all_ok(opened)?;
        let run = self.announcement.announce(opened.as_ref().map(CoordinatorRun::directory))?;
        let rendezvous = PsRendezvous::for_run(&run);
        if self.server.is_none() {
            let options = WorkerOptions { rendezvous, timeout, threads, leaves_on_signal: false };
            return Ok(RankEnd::Other(work_on(gpu, &config, &options, custom)));
        }
        let server = ServerOptions {
            rendezvous,
            address: config.parameter_server.address.as_deref().and_then(host_of),
            timeout,
            threads,
        };
        Ok(match opened {
            Some(opened) => RankEnd::Coordinator(serve_alongside(opened, &server)),
            None => RankEnd::Other(serve(&server).map(|()| 0)),
        })
    }
}

/// Coordinates a run to its end, and serves in another thread of the same process.
///
/// # Errors
/// Returns the error that ended the run, or an error if the system cannot start a thread.
pub fn serve_alongside(run: CoordinatorRun<'_>, server: &ServerOptions) -> Result<RunOutcome> {
    std::thread::scope(|scope| {
        let serving = spawn_scoped(scope, "server", || serve(server))?;
        let ended = run.run();
        // The coordinator's error says more than that of its server.
        match serving.join() {
            Ok(Err(e)) if ended.is_ok() => log::warn!("{e}"),
            _ => {}
        }
        ended
    })
}

/// Coordinates a run whose `servers` servers and whose workers are separate processes:
/// [`serve_run`] and [`work_for_run`] with the directory of the run, which is printed. `workers` is
/// the number of workers that the run is planned for; by default it is `parameter_server.workers`,
/// else the number of workers connected at the start.
///
/// # Errors
/// Returns the error that ended the run.
pub fn coordinate(
    request: TrainRequest,
    custom: Customization<'_>,
    servers: usize,
    workers: Option<usize>,
) -> Result<RunOutcome> {
    let options = CoordinatorOptions { run: request, servers, workers, log: LOG.into() };
    let mut opened = CoordinatorRun::open(options, custom)?;
    match opened.finished_before()? {
        Some(outcome) => Ok(outcome),
        None => {
            say(format_args!("run        {}\n", opened.directory().display()));
            opened.run()
        }
    }
}

/// Runs a parameter server of the run in a directory until the run ends. It listens at `address`,
/// or as `parameter_server.address` and `comm.interface` say. It needs no custom network: the
/// coordinator sends the tensors.
///
/// # Errors
/// Returns an error if the server cannot listen on the address, or the coordinator is gone for
/// longer than `timeout`.
pub fn serve_run(run: &Path, address: Option<String>, timeout: Duration) -> Result<()> {
    serve(&ServerOptions {
        rendezvous: PsRendezvous::for_run(run),
        address,
        timeout,
        threads: cores(),
    })
}

/// Runs a worker of the run in a directory until the run ends or a signal asks this process to
/// leave; returns the exit code. `custom` has the same data, network, loss and metrics as the
/// coordinator's; its hooks are not called.
///
/// # Errors
/// Returns an error if the coordinator is gone for longer than `timeout`, the data cannot be read,
/// the run trains another network, or the device fails.
pub fn work_for_run(run: &Path, timeout: Duration, custom: Customization<'_>) -> Result<i32> {
    let options = WorkerOptions {
        rendezvous: PsRendezvous::for_run(run),
        timeout,
        threads: cores(),
        leaves_on_signal: true,
    };
    match config_or_code(&options)? {
        Err(code) => Ok(code),
        Ok(config) => {
            let gpu = find_gpu(&single(), &config)?;
            work_on(gpu, &config, &options, custom)
        }
    }
}

/// Returns the GPU of a worker, or none if `run.device` selects CPUs. Collective over the workers
/// of a job.
fn find_gpu(comm: &Comm<Cpu>, config: &Config) -> Result<Option<Gpu>> {
    let gpu = assign_gpus(comm, config)?;
    if gpu.is_none() {
        comm.world().all_ok(check_cpu(config))?;
        if comm.rank() == 0
            && let Some(note) = keys_without_effect(config)
        {
            log::warn!("{note}");
        }
    }
    Ok(gpu)
}

/// Runs a worker on a GPU, or on CPUs.
fn work_on(
    gpu: Option<Gpu>,
    config: &Config,
    options: &WorkerOptions,
    custom: Customization<'_>,
) -> Result<i32> {
    match gpu {
        None => work(options, custom, &cpu_name(config), open_cpu),
        Some(gpu) => work(options, custom, &gpu.name()?, |plan| gpu.backend(plan)),
    }
}

/// Returns the configuration of the run once it accepts workers, or the exit code of this process.
/// A worker that comes after the end of a finished run ends at once.
fn config_or_code(options: &WorkerOptions) -> Result<std::result::Result<Config, i32>> {
    let rendezvous = &options.rendezvous;
    if rendezvous.has_finished() {
        let timeout = options.timeout.min(PsRendezvous::FINISHED_GRACE);
        match config_of_run(&WorkerOptions { timeout, ..options.clone() }) {
            Err(e) if e.kind() != Kind::Comm => return Err(e),
            Err(_) if rendezvous.has_finished() => {
                rendezvous.say_ended();
                return Ok(Err(0));
            }
            // A coordinator that continues the run has started.
            Err(_) => {}
            Ok(found) => return Ok(found),
        }
    }
    config_of_run(options).or_else(|e| match rendezvous.exit_code() {
        // The coordinator's own message says why a run has failed.
        Some(code) if e.kind() == Kind::Comm && code != 1 => {
            rendezvous.say_ended();
            Ok(Err(code))
        }
        _ => Err(e),
    })
}

/// Returns the number of cores that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
