//! Checks of the transports of GPU buffers: host-staged, NCCL, CUDA IPC and CUDA-aware MPI.

use super::{Check, Finding};
use crate::backend::cpu::Cpu;
use crate::backend::cuda::Cuda;
use crate::backend::{Backend as _, MemoryKind};
use crate::comm::{self, Comm, DeviceTransport};
use crate::error::Result;
use crate::gpu_assignment::Gpu;

/// The number of elements to reduce: more than fit into one chunk.
const LEN: usize = (1 << 20) + 33;

/// The number of elements per chunk, so that several are in flight.
const CHUNK: usize = 1 << 18;

/// Checks the transports between the GPUs of all ranks. Collective over the world. The rank of a
/// node with `tries_cuda_aware` also checks CUDA-aware MPI.
///
/// # Errors
/// Returns an error if a message between ranks fails.
pub(super) fn checks(comm: &Comm<Cpu>, gpu: &Gpu, tries_cuda_aware: bool) -> Result<Vec<Check>> {
    let mut checks = Vec::new();
    if comm.size() > 1 {
        // All ranks must have opened their device before any waits for a message.
        let opened = comm.world().all_ok(gpu.open_for_probe());
        let finding = match opened {
            Ok(cuda) => host_staged(comm, &cuda)?,
            Err(error) => Err(error).into(),
        };
        checks.push(finding.named("transport host-staged"));
        let nccl = gpu.device_comm(comm).nccl_works();
        let ipc = gpu.device_comm(comm).ipc_works();
        let no_transport = nccl.is_err() && ipc.is_err() && !comm.claims_cuda_aware();
        checks.push(self::nccl(nccl).named("transport nccl"));
        checks.push(cuda_ipc(ipc).named("transport cuda-ipc"));
        if no_transport && let Some(cost) = gpu.device_comm(comm).cost_of_staging()? {
            checks.push(
                Finding::warning(
                    format!("messages between GPUs go through host memory: {cost}"),
                    "install NCCL (pip install nvidia-nccl-cu13) or name its folder in LD_LIBRARY_PATH",
                )
                .named("transport auto"),
            );
        }
    }
    if tries_cuda_aware {
        checks.push(cuda_aware(comm).named("transport cuda-aware"));
    }
    Ok(checks)
}

/// Reduces a buffer of every rank through pinned host memory.
fn host_staged(comm: &Comm<Cpu>, cuda: &Cuda) -> Result<Finding> {
    let world = comm
        .on::<Cuda>()
        .with_transport(DeviceTransport::HostStaged)
        .with_staging_chunk(CHUNK)
        .world();
    let buf = cuda.upload_f32(MemoryKind::Communication, &vec![(comm.rank() + 1) as f32; LEN])?;
    let buf = world.all_reduce(buf, 0..LEN).wait()?;
    let mut got = vec![0.0; LEN];
    cuda.download(Cuda::all(&buf), &mut got)?;
    let expected = (comm.size() * (comm.size() + 1) / 2) as f32;
    Ok(match got.iter().position(|&got| got != expected) {
        Some(at) => Finding::failure(
            format!(
                "the sum over all ranks through pinned host memory is {} at element {at}, expected {expected}",
                got[at]
            ),
            "set comm.algorithm to another, and report it",
        ),
        None => Finding::ok("sums GPU memory of all ranks correctly, through pinned host memory"),
    })
}

/// Returns the finding for CUDA IPC, of the probe in child processes of all ranks.
fn cuda_ipc(probed: Result<()>) -> Finding {
    match probed {
        Ok(()) => Finding::ok("the ranks open each other's GPU memory (CUDA IPC)"),
        Err(error) => Finding::ok(format!(
            "CUDA IPC cannot be used: {}; comm.transport = auto, the default, does not use it",
            error.message()
        )),
    }
}

/// Returns the finding for NCCL, of the probe in child processes of all ranks.
fn nccl(probed: Result<String>) -> Finding {
    match probed {
        Err(_) if Cuda::device_comm_library().is_err() => Finding::ok(
            "NCCL is not installed: comm.transport = auto, the default, does not use it",
        ),
        Ok(library) => {
            Finding::ok(format!("{library} carries GPU memory unchanged between all ranks"))
        }
        Err(error) => Finding::warning(
            format!("NCCL does not work between all ranks: {}", error.message()),
            "comm.transport = auto, the default, does not use it; NCCL_DEBUG=INFO prints details",
        ),
    }
}

/// Checks CUDA-aware MPI in child processes, if the library reports that it supports CUDA.
fn cuda_aware(comm: &Comm<Cpu>) -> Finding {
    if !comm.claims_cuda_aware() {
        let found = format!(
            "{} does not report CUDA support: messages go through the host",
            comm.library()
        );
        return Finding::ok(found);
    }
    match comm::probe_cuda_aware_processes() {
        Ok(2) => Finding::ok("MPI carries GPU memory unchanged between two processes"),
        Ok(_) => Finding::warning(
            "MPI takes GPU memory, tested within one process: no launcher was found that starts two",
            "add the directory of the MPI library's mpirun to PATH, and run the doctor again",
        ),
        Err(error) => Finding::warning(
            format!("{} reports CUDA support, but {}", comm.library(), error.message()),
            "comm.transport = auto, the default, sends through the host",
        ),
    }
}
