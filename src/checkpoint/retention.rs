//! Selection of the checkpoints to remove.

use hpctrain_config as config;

/// Which checkpoints are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// The number of the newest checkpoints to keep.
    pub newest: usize,
    /// Keep checkpoints whose step is a multiple of this; 0 disables it.
    pub multiples: u64,
    /// The number of checkpoints with the lowest validation losses to keep.
    pub best: usize,
    /// The step at which an SDC check last found replicas equal, if such checks run. The newest
    /// checkpoint up to this step is kept, since a later check may mark all newer ones as suspect.
    pub sdc_checked: Option<u64>,
}

impl Retention {
    /// Creates the retention that a configuration asks for.
    pub fn from_config(config: &config::Checkpoint) -> Self {
        Self {
            newest: config.keep,
            multiples: config.keep_every,
            best: config.keep_best,
            sdc_checked: None,
        }
    }
}

/// The facts about a published checkpoint that retention depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The step of the checkpoint.
    pub step: u64,
    /// Whether it is complete: a damaged checkpoint does not count.
    pub intact: bool,
    /// The validation loss, if the checkpoint was evaluated.
    pub loss: Option<f64>,
    /// Whether a process reads it, or will.
    pub leased: bool,
}

/// Returns the steps to remove, ascending. `candidates` are in the order of their steps.
pub fn steps_to_remove(candidates: &[Candidate], retention: &Retention) -> Vec<u64> {
    let sound: Vec<&Candidate> = candidates.iter().filter(|candidate| candidate.intact).collect();
    let newest = &sound[sound.len().saturating_sub(retention.newest)..];
    // Checkpoints newer than the oldest of these stay: if all are damaged, none is removed.
    let Some(oldest) = newest.first().map(|candidate| candidate.step) else { return Vec::new() };
    let mut by_loss: Vec<(f64, u64)> =
        sound.iter().filter_map(|one| Some((one.loss?, one.step))).collect();
    by_loss.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    by_loss.truncate(retention.best);
    let proven = retention
        .sdc_checked
        .and_then(|step| sound.iter().rev().find(|one| one.step <= step))
        .map(|one| one.step);
    candidates
        .iter()
        .filter(|one| !one.leased && one.step < oldest && proven != Some(one.step))
        .map(|one| one.step)
        .filter(|step| retention.multiples == 0 || !step.is_multiple_of(retention.multiples))
        .filter(|step| by_loss.iter().all(|(_, best)| best != step))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64) -> Candidate {
        Candidate { step, intact: true, loss: None, leased: false }
    }

    #[test]
    fn newest_multiples_best_and_held_stay() {
        let all: Vec<Candidate> = (1..=8)
            .map(|n| Candidate { loss: Some((n as f64 - 2.2).abs()), ..at(n * 10) })
            .collect();
        let keep = |newest, multiples, best| {
            steps_to_remove(&all, &Retention { newest, multiples, best, sdc_checked: None })
        };
        assert_eq!(keep(2, 0, 0), [10, 20, 30, 40, 50, 60]);
        assert_eq!(keep(9, 0, 0), [0u64; 0]);
        assert_eq!(keep(1, 30, 0), [10, 20, 40, 50, 70]);
        assert_eq!(keep(1, 0, 2), [10, 40, 50, 60, 70]);
        let mut held = all.clone();
        held[0].leased = true;
        assert_eq!(steps_to_remove(&held, &Retention { newest: 6, ..Retention::default() }), [20]);
    }

    #[test]
    fn the_newest_that_an_audit_covers_stays() {
        let all: Vec<Candidate> = (1..=8).map(|n| at(n * 500)).collect();
        let keep = |sdc_checked| {
            let retention = Retention { newest: 2, sdc_checked, ..Retention::default() };
            steps_to_remove(&all, &retention)
        };
        assert_eq!(keep(None), [500, 1000, 1500, 2000, 2500, 3000]);
        assert_eq!(keep(Some(1999)), [500, 1000, 2000, 2500, 3000]);
        assert_eq!(keep(Some(2000)), [500, 1000, 1500, 2500, 3000]);
        assert_eq!(keep(Some(499)), keep(None));
    }

    #[test]
    fn damaged_ones_do_not_count() {
        let mut all: Vec<Candidate> = (1..=4).map(at).collect();
        (all[3].intact, all[2].intact) = (false, false);
        let keep = |newest| steps_to_remove(&all, &Retention { newest, ..Retention::default() });
        assert_eq!(keep(1), [1]);
        assert_eq!(keep(2), [0u64; 0]);
        all.iter_mut().for_each(|one| one.intact = false);
        assert_eq!(
            steps_to_remove(&all, &Retention { newest: 1, ..Retention::default() }),
            [0u64; 0]
        );
    }
}
