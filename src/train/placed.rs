//! Training on the device of `run.device`.

use super::run::{GpuPlace, Own, Request, train};
use crate::backend::cpu::Cpu;
use crate::comm::Comm;
use crate::error::Result;
use crate::placement::{cpu, cpu_can, place};
use crate::run_dir::Ending;

/// A whole run on the device of `run.device`, as by `hpctrain train`: collective over the world of `comm`. The ranks of
/// `beside` are told the directory, as by [`train`].
///
/// Signals end the process at once unless [`signals::listen`](crate::signals::listen) was called before; then the run
/// saves first.
///
/// # Errors
/// As [`train`], or there are no such devices.
pub fn train_on_device(
    comm: &Comm<Cpu>,
    request: &Request,
    own: Own<'_>,
    beside: Option<&Comm<Cpu>>,
) -> Result<Ending> {
    match place(comm, &request.config)? {
        None => {
            comm.world().agree(cpu_can(&request.config))?;
            train(comm, request, own, beside.map(Comm::world).as_ref(), cpu)
        }
        Some(gpu) => {
            let place = GpuPlace { memory: gpu.memory, table: gpu.table.clone() };
            let request = Request { gpu: Some(place), ..request.clone() };
            let beside = beside.map(|beside| beside.on().world());
            train(&comm.on(), &request, own, beside.as_ref(), |plan| gpu.backend(plan))
        }
    }
}
