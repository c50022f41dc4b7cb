//! Runs with parameter servers: as ranks of one job, as elastic processes, or as threads.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::rank_roles::{RankAssignment, RankRole};
use crate::backend::cpu::Cpu;
use crate::comm::{Comm, single};
use crate::config::{self, Batch, Config, ParameterServer};
use crate::error::{Error, Kind, Result};
use crate::gpu_assignment::{assign_gpus, check_cpu, cpu_name, open_cpu};
use crate::job::{exit_on_panic, fail};
use crate::run_dir::RunOutcome;
use crate::servers::{
    CoordinatorOptions, CoordinatorRun, PsRendezvous, ServerOptions, WorkerOptions, config_of_run,
    host_of, serve, work,
};
use crate::signals;
use crate::spawn::spawn_scoped;
use crate::telemetry::say;
use crate::telemetry::startup_summary::keys_without_effect;
use crate::train::TrainRequest;

/// Arguments of `hpctrain ps server`.
#[derive(Args)]
pub struct ServerArgs {
    /// Directory of the run, which `hpctrain ps coordinator` creates.
    #[arg(long, value_name = "DIR")]
    run: PathBuf,
    /// Host, port, or both at which the others reach this server, such as `node7:2222`; if the host
    /// is an IP address, the server listens only there [default: parameter_server.address and
    /// comm.interface of the run]
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// Time to wait for the coordinator to start, and to come back after a lost connection.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
}

/// Arguments of `hpctrain ps worker`.
#[derive(Args)]
pub struct WorkerArgs {
    /// Directory of the run, which `hpctrain ps coordinator` creates.
    #[arg(long, value_name = "DIR")]
    run: PathBuf,
    /// Time to wait for the coordinator to start, and to come back after a lost connection.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
}

/// Arguments of `hpctrain ps status`.
#[derive(Args)]
pub struct StatusArgs {
    /// Directory of the run.
    #[arg(long, value_name = "DIR")]
    run: PathBuf,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// Refuses keys of parameter servers in a run that has none.
///
/// # Errors
/// Returns an error if such a key is not at its default.
pub fn check_no_server_keys(config: &Config) -> Result<()> {
    let comm = config::Comm { interface: None, encrypt: true, ..config.comm };
    let batch = Batch { worker: None, ..config.batch };
    let without =
        Config { parameter_server: ParameterServer::default(), batch, comm, ..config.clone() };
    let [given, defaults] = [config, &without].map(serde_json::to_value);
    let (Ok(given), Ok(defaults)) = (given, defaults) else { return Ok(()) };
    for section in ["parameter_server", "batch", "comm"] {
        let keys = given[section].as_object().into_iter().flatten();
        if let Some((key, value)) =
            keys.into_iter().find(|(key, value)| defaults[section][key.as_str()] != **value)
        {
            return Err(Error::input(format!(
                "{section}.{key} = {value}, but the run has no servers"
            ))
            .hint("start it with --servers N, or omit the key"));
        }
    }
    Ok(())
}

/// Runs one rank of a job with parameter servers and returns its exit code. The first server is the
/// coordinator, too.
///
/// # Errors
/// Returns an error if the run cannot start, on all ranks, or if this rank fails.
pub fn run_rank(role: &RankAssignment, mut request: TrainRequest) -> Result<i32> {
    let (workers, servers) = role.counts;
    let timeout = Duration::from_secs(request.config.parameter_server.timeout);
    if role.mixed {
        request.config.eval.inline = false;
    }
    let config = request.config.clone();
    let coordinates = role.role == RankRole::Serves(0);
    let options = CoordinatorOptions {
        run: request,
        servers,
        workers: Some(workers),
        log: "coordinator".into(),
    };
    let opened = coordinates.then(|| CoordinatorRun::open(options)).transpose();
    let opened = role.peers.world().all_ok(opened).inspect_err(|e| role.release_evaluators(e))?;
    let own = opened.as_ref().map(|opened| opened.directory().to_string_lossy().into_owned());
    let gathered = role.job.world().gather_bytes(own.unwrap_or_default().into_bytes()).wait()?;
    let run = gathered
        .iter()
        .find(|path| !path.is_empty())
        .ok_or_else(|| Error::internal("no rank sent the directory of the run"))?;
    let site = PsRendezvous::for_run(&PathBuf::from(String::from_utf8_lossy(run).into_owned()));
    let RankRole::Serves(_) = role.role else {
        let options = WorkerOptions {
            rendezvous: site,
            timeout,
            threads: role.threads,
            leaves_on_signal: false,
        };
        return work_on_device(&role.comm, &config, &options);
    };
    let server = ServerOptions {
        rendezvous: site,
        address: config.parameter_server.address.as_deref().and_then(host_of),
        timeout,
        threads: role.threads,
    };
    serve_with(opened, &server)
}

/// Serves, and coordinates the run if this process has opened it; returns the exit code.
fn serve_with(opened: Option<CoordinatorRun>, server: &ServerOptions) -> Result<i32> {
    std::thread::scope(|scope| {
        let coordinator =
            opened.map(|opened| spawn_scoped(scope, "coordinator", || opened.run())).transpose()?;
        let served = serve(server);
        let Some(coordinator) = coordinator else { return served.map(|()| 0) };
        let ended = coordinator.join().map_err(|_| Error::internal("the coordinator panicked"))?;
        Ok(code_of(ended))
    })
}

/// Returns the exit code of a run, and prints its error. Servers and workers end by themselves.
fn code_of(ended: Result<RunOutcome>) -> i32 {
    match ended {
        Ok(outcome) => outcome.exit_code(),
        Err(e) => {
            fail(&e);
            e.exit_code()
        }
    }
}

/// Runs a worker on the device that `run.device` selects. Collective over the workers of a job.
fn work_on_device(comm: &Comm<Cpu>, config: &Config, options: &WorkerOptions) -> Result<i32> {
    match assign_gpus(comm, config)? {
        None => {
            comm.world().all_ok(check_cpu(config))?;
            if comm.rank() == 0
                && let Some(note) = keys_without_effect(config)
            {
                log::warn!("{note}");
            }
            work(options, &cpu_name(config), open_cpu)
        }
        Some(gpu) => work(options, &gpu.name()?, |plan| gpu.backend(plan)),
    }
}

/// Runs all ranks as threads of this process and returns the exit code.
///
/// # Errors
/// Returns an error if no rank is left to train, the run cannot start, or a thread fails.
pub fn simulate(ranks: usize, servers: usize, request: TrainRequest) -> Result<i32> {
    if servers >= ranks {
        return Err(Error::input(format!(
            "--servers {servers} of {ranks} ranks leaves none to train"
        ))
        .hint(format!("--ranks {} or more", servers + 1)));
    }
    let config = request.config.clone();
    let workers = ranks - servers;
    check_cpu(&config)?;
    if let Some(note) = keys_without_effect(&config) {
        log::warn!("{note}");
    }
    exit_on_panic("simulate");
    let timeout = Duration::from_secs(config.parameter_server.timeout);
    let threads = request.threads.unwrap_or(1);
    let opened = CoordinatorRun::open(CoordinatorOptions {
        run: request,
        servers,
        workers: Some(workers),
        log: "coordinator".into(),
    })?;
    let site = PsRendezvous::for_run(opened.directory());
    let server = ServerOptions {
        rendezvous: site.clone(),
        address: config.parameter_server.address.as_deref().and_then(host_of),
        timeout,
        threads,
    };
    let worker = WorkerOptions { rendezvous: site, timeout, threads, leaves_on_signal: false };
    let device = cpu_name(&config);
    std::thread::scope(|scope| {
        let coordinator = scope.spawn(|| opened.run());
        let serving: Vec<_> = (0..servers).map(|_| scope.spawn(|| serve(&server))).collect();
        let working: Vec<_> =
            (0..workers).map(|_| scope.spawn(|| work(&worker, &device, open_cpu))).collect();
        let ended = coordinator.join().map_err(|_| Error::internal("a thread panicked"))?;
        // The coordinator reports the errors of servers and workers.
        working.into_iter().for_each(|thread| drop(thread.join()));
        serving.into_iter().for_each(|thread| drop(thread.join()));
        ended.map(|outcome| outcome.exit_code())
    })
}

/// Coordinates a run whose servers and workers are separate processes; returns the exit code.
pub fn coordinate_run(run: TrainRequest, servers: usize, workers: Option<usize>) -> i32 {
    match CoordinatorRun::open(CoordinatorOptions {
        run,
        servers,
        workers,
        log: "coordinator".into(),
    }) {
        Ok(opened) => {
            match opened.finished_before() {
                Ok(None) => {}
                Ok(Some(outcome)) => return outcome.exit_code(),
                Err(e) => return fail(&e),
            }
            let run = opened.directory().display();
            say(format_args!("hpctrain ps server --run {run}\nhpctrain ps worker --run {run}\n"));
            code_of(opened.run())
        }
        Err(e) => fail(&e),
    }
}

/// Coordinates a run whose other servers and whose workers are separate processes, and serves in
/// the same process; returns the exit code. The coordinator listens at `parameter_server.address`,
/// the server at the same host and any port.
///
/// # Errors
/// Returns an error if the run cannot start, or the server fails.
pub fn coordinate_and_serve(run: TrainRequest, servers: usize, workers: usize) -> Result<i32> {
    let timeout = Duration::from_secs(run.config.parameter_server.timeout);
    let address = run.config.parameter_server.address.as_deref().and_then(host_of);
    let threads = run.config.run.threads.unwrap_or_else(cores);
    let opened = CoordinatorRun::open(CoordinatorOptions {
        run,
        servers,
        workers: Some(workers),
        log: "coordinator".into(),
    })?;
    if let Some(outcome) = opened.finished_before()? {
        return Ok(outcome.exit_code());
    }
    let rendezvous = PsRendezvous::for_run(opened.directory());
    serve_with(Some(opened), &ServerOptions { rendezvous, address, timeout, threads })
}

/// Runs `hpctrain ps server` and returns the exit code.
pub fn run_server(args: &ServerArgs) -> i32 {
    exit_on_panic("server");
    let served = serve_run(&args.run, args.address.clone(), Duration::from_secs(args.timeout));
    served.map_or_else(|e| fail(&e), |()| 0)
}

/// Runs a parameter server of the run in a directory until the run ends.
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

/// Runs `hpctrain ps worker` and returns the exit code.
pub fn run_worker(args: &WorkerArgs) -> i32 {
    exit_on_panic("worker");
    let worked = signals::record_signals()
        .and_then(|()| work_for_run(&args.run, Duration::from_secs(args.timeout)));
    worked.unwrap_or_else(|e| fail(&e))
}

/// Runs a worker of the run in a directory until the run ends or a signal asks this process to
/// leave; returns the exit code.
///
/// # Errors
/// Returns an error if the coordinator is gone for longer than `timeout`, the data cannot be read,
/// or the device fails.
pub fn work_for_run(run: &Path, timeout: Duration) -> Result<i32> {
    let options = WorkerOptions {
        rendezvous: PsRendezvous::for_run(run),
        timeout,
        threads: cores(),
        leaves_on_signal: true,
    };
    match config_or_code(&options)? {
        Err(code) => Ok(code),
        Ok(config) => work_on_device(&single(), &config, &options),
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

/// Prints the status of a run for `hpctrain ps status`.
///
/// # Errors
/// Returns an error if the run has no coordinator that answers.
pub fn status(args: &StatusArgs) -> Result<()> {
    let status = crate::servers::status(&PsRendezvous::for_run(&args.run))?;
    if args.json {
        return super::json(&status);
    }
    say(crate::servers::format_status(&status));
    Ok(())
}
