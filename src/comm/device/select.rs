//! Selects the transport of device memory, after probes.
//!
//! `auto` chooses among the transports that pass a probe in child processes, which may crash:
//!
//! - NCCL, if every rank has its own device: one process for each rank (`hpctrain probe-nccl`)
//!   creates a communicator with the others and exchanges memory with them;
//! - CUDA-aware MPI, if the library claims to be and the probe passes on each node: two processes
//!   (`hpctrain probe-cuda-aware`) exchange device memory.
//!
//! If both pass, the ranks all-reduce a buffer with each, and the faster one is used. If neither
//! does, device memory is host-staged. All ranks choose the same transport; the reasons are in the
//! startup summary and in `run.json`.

use std::sync::Arc;
use std::time::Instant;

use super::nccl_probe;
use super::path::{DeviceTransport, TransportChoice};
use crate::communicator::Comm;
use crate::transport::mpi;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, MemoryKind, format_bytes};

/// Elements of the all-reduce that compares two transports: enough to measure bandwidth.
const WORDS: usize = 1 << 20;

/// Number of all-reduces of which the fastest counts, after one that sets up connections.
const ROUNDS: usize = 3;

impl<B: Backend> Comm<B> {
    /// Returns a handle with the device transport of `setting`. `prove` probes CUDA-aware MPI on
    /// this rank's node ([`mpi::probe_in_child`]). `auto` considers NCCL only if the device is
    /// known ([`Comm::with_local_device`]). Collective over the world.
    ///
    /// # Errors
    /// Returns an error if the transport of `setting` does not work, or if it is set although the
    /// backend has no device memory.
    pub fn select_transport(
        &self,
        setting: TransportChoice,
        prove: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        if B::ON_HOST {
            return match setting {
                TransportChoice::Auto => Ok(self.clone()),
                TransportChoice::CudaAware
                | TransportChoice::HostStaged
                | TransportChoice::Nccl => {
                    Err(Error::input(format!("comm.transport = {setting} is for GPUs"))
                        .hint("leave it out: host memory needs no device transport")
                        .shared())
                }
            };
        }
        match setting {
            TransportChoice::HostStaged => Ok(self.with_transport(DeviceTransport::HostStaged)),
            TransportChoice::Nccl => self.on_library(),
            TransportChoice::CudaAware => {
                let probed = self.direct_works(setting, prove);
                probed.map_err(|error| {
                    error.at("comm.transport = cuda-aware").hint("set comm.transport = host-staged")
                })?;
                Ok(self.with_transport(DeviceTransport::CudaAware))
            }
            TransportChoice::Auto if self.size() == 1 => {
                Ok(self.with_transport(DeviceTransport::CudaAware))
            }
            TransportChoice::Auto => {
                let before = self.device.as_ref().and_then(|device| device.chosen.get());
                let (path, why) = match before {
                    Some(before) => before.clone(),
                    None => self.choose(prove)?,
                };
                if let Some(device) = &self.device {
                    device.chosen.get_or_init(|| (path, why.clone()));
                }
                Ok(self.with_transport_and_reason(path, why))
            }
        }
    }

    /// Chooses the transport of `auto`. Returns it with the reasons. Collective over the world.
    fn choose(&self, prove: impl FnOnce() -> Result<()>) -> Result<(DeviceTransport, Arc<str>)> {
        let nccl = self.nccl_works();
        let cuda_aware = self.direct_works(TransportChoice::Auto, prove);
        let (path, why) = match (nccl, cuda_aware) {
            (Ok(library), Ok(())) => {
                let [by_library, by_mpi] =
                    self.compare([DeviceTransport::Nccl, DeviceTransport::CudaAware])?;
                let path = if by_library <= by_mpi {
                    DeviceTransport::Nccl
                } else {
                    DeviceTransport::CudaAware
                };
                let size = format_bytes(WORDS * size_of::<f32>());
                let [by_library, by_mpi] = [by_library, by_mpi].map(|seconds| 1e3 * seconds);
                (
                    path,
                    format!(
                        "sums of {size} take {by_library:.2} ms by {library}, {by_mpi:.2} ms by MPI"
                    ),
                )
            }
            (Ok(library), Err(error)) => {
                (DeviceTransport::Nccl, format!("{library} works here; {}", error.message()))
            }
            (Err(error), Ok(())) => (
                DeviceTransport::CudaAware,
                format!("CUDA-aware MPI passed its probe; NCCL not used: {}", error.message()),
            ),
            (Err(library), Err(mpi)) => (
                DeviceTransport::HostStaged,
                format!(
                    "NCCL not used: {}; CUDA-aware MPI not used: {}",
                    library.message(),
                    mpi.message()
                ),
            ),
        };
        if self.rank() == 0 {
            log::info!("comm.transport = auto: {} ({why})", path.describe());
        }
        Ok((path, why.into()))
    }

    /// Checks with `prove` on each node that MPI is CUDA-aware. Collective over the world.
    ///
    /// # Errors
    /// Returns the same error on all ranks if it is not.
    fn direct_works(
        &self,
        setting: TransportChoice,
        prove: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let world = &self.inner.world;
        let tries = self.home.by_node().iter().any(|node| node[0] == self.home.rank);
        let mine = match setting {
            _ if !tries || self.size() == 1 => Ok(()),
            _ if !world.vendor => {
                Err(Error::input(format!("{} cannot send from GPU memory", world.library)))
            }
            TransportChoice::Auto if !world.claims_cuda_aware => {
                Err(Error::input(format!("{} does not claim to be CUDA-aware", world.library)))
            }
            // The probe processes would see only the devices of one rank.
            TransportChoice::Auto
                if self.device.as_ref().is_some_and(|device| device.is_isolated) =>
            {
                Err(Error::input(
                    "ranks of a node see different GPUs, and the driver may not open the memory of a hidden one",
                ))
            }
            _ => prove(),
        };
        self.world().all_ok(mine)
    }

    /// Probes NCCL between the devices of all ranks, in a child process of each rank. Returns the
    /// name of the library, such as `NCCL 2.27.3`. Collective over the world.
    ///
    /// # Errors
    /// Returns the same error on all ranks if the library cannot be used.
    pub fn nccl_works(&self) -> Result<String> {
        let world = self.world();
        let own = self.device.as_ref().map_or("", |device| &device.id);
        let ids = world.gather_bytes(own.as_bytes().to_vec()).wait()?;
        if ids.iter().any(Vec::is_empty) {
            return Err(
                Error::input("the GPU of a rank is unknown, so ranks may share one").shared()
            );
        }
        for node in self.home.by_node() {
            let shares =
                |rank: &usize| node.iter().filter(|other| ids[**other] == ids[*rank]).count() > 1;
            if let Some(first) = node.iter().find(|rank| shares(rank)) {
                let same: Vec<_> = node
                    .iter()
                    .filter(|other| ids[**other] == ids[*first])
                    .map(|rank| rank.to_string())
                    .collect();
                return Err(Error::input(format!("ranks {} share a GPU", same.join(", "))).shared());
            }
        }
        let library = world.all_ok(B::device_comm_library())?;
        nccl_probe::probe_nccl(&world, own)?;
        Ok(library)
    }

    /// Measures the seconds of an all-reduce with each of some transports. Collective over the
    /// world.
    fn compare<const N: usize>(&self, paths: [DeviceTransport; N]) -> Result<[f64; N]> {
        let world = self.world();
        let small = match &self.device {
            Some(device) => (device.open_small)(),
            None => Err(Error::internal("no device to compare transports with")),
        };
        let backend = world.all_ok(small)?;
        let times = paths.into_iter().map(|path| self.time_all_reduce(path, &backend));
        let mine = times.collect::<Result<Vec<u64>>>()?;
        let all = world.all_gather_u64(&mine)?;
        // The scratch memory belongs to this small device.
        self.free_device_resources()?;
        // The slowest rank counts.
        Ok(std::array::from_fn(|path| {
            all.iter().map(|of_rank| of_rank[path]).max().unwrap_or(0) as f64 * 1e-9
        }))
    }

    /// Returns the nanoseconds of the fastest all-reduce with a transport. Collective over the
    /// world.
    fn time_all_reduce(&self, path: DeviceTransport, backend: &B) -> Result<u64> {
        let group = self.with_transport(path).world();
        let mut buf = backend.upload_f32(MemoryKind::Communication, &vec![1.0; WORDS])?;
        let mut best = u64::MAX;
        for round in 0..=ROUNDS {
            let begun = Instant::now();
            buf = group.all_reduce(buf, 0..WORDS).synchronize()?;
            let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            best = if round > 0 { best.min(took) } else { best };
        }
        Ok(best)
    }

    /// Returns a handle for [`DeviceTransport::Nccl`]. A single rank needs no library.
    ///
    /// # Errors
    /// Returns the same error on all ranks if NCCL cannot be loaded.
    fn on_library(&self) -> Result<Self> {
        let mine = if self.size() > 1 { B::device_comm_library().map(Some) } else { Ok(None) };
        let found = self.world().all_ok(mine).map_err(|error| error.at("comm.transport = nccl"))?;
        if let Some(library) = found.filter(|_| self.rank() == 0) {
            log::info!("comm.transport = nccl: {library}");
        }
        Ok(self.with_transport(DeviceTransport::Nccl))
    }
}

/// The command that runs the probe of CUDA-aware MPI: `hpctrain probe-cuda-aware`.
pub const CUDA_PROBE_COMMAND: &str = "probe-cuda-aware";

/// Probes CUDA-aware MPI for [`Comm::select_transport`], in child processes of this program.
///
/// # Errors
/// Returns an error in the same cases as [`mpi::probe_in_child`].
pub fn probe_cuda_aware() -> Result<()> {
    probe_cuda_aware_processes().map(drop)
}

/// Probes CUDA-aware MPI like [`probe_cuda_aware`]. Returns the number of processes that exchanged memory.
///
/// # Errors
/// Returns an error in the same cases as [`mpi::probe_in_child`].
pub fn probe_cuda_aware_processes() -> Result<usize> {
    mpi::probe_in_child(&[CUDA_PROBE_COMMAND])
}
