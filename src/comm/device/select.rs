//! Choice of the path to device memory, and the proof that a direct one works here.
//!
//! `auto` is direct if the MPI library claims to know CUDA and one rank of each node shows that it does: two processes of
//! their own (`hpctrain prove-direct`), which may crash, have the library exchange device memory between them. Otherwise it
//! is staged. It is never NCCL, a second library of messages with limits of its own, which only a configuration asks
//! for.

use super::path::{DevicePath, PathSetting};
use crate::backend::Backend;
use crate::comm::communicator::Comm;
use crate::comm::wire::mpi;
use crate::error::{Error, Result};

impl<B: Backend> Comm<B> {
    /// Collective over the world: a handle whose messages reach device memory by `setting`. `prove` tries the direct way
    /// for this rank's node, which nothing else can know to work ([`mpi::prove_in_child`]).
    ///
    /// # Errors
    /// The way that is wanted does not work, or there is no device memory to reach.
    pub fn on_path(&self, setting: PathSetting, prove: impl FnOnce() -> Result<()>) -> Result<Self> {
        if B::ON_HOST {
            return match setting {
                PathSetting::Auto => Ok(self.clone()),
                PathSetting::Direct | PathSetting::Staged | PathSetting::Nccl => {
                    Err(Error::input(format!("comm.path = {setting} is for GPUs"))
                        .hint("leave it out: messages take host memory as it is")
                        .shared())
                }
            };
        }
        let world = &self.inner.world;
        let tries = self.home.by_node().iter().any(|node| node[0] == self.home.rank);
        let mine = match setting {
            PathSetting::Staged => return Ok(self.through(DevicePath::Staged)),
            PathSetting::Nccl => return self.on_library(),
            _ if !tries || self.size() == 1 => Ok(()),
            _ if !world.vendor => Err(Error::input(format!("{} cannot take addresses of a GPU", world.library))),
            PathSetting::Auto if !world.claims_devices => {
                Err(Error::input(format!("{} does not claim to know CUDA", world.library)))
            }
            _ => prove(),
        };
        match (self.world().agree(mine), setting) {
            (Ok(()), _) => Ok(self.through(DevicePath::Direct)),
            (Err(error), PathSetting::Direct) => Err(error.at("comm.path = direct").hint("set comm.path = staged")),
            (Err(error), _) => {
                if self.rank() == 0 {
                    log::info!("messages of GPUs go through the host: {error}");
                }
                Ok(self.through(DevicePath::Staged))
            }
        }
    }

    /// A handle for [`DevicePath::Nccl`]. Alone a rank needs no library.
    fn on_library(&self) -> Result<Self> {
        let mine = if self.size() > 1 { B::device_comm_library().map(Some) } else { Ok(None) };
        let found = self.world().agree(mine).map_err(|error| error.at("comm.path = nccl"))?;
        if let Some(library) = found.filter(|_| self.rank() == 0) {
            log::info!("messages of GPUs go by {library}");
        }
        Ok(self.through(DevicePath::Nccl))
    }
}

/// The arguments by which a program that proves the direct way to be passable is started: `hpctrain prove-direct`.
pub const PROOF: &str = "prove-direct";

/// The proof of [`Comm::on_path`] in children that are this program.
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
