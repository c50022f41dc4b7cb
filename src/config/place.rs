//! Embedding tables in the memory of the host: `model.place.tables`.

use super::{Config, TablesPlace};
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::nn::Network;
use crate::parallel::Storage;

/// The network as its tables' place wants it: with tables on the host the first block is nothing but them.
///
/// # Errors
/// The host cannot keep them: there is no GPU, the network has none, or the layout divides their block or averages it.
pub fn placed(config: &Config, network: Network, mesh: &Mesh, tensor_lanes: usize, on_gpu: bool) -> Result<Network> {
    if config.model.place.tables == TablesPlace::Device {
        return Ok(network);
    }
    let refused = |why: &str| Error::input(format!("model.place.tables = host {why}"));
    if !on_gpu {
        return Err(refused("is for GPUs")
            .hint("leave it out, or run on a node with a GPU: on a CPU tables are in the memory of the host anyway"));
    }
    let parallel = &config.parallel;
    let layouts = [
        (mesh.pipeline > 1, "parallel.pipeline", "which the host is no stage of"),
        (tensor_lanes > 1, "parallel.tensor", "which cuts tables into slices"),
        (parallel.storage == Storage::Central, "parallel.storage", "whose owners keep all parameters"),
        (parallel.average_every != super::Every::Steps(0), "parallel.average_every", "which averages GPUs' parameters"),
    ];
    if let Some((_, key, why)) = layouts.into_iter().find(|(is_set, ..)| *is_set) {
        return Err(refused(&format!("does not go with {key}, {why}"))
            .hint(format!("leave {key} out, or set model.place.tables=device")));
    }
    network.with_tables_apart().map_err(|why| {
        refused(why).hint("leave it out: tables of networks by layers, and of Llamas with an output matrix of their own, can be there")
    })
}
