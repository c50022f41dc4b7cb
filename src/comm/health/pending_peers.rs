//! The ranks with which a rank exchanges at this moment, for the watch to see.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// No rank.
const NOBODY: usize = usize::MAX;

/// Written by the communication thread, read by the watch. A rank that stands still does not change
/// it, so that the parts need no common lock.
pub struct Partners {
    to: AtomicUsize,
    from: AtomicUsize,
    /// Exchanges since the collective began, this one included.
    count: AtomicU64,
}

impl Default for Partners {
    fn default() -> Self {
        Self {
            to: AtomicUsize::new(NOBODY),
            from: AtomicUsize::new(NOBODY),
            count: AtomicU64::new(0),
        }
    }
}

impl Partners {
    /// A collective begins.
    pub fn restart(&self) {
        self.count.store(0, Ordering::Relaxed);
    }

    /// An exchange with these ranks of the world begins.
    pub fn begin(&self, to: Option<usize>, from: Option<usize>) {
        self.to.store(to.unwrap_or(NOBODY), Ordering::Relaxed);
        self.from.store(from.unwrap_or(NOBODY), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// It is over.
    pub fn end(&self) {
        self.to.store(NOBODY, Ordering::Relaxed);
        self.from.store(NOBODY, Ordering::Relaxed);
    }

    /// The ranks of the exchange under way, and its number in the collective.
    pub fn now(&self) -> Option<(Vec<usize>, u64)> {
        let mut ranks: Vec<usize> =
            [&self.from, &self.to].map(|one| one.load(Ordering::Relaxed)).to_vec();
        ranks.retain(|rank| *rank != NOBODY);
        ranks.dedup();
        (!ranks.is_empty()).then(|| (ranks, self.count.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchanges_are_counted_by_collective() {
        let partners = Partners::default();
        assert_eq!(partners.now(), None);
        partners.begin(Some(3), Some(2));
        partners.end();
        partners.begin(Some(3), Some(3));
        assert_eq!(partners.now(), Some((vec![3], 2)));
        partners.restart();
        partners.begin(None, Some(1));
        assert_eq!(partners.now(), Some((vec![1], 1)));
    }
}
