//! The requests that ranks tell each other with every step, beside losses and norms, so that all
//! act on them at the same step.

use bitflags::bitflags;

bitflags! {
    /// The requests of one rank at one step.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ControlFlags: u32 {
        /// The job is to save and end soon: a signal came, or its time is nearly up.
        const END = 1 << 0;
        /// The rank has done its part of the save under way.
        const WRITTEN = 1 << 1;
        /// Of rank 0: a checkpoint is due by its clock.
        const DUE = 1 << 2;
        /// Training is to stop, because it no longer helps.
        const STOP = 1 << 3;
        /// A hook of the rank has failed.
        const FAILED = 1 << 4;
    }
}

impl ControlFlags {
    /// These flags if `is_set`, else none.
    #[must_use]
    pub fn when(self, is_set: bool) -> Self {
        if is_set { self } else { Self::empty() }
    }
}

/// The flags of all ranks at one step, in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllFlags(pub Vec<ControlFlags>);

impl AllFlags {
    /// Whether any rank has set the flag.
    pub fn any(&self, flag: ControlFlags) -> bool {
        self.0.iter().any(|flags| flags.contains(flag))
    }

    /// Whether all ranks have set the flag.
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
