//! Configuration: TOML in, a checked [`Plan`] out.

#![forbid(unsafe_code)]

mod bounds;
mod device;
mod device_memory;
mod epochs;
mod every;
pub mod job;
mod keys;
mod layout;
mod load;
mod network;
mod paths;
mod place;
pub mod placement;
mod range;
mod raw;
mod resolve;
mod rope;
mod servers;
mod size;
mod synonyms;
pub mod telemetry;
mod time;
pub mod topology;

pub use device::DeviceChoice;
pub use device_memory::{DeviceMemory, USUAL_PART};
pub use epochs::ended;
pub use every::Every;
pub use keys::described;
pub use layout::check_ranks;
pub use load::{DEFAULT_PRESET, PRESETS, Sources, deserialize_json, load, overlay, written};
pub use network::{network, sample_spec};
pub use raw::*;
pub use resolve::{Facts, Plan, resolve};
pub use servers::{Partition, Staleness};
pub use size::Size;
pub use time::Time;
