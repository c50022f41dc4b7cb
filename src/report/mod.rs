//! A report of runs from their [`RunRecords`], as one self-contained page.
//!
//! The page contains its data, its script and its style, and its policy forbids all requests.
//! Curves are downsampled ([`downsample`]): 1,000,000 steps make a page of less than 5 MB.

#![forbid(unsafe_code)]

mod classes;
pub mod csv;
mod curves;
pub mod downsample;
mod html;
mod mesh;
mod overview;
mod progress;
mod ranks;
pub mod run_records;
pub mod runs;
mod settings;
pub mod svg;

use std::fmt::Write as _;

use html::{escaped, json_in_script, muted, paragraph, section};

use crate::run_records::RunRecords;
use hpctrain_base::error::{Error, Result};

/// The page's script and style, and the library that draws curves, with its licence.
const PROGRAM: &str = include_str!("assets/page.js");
const STYLE: &str = include_str!("assets/page.css");
const PLOTS: &str = include_str!("assets/uPlot.iife.min.js");
const STYLE_OF_PLOTS: &str = include_str!("assets/uPlot.min.css");
const LICENCE_OF_PLOTS: &str = include_str!("assets/uPlot-LICENSE");

/// The Content-Security-Policy of the page: nothing is loaded from anywhere.
const POLICY: &str = include_str!("assets/policy.txt");

/// Returns a part of the report for each run, under the run's name if there are several.
fn for_each_run(
    runs: &[RunRecords],
    labels: &[String],
    content: impl Fn(usize, &RunRecords) -> String,
) -> String {
    let mut out = String::new();
    for (at, (run, label)) in runs.iter().zip(labels).enumerate() {
        let content = content(at, run);
        if runs.len() > 1 && !content.is_empty() {
            out += &format!("<h3>{}{}</h3>\n", chip(at), escaped(label));
        }
        out += &content;
    }
    out
}

/// Returns a mark in the colour of a run.
fn chip(run: usize) -> String {
    format!("<span class=\"chip\" style=\"background:var(--c{})\"></span>", run % 8)
}

/// Returns labels that distinguish the runs: the names of their directories, or their paths if two
/// have the same name.
pub fn labels(runs: &[RunRecords]) -> Vec<String> {
    let is_unique =
        |run: &RunRecords| runs.iter().filter(|other| other.name == run.name).count() == 1;
    runs.iter()
        .map(|run| if is_unique(run) { run.name.clone() } else { run.path.display().to_string() })
        .collect()
}

/// Returns the page about these runs.
///
/// # Errors
/// Returns an error if the data cannot be serialised, which is a bug.
pub fn page(runs: &[RunRecords]) -> Result<String> {
    let labels = labels(runs);
    let data = curves::PageData::new(runs, &labels);
    let json = serde_json::to_string(&data).map_err(|e| Error::internal(format!("report: {e}")))?;
    let sections = [
        ("overview", "Overview", overview::section(runs, &labels)),
        ("curves", "Curves", curves_section(runs, &data)),
        (
            "time",
            "Time of a step",
            for_each_run(runs, &labels, |at, run| progress::times(at, run, data.has_times(at))),
        ),
        (
            "ranks",
            "Compute time by rank",
            for_each_run(runs, &labels, |_, run| ranks::section(run)),
        ),
        (
            "evaluations",
            "Evaluations",
            for_each_run(runs, &labels, |_, run| progress::evaluations(run)),
        ),
        ("classes", "Classes", for_each_run(runs, &labels, |_, run| classes::section(run))),
        (
            "checkpoints",
            "Checkpoints",
            for_each_run(runs, &labels, |_, run| progress::checkpoints(run)),
        ),
        ("restarts", "Restarts", for_each_run(runs, &labels, |_, run| progress::restarts(run))),
        ("skipped", "Skipped steps", for_each_run(runs, &labels, |_, run| progress::skipped(run))),
        (
            "samples",
            "Samples of text",
            for_each_run(runs, &labels, |_, run| progress::samples(run)),
        ),
        ("layout", "Layout", for_each_run(runs, &labels, |_, run| mesh::drawing(run))),
        ("configuration", "Configuration", settings::section(runs, &labels)),
        ("environment", "Environment", overview::environment(runs, &labels)),
    ];
    let title = labels.join(", ");
    let mut page = String::with_capacity(json.len() + (1 << 18));
    let links: String = sections
        .iter()
        .filter(|(_, _, content)| !content.is_empty())
        .map(|(id, title, _)| format!("<a href=\"#{id}\">{title}</a>\n"))
        .collect();
    // Writing to a string cannot fail.
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"generator\" content=\"hpctrain {}\">\n<link rel=\"icon\" href=\"data:,\">\n\
         <title>{} – hpctrain report</title>\n<style>\n{STYLE_OF_PLOTS}\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>{}</h1>\n<nav>{links}</nav>\n{}",
        POLICY.trim_end(),
        env!("CARGO_PKG_VERSION"),
        escaped(&title),
        escaped(&title),
        notes(runs, &labels),
    );
    sections.iter().for_each(|(id, title, content)| page += &section(id, title, content));
    let _ = write!(
        page,
        "<script type=\"application/json\" id=\"data\">{}</script>\n<!--\nuPlot:\n{LICENCE_OF_PLOTS}-->\n\
         <script>{PLOTS}</script>\n<script>\n{PROGRAM}</script>\n</body>\n</html>\n",
        json_in_script(&json)
    );
    Ok(page)
}

/// Returns a note about each record that cannot be read.
fn notes(runs: &[RunRecords], labels: &[String]) -> String {
    let mut lines = String::new();
    for (run, label) in runs.iter().zip(labels) {
        for note in &run.notes {
            lines += &format!("<li>{}: {}</li>\n", escaped(label), escaped(note));
        }
    }
    match lines.as_str() {
        "" => String::new(),
        lines => format!(
            "<div class=\"notes\">Not all of the records can be read:<ul>\n{lines}</ul></div>\n"
        ),
    }
}

/// Returns the elements in which the page's script draws the curves.
fn curves_section(runs: &[RunRecords], data: &curves::PageData) -> String {
    if data.charts().is_empty() {
        return paragraph("No step has been recorded yet.");
    }
    let mut out = String::from(
        "<div class=\"controls\">\n\
         <label>smoothing <input type=\"range\" id=\"smoothing\" min=\"0\" max=\"0.99\" step=\"0.01\" value=\"0\"></label>\
         <output id=\"smoothing-value\">0.00</output>\n\
         <label>from step <input type=\"number\" id=\"from\" min=\"0\"></label>\n\
         <label>to <input type=\"number\" id=\"to\" min=\"0\"></label>\n\
         <button type=\"button\" id=\"whole\">whole run</button>\n</div>\n<div class=\"charts\">\n",
    );
    for chart in data.charts() {
        let id = &chart.id;
        let title = escaped(&chart.title);
        let log = match chart.may_be_logarithmic {
            true => format!(
                " <label class=\"quiet\"><input type=\"checkbox\" id=\"log-{id}\"> logarithmic</label>"
            ),
            false => String::new(),
        };
        out += &format!("<div class=\"chart\" id=\"chart-{id}\"><h3>{title}{log}</h3></div>\n");
    }
    out += "</div>\n";
    out += &muted(
        "Drag to zoom in, click twice to see the whole run. Triangles are checkpoints, red ticks at the top are updates that were \
         skipped, dashed lines are restarts, grey stripes are records that cannot be read.",
    );
    let most = runs.iter().map(|run| run.steps.len()).max().unwrap_or(0);
    if data.is_downsampled(most) {
        out += &muted(&format!(
            "Curves of many steps are thinned: of each of {} equal parts of a run the lowest and the highest value are shown. Smooth \
             lines are of the parts' means. metrics.jsonl has all.",
            data.buckets()
        ));
    }
    out
}
