//! The transports of device memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// `comm.transport`: the transport of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportChoice {
    /// The first that passes a probe: NCCL where every rank has its own device, CUDA IPC if they are
    /// also on one node, CUDA-aware MPI where the library claims to be; otherwise host-staged.
    Auto,
    /// [`DeviceTransport::CudaAware`]
    #[serde(alias = "direct")]
    CudaAware,
    /// [`DeviceTransport::CudaIpc`]
    CudaIpc,
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
            TransportChoice::CudaAware => DeviceTransport::CudaAware.name(),
            TransportChoice::CudaIpc => DeviceTransport::CudaIpc.name(),
            TransportChoice::HostStaged => DeviceTransport::HostStaged.name(),
            TransportChoice::Nccl => DeviceTransport::Nccl.name(),
        })
    }
}

/// The transport of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceTransport {
    /// The MPI library gets device pointers.
    CudaAware,
    /// Ranks of one node write to each other's device memory.
    CudaIpc,
    /// Through pinned host memory.
    HostStaged,
    /// NCCL, which requires a separate GPU for every rank.
    Nccl,
}

impl DeviceTransport {
    /// Returns the name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            DeviceTransport::CudaAware => "cuda-aware",
            DeviceTransport::CudaIpc => "cuda-ipc",
            DeviceTransport::HostStaged => "host-staged",
            DeviceTransport::Nccl => "nccl",
        }
    }

    /// Describes the transport for logs and the startup summary.
    pub fn describe(self) -> &'static str {
        match self {
            DeviceTransport::CudaAware => "device memory by CUDA-aware MPI",
            DeviceTransport::CudaIpc => "device memory by CUDA IPC",
            DeviceTransport::HostStaged => "device memory host-staged (pinned memory)",
            DeviceTransport::Nccl => "device memory by NCCL",
        }
    }

    /// Returns true if the device orders collectives with compute: their messages go through
    /// communicators of the device, and the host only starts them.
    pub fn orders_on_device(self) -> bool {
        matches!(self, DeviceTransport::CudaIpc | DeviceTransport::Nccl)
    }

    /// Returns true if messages read and write device memory, not copies of it on the host.
    pub fn uses_device_memory(self) -> bool {
        self != DeviceTransport::HostStaged
    }

    /// Returns true if the transport has collectives of its vendor, with its order of additions.
    /// MPI has them for CUDA-aware and host-staged memory; `mpi` is whether the library does.
    pub(crate) fn has_vendor_collectives(self, mpi: bool) -> bool {
        match self {
            DeviceTransport::Nccl => true,
            DeviceTransport::CudaIpc => false,
            DeviceTransport::CudaAware | DeviceTransport::HostStaged => mpi,
        }
    }

    /// Returns true if point-to-point messages are host-staged. Where the device orders messages
    /// they are, too: a message blocks its stream until the receiver takes it, so two neighbours
    /// that send to each other before they receive would wait for ever.
    pub(crate) fn stages_messages(self) -> bool {
        self != DeviceTransport::CudaAware
    }
}
