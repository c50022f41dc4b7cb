//! Control flags that ranks exchange with every step, together with losses and norms, so that all
//! ranks act on them at the same step.
//!
//! The upper bits hold the longest step, evaluation or save of the rank, in whole seconds.

use std::time::Duration;

use bitflags::bitflags;

/// The first bit of the time.
const TIME_SHIFT: u32 = 8;

/// The longest time that the bits can hold, in seconds.
const MAX_TIME: u32 = u32::MAX >> TIME_SHIFT;

bitflags! {
    /// The control flags of one rank at one step.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ControlFlags: u32 {
        /// The job must save and end soon, because of a signal or its time limit.
        const END = 1 << 0;
        /// The rank has written its part of the current save.
        const WRITTEN = 1 << 1;
        /// A checkpoint is due by time. Set by rank 0 only.
        const DUE = 1 << 2;
        /// Training must stop early, because it no longer improves.
        const STOP = 1 << 3;
        /// A hook of the rank failed.
        const FAILED = 1 << 4;
        /// The rank's part of the newest in-memory checkpoint is whole.
        const MEMORY_CHECKPOINT = 1 << 5;
        /// The rank has written its part of an in-memory checkpoint to the disk.
        const ON_DISK = 1 << 6;
        /// A process waits to become a rank. Set by rank 0 only.
        const JOIN = 1 << 7;
    }
}

impl ControlFlags {
    /// Returns these flags if `is_set`, else none.
    #[must_use]
    pub fn when(self, is_set: bool) -> Self {
        if is_set { self } else { Self::empty() }
    }

    /// Adds the longest step, evaluation or save of the rank, rounded up to seconds, to flags that
    /// have none.
    #[must_use]
    pub fn with_longest(self, longest: Duration) -> Self {
        let seconds = longest.as_secs() + u64::from(longest.subsec_nanos() > 0);
        let seconds = u32::try_from(seconds).unwrap_or(MAX_TIME).min(MAX_TIME);
        Self::from_bits_retain(self.bits() | seconds << TIME_SHIFT)
    }

    /// Returns the longest step, evaluation or save of the rank.
    pub fn longest(self) -> Duration {
        Duration::from_secs(u64::from(self.bits() >> TIME_SHIFT))
    }
}

/// The flags of all ranks at one step, in rank order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllFlags(pub Vec<ControlFlags>);

impl AllFlags {
    /// Returns whether any rank has set the flag.
    pub fn any(&self, flag: ControlFlags) -> bool {
        self.0.iter().any(|flags| flags.contains(flag))
    }

    /// Returns whether all ranks have set the flag.
    pub fn all(&self, flag: ControlFlags) -> bool {
        self.0.iter().all(|flags| flags.contains(flag))
    }

    /// Returns the longest step, evaluation or save of all ranks.
    pub fn longest(&self) -> Duration {
        self.0.iter().map(|flags| flags.longest()).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_or_all() {
        let both = ControlFlags::END | ControlFlags::WRITTEN;
        let one = ControlFlags::WRITTEN;
        let flags = AllFlags(vec![both, one]);
        assert!(flags.any(ControlFlags::END) && !flags.all(ControlFlags::END));
        assert!(flags.all(ControlFlags::WRITTEN) && !flags.any(ControlFlags::STOP));
    }

    #[test]
    fn the_longest_time_is_rounded_up_and_changes_no_flag() {
        let all = ControlFlags::all();
        for (millis, seconds) in [(0, 0), (1, 1), (1000, 1), (1001, 2), (u64::MAX, 0xff_ffff)] {
            let flags = all.with_longest(Duration::from_millis(millis));
            assert_eq!(flags.longest(), Duration::from_secs(seconds));
            assert!(flags.contains(all));
            let none = ControlFlags::empty().with_longest(Duration::from_millis(millis));
            assert!(all.iter().all(|flag| !none.contains(flag)));
        }
        let times = [3, 7, 5].map(|seconds| all.with_longest(Duration::from_secs(seconds)));
        assert_eq!(AllFlags(times.to_vec()).longest(), Duration::from_secs(7));
    }
}
