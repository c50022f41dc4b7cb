//! `rank_times.jsonl`: the compute times of ranks, one JSON object per window of `log.straggler_window`
//! steps.

use serde::{Deserialize, Serialize};

/// The name of the file in a run's directory.
pub const FILE: &str = "rank_times.jsonl";

/// The most ranks for which the time of each is recorded.
const EACH: usize = 64;

/// The number of slowest ranks that are recorded if there are more than [`EACH`].
const SLOWEST: usize = 16;

/// The compute times of ranks in a window of steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankTimes {
    /// The last step of the window.
    pub step: u64,
    /// The number of steps in the window.
    pub steps: u64,
    /// The milliseconds per step that each rank computed, without waits for messages and data, in
    /// the order of ranks; empty if there are more than 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub compute_ms: Vec<f64>,
    /// The number of virtual ranks of each of these ranks; empty if all have as many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub virtual_ranks: Vec<usize>,
    /// The distribution of these times if there are more than 64 ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
}

/// The distribution of the times of many ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The number of ranks.
    pub ranks: usize,
    /// The minimum, the quantiles of 10 %, 50 % and 90 %, and the maximum of the times.
    pub quantiles_ms: [f64; 5],
    /// The slowest ranks with their times, slowest first.
    pub slowest_ms: Vec<(usize, f64)>,
}

impl RankTimes {
    /// Creates the record of a window of `steps` steps that ends with step `step`, from the
    /// milliseconds per step of each rank.
    pub fn new(step: u64, steps: u64, compute_ms: Vec<f64>) -> Self {
        if compute_ms.len() <= EACH {
            return Self { step, steps, compute_ms, virtual_ranks: Vec::new(), spread: None };
        }
        let mut sorted: Vec<(usize, f64)> = compute_ms.into_iter().enumerate().collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
        let ranks = sorted.len();
        // The smallest time that this share of ranks does not exceed.
        let quantiles_ms = [0, 10, 50, 90, 100]
            .map(|percent: usize| sorted[ranks - (ranks * percent).div_ceil(100).max(1)].1);
        sorted.truncate(SLOWEST);
        let spread = Spread { ranks, quantiles_ms, slowest_ms: sorted };
        Self { step, steps, compute_ms: vec![], virtual_ranks: vec![], spread: Some(spread) }
    }

    /// Adds the number of virtual ranks of each rank, unless all have as many.
    pub fn with_virtual_ranks(mut self, counts: &[usize]) -> Self {
        if counts.len() == self.compute_ms.len() && counts.iter().any(|count| *count != counts[0]) {
            self.virtual_ranks = counts.to_vec();
        }
        self
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.spread.as_ref().map_or(self.compute_ms.len(), |spread| spread.ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the length of a line for this many ranks, after checks of its content.
    fn length(ranks: usize) -> usize {
        let many = RankTimes::new(20, 10, (0..ranks).map(|rank| rank as f64 + 1.0).collect());
        let line = serde_json::to_string(&many).unwrap();
        assert_eq!(serde_json::from_str::<RankTimes>(&line).unwrap(), many);
        assert_eq!(many.ranks(), ranks);
        let spread = many.spread.unwrap();
        let share = |percent: f64| (ranks as f64 * percent).ceil();
        assert_eq!(spread.quantiles_ms, [1.0, share(0.1), share(0.5), share(0.9), ranks as f64]);
        assert_eq!(
            (spread.slowest_ms.len(), spread.slowest_ms[0]),
            (SLOWEST, (ranks - 1, ranks as f64))
        );
        line.len()
    }

    #[test]
    fn a_line_does_not_grow_with_the_ranks() {
        let few = RankTimes::new(20, 10, vec![1.5; EACH]);
        assert_eq!((few.ranks(), few.compute_ms.len(), &few.spread), (EACH, EACH, &None));
        assert!(length(10_000) < 600 && length(100) < 600);
    }
}
