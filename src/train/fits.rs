//! Whether a run fits into memory, asked before anything is allocated, and what would.

use std::cmp::Reverse;

use super::available::available;
use super::memory::estimate;
use crate::backend::{Kernels, readable};
use crate::config::{Config, Facts, Plan, resolve};
use crate::error::{Error, Result};
use crate::parallel::Zero;
use crate::telemetry::banner::Estimate;
use crate::topology::Topology;

/// Compares what a rank will need with `run.memory_limit`, what the ranks of this node will with what the node has, and
/// what a rank will need of its GPU with the `gpu` bytes it may take. Messages pass through `messages` bytes; `resident`
/// is what the process holds already.
///
/// # Errors
/// How much is needed for what, how much there is, and what would fit.
pub fn check<B: Kernels>(
    plan: &Plan,
    topology: &Topology,
    messages: usize,
    resident: usize,
    gpu: Option<usize>,
) -> Result<()> {
    let held = Held { messages, resident };
    if let Some(room) = gpu {
        let need = |plan: &Plan| estimate::<B>(plan, &plan.network.blocks(), messages, resident);
        let here = need(plan);
        if here.gpu() > room {
            let message = format!(
                "a rank needs {} of its GPU ({}), and may take {}",
                readable(here.gpu()),
                here.gpu_parts(),
                readable(room)
            );
            return Err(Error::input(message).hint(advice::<B>(plan, |plan| need(plan).gpu(), room)));
        }
    }
    fits::<B>(plan, topology.ranks_here(), &topology.here().host, held, available())
}

/// What does not depend on the plan.
#[derive(Clone, Copy)]
struct Held {
    messages: usize,
    resident: usize,
}

fn fits<B: Kernels>(plan: &Plan, ranks: usize, host: &str, held: Held, available: Option<usize>) -> Result<()> {
    let Held { messages, resident } = held;
    let need = |plan: &Plan| estimate::<B>(plan, &plan.network.blocks(), messages, resident);
    let here = need(plan);
    if let Some(limit) = plan.config.run.memory_limit
        && here.host() > limit.0
    {
        let message = format!("a rank needs {}, more than run.memory_limit = {limit}", told(&here));
        return Err(Error::input(message).hint(advice::<B>(plan, |plan| need(plan).host(), limit.0)));
    }
    // What is resident is no longer available, and needs not be.
    let room = available.map_or(usize::MAX, |available| available / ranks);
    if here.host().saturating_sub(resident) > room {
        let message = format!(
            "{ranks} × {} are needed for the ranks on {host}, where {} are available",
            told(&here),
            readable(room.saturating_mul(ranks))
        );
        return Err(Error::input(message).hint(advice::<B>(
            plan,
            |plan| need(plan).host(),
            room.saturating_add(resident),
        )));
    }
    Ok(())
}

/// `1.5 GiB (parameters 0.5 GiB, …)`.
fn told(estimate: &Estimate) -> String {
    format!("{} ({})", readable(estimate.host()), estimate.host_parts())
}

/// The least change of the configuration after which a rank needs no more than `room`.
fn advice<B: Kernels>(plan: &Plan, need: impl Fn(&Plan) -> usize, room: usize) -> String {
    let variants = variants(plan, plan.mesh.ranks(), !B::ON_HOST);
    let fitting = variants.iter().filter(|variant| need(&variant.plan) <= room);
    if let Some(best) = fitting.min_by_key(|variant| variant.cost()) {
        return format!("{} takes {} a rank", best.settings(), readable(need(&best.plan)));
    }
    let least = |plan: &Plan, ranks| {
        self::variants(plan, ranks, !B::ON_HOST).into_iter().min_by_key(|variant| need(&variant.plan))
    };
    // More ranks: twice as many at a time, as long as the batch can be cut for them.
    let mut ranks = plan.mesh.ranks();
    while let Some(best) = least(plan, 2 * ranks) {
        ranks *= 2;
        if need(&best.plan) <= room {
            return format!(
                "{ranks} ranks, as many on each node as now, and {}: {} a rank",
                best.settings(),
                readable(need(&best.plan))
            );
        }
    }
    "no layout of this network and batch.global fits: make model.layers, model.width or model.context smaller".into()
}

/// Another way to run the same training.
struct Variant {
    plan: Plan,
    /// Write checkpoints without a copy.
    through: bool,
    zero: Option<Zero>,
    recompute: bool,
    offload: bool,
    micro: Option<u64>,
}

impl Variant {
    /// Few changes before many; then the lowest stage and the largest micro-batch; updates on the host come last. Slower
    /// checkpoints are the least.
    fn cost(&self) -> impl Ord + use<> {
        let made = [self.zero.is_some(), self.recompute, self.offload, self.micro.is_some()];
        let changes = made.into_iter().filter(|made| *made).count();
        let cost = 2 * changes + usize::from(self.through);
        (cost, self.offload, self.zero.map(u8::from), self.recompute, Reverse(self.micro))
    }

    /// The settings that make it.
    fn settings(&self) -> String {
        let zero = self.zero.map(|zero| format!("parallel.zero={}", u8::from(zero)));
        let recompute = self.recompute.then(|| "parallel.recompute=true".to_string());
        let offload = self.offload.then(|| "optimizer.offload=true".to_string());
        let micro = self.micro.map(|micro| format!("batch.micro={micro}"));
        let through = self.through.then(|| "checkpoint.asynchronous=false".to_string());
        let settings: Vec<String> = [zero, recompute, offload, micro, through].into_iter().flatten().collect();
        if settings.is_empty() { "this configuration".into() } else { settings.join(" with ") }
    }
}

/// Every stage, recomputation, place of the optimizer, micro-batch and way of saving that takes less than `plan`, on
/// `ranks` ranks.
fn variants(plan: &Plan, ranks: usize, on_gpu: bool) -> Vec<Variant> {
    let (now, recompute, micro) = (plan.config.parallel.zero, plan.config.parallel.recompute, plan.micro);
    let offloads = plan.config.optimizer.offload;
    let stages = [Zero::Zero, Zero::One, Zero::Two, Zero::Three].into_iter().filter(|zero| *zero as u8 >= now as u8);
    let micros: Vec<u64> = (1..=micro).filter(|smaller| micro.is_multiple_of(*smaller)).collect();
    let mut variants = Vec::new();
    for zero in stages {
        for &smaller in &micros {
            for [again, copy, offload] in choices(on_gpu) {
                let mut config: Config = plan.config.clone();
                if ranks != plan.mesh.ranks() {
                    (config.parallel.shard, config.parallel.replica, config.parallel.lanes) = (None, None, None);
                }
                if now == Zero::Zero {
                    config.parallel.shard = None;
                    config.parallel.replica = (zero == Zero::Zero).then_some(ranks);
                }
                config.parallel.zero = zero;
                config.parallel.recompute |= again;
                config.optimizer.offload |= offload;
                config.batch.micro = Some(smaller);
                let through = !copy && std::mem::take(&mut config.checkpoint.asynchronous);
                let facts = Facts { ranks, threads: plan.threads, vocabulary: plan.network.vocabulary(), on_gpu };
                if let Ok(plan) = resolve(config, &facts) {
                    let zero = (zero != now).then_some(zero);
                    let micro = (smaller != micro).then_some(smaller);
                    let (recompute, offload) = (again && !recompute, offload && !offloads);
                    variants.push(Variant { plan, through, zero, recompute, offload, micro });
                }
            }
        }
    }
    variants
}

/// What can be switched: recomputation, checkpoints from a copy, the optimizer on the host of a GPU.
fn choices(on_gpu: bool) -> impl Iterator<Item = [bool; 3]> {
    let all = (0..8).map(|bits| [1, 2, 4].map(|bit| bits & bit != 0));
    all.filter(move |[_, _, offload]| on_gpu || !offload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Memory;
    use crate::backend::cpu::Cpu;
    use crate::backend::cuda::Cuda;
    use crate::config::{Sources, load};

    /// The refusal with this room a rank, on top of what is resident; empty if it fits.
    fn refusal(ranks: usize, settings: &[&str], room_mib: usize) -> String {
        let base = ["model.layers=8", "model.width=256"];
        let overrides: Vec<String> = base.iter().chain(settings).map(|setting| setting.to_string()).collect();
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        let plan = resolve(config, &Facts { ranks, threads: 1, vocabulary: Some(65), on_gpu: false }).unwrap();
        let held = Held { messages: 0, resident: 30 << 20 };
        let fits = fits::<Cpu>(&plan, ranks, "node", held, Some((room_mib << 20) * ranks));
        fits.err().map_or(String::new(), |error| {
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        })
    }

    #[test]
    fn what_fits_is_not_refused() {
        assert_eq!(refusal(1, &[], 1000), "");
        assert_eq!(refusal(4, &["run.memory_limit=1GiB"], 1000), "");
    }

    #[test]
    fn the_least_change_is_told() {
        let error = refusal(1, &[], 150);
        assert!(error.starts_with("1 × 345.3 MiB") && error.contains(" MiB are available\nhint: "), "{error}");
        assert!(error.contains("parameters 24.1 MiB") && error.contains("activations 136.3 MiB"), "{error}");
        assert!(
            error.ends_with("hint: batch.micro=4 with checkpoint.asynchronous=false takes 170.7 MiB a rank"),
            "{error}"
        );
        let error = refusal(1, &[], 270);
        assert!(error.contains("hint: checkpoint.asynchronous=false takes "), "{error}");
        // Activations are small beside the optimizer's state.
        let error = refusal(4, &["batch.micro=1"], 80);
        assert!(error.contains("hint: parallel.zero=") && !error.contains("parallel.recompute"), "{error}");
        let error = refusal(2, &["batch.global=32"], 100);
        assert!(error.contains("hint: parallel.zero=2 with batch.micro="), "{error}");
    }

    #[test]
    fn more_ranks_are_told_when_nothing_else_helps() {
        let error = refusal(2, &["batch.global=32"], 52);
        assert!(error.contains(" ranks, as many on each node as now, and parallel.zero=3"), "{error}");
        let error = refusal(1, &["batch.global=1"], 20);
        assert!(error.contains("no layout of this network and batch.global fits"), "{error}");
    }

    #[test]
    fn the_optimizer_may_leave_a_gpu() {
        // Twelve bytes a parameter are masters and moments; activations are small beside them.
        let overrides = ["model.layers=8", "model.width=256", "batch.global=1"].map(String::from);
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        let plan = |offload: bool| {
            let mut config = config.clone();
            config.optimizer.offload = offload;
            resolve(config, &Facts { ranks: 1, threads: 1, vocabulary: Some(65), on_gpu: true }).unwrap()
        };
        let need = |plan: &Plan| estimate::<Cuda>(plan, &plan.network.blocks(), 0, 0);
        let (there, here) = (need(&plan(false)), need(&plan(true)));
        let moved = there.gpu() - here.gpu();
        assert_eq!(moved, there.categories[Memory::Optimizer as usize] / 2 * 3);
        // And the place that gradients come through.
        assert_eq!(here.host() - there.host(), moved / 3 * 4);
        assert!(here.host_parts().contains("offloaded "), "{}", here.host_parts());
        let hint = advice::<Cuda>(&plan(false), |plan| need(plan).gpu(), here.gpu());
        assert!(hint.starts_with("optimizer.offload=true takes "), "{hint}");
    }

    #[test]
    fn the_limit_of_the_configuration_counts_everything() {
        let error = refusal(1, &["run.memory_limit=200MiB"], 1000);
        assert!(error.contains("more than run.memory_limit = 200MiB\nhint: "), "{error}");
    }
}
