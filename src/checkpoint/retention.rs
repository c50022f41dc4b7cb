//! Selection of the checkpoints that need not be kept.

use hpctrain_config as config;

/// Rules for the checkpoints that are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// Number of the newest checkpoints kept.
    pub newest: usize,
    /// Checkpoints of steps that are multiples of this are kept; 0 keeps none for its step.
    pub multiples: u64,
    /// Number of checkpoints kept for the lowest validation losses.
    pub best: usize,
    /// The step at which an audit last found replicas equal, if audits compare any: the newest
    /// checkpoint that is not after this step is kept, since a later audit may put all others in
    /// doubt.
    pub audited: Option<u64>,
}

impl Retention {
    /// The retention that a configuration asks for.
    pub fn of(config: &config::Checkpoint) -> Self {
        Self {
            newest: config.keep,
            multiples: config.keep_every,
            best: config.keep_best,
            audited: None,
        }
    }
}

/// A published checkpoint, as far as its removal is concerned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Its step.
    pub step: u64,
    /// Whether all of it is there: a damaged checkpoint does not count.
    pub sound: bool,
    /// Its validation loss, if it was evaluated.
    pub loss: Option<f64>,
    /// Whether somebody reads it, or will.
    pub held: bool,
}

/// Steps to remove, ascending. `candidates` are in the order of their steps.
pub fn removed(candidates: &[Candidate], retention: &Retention) -> Vec<u64> {
    let sound: Vec<&Candidate> = candidates.iter().filter(|candidate| candidate.sound).collect();
    let newest = &sound[sound.len().saturating_sub(retention.newest)..];
    // No checkpoint is removed that is newer than the oldest of these: while all are damaged, all
    // stay.
    let Some(oldest) = newest.first().map(|candidate| candidate.step) else { return Vec::new() };
    let mut by_loss: Vec<(f64, u64)> =
        sound.iter().filter_map(|one| Some((one.loss?, one.step))).collect();
    by_loss.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    by_loss.truncate(retention.best);
    let proven = retention
        .audited
        .and_then(|step| sound.iter().rev().find(|one| one.step <= step))
        .map(|one| one.step);
    let kept = |one: &Candidate| {
        one.held
            || proven == Some(one.step)
            || one.step >= oldest
            || retention.multiples > 0 && one.step.is_multiple_of(retention.multiples)
            || by_loss.iter().any(|(_, step)| *step == one.step)
    };
    candidates.iter().filter(|one| !kept(one)).map(|one| one.step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: u64) -> Candidate {
        Candidate { step, sound: true, loss: None, held: false }
    }

    #[test]
    fn newest_multiples_best_and_held_stay() {
        let all: Vec<Candidate> = (1..=8)
            .map(|n| Candidate { loss: Some((n as f64 - 2.2).abs()), ..at(n * 10) })
            .collect();
        let keep = |newest, multiples, best| {
            removed(&all, &Retention { newest, multiples, best, audited: None })
        };
        assert_eq!(keep(2, 0, 0), [10, 20, 30, 40, 50, 60]);
        assert_eq!(keep(9, 0, 0), [0u64; 0]);
        assert_eq!(keep(1, 30, 0), [10, 20, 40, 50, 70]);
        assert_eq!(keep(1, 0, 2), [10, 40, 50, 60, 70]);
        let mut held = all.clone();
        held[0].held = true;
        assert_eq!(removed(&held, &Retention { newest: 6, ..Retention::default() }), [20]);
    }

    #[test]
    fn the_newest_that_an_audit_covers_stays() {
        let all: Vec<Candidate> = (1..=8).map(|n| at(n * 500)).collect();
        let keep =
            |audited| removed(&all, &Retention { newest: 2, audited, ..Retention::default() });
        assert_eq!(keep(None), [500, 1000, 1500, 2000, 2500, 3000]);
        assert_eq!(keep(Some(1999)), [500, 1000, 2000, 2500, 3000]);
        assert_eq!(keep(Some(2000)), [500, 1000, 1500, 2500, 3000]);
        assert_eq!(keep(Some(499)), keep(None));
    }

    #[test]
    fn damaged_ones_do_not_count() {
        let mut all: Vec<Candidate> = (1..=4).map(at).collect();
        (all[3].sound, all[2].sound) = (false, false);
        let keep = |newest| removed(&all, &Retention { newest, ..Retention::default() });
        assert_eq!(keep(1), [1]);
        assert_eq!(keep(2), [0u64; 0]);
        all.iter_mut().for_each(|one| one.sound = false);
        assert_eq!(removed(&all, &Retention { newest: 1, ..Retention::default() }), [0u64; 0]);
    }
}
