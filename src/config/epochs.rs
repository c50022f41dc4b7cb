//! Lengths and intervals in epochs: passes over the training data.

use toml::{Table, Value};

use super::{Config, Interval};
use hpctrain_base::error::{Error, Result};

/// Section, key in steps, and the key in epochs that may be given instead. If one of them is 0 the
/// other applies.
const KEYS: [(&str, &str, &str); 3] = [
    ("run", "steps", "epochs"),
    ("eval", "every", "every_epochs"),
    ("checkpoint", "every", "every_epochs"),
];

/// Sets the partner of each key of a layer that is not 0 to 0, so that the layer overrides layers
/// below it that have the partner.
///
/// # Errors
/// Returns an error if the layer has both keys of a pair.
pub(super) fn replace_partners(layer: &mut Table) -> Result<()> {
    for (section, steps, epochs) in KEYS {
        let Some(Value::Table(table)) = layer.get_mut(section) else { continue };
        let is_given = |key: &str| table.get(key).is_some_and(|value| *value != Value::Integer(0));
        match (is_given(steps), is_given(epochs)) {
            (true, true) => return Err(both(section, steps, epochs)),
            (true, false) => table.insert(epochs.into(), Value::Integer(0)),
            (false, true) => table.insert(steps.into(), Value::Integer(0)),
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
        (checkpoint.every, checkpoint.every_epochs),
    ];
    for ((steps, epochs), (section, in_steps, in_epochs)) in given.into_iter().zip(KEYS) {
        if steps > 0 && epochs > 0 {
            return Err(both(section, in_steps, in_epochs));
        }
    }
    if run.epochs > 0 {
        let message = format!(
            "run.epochs = {}, but the data was not read, so the steps of an epoch are not known",
            run.epochs
        );
        return Err(Error::input(message).hint("give run.steps: epochs · samples / batch.global"));
    }
    Ok(())
}

fn both(section: &str, steps: &str, epochs: &str) -> Error {
    Error::input(format!("{section}.{steps} and {section}.{epochs} are both given"))
        .hint("give only one of them; 0 counts as not given")
}

impl Config {
    /// Converts the epochs of the run and of local SGD to steps, for training data with `samples`
    /// samples. The run ends with the step in which the last sample of its last epoch is seen.
    /// Intervals of evaluations and checkpoints stay in epochs, which need not be whole steps.
    pub fn count_epochs(&mut self, samples: u64) {
        let batch = self.batch.global.max(1);
        self.local_sgd.sync_every = self.local_sgd.sync_every.over(samples, batch);
        // If both are given, `check` refuses them later.
        if self.run.epochs > 0 && self.run.steps == 0 {
            let seen = u128::from(self.run.epochs) * u128::from(samples);
            self.run.steps = u64::try_from(seen.div_ceil(u128::from(batch))).unwrap_or(u64::MAX);
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
        self.run.epochs > 0 || self.local_sgd.sync_every == Interval::Epoch
    }
}

/// Returns the numbers, from 1, of the epochs of `samples` samples that end within the `taken`
/// samples before `position`.
pub fn epochs_ended(position: u64, taken: u64, samples: u64) -> std::ops::Range<u64> {
    let samples = samples.max(1);
    position.saturating_sub(taken) / samples + 1..position / samples + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sources, load, overlay};

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
            (0, 2, 0)
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
        let found: Vec<(u64, u64)> = (1..=8)
            .flat_map(|step| epochs_ended(16 * step, 16, 40).map(move |n| (step, n)))
            .collect();
        assert_eq!(found, [(3, 1), (5, 2), (8, 3)]);
        assert_eq!(epochs_ended(120, 120, 40).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(epochs_ended(0, 0, 40).is_empty());
    }
}
