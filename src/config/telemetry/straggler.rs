//! Detection of stragglers: ranks that compute slower than the others.

/// A rank that was slow over a whole window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Straggler {
    /// The rank.
    pub rank: usize,
    /// Its compute time, as a multiple of the median of the ranks of its stage.
    pub times: f64,
}

/// The least seconds per step by which a straggler exceeds the median. In steps of a few
/// milliseconds system noise can exceed the factor on one of two ranks.
const NOTICEABLE: f64 = 0.005;

/// A full window of steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Window {
    /// The number of steps.
    pub steps: u64,
    /// The seconds that each rank computed in it.
    pub seconds: Vec<f64>,
    /// The ranks that were slow in it.
    pub stragglers: Vec<Straggler>,
}

/// Compares the compute times of ranks, window after window of steps.
#[derive(Debug)]
pub struct Stragglers {
    /// The least factor by which a rank must exceed the median, besides [`NOTICEABLE`]; 0 disables
    /// the detection.
    factor: f64,
    /// The number of ranks of a pipeline stage, which are consecutive.
    stage_ranks: usize,
    /// The number of virtual ranks of every rank.
    virtual_ranks: Vec<usize>,
    /// The number of steps per window.
    window: u64,
    /// The steps in the current window, and the seconds of every rank in it.
    steps: u64,
    seconds: Vec<f64>,
}

impl Stragglers {
    /// Creates a detector of ranks that compute `factor` times as long as the median of the
    /// `stage_ranks` ranks of their stage over `window` steps, if all had as many virtual ranks; a
    /// factor of 0 disables it.
    pub fn new(factor: f64, stage_ranks: usize, window: u64, virtual_ranks: Vec<usize>) -> Self {
        Self { factor, stage_ranks, virtual_ranks, window, steps: 0, seconds: Vec::new() }
    }

    /// Returns the number of virtual ranks of every rank.
    pub fn virtual_ranks(&self) -> &[usize] {
        &self.virtual_ranks
    }

    /// Adds a step: the seconds that each rank computed, without waits for messages and data. When
    /// a window is full, returns it and starts the next one.
    pub fn step(&mut self, seconds: &[f64]) -> Option<Window> {
        self.seconds.resize(seconds.len(), 0.0);
        self.seconds.iter_mut().zip(seconds).for_each(|(sum, seconds)| *sum += seconds);
        self.steps += 1;
        if self.steps < self.window {
            return None;
        }
        self.steps = 0;
        let seconds = std::mem::take(&mut self.seconds);
        let ranks = (self.stage_ranks, &self.virtual_ranks[..]);
        let stragglers = slow_ranks(&seconds, ranks, self.factor, self.window);
        Some(Window { steps: self.window, seconds, stragglers })
    }
}

/// Returns the stragglers of `seconds`, in which each rank computed `steps` steps: those that
/// [`slow`] finds among the `stage_ranks` ranks of their stage. The seconds are compared as if each
/// rank had as many virtual ranks as the one with the most; missing counts are those of that rank,
/// and ranks with none are not compared.
pub fn slow_ranks(
    seconds: &[f64],
    (stage_ranks, virtual_ranks): (usize, &[usize]),
    factor: f64,
    steps: u64,
) -> Vec<Straggler> {
    let most = virtual_ranks.iter().copied().max().unwrap_or(1);
    let count = |rank: usize| virtual_ranks.get(rank).copied().unwrap_or(most);
    let ranks: Vec<usize> = (0..seconds.len()).collect();
    let of_stage = |stage: &[usize]| {
        let stage: Vec<usize> = stage.iter().copied().filter(|rank| count(*rank) > 0).collect();
        let equal = |rank: &usize| seconds[*rank] * (most as f64 / count(*rank) as f64);
        let found = slow(&stage.iter().map(equal).collect::<Vec<_>>(), factor, steps);
        let named = found.into_iter().map(|(i, times)| Straggler { rank: stage[i], times });
        named.collect::<Vec<_>>()
    };
    ranks.chunks(stage_ranks.max(1)).flat_map(of_stage).collect()
}

/// Returns the indices of the `seconds` that are at least `factor` times the median, and exceed it
/// by 5 ms for each of `steps` steps; with each, the multiple of the median. A factor of 0 finds
/// none.
pub fn slow(seconds: &[f64], factor: f64, steps: u64) -> Vec<(usize, f64)> {
    let median = median(seconds);
    let noticeable = NOTICEABLE * steps as f64;
    let mut found = Vec::new();
    for (i, &sum) in seconds.iter().enumerate() {
        let times = if median > 0.0 { sum / median } else { 1.0 };
        if factor > 0.0 && times >= factor && sum - median >= noticeable {
            found.push((i, times));
        }
    }
    found
}

/// Returns the median; of an even number of values the lower of the two in the middle, so that one
/// of two ranks can be slow.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An owner of central storage that computes nothing makes no other rank slow.
    #[test]
    fn ranks_without_work_are_not_compared() {
        let mut found = Stragglers::new(1.5, 4, 1, vec![0, 0, 3, 5]);
        assert_eq!(found.step(&[0.01, 0.01, 3.0, 5.0]).unwrap().stragglers.len(), 0);
        let slow = found.step(&[0.01, 0.01, 3.0, 15.0]).unwrap().stragglers;
        assert_eq!(slow.iter().map(|one| one.rank).collect::<Vec<_>>(), [3]);
    }

    /// Returns the stragglers found in some steps of ranks that take these seconds.
    fn found(stragglers: &mut Stragglers, steps: usize, seconds: &[f64]) -> Vec<Straggler> {
        (0..steps)
            .filter_map(|_| stragglers.step(seconds))
            .flat_map(|window| window.stragglers)
            .collect()
    }

    #[test]
    fn a_slow_rank_is_named_once_a_window() {
        let mut stragglers = Stragglers::new(1.5, 4, 20, vec![1; 4]);
        let seconds = [1.0, 1.25, 1.0, 2.0];
        assert_eq!(found(&mut stragglers, 19, &seconds), []);
        let slow = Straggler { rank: 3, times: 2.0 };
        assert_eq!(found(&mut stragglers, 1, &seconds), [slow]);
        assert_eq!(found(&mut stragglers, 40, &seconds), [slow; 2]);
    }

    #[test]
    fn ranks_with_more_virtual_ranks_are_not_slow() {
        let mut stragglers = Stragglers::new(1.5, 3, 1, vec![2, 1, 1]);
        assert_eq!(found(&mut stragglers, 1, &[2.0, 1.0, 1.0]), []);
        let slow = Straggler { rank: 2, times: 2.0 };
        assert_eq!(found(&mut stragglers, 1, &[2.0, 1.0, 2.0]), [slow]);
    }

    #[test]
    fn one_slow_step_does_not_make_a_straggler() {
        let mut stragglers = Stragglers::new(1.5, 4, 20, vec![1; 4]);
        stragglers.step(&[1.0, 8.0, 1.0]);
        assert_eq!(found(&mut stragglers, 19, &[1.0; 3]), []);
        // The next window has forgotten it.
        assert_eq!(found(&mut stragglers, 20, &[1.0; 3]), []);
    }

    #[test]
    fn one_of_two_can_be_slow_and_one_alone_cannot() {
        let slow = Straggler { rank: 0, times: 3.0 };
        assert_eq!(found(&mut Stragglers::new(1.5, 2, 1, vec![1; 2]), 1, &[3.0, 1.0]), [slow]);
        assert_eq!(found(&mut Stragglers::new(1.5, 2, 1, vec![1; 2]), 9, &[3.0]), []);
        assert_eq!(found(&mut Stragglers::new(1.5, 2, 1, vec![1; 2]), 9, &[0.0, 0.0]), []);
    }

    #[test]
    fn a_rank_of_short_steps_is_not_slow_by_noise() {
        let mut stragglers = Stragglers::new(1.5, 4, 20, vec![1; 4]);
        assert_eq!(found(&mut stragglers, 40, &[1.0 / 256.0, 2.0 / 256.0]), []);
        assert_eq!(
            found(&mut stragglers, 20, &[1.0 / 256.0, 3.0 / 256.0]),
            [Straggler { rank: 1, times: 3.0 }]
        );
    }

    #[test]
    fn ranks_are_compared_with_those_of_their_stage() {
        let mut stragglers = Stragglers::new(1.5, 2, 1, vec![1; 2]);
        assert_eq!(found(&mut stragglers, 1, &[1.0, 1.0, 9.0, 9.0]), []);
        assert_eq!(
            found(&mut stragglers, 1, &[1.0, 1.0, 3.0, 9.0]),
            [Straggler { rank: 3, times: 3.0 }]
        );
    }

    #[test]
    fn zero_finds_none() {
        assert_eq!(found(&mut Stragglers::new(0.0, 2, 1, vec![1; 2]), 9, &[9.0, 1.0]), []);
    }
}
