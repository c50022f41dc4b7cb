//! The split of one data set into training and validation samples, if it has no validation shards.
//!
//! The split is determined by the samples' numbers and the fraction alone: not by a seed, the
//! number of ranks, or the content of the samples. For text, the last windows are kept for
//! validation; for rows, one of every 1 / fraction consecutive ones, at an index that a hash of
//! their number gives, so that data in a repeating order is not cut along its period.

use super::spec::Split;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::random::{derive, name};

/// Fractions are counted in parts of this number.
const WHOLE: u64 = 1_000_000;

/// The numbering of the samples of a data set within a split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TrainValSplit {
    /// The number of samples that are stored.
    samples: u64,
    selection: Selection,
}

/// Which samples belong to a split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Selection {
    All,
    /// The first samples, or the last ones.
    Ends {
        validation: u64,
        split: Split,
    },
    /// One sample of every group of consecutive samples, or all others.
    Scattered {
        parts: u64,
        split: Split,
    },
}

/// Returns the fraction of samples kept for validation, in millionths.
pub(super) fn millionths(fraction: f64) -> u64 {
    (fraction * WHOLE as f64).round() as u64
}

impl TrainValSplit {
    /// Creates a split that has all samples.
    pub(super) fn all(samples: u64) -> Self {
        Self { samples, selection: Selection::All }
    }

    /// Creates the split `split` of `samples` samples of `path`, of which `fraction` are kept for
    /// validation: the last ones for text, evenly spread ones for rows.
    ///
    /// # Errors
    /// Returns an error if one of the splits would have no samples.
    pub(super) fn new(
        samples: u64,
        fraction: f64,
        is_text: bool,
        split: Split,
        path: &str,
    ) -> Result<Self> {
        let parts = millionths(fraction);
        let validation = (u128::from(samples) * u128::from(parts) / u128::from(WHOLE)) as u64;
        if validation == 0 || validation >= samples {
            let message = format!(
                "data.val_fraction = {fraction} of {samples} samples in {path} keeps {validation}"
            );
            return Err(Error::input(format!("{message} for validation"))
                .hint("give a fraction that leaves at least one sample for training and one for validation"));
        }
        let selection = if is_text {
            Selection::Ends { validation, split }
        } else {
            Selection::Scattered { parts, split }
        };
        Ok(Self { samples, selection })
    }

    /// Returns the number of stored samples.
    pub(super) fn stored(&self) -> u64 {
        self.samples
    }

    /// Returns the number of samples of the split.
    pub(super) fn count(&self) -> u64 {
        let of = |validation: u64, split| {
            if split == Split::Validation { validation } else { self.samples - validation }
        };
        match self.selection {
            Selection::All => self.samples,
            Selection::Ends { validation, split } => of(validation, split),
            Selection::Scattered { parts, split } => of(self.groups(parts), split),
        }
    }

    /// Returns the stored index of sample `number` of the split, and the number of consecutive
    /// stored samples of the split from there on.
    pub(super) fn run(&self, number: u64) -> (u64, u64) {
        match self.selection {
            Selection::All => (number, self.samples - number),
            Selection::Ends { validation, split: Split::Train } => {
                (number, self.samples - validation - number)
            }
            Selection::Ends { validation, split: Split::Validation } => {
                (self.samples - validation + number, validation - number)
            }
            Selection::Scattered { parts, split: Split::Validation } => (kept(number, parts), 1),
            Selection::Scattered { parts, split: Split::Train } => {
                let groups = self.groups(parts);
                // The last group before which no more than `number` samples are for training.
                let mut group = 0;
                let mut beyond = groups + 1;
                while beyond - group > 1 {
                    let middle = group + (beyond - group) / 2;
                    if start(middle, parts) - middle <= number {
                        group = middle
                    } else {
                        beyond = middle
                    }
                }
                let mut sample = number + group;
                if group < groups && sample >= kept(group, parts) {
                    sample += 1;
                    group += 1;
                }
                let end = if group < groups { kept(group, parts) } else { self.samples };
                (sample, end - sample)
            }
        }
    }

    /// Returns the number of groups that have a validation sample; samples after the last group are
    /// for training.
    fn groups(&self, parts: u64) -> u64 {
        (u128::from(self.samples) * u128::from(parts) / u128::from(WHOLE)) as u64
    }
}

/// Returns the first sample of a group.
fn start(group: u64, parts: u64) -> u64 {
    (u128::from(group) * u128::from(WHOLE)).div_ceil(u128::from(parts)) as u64
}

/// Returns the sample of a group that is kept for validation.
fn kept(group: u64, parts: u64) -> u64 {
    let first = start(group, parts);
    let end = start(group + 1, parts);
    let random = derive(0, &[name("validation"), group]);
    first + ((u128::from(random) * u128::from(end - first)) >> u64::BITS) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the stored samples of a split, by its numbers and by its runs.
    fn stored(samples: u64, fraction: f64, is_text: bool, split: Split) -> Vec<u64> {
        let division = TrainValSplit::new(samples, fraction, is_text, split, "x").unwrap();
        let one_by_one: Vec<u64> =
            (0..division.count()).map(|number| division.run(number).0).collect();
        let mut by_runs = Vec::new();
        while (by_runs.len() as u64) < division.count() {
            let (first, length) = division.run(by_runs.len() as u64);
            assert!(length > 0);
            by_runs.extend(first..first + length);
        }
        assert_eq!(by_runs, one_by_one, "{samples} {fraction}");
        one_by_one
    }

    #[test]
    fn every_sample_is_in_one_split() {
        for (samples, fraction) in [
            (10, 0.1),
            (11, 0.1),
            (1003, 0.1),
            (997, 0.3),
            (64, 0.5),
            (50, 0.75),
            (20, 0.95),
            (333, 0.333333),
        ] {
            for is_text in [false, true] {
                let [train, validation] = [Split::Train, Split::Validation]
                    .map(|split| stored(samples, fraction, is_text, split));
                assert!(train.is_sorted() && validation.is_sorted());
                assert_eq!(
                    validation.len() as u64,
                    (samples as f64 * fraction + 1e-6) as u64,
                    "{samples} {fraction}"
                );
                let mut both = [train, validation.clone()].concat();
                both.sort_unstable();
                assert!(both.into_iter().eq(0..samples), "{samples} {fraction} {is_text}");
                if is_text {
                    assert!(
                        validation
                            .into_iter()
                            .eq(samples - (samples as f64 * fraction + 1e-6) as u64..samples)
                    );
                }
            }
        }
    }

    #[test]
    fn rows_for_validation_are_everywhere_and_have_no_period() {
        let validation = stored(10_000, 0.1, false, Split::Validation);
        assert!(validation.iter().zip(0..).all(|(row, group)| row / 10 == group));
        // Data whose classes repeat in tens: each has its part.
        let mut classes = [0; 10];
        validation.iter().for_each(|row| classes[(row % 10) as usize] += 1);
        assert!(classes.iter().all(|count| (60..150).contains(count)), "{classes:?}");
        // A resumed run must see the same samples, also after an update of the program.
        assert_eq!(stored(40, 0.1, false, Split::Validation), [8, 16, 20, 33]);
    }

    #[test]
    fn both_must_have_samples() {
        for (samples, fraction) in [(9, 0.1), (10, 1e-7), (1, 0.5)] {
            let e = TrainValSplit::new(samples, fraction, false, Split::Train, "a.h5")
                .unwrap_err()
                .to_string();
            assert!(
                e.contains(&format!(
                    "data.val_fraction = {fraction} of {samples} samples in a.h5 keeps 0"
                )),
                "{e}"
            );
        }
    }
}
