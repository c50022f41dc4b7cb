//! Offset between the clocks of two hosts.
//!
//! Clocks of one host agree. Ranks of other hosts ask rank 0 32 times at the start and take the
//! quickest answer; later drift is not corrected.

use super::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// Questions a rank asks; the quickest answer counts.
const ROUNDS: usize = 32;

/// Collective: nanoseconds to add to my `now` for that of the group's rank 0.
///
/// One rank after the other asks rank 0 for its time. The answer was written between question and
/// receipt, in the middle if both ways take equally long: the error is at most half the time of the
/// quickest exchange.
pub fn offset(wire: &mut dyn Transport, group: &GroupRanks, now: impl Fn() -> u64) -> Result<i64> {
    if group.rank == 0 {
        for rank in 1..group.size() {
            for _ in 0..ROUNDS {
                wire.exchange_bytes(group, None, Some((rank, &mut [0])))?;
                wire.exchange_bytes(group, Some((rank, &now().to_le_bytes())), None)?;
            }
        }
        return Ok(0);
    }
    let mut quickest = u64::MAX;
    let mut offset = 0;
    for _ in 0..ROUNDS {
        let mut answer = [0; 8];
        let asked = now();
        wire.exchange_bytes(group, Some((0, &[0])), None)?;
        wire.exchange_bytes(group, None, Some((0, &mut answer)))?;
        let took = now().saturating_sub(asked);
        if took < quickest {
            quickest = took;
            offset = u64::from_le_bytes(answer).wrapping_sub(asked + took / 2).cast_signed();
        }
    }
    Ok(offset)
}
