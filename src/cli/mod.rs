//! The command line: each subcommand has a file, which parses arguments and calls the library.

mod agent;
mod bench;
mod checkpoint;
mod compare;
mod config;
mod coordinate;
pub mod data;
mod data_order;
mod data_which;
mod doctor;
mod eval;
mod eval_checkpoint;
mod plan;
mod predict;
mod probe_transport;
pub mod ps_auto;
mod rank_roles;
mod replay;
mod report;
mod runs;
mod sample;
mod servers;
mod simulate;
mod spawn;
mod submit;
mod supervise;
mod train;
mod verify;
mod watch;
mod with_checkpoint;

use std::path::{Path, PathBuf};

use clap::{CommandFactory as _, Parser, Subcommand};
use serde::Serialize;

use crate::comm::{self, Launch, RankProbe};
use crate::data::sandbox;
use crate::error::{Error, Result};
use crate::fd_limit;
use crate::job::{self, fail};
use crate::replay::ReplayTask;
use crate::signals;
use crate::telemetry;
use crate::verify::LayoutTask;

/// Trains neural networks on MPI clusters.
///
/// Without a subcommand it trains the bundled default: a small GPT on tiny Shakespeare.
#[derive(Parser)]
#[command(name = "hpctrain", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    train: train::TrainArgs,
    /// Start N ranks as processes on this machine that communicate over TCP, without MPI.
    #[arg(long, value_name = "N", global = true, value_parser = clap::value_parser!(u16).range(1..=1024))]
    spawn: Option<u16>,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model; each process that mpirun or srun starts is one rank.
    Train(train::TrainArgs),
    /// Evaluate the checkpoints of a run, during training or afterwards, or one checkpoint on any
    /// data.
    Eval(eval::EvalArgs),
    /// Write a model's outputs for every row of a data set; each process that mpirun or srun starts
    /// is one rank.
    Predict(predict::PredictArgs),
    /// Train with ranks as threads of one process, without MPI.
    Simulate(simulate::SimulateArgs),
    /// Train with parameter servers: coordinator, servers, workers.
    #[command(subcommand)]
    Ps(PsCommand),
    /// Start a program that uses this library as ranks on this machine that communicate over TCP,
    /// without MPI: hpctrain spawn -n 4 ./program
    Spawn(spawn::SpawnArgs),
    /// Restart a job until its run is complete: hpctrain supervise -- mpirun -np 8 hpctrain train
    Supervise(supervise::SuperviseArgs),
    /// Write the job script for Slurm, PBS or Flux that checks its nodes and trains, and submit it.
    Submit(submit::SubmitArgs),
    /// Check that loss, parameters and optimizer state are bitwise equal on any number of ranks and
    /// in any ZeRO stage.
    Verify(verify::VerifyArgs),
    /// Repeat steps of a run from a checkpoint, compare them bit for bit with its records, and find
    /// the first tensor, rank and sample with bad values.
    Replay(replay::ReplayArgs),
    /// Run one rank of a layout of `verify --mpi`.
    #[command(hide = true)]
    VerifyRank(verify::RankArgs),
    /// Run one rank of `replay --mpi`.
    #[command(hide = true)]
    ReplayRank(verify::RankArgs),
    /// Probe CUDA-aware MPI in a child process of a rank, which may crash.
    #[command(hide = true, name = comm::CUDA_PROBE_COMMAND)]
    ProbeCudaAware,
    /// Probe NCCL between all ranks, in a child process of each, which may crash.
    #[command(hide = true, name = RankProbe::Nccl.command())]
    ProbeNccl(probe_transport::RankProbeArgs),
    /// Probe CUDA IPC between all ranks, in a child process of each, which may crash.
    #[command(hide = true, name = RankProbe::CudaIpc.command())]
    ProbeCudaIpc(probe_transport::RankProbeArgs),
    /// Start the ranks of an elastic job on this host, and replace those that are lost.
    Agent(agent::AgentArgs),
    /// Start the agents of an elastic job on several hosts.
    #[command(hide = true)]
    ElasticHosts(supervise::ElasticHostsArgs),
    /// Generate text with a trained language model.
    Sample(sample::SampleArgs),
    /// Import, inspect and verify training data.
    Data(data::DataArgs),
    /// List, inspect, verify, compare, prune, export and import checkpoints.
    Checkpoint(checkpoint::CheckpointArgs),
    /// List the runs of a directory: state, step, losses, speed, age, layout, size.
    Runs(runs::RunsArgs),
    /// Compare two runs: configuration, version, data, the first step whose bits differ, losses,
    /// speed.
    Compare(compare::CompareArgs),
    /// Print the configuration keys, the resolved configuration, or the layers of the model.
    Config(config::ConfigArgs),
    /// Write an HTML report of runs: curves, time breakdown, ranks, checkpoints, evaluations,
    /// settings.
    Report(report::ReportArgs),
    /// Show a run in the terminal while it trains or afterwards: curves, throughput, MFU, ranks,
    /// checkpoints, log.
    Watch(watch::WatchArgs),
    /// Search parallel layouts for N ranks: print the memory and step time of each, and why others
    /// were rejected.
    Plan(plan::PlanArgs),
    /// Check whether this machine can train: GPUs, MPI, HDF5, file system, limits.
    Doctor(doctor::DoctorArgs),
    /// Run some checks of `doctor`, in a process that may crash.
    #[command(hide = true, name = crate::doctor::probe::COMMAND)]
    DoctorProbe(doctor::ProbeArgs),
    /// Open the HDF5 files that standard input lists, in a process that may crash.
    #[command(hide = true, name = sandbox::COMMAND)]
    DataSandbox,
    /// Benchmark this machine: kernels, steps, collectives, data, checkpoints.
    Bench(bench::BenchArgs),
    /// Write the manual pages: hpctrain.1, and one for each command.
    Man {
        /// The folder to write them to, which is created.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// Processes of a run with parameter servers.
#[derive(clap::Subcommand)]
enum PsCommand {
    /// Start a run with parameter servers and schedule its batches; servers and workers connect to
    /// it.
    Coordinator(coordinate::CoordinateArgs),
    /// Hold a shard of the parameters of a run, until it ends.
    Server(servers::ServerArgs),
    /// Compute gradients for a run, until it ends or this process gets SIGTERM.
    Worker(servers::WorkerArgs),
    /// Run the process that `TF_CONFIG`, or `RANK` and `WORLD_SIZE`, assign to this task.
    Auto(ps_auto::AutoArgs),
    /// Show the servers and workers of a run: steps, load, last contact.
    Status(servers::StatusArgs),
}

impl Command {
    /// Returns whether a launcher may start this command as several ranks.
    fn has_ranks(&self) -> bool {
        match self {
            Command::Train(_) | Command::Eval(_) | Command::Predict(_) | Command::Sample(_) => true,
            Command::Plan(_) | Command::Bench(_) | Command::Doctor(_) => true,
            Command::Simulate(_) | Command::Verify(_) => false,
            Command::VerifyRank(_) | Command::ReplayRank(_) => false,
            Command::ProbeCudaAware | Command::ProbeNccl(_) | Command::ProbeCudaIpc(_) => false,
            Command::Data(_)
            | Command::Checkpoint(_)
            | Command::Config(_)
            | Command::DoctorProbe(_)
            | Command::DataSandbox
            | Command::Report(_)
            | Command::Runs(_)
            | Command::Watch(_)
            | Command::Replay(_)
            | Command::Compare(_) => false,
            Command::Ps(_) | Command::Supervise(_) | Command::Spawn(_) => false,
            Command::Submit(_) => false,
            Command::Agent(_) | Command::ElasticHosts(_) => false,
            Command::Completions { .. } | Command::Man { .. } => false,
        }
    }
}

/// Runs the program and returns its exit code.
pub fn run() -> i32 {
    fd_limit::raise();
    comm::enable_rank_probes();
    if let Err(e) = signals::survive_file_size_limit() {
        return fail(&e);
    }
    let launch = comm::launched(|name| std::env::var(name).ok());
    // Every rank parses the same arguments, so only rank 0 prints errors in them. Processes that
    // are not ranks each print their own.
    let speaks = !matches!(&launch, Ok(Some(launch)) if launch.rank.unwrap_or(0) > 0);
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            if speaks {
                // If standard error is closed, the error cannot be shown.
                let _ = e.print();
            }
            return e.exit_code();
        }
    };
    match std::env::current_exe() {
        Ok(program) => sandbox::enable(program, vec![sandbox::COMMAND.to_owned()]),
        Err(e) => log::warn!(
            "data: HDF5 files are opened without a sandbox process: cannot find this program: {e}"
        ),
    }
    let command = cli.command.unwrap_or(Command::Train(cli.train));
    let launch = match launch {
        Ok(launch) => launch,
        Err(e) if command.has_ranks() => return fail(&e),
        // A command without ranks does not need a supported launcher.
        Err(_) => None,
    };
    job::name_console(launch.as_ref());
    if let Some(ranks) = cli.spawn {
        match launch.as_ref() {
            None if !command.has_ranks() => {
                let e = Error::input(format!(
                    "--spawn {ranks}, but this command does not run on ranks"
                ));
                return fail(&e.hint("train, eval, predict, sample, plan, bench and doctor do"));
            }
            None => {
                let elastic = match &command {
                    // A configuration that fails is reported by the ranks.
                    Command::Train(args) => args.config().ok().map(|config| config.elastic),
                    _ => None,
                };
                let elastic = elastic.filter(|elastic| elastic.on);
                return job::launch_self(usize::from(ranks), elastic.as_ref());
            }
            Some(launch) if launch.rendezvous().is_some() => {}
            Some(launch) if speaks => {
                let e = Error::input(format!(
                    "--spawn {ranks}, but this process was started by {}",
                    launch.by
                ));
                return fail(&e.hint("use one of them"));
            }
            Some(_) => return 2,
        }
    }
    // Training writes its results to records and checkpoints, the other commands to standard
    // output.
    let is_for_output = !matches!(
        command,
        Command::Train(_) | Command::Simulate(_) | Command::Ps(PsCommand::Coordinator(_))
    );
    let code = dispatch(command, launch.as_ref(), speaks);
    match telemetry::stdout_error() {
        Some(e) if is_for_output && code == 0 => fail(&e),
        _ => code,
    }
}

/// Runs a command and returns its exit code. `speaks` is true on rank 0 and in processes that are
/// not ranks.
fn dispatch(command: Command, launch: Option<&Launch>, speaks: bool) -> i32 {
    match command {
        Command::Train(args) => train::run(&args, launch),
        Command::Eval(args) => eval::run(&args, launch),
        Command::Predict(args) => predict::run(&args, launch),
        Command::Sample(args) => sample::run(&args, launch),
        Command::Bench(args) => bench::run(&args, launch),
        Command::Doctor(args) => doctor::run(&args, launch),
        Command::DoctorProbe(args) => report(doctor::probe(&args)),
        Command::DataSandbox => report(sandbox::serve()),
        Command::Plan(args) => plan::run(&args, launch),
        Command::VerifyRank(args) => verify::run_rank::<LayoutTask>(&args, launch),
        Command::ReplayRank(args) => verify::run_rank::<ReplayTask>(&args, launch),
        // Every process of a probe runs, not only that of rank 0.
        Command::ProbeCudaAware => report(probe_transport::probe_cuda_aware_mpi()),
        Command::ProbeNccl(args) => report(probe_transport::probe_ranks(RankProbe::Nccl, &args)),
        Command::ProbeCudaIpc(args) => {
            report(probe_transport::probe_ranks(RankProbe::CudaIpc, &args))
        }
        // Each process has its own role, also when a launcher started several.
        Command::Ps(PsCommand::Server(args)) => servers::run_server(&args),
        Command::Ps(PsCommand::Worker(args)) => servers::run_worker(&args),
        Command::Ps(PsCommand::Auto(args)) => ps_auto::run(&args),
        Command::Agent(args) => agent::run(args),
        Command::Spawn(args) if speaks => spawn::run(&args, launch),
        Command::Spawn(_) => 2,
        _ if !speaks => 0,
        Command::Verify(args) => verify::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Ps(PsCommand::Coordinator(args)) => coordinate::run(&args),
        Command::Ps(PsCommand::Status(args)) => report(servers::status(&args)),
        Command::Supervise(args) => supervise::run(args),
        Command::Submit(args) => report(submit::run(&args)),
        Command::ElasticHosts(args) => supervise::run_elastic_hosts(&args),
        Command::Data(args) => report(data::run(args)),
        Command::Checkpoint(args) => checkpoint::run(&args),
        Command::Config(args) => report(config::run(&args)),
        Command::Report(args) => report(report::run(&args)),
        Command::Runs(args) => report(runs::run(&args)),
        Command::Watch(args) => report(watch::run(&args)),
        Command::Compare(args) => report(compare::run(&args)),
        Command::Man { out } => report(write_manual(&out)),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "hpctrain", &mut script);
            telemetry::say(String::from_utf8_lossy(&script).trim_end());
            0
        }
    }
}

/// Writes the manual pages to a folder.
fn write_manual(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
    clap_mangen::generate_to(Cli::command(), folder).map_err(|e| Error::io("write", folder, e))
}

/// Prints a result as JSON.
fn json(result: &impl Serialize) -> Result<()> {
    telemetry::say(
        serde_json::to_string_pretty(result).map_err(|e| Error::internal(e.to_string()))?,
    );
    Ok(())
}

/// Returns the exit code of a command, and prints its error.
fn report(result: Result<()>) -> i32 {
    result.map_or_else(|e| fail(&e), |()| 0)
}
