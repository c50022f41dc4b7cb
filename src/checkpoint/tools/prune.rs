//! Removing checkpoints that need not be kept, when a user asks for it.

use serde::Serialize;

use crate::retention::{Candidate, removed};
use crate::{Checkpoints, Retention};
use hpctrain_base::error::Result;

/// The checkpoints that a retention does not ask for: removed or held.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Pruning {
    /// Steps whose checkpoints are removed, or would be; ascending.
    pub removed: Vec<u64>,
    /// Steps whose checkpoints somebody reads, or waits to evaluate: they stay.
    pub held: Vec<u64>,
}

/// The result that [`prune`] would have.
///
/// # Errors
/// Something that decides about it cannot be read.
pub fn plan(checkpoints: &Checkpoints, retention: &Retention) -> Result<Pruning> {
    let candidates = checkpoints.candidates(checkpoints.evaluated()?.all()?)?;
    let free: Vec<Candidate> =
        candidates.iter().map(|one| Candidate { held: false, ..*one }).collect();
    let gone = removed(&candidates, retention);
    let held = removed(&free, retention).into_iter().filter(|step| !gone.contains(step)).collect();
    Ok(Pruning { removed: gone, held })
}

/// Removes the checkpoints that need not be kept. A trainer may remove checkpoints at the same
/// time.
///
/// # Errors
/// Something that decides about it cannot be read: nothing is removed. Or the file system refused.
pub fn prune(checkpoints: &Checkpoints, retention: &Retention) -> Result<Pruning> {
    let Pruning { removed, mut held } = plan(checkpoints, retention)?;
    let (gone, others) = checkpoints.discard_all(&removed)?;
    held.extend(others);
    held.sort_unstable();
    checkpoints.point_to_best(&checkpoints.evaluated()?)?;
    Ok(Pruning { removed: gone, held })
}
