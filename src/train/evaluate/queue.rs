//! Queue of the checkpoints to evaluate.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt as _;

use clap::ValueEnum;

use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_checkpoint::lease::LeaseGuard;
use hpctrain_checkpoint::{Checkpoints, Manifest, name_of};
use hpctrain_config::telemetry::evaluations;
use hpctrain_config::telemetry::evaluations::Evaluation;

/// Selection of the checkpoints to evaluate.
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
    lease: LeaseGuard,
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
        let evaluated = self.checkpoints.evaluated()?;
        for (step, id) in self.waiting(evaluated.known())? {
            let Some(lease) =
                self.checkpoints.leases().take(&format!("{}.evaluate", name_of(step)))?
            else {
                continue;
            };
            // Another evaluator may have been faster, or the trainer may have removed it before it
            // saw the lease.
            let settled = evaluations::is_settled(self.checkpoints.evaluated()?.known(), &id);
            if !settled && self.name(step)?.as_ref() == Some(&id) {
                return Ok(Some(Claim { step, id, lease }));
            }
        }
        Ok(None)
    }

    /// Whether no checkpoint is left to evaluate. Claimed ones count as left.
    ///
    /// # Errors
    /// The file system refused.
    pub fn is_empty(&mut self) -> Result<bool> {
        let evaluated = self.checkpoints.evaluated()?;
        Ok(self.waiting(evaluated.known())?.is_empty())
    }

    /// Steps and names of the checkpoints that are to be evaluated, in this order.
    fn waiting(&mut self, evaluated: &[Evaluation]) -> Result<Vec<(u64, String)>> {
        let mut steps = self.checkpoints.steps()?;
        if self.policy == Policy::Latest {
            // Not the highest: a run that passed over a damaged checkpoint is behind it.
            let latest = self.checkpoints.latest_step()?.or(steps.last().copied());
            steps.retain(|step| Some(*step) == latest);
        }
        let mut waiting = Vec::new();
        for step in steps {
            waiting.extend(
                self.name(step)?
                    .filter(|id| !evaluations::is_settled(evaluated, id))
                    .map(|id| (step, id)),
            );
        }
        Ok(waiting)
    }

    /// The name of the save of a step; none if it is gone, or its manifest is damaged or of another
    /// version.
    fn name(&mut self, step: u64) -> Result<Option<String>> {
        let path = self.checkpoints.path(step);
        let directory = match std::fs::metadata(&path) {
            Ok(directory) => directory.ino(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("read", &path, e)),
        };
        if let Some(name) = self.names.get(&(step, directory)) {
            return Ok(name.clone());
        }
        let name = match Manifest::read(&path) {
            Ok(manifest) => Some(manifest.id),
            // The trainer has removed it in this moment.
            Err(_) if !path.exists() => return Ok(None),
            Err(e) if matches!(e.kind(), Kind::Damaged | Kind::Input) => {
                log::warn!("cannot evaluate {}: {e}", path.display());
                None
            }
            Err(e) => return Err(e),
        };
        self.names.insert((step, directory), name.clone());
        Ok(name)
    }
}
