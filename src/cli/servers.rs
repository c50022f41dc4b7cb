//! Runs on parameter servers: as ranks of one job, as processes that come and go, or as threads.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::rank_roles::{RankRole, Role};
use crate::backend::cpu::Cpu;
use crate::comm::{Comm, single};
use crate::config::{self, Batch, Config, ParameterServer};
use crate::error::{Error, Result};
use crate::gpu_assignment::{cpu, cpu_can, cpu_name, place};
use crate::job::{exit_on_panic, fail};
use crate::run_dir::RunOutcome;
use crate::servers::{
    CoordinatorOptions, CoordinatorRun, PsRendezvous, ServerOptions, WorkerOptions, config_of_run,
    host_of, serve, work,
};
use crate::signals;
use crate::spawn::spawn_scoped;
use crate::telemetry::say;
use crate::train::TrainRequest;

/// Arguments of `hpctrain ps server`.
#[derive(Args)]
pub struct ServerArgs {
    /// Directory of the run, which `hpctrain ps coordinator` makes.
    #[arg(long, value_name = "DIR")]
    run: PathBuf,
    /// Host, port, or both at which others reach it, such as `node7:2222`; it listens there if it
    /// is an IP address. Omitted, as parameter_server.address and comm.interface of the run.
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// Time within which the coordinator must be there, and come back.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
}

/// Arguments of `hpctrain ps worker`.
#[derive(Args)]
pub struct WorkerArgs {
    /// Directory of the run, which `hpctrain ps coordinator` makes.
    #[arg(long, value_name = "DIR")]
    run: PathBuf,
    /// Time within which the coordinator must be there, and come back.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
}

/// Arguments of `hpctrain ps status`.
#[derive(Args)]
pub struct StatusArgs {
    /// Directory of the run.
    #[arg(long, value_name = "DIR")]
    run: PathBuf,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

/// Refuses settings of servers in a run without any.
///
/// # Errors
/// There is one.
pub fn check_without(config: &Config) -> Result<()> {
    let comm = config::Comm { interface: None, encrypt: true, ..config.comm };
    let batch = Batch { worker: None, ..config.batch };
    let without =
        Config { parameter_server: ParameterServer::default(), batch, comm, ..config.clone() };
    let [given, without] = [config, &without].map(serde_json::to_value);
    let (Ok(given), Ok(without)) = (given, without) else { return Ok(()) };
    for section in ["parameter_server", "batch", "comm"] {
        let keys = given[section].as_object().into_iter().flatten();
        if let Some((key, value)) =
            keys.into_iter().find(|(key, value)| without[section][key.as_str()] != **value)
        {
            return Err(Error::input(format!(
                "{section}.{key} = {value}, but the run has no servers"
            ))
            .hint("start it with --servers N, or leave this out"));
        }
    }
    Ok(())
}

/// One rank of a job with servers; returns the exit code. The first server coordinates.
///
/// # Errors
/// The run cannot begin, which all ranks share; or this rank failed.
pub fn take_part(role: &Role, mut request: TrainRequest) -> Result<i32> {
    let (workers, servers) = role.counts;
    let timeout = Duration::from_secs(request.config.parameter_server.timeout);
    if role.mixed {
        request.config.eval.inline = false;
    }
    let config = request.config.clone();
    let coordinates = role.part == RankRole::Serves(0);
    let call = CoordinatorOptions {
        run: request,
        servers,
        workers: Some(workers),
        log: "coordinator".into(),
    };
    let opened = coordinates.then(|| CoordinatorRun::open(call)).transpose();
    let opened = role.side.world().all_ok(opened).inspect_err(|e| role.release_evaluators(e))?;
    let told = opened.as_ref().map(|opened| opened.directory().to_string_lossy().into_owned());
    let told = role.everyone.world().gather_bytes(told.unwrap_or_default().into_bytes()).wait()?;
    let run = told
        .iter()
        .find(|path| !path.is_empty())
        .ok_or_else(|| Error::internal("nobody told the directory"))?;
    let site = PsRendezvous::of(&PathBuf::from(String::from_utf8_lossy(run).into_owned()));
    let RankRole::Serves(_) = role.part else {
        let hand = WorkerOptions { site, patience: timeout, threads: role.threads, leaves: false };
        return work_on_device(&role.comm, &config, &hand);
    };
    let post = ServerOptions {
        site,
        address: config.parameter_server.address.as_deref().and_then(host_of),
        patience: timeout,
        threads: role.threads,
    };
    std::thread::scope(|scope| {
        let coordinator =
            opened.map(|opened| spawn_scoped(scope, "coordinator", || opened.run())).transpose()?;
        let served = serve(&post);
        let Some(coordinator) = coordinator else { return served.map(|()| 0) };
        let ended = coordinator.join().map_err(|_| Error::internal("the coordinator panicked"))?;
        Ok(code_of(ended))
    })
}

/// The exit code of a run, whose error is printed: all others end by themselves.
fn code_of(ended: Result<RunOutcome>) -> i32 {
    match ended {
        Ok(ending) => ending.exit_code(),
        Err(e) => {
            fail(&e);
            e.exit_code()
        }
    }
}

/// Works where `run.device` says; collective over the workers of a job.
fn work_on_device(comm: &Comm<Cpu>, config: &Config, hand: &WorkerOptions) -> Result<i32> {
    match place(comm, config)? {
        None => {
            comm.world().all_ok(cpu_can(config))?;
            work(hand, &cpu_name(config), cpu)
        }
        Some(gpu) => work(hand, &gpu.name()?, |plan| gpu.backend(plan)),
    }
}

/// Ranks as threads of this process; returns the exit code.
///
/// # Errors
/// The run cannot begin, or a thread failed.
pub fn simulate(ranks: usize, servers: usize, request: TrainRequest) -> Result<i32> {
    if servers >= ranks {
        return Err(Error::input(format!(
            "--servers {servers} of {ranks} ranks leaves none to train"
        ))
        .hint(format!("--ranks {} or more", servers + 1)));
    }
    let config = request.config.clone();
    let workers = ranks - servers;
    cpu_can(&config)?;
    exit_on_panic("simulate");
    let timeout = Duration::from_secs(config.parameter_server.timeout);
    let threads = request.threads.unwrap_or(1);
    let opened = CoordinatorRun::open(CoordinatorOptions {
        run: request,
        servers,
        workers: Some(workers),
        log: "coordinator".into(),
    })?;
    let site = PsRendezvous::of(opened.directory());
    let post = ServerOptions {
        site: site.clone(),
        address: config.parameter_server.address.as_deref().and_then(host_of),
        patience: timeout,
        threads,
    };
    let hand = WorkerOptions { site, patience: timeout, threads, leaves: false };
    let device = cpu_name(&config);
    std::thread::scope(|scope| {
        let coordinator = scope.spawn(|| opened.run());
        let serving: Vec<_> = (0..servers).map(|_| scope.spawn(|| serve(&post))).collect();
        let working: Vec<_> =
            (0..workers).map(|_| scope.spawn(|| work(&hand, &device, cpu))).collect();
        let panicked = || Error::internal("a thread panicked");
        let ended = coordinator.join().map_err(|_| panicked())?;
        // The coordinator tells of their errors.
        working.into_iter().for_each(|thread| drop(thread.join()));
        serving.into_iter().for_each(|thread| drop(thread.join()));
        ended.map(|ending| ending.exit_code())
    })
}

/// Coordinates a run of processes that come and go; returns the exit code.
pub fn coordinate_as(run: TrainRequest, servers: usize, workers: Option<usize>) -> i32 {
    match CoordinatorRun::open(CoordinatorOptions {
        run,
        servers,
        workers,
        log: "coordinator".into(),
    }) {
        Ok(opened) => {
            let run = opened.directory().display();
            say(format_args!("hpctrain ps server --run {run}\nhpctrain ps worker --run {run}\n"));
            code_of(opened.run())
        }
        Err(e) => fail(&e),
    }
}

/// `hpctrain ps server`; returns the exit code.
pub fn serve_alone(args: &ServerArgs) -> i32 {
    exit_on_panic("server");
    let served = serve_as(&args.run, args.address.clone(), Duration::from_secs(args.timeout));
    served.map_or_else(|e| fail(&e), |()| 0)
}

/// Serves the run in a directory until it is over.
///
/// # Errors
/// The address cannot be listened on, or the coordinator is gone.
pub fn serve_as(run: &Path, address: Option<String>, patience: Duration) -> Result<()> {
    serve(&ServerOptions { site: PsRendezvous::of(run), address, patience, threads: cores() })
}

/// `hpctrain ps worker`; returns the exit code.
pub fn work_alone(args: &WorkerArgs) -> i32 {
    exit_on_panic("worker");
    let worked =
        signals::listen().and_then(|()| work_as(&args.run, Duration::from_secs(args.timeout)));
    worked.unwrap_or_else(|e| fail(&e))
}

/// Works for the run in a directory until it is over, or this process is asked to leave; returns
/// the exit code.
///
/// # Errors
/// The coordinator is gone, the data cannot be read, or the device failed.
pub fn work_as(run: &Path, patience: Duration) -> Result<i32> {
    let hand =
        WorkerOptions { site: PsRendezvous::of(run), patience, threads: cores(), leaves: true };
    match config_of_run(&hand)? {
        Err(code) => Ok(code),
        Ok(config) => work_on_device(&single(), &config, &hand),
    }
}

/// Cores that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// `hpctrain ps status`.
///
/// # Errors
/// The run has no coordinator.
pub fn status(args: &StatusArgs) -> Result<()> {
    let told = crate::servers::status(&PsRendezvous::of(&args.run))?;
    if args.json {
        return super::json(&told);
    }
    say(crate::servers::told(&told));
    Ok(())
}
