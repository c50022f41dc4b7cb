//! Configuration: reads TOML and resolves it to a checked [`ResolvedConfig`].

#![forbid(unsafe_code)]

mod aliases;
mod bounds;
mod device;
mod device_memory;
mod did_you_mean;
mod elastic;
pub mod elastic_ranks;
mod embedding_tables;
mod epochs;
pub mod gpu_assignment;
mod interval;
pub mod job;
mod json_schema;
mod keys;
mod keys_markdown;
mod layout;
mod load;
mod local_launcher;
mod lr_by_batch;
mod memory_checkpoint;
mod mixed_devices;
mod network;
mod or_auto;
mod paths;
mod range;
mod rank_processes;
mod resolve;
mod rope;
mod schema;
mod servers;
mod size;
pub mod telemetry;
mod time;
pub mod topology;
mod unknown_keys;
mod upgrade;
mod work_shares;

pub use device::DeviceChoice;
pub use device_memory::{DEFAULT_FRACTION, DeviceMemory};
pub use elastic::{check as check_elastic, few_virtual_ranks};
pub use epochs::EpochLength;
pub use interval::Interval;
pub use json_schema::json_schema;
pub use keys::describe_keys;
pub use keys_markdown::keys_markdown;
pub use layout::check_ranks;
pub use load::{
    DEFAULT_PRESET, PRESETS, Sources, at_moved_data, deserialize_json, given_keys, load, overlay,
    with_data_path, written,
};
pub use lr_by_batch::LrByBatch;
pub use memory_checkpoint::CopyInterval;
pub use network::{network, sample_spec};
pub use or_auto::OrAuto;
pub use resolve::{Environment, ResolvedConfig, resolve};
pub use schema::*;
pub use servers::{Partition, Staleness};
pub use size::Size;
pub use time::Time;
pub use upgrade::{Upgraded, upgrade};
pub use work_shares::WorkShares;
