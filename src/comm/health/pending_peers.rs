//! The ranks with which a rank exchanges at this moment, for the watchdog.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The peers of the exchange in flight. The communication thread writes them and the watchdog reads
/// them. They do not change while a rank hangs, so the fields need no common lock.
#[derive(Default)]
pub struct Partners {
    /// Empty if there is no exchange.
    ranks: Mutex<Vec<usize>>,
    /// The number of exchanges since the collective began, including this one.
    count: AtomicU64,
}

impl Partners {
    /// Records the start of a collective.
    pub fn restart(&self) {
        self.count.store(0, Ordering::Relaxed);
    }

    /// Records the start of an exchange with these ranks of the world.
    pub fn begin(&self, ranks: impl Iterator<Item = usize>) {
        self.narrow(ranks);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the ranks that the exchange in flight still waits for.
    pub fn narrow(&self, ranks: impl Iterator<Item = usize>) {
        let mut pending = self.lock();
        pending.clear();
        pending.extend(ranks);
        pending.dedup();
    }

    /// Records the end of the exchange.
    pub fn end(&self) {
        self.lock().clear();
    }

    /// Returns the ranks of the exchange in flight, and its number in the collective.
    pub fn now(&self) -> Option<(Vec<usize>, u64)> {
        let ranks = self.lock().clone();
        (!ranks.is_empty()).then(|| (ranks, self.count.load(Ordering::Relaxed)))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchanges_are_counted_by_collective() {
        let partners = Partners::default();
        assert_eq!(partners.now(), None);
        partners.begin([3, 2].into_iter());
        partners.end();
        partners.begin([3, 3].into_iter());
        assert_eq!(partners.now(), Some((vec![3], 2)));
        partners.restart();
        partners.begin([1].into_iter());
        assert_eq!(partners.now(), Some((vec![1], 1)));
    }

    #[test]
    fn an_exchange_shows_the_ranks_that_it_still_waits_for() {
        let partners = Partners::default();
        partners.begin([3, 1, 2].into_iter());
        assert_eq!(partners.now(), Some((vec![3, 1, 2], 1)));
        partners.narrow([2].into_iter());
        assert_eq!(partners.now(), Some((vec![2], 1)));
        partners.end();
        assert_eq!(partners.now(), None);
    }
}
