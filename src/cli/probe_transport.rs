//! `hpctrain probe-cuda-aware`, `probe-nccl` and `probe-cuda-ipc`: probe CUDA-aware MPI, NCCL and
//! CUDA IPC in child processes, so that a crash does not end a rank.

use clap::Args;

use crate::backend::cpu::Cpu;
use crate::backend::cuda::{Device, devices};
use crate::comm::{RankProbe, mpi, run_rank_probe};
use crate::error::{Error, Result};
use crate::gpu_assignment::open_for_probe;

/// Arguments of the child process of a rank.
#[derive(Args, Debug)]
pub struct RankProbeArgs {
    /// The rank.
    rank: usize,
    /// The number of ranks of the job.
    ranks: usize,
    /// The identifier of the rank's GPU.
    device: String,
}

/// Exchanges GPU memory by MPI with the other process of the probe; each uses another GPU of this
/// node, if there are two.
pub fn probe_cuda_aware_mpi() -> Result<()> {
    match devices().unwrap_or(0) {
        0 => mpi::run_cuda_probe(|_| Ok(Cpu::new(1))),
        gpus => mpi::run_cuda_probe(|number| open_for_probe(&Device::open(number % gpus)?)),
    }
}

/// Exchanges memory of a rank's GPU with the child processes of the other ranks.
pub fn probe_ranks(probed: RankProbe, args: &RankProbeArgs) -> Result<()> {
    if args.rank >= args.ranks {
        return Err(Error::input(format!("RANK = {} of RANKS = {}", args.rank, args.ranks))
            .hint("ranks are numbered from 0"));
    }
    for number in 0..devices()? {
        let device = Device::open(number)?;
        if device.id == args.device {
            return run_rank_probe(probed, &open_for_probe(&device)?, args.rank, args.ranks);
        }
    }
    Err(Error::input(format!("this process does not see GPU {}", args.device)))
}
