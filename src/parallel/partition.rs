//! Cuts a sequence of blocks into the stages of a pipeline. Numbers in, integers out.

use std::ops::Range;

/// Consecutive parts of blocks with these costs, each of at least one, of which the costliest is as cheap as can be; of all such
/// cuts the one with the least sum of squares, which spreads the rest evenly. Exact: dynamic programming over the first
/// blocks. None if there are fewer blocks than stages.
pub fn partition(costs: &[f64], stages: usize) -> Option<Vec<Range<usize>>> {
    let limit = best(costs, stages, |most: f64, part| most.max(part), |_| true)?.0;
    // The same sums are compared, so that rounding does not matter.
    let cut = best(costs, stages, |sum, part| sum + part * part, |part| part <= limit)?;
    Some(cut.1)
}

/// The cut whose costs, joined one after the other, are least; parts must be `allowed`.
fn best(
    costs: &[f64],
    stages: usize,
    join: impl Fn(f64, f64) -> f64,
    allowed: impl Fn(f64) -> bool,
) -> Option<(f64, Vec<Range<usize>>)> {
    let blocks = costs.len();
    let part = |range: Range<usize>| costs[range].iter().sum::<f64>();
    // For every number of first blocks: the least cost in the stages so far, and where the last of them begins.
    let mut least: Vec<Option<f64>> = vec![None; blocks + 1];
    least[0] = Some(0.0);
    let mut begins = Vec::with_capacity(stages);
    for _ in 0..stages {
        let mut next = vec![None; blocks + 1];
        let mut begin = vec![0; blocks + 1];
        for end in 1..=blocks {
            for start in 0..end {
                let (Some(before), last) = (least[start], part(start..end)) else { continue };
                let cost = join(before, last);
                if allowed(last) && next[end].is_none_or(|least| cost < least) {
                    (next[end], begin[end]) = (Some(cost), start);
                }
            }
        }
        begins.push(begin);
        least = next;
    }
    let cost = least[blocks]?;
    let mut end = blocks;
    let mut parts: Vec<Range<usize>> = Vec::with_capacity(stages);
    for begin in begins.iter().rev() {
        parts.push(begin[end]..end);
        end = begin[end];
    }
    parts.reverse();
    Some((cost, parts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_costliest_part_is_as_cheap_as_can_be() {
        assert_eq!(partition(&[1.0; 6], 3).unwrap(), [0..2, 2..4, 4..6]);
        // A heavy head leaves the rest to the other stages, which share it evenly.
        assert_eq!(partition(&[0.1, 1.0, 1.0, 1.0, 1.0, 5.0], 3).unwrap(), [0..3, 3..5, 5..6]);
        assert_eq!(partition(&[3.0], 1).unwrap().len(), 1);
        assert_eq!(partition(&[1.0; 2], 3), None);
    }

    /// Every cut into that many parts.
    fn cuts(blocks: usize, stages: usize) -> Vec<Vec<Range<usize>>> {
        if stages == 0 {
            return if blocks == 0 { vec![vec![]] } else { vec![] };
        }
        let with_last = |end: usize| {
            let mut before = cuts(end, stages - 1);
            before.iter_mut().for_each(|cut| cut.push(end..blocks));
            before
        };
        (stages - 1..blocks).flat_map(with_last).collect()
    }

    proptest! {
        #[test]
        fn no_cut_is_better(costs in proptest::collection::vec(0u8..20, 1..8), stages in 1usize..5) {
            let costs: Vec<f64> = costs.into_iter().map(f64::from).collect();
            let of = |cut: &[Range<usize>]| {
                let parts: Vec<f64> = cut.iter().map(|part| costs[part.clone()].iter().sum()).collect();
                let most = parts.iter().copied().fold(0.0, f64::max);
                (most, parts.iter().map(|part| part * part).sum::<f64>())
            };
            match partition(&costs, stages) {
                None => prop_assert!(stages > costs.len()),
                Some(found) => {
                    prop_assert_eq!(found.len(), stages);
                    prop_assert!(cuts(costs.len(), stages).iter().all(|cut| of(&found) <= of(cut)));
                }
            }
        }
    }
}
