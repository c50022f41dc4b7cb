//! Paths of messages to the memory of a device.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Comm, mpi};
use crate::backend::Backend;
use crate::error::{Error, Result};

/// `comm.path`: the path of messages to the memory of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathSetting {
    /// Direct where the MPI library says that it can, and then shows it.
    Auto,
    /// [`DevicePath::Direct`]
    Direct,
    /// [`DevicePath::Staged`]
    Staged,
    /// [`DevicePath::Nccl`]
    Nccl,
}

impl fmt::Display for PathSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PathSetting::Auto => "auto",
            PathSetting::Direct => "direct",
            PathSetting::Staged => "staged",
            PathSetting::Nccl => "nccl",
        })
    }
}

/// The path of messages to the memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DevicePath {
    /// The MPI library is given addresses of the device.
    Direct,
    /// Through page-locked memory of the host.
    Staged,
    /// NCCL carries them; every rank has a GPU of its own.
    Nccl,
}

impl DevicePath {
    /// For people.
    pub fn describe(self) -> &'static str {
        match self {
            DevicePath::Direct => "straight from device memory",
            DevicePath::Staged => "device memory staged through the host",
            DevicePath::Nccl => "device memory by NCCL",
        }
    }

    /// Whether single messages go through the host. NCCL's, too: a message of NCCL holds up those behind it until the receiver
    /// takes it, so two neighbours that send to each other before they receive would wait for ever.
    pub(super) fn stages_messages(self) -> bool {
        self != DevicePath::Direct
    }
}

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

    /// A handle whose messages reach device memory by a path that is known to work. All ranks take the same.
    #[must_use]
    pub fn through(&self, path: DevicePath) -> Self {
        Self { path, ..self.clone() }
    }

    /// A handle whose staged messages go in chunks of so many words, rather than 4 MiB. All ranks take the same.
    #[must_use]
    pub fn in_chunks(&self, words: usize) -> Self {
        Self { slot: words.max(1), ..self.clone() }
    }

    /// The path of messages to the memory of the backend; none if it is the host's.
    pub fn device_path(&self) -> Option<DevicePath> {
        (!B::ON_HOST).then_some(self.path)
    }
}

/// The arguments by which a program that proves the direct way to be passable is started: `hpctrain prove-direct`.
pub const PROOF: &str = "prove-direct";

/// The proof of [`Comm::on_path`] in a child that is this program.
///
/// # Errors
/// As [`mpi::prove_in_child`].
pub fn prove() -> Result<()> {
    mpi::prove_in_child(&[PROOF])
}
