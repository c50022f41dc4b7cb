//! Learning-rate schedules, as pure functions of the step.

use serde::{Deserialize, Serialize};

/// The decay of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LrDecay {
    /// No decay.
    Constant,
    /// A linear decay to the minimum.
    Linear,
    /// A cosine decay to the minimum (Loshchilov and Hutter, "SGDR", 2017, without restarts).
    Cosine,
    /// Warm-up, stable, decay: constant, then a linear decay over the last steps (Hu et al.,
    /// "MiniCPM", 2024).
    Wsd,
}

/// A learning-rate schedule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The decay after the warm-up.
    pub shape: LrDecay,
    /// The highest learning rate, already scaled for the batch.
    pub peak: f64,
    /// The learning rate at the end.
    pub min: f64,
    /// The number of steps of the linear warm-up.
    pub warmup: u64,
    /// The number of steps of the run.
    pub total: u64,
    /// The number of steps of the final decay of [`LrDecay::Wsd`].
    pub decay: u64,
}

impl Schedule {
    /// Returns the learning rate of step `step`, counted from 0. A decay reaches the minimum at the
    /// last step of the run, unless that step belongs to the warm-up.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let start = match self.shape {
            LrDecay::Constant => return self.peak,
            LrDecay::Linear | LrDecay::Cosine => self.warmup,
            LrDecay::Wsd => self.total.saturating_sub(self.decay).max(self.warmup),
        };
        let last = self.total.saturating_sub(1);
        // The last step has the minimum, even if it is the only one.
        let progress = match step < last {
            true => step.saturating_sub(start) as f64 / last.saturating_sub(start).max(1) as f64,
            false => 1.0,
        };
        let left = match self.shape {
            LrDecay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            _ => 1.0 - progress,
        };
        self.min + (self.peak - self.min) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(shape: LrDecay) -> Schedule {
        Schedule { shape, peak: 1.0, min: 0.1, warmup: 10, total: 111, decay: 21 }
    }

    #[test]
    fn all_shapes_have_the_same_warm_up() {
        for shape in [LrDecay::Constant, LrDecay::Linear, LrDecay::Cosine, LrDecay::Wsd] {
            let s = schedule(shape);
            assert_eq!((s.rate(0), s.rate(4), s.rate(9), s.rate(10)), (0.1, 0.5, 1.0, 1.0));
        }
    }

    #[test]
    fn each_falls_its_own_way() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} is not {b}");
        assert_eq!(schedule(LrDecay::Constant).rate(110), 1.0);
        close(schedule(LrDecay::Linear).rate(60), 0.55);
        close(schedule(LrDecay::Cosine).rate(60), 0.55);
        close(schedule(LrDecay::Cosine).rate(35), 0.1 + 0.45 * (1.0 + 0.5f64.sqrt()));
        close(schedule(LrDecay::Wsd).rate(89), 1.0);
        close(schedule(LrDecay::Wsd).rate(90), 1.0);
        close(schedule(LrDecay::Wsd).rate(100), 0.55);
        for shape in [LrDecay::Linear, LrDecay::Cosine, LrDecay::Wsd] {
            assert!(schedule(shape).rate(109) > 0.1);
            close(schedule(shape).rate(10_000), 0.1);
        }
    }

    /// Runs may have any number of steps: the last has exactly the minimum.
    #[test]
    fn the_last_step_has_the_minimum() {
        for shape in [LrDecay::Linear, LrDecay::Cosine, LrDecay::Wsd] {
            for total in (11..400).chain([1 << 20, (1 << 40) + 7]) {
                let s =
                    Schedule { total, decay: total / 10, min: 0.1, peak: 0.3, ..schedule(shape) };
                assert_eq!(s.rate(total - 1), s.min, "{shape:?} over {total} steps");
                let falls = (11..total.min(500)).all(|step| s.rate(step) <= s.rate(step - 1));
                assert!(falls, "{shape:?} over {total} steps");
            }
        }
    }

    #[test]
    fn no_warmup_and_no_steps_are_fine() {
        let s = Schedule { warmup: 0, total: 0, decay: 0, ..schedule(LrDecay::Cosine) };
        assert!(s.rate(0).is_finite());
    }
}
