//! Whether messages reach the memory of GPUs: through the host, and straight from the device.

use super::{Check, Finding};
use crate::backend::cpu::Cpu;
use crate::backend::cuda::Cuda;
use crate::backend::{Backend as _, MemoryKind};
use crate::comm::{self, Comm, DeviceTransport};
use crate::error::Result;
use crate::gpu_assignment::Gpu;

/// Elements that ranks add: more than go through the host at a time.
const LEN: usize = (1 << 20) + 33;

/// Elements of each chunk on its way through the host, so that several are under way.
const CHUNK: usize = 1 << 18;

/// Collective over the world: exchanges memory of every rank's GPU. One rank of a node tries the
/// direct way.
///
/// # Errors
/// A message between ranks failed.
pub(super) fn checks(comm: &Comm<Cpu>, gpu: &Gpu, tries_direct: bool) -> Result<Vec<Check>> {
    let mut checks = Vec::new();
    if comm.size() > 1 {
        // All ranks have a device in hand before any waits for a message.
        let opened = comm.world().all_ok(gpu.small());
        let finding = match opened {
            Ok(cuda) => staged(comm, &cuda)?,
            Err(error) => Err(error).into(),
        };
        checks.push(finding.named("transport host-staged"));
        checks.push(nccl(comm, gpu).named("path nccl"));
    }
    if tries_direct {
        checks.push(direct(comm).named("transport cuda-aware"));
    }
    Ok(checks)
}

/// Adds a buffer of every rank through page-locked memory of the host.
fn staged(comm: &Comm<Cpu>, cuda: &Cuda) -> Result<Finding> {
    let world =
        comm.on::<Cuda>().with_transport(DeviceTransport::HostStaged).in_chunks(CHUNK).world();
    let buf = cuda.upload_f32(MemoryKind::Communication, &vec![(comm.rank() + 1) as f32; LEN])?;
    let buf = world.all_reduce(buf, 0..LEN).wait()?;
    let mut got = vec![0.0; LEN];
    cuda.download(Cuda::all(&buf), &mut got)?;
    let want = (comm.size() * (comm.size() + 1) / 2) as f32;
    Ok(match got.iter().position(|&got| got != want) {
        Some(at) => Finding::failure(
            format!(
                "the sum of all ranks through the host is {} at element {at}, not {want}",
                got[at]
            ),
            "set comm.algorithm to another, and report it",
        ),
        None => Finding::ok("the sum of all ranks' device memory, through the host, is right"),
    })
}

/// NCCL is believed only if it works between processes beside all ranks.
fn nccl(comm: &Comm<Cpu>, gpu: &Gpu) -> Finding {
    match gpu.beside(comm).library_works() {
        Err(_) if Cuda::device_comm_library().is_err() => {
            Finding::ok("NCCL is not there: comm.transport = auto, the default, does without")
        }
        Ok(library) => {
            Finding::ok(format!("{library} carries memory of the GPUs unchanged between all ranks"))
        }
        Err(error) => Finding::warning(
            format!("NCCL does not work between all ranks: {}", error.message()),
            "comm.transport = auto, the default, does without; NCCL_DEBUG=INFO makes it say more",
        ),
    }
}

/// The direct path is tried only if the library claims it, and believed only if it works.
fn direct(comm: &Comm<Cpu>) -> Finding {
    if !comm.claims_devices() {
        let found =
            format!("{} does not claim to know CUDA: messages go through the host", comm.library());
        return Finding::ok(found);
    }
    match comm::proved_by() {
        Ok(2) => Finding::ok("MPI carries memory of the GPU unchanged between two processes"),
        Ok(_) => Finding::warning(
            "MPI takes memory of the GPU, by a process with itself: no launcher was found that starts two",
            "put the library's mpirun into the search path, and look again",
        ),
        Err(error) => Finding::warning(
            format!("{} claims to know CUDA, but {}", comm.library(), error.message()),
            "comm.transport = auto, the default, sends through the host",
        ),
    }
}
