//! Paths of messages to the memory of a device.

use std::fmt;

use serde::{Deserialize, Serialize};

/// `comm.transport`: the path of messages to the memory of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportChoice {
    /// The faster of those that pass a probe: NCCL where every rank has its own device, CUDA-aware
    /// MPI where the library says that it is; else host-staged.
    Auto,
    /// [`DeviceTransport::CudaAware`]
    #[serde(alias = "direct")]
    CudaAware,
    /// [`DeviceTransport::HostStaged`]
    #[serde(alias = "staged")]
    HostStaged,
    /// [`DeviceTransport::Nccl`]
    Nccl,
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            TransportChoice::Auto => "auto",
            TransportChoice::CudaAware => "cuda-aware",
            TransportChoice::HostStaged => "host-staged",
            TransportChoice::Nccl => "nccl",
        })
    }
}

/// The path of messages to the memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceTransport {
    /// The MPI library gets device pointers.
    CudaAware,
    /// Through pinned host memory.
    HostStaged,
    /// NCCL carries them; every rank has a GPU of its own.
    Nccl,
}

impl DeviceTransport {
    /// For people.
    pub fn describe(self) -> &'static str {
        match self {
            DeviceTransport::CudaAware => "straight from device memory",
            DeviceTransport::HostStaged => "device memory staged through the host",
            DeviceTransport::Nccl => "device memory by NCCL",
        }
    }

    /// Whether single messages go through the host. NCCL's, too: a message of NCCL holds up those
    /// behind it until the receiver takes it, so two neighbours that send to each other before they
    /// receive would wait for ever.
    pub(crate) fn stages_messages(self) -> bool {
        self != DeviceTransport::CudaAware
    }
}
