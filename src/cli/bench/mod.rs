//! `hpctrain bench`: benchmarks of this machine.

mod checkpoint;
mod comm;
mod connection;
mod data;
mod gpu;
mod step;

use clap::{Args, Subcommand};

use crate::comm::{Launch, prepare_environment};
use crate::job;

/// Arguments of `hpctrain bench`.
#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Benchmark collectives for every operation, algorithm and size: mpirun -np 2 hpctrain bench
    /// comm.
    Comm(comm::CommArgs),
    /// Benchmark TCP connections between two hosts, encrypted and plain: mpirun -np 2 --host
    /// node1,node2 hpctrain bench connection.
    Connection(connection::ConnectionArgs),
    /// Benchmark checkpoint saves and restores against plain writes, reads and copies of the same
    /// size.
    Checkpoint(checkpoint::CheckpointArgs),
    /// Benchmark the data loader against plain reads of the same bytes.
    Data(data::DataArgs),
    /// Benchmark the operations of a GPT on a GPU against a copy within its memory.
    Gpu(gpu::GpuArgs),
    /// Benchmark training steps of a model on CPUs with random data: hpctrain bench step --preset
    /// gpt-baby --samples 4.
    Step(step::StepArgs),
    /// Benchmark every CPU kernel of a training step against the peak rates of cores and memory.
    Kernels(step::StepArgs),
    /// Benchmark only the GEMMs of a training step on CPUs.
    Gemm(step::StepArgs),
}

/// Runs one rank and returns its exit code.
pub fn run(args: &BenchArgs, launch: Option<&Launch>) -> i32 {
    // Only this benchmark runs the collectives of NCCL.
    prepare_environment(matches!(args.command, BenchCommand::Comm(_)));
    job::run(launch, super::with_checkpoint::comm_timeout(&[]), |comm| {
        match &args.command {
            BenchCommand::Comm(args) => comm::table(comm, args)?,
            BenchCommand::Connection(args) => connection::table(comm, args)?,
            BenchCommand::Checkpoint(args) => checkpoint::table(comm, args)?,
            BenchCommand::Data(args) => data::table(comm, args)?,
            BenchCommand::Gpu(args) => gpu::table(comm, args)?,
            BenchCommand::Step(args) => step::table(comm, args, step::View::Step)?,
            BenchCommand::Kernels(args) => step::table(comm, args, step::View::Kernels)?,
            BenchCommand::Gemm(args) => step::table(comm, args, step::View::Gemm)?,
        }
        Ok(0)
    })
}
