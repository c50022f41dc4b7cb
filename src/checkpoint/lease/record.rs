//! The content of a lease file.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::fs_clock::STALE;
use super::owner::LeaseOwner;
use hpctrain_config::telemetry::unix_time;

/// The content of a lease file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LeaseRecord {
    /// The process that holds the lease.
    #[serde(flatten)]
    pub holder: LeaseOwner,
    /// Identifies this acquisition: a process may take several leases one after another.
    #[serde(default)]
    pub(super) token: String,
    /// The time at which it was taken, in seconds since 1970, by the holder's clock.
    #[serde(default)]
    pub(super) since: f64,
    /// Whether the holder has locked the file.
    #[serde(default)]
    pub(super) locked: bool,
    /// The number of heartbeats.
    #[serde(default)]
    pub(super) beats: u64,
    /// The maximal age of the holder's view of the directory, in seconds.
    #[serde(default = "longest")]
    pub(super) stale: u64,
    /// Whether the holder has taken it over and waits until no other process believes that it holds
    /// it.
    #[serde(default)]
    pub(super) settling: bool,
}

fn longest() -> u64 {
    STALE.as_secs()
}

impl LeaseRecord {
    /// Creates the record of a lease that a process takes now whose view is at most `stale` old.
    pub(super) fn now(holder: LeaseOwner, stale: Duration) -> Self {
        static TAKEN: AtomicU64 = AtomicU64::new(0);
        let since = unix_time();
        let token = format!(
            "{}-{}-{since}-{}",
            holder.host,
            holder.pid,
            TAKEN.fetch_add(1, Ordering::Relaxed)
        );
        Self {
            holder,
            token,
            since,
            locked: false,
            beats: 0,
            stale: stale.as_secs(),
            settling: false,
        }
    }

    /// Returns the maximal age of the holder's view. No version writes more than [`STALE`]: a
    /// larger value is damage.
    pub(super) fn stale(&self) -> Duration {
        Duration::from_secs(self.stale).min(STALE)
    }

    pub(super) fn text(&self) -> io::Result<String> {
        serde_json::to_string(self).map_err(io::Error::other)
    }

    /// Returns the time since it was taken, by this node's clock.
    pub fn age(&self) -> Option<Duration> {
        let age = (self.since > 0.0).then(|| (unix_time() - self.since).max(0.0));
        Duration::try_from_secs_f64(age?.round()).ok()
    }
}

impl std::fmt::Display for LeaseRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.holder)?;
        self.age().map_or(Ok(()), |age| write!(f, ", since {}", humantime::format_duration(age)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_damage_makes_others_wait_for_ever() {
        let mut held = LeaseRecord::now(LeaseOwner::here(), STALE);
        assert_eq!(held.stale(), STALE);
        held.stale = u64::MAX;
        assert_eq!(held.stale(), STALE);
    }
}
