//! Sums of virtual ranks that come in any order, in the shape of the tree that a rank would add them by.

use std::collections::BTreeMap;
use std::ops::Range;

/// The partial sums of so many virtual ranks.
#[derive(Debug)]
pub struct TreeReducer<T> {
    virtual_ranks: usize,
    /// By first virtual rank: the end of its virtual ranks, and their sum.
    parts: BTreeMap<usize, (usize, T)>,
}

impl<T> TreeReducer<T> {
    /// Of no virtual rank yet.
    pub fn new(virtual_ranks: usize) -> Self {
        Self { virtual_ranks, parts: BTreeMap::new() }
    }

    /// Whether these virtual ranks are groups of the tree: as many as a power of two, from a multiple of it
    /// on, or fewer at the end.
    pub fn is_group(&self, virtual_ranks: &Range<usize>) -> bool {
        let first = virtual_ranks.start;
        let count = virtual_ranks.len();
        let size = count.next_power_of_two();
        let ends = virtual_ranks.end == self.virtual_ranks || count == size;
        count > 0 && virtual_ranks.end <= self.virtual_ranks && ends && first.is_multiple_of(size)
    }

    /// Takes the sum of a group of virtual ranks; one that is there already counts once. `add(into, from)`
    /// computes `into += from`.
    pub fn put(&mut self, virtual_ranks: Range<usize>, sum: T, mut add: impl FnMut(&mut T, T)) {
        let is_there = self
            .parts
            .range(..=virtual_ranks.start)
            .next_back()
            .is_some_and(|(_, (end, _))| *end > virtual_ranks.start);
        if is_there || self.parts.range(virtual_ranks.clone()).next().is_some() {
            return;
        }
        let mut virtual_ranks = virtual_ranks;
        let mut sum = sum;
        loop {
            let size = virtual_ranks.len().next_power_of_two();
            // Without a neighbour to its right, at the end, a group is the larger one already.
            let size = if virtual_ranks.end == self.virtual_ranks {
                self.ancestor(virtual_ranks.start, size)
            } else {
                size
            };
            if virtual_ranks.start.is_multiple_of(2 * size) {
                let whole = (virtual_ranks.start + 2 * size).min(self.virtual_ranks);
                match self.parts.get(&virtual_ranks.end) {
                    Some((end, _)) if *end == whole && virtual_ranks.end < whole => {}
                    _ => break,
                }
                let Some((end, right)) = self.parts.remove(&virtual_ranks.end) else { break };
                add(&mut sum, right);
                virtual_ranks.end = end;
            } else {
                let left = virtual_ranks.start - size;
                match self.parts.get(&left) {
                    Some((end, _)) if *end == virtual_ranks.start => {}
                    _ => break,
                }
                let Some((_, mut before)) = self.parts.remove(&left) else { break };
                add(&mut before, sum);
                (sum, virtual_ranks.start) = (before, left);
            }
        }
        self.parts.insert(virtual_ranks.start, (virtual_ranks.end, sum));
    }

    /// The height of a group at the end of the virtual ranks, which has no neighbour to its right: the
    /// largest size of which its first virtual rank is a multiple, that is needed to meet its left
    /// neighbour.
    fn ancestor(&self, first: usize, size: usize) -> usize {
        let mut size = size;
        while first > 0 && first.is_multiple_of(2 * size) {
            size *= 2;
        }
        size
    }

    /// The sum of all virtual ranks, once it is there.
    pub fn whole(&self) -> Option<&T> {
        self.parts.get(&0).filter(|(end, _)| *end == self.virtual_ranks).map(|(_, sum)| sum)
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.parts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::random::Stream;
    use hpctrain_base::tree_sum::tree_sum;

    #[test]
    fn any_groups_in_any_order_make_the_sum_of_the_tree() {
        let stream = Stream::new(5);
        let mut numbers = vec![0.0; 4096];
        stream.fill_normal(&mut numbers);
        let mut draw = numbers.iter().map(|x: &f32| (x.abs() * 1e4) as usize).cycle();
        for virtual_ranks in 1..=17usize {
            let values: Vec<f64> = (0..virtual_ranks)
                .map(|i| (i as f64 * 1.7 + 0.3).sin() * 10f64.powi(i as i32 % 7))
                .collect();
            for _ in 0..40 {
                // Halves of halves of the tree, at random.
                let mut groups = vec![];
                let mut open = Vec::from([(0, virtual_ranks.next_power_of_two())]);
                while let Some((first, end)) = open.pop() {
                    let cut = first..end.min(virtual_ranks);
                    if cut.is_empty() {
                        continue;
                    }
                    if end - first > 1 && draw.next().is_some_and(|number| number % 3 > 0) {
                        let middle = first + (end - first) / 2;
                        open.extend([(first, middle), (middle, end)]);
                    } else {
                        groups.push(cut);
                    }
                }
                let mut sums = TreeReducer::new(virtual_ranks);
                while !groups.is_empty() {
                    let at = draw.next().unwrap_or(0) % groups.len();
                    let group = groups.swap_remove(at);
                    assert!(sums.is_group(&group), "{group:?} of {virtual_ranks}");
                    assert!(sums.whole().is_none());
                    let sum = tree_sum(&values[group.clone()]);
                    // A late one changes nothing.
                    for _ in 0..2 {
                        sums.put(group.clone(), sum, |into, from| *into += from);
                    }
                }
                let whole = sums.whole().copied().unwrap();
                assert_eq!(
                    whole.to_bits(),
                    tree_sum(&values).to_bits(),
                    "{virtual_ranks} virtual ranks"
                );
            }
        }
        let sums = TreeReducer::<f64>::new(6);
        for wrong in [1..3, 0..3, 2..5, 4..7, 5..5] {
            assert!(!sums.is_group(&wrong), "{wrong:?}");
        }
    }
}
