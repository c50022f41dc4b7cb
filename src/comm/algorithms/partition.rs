//! The ranges of elements that each rank owns.

use std::ops::Range;

/// The ranges of elements that each rank of a group owns before or after a collective.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shares(Vec<Vec<Range<usize>>>);

/// Returns part `index` of `len` elements cut into `count` parts whose lengths differ by at most
/// one.
pub fn part(len: usize, index: usize, count: usize) -> Range<usize> {
    let start = |index: usize| index * (len / count) + index.min(len % count);
    start(index)..start(index + 1)
}

impl Shares {
    pub fn new(of_ranks: Vec<Vec<Range<usize>>>) -> Self {
        Self(of_ranks)
    }

    /// Cuts a range into `count` shares whose lengths differ by at most one.
    pub fn even(range: &Range<usize>, count: usize) -> Self {
        let shares = (0..count).map(|index| {
            let part = part(range.len(), index, count);
            std::iter::once(range.start + part.start..range.start + part.end).collect()
        });
        Self(shares.collect())
    }

    /// Returns the ranges of one rank.
    pub fn ranges(&self, rank: usize) -> &[Range<usize>] {
        &self.0[rank]
    }

    /// Returns the ranges of several ranks, in memory order.
    pub fn ranges_of(&self, ranks: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> =
            ranks.flat_map(|rank| self.0[rank].iter().cloned()).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges
    }

    /// Returns the ranges of all ranks, in memory order.
    pub fn all(&self) -> Vec<Range<usize>> {
        self.ranges_of(0..self.0.len())
    }

    /// Returns the length of the longest share.
    pub fn longest(&self) -> usize {
        self.0.iter().map(|ranges| ranges.iter().map(Range::len).sum()).max().unwrap_or(0)
    }

    /// Returns the elements `window` of every share, counted from the start of the share.
    pub fn window(&self, window: &Range<usize>) -> Self {
        Self(self.0.iter().map(|ranges| cut(ranges, window)).collect())
    }
}

/// Returns the elements `window` of a share, counted from its start.
fn cut(ranges: &[Range<usize>], window: &Range<usize>) -> Vec<Range<usize>> {
    let mut before = 0;
    let parts = ranges.iter().map(|range| {
        let first = before;
        let len = range.len();
        before += len;
        let at = |place: usize| range.start + place.clamp(first, first + len) - first;
        at(window.start)..at(window.end)
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;

    #[test]
    fn parts_are_even_and_cover() {
        let parts: Vec<_> = (0..3).map(|i| part(7, i, 3)).collect();
        assert_eq!(parts, [0..3, 3..5, 5..7]);
        assert_eq!(part(2, 3, 4), 2..2);
        assert_eq!(part(8, 1, 4), 2..4);
        assert_eq!(
            Shares::even(&(10..17), 3),
            Shares::new(vec![vec![10..13], vec![13..15], vec![15..17]])
        );
    }

    #[test]
    fn windows_cut_every_share() {
        let shares = Shares::new(vec![vec![10..12, 20..25], vec![0..3], vec![]]);
        assert_eq!(shares.longest(), 7);
        let window = shares.window(&(1..4));
        assert_eq!(
            (window.ranges(0), window.ranges(1), window.ranges(2)),
            (&[11..12, 20..22][..], from_ref(&(1..3)), &[][..])
        );
        assert_eq!(window.all(), [1..3, 11..12, 20..22]);
        assert_eq!(shares.window(&(5..9)).ranges_of(0..2), [3..3, 12..12, 23..25]);
    }
}
