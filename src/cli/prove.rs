//! `hpctrain prove-direct`: a child of a rank, which may crash in its stead.

use crate::backend::cpu::Cpu;
use crate::comm::mpi;
use crate::error::Result;

/// Hands the MPI library memory of the device that this program would compute on.
pub fn run() -> Result<()> {
    mpi::prove(&Cpu::new(1))
}
