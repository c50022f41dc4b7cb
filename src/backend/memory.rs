//! What memory is used for, and how much of it.

use std::sync::atomic::{AtomicUsize, Ordering};

/// What a buffer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Weights, and their f32 masters where the two differ.
    Parameters,
    /// Flat gradients, which are also the send buffers.
    Gradients,
    /// Moments of the optimizer.
    Optimizer,
    /// What the forward keeps for the backward, and scratch.
    Activations,
    /// Staging of messages.
    Communication,
    /// Batches on their way in.
    Data,
}

impl Memory {
    /// Every category, in the order of reports.
    pub const ALL: [Memory; 6] = [
        Memory::Parameters,
        Memory::Gradients,
        Memory::Optimizer,
        Memory::Activations,
        Memory::Communication,
        Memory::Data,
    ];

    /// The word for it in reports.
    pub fn name(self) -> &'static str {
        match self {
            Memory::Parameters => "parameters",
            Memory::Gradients => "gradients",
            Memory::Optimizer => "optimizer",
            Memory::Activations => "activations",
            Memory::Communication => "communication",
            Memory::Data => "data",
        }
    }
}

/// Counts live and peak bytes by category.
#[derive(Debug, Default)]
pub struct Ledger {
    live: [AtomicUsize; 6],
    peak: [AtomicUsize; 6],
}

impl Ledger {
    /// Notes an allocation.
    pub fn take(&self, what: Memory, bytes: usize) {
        let now = self.live[what as usize].fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak[what as usize].fetch_max(now, Ordering::Relaxed);
    }

    /// Notes a release.
    pub fn give(&self, what: Memory, bytes: usize) {
        self.live[what as usize].fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes live now.
    pub fn live(&self, what: Memory) -> usize {
        self.live[what as usize].load(Ordering::Relaxed)
    }

    /// The most bytes that were live at once.
    pub fn peak(&self, what: Memory) -> usize {
        self.peak[what as usize].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_remembers() {
        let ledger = Ledger::default();
        ledger.take(Memory::Data, 100);
        ledger.take(Memory::Data, 50);
        ledger.give(Memory::Data, 100);
        assert_eq!((ledger.live(Memory::Data), ledger.peak(Memory::Data)), (50, 150));
        assert_eq!(ledger.live(Memory::Gradients), 0);
    }
}
