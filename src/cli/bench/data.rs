//! `hpctrain bench data`: benchmarks the data loader.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::backend::cpu::Cpu;
use crate::cli::json;
use crate::comm::Comm;
use crate::data::bench::{self, ReadTiming};
use crate::error::{Error, Result};
use crate::telemetry::say;

/// Arguments of `hpctrain bench data`.
#[derive(Args)]
pub struct DataArgs {
    /// Number of 28 × 28 images, and of windows of 256 tokens, to write and read.
    #[arg(long, default_value_t = 60_000, value_parser = clap::value_parser!(u32).range(128..))]
    samples: u32,
    /// Directory on the file system to benchmark; files written there are removed.
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Number of rounds, of which medians are printed.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// One line of the table: medians.
#[derive(Serialize)]
struct DataRow {
    what: &'static str,
    samples: u64,
    bytes_per_sample: usize,
    samples_per_second: f64,
    /// The rate in GB/s (10⁹ bytes).
    bandwidth: f64,
    /// The rate of plain positional reads of the same rows.
    plain_samples_per_second: Option<f64>,
    /// The median over rounds of the rate divided by that of plain reads.
    of_plain: Option<f64>,
}

/// The object of `--json`.
#[derive(Serialize)]
struct DataReport {
    rounds: u16,
    rows: Vec<DataRow>,
}

/// Runs the benchmark and prints the table.
///
/// # Errors
/// Returns an error if there are several ranks, or the directory cannot be written or read.
pub fn table(comm: &Comm<Cpu>, args: &DataArgs) -> Result<()> {
    if comm.size() > 1 {
        let error =
            Error::input(format!("bench data runs on one rank, but {} were started", comm.size()));
        return Err(error.hint("start it without mpirun: hpctrain bench data").shared());
    }
    let folder =
        tempfile::tempdir_in(&args.dir).map_err(|e| Error::io("write in", &args.dir, e))?;
    let timings = bench::time(folder.path(), args.samples as usize, usize::from(args.rounds))?;
    let rows: Vec<DataRow> = timings.iter().map(row).collect();
    if args.json {
        let report = DataReport { rounds: args.rounds, rows };
        json(&report)?;
        return Ok(());
    }
    say("what                                samples/s       GB/s  plain reads/s  of plain");
    for row in &rows {
        let DataRow { what, samples_per_second, bandwidth, .. } = row;
        let plain = match (row.plain_samples_per_second, row.of_plain) {
            (Some(plain), Some(of_plain)) => format!("{plain:>13.0} {of_plain:>9.2}"),
            _ => format!("{:>13} {:>9}", "–", "–"),
        };
        say(format_args!("{what:<34} {samples_per_second:>10.0} {bandwidth:>10.3}  {plain}"));
    }
    Ok(())
}

fn row(timing: &ReadTiming) -> DataRow {
    let rate = timing.samples as f64 / median(timing.seconds.clone());
    let ratios: Vec<f64> =
        timing.plain.iter().zip(&timing.seconds).map(|(plain, seconds)| plain / seconds).collect();
    let has_plain = !timing.plain.is_empty();
    DataRow {
        what: timing.what,
        samples: timing.samples,
        bytes_per_sample: timing.bytes,
        samples_per_second: rate,
        bandwidth: rate * timing.bytes as f64 / 1e9,
        plain_samples_per_second: has_plain
            .then(|| timing.samples as f64 / median(timing.plain.clone())),
        of_plain: has_plain.then(|| median(ratios)),
    }
}

/// Returns the median; of an even number of values, the upper of the two in the middle.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
