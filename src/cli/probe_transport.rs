//! `hpctrain prove-direct` and `prove-together`: processes that may crash in the stead of a rank.

use clap::Args;

use crate::backend::cpu::Cpu;
use crate::backend::cuda::{Device, devices};
use crate::comm::{answer_trial, mpi};
use crate::error::{Error, Result};
use crate::gpu_assignment::small;

/// Arguments of the process beside a rank.
#[derive(Args, Debug)]
pub struct TogetherArgs {
    /// Number of the rank.
    rank: usize,
    /// Ranks of the job.
    ranks: usize,
    /// Identifier of the rank's GPU.
    device: String,
}

/// Hands the MPI library memory of a device of this node: of two processes each takes one of its
/// own, if there are two.
pub fn run() -> Result<()> {
    match devices().unwrap_or(0) {
        0 => mpi::prove(|_| Ok(Cpu::new(1))),
        gpus => mpi::prove(|number| small(&Device::open(number % gpus)?)),
    }
}

/// Exchanges memory of a rank's device with the processes beside the other ranks, by NCCL.
pub fn together(args: &TogetherArgs) -> Result<()> {
    for number in 0..devices()? {
        let device = Device::open(number)?;
        if device.id == args.device {
            return answer_trial(&small(&device)?, args.rank, args.ranks);
        }
    }
    Err(Error::input(format!("this process does not see GPU {}", args.device)))
}
