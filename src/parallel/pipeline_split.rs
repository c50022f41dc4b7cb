//! Cuts a sequence of blocks into the stages of a pipeline. Numbers in, integers out.

use std::ops::Range;

/// Consecutive parts of blocks with these costs, each of at least one, of which the costliest is as
/// cheap as can be; of all such cuts the one with the least sum of squares, which spreads the rest
/// evenly. `allowed` says of a stage and a part whether it may have it. Exact: dynamic programming
/// over the first blocks. None if there is no such cut.
pub fn partition(
    costs: &[f64],
    stages: usize,
    allowed: impl Fn(usize, &Range<usize>) -> bool,
) -> Option<Vec<Range<usize>>> {
    let cost = |part: &Range<usize>| costs[part.clone()].iter().sum::<f64>();
    let most = best(costs.len(), stages, |stage, part, most| {
        allowed(stage, part).then(|| f64::max(most, cost(part)))
    })?;
    // The same sums are compared, so that rounding does not matter.
    let even = best(costs.len(), stages, |stage, part, sum| {
        let cost = cost(part);
        (cost <= most.0 && allowed(stage, part)).then_some(sum + cost * cost)
    })?;
    Some(even.1)
}

/// The cut whose cost is least. `join` gives the cost of some stages with one more, its number,
/// blocks and the cost of those before, or none where that is not allowed.
fn best(
    blocks: usize,
    stages: usize,
    join: impl Fn(usize, &Range<usize>, f64) -> Option<f64>,
) -> Option<(f64, Vec<Range<usize>>)> {
    // For every number of first blocks: the least cost in the stages so far, and where the last of
    // them begins.
    let mut least: Vec<Option<f64>> = vec![None; blocks + 1];
    least[0] = Some(0.0);
    let mut begins = Vec::with_capacity(stages);
    for stage in 0..stages {
        let mut next = vec![None; blocks + 1];
        let mut begin = vec![0; blocks + 1];
        for end in 1..=blocks {
            for start in 0..end {
                let Some(cost) = least[start].and_then(|before| join(stage, &(start..end), before))
                else {
                    continue;
                };
                if next[end].is_none_or(|least| cost < least) {
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
        let partition = |costs: &[f64], stages| partition(costs, stages, |_, _| true);
        assert_eq!(partition(&[1.0; 6], 3).unwrap(), [0..2, 2..4, 4..6]);
        // A heavy head leaves the rest to the other stages, which share it evenly.
        assert_eq!(partition(&[0.1, 1.0, 1.0, 1.0, 1.0, 5.0], 3).unwrap(), [0..3, 3..5, 5..6]);
        assert_eq!(partition(&[3.0], 1).unwrap().len(), 1);
        assert_eq!(partition(&[1.0; 2], 3), None);
    }

    #[test]
    fn a_stage_takes_no_more_than_it_may() {
        let small_first = |stage: usize, part: &Range<usize>| stage > 0 || part.len() == 1;
        assert_eq!(partition(&[1.0; 7], 3, small_first).unwrap(), [0..1, 1..4, 4..7]);
        assert_eq!(partition(&[1.0; 7], 3, |_, part| part.len() < 3), None);
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
        fn no_cut_is_better(
            costs in proptest::collection::vec(0u8..20, 1..8),
            stages in 1usize..5,
            refused in proptest::collection::vec((0usize..5, 0usize..8, 1usize..4), 0..6),
        ) {
            let allowed = |stage: usize, part: &Range<usize>| !refused.contains(&(stage, part.start, part.len()));
            let may = |cut: &Vec<Range<usize>>| cut.iter().enumerate().all(|(stage, part)| allowed(stage, part));
            let costs: Vec<f64> = costs.into_iter().map(f64::from).collect();
            let of = |cut: &[Range<usize>]| {
                let parts: Vec<f64> = cut.iter().map(|part| costs[part.clone()].iter().sum()).collect();
                let most = parts.iter().copied().fold(0.0, f64::max);
                (most, parts.iter().map(|part| part * part).sum::<f64>())
            };
            let mut cuts = cuts(costs.len(), stages);
            cuts.retain(may);
            match partition(&costs, stages, allowed) {
                None => prop_assert!(cuts.is_empty()),
                Some(found) => {
                    prop_assert!(found.len() == stages && may(&found));
                    prop_assert!(cuts.iter().all(|cut| of(&found) <= of(cut)));
                }
            }
        }
    }
}
