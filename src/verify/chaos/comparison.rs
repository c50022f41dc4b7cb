//! Bitwise comparison of the disturbed run with the undisturbed one.

use serde::Serialize;

use crate::checkpoint::tools::diff::{Compared, diff};
use crate::error::Result;
use crate::run_dir::RunDirectory;
use crate::run_records::RunRecords;
use crate::telemetry::metrics::Step;

/// The number of differences that are described.
const DESCRIBED: usize = 5;

/// The result of a comparison.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ChaosComparison {
    /// The number of compared steps.
    pub steps: usize,
    /// The number of compared tensors, counting the parameters and each state buffer.
    pub tensors: usize,
    /// The number of their elements.
    pub elements: u64,
    /// The number of steps, tensors and counts that differ.
    pub differing: usize,
    /// Descriptions of the first differences.
    pub differences: Vec<String>,
}

impl ChaosComparison {
    /// Compares loss, gradient norm and learning rate of the steps until `last`, and the checkpoints
    /// of that step.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn new(run: &RunDirectory, reference: &RunDirectory, last: u64) -> Result<Self> {
        let [mine, others] = [run, reference].map(|run| RunRecords::open(run.path()));
        let mut found = Self::default();
        found.compare_steps(&mine?.steps, &others?.steps, last);
        let [mut mine, mut others] =
            [run.checkpoints().open(last)?, reference.checkpoints().open(last)?];
        let mut differences = Vec::new();
        let Compared { tensors, elements, .. } = diff(&mut mine, &mut others, false, &mut |one| {
            differences.push(format!("checkpoint of step {last}: {one}"));
        })?;
        differences.into_iter().for_each(|text| found.note(text));
        Ok(Self { tensors, elements, ..found })
    }

    fn note(&mut self, difference: String) {
        self.differing += 1;
        if self.differences.len() < DESCRIBED {
            self.differences.push(difference);
        }
    }

    /// Compares the records of steps, which are ascending.
    fn compare_steps(&mut self, mine: &[Step], others: &[Step], last: u64) {
        for number in 1..=last {
            let find = |steps: &[Step]| {
                let index = steps.binary_search_by_key(&number, |step| step.step).ok()?;
                Some(steps[index])
            };
            match (find(mine), find(others)) {
                (Some(mine), Some(other)) => {
                    self.steps += 1;
                    self.compare_step(&mine, &other);
                }
                (None, _) => self.note(format!("step {number} of the disturbed run has no record")),
                (_, None) => {
                    self.note(format!("step {number} of the undisturbed run has no record"));
                }
            }
        }
    }

    fn compare_step(&mut self, mine: &Step, other: &Step) {
        let step = mine.step;
        let numbers = [
            ("loss", mine.loss, other.loss),
            ("norm", mine.grad_norm, other.grad_norm),
            ("learning rate", mine.lr, other.lr),
        ];
        let differs = |(_, a, b): &(&str, f64, f64)| a.to_bits() != b.to_bits();
        if let Some((name, mine, other)) = numbers.into_iter().find(differs) {
            self.note(format!("step {step}: {name} {mine:e} with losses, {other:e} without"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> Step {
        Step { step, loss: 4.0 / step as f64, grad_norm: 1.0, ..Step::default() }
    }

    #[test]
    fn a_bit_of_a_step_is_found() {
        let mine: Vec<Step> = (1..=6).map(step).collect();
        let compared = |others: &[Step]| {
            let mut found = ChaosComparison::default();
            found.compare_steps(&mine, others, 5);
            found
        };
        // The undisturbed run may have taken more steps.
        let mut others: Vec<Step> = (1..=9).map(step).collect();
        let equal = compared(&others);
        assert_eq!((equal.steps, equal.differing), (5, 0));
        others[2].grad_norm = f64::from_bits(1f64.to_bits() + 1);
        others.remove(4);
        let found = compared(&others);
        assert_eq!((found.steps, found.differing), (4, 2));
        assert!(
            found.differences[0].starts_with("step 3: norm 1e0 with losses, 1.000"),
            "{found:?}"
        );
        assert_eq!(found.differences[1], "step 5 of the undisturbed run has no record");
    }
}
