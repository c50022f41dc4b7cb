//! A plot of the losses of runs, for papers and pages.

use std::fmt::Write as _;

use super::curves::loss_curves;
use super::downsample::Curve;
use super::html::escaped;
use super::labels;
use crate::run_records::RunRecords;
use hpctrain_config::telemetry::grouped;

/// The size of the plot, and the area of the curves in it.
const SIZE: (f64, f64) = (760.0, 420.0);
const PLOT: [f64; 4] = [64.0, 20.0, 740.0, 364.0];

/// The number of buckets of a curve.
const BUCKETS: usize = 1000;

/// The colours of runs.
const COLOURS: [&str; 8] =
    ["#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#0b7285", "#a61e4d", "#5f3dc4", "#846900"];

/// The style, for light and dark surroundings.
const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#1c2330}.axis{stroke:#9aa6b8}.grid{stroke:#d9dee6;stroke-width:.7}\
@media(prefers-color-scheme:dark){text{fill:#e4e9f1}.grid{stroke:#323b49}}";

/// The ranges of the axes.
struct Axes {
    steps: [f64; 2],
    losses: [f64; 2],
}

impl Axes {
    fn new(curves: &[[Curve; 2]]) -> Self {
        let all = || curves.iter().flatten();
        let steps = || all().flat_map(|curve| &curve.x).map(|step| *step as f64);
        let losses = || all().flat_map(|curve| &curve.y).flatten().copied();
        Self {
            steps: bounds(
                steps().fold(f64::INFINITY, f64::min),
                steps().fold(f64::NEG_INFINITY, f64::max),
            ),
            losses: bounds(
                losses().fold(f64::INFINITY, f64::min),
                losses().fold(f64::NEG_INFINITY, f64::max),
            ),
        }
    }

    fn x(&self, step: f64) -> f64 {
        PLOT[0] + (step - self.steps[0]) / (self.steps[1] - self.steps[0]) * (PLOT[2] - PLOT[0])
    }

    fn y(&self, loss: f64) -> f64 {
        PLOT[3] - (loss - self.losses[0]) / (self.losses[1] - self.losses[0]) * (PLOT[3] - PLOT[1])
    }
}

/// Returns two different bounds, even if there is one value or none.
fn bounds(least: f64, largest: f64) -> [f64; 2] {
    match (least.is_finite() && largest.is_finite(), least < largest) {
        (false, _) => [0.0, 1.0],
        (true, true) => [least, largest],
        (true, false) => [least - 0.5, largest + 0.5],
    }
}

/// Returns about five round numbers between two bounds.
fn ticks([least, largest]: [f64; 2]) -> Vec<f64> {
    let rough = (largest - least) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let width = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|width| *width >= rough);
    let width = width.unwrap_or(rough);
    let first = (least / width).ceil();
    (0..12)
        .map(|n| (first + f64::from(n)) * width)
        .take_while(|tick| *tick <= largest + width * 1e-9)
        .collect()
}

/// Returns the plot, with training losses as lines and evaluations as points.
pub fn losses(runs: &[RunRecords]) -> String {
    let curves: Vec<[Curve; 2]> = runs.iter().map(|run| loss_curves(run, BUCKETS)).collect();
    let axes = Axes::new(&curves);
    let labels = labels(runs);
    let rows = runs.len().div_ceil(3);
    let height = SIZE.1 + 20.0 * (rows - 1) as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {height}\" role=\"img\"><title>loss of {}</title>\
         <style>{STYLE}</style>\n",
        SIZE.0,
        escaped(&labels.join(", "))
    );
    for tick in ticks(axes.losses) {
        let y = axes.y(tick);
        let [left, _, right, _] = PLOT;
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{left}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 8.0,
            y + 4.0,
            super::downsample::rounded((tick * 1e9).round() / 1e9)
        );
    }
    for tick in ticks(axes.steps).into_iter().filter(|tick| tick.fract() == 0.0 && *tick >= 0.0) {
        let (x, [_, _, _, bottom]) = (axes.x(tick), PLOT);
        let _ = writeln!(
            svg,
            "<line class=\"axis\" x1=\"{x:.1}\" y1=\"{bottom}\" x2=\"{x:.1}\" y2=\"{}\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            bottom + 5.0,
            bottom + 19.0,
            grouped(tick as u64)
        );
    }
    let [left, top, right, bottom] = PLOT;
    let _ =
        writeln!(svg, "<path class=\"axis\" fill=\"none\" d=\"M{left} {top}V{bottom}H{right}\"/>");
    for (at, ([training, evaluated], label)) in curves.iter().zip(&labels).enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let _ = writeln!(
            svg,
            "<path fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.4\" stroke-linejoin=\"round\" d=\"{}\"/>",
            path(training, &axes)
        );
        for (step, loss) in
            evaluated.x.iter().zip(&evaluated.y).filter_map(|(step, loss)| Some((step, (*loss)?)))
        {
            let x = axes.x(*step as f64);
            let y = axes.y(loss);
            let _ =
                writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
        let x = left + 225.0 * (at % 3) as f64;
        let y = bottom + 46.0 + 20.0 * (at / 3) as f64;
        let shown: String = label.chars().take(28).collect();
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{}\" width=\"12\" height=\"4\" fill=\"{colour}\"/><text x=\"{}\" y=\"{y}\">{}</text>",
            y - 6.0,
            x + 18.0,
            escaped(&shown)
        );
    }
    svg + "</svg>\n"
}

/// Returns a line that breaks where the curve has no value.
fn path(curve: &Curve, axes: &Axes) -> String {
    let mut path = String::new();
    let mut is_down = false;
    for (step, loss) in curve.x.iter().zip(&curve.y) {
        let Some(loss) = loss else {
            is_down = false;
            continue;
        };
        let command = if is_down { 'L' } else { 'M' };
        let _ = write!(path, "{command}{:.1} {:.1}", axes.x(*step as f64), axes.y(*loss));
        is_down = true;
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks([0.0, 1000.0]), [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]);
        assert_eq!(ticks([1.93, 4.2]).len(), 5);
        assert!(
            ticks([0.0, f64::MIN_POSITIVE / 1e15]).len() <= 12
                && ticks([f64::MIN, f64::MAX]).len() <= 12
        );
        assert_eq!(bounds(f64::INFINITY, f64::NEG_INFINITY), [0.0, 1.0]);
        assert_eq!(bounds(2.0, 2.0), [1.5, 2.5]);
    }

    #[test]
    fn lines_break_at_gaps() {
        let curve = Curve {
            x: vec![0, 1, 2, 3],
            y: vec![Some(1.0), Some(0.0), None, Some(1.0)],
            ..Curve::default()
        };
        let axes = Axes { steps: [0.0, 3.0], losses: [0.0, 1.0] };
        assert_eq!(path(&curve, &axes).matches('M').count(), 2);
    }
}
