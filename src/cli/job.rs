//! One rank of a job: meeting the others, and ending together.

use super::fail;
use crate::backend::cpu::Cpu;
use crate::comm::{self, Algorithm, Comm};
use crate::error::Result;

/// Does the work of one rank, in a world of its own unless an MPI launcher started it; returns the exit code,
/// which is that of the work if it succeeds.
pub fn run(launched: bool, work: impl FnOnce(&Comm<Cpu>) -> Result<i32>) -> i32 {
    let comm: Comm<Cpu> = if launched {
        match comm::mpi::start(Algorithm::Tree) {
            Ok(comm) => comm,
            Err(e) => return fail(&e),
        }
    } else {
        comm::single()
    };
    abort_on_panic(&comm);
    let code = match work(&comm) {
        Ok(code) => code,
        Err(e) if e.is_shared() || comm.size() == 1 => {
            if comm.rank() == 0 {
                fail(&e);
            }
            e.exit_code()
        }
        Err(e) => {
            // The others wait for this rank and would for ever.
            let e = e.on_rank(comm.rank());
            log::error!("{e}");
            comm.abort(e.exit_code())
        }
    };
    comm.shutdown();
    code
}

/// A panic on any thread of a rank ends the whole job, with the rank named.
fn abort_on_panic(comm: &Comm<Cpu>) {
    let comm = comm.clone();
    std::panic::set_hook(Box::new(move |panic| {
        eprintln!("error: rank {}: internal error, please report it: {panic}", comm.rank());
        comm.abort(1)
    }));
}
