//! Sums of lanes that come in any order, in the shape of the tree that a rank would add them by.

use std::collections::BTreeMap;
use std::ops::Range;

/// The partial sums of so many lanes.
#[derive(Debug)]
pub struct TreeReducer<T> {
    lanes: usize,
    /// By first lane: the end of its lanes, and their sum.
    parts: BTreeMap<usize, (usize, T)>,
}

impl<T> TreeReducer<T> {
    /// Of no lane yet.
    pub fn new(lanes: usize) -> Self {
        Self { lanes, parts: BTreeMap::new() }
    }

    /// Whether these lanes are groups of the tree: as many as a power of two, from a multiple of it
    /// on, or fewer at the end.
    pub fn is_group(&self, lanes: &Range<usize>) -> bool {
        let first = lanes.start;
        let count = lanes.len();
        let size = count.next_power_of_two();
        let ends = lanes.end == self.lanes || count == size;
        count > 0 && lanes.end <= self.lanes && ends && first.is_multiple_of(size)
    }

    /// Takes the sum of a group of lanes; one that is there already counts once. `add(into, from)`
    /// computes `into += from`.
    pub fn put(&mut self, lanes: Range<usize>, sum: T, mut add: impl FnMut(&mut T, T)) {
        let is_there = self
            .parts
            .range(..=lanes.start)
            .next_back()
            .is_some_and(|(_, (end, _))| *end > lanes.start);
        if is_there || self.parts.range(lanes.clone()).next().is_some() {
            return;
        }
        let mut lanes = lanes;
        let mut sum = sum;
        loop {
            let size = lanes.len().next_power_of_two();
            // Without a neighbour to its right, at the end, a group is the larger one already.
            let size =
                if lanes.end == self.lanes { self.ancestor(lanes.start, size) } else { size };
            if lanes.start.is_multiple_of(2 * size) {
                let whole = (lanes.start + 2 * size).min(self.lanes);
                match self.parts.get(&lanes.end) {
                    Some((end, _)) if *end == whole && lanes.end < whole => {}
                    _ => break,
                }
                let Some((end, right)) = self.parts.remove(&lanes.end) else { break };
                add(&mut sum, right);
                lanes.end = end;
            } else {
                let left = lanes.start - size;
                match self.parts.get(&left) {
                    Some((end, _)) if *end == lanes.start => {}
                    _ => break,
                }
                let Some((_, mut before)) = self.parts.remove(&left) else { break };
                add(&mut before, sum);
                (sum, lanes.start) = (before, left);
            }
        }
        self.parts.insert(lanes.start, (lanes.end, sum));
    }

    /// The height of a group at the end of the lanes, which has no neighbour to its right: the
    /// largest size of which its first lane is a multiple, that is needed to meet its left
    /// neighbour.
    fn ancestor(&self, first: usize, size: usize) -> usize {
        let mut size = size;
        while first > 0 && first.is_multiple_of(2 * size) {
            size *= 2;
        }
        size
    }

    /// The sum of all lanes, once it is there.
    pub fn whole(&self) -> Option<&T> {
        self.parts.get(&0).filter(|(end, _)| *end == self.lanes).map(|(_, sum)| sum)
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
        for lanes in 1..=17usize {
            let values: Vec<f64> = (0..lanes)
                .map(|i| (i as f64 * 1.7 + 0.3).sin() * 10f64.powi(i as i32 % 7))
                .collect();
            for _ in 0..40 {
                // Halves of halves of the tree, at random.
                let mut groups = vec![];
                let mut open = Vec::from([(0, lanes.next_power_of_two())]);
                while let Some((first, end)) = open.pop() {
                    let cut = first..end.min(lanes);
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
                let mut sums = TreeReducer::new(lanes);
                while !groups.is_empty() {
                    let at = draw.next().unwrap_or(0) % groups.len();
                    let group = groups.swap_remove(at);
                    assert!(sums.is_group(&group), "{group:?} of {lanes}");
                    assert!(sums.whole().is_none());
                    let sum = tree_sum(&values[group.clone()]);
                    // A late one changes nothing.
                    for _ in 0..2 {
                        sums.put(group.clone(), sum, |into, from| *into += from);
                    }
                }
                let whole = sums.whole().copied().unwrap();
                assert_eq!(whole.to_bits(), tree_sum(&values).to_bits(), "{lanes} lanes");
            }
        }
        let sums = TreeReducer::<f64>::new(6);
        for wrong in [1..3, 0..3, 2..5, 4..7, 5..5] {
            assert!(!sums.is_group(&wrong), "{wrong:?}");
        }
    }
}
