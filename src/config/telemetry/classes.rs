//! Per-class results of a classifier, as an evaluation records them: confusion matrix, precision,
//! recall and F1.

use serde::{Deserialize, Serialize};

use hpctrain_data::inspect::table;

/// The most classes for which an evaluation records per-class results.
pub const MAX_CLASSES: usize = 100;

/// Per-class results of a classifier, computed from its confusion matrix. Lists are in the order
/// of the classes.
///
/// Precision is the fraction of the predictions of a class that are right, recall the fraction of
/// its samples that are found, F1 their harmonic mean 2PR / (P + R); a ratio whose denominator is 0
/// is 0. They are equal to those of scikit-learn's `precision_recall_fscore_support` with
/// `labels=range(classes)` and `zero_division=0`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Classes {
    /// The names of the classes.
    pub names: Vec<String>,
    /// The number of samples by class (rows) and by predicted class (columns). The predicted class
    /// is the likeliest; of several, the first.
    pub confusion: Vec<Vec<u64>>,
    /// The precision of each class.
    pub precision: Vec<f64>,
    /// The recall of each class.
    pub recall: Vec<f64>,
    /// The F1 of each class.
    pub f1: Vec<f64>,
    /// Means over the classes, unweighted (macro averages).
    #[serde(rename = "macro")]
    pub means: Means,
    /// For two classes, the area under the receiver operating characteristic (ROC AUC): the
    /// fraction of the pairs of a sample of the first class and one of the second in which that of
    /// the first has the lower score; equal scores count half. None if a class has no sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roc_auc: Option<f64>,
}

/// Means over classes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Means {
    /// The mean of the precisions.
    pub precision: f64,
    /// The mean of the recalls.
    pub recall: f64,
    /// The mean of the F1 scores.
    pub f1: f64,
}

impl Classes {
    /// Computes the results from a confusion matrix, whose rows are classes. Classes without a name
    /// are named by their number.
    pub fn from_confusion(
        confusion: Vec<Vec<u64>>,
        names: &[String],
        roc_auc: Option<f64>,
    ) -> Self {
        let all = confusion.len();
        let ratio = |part: u64, all: u64| if all == 0 { 0.0 } else { part as f64 / all as f64 };
        let right = |class: usize| confusion[class][class];
        let samples = |class: usize| confusion[class].iter().sum::<u64>();
        let predicted = |class: usize| confusion.iter().map(|row| row[class]).sum::<u64>();
        let precision: Vec<f64> =
            (0..all).map(|class| ratio(right(class), predicted(class))).collect();
        let recall: Vec<f64> = (0..all).map(|class| ratio(right(class), samples(class))).collect();
        // 2PR / (P + R), from integers.
        let f1: Vec<f64> = (0..all)
            .map(|class| ratio(2 * right(class), samples(class) + predicted(class)))
            .collect();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / all.max(1) as f64;
        let means = Means { precision: mean(&precision), recall: mean(&recall), f1: mean(&f1) };
        let names = (0..all)
            .map(|class| names.get(class).cloned().unwrap_or_else(|| class.to_string()))
            .collect();
        Self { names, confusion, precision, recall, f1, means, roc_auc }
    }

    /// Formats the results for display: a line for each class, and the confusion matrix.
    pub fn to_text(&self) -> String {
        let number = |x: f64| format!("{x:.4}");
        let mut rows = vec![["class", "samples", "precision", "recall", "F1"].map(str::to_owned)];
        for (class, name) in self.names.iter().enumerate() {
            let [precision, recall, f1] =
                [&self.precision, &self.recall, &self.f1].map(|of| number(of[class]));
            let samples: u64 = self.confusion[class].iter().sum();
            rows.push([name.clone(), samples.to_string(), precision, recall, f1]);
        }
        let Means { precision, recall, f1 } = self.means;
        let all: u64 = self.confusion.iter().flatten().sum();
        rows.push(["mean".into(), all.to_string(), number(precision), number(recall), number(f1)]);
        let mut text = table(&rows);
        if let Some(auc) = self.roc_auc {
            text += &format!("ROC AUC {auc:.4}\n");
        }
        let mut rows = vec![
            std::iter::once("true \\ predicted")
                .chain(self.names.iter().map(|name| &name[..]))
                .map(str::to_owned)
                .collect::<Vec<_>>(),
        ];
        for (name, counts) in self.names.iter().zip(&self.confusion) {
            rows.push(
                std::iter::once(name.clone()).chain(counts.iter().map(u64::to_string)).collect(),
            );
        }
        format!("{text}\n{}", table(&rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_follow_from_counts() {
        let found = Classes::from_confusion(
            vec![vec![3, 1, 0], vec![2, 4, 0], vec![0, 0, 0]],
            &["cat".into(), "dog".into()],
            None,
        );
        assert_eq!(found.names, ["cat", "dog", "2"]);
        assert_eq!(
            (found.precision, found.recall),
            (vec![0.6, 0.8, 0.0], vec![0.75, 4.0 / 6.0, 0.0])
        );
        assert_eq!(found.f1, [6.0 / 9.0, 8.0 / 11.0, 0.0]);
        assert_eq!(found.means.recall, (0.75 + 4.0 / 6.0) / 3.0);
    }

    #[test]
    fn the_object_has_the_names_of_its_file_and_reads_back() {
        let found = Classes::from_confusion(vec![vec![1, 0], vec![0, 2]], &[], Some(1.0));
        let text = serde_json::to_string(&found).unwrap();
        assert!(
            text.starts_with(
                "{\"names\":[\"0\",\"1\"],\"confusion\":[[1,0],[0,2]],\"precision\":[1.0,1.0],"
            ),
            "{text}"
        );
        assert!(
            text.contains("\"macro\":{\"precision\":1.0,") && text.ends_with("\"roc_auc\":1.0}"),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Classes>(&text).unwrap(), found);
        let table = found.to_text();
        assert!(
            table.contains("mean   3        1.0000")
                && table.contains("ROC AUC 1.0000\n\ntrue \\ predicted  0  1\n"),
            "{table}"
        );
    }
}
