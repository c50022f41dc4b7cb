//! The clock of events.

use std::sync::LazyLock;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// A reading of the monotonic clock, and the system time at that moment.
static ANCHOR: LazyLock<(Instant, u64)> = LazyLock::new(|| {
    let read = || {
        let before = Instant::now();
        let unix = UNIX_EPOCH.elapsed().unwrap_or_default();
        (before.elapsed(), before, unix)
    };
    // A reading that was not interrupted is exact to a fraction of a microsecond.
    let (took, before, unix) =
        (0..16).map(|_| read()).min_by_key(|(took, ..)| *took).unwrap_or_else(read);
    (before, (unix - (took / 2).min(unix)).as_nanos() as u64)
});

/// Returns nanoseconds since 1970 by a clock that never jumps: the system time is read once and
/// then advanced by the monotonic clock. Processes of one host agree to some microseconds.
pub fn now() -> u64 {
    let (instant, unix) = *ANCHOR;
    unix + instant.elapsed().min(Duration::from_secs(u64::from(u32::MAX))).as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_system() {
        let before = now();
        let first = UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        assert!(first.abs_diff(before) < 1_000_000_000, "{first} {before}");
        assert!(now() >= before);
    }
}
