//! `hpctrain replay`: repeats steps of a run, and finds the first tensor with bad values.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::Args;

use crate::error::Result;
use crate::job::fail;
use crate::replay::{ReplayOptions, StopAt, replay};
use crate::verify::Launcher;

/// Arguments of `hpctrain replay`.
#[derive(Args)]
#[command(
    after_help = "Exit code: 0 if all steps have the bits of metrics.jsonl, 1 if one differs or has no record, 2 if the input is invalid.\n\
                        Example: hpctrain replay runs/gpt-char --steps 1501..1550\n\
                        Example: hpctrain replay runs/gpt-char --stop-at-first nan"
)]
pub struct ReplayArgs {
    /// Directory of the run.
    run: PathBuf,
    /// Steps to repeat and compare, from the first to the last, such as 351..400. Default with
    /// --stop-at-first: the first bad step of metrics.jsonl and the one before it.
    #[arg(long, value_name = "A..B", value_parser = steps)]
    steps: Option<RangeInclusive<u64>>,
    /// Number of ranks.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: u16,
    /// Start the ranks with mpirun instead of as threads of this process.
    #[arg(long)]
    mpi: bool,
    /// Begin where the run began instead of at its newest checkpoint before the steps.
    #[arg(long)]
    from_start: bool,
    /// Stop at the first tensor with NaN (nan), with infinities or NaN (inf), or with values above
    /// F times those of the step before (spike:F; spike is spike:10), and find its sample.
    #[arg(long, value_name = "nan|inf|spike[:F]")]
    stop_at_first: Option<StopAt>,
    /// The run's data, if it was moved: a directory of shards, or a file
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Override one key of [data], such as data.mix if its data sets were moved, or run.device; may
    /// be repeated
    #[arg(long = "set", value_name = "data.KEY=VALUE|run.device=DEVICE")]
    overrides: Vec<String>,
    /// Print one JSON object instead of lines.
    #[arg(long)]
    json: bool,
}

/// Parses a value of `--steps`.
fn steps(text: &str) -> std::result::Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 1 <= first && first <= last => Ok(first..=last),
        _ => Err("A..B with 1 ≤ A ≤ B, such as 351..400".into()),
    }
}

impl ReplayArgs {
    /// Converts the arguments to options.
    fn options(&self) -> Result<ReplayOptions> {
        Ok(ReplayOptions {
            run: self.run.clone(),
            steps: self.steps.clone(),
            ranks: usize::from(self.ranks),
            launcher: if self.mpi { Launcher::mpirun()? } else { Launcher::Threads },
            from_start: self.from_start,
            stop: self.stop_at_first,
            data: self.data.clone(),
            overrides: self.overrides.clone(),
            json: self.json,
        })
    }
}

/// Replays the steps and returns the exit code.
pub fn run(args: &ReplayArgs) -> i32 {
    match args.options().and_then(|options| replay(&options)) {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(e) => fail(&e),
    }
}
