//! The progress line: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::metrics::Step;

/// Shows the progress of a run. Only rank 0 has one.
pub struct Progress {
    bar: Option<ProgressBar>,
    every: u64,
    first: u64,
    total: u64,
    started: Instant,
    /// The word for the predictions counted.
    predictions: &'static str,
}

impl Progress {
    /// Begins at step `first` of `total`; without a terminal, prints every `every` steps.
    ///
    /// `predictions` is the word for the predictions counted: tokens, samples.
    pub fn new(first: u64, total: u64, every: u64, predictions: &'static str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total).with_position(first);
            let template = "{bar:24} {pos}/{len} {msg}";
            bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Self { bar, every, first, total, predictions, started: Instant::now() }
    }

    /// A step has finished; `trouble` is what people are to know besides.
    pub fn step(&self, step: &Step, trouble: Option<&str>) {
        let done = step.step - self.first;
        let left = self.started.elapsed().as_secs_f64() / done.max(1) as f64 * (self.total - step.step) as f64;
        let skipped = if step.skipped { "  (update skipped: not finite)" } else { "" };
        let trouble = trouble.map(|trouble| format!("  ({trouble})")).unwrap_or_default();
        let facts = format!(
            "loss {:.4}  lr {:.2e}  norm {:.3}  {:.1} ms  {} {}/s  ETA {}{skipped}{trouble}",
            step.loss,
            step.lr,
            step.grad_norm,
            step.step_ms,
            super::grouped(step.tokens_per_second as u64),
            self.predictions,
            clock(left)
        );
        match &self.bar {
            Some(bar) => {
                bar.set_position(step.step);
                bar.set_message(facts);
            }
            None if done == 1 || step.step.is_multiple_of(self.every) || step.step == self.total => {
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

    /// The run is over.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}

/// Seconds as `h:mm:ss` or `m:ss`.
fn clock(seconds: f64) -> String {
    let whole = Duration::from_secs_f64(seconds.clamp(0.0, 1e9)).as_secs();
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks() {
        assert_eq!([0.0, 61.9, 3_725.0].map(clock), ["0:00", "1:01", "1:02:05"]);
    }
}
