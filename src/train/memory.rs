//! What a rank will need, computed before anything is allocated.

use crate::backend::{Kernels, Memory};
use crate::config::Plan;
use crate::layout::UnitLayout;
use crate::nn::{Block, Blocks};
use crate::parallel::{self, Life};
use crate::telemetry::banner::Estimate;

/// Bytes of an f32.
const F32: usize = size_of::<f32>();

/// What a process grows by after the start besides the categories: packed operands of products, the reader's
/// decompressed chunks, message buffers of MPI, slack of the allocator. Measured; it does not depend on the model.
const GROWTH: usize = 7 << 20;

/// The peak of every category, from the plan alone. Messages pass through `messages` bytes; `resident` is what the
/// process holds already.
pub fn estimate<B: Kernels>(plan: &Plan, blocks: &Blocks<B>, messages: usize, resident: usize) -> Estimate {
    let keep = plan.residency();
    let size = plan.config.precision.compute.size();
    let padded: Vec<usize> =
        blocks.iter().map(|block| UnitLayout::new(block.name(), block.tensors(), plan.lanes).padded).collect();
    let all: usize = padded.iter().sum();
    let owned = all / plan.mesh.shard;
    let borrows: Vec<Option<usize>> = blocks.iter().map(|block| block.borrows()).collect();
    let borrowed: Vec<usize> = borrows.iter().flatten().copied().collect();
    let lent: usize = borrowed.iter().map(|&unit| padded[unit]).sum();
    let largest = {
        let others = padded.iter().enumerate().filter(|(unit, _)| !borrowed.contains(unit));
        others.map(|(_, len)| *len).max().unwrap_or(0)
    };
    let lanes = plan.lanes / plan.mesh.data();
    // Partial sums in the tree of lanes while the last one is computed.
    let partial = lanes.next_power_of_two().trailing_zeros() as usize;
    let offloads = plan.config.optimizer.offload;
    let full = match keep.params {
        Life::Step => all,
        Life::Use => {
            let pass = parallel::step(&borrows, lanes * plan.micros_per_lane());
            parallel::peak(&pass, keep.ahead, &padded)
        }
    };
    let are_masters_apart = !offloads && (keep.params == Life::Use || size < F32);
    let parameters = full * size + if are_masters_apart { owned * F32 } else { 0 };
    let gradients = match (partial, keep.grads) {
        (0, Life::Step) => all,
        (0, Life::Use) => parallel::backward_peak(&borrows, plan.mesh.shard, &padded),
        // The lane being computed joins its unit's tree as soon as the unit is done.
        _ => partial * all + 2 * largest + lent,
    };
    let state = match plan.rule {
        crate::optim::Rule::AdamW { .. } => 2 * owned,
        crate::optim::Rule::Sgd { .. } => owned,
    };

    let rows = plan.micro as usize * plan.network.context();
    // Bytes a row.
    let input = |b: &dyn Block<B>| b.input_per_row() * size;
    let saved = |b: &dyn Block<B>| b.saved_per_row() * size + b.exact_per_row() * F32;
    let scratch = |b: &dyn Block<B>| b.scratch_per_row() * size;
    let recompute = plan.config.parallel.recompute;
    let kept: usize = blocks.iter().map(|b| input(&**b) + if recompute { 0 } else { saved(&**b) }).sum();
    let recomputed = if recompute { widest(blocks, saved) } else { 0 };
    let training = rows * (kept + recomputed + widest(blocks, scratch) + F32);
    let evaluation_rows = plan.config.eval.batch as usize * plan.network.context();
    let evaluation = evaluation_rows * widest(blocks, |b| input(b) + saved(b) + scratch(b));

    let mut categories = [0; Memory::ALL.len()];
    categories[Memory::Parameters as usize] = parameters;
    categories[Memory::Gradients as usize] = gradients * F32;
    match offloads {
        true => categories[Memory::Offloaded as usize] = parallel::offloaded_bytes(Some(plan.rule), owned),
        false => categories[Memory::Optimizer as usize] = state * F32,
    }
    let constants: usize = blocks.iter().map(|block| block.constants()).sum();
    categories[Memory::Activations as usize] = training.max(evaluation) + constants * F32;
    categories[Memory::Communication as usize] = messages;
    // Read ahead, one being read, one in use, one on the device; inputs and targets.
    categories[Memory::Data as usize] = (plan.config.data.prefetch + 3) * rows * 2 * size_of::<u32>();
    if plan.config.checkpoint.asynchronous {
        // Ranks divide parameters and state among themselves, copies of them too.
        categories[Memory::Checkpoint as usize] = (all / plan.mesh.data() + state / plan.mesh.replica) * F32;
    }
    // A host copy of one unit at a time: at the start, and when a checkpoint is written through.
    let staging = padded.iter().max().copied().unwrap_or(0) * F32;
    categories[Memory::Workspace as usize] = B::WORKSPACE;
    Estimate { categories, staging, runtime: resident + GROWTH, on_gpu: !B::ON_HOST }
}

fn widest<B: Kernels>(blocks: &Blocks<B>, of: impl Fn(&dyn Block<B>) -> usize) -> usize {
    blocks.iter().map(|block| of(&**block)).max().unwrap_or(0)
}

/// Resident bytes of this process: now, and at most.
pub fn resident() -> (usize, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches(" kB").parse::<usize>().ok()
    };
    let bytes = |name| field(name).unwrap_or(0) * 1024;
    (bytes("VmRSS:"), bytes("VmHWM:"))
}
