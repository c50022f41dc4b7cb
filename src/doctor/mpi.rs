//! Checks of MPI: the library, its thread level, and shared memory.

use super::{Check, Finding};
use crate::backend::cpu::Cpu;
use crate::comm::{self, Comm};

/// Checks the MPI library of this rank.
pub(super) fn checks(comm: &Comm<Cpu>, launcher: Option<&str>) -> Vec<Check> {
    let Some(launcher) = launcher else {
        let found = match comm::mpi::library() {
            Ok(library) => Finding::ok(format!(
                "{library}; not initialised, as this process was started alone: mpirun -np 2 hpctrain doctor"
            )),
            Err(error) => Finding::from(Err(error)).at_most_a_warning(),
        };
        return vec![found.named("mpi")];
    };
    let file = comm::mpi::opened_path().map_or(String::new(), |path| format!(" ({path})"));
    let ranks = format!("{} rank{}", comm.size(), if comm.size() == 1 { "" } else { "s" });
    let mut checks = vec![
        Finding::ok(format!("{}{file}, {ranks}, started by {launcher}", comm.library()))
            .named("mpi"),
    ];
    if let Some(level) = comm.thread_level() {
        checks.push(
            Finding::ok(format!("{level} granted, MPI_THREAD_FUNNELED needed"))
                .named("mpi threads"),
        );
    }
    if comm.is_renumbered() {
        checks.push(
            Finding::ok(
                "by node: the launcher placed consecutive ranks on different nodes; its own messages have other numbers",
            )
            .named("rank numbers"),
        );
    }
    if comm.node().local_size > 1 {
        checks.push(shared_memory(comm.shares_memory()).named("shared memory"));
    }
    checks
}

fn shared_memory(shares: bool) -> Finding {
    match shares {
        true => Finding::ok("ranks of a node communicate through shared memory"),
        false => Finding::warning(
            "ranks of a node do not share memory: they communicate by messages, which is slower",
            "unset HPCTRAIN_RANKS_PER_NODE; ranks of a node share memory if they see each other's processes in /proc",
        ),
    }
}
