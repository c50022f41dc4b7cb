//! Runs with parameter servers: as ranks of one job, as elastic processes, or as threads.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::rank_roles::{RankAssignment, RankRole};
use crate::config::{self, Batch, Config, ParameterServer};
use crate::error::{Error, Result};
use crate::gpu_assignment::{check_cpu, cpu_name, open_cpu};
use crate::job::{exit_on_panic, fail};
use crate::run_dir::RunOutcome;
pub use crate::servers::serve_run;
use crate::servers::{
    CoordinatorOptions, CoordinatorRun, PsRendezvous, RankEnd, ServedRank, ServerOptions,
    WorkerOptions, host_of, serve, serve_alongside, work,
};
use crate::signals;
use crate::telemetry::say;
use crate::telemetry::startup_summary::keys_without_effect;
use crate::train::{Customization, TrainRequest};

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
    if role.mixed {
        request.config.eval.inline = false;
    }
    let server = match role.role {
        RankRole::Serves(index) => Some(index),
        RankRole::Trains | RankRole::Evaluates => None,
    };
    let rank = ServedRank {
        announcement: &role.announcement,
        peers: &role.peers,
        comm: &role.comm,
        server,
        workers,
        servers,
        threads: role.threads,
    };
    let ended = rank.run(request, Customization::default());
    Ok(match ended.or_else(|e| role.end_evaluators(e).map(|code| RankEnd::Other(Ok(code))))? {
        RankEnd::Coordinator(ended) => code_of(ended),
        RankEnd::Other(code) => code?,
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
    let options = CoordinatorOptions {
        run: request,
        servers,
        workers: Some(workers),
        log: "coordinator".into(),
    };
    let opened = CoordinatorRun::open(options, custom())?;
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
        let serving: Vec<_> = (0..servers).map(|_| scope.spawn(|| serve(&server))).collect();
        let working =
            (0..workers).map(|_| scope.spawn(|| work(&worker, custom(), &device, open_cpu)));
        let working: Vec<_> = working.collect();
        let ended = opened.run();
        // The coordinator reports the errors of servers and workers.
        working.into_iter().for_each(|thread| drop(thread.join()));
        serving.into_iter().for_each(|thread| drop(thread.join()));
        ended.map(|outcome| outcome.exit_code())
    })
}

/// Coordinates a run whose servers and workers are separate processes; returns the exit code.
pub fn coordinate_run(run: TrainRequest, servers: usize, workers: Option<usize>) -> i32 {
    let options = CoordinatorOptions { run, servers, workers, log: "coordinator".into() };
    match CoordinatorRun::open(options, custom()) {
        Ok(mut opened) => {
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
    let options =
        CoordinatorOptions { run, servers, workers: Some(workers), log: "coordinator".into() };
    let mut opened = CoordinatorRun::open(options, custom())?;
    if let Some(outcome) = opened.finished_before()? {
        return Ok(outcome.exit_code());
    }
    let rendezvous = PsRendezvous::for_run(opened.directory());
    let server = ServerOptions { rendezvous, address, timeout, threads };
    Ok(code_of(serve_alongside(opened, &server)))
}

/// Runs `hpctrain ps server` and returns the exit code.
pub fn run_server(args: &ServerArgs) -> i32 {
    exit_on_panic("server");
    let served = serve_run(&args.run, args.address.clone(), Duration::from_secs(args.timeout));
    served.map_or_else(|e| fail(&e), |()| 0)
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
    crate::servers::work_for_run(run, timeout, custom())
}

/// Returns what the program adds to a run: nothing.
fn custom() -> Customization<'static> {
    Customization::default()
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
