//! Messages to and from device memory: through the host, by address, or by NCCL.

pub(super) mod comms;
pub(super) mod direct;
pub(super) mod path;
pub(super) mod select;
pub(super) mod staged;
