//! `hpctrain prove-direct`: a child of a rank, which may crash in its stead.

use crate::backend::cpu::Cpu;
use crate::comm::{self, mpi};
use crate::config::Config;
use crate::error::Result;
use crate::placement::place;

/// Hands the MPI library memory of the device that this program would compute on.
pub fn run() -> Result<()> {
    match place(&comm::single::<Cpu>(), &Config::default())? {
        None => mpi::prove(&Cpu::new(1)),
        Some(gpu) => mpi::prove(&gpu.small()?),
    }
}
