//! Proposals in real steps.

use super::search::{Choice, Here, Proposal};
use hpctrain_base::error::Result;
use hpctrain_comm::slowest;
use hpctrain_config::ResolvedConfig;
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_engine::SyntheticTrainer;

/// Steps that touch memory for the first time.
const WARM_UP: usize = 2;

/// Steps that are timed.
const STEPS: usize = 5;

/// Rounds over all proposals: the fastest step counts, since others only disturb, and a disturbance
/// may last.
const ROUNDS: usize = 5;

/// The memory of steps by themselves, without data and checkpoints.
pub const COUNTED: [MemoryKind; 5] = [
    MemoryKind::Parameters,
    MemoryKind::Gradients,
    MemoryKind::Optimizer,
    MemoryKind::Activations,
    MemoryKind::Workspace,
];

/// A proposal that was run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trial {
    /// Seconds of the fastest step, on the slowest rank.
    pub step: f64,
    /// Most bytes that a rank had allocated for parameters, gradients, optimizer, activations and
    /// workspace, by its ledger.
    pub allocated: usize,
}

/// Runs some steps of the first `count` proposals, of the whole network on random data, and puts
/// these in the order of their times: collective over the world of the communicator. Returns their
/// results, in the new order.
///
/// # Errors
/// Out of memory, the device, or a message failed.
pub fn try_out<B: Kernels, F: Fn(&ResolvedConfig) -> Result<B>>(
    choice: &mut Choice,
    here: &Here<'_, B, F>,
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
    here: &Here<'_, B, F>,
) -> Result<Trial> {
    let world = here.comm.world();
    let backend = world.all_ok((here.backend)(plan))?;
    let mut pace = SyntheticTrainer::of_plan(here.comm, plan.clone(), backend)?;
    for _ in 0..WARM_UP {
        pace.step()?;
    }
    world.barrier().wait()?;
    let mine = (0..STEPS).map(|_| pace.step()).collect::<Result<Vec<_>>>()?;
    let step = slowest(&world, &mine)?.into_iter().fold(f64::INFINITY, f64::min);
    let allocated =
        COUNTED.iter().map(|kind| pace.backend().ledger().peak(*kind)).sum::<usize>() as f64;
    let allocated = slowest(&world, &[allocated])?[0] as usize;
    Ok(Trial { step, allocated })
}
