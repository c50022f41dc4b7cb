//! Lengths and intervals in epochs: passes over the training data, or `run.steps_per_epoch` steps.

use std::ops::Range;

use toml::{Table, Value};

use super::{Config, Interval};
use hpctrain_base::error::{Error, Result};

/// Section, key (in steps, or of all ranks), and the key (in epochs, or of one rank) that may be
/// given instead. If one of them is 0 the other applies.
const KEYS: [(&str, &str, &str); 4] = [
    ("run", "steps", "epochs"),
    ("eval", "every", "every_epochs"),
    ("checkpoint", "every", "every_epochs"),
    ("batch", "global", "per_rank"),
];

/// Sets the partner of each key of a layer that is not 0 to 0, so that the layer overrides layers
/// below it that have the partner.
///
/// # Errors
/// Returns an error if the layer has both keys of a pair.
pub(super) fn replace_partners(layer: &mut Table) -> Result<()> {
    for (section, key, instead) in KEYS {
        let Some(Value::Table(table)) = layer.get_mut(section) else { continue };
        let is_given = |key: &str| table.get(key).is_some_and(|value| *value != Value::Integer(0));
        match (is_given(key), is_given(instead)) {
            (true, true) => return Err(both(section, key, instead)),
            (true, false) => table.insert(instead.into(), Value::Integer(0)),
            (false, true) => table.insert(key.into(), Value::Integer(0)),
            (false, false) => None,
        };
    }
    Ok(())
}

/// Checks that a configuration has one key of each pair, and that the epochs of the run were
/// converted to steps.
///
/// # Errors
/// Returns an error if both keys of a pair are given, or if `run.epochs` was not converted.
pub(super) fn check(config: &Config) -> Result<()> {
    let Config { run, eval, checkpoint, .. } = config;
    let given = [
        (run.steps, run.epochs),
        (eval.every, eval.every_epochs),
        (checkpoint.every.number().unwrap_or(1), checkpoint.every_epochs),
    ];
    for ((steps, epochs), (section, in_steps, in_epochs)) in given.into_iter().zip(KEYS) {
        if steps > 0 && epochs > 0 {
            return Err(both(section, in_steps, in_epochs));
        }
    }
    check_batch(config)?;
    if run.epochs > 0 {
        let message = format!(
            "run.epochs = {}, but the data was not read, so the steps of an epoch are not known",
            run.epochs
        );
        return Err(Error::input(message).hint("give run.steps: epochs · samples / batch.global"));
    }
    Ok(())
}

/// Checks that the batch of all ranks and that of one rank are not both given.
///
/// # Errors
/// Returns an error if they are.
pub(super) fn check_batch(config: &Config) -> Result<()> {
    match config.batch.global > 0 && config.batch.per_rank > 0 {
        true => Err(both("batch", "global", "per_rank")),
        false => Ok(()),
    }
}

fn both(section: &str, key: &str, instead: &str) -> Error {
    Error::input(format!("{section}.{key} and {section}.{instead} are both given"))
        .hint("give only one of them; 0 counts as not given")
}

impl Config {
    /// Converts the epochs of the run and of local SGD to steps, for training data with `samples`
    /// samples. The run ends with the step in which the last sample of its last epoch is seen.
    /// Intervals of evaluations and checkpoints stay in epochs, which need not be whole steps.
    /// With `run.steps_per_epoch` the number of samples has no effect.
    pub fn count_epochs(&mut self, samples: u64) {
        let (length, per_step) = match EpochLength::new(self, samples) {
            EpochLength::Samples(samples) => (samples, self.batch.global.max(1)),
            EpochLength::Steps(steps) => (steps, 1),
        };
        self.local_sgd.sync_every = self.local_sgd.sync_every.over(length, per_step);
        // If both are given, `check` refuses them later.
        if self.run.epochs > 0 && self.run.steps == 0 {
            let all = u128::from(self.run.epochs) * u128::from(length);
            self.run.steps = u64::try_from(all.div_ceil(u128::from(per_step))).unwrap_or(u64::MAX);
            self.run.epochs = 0;
        }
    }

    /// Replaces a length in epochs by one step, for work that does not depend on the length.
    #[must_use]
    pub fn with_any_length(mut self) -> Self {
        if self.run.epochs > 0 && self.run.steps == 0 {
            (self.run.steps, self.run.epochs) = (1, 0);
        }
        self
    }

    /// Returns true if the number of steps depends on the training data.
    pub fn is_in_epochs(&self) -> bool {
        let counts = self.run.epochs > 0 || self.local_sgd.sync_every == Interval::Epoch;
        counts && self.run.steps_per_epoch == 0
    }
}

/// The length of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EpochLength {
    /// One pass over this number of samples.
    Samples(u64),
    /// This number of steps: `run.steps_per_epoch`.
    Steps(u64),
}

impl EpochLength {
    /// Returns the length of the epochs of a run on `samples` training samples.
    pub fn new(config: &Config, samples: u64) -> Self {
        match config.run.steps_per_epoch {
            0 => Self::Samples(samples.max(1)),
            steps => Self::Steps(steps),
        }
    }

    /// Returns the number of steps of an epoch, rounded up, for steps of `batch` samples.
    pub fn steps(self, batch: u64) -> u64 {
        match self {
            Self::Samples(samples) => samples.div_ceil(batch.max(1)),
            Self::Steps(steps) => steps,
        }
    }

    /// Returns the number of epochs, with a fraction, that have passed with step `step`, at
    /// position `position` of the data.
    pub fn passed(self, step: u64, position: u64) -> f64 {
        match self {
            Self::Samples(samples) => position as f64 / samples as f64,
            Self::Steps(steps) => step as f64 / steps as f64,
        }
    }

    /// Returns the numbers, from 1, of the epochs that end within the last `taken` steps, of
    /// `batch` samples each, of which step `step` at position `position` of the data is the last.
    pub fn ended(self, step: u64, position: u64, taken: u64, batch: u64) -> Range<u64> {
        let (now, passed, length) = match self {
            Self::Samples(samples) => (position, taken * batch, samples),
            Self::Steps(steps) => (step, taken, steps),
        };
        now.saturating_sub(passed) / length + 1..now / length + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{OrAuto, Sources, load, overlay};

    fn loaded(overrides: &[&str]) -> Result<Config> {
        let overrides: Vec<String> = overrides.iter().map(|item| item.to_string()).collect();
        load(&Sources { overrides: &overrides, ..Sources::default() }).map(|(config, _)| config)
    }

    /// Returns the steps and the remaining epochs of a run on this many samples.
    fn counted(epochs: &str, batch: &str, samples: u64) -> (u64, u64) {
        let mut config = loaded(&[epochs, batch]).unwrap();
        assert_eq!(config.run.steps, 0);
        config.count_epochs(samples);
        (config.run.steps, config.run.epochs)
    }

    #[test]
    fn epochs_are_counted_in_steps() {
        assert_eq!(counted("run.epochs=1", "batch.global=16", 100), (7, 0));
        // Batches span the ends of epochs: 400 samples, not four times seven batches.
        assert_eq!(counted("run.epochs=4", "batch.global=16", 100), (25, 0));
        assert_eq!(
            counted("run.epochs=281474976710656", "batch.global=1", u64::MAX),
            (u64::MAX, 0)
        );
    }

    #[test]
    fn the_later_layer_counts_and_both_in_one_are_refused() {
        // The preset is in steps.
        let config = loaded(&["eval.every_epochs=2", "checkpoint.every_epochs=1"]).unwrap();
        assert_eq!(
            (config.eval.every, config.eval.every_epochs, config.checkpoint.every),
            (0, 2, OrAuto::Number(0))
        );
        assert!(config.run.steps > 0 && !config.is_in_epochs());
        let back = overlay(&config, &["eval.every=5".into()]).unwrap();
        assert_eq!(
            (back.eval.every, back.eval.every_epochs, back.checkpoint.every_epochs),
            (5, 0, 1)
        );
        let error = loaded(&["run.epochs=2", "run.steps=5"]).unwrap_err().to_string();
        assert_eq!(
            error,
            "run.steps and run.epochs are both given\nhint: give only one of them; 0 counts as not given"
        );
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.toml");
        std::fs::write(&path, "[eval]\nevery = 3\nevery_epochs = 1\n").unwrap();
        let error =
            load(&Sources { file: Some(&path), ..Sources::default() }).unwrap_err().to_string();
        assert!(
            error.contains("x.toml: eval.every and eval.every_epochs are both given"),
            "{error}"
        );
        // Keys that a run has written are read back.
        let mut config = loaded(&["run.epochs=2", "eval.every_epochs=1"]).unwrap();
        config.count_epochs(64);
        std::fs::write(&path, toml::to_string(&config).unwrap()).unwrap();
        let (again, _) = load(&Sources { file: Some(&path), ..Sources::default() }).unwrap();
        assert_eq!((again.run.steps, again.run.epochs, again.eval.every_epochs), (8, 0, 1));
    }

    #[test]
    fn epochs_end_where_their_last_sample_is() {
        // Steps of 16 samples over 40: the epochs end in steps 3, 5 and 8.
        let epoch = EpochLength::Samples(40);
        let found: Vec<(u64, u64)> = (1..=8)
            .flat_map(|step| epoch.ended(step, 16 * step, 1, 16).map(move |n| (step, n)))
            .collect();
        assert_eq!(found, [(3, 1), (5, 2), (8, 3)]);
        assert_eq!(epoch.ended(1, 120, 1, 120).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(epoch.ended(0, 0, 0, 16).is_empty());
        assert_eq!((epoch.passed(5, 80), epoch.steps(16)), (2.0, 3));
    }

    #[test]
    fn steps_per_epoch_replace_the_samples() {
        let keys = ["run.epochs=3", "run.steps_per_epoch=5", "local_sgd.sync_every='epoch'"];
        let mut config = loaded(&keys).unwrap();
        assert!(!config.is_in_epochs());
        config.count_epochs(1);
        assert_eq!((config.run.steps, config.run.epochs), (15, 0));
        assert_eq!(config.local_sgd.sync_every, Interval::Steps(5));
        let epoch = EpochLength::new(&config, 40);
        assert_eq!(epoch, EpochLength::Steps(5));
        // The position does not matter, only the step.
        let ended = |step| epoch.ended(step, 1000 * step, 1, 1000).collect::<Vec<_>>();
        assert_eq!((ended(4), ended(5), ended(6), ended(10)), (vec![], vec![1], vec![], vec![2]));
        assert_eq!(epoch.ended(10, 0, 7, 16).collect::<Vec<_>>(), [1, 2]);
        assert_eq!((epoch.passed(7, 0), epoch.steps(16)), (1.4, 5));
    }

    #[test]
    fn samples_of_a_rank_replace_those_of_all() {
        let config = loaded(&["batch.per_rank=3"]).unwrap();
        assert_eq!((config.batch.global, config.batch.per_rank), (0, 3));
        let back = overlay(&config, &["batch.global=8".into()]).unwrap();
        assert_eq!((back.batch.global, back.batch.per_rank), (8, 0));
        let error = loaded(&["batch.global=8", "batch.per_rank=2"]).unwrap_err().to_string();
        assert!(
            error.starts_with("batch.global and batch.per_rank are both given\nhint: "),
            "{error}"
        );
    }
}
