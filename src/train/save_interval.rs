//! `checkpoint.every = "auto"`: the interval between checkpoints, from the cost of a save and the
//! mean time between failures.
//!
//! A save costs the time for which it blocks training, and the time by which steps are slower
//! while the checkpoint is written. A failure costs the steps since the last checkpoint. The
//! interval that costs least is that of Daly ("A higher order estimate of the optimum checkpoint
//! interval for restart dumps", 2006), whose first order is Young's √(2CM) ("A first order
//! approximation to the optimum checkpoint interval", 1974), with the cost C of a save and the mean
//! time M between failures.
//!
//! M is the time that the run has trained divided by the starts that failed. Before the first
//! failure it is assumed: a day, or less on many nodes, at the rate of failures per node of the
//! training of Llama 3 ("The Llama 3 Herd of Models", 2024): 466 interruptions in 54 days on 16,384
//! GPUs, eight in a node.
//!
//! Rank 0 decides, and sends its decision with the control flags of a step.

use std::fmt;
use std::time::{Duration, Instant};

use hpctrain_config::telemetry::run_record::CheckpointInterval;
use hpctrain_config::telemetry::starts::Failures;

/// The seconds between failures of a job that are assumed before the first one, at most.
const ASSUMED: f64 = 24.0 * 3600.0;

/// The seconds between failures of a node that are assumed.
const ASSUMED_OF_NODE: f64 = 54.0 * 24.0 * 3600.0 / 466.0 * 16384.0 / 8.0;

/// The number of rounds before the first save, whose cost is measured.
const FIRST: u64 = 10;

/// The part of the mean time between failures after which the first save is due if the rounds
/// before it take longer.
const FIRST_PART: f64 = 0.1;

/// The number of rounds at the start that are not measured: they load kernels and fill caches.
const WARM_UP: u64 = 2;

/// The least relative change of the interval that counts.
const CHANGE: f64 = 0.1;

/// The measurements of a run from which the interval follows.
pub struct SaveInterval {
    /// The assumed seconds between failures.
    assumed: f64,
    /// The failures of earlier starts.
    failures: Failures,
    began: Instant,
    /// The steps between evaluations in the trainer whose checkpoints may be kept as the best; 0 if
    /// there are none.
    eval_every: u64,
    /// The step of the last checkpoint.
    saved: u64,
    /// When its save began, or the start did.
    saved_at: Instant,
    /// Whether a save has failed and is to be made again after a pause, which is not measured here.
    has_failed: bool,
    rounds: u64,
    /// Steps and their seconds while no checkpoint was written.
    undisturbed: (u64, f64),
    /// Steps and their seconds while a checkpoint was written, since its save began.
    disturbed: (u64, f64),
    /// Steps and their seconds with all between them but saves.
    all: (u64, f64),
    /// The seconds for which the save under way, if there is one, has blocked training.
    saving: Option<f64>,
    /// The cost of the first save, the costs of all others, and their number.
    costs: (f64, f64, u64),
    /// The longest time from the beginning of a save to its publication.
    written: f64,
    chosen: Option<CheckpointInterval>,
    /// Whether training has ended: the last save is waited for, and measures nothing.
    has_ended: bool,
}

impl SaveInterval {
    /// Creates the measurements of a start from step `step` on `nodes` nodes.
    pub fn new(failures: Failures, nodes: usize, eval_every: u64, step: u64) -> Self {
        let began = Instant::now();
        Self {
            assumed: (ASSUMED_OF_NODE / nodes.max(1) as f64).min(ASSUMED),
            failures,
            began,
            eval_every,
            saved: step,
            saved_at: began,
            has_failed: false,
            rounds: 0,
            undisturbed: (0, 0.0),
            disturbed: (0, 0.0),
            all: (0, 0.0),
            saving: None,
            costs: (0.0, 0.0, 0),
            written: 0.0,
            chosen: None,
            has_ended: false,
        }
    }

    /// Ends the measurements.
    pub fn end(&mut self) {
        self.saving = None;
        self.has_ended = true;
    }

    /// Returns the interval, once it is chosen.
    pub fn chosen(&self) -> Option<CheckpointInterval> {
        self.chosen
    }

    /// Returns true if a checkpoint is due after the round that ends with step `step`. `evaluates`
    /// is true if that step is evaluated.
    pub fn is_due(&self, step: u64, evaluates: bool) -> bool {
        self.is_due_after(step, evaluates, self.saved_at.elapsed().as_secs_f64())
    }

    /// Returns true if a checkpoint is due, and the last save began `elapsed` seconds ago.
    fn is_due_after(&self, step: u64, evaluates: bool, elapsed: f64) -> bool {
        if self.saving.is_some() || self.has_failed {
            return false;
        }
        let since = step.saturating_sub(self.saved);
        let Some(CheckpointInterval { steps, .. }) = self.chosen else {
            return self.rounds + 1 >= FIRST || elapsed >= FIRST_PART * self.failure_seconds(0.0);
        };
        // Only an evaluated step can be the best, so the nearest one is preferred.
        let half = self.eval_every.min(steps) / 2;
        match evaluates {
            true => since + half >= steps,
            false if steps >= self.eval_every => since >= steps + half,
            false => since >= steps,
        }
    }

    /// Notes a round of `steps` steps.
    pub fn note_steps(&mut self, steps: u64, seconds: f64) {
        self.rounds += 1;
        if self.rounds <= WARM_UP {
            return;
        }
        let sum = match self.saving {
            Some(_) => &mut self.disturbed,
            None => &mut self.undisturbed,
        };
        *sum = (sum.0 + steps, sum.1 + seconds);
    }

    /// Notes the seconds of a round of `steps` steps with all that followed but saves.
    pub fn note_all(&mut self, steps: u64, seconds: f64) {
        if self.rounds > WARM_UP {
            self.all = (self.all.0 + steps, self.all.1 + seconds);
        }
    }

    /// Notes that a save has begun.
    pub fn save_begun(&mut self, step: u64) {
        (self.saved, self.saved_at, self.has_failed) = (step, Instant::now(), false);
        self.saving = (!self.has_ended).then_some(0.0);
        self.disturbed = (0, 0.0);
    }

    /// Notes that the save under way has blocked training.
    pub fn note_pause(&mut self, seconds: f64) {
        self.saving.iter_mut().for_each(|pause| *pause += seconds);
    }

    /// Notes that a save could not begin, or that the one under way was not completed. None is due
    /// until it is made again.
    pub fn save_failed(&mut self) {
        self.saving = None;
        self.has_failed = true;
    }

    /// Notes that a checkpoint was published this long after its save had begun.
    pub fn note_published(&mut self, took: Duration) {
        self.written = self.written.max(took.as_secs_f64());
    }

    /// Notes that the save under way, if there is one, is complete. Returns the interval if it is
    /// another than before.
    pub fn save_ended(&mut self) -> Option<CheckpointInterval> {
        let pause = self.saving.take()?;
        let (steps, seconds) = self.disturbed;
        let slower = match self.undisturbed {
            (0, _) => 0.0,
            (of, all) => (seconds - all / of as f64 * steps as f64).max(0.0),
        };
        let cost = pause + slower;
        let (first, others, count) = self.costs;
        // The first save creates directories and allocates memory.
        self.costs = match count {
            0 => (cost, 0.0, 1),
            _ => (first, others + cost, count + 1),
        };
        self.choose(self.began.elapsed().as_secs_f64())
    }

    /// Returns the mean time between failures after `trained` seconds of this start.
    fn failure_seconds(&self, trained: f64) -> f64 {
        match self.failures.count {
            0 => self.assumed,
            failures => (self.failures.seconds + trained) / failures as f64,
        }
    }

    /// Chooses the interval after `trained` seconds of this start.
    fn choose(&mut self, trained: f64) -> Option<CheckpointInterval> {
        let (first, others, count) = self.costs;
        let save_seconds = if count > 1 { others / (count - 1) as f64 } else { first };
        let failures = self.failures.count;
        let failure_seconds = self.failure_seconds(trained);
        let (steps, seconds) = self.all;
        // A run that branches off another one saves before its first step.
        if steps == 0 {
            return None;
        }
        let step_seconds = seconds / steps as f64;
        // A checkpoint is written before the next one begins.
        let interval = daly(save_seconds, failure_seconds).max(self.written);
        let steps = (interval / step_seconds).round().max(1.0);
        let is_same =
            self.chosen.is_some_and(|chosen| (steps / chosen.steps as f64 - 1.0).abs() <= CHANGE);
        if is_same {
            return None;
        }
        let steps = steps as u64;
        let seconds = steps as f64 * step_seconds;
        self.chosen =
            Some(CheckpointInterval { steps, seconds, save_seconds, failure_seconds, failures });
        self.chosen
    }
}

/// Returns the seconds of training between two saves that lose the least time, if a save costs
/// `cost` seconds and a failure comes every `between` seconds: Daly's higher order estimate.
fn daly(cost: f64, between: f64) -> f64 {
    if cost >= 2.0 * between {
        return between;
    }
    let ratio = (cost / (2.0 * between)).sqrt();
    (2.0 * cost * between).sqrt() * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - cost
}

/// Describes an interval for the log.
pub struct Described(pub CheckpointInterval);

impl fmt::Display for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckpointInterval { steps, seconds, save_seconds, failure_seconds, failures } = self.0;
        let plural = if steps == 1 { "" } else { "s" };
        let hours = failure_seconds / 3600.0;
        write!(
            f,
            "a checkpoint every {steps} step{plural} ({seconds:.1} s): a save costs {save_seconds:.3} s, "
        )?;
        match failures {
            0 => write!(f, "a failure every {hours:.1} h is assumed"),
            _ => write!(f, "{failures} failures so far, one every {hours:.3} h"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_that_of_young_and_daly() {
        // C = 18 s and M = 1 h: Young has 360 s, Daly 6 s more and the cost less.
        let (cost, between) = (18.0, 3600.0);
        let young = f64::sqrt(2.0 * cost * between);
        assert_eq!(young, 360.0);
        let ratio = 0.05;
        let expected = young * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - cost;
        assert!((daly(cost, between) - expected).abs() < 1e-9, "{}", daly(cost, between));
        assert_eq!(daly(0.0, between), 0.0);
        // A save that costs more than the time between failures.
        assert_eq!(daly(9000.0, between), between);
        // No interval near it loses less: saves, and half of an interval per failure.
        let lost = |interval: f64| cost / interval + (interval + cost) / 2.0 / between;
        let best = lost(daly(cost, between));
        assert!(lost(200.0) > best && lost(600.0) > best);
    }

    /// Takes rounds of one step of half a second, and saves at once with a cost of 0.2 s; returns
    /// the interval after that.
    fn after_a_save(interval: &mut SaveInterval, rounds: u64) -> Option<CheckpointInterval> {
        for _ in 0..rounds {
            interval.note_steps(1, 0.5);
            interval.note_all(1, 0.5);
        }
        interval.save_begun(rounds);
        interval.note_pause(0.2);
        interval.save_ended()
    }

    #[test]
    fn failures_shorten_the_interval() {
        let mut intact = SaveInterval::new(Failures::default(), 1, 0, 0);
        assert!(!intact.is_due(1, false) && intact.chosen().is_none());
        let chosen = after_a_save(&mut intact, 10).unwrap();
        assert_eq!((chosen.failures, chosen.failure_seconds), (0, 86400.0));
        assert_eq!(chosen.steps, (daly(0.2, 86400.0) / 0.5).round() as u64);
        assert!(!intact.is_due(10 + chosen.steps - 1, false));
        assert!(intact.is_due(10 + chosen.steps, false));

        let failures = Failures { count: 4, seconds: 400.0 };
        let mut failing = SaveInterval::new(failures, 1, 0, 0);
        let chosen = after_a_save(&mut failing, 10).unwrap();
        assert!((100.0..101.0).contains(&chosen.failure_seconds), "{chosen:?}");
        assert_eq!(chosen.steps, 12);
        // A like save changes nothing.
        assert_eq!(after_a_save(&mut failing, 10), None);
        assert_eq!(failing.chosen(), Some(chosen));
        // Many nodes fail more often.
        let mut large = SaveInterval::new(Failures::default(), 2048, 0, 0);
        let chosen = after_a_save(&mut large, 10).unwrap();
        assert!((chosen.failure_seconds / 3600.0 - 2.78).abs() < 0.01, "{chosen:?}");
    }

    #[test]
    fn the_first_save_measures_and_slower_steps_count() {
        let mut interval = SaveInterval::new(Failures::default(), 1, 0, 100);
        // A branch saves before its first step.
        assert_eq!(after_a_save(&mut interval, 0), None);
        let mut interval = SaveInterval::new(Failures::default(), 1, 0, 100);
        for round in 1..FIRST {
            assert!(!interval.is_due(100 + round, true));
            interval.note_steps(1, 0.5);
            interval.note_all(1, 0.5);
        }
        assert!(interval.is_due(100 + FIRST, false));
        interval.save_begun(110);
        assert!(!interval.is_due(111, false));
        interval.note_pause(0.25);
        // While it is written, two steps take a quarter of a second more each.
        (0..2).for_each(|_| interval.note_steps(1, 0.75));
        interval.note_pause(0.25);
        let chosen = interval.save_ended().unwrap();
        assert_eq!(chosen.save_seconds, 1.0);
        // No save is under way.
        assert_eq!(interval.save_ended(), None);
        // The next saves are cheaper, and the first one does not count any more.
        let chosen = after_a_save(&mut interval, 10).unwrap();
        assert_eq!(chosen.save_seconds, 0.2);
        // A save that is written for longer than the interval.
        interval.note_published(Duration::from_secs(5000));
        let chosen = after_a_save(&mut interval, 10).unwrap();
        assert_eq!(chosen.steps, 10_000);
        // Training waits for the last save until it is written.
        interval.end();
        interval.note_published(Duration::from_secs(50_000));
        assert_eq!((after_a_save(&mut interval, 10), interval.chosen()), (None, Some(chosen)));
    }

    #[test]
    fn long_rounds_are_saved_early_and_failed_saves_are_made_again_after_a_pause() {
        // A failure every 50 seconds: a tenth of that is less than ten rounds.
        let failures = Failures { count: 4, seconds: 200.0 };
        let mut interval = SaveInterval::new(failures, 1, 0, 0);
        interval.note_steps(1, 4.0);
        assert!(!interval.is_due_after(2, false, 4.9) && interval.is_due_after(2, false, 5.0));
        // It could not begin.
        interval.save_failed();
        (2..FIRST + 5).for_each(|step| {
            interval.note_steps(1, 4.0);
            assert!(!interval.is_due_after(step, false, 1e6), "{step}");
        });
        interval.save_begun(20);
        interval.save_failed();
        assert!(!interval.is_due_after(1000, false, 1e6));
        interval.save_begun(21);
        interval.note_pause(0.2);
        assert_eq!(interval.save_ended(), None);
        assert!(interval.is_due_after(22, false, 0.0));
        // Without failures, one a day is assumed.
        let calm = SaveInterval::new(Failures::default(), 1, 0, 0);
        assert!(!calm.is_due_after(1, false, 8639.0) && calm.is_due_after(1, false, 8640.0));
    }

    #[test]
    fn the_nearest_evaluated_step_is_saved() {
        let due = |eval_every: u64, steps: u64| {
            let mut interval = SaveInterval::new(Failures::default(), 1, eval_every, 0);
            interval.chosen = Some(CheckpointInterval { steps, ..CheckpointInterval::default() });
            let evaluates = |step: u64| eval_every > 0 && step.is_multiple_of(eval_every);
            let mut saved = Vec::new();
            for step in 1..=100 {
                if interval.is_due(step, evaluates(step)) {
                    interval.save_begun(step);
                    interval.saving = None;
                    saved.push(step);
                }
            }
            saved
        };
        assert_eq!(due(0, 40), [40, 80]);
        assert_eq!(due(25, 40), [50, 100]);
        assert_eq!(due(25, 60), [50, 100]);
        // Shorter than the period of evaluations: all evaluations that are not too near.
        assert_eq!(due(50, 20), [20, 40, 50, 70, 90, 100]);
    }
}
