//! Counts of a classifier's predictions, for results per class. They are integers, so their sums do
//! not depend on the order of addition: on the number of ranks or the layout.

use hpctrain_base::error::{Error, Result};
use hpctrain_config::telemetry::classes::Classes;
use hpctrain_nn::loss::Classifier;

/// The maximum number of samples for which the ROC AUC is computed: each rank keeps 4 bytes per
/// sample.
pub const MOST_RANKED: u64 = 1 << 24;

/// The key of a NaN score. No other score has this key.
const NAN_KEY: u32 = u32::MAX;

/// Counts of the predictions of some samples.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassificationCounts {
    classes: usize,
    /// Number of samples by class, then by predicted class.
    confusion: Vec<u64>,
    /// The score keys of the samples of each class, if there are two classes.
    scores: Option<[Vec<u32>; 2]>,
    /// Whether the target of some sample is not a class.
    has_soft_targets: bool,
}

impl ClassificationCounts {
    /// Creates empty counts, for a total of `samples` samples.
    pub fn new(classifier: Classifier, samples: u64) -> Self {
        let classes = classifier.classes();
        let is_ranked = classes == 2 && samples <= MOST_RANKED;
        let scores = is_ranked.then(Default::default);
        Self { classes, confusion: vec![0; classes * classes], scores, has_soft_targets: false }
    }

    /// Counts samples by their [codes].
    pub fn add(&mut self, codes: &[f64]) {
        let cells = (self.classes * self.classes) as u64;
        for code in codes {
            if code.is_nan() {
                self.has_soft_targets = true;
                continue;
            }
            let key = *code as u64 / cells;
            let cell = *code as u64 % cells;
            self.confusion[cell as usize] += 1;
            if let Some(scores) = &mut self.scores {
                scores[cell as usize / 2].push(key as u32);
            }
        }
    }

    /// Adds the counts of other samples, encoded by [`ClassificationCounts::encode`].
    ///
    /// # Errors
    /// Returns an error if the message is too short for this number of classes.
    pub fn merge(&mut self, message: &[u8]) -> Result<()> {
        let malformed = || Error::comm("a rank sent malformed classification counts");
        let (counts, rest) =
            message.split_at_checked(8 * self.confusion.len()).ok_or_else(malformed)?;
        for (into, bytes) in self.confusion.iter_mut().zip(counts.as_chunks().0) {
            *into += u64::from_le_bytes(*bytes);
        }
        let (head, rest) = rest.split_first_chunk::<9>().ok_or_else(malformed)?;
        let [has_soft_targets, first @ ..] = *head;
        self.has_soft_targets |= has_soft_targets > 0;
        if let Some(scores) = &mut self.scores {
            let keys = rest.as_chunks().0;
            let (first, second) =
                keys.split_at_checked(u64::from_le_bytes(first) as usize).ok_or_else(malformed)?;
            for (into, keys) in scores.iter_mut().zip([first, second]) {
                into.extend(keys.iter().map(|bytes| u32::from_le_bytes(*bytes)));
            }
        }
        Ok(())
    }

    /// Encodes the counts as a message: the confusion matrix, whether some target is not a class,
    /// the number of keys of the first class, and the keys of both classes.
    pub fn encode(&self) -> Vec<u8> {
        let mut message: Vec<u8> =
            self.confusion.iter().flat_map(|count| count.to_le_bytes()).collect();
        message.push(u8::from(self.has_soft_targets));
        let keys = self
            .scores
            .as_ref()
            .map_or([&[][..]; 2], |scores| scores.each_ref().map(Vec::as_slice));
        message.extend((keys[0].len() as u64).to_le_bytes());
        message.extend(keys.iter().flat_map(|keys| keys.iter()).flat_map(|key| key.to_le_bytes()));
        message
    }

    /// Returns the results per class, or `None` if the target of some sample is not a class.
    pub fn classes(mut self, names: &[String]) -> Option<Classes> {
        if self.has_soft_targets {
            return None;
        }
        let roc_auc = self.scores.as_mut().and_then(|[first, second]| area(first, second));
        let confusion = self.confusion.chunks(self.classes.max(1)).map(<[u64]>::to_vec).collect();
        Some(Classes::from_confusion(confusion, names, roc_auc))
    }
}

/// Encodes the score key, class and predicted class of each sample as one number, from a row of
/// outputs per sample. The code of a sample whose target is not a class is NaN.
pub fn codes(classifier: Classifier, outputs: &[f32], targets: &Targets<'_>) -> Vec<f64> {
    outputs
        .chunks(classifier.outputs())
        .enumerate()
        .map(|(sample, row)| {
            targets.class(sample).map_or(f64::NAN, |class| code(classifier, row, class))
        })
        .collect()
}

/// Returns the code of a sample of class `class` with this row of outputs.
fn code(classifier: Classifier, row: &[f32], class: u32) -> f64 {
    let classes = classifier.classes();
    let (predicted, score) = match classifier {
        Classifier::Logit => (usize::from(row[0] > 0.0), row[0]),
        Classifier::Softmax(2) => (likeliest(row), row[1] - row[0]),
        Classifier::Softmax(_) => (likeliest(row), 0.0),
    };
    let cell = class as usize * classes + predicted;
    let key = if classes == 2 { key(score) } else { 0 };
    (u64::from(key) * (classes * classes) as u64 + cell as u64) as f64
}

/// The targets of samples.
pub enum Targets<'a> {
    /// Classes.
    Classes(&'a [u32]),
    /// Numbers, of which 0 and 1 are classes.
    Values(&'a [f32]),
}

impl Targets<'_> {
    fn class(&self, sample: usize) -> Option<u32> {
        match self {
            Targets::Classes(classes) => classes.get(sample).copied(),
            Targets::Values(values) => {
                let value = values.get(sample)?;
                [0.0, 1.0].iter().position(|class| class == value).map(|class| class as u32)
            }
        }
    }
}

/// Returns the index of the largest value, the first of several.
pub fn likeliest(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, x) in row.iter().enumerate() {
        if *x > row[best] {
            best = i;
        }
    }
    best
}

/// Maps scores to integers that sort in the same order. Equal scores have equal keys.
fn key(score: f32) -> u32 {
    if score.is_nan() {
        return NAN_KEY;
    }
    // -0.0 and 0.0 are equal.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// Returns the area under the ROC curve: the fraction of pairs in which the sample of the first
/// class has the lower score, where equal scores count half. Computed in integers up to the last
/// division. `None` if there is no pair, or a score is NaN.
fn area(first: &mut [u32], second: &mut [u32]) -> Option<f64> {
    first.sort_unstable();
    second.sort_unstable();
    let is_ordered = |keys: &[u32]| keys.last().is_some_and(|key| *key != NAN_KEY);
    if !is_ordered(first) || !is_ordered(second) {
        return None;
    }
    let mut lower = 0;
    let mut not_higher = 0;
    let mut halves = 0u128;
    for score in second.iter() {
        while first.get(lower).is_some_and(|other| other < score) {
            lower += 1;
        }
        while first.get(not_higher).is_some_and(|other| other <= score) {
            not_higher += 1;
        }
        halves += (lower + not_higher) as u128;
    }
    Some(halves as f64 / (2 * first.len() as u128 * second.len() as u128) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_largest_counts() {
        assert_eq!(
            [likeliest(&[1.0]), likeliest(&[1.0, 3.0, 3.0]), likeliest(&[f32::NAN, 1.0])],
            [0, 1, 0]
        );
    }

    #[test]
    fn keys_are_in_the_order_of_scores() {
        let scores =
            [f32::NEG_INFINITY, f32::MIN, -1.0, -1e-45, 0.0, 1e-45, 2.0, f32::MAX, f32::INFINITY];
        assert!(scores.map(key).windows(2).all(|pair| pair[0] < pair[1]));
        assert!(key(-0.0) == key(0.0) && key(f32::INFINITY) < key(f32::NAN));
    }

    #[test]
    fn the_area_is_the_part_of_the_pairs_in_order() {
        let auc = |first: &[f32], second: &[f32]| {
            let [mut first, mut second] =
                [first, second].map(|scores| scores.iter().map(|x| key(*x)).collect::<Vec<_>>());
            area(&mut first, &mut second)
        };
        assert_eq!(auc(&[0.1, 0.4], &[0.35, 0.8]), Some(0.75));
        assert_eq!(auc(&[1.0, 1.0], &[1.0]), Some(0.5));
        assert_eq!(auc(&[-1.0, 2.0], &[2.0, 3.0, 0.0]), Some((2.0 + 1.5) / 6.0 + 1.0 / 6.0));
        assert_eq!([auc(&[], &[1.0]), auc(&[1.0], &[]), auc(&[f32::NAN], &[1.0])], [None; 3]);
    }

    /// Returns the results of five samples with these codes, counted in parts.
    fn counted(parts: &[&[f64]]) -> Classes {
        let mut all = ClassificationCounts::new(Classifier::Logit, 5);
        for part in parts {
            let mut one = ClassificationCounts::new(Classifier::Logit, 5);
            one.add(part);
            all.merge(&one.encode()).unwrap();
        }
        all.classes(&[]).unwrap()
    }

    #[test]
    fn ranks_add_up_to_one() {
        let classes = [0, 1, 1, 0, 1];
        let values = [-0.5f32, 0.25, -1.0, 0.25, 2.0];
        let targets: Vec<f32> = classes.iter().map(|class| *class as f32).collect();
        let codes = codes(Classifier::Logit, &values, &Targets::Values(&targets));
        let whole = counted(&[&codes]);
        assert_eq!(whole.confusion, [[1, 1], [1, 2]]);
        assert_eq!(whole.roc_auc, Some((0.0 + 1.5 + 2.0) / 6.0));
        assert_eq!(counted(&[&codes[3..], &[], &codes[..3]]), whole);
        let mut other = ClassificationCounts::new(Classifier::Softmax(3), 5);
        assert!(other.merge(&[0; 20]).is_err());
    }

    /// Checks that numbers are equal up to rounding.
    fn assert_close(found: &[f64], wanted: &[f64], name: &str) {
        assert_eq!(found.len(), wanted.len(), "{name}");
        assert!(
            found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-15),
            "{name}: {found:?}, not {wanted:?}"
        );
    }

    /// Results equal those of scikit-learn up to the rounding of its sums.
    #[test]
    fn the_results_are_those_of_scikit_learn() {
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/golden/classes.json")).unwrap();
        let floats = |value: &serde_json::Value| -> Vec<f64> {
            serde_json::from_value(value.clone()).unwrap()
        };
        let cases = golden["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 4);
        for case in cases {
            let name = case["name"].as_str().unwrap();
            let rows: Vec<Vec<f32>> = serde_json::from_value(case["outputs"].clone()).unwrap();
            let targets: Vec<u32> = serde_json::from_value(case["targets"].clone()).unwrap();
            let values: Vec<f32> = targets.iter().map(|class| *class as f32).collect();
            let (classifier, targets) = match rows[0].len() {
                1 => (Classifier::Logit, Targets::Values(&values)),
                width => (Classifier::Softmax(width), Targets::Classes(&targets)),
            };
            let mut tally = ClassificationCounts::new(classifier, rows.len() as u64);
            tally.add(&codes(classifier, &rows.concat(), &targets));
            let found = tally.classes(&[]).unwrap();
            let confusion: Vec<Vec<u64>> =
                serde_json::from_value(case["confusion"].clone()).unwrap();
            assert_eq!(found.confusion, confusion, "{name}");
            assert_close(&found.precision, &floats(&case["precision"]), name);
            assert_close(&found.recall, &floats(&case["recall"]), name);
            assert_close(&found.f1, &floats(&case["f1"]), name);
            let means = [found.means.precision, found.means.recall, found.means.f1];
            let wanted =
                ["precision", "recall", "f1"].map(|mean| case["macro"][mean].as_f64().unwrap());
            assert_close(&means, &wanted, name);
            let area = |auc: Option<f64>| auc.map_or(vec![], |auc| vec![auc]);
            assert_close(&area(found.roc_auc), &area(case["roc_auc"].as_f64()), name);
        }
    }

    #[test]
    fn soft_targets_have_no_classes_and_many_samples_no_roc_auc() {
        let mut tally = ClassificationCounts::new(Classifier::Logit, 2);
        tally.add(&codes(Classifier::Logit, &[1.0, 1.0], &Targets::Values(&[1.0, 0.5])));
        assert_eq!(tally.classes(&[]), None);
        let many = ClassificationCounts::new(Classifier::Softmax(2), MOST_RANKED + 1);
        assert_eq!(many.classes(&[]).unwrap().roc_auc, None);
    }
}
