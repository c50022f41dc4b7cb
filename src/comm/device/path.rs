//! Paths of messages to the memory of a device.

use std::fmt;

use serde::{Deserialize, Serialize};

/// `comm.path`: the path of messages to the memory of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathSetting {
    /// The faster one of those that prove to work here: NCCL where every rank has a device of its
    /// own, direct where the MPI library says that it can; else staged.
    Auto,
    /// [`DeviceTransport::Direct`]
    Direct,
    /// [`DeviceTransport::Staged`]
    Staged,
    /// [`DeviceTransport::Nccl`]
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
pub enum DeviceTransport {
    /// The MPI library is given addresses of the device.
    Direct,
    /// Through page-locked memory of the host.
    Staged,
    /// NCCL carries them; every rank has a GPU of its own.
    Nccl,
}

impl DeviceTransport {
    /// For people.
    pub fn describe(self) -> &'static str {
        match self {
            DeviceTransport::Direct => "straight from device memory",
            DeviceTransport::Staged => "device memory staged through the host",
            DeviceTransport::Nccl => "device memory by NCCL",
        }
    }

    /// Whether single messages go through the host. NCCL's, too: a message of NCCL holds up those
    /// behind it until the receiver takes it, so two neighbours that send to each other before they
    /// receive would wait for ever.
    pub(crate) fn stages_messages(self) -> bool {
        self != DeviceTransport::Direct
    }
}
