//! Removes checkpoints that need not be kept at the user's request.

use serde::Serialize;

use crate::retention::{Candidate, steps_to_remove};
use crate::{Checkpoints, Retention};
use hpctrain_base::error::Result;

/// The checkpoints that a retention does not keep: removed or held.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Pruning {
    /// The steps of removed checkpoints, or of those that would be removed; ascending.
    pub removed: Vec<u64>,
    /// The steps of checkpoints that stay because a process reads them or waits to evaluate them.
    pub held: Vec<u64>,
}

/// Returns what [`prune`] would do.
///
/// # Errors
/// Returns an error if a checkpoint, the evaluations or a lease cannot be read.
pub fn plan(checkpoints: &Checkpoints, retention: &Retention) -> Result<Pruning> {
    let candidates = checkpoints.candidates(checkpoints.evaluated()?.all()?)?;
    let free: Vec<Candidate> =
        candidates.iter().map(|one| Candidate { leased: false, ..*one }).collect();
    let gone = steps_to_remove(&candidates, retention);
    let held =
        steps_to_remove(&free, retention).into_iter().filter(|step| !gone.contains(step)).collect();
    Ok(Pruning { removed: gone, held })
}

/// Removes the checkpoints that need not be kept. A trainer may remove checkpoints at the same
/// time.
///
/// # Errors
/// Returns an error, without having removed anything, if a checkpoint, the evaluations or a lease
/// cannot be read; or if a removal fails.
pub fn prune(checkpoints: &Checkpoints, retention: &Retention) -> Result<Pruning> {
    let Pruning { removed, mut held } = plan(checkpoints, retention)?;
    let (gone, others) = checkpoints.discard_all(&removed)?;
    held.extend(others);
    held.sort_unstable();
    checkpoints.point_to_best(&checkpoints.evaluated()?)?;
    Ok(Pruning { removed: gone, held })
}
