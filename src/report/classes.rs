//! Metrics by class, from the last evaluation that has them.

use super::html::{Cell, digits, escaped, heading, muted, number, paragraph, table, text};
use crate::run_records::RunRecords;
use hpctrain_config::telemetry::classes::Classes;
use hpctrain_config::telemetry::grouped;

/// The largest number of classes for which the confusion matrix is shown.
const MOST: usize = 40;

/// Returns precision, recall and F1 by class and the confusion matrix as HTML; empty without
/// classes.
pub fn section(run: &RunRecords) -> String {
    let last = run.evaluations.iter().rev().find_map(|one| Some((one.step, one.classes.as_ref()?)));
    let Some((step, classes)) = last else { return String::new() };
    let mut out = heading(&format!("at step {}", grouped(step)));
    if let Some(area) = classes.roc_auc {
        out += &paragraph(&format!("area under the receiver operating characteristic: {area:.4}"));
    }
    let head =
        vec![text("class"), number("samples"), number("precision"), number("recall"), number("F1")];
    let rows =
        classes.names.iter().enumerate().map(|(class, name)| class_row(classes, class, name));
    out += &table(head, rows.collect());
    out + &matrix(classes)
}

/// Returns the row of a class: its name, number of samples, precision, recall and F1.
fn class_row(classes: &Classes, class: usize, name: &str) -> Vec<Cell> {
    let samples = classes.confusion.get(class).map_or(0, |row| sum(row));
    let [precision, recall, f1] = [&classes.precision, &classes.recall, &classes.f1]
        .map(|values| number(digits(values.get(class).copied())));
    vec![text(name), number(grouped(samples)), precision, recall, f1]
}

/// Returns the number of samples in a row.
fn sum(row: &[u64]) -> u64 {
    row.iter().copied().fold(0, u64::saturating_add)
}

/// Returns the confusion matrix as HTML, with darker cells for larger shares of a class.
fn matrix(classes: &Classes) -> String {
    let Classes { names, confusion, .. } = classes;
    if names.len() > MOST {
        return muted(&format!(
            "The confusion matrix of {} classes is in eval.jsonl.",
            names.len()
        ));
    }
    let head: String =
        names.iter().map(|name| format!("<th class=\"number\">{}</th>", escaped(name))).collect();
    let mut rows = String::new();
    for (name, row) in names.iter().zip(confusion) {
        rows += &format!("<tr><th>{}</th>", escaped(name));
        let all = sum(row);
        for count in row {
            let share = *count as f64 / all.max(1) as f64;
            rows += &format!(
                "<td style=\"background:rgba(var(--heat),{:.3})\" title=\"{:.1} %\">{}</td>",
                0.65 * share,
                100.0 * share,
                grouped(*count)
            );
        }
        rows += "</tr>\n";
    }
    format!(
        "{}<div class=\"scroll\"><table class=\"matrix\"><thead><tr><th>class</th>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>\n",
        heading("Samples by class (rows) and predicted class (columns)")
    )
}
