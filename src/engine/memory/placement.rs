//! `log.placement`: where the parameters, gradients, optimizer state and activations of each block
//! of a rank are.

use std::fmt;

use super::estimate::{ActivationBytes, F32};
use super::tables::HostTables;
use hpctrain_base::layout::UnitLayout;
use hpctrain_base::mesh::Axis;
use hpctrain_config::ResolvedConfig;
use hpctrain_device::{Kernels, format_bytes};
use hpctrain_nn::loans;
use hpctrain_parallel::{self as parallel, Lifetime, Storage};

/// The memory that holds a part of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryPlace {
    /// The memory of the device that computes: a GPU, or the host if ranks compute on CPUs.
    Device,
    /// Host memory, from which a GPU gets what it needs.
    Host,
}

/// A part of a block: its parameters, its gradient, its optimizer state, or its activations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedPart {
    /// Its name.
    pub name: &'static str,
    /// The number of bytes that this rank holds.
    pub bytes: usize,
    /// The memory that holds it.
    pub place: MemoryPlace,
}

impl PlacedPart {
    fn on_device(name: &'static str, bytes: usize) -> Self {
        Self { name, bytes, place: MemoryPlace::Device }
    }

    fn on_host(name: &'static str, bytes: usize) -> Self {
        Self { name, bytes, place: MemoryPlace::Host }
    }
}

/// The parts of a block that a rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPlacement {
    /// The name of the block.
    pub block: String,
    /// Its parts.
    pub parts: Vec<PlacedPart>,
    /// Whether the device computes in host memory.
    on_host: bool,
}

impl fmt::Display for BlockPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.block)?;
        for (index, PlacedPart { name, bytes, place }) in self.parts.iter().enumerate() {
            let device = match (self.on_host, place) {
                (true, _) => "CPU",
                (false, MemoryPlace::Device) => "GPU",
                (false, MemoryPlace::Host) => "host",
            };
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma} {name} {} on {device}", format_bytes(*bytes))?;
        }
        Ok(())
    }
}

/// Returns the placement of every block of rank `rank`: the buffers that stay from step to step,
/// and the activations that one micro-batch saves for its backward.
pub fn placement<B: Kernels>(plan: &ResolvedConfig, rank: usize) -> Vec<BlockPlacement> {
    let size = plan.config.precision.dtype.size(B::ON_HOST);
    let slices = plan.tensor_shards(rank);
    let mut blocks = plan.network.tensor_parallel_blocks::<B>(&slices);
    let stage = plan.stage(plan.mesh.stage(rank), &loans(&blocks));
    let next = blocks.get(stage.units.end).map(|block| slices.own(block.input_per_row()));
    let tables = stage.takes_embedding_rows().then(|| {
        let block = &blocks[0];
        let layout =
            UnitLayout::sharded(block.name(), block.tensors(), plan.virtual_ranks, &slices);
        (block.name(), HostTables::new(plan, layout, blocks[1].input_per_row()))
    });
    blocks.truncate(stage.units.end);
    blocks.drain(..stage.units.start);
    let owns = plan.config.parallel.storage == Storage::Ranks
        || plan.mesh.coordinates(rank)[Axis::Replica as usize] == 0;
    let outer = plan.local_sgd.and_then(|averaging| averaging.outer);
    let states = if owns {
        let names = parallel::state_names(Some(plan.update_rule), plan.ema, outer);
        names.len() + usize::from(outer.is_some())
    } else {
        0
    };
    let buffers = BlockBuffers { plan, size, states, owns };
    let rows = plan.micro as usize * plan.network.context();
    let activations = ActivationBytes::new(plan, &blocks, &slices, &stage, next);
    let saved = activations.kept();
    let on_host = B::ON_HOST;
    let of_tables = tables.map(|(block, tables)| {
        let (name, bytes) = tables.kept_bytes(states);
        BlockPlacement { block, parts: vec![PlacedPart::on_host(name, bytes)], on_host }
    });
    let of_blocks = blocks.iter().enumerate().map(|(index, block)| {
        let layout =
            UnitLayout::sharded(block.name(), block.tensors(), plan.virtual_ranks, &slices);
        let mut parts = buffers.parts(layout.padded);
        let on_device = rows * (saved[index + 1] - saved[index]);
        parts.push(PlacedPart::on_device("activations", on_device));
        if activations.is_offloaded(index) {
            let bytes = rows * activations.input_bytes(index);
            parts.push(PlacedPart::on_host("input", bytes));
        }
        parts.retain(|part| part.bytes > 0);
        BlockPlacement { block: block.name(), parts, on_host }
    });
    of_tables.into_iter().chain(of_blocks).collect()
}

/// The buffers of a block that stay in memory from step to step.
struct BlockBuffers<'a> {
    plan: &'a ResolvedConfig,
    /// Bytes of a parameter.
    size: usize,
    /// Buffers of optimizer state.
    states: usize,
    /// Whether the rank updates parameters.
    owns: bool,
}

impl BlockBuffers<'_> {
    /// Returns the parts of a block of `padded` elements that stay from step to step.
    fn parts(&self, padded: usize) -> Vec<PlacedPart> {
        let Self { plan, size, states, owns } = *self;
        let policy = plan.sharding_policy();
        let here = plan.replicas_per_rank();
        let owned = if owns { plan.assignment().largest_shard(padded) } else { 0 };
        let offloads = plan.config.offload.optimizer;
        let mut parts = Vec::new();
        match policy.params {
            Lifetime::Step => parts.push(PlacedPart::on_device("parameters", here * padded * size)),
            Lifetime::Use if offloads => {}
            Lifetime::Use => {
                parts.push(PlacedPart::on_device("shard of parameters", here * owned * F32))
            }
        }
        if policy.params == Lifetime::Step && size < F32 && !offloads {
            parts.push(PlacedPart::on_device("fp32 master weights", here * owned * F32));
        }
        match policy.grads {
            Lifetime::Step => parts.push(PlacedPart::on_device("gradient", padded * F32)),
            Lifetime::Use if policy.on_host => {}
            Lifetime::Use => {
                parts.push(PlacedPart::on_device("shard of the gradient", owned * F32))
            }
        }
        if offloads {
            let bytes = here * parallel::offloaded_bytes(states, owned);
            parts.push(PlacedPart::on_host(
                "fp32 master weights, gradient and optimizer state",
                bytes,
            ));
        } else {
            parts.push(PlacedPart::on_device("optimizer state", here * states * owned * F32));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_config::{Config, Environment, overlay, resolve};
    use hpctrain_cpu::Cpu;
    use hpctrain_cuda::Cuda;

    fn plan(ranks: usize, on_gpu: bool, keys: &[&str]) -> ResolvedConfig {
        let layers =
            "model.layers=[{kind='dense', units=8}, {kind='relu'}, {kind='dense', units=3}]";
        let common = ["model.kind='layers'", "model.input=[4]", layers, "batch.global=8"];
        let keys: Vec<String> = common.iter().chain(keys).map(|key| (*key).into()).collect();
        let config = overlay(&Config::default(), &keys).unwrap();
        resolve(config, &Environment { ranks, threads: 1, vocabulary: None, on_gpu }).unwrap()
    }

    fn lines<B: Kernels>(plan: &ResolvedConfig, rank: usize) -> Vec<String> {
        placement::<B>(plan, rank).iter().map(BlockPlacement::to_string).collect()
    }

    #[test]
    fn every_block_has_its_bytes_on_the_cpu() {
        let plan = plan(1, false, &[]);
        let placed = placement::<Cpu>(&plan, 0);
        let bytes = |name: &str| -> usize {
            let parts = placed.iter().flat_map(|block| &block.parts);
            parts.filter(|part| part.name == name).map(|part| part.bytes).sum()
        };
        // Weights and biases of both layers, without padding between them.
        let least = 4 * (4 * 8 + 8 + 8 * 3 + 3);
        assert!((least..2 * least).contains(&bytes("parameters")), "{placed:?}");
        assert_eq!(bytes("gradient"), bytes("parameters"));
        assert_eq!(bytes("optimizer state"), 2 * bytes("parameters"));
        assert!(bytes("activations") >= 8 * 4 * (4 + 8));
        let lines = lines::<Cpu>(&plan, 0);
        assert!(lines.iter().all(|line| line.contains(" on CPU") && !line.contains("GPU")));
    }

    #[test]
    fn shards_hold_their_part() {
        let whole = placement::<Cpu>(&plan(1, false, &[]), 0);
        let sharded = plan(2, false, &["parallel.zero=3"]);
        for rank in 0..2 {
            let placed = placement::<Cpu>(&sharded, rank);
            let state = |placed: &[BlockPlacement]| -> usize {
                let parts = placed.iter().flat_map(|block| &block.parts);
                parts.filter(|part| part.name == "optimizer state").map(|part| part.bytes).sum()
            };
            assert!(2 * state(&placed) <= state(&whole) + 512, "{placed:?}");
            let names: Vec<&str> = placed[0].parts.iter().map(|part| part.name).collect();
            assert_eq!(names[..2], ["shard of parameters", "shard of the gradient"]);
        }
        let central = plan(2, false, &["parallel.storage='central'"]);
        let has_state = [0, 1].map(|rank| lines::<Cpu>(&central, rank)[0].contains("optimizer"));
        assert_eq!(has_state, [true, false]);
    }

    #[test]
    fn offloaded_parts_are_on_the_host() {
        let on_gpu = plan(1, true, &[]);
        assert!(lines::<Cuda>(&on_gpu, 0).iter().all(|line| !line.contains(" on host")));
        assert!(lines::<Cuda>(&on_gpu, 0)[0].contains("fp32 master weights"));
        let offloaded = plan(1, true, &["offload.optimizer=true"]);
        let text = lines::<Cuda>(&offloaded, 0)[0].clone();
        assert!(text.contains("parameters") && text.contains(" on GPU, gradient"), "{text}");
        assert!(text.contains("fp32 master weights, gradient and optimizer state "), "{text}");
        assert!(text.contains(" on host"), "{text}");
    }
}
