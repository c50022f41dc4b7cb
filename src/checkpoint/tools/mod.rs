//! Operations on checkpoints without training: `hpctrain checkpoint`.

pub mod describe;
pub mod diff;
pub mod list;
pub mod prune;
pub mod resolve_path;
pub mod verify;
