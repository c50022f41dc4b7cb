//! The queue of checkpoints to evaluate.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt as _;

use clap::ValueEnum;

use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_checkpoint::lease::LeaseGuard;
use hpctrain_checkpoint::{Checkpoints, Manifest, name_of};
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::evaluations::Evaluation;

/// Which checkpoints to evaluate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// Only the newest; older ones are skipped.
    Latest,
    /// All of them, oldest first. The trainer keeps those that are not evaluated yet.
    Every,
}

/// A checkpoint that this evaluator has claimed.
#[derive(Debug)]
pub struct Claim {
    /// The step of the checkpoint.
    pub step: u64,
    /// The id of the save.
    pub id: String,
    lease: LeaseGuard,
}

impl Claim {
    /// Releases the claim, once the evaluation is recorded.
    pub fn release(self) {
        drop(self.lease);
    }
}

/// The checkpoints of a run as an evaluator sees them.
pub struct Queue {
    checkpoints: Checkpoints,
    policy: Policy,
    /// Ids of saves by step and inode of the directory, whose manifest never changes.
    ids: HashMap<(u64, u64), Option<String>>,
}

impl Queue {
    /// Creates the queue of a run.
    pub fn new(checkpoints: Checkpoints, policy: Policy) -> Self {
        Self { checkpoints, policy, ids: HashMap::new() }
    }

    /// Claims the next checkpoint that no evaluator has evaluated or claimed, if there is one.
    ///
    /// # Errors
    /// Returns an error if the run's directory cannot be read or a lease cannot be taken.
    pub fn next(&mut self) -> Result<Option<Claim>> {
        let evaluated = self.checkpoints.evaluated()?;
        for (step, id) in self.waiting(evaluated.known())? {
            let Some(lease) =
                self.checkpoints.leases().take(&format!("{}.evaluate", name_of(step)))?
            else {
                continue;
            };
            // Another evaluator may have been faster, or the trainer may have removed the
            // checkpoint before it saw the lease.
            let settled = evaluations::is_settled(self.checkpoints.evaluated()?.known(), &id);
            if !settled && self.id(step)?.as_ref() == Some(&id) {
                return Ok(Some(Claim { step, id, lease }));
            }
        }
        Ok(None)
    }

    /// Returns true if no checkpoint is left to evaluate. Claimed ones count as left.
    ///
    /// # Errors
    /// Returns an error if the run's directory cannot be read or a lease cannot be taken.
    pub fn is_empty(&mut self) -> Result<bool> {
        let evaluated = self.checkpoints.evaluated()?;
        Ok(self.waiting(evaluated.known())?.is_empty())
    }

    /// Returns steps and save ids of the checkpoints to evaluate, in this order.
    fn waiting(&mut self, evaluated: &[Evaluation]) -> Result<Vec<(u64, String)>> {
        let mut steps = self.checkpoints.steps()?;
        if self.policy == Policy::Latest {
            // Not the highest step: a run that has skipped a damaged checkpoint resumed before it.
            let latest = self.checkpoints.latest_step()?.or(steps.last().copied());
            steps.retain(|step| Some(*step) == latest);
        }
        let mut waiting = Vec::new();
        for step in steps {
            waiting.extend(
                self.id(step)?
                    .filter(|id| !evaluations::is_settled(evaluated, id))
                    .map(|id| (step, id)),
            );
        }
        Ok(waiting)
    }

    /// Returns the id of the save of a step, or `None` if it was removed, or its manifest is
    /// damaged or of another version.
    fn id(&mut self, step: u64) -> Result<Option<String>> {
        let path = self.checkpoints.path(step);
        let directory = match std::fs::metadata(&path) {
            Ok(directory) => directory.ino(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("read", &path, e)),
        };
        if let Some(id) = self.ids.get(&(step, directory)) {
            return Ok(id.clone());
        }
        let id = match Manifest::read(&path) {
            Ok(manifest) => Some(manifest.id),
            // The trainer has just removed it.
            Err(_) if !path.exists() => return Ok(None),
            Err(e) if matches!(e.kind(), Kind::Damaged | Kind::Input) => {
                log::warn!("cannot evaluate {}: {e}", path.display());
                None
            }
            Err(e) => return Err(e),
        };
        self.ids.insert((step, directory), id.clone());
        Ok(id)
    }
}
