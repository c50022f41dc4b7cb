//! Partitions a sequence of blocks into pipeline stages.

use std::ops::Range;

/// Partitions blocks with these costs into consecutive non-empty parts. Minimizes the cost of the
/// most expensive part, and among such partitions the sum of squared costs, which balances the
/// other parts. `allowed` returns whether a stage may have a part. The result is exact, by dynamic
/// programming over prefixes of the blocks. Returns none if there is no allowed partition.
pub fn partition(
    costs: &[f64],
    stages: usize,
    allowed: impl Fn(usize, &Range<usize>) -> bool,
) -> Option<Vec<Range<usize>>> {
    let cost = |part: &Range<usize>| costs[part.clone()].iter().sum::<f64>();
    let most = best(costs.len(), stages, |stage, part, most| {
        allowed(stage, part).then(|| f64::max(most, cost(part)))
    })?;
    // The same sums are compared as before, so rounding does not matter.
    let even = best(costs.len(), stages, |stage, part, sum| {
        let cost = cost(part);
        (cost <= most.0 && allowed(stage, part)).then_some(sum + cost * cost)
    })?;
    Some(even.1)
}

/// Returns the partition with the least cost. `join` takes the index of a stage, its blocks and the
/// cost of the stages before, and returns the cost including the stage, or none if that is not
/// allowed.
fn best(
    blocks: usize,
    stages: usize,
    join: impl Fn(usize, &Range<usize>, f64) -> Option<f64>,
) -> Option<(f64, Vec<Range<usize>>)> {
    // The least cost of every prefix of the blocks in the stages so far; `begins` has the start of
    // the last stage.
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
    fn the_most_expensive_part_is_minimized() {
        let partition = |costs: &[f64], stages| partition(costs, stages, |_, _| true);
        assert_eq!(partition(&[1.0; 6], 3).unwrap(), [0..2, 2..4, 4..6]);
        // An expensive head has its own stage; the other stages are balanced.
        assert_eq!(partition(&[0.1, 1.0, 1.0, 1.0, 1.0, 5.0], 3).unwrap(), [0..3, 3..5, 5..6]);
        assert_eq!(partition(&[3.0], 1).unwrap().len(), 1);
        assert_eq!(partition(&[1.0; 2], 3), None);
    }

    #[test]
    fn a_stage_takes_only_allowed_parts() {
        let small_first = |stage: usize, part: &Range<usize>| stage > 0 || part.len() == 1;
        assert_eq!(partition(&[1.0; 7], 3, small_first).unwrap(), [0..1, 1..4, 4..7]);
        assert_eq!(partition(&[1.0; 7], 3, |_, part| part.len() < 3), None);
    }

    /// Returns every partition into `stages` parts.
    fn cuts(blocks: usize, stages: usize) -> Vec<Vec<Range<usize>>> {
        if stages == 0 {
            return if blocks == 0 { vec![vec![]] } else { vec![] };
        }
        (stages - 1..blocks)
            .flat_map(|end| {
                let mut before = cuts(end, stages - 1);
                before.iter_mut().for_each(|cut| cut.push(end..blocks));
                before
            })
            .collect()
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
