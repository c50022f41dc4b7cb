//! `hpctrain bench`: the performance of the machine.

mod checkpoint;
mod comm;
mod connection;
mod data;
mod gpu;
mod step;

use clap::{Args, Subcommand};

use crate::comm::Launch;
use crate::job;

/// Arguments of `hpctrain bench`.
#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Time the collectives, for every operation, algorithm and size: mpirun -np 2 hpctrain bench
    /// comm.
    Comm(comm::CommArgs),
    /// Time connections between two hosts, encrypted and not: mpirun -np 2 --host node1,node2
    /// hpctrain bench connection.
    Connection(connection::ConnectionArgs),
    /// Time saving and restoring beside plain writes, reads and copies of as many bytes.
    Checkpoint(checkpoint::CheckpointArgs),
    /// Time how fast samples are read, beside plain reads of the same bytes.
    Data(data::DataArgs),
    /// Time the operations of a GPT on a GPU, beside a copy within its memory.
    Gpu(gpu::GpuArgs),
    /// Time the steps of a network on the CPUs, on random data: hpctrain bench step --preset
    /// gpt-baby --samples 4.
    Step(step::PaceArgs),
    /// Time every kernel of such steps, beside the peak rates of cores and memory.
    Kernels(step::PaceArgs),
    /// Time the products of matrices of such steps.
    Gemm(step::PaceArgs),
}

/// Runs one rank; returns the exit code.
pub fn run(args: &BenchArgs, launch: Option<&Launch>) -> i32 {
    job::run(launch, super::with_checkpoint::patience(&[]), |comm| {
        match &args.what {
            What::Comm(args) => comm::table(comm, args)?,
            What::Connection(args) => connection::table(comm, args)?,
            What::Checkpoint(args) => checkpoint::table(comm, args)?,
            What::Data(args) => data::table(comm, args)?,
            What::Gpu(args) => gpu::table(comm, args)?,
            What::Step(args) => step::table(comm, args, step::View::Step)?,
            What::Kernels(args) => step::table(comm, args, step::View::Kernels)?,
            What::Gemm(args) => step::table(comm, args, step::View::Gemm)?,
        }
        Ok(0)
    })
}
