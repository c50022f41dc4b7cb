//! Divides the virtual ranks among ranks of unequal speed (`parallel.work_shares = auto`).

use hpctrain_base::error::Result;
use hpctrain_base::fault;
use hpctrain_base::mesh::Axis;
use hpctrain_comm::Group;
use hpctrain_config::{ResolvedConfig, WorkShares};
use hpctrain_device::Kernels;
use hpctrain_engine::{Engine, warmup_step};

/// The number of steps that are measured, after one that warms up.
const MEASURED: usize = 3;

/// Measures the time that each rank takes for a virtual rank, on random data, and divides the
/// virtual ranks so that all ranks end at about the same time. Parameters are unchanged, and so are
/// the bits of the run, which do not depend on who computes which virtual rank. Collective over
/// `world`.
///
/// # Errors
/// Returns an error if the device or a message between ranks fails.
pub fn divide_by_speed<B: Kernels>(
    world: &Group<B>,
    plan: &mut ResolvedConfig,
    engine: &mut Engine<B>,
) -> Result<()> {
    if plan.config.parallel.work_shares != WorkShares::Auto || plan.mesh.data() == 1 {
        return Ok(());
    }
    fault::at(world.rank(), 0);
    let counts = plan.virtual_ranks_of_all();
    let mut seconds = vec![f64::INFINITY; world.size()];
    warmup_step(plan, engine)?;
    for _ in 0..MEASURED {
        let compute = warmup_step(plan, engine)?;
        for ((least, now), count) in seconds.iter_mut().zip(compute).zip(&counts) {
            *least = least.min(now / *count as f64);
        }
    }
    // The slowest stage or slice determines the time of a pipeline or a tensor-parallel group.
    let mut slowest = vec![0.0_f64; plan.mesh.data()];
    for (rank, seconds) in seconds.into_iter().enumerate() {
        let at = plan.mesh.coordinates(rank);
        let data_rank = at[Axis::Replica as usize] * plan.mesh.shard + at[Axis::Shard as usize];
        slowest[data_rank] = slowest[data_rank].max(seconds);
    }
    // A clock with coarse ticks may measure nothing.
    let shares: Vec<f64> = slowest.iter().map(|seconds| 1.0 / seconds.max(1e-9)).collect();
    plan.deal(&shares);
    engine.expect_virtual_ranks(plan);
    let times: Vec<String> =
        slowest.iter().map(|seconds| format!("{:.1} ms", 1e3 * seconds)).collect();
    log::info!(
        "a virtual rank takes {} on the data-parallel ranks, which get {:?} of them",
        times.join(", "),
        plan.virtual_rank_counts.as_deref().unwrap_or_default()
    );
    Ok(())
}
