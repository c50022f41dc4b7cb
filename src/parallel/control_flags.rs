//! Control flags that ranks exchange with every step, together with losses and norms, so that all
//! ranks act on them at the same step.

use bitflags::bitflags;

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
    }
}

impl ControlFlags {
    /// Returns these flags if `is_set`, else none.
    #[must_use]
    pub fn when(self, is_set: bool) -> Self {
        if is_set { self } else { Self::empty() }
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
}
