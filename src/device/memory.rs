//! Memory categories and the bytes allocated in each.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The category of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Weights, and their fp32 master weights where the two differ.
    Parameters,
    /// Flat gradients, which are also the send buffers.
    Gradients,
    /// Moments of the optimizer.
    Optimizer,
    /// Master weights, moments and gradients that are offloaded from a GPU to the host.
    Offloaded,
    /// Activations saved for the backward, and scratch.
    Activations,
    /// Staging buffers of messages.
    Communication,
    /// Prefetched batches.
    Data,
    /// The snapshot that a checkpoint is written from.
    Checkpoint,
    /// In-memory checkpoints, on the host.
    MemoryCheckpoint,
    /// Workspace of a device's libraries, and weights that a CPU packs into panels.
    Workspace,
}

impl MemoryKind {
    /// Every category, in the order in which it is printed.
    pub const ALL: [MemoryKind; 10] = [
        MemoryKind::Parameters,
        MemoryKind::Gradients,
        MemoryKind::Optimizer,
        MemoryKind::Offloaded,
        MemoryKind::Activations,
        MemoryKind::Communication,
        MemoryKind::Data,
        MemoryKind::Checkpoint,
        MemoryKind::MemoryCheckpoint,
        MemoryKind::Workspace,
    ];

    /// Returns the name of the category as it is printed.
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
            MemoryKind::MemoryCheckpoint => "in-memory checkpoint",
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
    /// Records an allocation.
    pub fn record_alloc(&self, what: MemoryKind, bytes: usize) {
        let now = self.live[what as usize].fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak[what as usize].fetch_max(now, Ordering::Relaxed);
        let total = self.total.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.total_peak.fetch_max(total, Ordering::Relaxed);
    }

    /// Records a release.
    pub fn record_free(&self, what: MemoryKind, bytes: usize) {
        self.live[what as usize].fetch_sub(bytes, Ordering::Relaxed);
        self.total.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Records that an allocation counted with `before` bytes now has `now`.
    pub fn record_resize(&self, what: MemoryKind, before: usize, now: usize) {
        match now.checked_sub(before) {
            Some(more) => self.record_alloc(what, more),
            None => self.record_free(what, before - now),
        }
    }

    /// Records that memory was requested from the system because no cached free buffer fits.
    pub fn record_system_alloc(&self) {
        self.fresh.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of buffers requested from the system so far. It stays constant in steady
    /// training.
    pub fn system_allocs(&self) -> usize {
        self.fresh.load(Ordering::Relaxed)
    }

    /// Returns the bytes of a category that are live now.
    pub fn live(&self, what: MemoryKind) -> usize {
        self.live[what as usize].load(Ordering::Relaxed)
    }

    /// Returns the most bytes of a category that were live at once.
    pub fn peak(&self, what: MemoryKind) -> usize {
        self.peak[what as usize].load(Ordering::Relaxed)
    }

    /// Returns the most bytes of all categories together that were live at once.
    pub fn total_peak(&self) -> usize {
        self.total_peak.load(Ordering::Relaxed)
    }

    /// Returns the live bytes by category, for messages: `parameters 3.1 MiB, gradients 3.1 MiB`.
    pub fn live_by_category(&self) -> String {
        let parts = MemoryKind::ALL.iter().filter(|what| self.live(**what) > 0);
        let parts: Vec<String> = parts
            .map(|what| format!("{} {}", what.name(), format_bytes(self.live(*what))))
            .collect();
        if parts.is_empty() { "nothing".into() } else { parts.join(", ") }
    }
}

/// Formats a number of bytes with a binary unit: `12.5 MiB`.
pub fn format_bytes(count: usize) -> String {
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
        let stats = MemoryStats::default();
        stats.record_alloc(MemoryKind::Data, 100);
        stats.record_alloc(MemoryKind::Data, 50);
        stats.record_free(MemoryKind::Data, 100);
        assert_eq!((stats.live(MemoryKind::Data), stats.peak(MemoryKind::Data)), (50, 150));
        assert_eq!(stats.live(MemoryKind::Gradients), 0);
        stats.record_resize(MemoryKind::Data, 50, 20);
        stats.record_alloc(MemoryKind::Gradients, 100);
        assert_eq!((stats.live(MemoryKind::Data), stats.total_peak()), (20, 150));
        assert_eq!(stats.live_by_category(), "gradients 100 B, data 20 B");
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(
            [0, 1023, 1024, 13_107_200].map(format_bytes),
            ["0 B", "1023 B", "1.0 KiB", "12.5 MiB"]
        );
    }
}
