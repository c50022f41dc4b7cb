//! Selects the transport of device memory, after probes.
//!
//! `auto` takes the first transport that passes its probe in child processes, which may crash:
//!
//! - NCCL, if every rank has its own device: one process for each rank (`hpctrain probe-nccl`)
//!   creates a communicator with the others and exchanges memory with them;
//! - CUDA IPC, if the ranks are also on one node: such processes (`hpctrain probe-cuda-ipc`) open
//!   each other's memory;
//! - CUDA-aware MPI, if the library claims to be and the probe passes on each node: two processes
//!   (`hpctrain probe-cuda-aware`) exchange device memory.
//!
//! If none does, device memory is host-staged, which is a warning where ranks of a node have a device
//! each. Those after the first that passes are not probed. All ranks choose the same transport. The
//! reasons are in the startup summary and in `run.json`, with the bandwidth of an all-reduce.

use std::sync::Arc;
use std::time::Instant;

use super::path::{DeviceTransport, TransportChoice};
use super::rank_probe::{RankProbe, probe_ranks};
use crate::communicator::Comm;
use crate::group::Group;
use crate::transport::mpi;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, MemoryKind, format_bytes};

/// Elements of the all-reduce that every transport is measured with.
const WORDS: usize = 1 << 20;

/// Elements of an all-reduce that reaches the bandwidth of fast links.
const MANY_WORDS: usize = 16 << 20;

/// Bytes of device memory for [`MANY_WORDS`] and the terms that an all-reduce receives.
const MEMORY_FOR_MANY: usize = 256 << 20;

/// An all-reduce of [`WORDS`] that takes more nanoseconds is not limited by its size.
const SLOW: u64 = 2_000_000;

/// Number of all-reduces of which the fastest counts, after one that sets up connections.
const ROUNDS: usize = 3;

/// The hint where GPUs of a node cannot exchange their memory.
const NO_TRANSPORT: &str = "install NCCL (pip install nvidia-nccl-cu13) or name its folder in LD_LIBRARY_PATH, \
     and let the ranks of a node see all of its GPUs (--gpus-per-node, --gpu-bind=none)";

/// The speed of an all-reduce.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// The seconds of the slowest rank.
    seconds: f64,
    bytes: usize,
    /// The number of ranks, the most if there are several groups.
    ranks: usize,
}

impl Measured {
    /// Returns the load of each rank's link in bytes per second, as nccl-tests define it: the bytes
    /// of the buffer per second times 2(n−1)/n.
    fn bus_bandwidth(&self) -> f64 {
        let ranks = self.ranks as f64;
        2.0 * (ranks - 1.0) / ranks * self.bytes as f64 / self.seconds
    }
}

impl<B: Backend> Comm<B> {
    /// Returns a handle with the device transport of `setting`. `prove` probes CUDA-aware MPI on
    /// this rank's node ([`mpi::probe_in_child`]). `auto` considers NCCL and CUDA IPC only if the
    /// device is known ([`Comm::with_local_device`]). Collective over the world.
    ///
    /// # Errors
    /// Returns an error if the transport of `setting` does not work, or if it is set although the
    /// backend has no device memory.
    pub fn select_transport(
        &self,
        setting: TransportChoice,
        prove: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        if self.is_mixed {
            return match setting {
                TransportChoice::Auto | TransportChoice::HostStaged => Ok(self.clone()),
                TransportChoice::CudaAware | TransportChoice::CudaIpc | TransportChoice::Nccl => {
                    Err(Error::input(format!(
                        "comm.transport = {setting} requires a GPU for every rank, and some compute on the CPU"
                    ))
                    .hint("set comm.transport=host-staged, or omit it")
                    .shared())
                }
            };
        }
        if B::ON_HOST {
            return match setting {
                TransportChoice::Auto => Ok(self.clone()),
                TransportChoice::CudaAware
                | TransportChoice::CudaIpc
                | TransportChoice::HostStaged
                | TransportChoice::Nccl => {
                    Err(Error::input(format!("comm.transport = {setting} is for GPUs"))
                        .hint("omit it: host memory needs no device transport")
                        .shared())
                }
            };
        }
        match setting {
            TransportChoice::HostStaged => Ok(self.with_transport(DeviceTransport::HostStaged)),
            TransportChoice::Nccl => self.on_library(),
            TransportChoice::CudaIpc => {
                self.can_open_peers().map_err(|error| error.at("comm.transport = cuda-ipc"))?;
                Ok(self.with_transport(DeviceTransport::CudaIpc))
            }
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
        let (path, mut why) = self.first_that_works(prove);
        let has_device = self.device.is_some();
        let has_devices = self.world().all_gather_u64(&[u64::from(has_device)])?;
        if has_devices.iter().flatten().all(|&has_device| has_device == 1) {
            match path {
                DeviceTransport::CudaIpc | DeviceTransport::Nccl => {
                    if let Some(measured) = self.measure_inside_nodes(path)? {
                        why += &format!(
                            "; an all-reduce of {} inside a node has {:.1} GB/s (bus bandwidth)",
                            format_bytes(measured.bytes),
                            measured.bus_bandwidth() * 1e-9
                        );
                    }
                }
                DeviceTransport::HostStaged => {
                    if let Some(cost) = self.cost_of_staging()?
                        && self.rank() == 0
                    {
                        log::warn!(
                            "messages between GPUs go through host memory: {cost} ({why})\nhint: {NO_TRANSPORT}"
                        );
                    }
                }
                DeviceTransport::CudaAware => {}
            }
        }
        if self.rank() == 0 {
            log::info!("comm.transport = auto: {} ({why})", path.describe());
        }
        Ok((path, why.into()))
    }

    /// Returns the first transport that passes its probe, with the reasons. Collective over the world.
    fn first_that_works(&self, prove: impl FnOnce() -> Result<()>) -> (DeviceTransport, String) {
        let nccl = match self.nccl_works() {
            Ok(library) => return (DeviceTransport::Nccl, format!("{library} passed its probe")),
            Err(error) => format!("NCCL not used: {}", error.message()),
        };
        let ipc = match self.ipc_works() {
            Ok(()) => {
                return (DeviceTransport::CudaIpc, format!("CUDA IPC passed its probe; {nccl}"));
            }
            Err(error) => format!("CUDA IPC not used: {}", error.message()),
        };
        match self.direct_works(TransportChoice::Auto, prove) {
            Ok(()) => (
                DeviceTransport::CudaAware,
                format!("CUDA-aware MPI passed its probe; {nccl}; {ipc}"),
            ),
            Err(error) => (
                DeviceTransport::HostStaged,
                format!("{nccl}; {ipc}; CUDA-aware MPI not used: {}", error.message()),
            ),
        }
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
        self.have_own_devices(&world)?;
        let library = world.all_ok(B::device_comm_library())?;
        probe_ranks(RankProbe::Nccl, &world, self.device_id())?;
        Ok(library)
    }

    /// Probes CUDA IPC between the devices of all ranks, which are on one node, in a child process of
    /// each rank. Ranks that share a device take turns on it while their kernels wait for each other,
    /// which is slower than copies through the host, so for them it is an error. Collective over the
    /// world.
    ///
    /// # Errors
    /// Returns the same error on all ranks if it cannot be used.
    pub fn ipc_works(&self) -> Result<()> {
        let world = self.world();
        self.can_open_peers()?;
        self.have_own_devices(&world)?;
        probe_ranks(RankProbe::CudaIpc, &world, self.device_id())
    }

    /// Returns the identity of this rank's device on its node, empty if it is unknown.
    fn device_id(&self) -> &str {
        self.device.as_ref().map_or("", |device| &device.id)
    }

    /// Checks that every rank has its own device. Collective over the world.
    ///
    /// # Errors
    /// Returns the same error on all ranks if some do not, or a device is unknown.
    fn have_own_devices(&self, world: &Group<B>) -> Result<()> {
        let ids = world.gather_bytes(self.device_id().as_bytes().to_vec()).wait()?;
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
        Ok(())
    }

    /// Checks what CUDA IPC requires of the job: ranks on one node, a memory pool of fixed size, and
    /// an algorithm other than the vendor's, as far as the device is known. All ranks have the same
    /// result.
    ///
    /// # Errors
    /// Returns an error if it cannot be used.
    fn can_open_peers(&self) -> Result<()> {
        let nodes = self.home.by_node().len();
        let other = "or comm.transport to nccl, cuda-aware or host-staged";
        let error = if nodes > 1 {
            Error::input(format!("the ranks are on {nodes} nodes, and CUDA IPC is for one"))
                .hint("set comm.transport=nccl, cuda-aware or host-staged")
        } else if self.device.as_ref().is_some_and(|device| device.has_growing_memory) {
            Error::input("CUDA IPC requires a memory pool of fixed size, and device.memory = grow")
                .hint(format!("set device.memory to a part such as 0.9, {other}"))
        } else if self.device.as_ref().is_some_and(|device| device.needs_vendor) {
            Error::input("CUDA IPC has no vendor collectives, and comm.algorithm = vendor")
                .hint(format!("set comm.algorithm=auto, {other}"))
        } else {
            return Ok(());
        };
        Err(error.shared())
    }

    /// Returns what an all-reduce through host memory costs, if ranks of a node have a device each:
    /// other transports would be faster. Collective over the world.
    ///
    /// # Errors
    /// Returns an error if the device of a rank is unknown or fails, or a message between ranks
    /// failed.
    pub fn cost_of_staging(&self) -> Result<Option<String>> {
        let world = self.world();
        let has_neighbours = self.home.by_node().iter().any(|node| node.len() > 1);
        if !has_neighbours || self.have_own_devices(&world).is_err() {
            return Ok(None);
        }
        let backend = world.all_ok(self.open_device(0))?;
        let path = DeviceTransport::HostStaged;
        let seconds = time_all_reduce(&self.with_transport(path).world(), &backend, WORDS)?;
        let measured = self.slowest(&world, seconds, WORDS, self.size())?;
        self.free_device_resources()?;
        let bytes = measured.bytes as f64;
        Ok(Some(format!(
            "an all-reduce takes {:.2} s per GB of gradients, measured with {}",
            1e9 * measured.seconds / bytes,
            format_bytes(measured.bytes)
        )))
    }

    /// Opens the device with little memory, besides `bytes` of it.
    fn open_device(&self, bytes: usize) -> Result<B> {
        match &self.device {
            Some(device) => (device.open_small)(bytes),
            None => Err(Error::internal("no device to measure a transport with")),
        }
    }

    /// Measures an all-reduce between the ranks of each node, if there are any with several. Warns on
    /// rank 0 where links of the devices are faster. Collective over the world.
    fn measure_inside_nodes(&self, path: DeviceTransport) -> Result<Option<Measured>> {
        let world = self.world();
        let nodes = self.home.by_node();
        let ranks = nodes.iter().map(Vec::len).max().unwrap_or(1);
        if ranks == 1 {
            return Ok(None);
        }
        let mut colors = vec![0; self.size()];
        for (node, ranks) in nodes.iter().enumerate() {
            ranks.iter().for_each(|&rank| colors[rank] = node);
        }
        let group = self.with_transport(path).split(&colors)?;
        // The bandwidth of the device with the slowest links, in bytes per second; 0 if one is unknown.
        let expected = self.device.as_ref().and_then(|device| device.bus_bandwidth).unwrap_or(0);
        let expected = world.all_gather_u64(&[expected])?;
        let expected = expected.into_iter().flatten().min().unwrap_or(0);
        let more = if expected > 0 { MEMORY_FOR_MANY } else { 0 };
        let opened = world.all_ok(self.open_device(more));
        let is_large = opened.is_ok() && more > 0;
        let backend = match opened {
            Err(_) if more > 0 => world.all_ok(self.open_device(0))?,
            opened => opened?,
        };
        let nanoseconds = time_all_reduce(&group, &backend, WORDS)?;
        let mut measured = self.slowest(&world, nanoseconds, WORDS, ranks)?;
        if is_large && measured.seconds < SLOW as f64 * 1e-9 {
            let nanoseconds = time_all_reduce(&group, &backend, MANY_WORDS)?;
            measured = self.slowest(&world, nanoseconds, MANY_WORDS, ranks)?;
        }
        // The scratch memory belongs to this small device.
        self.free_device_resources()?;
        if self.rank() == 0 && measured.bus_bandwidth() < expected as f64 {
            log::warn!(
                "an all-reduce between the GPUs of a node has {:.1} GB/s (bus bandwidth), although NVLink of \
                 this model reaches more than {:.0} GB/s\nhint: let the ranks of a node see all of its GPUs \
                 (--gpus-per-node, --gpu-bind=none), and check that they reach each other: \
                 nvidia-smi topo -p2p r",
                measured.bus_bandwidth() * 1e-9,
                expected as f64 * 1e-9
            );
        }
        Ok(Some(measured))
    }

    /// Returns the speed of an all-reduce, of which this rank measured the time. The slowest rank
    /// counts. Collective over the world.
    fn slowest(
        &self,
        world: &Group<B>,
        nanoseconds: u64,
        words: usize,
        ranks: usize,
    ) -> Result<Measured> {
        let all = world.all_gather_u64(&[nanoseconds])?;
        let slowest = all.into_iter().flatten().max().unwrap_or(1).max(1);
        let bytes = words * size_of::<f32>();
        Ok(Measured { seconds: slowest as f64 * 1e-9, bytes, ranks })
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

/// Returns the nanoseconds of the fastest all-reduce of a group. Collective over the group.
fn time_all_reduce<B: Backend>(group: &Group<B>, backend: &B, words: usize) -> Result<u64> {
    let mut buf = backend.upload_f32(MemoryKind::Communication, &vec![1.0; words])?;
    let mut best = u64::MAX;
    for round in 0..=ROUNDS {
        let begun = Instant::now();
        buf = group.all_reduce(buf, 0..words).synchronize()?;
        let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        best = if round > 0 { best.min(took) } else { best };
    }
    Ok(best)
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
