//! Trials of proposed layouts in real steps.

use super::search::{Proposal, SearchEnvironment, SearchResult};
use hpctrain_base::error::Result;
use hpctrain_comm::slowest;
use hpctrain_config::ResolvedConfig;
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_engine::SyntheticTrainer;

/// Warm-up steps, which touch memory for the first time.
const WARM_UP: usize = 2;

/// Timed steps.
const STEPS: usize = 5;

/// Rounds over all proposals. The fastest step counts, since other processes only slow steps down,
/// and a disturbance may last for a while.
const ROUNDS: usize = 5;

/// The kinds of memory that steps use, without data and checkpoints.
pub const COUNTED: [MemoryKind; 5] = [
    MemoryKind::Parameters,
    MemoryKind::Gradients,
    MemoryKind::Optimizer,
    MemoryKind::Activations,
    MemoryKind::Workspace,
];

/// The result of a trial.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trial {
    /// Seconds of the fastest step, on the slowest rank.
    pub step: f64,
    /// Peak bytes that a rank had allocated for parameters, gradients, optimizer, activations and
    /// workspace.
    pub allocated: usize,
}

/// Runs steps of the first `count` proposals with the whole network on random data, and sorts these
/// proposals by their measured times. Returns their results in the new order. Collective over the
/// world of the communicator.
///
/// # Errors
/// Returns an error if memory runs out, or if the device or a message between ranks fails.
pub fn run_trials<B: Kernels, F: Fn(&ResolvedConfig) -> Result<B>>(
    choice: &mut SearchResult,
    here: &SearchEnvironment<'_, B, F>,
    count: usize,
) -> Result<Vec<Trial>> {
    let count = count.min(choice.proposals.len());
    let nothing = Trial { step: f64::INFINITY, allocated: 0 };
    let mut tried: Vec<(Trial, Proposal)> =
        choice.proposals.drain(..count).map(|one| (nothing, one)).collect();
    for _ in 0..ROUNDS {
        for (trial, proposal) in &mut tried {
            let found = try_one(&proposal.plan, here)?;
            trial.step = trial.step.min(found.step);
            trial.allocated = trial.allocated.max(found.allocated);
        }
    }
    tried.sort_by(|(one, _), (other, _)| one.step.total_cmp(&other.step));
    let (trials, first): (Vec<Trial>, Vec<Proposal>) = tried.into_iter().unzip();
    choice.proposals.splice(..0, first);
    Ok(trials)
}

fn try_one<B: Kernels, F: Fn(&ResolvedConfig) -> Result<B>>(
    plan: &ResolvedConfig,
    here: &SearchEnvironment<'_, B, F>,
) -> Result<Trial> {
    let world = here.comm.world();
    let backend = world.all_ok((here.backend)(plan))?;
    let mut trainer = SyntheticTrainer::from_plan(here.comm, plan.clone(), backend)?;
    for _ in 0..WARM_UP {
        trainer.step()?;
    }
    world.barrier().wait()?;
    let mine = (0..STEPS).map(|_| trainer.step()).collect::<Result<Vec<_>>>()?;
    let step = slowest(&world, &mine)?.into_iter().fold(f64::INFINITY, f64::min);
    let allocated =
        COUNTED.iter().map(|kind| trainer.backend().memory_stats().peak(*kind)).sum::<usize>()
            as f64;
    let allocated = slowest(&world, &[allocated])?[0] as usize;
    Ok(Trial { step, allocated })
}
