//! Reduces contributions of virtual ranks that arrive in any order, with the same summation tree as
//! a single rank uses.

use std::borrow::{Borrow, Cow};
use std::collections::BTreeMap;
use std::ops::Range;

/// The partial sums of virtual ranks.
#[derive(Debug)]
pub struct TreeReducer<T> {
    virtual_ranks: usize,
    /// The end and the sum of each group of virtual ranks, by its first virtual rank.
    parts: BTreeMap<usize, (usize, T)>,
}

impl<T> TreeReducer<T> {
    /// Creates an empty reducer of `virtual_ranks` virtual ranks.
    pub fn new(virtual_ranks: usize) -> Self {
        Self { virtual_ranks, parts: BTreeMap::new() }
    }

    /// Returns whether these virtual ranks are a group of the tree: a power of two of them that
    /// starts at a multiple of that power, or fewer at the end.
    pub fn is_group(&self, virtual_ranks: &Range<usize>) -> bool {
        let first = virtual_ranks.start;
        let count = virtual_ranks.len();
        let size = count.next_power_of_two();
        let ends = virtual_ranks.end == self.virtual_ranks || count == size;
        count > 0 && virtual_ranks.end <= self.virtual_ranks && ends && first.is_multiple_of(size)
    }

    /// Adds the sum of a group of virtual ranks; a group that was added before is ignored. It is
    /// copied only if the group with which it is added is not there yet. `add(into, from)` computes
    /// `into += from`, which must be commutative, bit for bit.
    pub fn put<S>(
        &mut self,
        virtual_ranks: Range<usize>,
        sum: Cow<'_, S>,
        mut add: impl FnMut(&mut T, &S),
    ) where
        T: Borrow<S>,
        S: ToOwned<Owned = T> + ?Sized,
    {
        let is_present = self
            .parts
            .range(..=virtual_ranks.start)
            .next_back()
            .is_some_and(|(_, (end, _))| *end > virtual_ranks.start);
        if is_present || self.parts.range(virtual_ranks.clone()).next().is_some() {
            return;
        }
        let mut virtual_ranks = virtual_ranks;
        let mut sum = sum;
        loop {
            let size = virtual_ranks.len().next_power_of_two();
            // At the end, a group without a right neighbour is equal to its parent.
            let size = if virtual_ranks.end == self.virtual_ranks {
                self.ancestor(virtual_ranks.start, size)
            } else {
                size
            };
            let is_left = virtual_ranks.start.is_multiple_of(2 * size);
            // The group that completes the parent.
            let other = match is_left {
                true => {
                    let whole = (virtual_ranks.start + 2 * size).min(self.virtual_ranks);
                    virtual_ranks.end..whole
                }
                false => virtual_ranks.start - size..virtual_ranks.start,
            };
            let is_there = !other.is_empty()
                && self.parts.get(&other.start).is_some_and(|(end, _)| *end == other.end);
            let other_sum = is_there.then(|| self.parts.remove(&other.start)).flatten();
            let Some((_, mut total)) = other_sum else { break };
            add(&mut total, sum.borrow());
            sum = Cow::Owned(total);
            virtual_ranks = virtual_ranks.start.min(other.start)..virtual_ranks.end.max(other.end);
        }
        self.parts.insert(virtual_ranks.start, (virtual_ranks.end, sum.into_owned()));
    }

    /// Returns the size of the largest group in the tree that starts at `first`, for a group at the
    /// end of the virtual ranks.
    fn ancestor(&self, first: usize, size: usize) -> usize {
        let mut size = size;
        while first > 0 && first.is_multiple_of(2 * size) {
            size *= 2;
        }
        size
    }

    /// Returns the sum of all virtual ranks, once it is complete.
    pub fn whole(&self) -> Option<&T> {
        self.parts.get(&0).filter(|(end, _)| *end == self.virtual_ranks).map(|(_, sum)| sum)
    }

    /// Removes all partial sums.
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
    fn any_groups_in_any_order_give_the_sum_of_the_tree() {
        let stream = Stream::new(5);
        let mut numbers = vec![0.0; 4096];
        stream.fill_normal(&mut numbers);
        let mut draw = numbers.iter().map(|x: &f32| (x.abs() * 1e4) as usize).cycle();
        for virtual_ranks in 1..=17usize {
            let values: Vec<f64> = (0..virtual_ranks)
                .map(|i| (i as f64 * 1.7 + 0.3).sin() * 10f64.powi(i as i32 % 7))
                .collect();
            for _ in 0..40 {
                // Split the tree into groups at random.
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
                    // A repeated group changes nothing.
                    for _ in 0..2 {
                        sums.put(group.clone(), Cow::Borrowed(&sum), |into, from| *into += from);
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
