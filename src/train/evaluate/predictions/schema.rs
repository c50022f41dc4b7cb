//! The meaning of a network's outputs: classes, probabilities or numbers, with their names.

use crate::evaluate::classification_counts::likeliest;
use hpctrain_config::{LossKind, ResolvedConfig};
use hpctrain_data::Preprocessing;

/// The meaning of a row of outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputSchema {
    /// A logit for each class.
    Classes {
        /// The names of the classes, or else their numbers.
        names: Vec<String>,
        /// Whether the names come from the data.
        are_given: bool,
    },
    /// One logit, that of class 1 of two classes.
    Logit {
        /// The names of the classes, or else their numbers.
        names: [String; 2],
        /// Whether the names come from the data.
        are_given: bool,
    },
    /// A logit for each of several labels, any number of which may apply (multi-label
    /// classification).
    MultiLabel(Vec<String>),
    /// Numbers, for regression.
    Numbers(Vec<String>),
}

/// A row of outputs, decoded.
pub(super) struct DecodedRow {
    /// The likeliest class.
    pub class: Option<usize>,
    /// Probabilities of classes or labels, else the outputs.
    pub numbers: Vec<f32>,
}

impl OutputSchema {
    /// Returns the schema of the network of a plan, trained with this preprocessing, by its loss.
    pub fn for_plan(plan: &ResolvedConfig, known: Option<&Preprocessing>) -> Self {
        let width = plan.network.outputs();
        let classes = known.map_or(&[][..], |known| &known.classes);
        let columns = known.and_then(|known| known.columns.as_ref());
        let targets = columns.map_or(&[][..], |columns| &columns.targets);
        let numbered =
            |count: usize| (0..count).map(|number| number.to_string()).collect::<Vec<_>>();
        let named = || match (targets.len() == width, width) {
            (true, _) => targets.to_vec(),
            (false, 1) => vec!["output".to_owned()],
            (false, _) => (0..width).map(|number| format!("output_{number}")).collect(),
        };
        match (plan.config.loss.kind, width) {
            (LossKind::CrossEntropy, _) => {
                let are_given = classes.len() == width;
                Self::Classes {
                    names: if are_given { classes.to_vec() } else { numbered(width) },
                    are_given,
                }
            }
            (LossKind::BinaryCrossEntropy, 1) => match classes {
                [no, yes] => Self::Logit { names: [no.clone(), yes.clone()], are_given: true },
                _ => Self::Logit { names: ["0", "1"].map(str::to_owned), are_given: false },
            },
            (LossKind::BinaryCrossEntropy, _) => Self::MultiLabel(named()),
            (LossKind::Mse | LossKind::Mae | LossKind::Huber | LossKind::Contrastive, _) => {
                Self::Numbers(named())
            }
        }
    }

    /// Returns the number of outputs in a row.
    pub(super) fn width(&self) -> usize {
        match self {
            Self::Classes { names, .. } | Self::MultiLabel(names) | Self::Numbers(names) => {
                names.len()
            }
            Self::Logit { .. } => 1,
        }
    }

    /// Returns the names of the numbers of a row, which are also the names of classes.
    pub(super) fn names(&self) -> &[String] {
        match self {
            Self::Classes { names, .. } | Self::MultiLabel(names) | Self::Numbers(names) => names,
            Self::Logit { names, .. } => names,
        }
    }

    /// Returns true if rows have a predicted class.
    pub(super) fn has_class(&self) -> bool {
        matches!(self, Self::Classes { .. } | Self::Logit { .. })
    }

    /// Returns true if numbers are probabilities.
    pub(super) fn is_probable(&self) -> bool {
        !matches!(self, Self::Numbers(_))
    }

    /// Returns the names of classes, if they come from the data.
    pub(super) fn given_classes(&self) -> &[String] {
        match self {
            Self::Classes { names, are_given: true } => names,
            Self::Logit { names, are_given: true } => names,
            _ => &[],
        }
    }

    /// Returns the predicted class of a row of outputs, or 0 if there are no classes.
    pub(super) fn class(&self, outputs: &[f32]) -> usize {
        match self {
            Self::Classes { .. } => likeliest(outputs),
            Self::Logit { .. } => usize::from(outputs[0] > 0.0),
            _ => 0,
        }
    }

    /// Decodes a row of outputs.
    pub(super) fn decode(&self, outputs: &[f32]) -> DecodedRow {
        let logistic = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
        let numbers = match self {
            Self::Classes { .. } => softmax(outputs),
            Self::Logit { .. } => [-outputs[0], outputs[0]].map(|x| logistic(x) as f32).to_vec(),
            Self::MultiLabel(_) => outputs.iter().map(|x| logistic(*x) as f32).collect(),
            Self::Numbers(_) => outputs.to_vec(),
        };
        DecodedRow { class: self.has_class().then(|| self.class(outputs)), numbers }
    }
}

/// Returns the probabilities of logits, computed in double precision.
fn softmax(logits: &[f32]) -> Vec<f32> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = logits.iter().map(|x| (f64::from(*x) - f64::from(most)).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| (power / sum) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_become_probabilities() {
        let names = || vec!["a".to_owned(), "b".to_owned(), "c".to_owned()];
        let classes = OutputSchema::Classes { names: names(), are_given: true };
        let row = classes.decode(&[1000.0, 1001.0, 0.0]);
        assert_eq!(row.class, Some(1));
        let e = std::f32::consts::E;
        for (found, wanted) in row.numbers.iter().zip([1.0 / (1.0 + e), e / (1.0 + e), 0.0]) {
            assert!((found - wanted).abs() < 1e-6, "{found} {wanted}");
        }
        let logit =
            OutputSchema::Logit { names: ["no", "yes"].map(str::to_owned), are_given: true };
        let row = logit.decode(&[3f32.ln()]);
        assert_eq!(row.class, Some(1));
        assert!((row.numbers[0] - 0.25).abs() < 1e-6 && (row.numbers[1] - 0.75).abs() < 1e-6);
        assert_eq!(logit.decode(&[-1000.0]).numbers, [1.0, 0.0]);
        let row = OutputSchema::MultiLabel(names()).decode(&[0.0, 100.0, -100.0]);
        assert_eq!((row.class, row.numbers[0], row.numbers[1]), (None, 0.5, 1.0));
        assert_eq!(
            OutputSchema::Numbers(names()).decode(&[1.5, -2.0, 0.0]).numbers,
            [1.5, -2.0, 0.0]
        );
    }
}
