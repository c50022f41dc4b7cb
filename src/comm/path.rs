//! Which way messages take to the memory of a device.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Comm, mpi};
use crate::backend::Backend;
use crate::error::{Error, Result};

/// `comm.path`: how messages reach the memory of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Route {
    /// Direct where the MPI library says that it can, and then shows it.
    Auto,
    /// [`Way::Direct`]
    Direct,
    /// [`Way::Staged`]
    Staged,
    /// [`Way::Nccl`]
    Nccl,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Route::Auto => "auto",
            Route::Direct => "direct",
            Route::Staged => "staged",
            Route::Nccl => "nccl",
        })
    }
}

/// How messages reach the memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// The MPI library is given addresses of the device.
    Direct,
    /// Through page-locked memory of the host.
    Staged,
    /// NCCL carries them; every rank has a GPU of its own.
    Nccl,
}

impl Way {
    /// For people.
    pub fn describe(self) -> &'static str {
        match self {
            Way::Direct => "straight from device memory",
            Way::Staged => "device memory staged through the host",
            Way::Nccl => "device memory by NCCL",
        }
    }

    /// Whether single messages go through the host. NCCL's, too: a message of NCCL holds up those behind it until the receiver
    /// takes it, so two neighbours that send to each other before they receive would wait for ever.
    pub(super) fn stages_messages(self) -> bool {
        self != Way::Direct
    }
}

impl<B: Backend> Comm<B> {
    /// Collective over the world: a handle whose messages reach device memory by `route`. `prove` tries the direct way
    /// for this rank's node, which nothing else can know to work ([`mpi::prove_in_child`]).
    ///
    /// # Errors
    /// The way that is wanted does not work, or there is no device memory to reach.
    pub fn on_route(&self, route: Route, prove: impl FnOnce() -> Result<()>) -> Result<Self> {
        if B::ON_HOST {
            return match route {
                Route::Auto => Ok(self.clone()),
                Route::Direct | Route::Staged | Route::Nccl => {
                    Err(Error::input(format!("comm.path = {route} is for GPUs"))
                        .hint("leave it out: messages take host memory as it is")
                        .shared())
                }
            };
        }
        let world = &self.inner.world;
        let tries = self.home.by_node().iter().any(|node| node[0] == self.home.rank);
        let mine = match route {
            Route::Staged => return Ok(self.through(Way::Staged)),
            Route::Nccl => return self.on_library(),
            _ if !tries || self.size() == 1 => Ok(()),
            _ if !world.vendor => Err(Error::input(format!("{} cannot take addresses of a GPU", world.library))),
            Route::Auto if !world.claims_devices => {
                Err(Error::input(format!("{} does not claim to know CUDA", world.library)))
            }
            _ => prove(),
        };
        match (self.world().agree(mine), route) {
            (Ok(()), _) => Ok(self.through(Way::Direct)),
            (Err(error), Route::Direct) => Err(error.at("comm.path = direct").hint("set comm.path = staged")),
            (Err(error), _) => {
                if self.rank() == 0 {
                    log::info!("messages of GPUs go through the host: {error}");
                }
                Ok(self.through(Way::Staged))
            }
        }
    }

    /// A handle for [`Way::Nccl`]. Alone a rank needs no library.
    fn on_library(&self) -> Result<Self> {
        let mine = if self.size() > 1 { B::peers_library().map(Some) } else { Ok(None) };
        let found = self.world().agree(mine).map_err(|error| error.at("comm.path = nccl"))?;
        if let Some(library) = found.filter(|_| self.rank() == 0) {
            log::info!("messages of GPUs go by {library}");
        }
        Ok(self.through(Way::Nccl))
    }

    /// A handle whose messages reach device memory in a way that is known to work. All ranks take the same.
    #[must_use]
    pub fn through(&self, way: Way) -> Self {
        Self { way, ..self.clone() }
    }

    /// A handle whose staged messages go in chunks of so many words, rather than 4 MiB. All ranks take the same.
    #[must_use]
    pub fn in_chunks(&self, words: usize) -> Self {
        Self { slot: words.max(1), ..self.clone() }
    }

    /// How messages reach the memory of the backend; none if it is the host's.
    pub fn way(&self) -> Option<Way> {
        (!B::ON_HOST).then_some(self.way)
    }
}

/// The arguments by which a program that proves the direct way to be passable is started: `hpctrain prove-direct`.
pub const PROOF: &str = "prove-direct";

/// The proof of [`Comm::on_route`] in a child that is this program.
///
/// # Errors
/// As [`mpi::prove_in_child`].
pub fn prove() -> Result<()> {
    mpi::prove_in_child(&[PROOF])
}
