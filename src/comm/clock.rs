//! Offset between the clocks of two hosts.
//!
//! Ranks of one host share a clock. At the start each rank asks rank 0 for its time 32 times and
//! uses the quickest answer; later drift is not corrected.

use super::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// The number of times that a rank asks. The quickest answer counts.
const ROUNDS: usize = 32;

/// Returns the nanoseconds to add to this rank's `now` to get that of the group's rank 0.
/// Collective.
///
/// One rank after the other asks rank 0 for its time. The answer is assumed to be from the middle
/// between question and receipt: the error is at most half the time of the quickest exchange.
pub fn offset(
    transport: &mut dyn Transport,
    group: &GroupRanks,
    now: impl Fn() -> u64,
) -> Result<i64> {
    if group.rank == 0 {
        for rank in 1..group.size() {
            for _ in 0..ROUNDS {
                transport.exchange_bytes(group, None, Some((rank, &mut [0])))?;
                transport.exchange_bytes(group, Some((rank, &now().to_le_bytes())), None)?;
            }
        }
        return Ok(0);
    }
    let mut quickest = u64::MAX;
    let mut offset = 0;
    for _ in 0..ROUNDS {
        let mut answer = [0; 8];
        let asked = now();
        transport.exchange_bytes(group, Some((0, &[0])), None)?;
        transport.exchange_bytes(group, None, Some((0, &mut answer)))?;
        let took = now().saturating_sub(asked);
        if took < quickest {
            quickest = took;
            offset = u64::from_le_bytes(answer).wrapping_sub(asked + took / 2).cast_signed();
        }
    }
    Ok(offset)
}
