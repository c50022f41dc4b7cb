//! Which checkpoint an evaluator turns to next.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt as _;

use clap::ValueEnum;

use crate::checkpoint::lease::Lease;
use crate::checkpoint::{Checkpoints, Manifest, name_of};
use crate::error::Result;
use crate::telemetry::evaluations::{self, Evaluation};

/// Which checkpoints are evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// The newest; those that were overtaken are skipped.
    Latest,
    /// All of them, oldest first. The trainer keeps those that wait.
    Every,
}

/// A checkpoint that this evaluator has claimed.
#[derive(Debug)]
pub struct Claim {
    /// Its step.
    pub step: u64,
    /// The name of the save.
    pub id: String,
    lease: Lease,
}

impl Claim {
    /// Lets others look at the checkpoint: its evaluation is recorded.
    pub fn release(self) {
        drop(self.lease);
    }
}

/// The checkpoints of a run as an evaluator sees them.
pub struct Queue {
    checkpoints: Checkpoints,
    policy: Policy,
    /// Names of saves by step and directory: a manifest does not change under its directory.
    names: HashMap<(u64, u64), Option<String>>,
}

impl Queue {
    /// The queue of a run.
    pub fn new(checkpoints: Checkpoints, policy: Policy) -> Self {
        Self { checkpoints, policy, names: HashMap::new() }
    }

    /// Claims the next checkpoint that nobody has evaluated or is evaluating, if there is one.
    ///
    /// # Errors
    /// The file system refused.
    pub fn next(&mut self) -> Result<Option<Claim>> {
        let evaluated = self.checkpoints.evaluated();
        for (step, id) in self.waiting(&evaluated) {
            let Some(lease) = self.checkpoints.leases().take(&format!("{}.evaluate", name_of(step)))? else { continue };
            // Another evaluator may have been faster, or the trainer may have removed it before it saw the lease.
            let settled = evaluations::is_settled(&self.checkpoints.evaluated(), &id);
            if !settled && self.name(step).as_ref() == Some(&id) {
                return Ok(Some(Claim { step, id, lease }));
            }
        }
        Ok(None)
    }

    /// Whether nothing waits, whoever may be at work on it.
    pub fn is_empty(&mut self) -> bool {
        let evaluated = self.checkpoints.evaluated();
        self.waiting(&evaluated).is_empty()
    }

    /// Steps and names of the checkpoints that are to be evaluated, in this order.
    fn waiting(&mut self, evaluated: &[Evaluation]) -> Vec<(u64, String)> {
        let mut steps = self.checkpoints.steps();
        if self.policy == Policy::Latest {
            // Not the highest: a run that passed over a damaged checkpoint is behind it.
            let latest = self.checkpoints.latest_step().or(steps.last().copied());
            steps.retain(|step| Some(*step) == latest);
        }
        let named = steps.into_iter().filter_map(|step| Some((step, self.name(step)?)));
        named.filter(|(_, id)| !evaluations::is_settled(evaluated, id)).collect()
    }

    /// The name of the save of a step; none if it is gone or its manifest is damaged.
    fn name(&mut self, step: u64) -> Option<String> {
        let path = self.checkpoints.path(step);
        let directory = std::fs::metadata(&path).ok()?.ino();
        let read = || match Manifest::read(&path) {
            Ok(manifest) => Some(manifest.id),
            Err(e) => {
                log::warn!("cannot evaluate {}: {e}", path.display());
                None
            }
        };
        self.names.entry((step, directory)).or_insert_with(read).clone()
    }
}
