//! Comparison of configurations.

use std::collections::BTreeSet;

use super::html::{escaped, muted};
use crate::run_records::RunRecords;

/// Returns the table of settings, with a column for each run; settings that differ are marked.
pub fn section(runs: &[RunRecords], labels: &[String]) -> String {
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.settings.keys()).collect();
    let mut rows = String::new();
    let mut differing = 0;
    for key in keys {
        let values: Vec<Option<&String>> = runs.iter().map(|run| run.settings.get(key)).collect();
        let differs = values.iter().any(|value| *value != values[0]);
        differing += usize::from(differs);
        rows += &format!(
            "<tr class=\"{}\"><td><code>{}</code></td>",
            if differs { "differs" } else { "same" },
            escaped(key)
        );
        for value in values {
            let class = if differs { "wide differs" } else { "wide" };
            let value = value.map_or_else(|| "–".into(), |value| escaped(value));
            rows += &format!("<td class=\"{class}\"><code>{value}</code></td>");
        }
        rows += "</tr>\n";
    }
    let head: String = labels.iter().map(|label| format!("<th>{}</th>", escaped(label))).collect();
    let mut choice = String::new();
    let mut note = String::new();
    if runs.len() > 1 {
        choice = "<div class=\"controls\"><label><input type=\"checkbox\" id=\"only-differences\"> only differences</label></div>\n"
            .into();
        note = muted(&format!("{differing} settings differ."));
    }
    format!(
        "{note}{choice}<div class=\"scroll\"><table><thead><tr><th>key</th>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>\n"
    )
}
