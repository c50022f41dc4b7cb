//! Choice of the path to device memory, and the proof that it works here.
//!
//! `auto` chooses among the paths that processes of their own, which may crash, prove to work:
//!
//! - NCCL, if every rank has a device of its own: a process for each rank (`hpctrain
//!   prove-together`) meets the others and exchanges memory with them;
//! - direct, if the MPI library claims to know CUDA and one rank of each node shows that it does:
//!   two processes (`hpctrain prove-direct`) have the library exchange device memory between them.
//!
//! Where both work, ranks add up a buffer by each of them, and the faster one is taken. Where
//! neither does, messages are staged. All ranks choose alike, and the reasons are in the banner and
//! in `run.json`.

use std::sync::Arc;
use std::time::Instant;

use super::nccl_probe;
use super::path::{DeviceTransport, TransportChoice};
use crate::communicator::Comm;
use crate::transport::mpi;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, MemoryKind, readable};

/// Elements that two paths add up to be compared: more than latencies count.
const WORDS: usize = 1 << 20;

/// Sums of which the fastest counts, after one that begins connections.
const ROUNDS: usize = 3;

impl<B: Backend> Comm<B> {
    /// Collective over the world: a handle whose messages reach device memory by `setting`. `prove`
    /// tries the direct way for this rank's node, which nothing else can know to work
    /// ([`mpi::prove_in_child`]). NCCL is tried only if the device is known
    /// ([`Comm::with_local_device`]).
    ///
    /// # Errors
    /// The way that is wanted does not work, or there is no device memory to reach.
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
                        .hint("leave it out: messages take host memory as it is")
                        .shared())
                }
            };
        }
        match setting {
            TransportChoice::HostStaged => Ok(self.with_transport(DeviceTransport::HostStaged)),
            TransportChoice::Nccl => self.on_library(),
            TransportChoice::CudaAware => {
                let proved = self.direct_works(setting, prove);
                proved.map_err(|error| {
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
                Ok(self.because(path, why))
            }
        }
    }

    /// The path of `auto`, with the reasons.
    fn choose(&self, prove: impl FnOnce() -> Result<()>) -> Result<(DeviceTransport, Arc<str>)> {
        let together = self.library_works();
        let direct = self.direct_works(TransportChoice::Auto, prove);
        let (path, why) = match (together, direct) {
            (Ok(library), Ok(())) => {
                let [by_library, by_mpi] =
                    self.compare([DeviceTransport::Nccl, DeviceTransport::CudaAware])?;
                let path = if by_library <= by_mpi {
                    DeviceTransport::Nccl
                } else {
                    DeviceTransport::CudaAware
                };
                let size = readable(WORDS * size_of::<f32>());
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
                format!("MPI has shown it; not by NCCL: {}", error.message()),
            ),
            (Err(library), Err(mpi)) => (
                DeviceTransport::HostStaged,
                format!("not by NCCL: {}; not straight: {}", library.message(), mpi.message()),
            ),
        };
        if self.rank() == 0 {
            log::info!("messages of GPUs: {} ({why})", path.describe());
        }
        Ok((path, why.into()))
    }

    /// Whether MPI takes addresses of the device, as `prove` shows on each node.
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
                Err(Error::input(format!("{} cannot take addresses of a GPU", world.library)))
            }
            TransportChoice::Auto if !world.claims_devices => {
                Err(Error::input(format!("{} does not claim to know CUDA", world.library)))
            }
            // The processes that prove it would see the devices of one rank.
            TransportChoice::Auto if self.device.as_ref().is_some_and(|device| device.is_apart) => {
                Err(Error::input(
                    "ranks of a node see different GPUs, and a driver may not open the memory of one that is hidden",
                ))
            }
            _ => prove(),
        };
        self.world().all_ok(mine)
    }

    /// Collective over the world: the library by which the devices of all ranks exchange memory,
    /// such as `NCCL 2.27.3`, as processes beside them have shown.
    ///
    /// # Errors
    /// The same on all ranks: the reason why there is none.
    pub fn library_works(&self) -> Result<String> {
        let world = self.world();
        let own = self.device.as_ref().map_or("", |device| &device.id);
        let ids = world.gather_bytes(own.as_bytes().to_vec()).wait()?;
        if ids.iter().any(Vec::is_empty) {
            return Err(
                Error::input("nobody can tell whether each rank has a GPU of its own").shared()
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
        nccl_probe::together(&world, own)?;
        Ok(library)
    }

    /// Seconds in which the ranks add up a buffer by each of some paths.
    fn compare<const N: usize>(&self, paths: [DeviceTransport; N]) -> Result<[f64; N]> {
        let world = self.world();
        let none = || Error::internal("a device to compare paths with");
        let small = self.device.as_ref().map_or_else(|| Err(none()), |device| (device.small)());
        let backend = world.all_ok(small)?;
        let time = |path: DeviceTransport| {
            let group = self.with_transport(path).world();
            let mut buf = backend.upload_f32(MemoryKind::Communication, &vec![1.0; WORDS])?;
            let mut best = u64::MAX;
            for round in 0..=ROUNDS {
                let begun = Instant::now();
                buf = group.all_reduce(buf, 0..WORDS).wait()?;
                let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
                best = if round > 0 { best.min(took) } else { best };
            }
            Ok(best)
        };
        let mine = paths.into_iter().map(time).collect::<Result<Vec<u64>>>()?;
        let all = world.all_gather_u64(&mine)?;
        // Their memory is this small device's.
        self.forget_devices()?;
        // All wait for the slowest.
        Ok(std::array::from_fn(|path| {
            all.iter().map(|of_rank| of_rank[path]).max().unwrap_or(0) as f64 * 1e-9
        }))
    }

    /// A handle for [`DeviceTransport::Nccl`]. Alone a rank needs no library.
    fn on_library(&self) -> Result<Self> {
        let mine = if self.size() > 1 { B::device_comm_library().map(Some) } else { Ok(None) };
        let found = self.world().all_ok(mine).map_err(|error| error.at("comm.transport = nccl"))?;
        if let Some(library) = found.filter(|_| self.rank() == 0) {
            log::info!("messages of GPUs go by {library}");
        }
        Ok(self.with_transport(DeviceTransport::Nccl))
    }
}

/// The arguments by which a program that proves the direct way to be passable is started: `hpctrain
/// prove-direct`.
pub const PROOF: &str = "prove-direct";

/// The proof of [`Comm::select_transport`] in children that are this program.
///
/// # Errors
/// As [`mpi::prove_in_child`].
pub fn prove() -> Result<()> {
    proved_by().map(drop)
}

/// As [`prove`]: the number of processes that exchanged memory.
///
/// # Errors
/// As [`mpi::prove_in_child`].
pub fn proved_by() -> Result<usize> {
    mpi::prove_in_child(&[PROOF])
}
