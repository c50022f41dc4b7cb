//! `hpctrain prove-direct`: a process that may crash in the stead of a rank.

use crate::backend::cpu::Cpu;
use crate::backend::cuda::{Device, devices};
use crate::comm::mpi;
use crate::error::Result;
use crate::placement::small;

/// Hands the MPI library memory of a device of this node: of two processes each takes one of its own, if there are two.
pub fn run() -> Result<()> {
    match devices().unwrap_or(0) {
        0 => mpi::prove(|_| Ok(Cpu::new(1))),
        gpus => mpi::prove(|number| small(&Device::open(number % gpus)?)),
    }
}
