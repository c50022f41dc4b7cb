//! The ranks with which a rank exchanges at this moment, for the watchdog.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// No rank.
const NO_RANK: usize = usize::MAX;

/// The peers of the exchange in flight. The communication thread writes them and the watchdog reads
/// them. They do not change while a rank hangs, so the fields need no common lock.
pub struct Partners {
    to: AtomicUsize,
    from: AtomicUsize,
    /// The number of exchanges since the collective began, including this one.
    count: AtomicU64,
}

impl Default for Partners {
    fn default() -> Self {
        Self {
            to: AtomicUsize::new(NO_RANK),
            from: AtomicUsize::new(NO_RANK),
            count: AtomicU64::new(0),
        }
    }
}

impl Partners {
    /// Records the start of a collective.
    pub fn restart(&self) {
        self.count.store(0, Ordering::Relaxed);
    }

    /// Records the start of an exchange with these ranks of the world.
    pub fn begin(&self, to: Option<usize>, from: Option<usize>) {
        self.to.store(to.unwrap_or(NO_RANK), Ordering::Relaxed);
        self.from.store(from.unwrap_or(NO_RANK), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the end of the exchange.
    pub fn end(&self) {
        self.to.store(NO_RANK, Ordering::Relaxed);
        self.from.store(NO_RANK, Ordering::Relaxed);
    }

    /// Returns the ranks of the exchange in flight, and its number in the collective.
    pub fn now(&self) -> Option<(Vec<usize>, u64)> {
        let mut ranks: Vec<usize> =
            [&self.from, &self.to].map(|one| one.load(Ordering::Relaxed)).to_vec();
        ranks.retain(|rank| *rank != NO_RANK);
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
