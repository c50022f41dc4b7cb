//! The transports of device memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// `comm.transport`: the transport of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportChoice {
    /// The faster of those that pass a probe: NCCL where every rank has its own device, CUDA-aware
    /// MPI where the library claims to be; otherwise host-staged.
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

/// The transport of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceTransport {
    /// The MPI library gets device pointers.
    CudaAware,
    /// Through pinned host memory.
    HostStaged,
    /// NCCL, which requires a separate GPU for every rank.
    Nccl,
}

impl DeviceTransport {
    /// Describes the transport for logs and the startup summary.
    pub fn describe(self) -> &'static str {
        match self {
            DeviceTransport::CudaAware => "device memory by CUDA-aware MPI",
            DeviceTransport::HostStaged => "device memory host-staged (pinned memory)",
            DeviceTransport::Nccl => "device memory by NCCL",
        }
    }

    /// Returns true if point-to-point messages are host-staged. With NCCL they are, too: an NCCL
    /// message blocks its stream until the receiver takes it, so two neighbours that send to each
    /// other before they receive would wait for ever.
    pub(crate) fn stages_messages(self) -> bool {
        self != DeviceTransport::CudaAware
    }
}
