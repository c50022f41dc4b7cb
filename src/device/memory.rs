//! Categories of memory, and the bytes of each.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Category of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Weights, and their f32 masters where the two differ.
    Parameters,
    /// Flat gradients, which are also the send buffers.
    Gradients,
    /// Moments of the optimizer.
    Optimizer,
    /// Masters, moments and gradients that are kept on the host in the stead of a GPU.
    Offloaded,
    /// Values that the forward keeps for the backward, and scratch.
    Activations,
    /// Staging of messages.
    Communication,
    /// Batches on their way in.
    Data,
    /// The copy that a checkpoint is written from.
    Checkpoint,
    /// Scratch of a device's libraries, weights that a CPU keeps in panels.
    Workspace,
}

impl MemoryKind {
    /// Every category, in the order of reports.
    pub const ALL: [MemoryKind; 9] = [
        MemoryKind::Parameters,
        MemoryKind::Gradients,
        MemoryKind::Optimizer,
        MemoryKind::Offloaded,
        MemoryKind::Activations,
        MemoryKind::Communication,
        MemoryKind::Data,
        MemoryKind::Checkpoint,
        MemoryKind::Workspace,
    ];

    /// The word for it in reports.
    pub fn name(self) -> &'static str {
        match self {
            MemoryKind::Parameters => "parameters",
            MemoryKind::Gradients => "gradients",
            MemoryKind::Optimizer => "optimizer",
            MemoryKind::Offloaded => "offloaded",
            MemoryKind::Activations => "activations",
            MemoryKind::Communication => "communication",
            MemoryKind::Data => "data",
            MemoryKind::Checkpoint => "checkpoint",
            MemoryKind::Workspace => "workspace",
        }
    }
}

/// Counts live and peak bytes by category.
#[derive(Debug, Default)]
pub struct MemoryStats {
    live: [AtomicUsize; MemoryKind::ALL.len()],
    peak: [AtomicUsize; MemoryKind::ALL.len()],
    total: AtomicUsize,
    total_peak: AtomicUsize,
    fresh: AtomicUsize,
}

impl MemoryStats {
    /// Notes an allocation.
    pub fn take(&self, what: MemoryKind, bytes: usize) {
        let now = self.live[what as usize].fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak[what as usize].fetch_max(now, Ordering::Relaxed);
        let total = self.total.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.total_peak.fetch_max(total, Ordering::Relaxed);
    }

    /// Notes a release.
    pub fn give(&self, what: MemoryKind, bytes: usize) {
        self.live[what as usize].fetch_sub(bytes, Ordering::Relaxed);
        self.total.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Notes that something that was counted with `before` bytes has `now`.
    pub fn resize(&self, what: MemoryKind, before: usize, now: usize) {
        match now.checked_sub(before) {
            Some(more) => self.take(what, more),
            None => self.give(what, before - now),
        }
    }

    /// Notes that memory was asked of the system because no buffer that waits for reuse would do.
    pub fn note_fresh(&self) {
        self.fresh.fetch_add(1, Ordering::Relaxed);
    }

    /// Buffers that were asked of the system so far. In steady training there are no more of them.
    pub fn fresh(&self) -> usize {
        self.fresh.load(Ordering::Relaxed)
    }

    /// Bytes live now.
    pub fn live(&self, what: MemoryKind) -> usize {
        self.live[what as usize].load(Ordering::Relaxed)
    }

    /// The most bytes that were live at once.
    pub fn peak(&self, what: MemoryKind) -> usize {
        self.peak[what as usize].load(Ordering::Relaxed)
    }

    /// The most bytes of all categories together that were live at once.
    pub fn total_peak(&self) -> usize {
        self.total_peak.load(Ordering::Relaxed)
    }

    /// Live bytes by category, for reports: `parameters 3.1 MiB, gradients 3.1 MiB`.
    pub fn live_by_category(&self) -> String {
        let parts = MemoryKind::ALL.iter().filter(|what| self.live(**what) > 0);
        let parts: Vec<String> =
            parts.map(|what| format!("{} {}", what.name(), readable(self.live(*what)))).collect();
        if parts.is_empty() { "nothing".into() } else { parts.join(", ") }
    }
}

/// Bytes with a binary unit: `12.5 MiB`.
pub fn readable(count: usize) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_remembers() {
        let ledger = MemoryStats::default();
        ledger.take(MemoryKind::Data, 100);
        ledger.take(MemoryKind::Data, 50);
        ledger.give(MemoryKind::Data, 100);
        assert_eq!((ledger.live(MemoryKind::Data), ledger.peak(MemoryKind::Data)), (50, 150));
        assert_eq!(ledger.live(MemoryKind::Gradients), 0);
        ledger.resize(MemoryKind::Data, 50, 20);
        ledger.take(MemoryKind::Gradients, 100);
        assert_eq!((ledger.live(MemoryKind::Data), ledger.total_peak()), (20, 150));
        assert_eq!(ledger.live_by_category(), "gradients 100 B, data 20 B");
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(
            [0, 1023, 1024, 13_107_200].map(readable),
            ["0 B", "1023 B", "1.0 KiB", "12.5 MiB"]
        );
    }
}
