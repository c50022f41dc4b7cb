//! The screen: progress, a chart or a table, facts, the last lines of the log, and the keys.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize as _};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType, LineGauge, Paragraph};

use super::run_view::{Quantity, Ranks, RunView};
use hpctrain_config::telemetry::efficiency::readable_rate;
use hpctrain_config::telemetry::progress::clock;
use hpctrain_config::telemetry::{bytes, grouped};
use hpctrain_report::downsample::{Curve, Point};
use hpctrain_report::runs::RunState;

/// The smallest terminal that is drawn on, in columns and rows.
const SMALLEST: (u16, u16) = (40, 10);

/// The least rows of the chart, before facts and log are omitted.
const LEAST_CHART: u16 = 7;

/// The rows of the log with its title.
const LOG_ROWS: u16 = 5;

/// Braille characters have two dots a column.
const DOTS: usize = 2;

/// The share of the steps that is shown after a zoom.
const ZOOMED: u64 = 10;

const TRAINING: Color = Color::Cyan;
const VALIDATION: Color = Color::Yellow;

/// The content of the large panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Panel {
    /// A quantity by step.
    Curve(Quantity),
    /// The compute times of ranks.
    Ranks,
    /// The log.
    Log,
}

/// The panels by their keys, from 1, with their names.
pub const PANELS: [(Panel, &str); 7] = [
    (Panel::Curve(Quantity::Loss), "loss"),
    (Panel::Curve(Quantity::Throughput), "speed"),
    (Panel::Curve(Quantity::Mfu), "MFU"),
    (Panel::Curve(Quantity::GradNorm), "norm"),
    (Panel::Curve(Quantity::Memory), "memory"),
    (Panel::Ranks, "ranks"),
    (Panel::Log, "log"),
];

/// The choices of the user.
#[derive(Debug, Clone, Copy)]
pub struct Choices {
    /// The large panel.
    pub panel: Panel,
    /// Whether only the last tenth of the steps is shown.
    pub is_zoomed: bool,
    /// Whether values are drawn by their logarithms.
    pub is_logarithmic: bool,
    /// Whether the terminal shows ASCII only.
    pub is_ascii: bool,
}

/// Draws the run. `is_reading` is whether not all of its records are read yet.
pub fn draw(frame: &mut Frame<'_>, view: &RunView, choices: Choices, is_reading: bool) {
    let area = frame.area();
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        let (columns, rows) = SMALLEST;
        let message = format!("at least {columns} columns and {rows} rows are needed; q quits");
        frame.render_widget(Paragraph::new(message), area);
        return;
    }
    let facts = facts(view);
    let mut facts_rows = facts.len() as u16;
    let mut log_rows = if choices.panel == Panel::Log { 0 } else { LOG_ROWS };
    let others = 3 + LEAST_CHART;
    if area.height < others + facts_rows + log_rows {
        log_rows = 0;
    }
    if area.height < others + facts_rows {
        facts_rows = 0;
    }
    let [title, gauge, panel, below, log, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(facts_rows),
        Constraint::Length(log_rows),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(title_line(view, is_reading), title);
    frame.render_widget(progress(view), gauge);
    match choices.panel {
        Panel::Curve(quantity) => curve_panel(frame, panel, view, quantity, choices),
        Panel::Ranks => frame.render_widget(ranks_panel(view, panel), panel),
        Panel::Log => frame.render_widget(log_panel(view, panel), panel),
    }
    if facts_rows > 0 {
        frame.render_widget(Paragraph::new(facts), below);
    }
    if log_rows > 0 {
        frame.render_widget(log_panel(view, log), log);
    }
    frame.render_widget(keys_line(choices), keys);
    if choices.is_ascii {
        to_ascii(frame.buffer_mut());
    }
}

/// Returns the name and the state of the run, and what cannot be read.
fn title_line(view: &RunView, is_reading: bool) -> Line<'static> {
    let colour = match view.state {
        RunState::Running | RunState::Finished => Color::Green,
        RunState::Preempted => Color::Yellow,
        RunState::Failed | RunState::Stale => Color::Red,
    };
    let mut spans =
        vec![view.name().bold(), Span::raw("  "), Span::styled(view.state.name(), colour)];
    if let Some(reason) = &view.reason {
        spans.push(Span::raw(format!(": {reason}")));
    }
    if view.starts > 1 {
        spans.push(Span::raw(format!("  {} starts", view.starts)));
    }
    if is_reading {
        spans.push("  reading its records".yellow());
    }
    if let Some(note) = &view.note {
        spans.push(Span::styled(format!("  {note}"), Color::Red));
    }
    Line::from(spans)
}

/// Returns the bar of finished steps.
fn progress(view: &RunView) -> LineGauge<'static> {
    let total = view.config.run.steps;
    let step = view.last().map_or(0, |step| step.step);
    let ratio = (step as f64 / total.max(1) as f64).clamp(0.0, 1.0);
    let mut label = format!("step {} of {}", grouped(step), grouped(total));
    if let Some(last) = view.last() {
        label += &format!("  epoch {:.2}", last.epoch);
    }
    if view.state == RunState::Running
        && let Some(left) = view.seconds_left()
    {
        label += &format!("  ETA {}", clock(left));
    }
    LineGauge::default()
        .ratio(ratio)
        .label(format!("{label}  {:.1} %", 100.0 * ratio))
        .filled_symbol("━")
        .unfilled_symbol("─")
        .filled_style(Style::new().fg(Color::Green))
        .unfilled_style(Style::new().fg(Color::DarkGray))
}

/// Returns the facts below the chart.
fn facts(view: &RunView) -> Vec<Line<'static>> {
    let mut lines = vec![
        fact("throughput", &throughput(view)),
        fact("time", &time_shares(view)),
        fact("resources", &resources(view)),
        fact("ranks", &slowest(view)),
        fact("checkpoints", &checkpoints(view)),
        fact("evaluation", &evaluation(view)),
    ];
    let factor = view.config.log.straggler_factor;
    if view.ranks().is_some_and(|ranks| is_slow(&ranks, factor)) {
        lines[3] = lines[3].clone().red();
    }
    lines
}

fn fact(name: &str, value: &str) -> Line<'static> {
    let value = if value.is_empty() { "not recorded yet" } else { value };
    Line::from(vec![
        Span::styled(format!("{name:<12}"), Modifier::DIM),
        Span::raw(value.to_owned()),
    ])
}

fn throughput(view: &RunView) -> String {
    let mut parts = Vec::new();
    if let Some(rate) = view.recent(|step| Some(step.tokens_per_second)) {
        parts.push(format!("{} {}/s", grouped(rate as u64), view.predictions()));
    }
    if let Some(ms) = view.recent(|step| Some(step.step_ms)) {
        parts.push(format!("{} per step", milliseconds(ms)));
    }
    if let Some(tflops) = view.recent(|step| step.tflops_per_rank) {
        parts.push(format!("{} per rank", readable_rate(tflops)));
    }
    if let Some(mfu) = view.recent(|step| step.mfu) {
        parts.push(format!("MFU {:.1} %", 100.0 * mfu));
    }
    parts.join("  ")
}

fn time_shares(view: &RunView) -> String {
    let Some(shares) = view.time_shares() else { return String::new() };
    let names = ["compute", "communication", "loader", "optimizer"];
    let parts = names.iter().zip(shares);
    let parts = parts.map(|(name, share)| format!("{name} {:.1} %", 100.0 * share));
    parts.collect::<Vec<_>>().join("  ")
}

fn resources(view: &RunView) -> String {
    let mut parts = Vec::new();
    if let Some(peak) = view.last().map(|step| step.peak_bytes).filter(|peak| *peak > 0) {
        parts.push(format!("peak memory of rank 0 {}", bytes(peak)));
    }
    if let Some(kwh) = view.recent(|step| step.energy_kwh) {
        parts.push(format!("energy {kwh:.3} kWh"));
    }
    if let Some(goodput) = view.goodput {
        parts.push(format!("goodput {:.1} %", 100.0 * goodput.share));
    }
    parts.join("  ")
}

fn slowest(view: &RunView) -> String {
    let Some(ranks) = view.ranks() else {
        return match &view.hosts[..] {
            [] => String::new(),
            [host] => format!("1 on {host}"),
            hosts => format!("{}, no window of steps is complete yet", hosts.len()),
        };
    };
    let (plural, one) = if ranks.are_workers { ("workers", "worker") } else { ("ranks", "rank") };
    let Some(slow) = ranks.slowest.first() else { return String::new() };
    format!(
        "{} {plural}, slowest {one} {}: {} of compute{}, {:.2} x the median",
        ranks.count,
        slow.name,
        milliseconds(slow.ms),
        per_virtual_rank(&ranks),
        slow.ms / ranks.median_ms
    )
}

fn per_virtual_rank(ranks: &Ranks) -> &'static str {
    if ranks.per_virtual_rank { " per virtual rank" } else { "" }
}

/// Returns whether the slowest rank takes so much longer than the median that training warns.
fn is_slow(ranks: &Ranks, factor: f64) -> bool {
    ranks.count > 1 && ranks.slowest.first().is_some_and(|slow| slow.ms >= factor * ranks.median_ms)
}

fn checkpoints(view: &RunView) -> String {
    let list = &view.checkpoints;
    let Some((latest, size)) = list.latest else { return "none yet".into() };
    let size = size.map(|size| format!(" ({})", bytes(size as usize))).unwrap_or_default();
    let best = list.best.map(|best| format!(", best {}", grouped(best))).unwrap_or_default();
    format!("{} kept, latest {}{size}{best}", list.kept, grouped(latest))
}

fn evaluation(view: &RunView) -> String {
    let losses = view.evaluated_losses();
    let Some((step, loss)) = losses.last() else { return String::new() };
    let last = view.evaluations.iter().rev().find(|one| one.step == *step);
    let mut text = format!("step {}: loss {loss:.4}", grouped(*step));
    if let Some(perplexity) = last.and_then(|one| one.perplexity) {
        text += &format!(", perplexity {perplexity:.2}");
    }
    for (name, value) in last.into_iter().flat_map(|one| &one.metrics) {
        text += &format!(", {name} {value:.4}");
    }
    if let Some((at, best)) = losses.iter().min_by(|a, b| a.1.total_cmp(&b.1)) {
        text += &format!("  lowest {best:.4} at {}", grouped(*at));
    }
    text
}

fn milliseconds(ms: f64) -> String {
    if ms >= 10_000.0 { format!("{:.1} s", ms * 1e-3) } else { format!("{ms:.1} ms") }
}

/// A curve in the coordinates of the chart.
fn coordinates(points: &[Point], columns: usize, is_logarithmic: bool) -> Vec<(f64, f64)> {
    let points: Vec<Point> =
        points.iter().filter(|point| !is_logarithmic || point.1 > 0.0).copied().collect();
    let curve = Curve::downsampled(&points, columns * DOTS);
    let scaled = |y: f64| if is_logarithmic { y.log10() } else { y };
    curve.x.iter().zip(curve.y).filter_map(|(x, y)| Some((*x as f64, scaled(y?)))).collect()
}

fn curve_panel(
    frame: &mut Frame<'_>,
    area: Rect,
    view: &RunView,
    quantity: Quantity,
    choices: Choices,
) {
    let mut points = view.points(quantity);
    let mut evaluated = match quantity {
        Quantity::Loss => view.evaluated_losses(),
        _ => vec![],
    };
    let last = points.last().map_or(0, |point| point.0);
    if choices.is_zoomed {
        let first = last - last / ZOOMED;
        points.retain(|point| point.0 >= first);
        evaluated.retain(|point| point.0 >= first);
    }
    let shown = |value: f64| readable(value, quantity);
    let name = match quantity {
        Quantity::Loss => "training loss".into(),
        Quantity::Throughput => format!("{}/s", view.predictions()),
        Quantity::Mfu => "MFU, %".into(),
        Quantity::GradNorm => "gradient norm".into(),
        Quantity::Memory => "peak memory of rank 0, MiB".into(),
    };
    let mut title = vec![Span::styled(
        points.last().map_or(name.clone(), |point| format!("{name} {}", shown(point.1))),
        TRAINING,
    )];
    if let Some(point) = evaluated.last() {
        title.push(Span::styled(format!("  evaluated {}", shown(point.1)), VALIDATION));
    }
    if choices.is_logarithmic {
        title.push("  logarithmic".dim());
    }
    let block = Block::bordered().title(Line::from(title)).border_style(Modifier::DIM);
    let columns = usize::from(area.width);
    let curve = coordinates(&points, columns, choices.is_logarithmic);
    let dots = coordinates(&evaluated, columns, choices.is_logarithmic);
    let all = || curve.iter().chain(&dots);
    let Some((low, high)) = bounds(all().map(|point| point.1)) else {
        let message = match view.last() {
            None => "no step is recorded yet",
            Some(_) => "the records have no such values",
        };
        frame.render_widget(Paragraph::new(message).block(block), area);
        return;
    };
    let (first, last) = bounds(all().map(|point| point.0)).unwrap_or((0.0, 1.0));
    let label = |y: f64| shown(if choices.is_logarithmic { 10f64.powf(y) } else { y });
    let middle = |low: f64, high: f64| low + (high - low) / 2.0;
    let line = |data, colour, marker, kind| {
        Dataset::default().data(data).style(colour).marker(marker).graph_type(kind)
    };
    let kind = if curve.len() == 1 { GraphType::Scatter } else { GraphType::Line };
    let sets = vec![
        line(&curve, TRAINING, Marker::Braille, kind),
        line(&dots, VALIDATION, Marker::Dot, GraphType::Scatter),
    ];
    let chart = Chart::new(sets)
        .block(block)
        .legend_position(None)
        .x_axis(
            Axis::default()
                .bounds([first, last])
                .labels([first, middle(first, last), last].map(|step| grouped(step as u64)))
                .style(Modifier::DIM),
        )
        .y_axis(
            Axis::default()
                .bounds([low, high])
                .labels([low, middle(low, high), high].map(label))
                .style(Modifier::DIM),
        );
    frame.render_widget(chart, area);
}

/// Returns the least and the greatest value, which differ; `None` without values.
fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let values: Vec<f64> = values.collect();
    let low = values.iter().copied().min_by(f64::total_cmp)?;
    let high = values.iter().copied().max_by(f64::total_cmp)?;
    let least = (0.01 * high.abs()).max(1e-9);
    if high - low >= least { Some((low, high)) } else { Some((low - least, high + least)) }
}

fn readable(value: f64, quantity: Quantity) -> String {
    match quantity {
        Quantity::Throughput | Quantity::Memory => grouped(value.max(0.0) as u64),
        Quantity::Mfu => format!("{value:.1}"),
        _ if value != 0.0 && (value.abs() < 1e-3 || value.abs() >= 1e5) => format!("{value:.2e}"),
        _ => format!("{value:.3}"),
    }
}

fn ranks_panel(view: &RunView, area: Rect) -> Paragraph<'static> {
    let block = |title: &str| Block::bordered().title(title.to_owned()).border_style(Modifier::DIM);
    let Some(ranks) = view.ranks() else {
        let message = format!(
            "times are recorded every log.straggler_window = {} steps of a run with several ranks",
            view.config.log.straggler_window
        );
        return Paragraph::new(message).block(block("compute time by rank"));
    };
    let longest = ranks.slowest.first().map_or(1.0, |slow| slow.ms).max(1e-9);
    let width = ranks.slowest.iter().map(|one| one.name.chars().count()).max().unwrap_or(0);
    let room = usize::from(area.width).saturating_sub(width + 18);
    let factor = view.config.log.straggler_factor;
    let lines = ranks.slowest.iter().map(|one| {
        let bar = "█".repeat((one.ms / longest * room as f64).round() as usize);
        let is_slow = ranks.count > 1 && one.ms >= factor * ranks.median_ms;
        let colour = if is_slow { Color::Red } else { TRAINING };
        Line::from(vec![
            Span::raw(format!("{:<width$}  {:>10}  ", one.name, milliseconds(one.ms))),
            Span::styled(bar, colour),
        ])
    });
    let title = format!(
        "compute time of {} {}{}, slowest first, median {}",
        ranks.count,
        if ranks.are_workers { "workers" } else { "ranks" },
        per_virtual_rank(&ranks),
        milliseconds(ranks.median_ms)
    );
    Paragraph::new(lines.collect::<Vec<_>>()).block(block(&title))
}

/// Returns the last lines of the log that fit.
fn log_panel(view: &RunView, area: Rect) -> Paragraph<'static> {
    let (name, lines) = &view.log;
    let rows = usize::from(area.height.saturating_sub(1));
    let shown = &lines[lines.len().saturating_sub(rows)..];
    let lines = shown.iter().map(|line| {
        let of_level = |level: &str| line.split_whitespace().nth(1) == Some(level);
        match () {
            () if of_level("ERROR") => Line::from(line.clone()).red(),
            () if of_level("WARN") => Line::from(line.clone()).yellow(),
            () => Line::from(line.clone()),
        }
    });
    let title = if name.is_empty() { "log".to_owned() } else { format!("log of {name}") };
    let block = Block::new()
        .borders(ratatui::widgets::Borders::TOP)
        .title(title)
        .border_style(Modifier::DIM);
    Paragraph::new(lines.collect::<Vec<_>>()).block(block)
}

fn keys_line(choices: Choices) -> Line<'static> {
    let mut spans = Vec::new();
    let mut add = |key: &str, name: &str, is_chosen: bool| {
        let style = if is_chosen { Modifier::REVERSED } else { Modifier::empty() };
        spans.push(Span::styled(key.to_owned(), Modifier::BOLD));
        spans.push(Span::styled(format!(" {name}"), style));
        spans.push(Span::raw("  "));
    };
    for (index, (panel, name)) in PANELS.iter().enumerate() {
        add(&(index + 1).to_string(), name, *panel == choices.panel);
    }
    add("z", "zoom", choices.is_zoomed);
    add("l", "log", choices.is_logarithmic);
    add("q", "quit", false);
    Line::from(spans)
}

/// Replaces characters that a terminal without UTF-8 cannot show.
fn to_ascii(buffer: &mut Buffer) {
    for cell in &mut buffer.content {
        let replacement = match cell.symbol().chars().next() {
            Some('\u{2800}') => " ",
            Some('\u{2801}'..='\u{28ff}') => ".",
            Some('━') => "=",
            Some('─') => "-",
            Some('│') => "|",
            Some('┌' | '┐' | '└' | '┘') => "+",
            Some('•') => "o",
            Some('█') => "#",
            Some(c) if !c.is_ascii() => "?",
            _ => continue,
        };
        cell.set_symbol(replacement);
    }
}
