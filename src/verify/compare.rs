//! Comparison of two recordings: bitwise, or within bounds if additions have another order.
//!
//! Bits are compared if sums have the same tree: each rank and each replica has a power of two of
//! the fixed virtual ranks. Other layouts are compared within bounds in their first six steps;
//! later, training itself has amplified rounding differences.

use std::fmt;

use super::run_layout::Recording;
use super::snapshot::TensorDifference;
use super::tensor_entry::TensorRecord;
use crate::backend::Elementwise;
use crate::optim::UpdateRule;

/// The parts of a layout's results that agree with one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreement {
    /// The loss and gradient norm of every step.
    pub curve: bool,
    /// The parameters.
    pub parameters: bool,
    /// The optimizer state.
    pub state: bool,
}

impl Agreement {
    /// Returns true if all parts agree.
    pub fn all(&self) -> bool {
        self.curve && self.parameters && self.state
    }
}

/// Compares two recordings bitwise in every step.
pub fn compare_exactly(reference: &Recording, row: &Recording) -> Agreement {
    let mut agreement = Agreement { curve: true, parameters: true, state: true };
    for (mine, theirs) in row.steps.iter().zip(&reference.steps) {
        agreement.curve &= (mine.loss, mine.norm) == (theirs.loss, theirs.norm);
        for (entry, (mine, theirs)) in
            row.entries.iter().zip(mine.digests.iter().zip(&theirs.digests))
        {
            let part =
                if entry.is_parameter() { &mut agreement.parameters } else { &mut agreement.state };
            *part &= mine == theirs;
        }
    }
    agreement
}

/// Returns the first step that differs, counted from 1.
pub fn first_differing_step(reference: &Recording, row: &Recording) -> Option<u64> {
    let steps = row.steps.iter().zip(&reference.steps);
    steps.zip(1..).find_map(|((mine, theirs), step)| (mine != theirs).then_some(step))
}

/// Describes the first difference of two recordings of the same steps, the last of which is the
/// first that differs; `row` was compared with the elements of `reference`.
pub fn describe(reference: &Recording, row: &Recording) -> String {
    let mut facts = Vec::new();
    if let (Some(mine), Some(theirs)) = (row.steps.last(), reference.steps.last()) {
        for (name, mine, theirs) in
            [("loss", mine.loss, theirs.loss), ("norm", mine.norm, theirs.norm)]
        {
            if mine != theirs {
                facts.push(values(name, f64::from_bits(mine), f64::from_bits(theirs)));
            }
        }
    }
    let entries = row.entries.iter().zip(&row.differences);
    let mut differing =
        entries.filter_map(|(entry, difference)| Some((entry, difference, difference.first?)));
    if let Some((entry, difference, first)) = differing.next() {
        let here = f32::from_bits(first.here);
        let there = f32::from_bits(first.reference);
        facts.push(format!(
            "unit {}, {}, {} ({} of its elements and {} more tensors differ)",
            entry.unit,
            name(entry),
            values(&format!("element {} of {}", first.index, entry.len), here, there),
            difference.elements,
            differing.count(),
        ));
    }
    let step = row.steps.len();
    if facts.is_empty() {
        return format!(
            "step {step} differed, but not when it was run again: it is not reproducible"
        );
    }
    format!("first difference at step {step}: {}", facts.join("; "))
}

/// Returns the name of a tensor, or of one of its state buffers.
fn name(entry: &TensorRecord) -> String {
    match entry.state.as_str() {
        "" => format!("tensor {}", entry.tensor),
        state => format!("tensor {} of the optimizer's {state}", entry.tensor),
    }
}

fn values<T: fmt::Debug + PartialEq>(what: &str, here: T, there: T) -> String {
    format!("{what} is {here:?} here, {there:?} on one rank")
}

/// Bounds of the differences between two orders of addition in the first [`CLOSE_STEPS`] steps.
///
/// Two orders of adding n numbers in single precision differ by less than about n·2⁻²⁴ of the sum
/// of their magnitudes: some 1e-6 of a gradient. Adam divides by the gradient's own size, so an
/// element whose gradient is nearly zero may move in the opposite direction at the full rate in
/// every step; such elements hardly affect the loss. A lost or doubled contribution of a rank
/// changes loss, norm and state by more than 1e-2 in the first step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// The relative bound of the loss.
    pub loss: f64,
    /// The relative bound of the gradient norm.
    pub norm: f64,
    /// The absolute bound of each parameter.
    pub parameter: f64,
    /// The relative bound of the 2-norm of each state buffer.
    pub state: f64,
}

/// The number of steps in which layouts with another order of addition are compared: later,
/// training has amplified rounding differences until they are indistinguishable from errors.
pub const CLOSE_STEPS: u64 = 6;

/// The bound of the loss.
const LOSS: f64 = 1e-5;
/// The bound of gradient norm and optimizer state.
const NORM: f64 = 1e-3;

impl Bounds {
    /// Creates the bounds for comparisons with `reference`, with a gradient clipped at `clip` (0:
    /// not clipped).
    pub fn new(rule: UpdateRule, clip: f64, reference: &Recording) -> Self {
        let taken = reference
            .steps
            .iter()
            .take(CLOSE_STEPS as usize)
            .map(|step| (f64::from_bits(step.lr), f64::from_bits(step.norm)));
        let parameter = match rule {
            UpdateRule::AdamW { beta1, beta2, .. }
            | UpdateRule::Elementwise(Elementwise::Adam { beta1, beta2, .. }) => {
                // The largest quotient of the moments: one gradient after many that were zero.
                let most = (1.0 - f64::from(beta1)) / (1.0 - f64::from(beta2)).sqrt();
                2.0 * most.max(1.0) * taken.map(|(lr, _)| lr).sum::<f64>()
            }
            // The update of an element is at most of the size of the matrix's elements, which are
            // far below ten.
            UpdateRule::Lamb { .. } => 20.0 * taken.map(|(lr, _)| lr).sum::<f64>(),
            UpdateRule::Lars { momentum, trust_ratio: trust, .. } => {
                20.0 * f64::from(trust) / (1.0 - f64::from(momentum))
                    * taken.map(|(lr, _)| lr).sum::<f64>()
            }
            UpdateRule::Sgd { momentum, .. } => {
                let limit = if clip > 0.0 { clip } else { f64::INFINITY };
                let distance: f64 =
                    taken.filter(|(lr, _)| *lr > 0.0).map(|(lr, norm)| lr * norm.min(limit)).sum();
                NORM * distance / (1.0 - f64::from(momentum))
            }
            // If a gradient is only rounding error, its quotient with itself may have any value up
            // to these.
            UpdateRule::Elementwise(Elementwise::Adagrad { .. } | Elementwise::Lion { .. }) => {
                2.0 * taken.map(|(lr, _)| lr).sum::<f64>()
            }
            UpdateRule::Elementwise(Elementwise::RmsProp { alpha, momentum, .. }) => {
                let most = 1.0 / (1.0 - f64::from(alpha)).sqrt() / (1.0 - f64::from(momentum));
                2.0 * most * taken.map(|(lr, _)| lr).sum::<f64>()
            }
        };
        Self { loss: LOSS, norm: NORM, parameter, state: NORM }
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "loss within {:.0e}, norm and optimizer state (2-norm) within {:.0e} of one rank's, every parameter \
             within {:.1e}",
            self.loss, self.norm, self.parameter
        )
    }
}

/// Compares losses and norms of every step, and tensors after the last step, within bounds. Also
/// returns a description of the differences beyond the bounds.
pub fn compare_within_bounds(
    bounds: &Bounds,
    reference: &Recording,
    row: &Recording,
) -> (Agreement, Option<String>) {
    let mut agreement = Agreement { curve: true, parameters: true, state: true };
    let mut facts = Vec::new();
    for ((mine, theirs), step) in row.steps.iter().zip(&reference.steps).zip(1..) {
        for (name, mine, theirs, bound) in [
            ("loss", mine.loss, theirs.loss, bounds.loss),
            ("norm", mine.norm, theirs.norm, bounds.norm),
        ] {
            let mine = f64::from_bits(mine);
            let theirs = f64::from_bits(theirs);
            let off = (mine - theirs).abs() / theirs.abs();
            // Two values that are not finite have no distance.
            if !(off <= bound || mine.to_bits() == theirs.to_bits()) && agreement.curve {
                agreement.curve = false;
                facts.push(format!(
                    "at step {step}, {}: off by {off:.1e}",
                    values(name, mine, theirs)
                ));
            }
        }
    }
    let entries = || row.entries.iter().zip(&row.differences);
    let last = row.steps.len();
    let parameters = entries().filter(|(entry, _)| entry.is_parameter());
    for (entry, worst) in
        parameters.filter_map(|(entry, difference)| Some((entry, difference.worst?)))
    {
        if worst.distance() > bounds.parameter && agreement.parameters {
            agreement.parameters = false;
            let here = f32::from_bits(worst.here);
            let there = f32::from_bits(worst.reference);
            let element = values(&format!("element {} of {}", worst.index, entry.len), here, there);
            facts.push(format!(
                "after step {last}, unit {}, {}, {element}",
                entry.unit,
                name(entry)
            ));
        }
    }
    let mut states: Vec<&str> = row.entries.iter().map(|entry| entry.state.as_str()).collect();
    states.sort_unstable();
    states.dedup();
    for state in states.into_iter().filter(|state| !state.is_empty()) {
        let of_state = entries().filter(|(entry, _)| entry.state == state);
        let off = distance(of_state.map(|(_, difference)| difference));
        if off > bounds.state {
            agreement.state = false;
            facts.push(format!("after step {last}, the optimizer's {state} is off by {off:.1e}"));
        }
    }
    (agreement, (!facts.is_empty()).then(|| facts.join("; ")))
}

/// Returns the relative 2-norm of the difference of several tensors.
fn distance<'a>(differences: impl Iterator<Item = &'a TensorDifference>) -> f64 {
    let mut squares = 0.0;
    let mut reference = 0.0;
    for difference in differences {
        squares += difference.squares;
        reference += difference.reference_squares;
    }
    if squares == 0.0 { 0.0 } else { (squares / reference).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::run_layout::StepRecord;

    const RULE: UpdateRule = UpdateRule::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8 };

    /// Returns the record of a tensor, or of a state buffer of it.
    fn entry(tensor: &str, state: &str) -> TensorRecord {
        TensorRecord { unit: "h.0".into(), tensor: tensor.into(), state: state.into(), len: 100 }
    }

    /// Returns the record of the step with this index.
    fn step(i: u64) -> StepRecord {
        StepRecord {
            loss: (4.0 - i as f64).to_bits(),
            norm: 1f64.to_bits(),
            lr: 1e-3f64.to_bits(),
            digests: vec![i; 4],
        }
    }

    /// Creates three steps of two tensors with their moments.
    fn recording() -> Recording {
        let entries = vec![entry("w", ""), entry("w", "m"), entry("b", ""), entry("b", "m")];
        let mut differences = vec![TensorDifference::default(); 4];
        differences.iter_mut().for_each(|difference| difference.add(0, &[1.0; 100], &[1.0; 100]));
        Recording { entries, steps: (0..3).map(step).collect(), differences }
    }

    /// Creates a recording that differs in one element of one entry from a step on.
    fn other(entry: usize, from: usize, value: f32) -> Recording {
        let mut other = recording();
        other.steps[from..].iter_mut().for_each(|step| step.digests[entry] += 1);
        other.differences[entry] = TensorDifference::default();
        let mut here = [1.0; 100];
        here[37] = value;
        other.differences[entry].add(0, &here, &[1.0; 100]);
        other
    }

    #[test]
    fn one_element_is_named() {
        let mut reference = recording();
        let mut row = other(2, 1, 1.5);
        assert_eq!(
            compare_exactly(&reference, &row),
            Agreement { curve: true, parameters: false, state: true }
        );
        assert_eq!(first_differing_step(&reference, &row), Some(2));
        reference.steps.truncate(2);
        row.steps.truncate(2);
        assert_eq!(
            describe(&reference, &row),
            "first difference at step 2: unit h.0, tensor b, element 37 of 100 is 1.5 here, 1.0 on one rank (1 of \
             its elements and 0 more tensors differ)"
        );
        let reference = recording();
        let row = other(1, 0, 1.5);
        assert!(!compare_exactly(&reference, &row).state);
        assert!(describe(&reference, &row).contains("tensor w of the optimizer's m, element 37"));
    }

    #[test]
    fn equal_recordings_agree() {
        let reference = recording();
        let row = recording();
        assert!(compare_exactly(&reference, &row).all());
        assert_eq!(first_differing_step(&reference, &row), None);
        assert!(describe(&reference, &row).contains("not reproducible"));
        assert_eq!(
            compare_within_bounds(&Bounds::new(RULE, 1.0, &reference), &reference, &row).1,
            None
        );
    }

    #[test]
    fn a_curve_alone_can_differ() {
        let reference = recording();
        let mut row = recording();
        row.steps[2].norm = 2f64.to_bits();
        assert_eq!(
            compare_exactly(&reference, &row),
            Agreement { curve: false, parameters: true, state: true }
        );
        assert!(
            describe(&reference, &row).ends_with("at step 3: norm is 2.0 here, 1.0 on one rank")
        );
        let (agreement, text) =
            compare_within_bounds(&Bounds::new(RULE, 1.0, &reference), &reference, &row);
        assert!(!agreement.curve && text.unwrap().contains("at step 3, norm is 2.0"));
    }

    #[test]
    fn closeness_follows_the_rate() {
        let reference = recording();
        let bounds = Bounds::new(RULE, 1.0, &reference);
        assert!((bounds.parameter - 6e-3).abs() < 1e-8, "{bounds:?}");
        assert!(compare_within_bounds(&bounds, &reference, &other(0, 2, 1.005)).0.all());
        let (agreement, text) = compare_within_bounds(&bounds, &reference, &other(0, 2, 1.007));
        assert!(
            !agreement.parameters
                && text.unwrap().contains("after step 3, unit h.0, tensor w, element 37")
        );
        let (agreement, text) = compare_within_bounds(&bounds, &reference, &other(3, 2, 1.1));
        assert!(!agreement.state && text.unwrap().contains("the optimizer's m is off by 7.1e-3"));
        let sgd = Bounds::new(UpdateRule::Sgd { momentum: 0.5, nesterov: false }, 0.5, &reference);
        assert!((sgd.parameter - 1e-3 * 3.0 * 1e-3 * 0.5 / 0.5).abs() < 1e-12, "{sgd:?}");
    }
}
