//! The progress line: a bar on a terminal, plain lines elsewhere.

use std::cell::Cell;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::efficiency::readable_rate;
use super::metrics::Step;

/// Shows the progress of a run. Only rank 0 has one.
pub struct Progress {
    bar: Option<ProgressBar>,
    every: u64,
    first: u64,
    total: u64,
    started: Instant,
    /// The unit of throughput, such as `tokens`.
    predictions: &'static str,
    pace: Cell<Pace>,
}

/// Totals of the steps since the last line. The times of single steps are not meaningful: on
/// parameter servers two steps may end at almost the same time.
#[derive(Clone, Copy, Default)]
struct Pace {
    steps: u64,
    ms: f64,
    predictions: f64,
    /// Model TFLOP per rank.
    tflop: f64,
    /// The sum of MFU times milliseconds; `None` if the MFU of a step is unknown.
    utilised_ms: Option<f64>,
}

impl Pace {
    /// Adds a step.
    fn plus(self, step: &Step) -> Self {
        // The rate of a step that took no time is not finite.
        let finite = |number: f64| if number.is_finite() { number } else { 0.0 };
        let predictions = finite(step.tokens_per_second * step.step_ms * 1e-3);
        let before = if self.steps == 0 { Some(0.0) } else { self.utilised_ms };
        Self {
            steps: self.steps + 1,
            ms: self.ms + step.step_ms,
            predictions: self.predictions + predictions,
            tflop: self.tflop + finite(step.tflops_per_rank.unwrap_or(0.0) * step.step_ms * 1e-3),
            utilised_ms: before
                .zip(step.mfu)
                .map(|(before, mfu)| finite(before + mfu * step.step_ms)),
        }
    }

    /// Formats FLOP/s per rank and MFU, each if known and preceded by two spaces.
    fn efficiency(self) -> String {
        let rate = (self.tflop > 0.0)
            .then(|| format!("  {}", readable_rate(self.tflop / (self.ms * 1e-3))));
        let mfu =
            self.utilised_ms.map(|utilised| format!("  MFU {:.1} %", 100.0 * utilised / self.ms));
        rate.unwrap_or_default() + &mfu.unwrap_or_default()
    }

    /// Returns the milliseconds per step and the predictions per second.
    fn means(self) -> (f64, u64) {
        (self.ms / self.steps.max(1) as f64, (self.predictions / (self.ms * 1e-3)) as u64)
    }
}

impl Progress {
    /// Creates the display at step `first` of `total`. Without a terminal it prints a line every
    /// `every` steps. Times and rates are means of the steps since the last line, or since the last
    /// multiple of `every`.
    ///
    /// `predictions` is the unit of throughput: tokens or samples.
    pub fn new(first: u64, total: u64, every: u64, predictions: &'static str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total).with_position(first);
            let template = "{bar:24} {pos}/{len} {msg}";
            bar.set_style(
                ProgressStyle::with_template(template)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar
        });
        Self {
            bar,
            every,
            first,
            total,
            predictions,
            started: Instant::now(),
            pace: Cell::default(),
        }
    }

    /// Shows a finished step; `note` is appended in parentheses.
    pub fn step(&self, step: &Step, note: Option<&str>) {
        let done = step.step - self.first;
        let left = self.started.elapsed().as_secs_f64() / done.max(1) as f64
            * (self.total - step.step) as f64;
        let skipped = if step.skipped { "  (update skipped: not finite)" } else { "" };
        let note = note.map(|note| format!("  ({note})")).unwrap_or_default();
        let pace = self.pace.get().plus(step);
        let ends = done == 1 || step.step.is_multiple_of(self.every) || step.step == self.total;
        self.pace.set(if ends { Pace::default() } else { pace });
        let (ms, rate) = pace.means();
        let predictions = self.predictions.trim_end_matches('s');
        let energy = step
            .joules_per_token
            .map(|joules| format!("  {joules:.2e} J/{predictions}"))
            .unwrap_or_default();
        let facts = format!(
            "loss {:.4}  lr {:.2e}  norm {:.3}  {:.1} ms  {} {}/s{}{energy}  ETA {}{skipped}{note}",
            step.loss,
            step.lr,
            step.grad_norm,
            ms,
            super::grouped(rate),
            self.predictions,
            pace.efficiency(),
            clock(left)
        );
        match &self.bar {
            Some(bar) => {
                bar.set_position(step.step);
                bar.set_message(facts);
            }
            None if ends => {
                super::say(format_args!("step {:>6}/{}  {facts}", step.step, self.total));
            }
            None => {}
        }
    }

    /// Prints a line without disturbing the bar.
    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| super::say(line)),
            None => super::say(line),
        }
    }

    /// Ends the display.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}

/// Formats seconds as `h:mm:ss` or `m:ss`.
pub fn clock(seconds: f64) -> String {
    let whole = Duration::from_secs_f64(seconds.clamp(0.0, 1e9)).as_secs();
    let hours = whole / 3600;
    let minutes = whole / 60 % 60;
    let seconds = whole % 60;
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_rates_are_means() {
        let step = |step_ms: f64| Step {
            step_ms,
            tokens_per_second: 8.0 / (step_ms * 1e-3),
            ..Step::default()
        };
        let pace =
            Pace::default().plus(&step(3.0)).plus(&step(0.001)).plus(&step(1.0)).plus(&step(0.0));
        let (ms, rate) = pace.means();
        assert!((ms - 4.001 / 4.0).abs() < 1e-9 && rate == (24.0 / 4.001e-3) as u64, "{ms} {rate}");
    }

    #[test]
    fn clocks() {
        assert_eq!([0.0, 61.9, 3_725.0].map(clock), ["0:00", "1:01", "1:02:05"]);
    }
}
