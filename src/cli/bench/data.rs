//! `hpctrain bench data`: the rate at which samples arrive.

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
    /// Images of 28 × 28 and windows of 256 tokens that are written and read.
    #[arg(long, default_value_t = 60_000, value_parser = clap::value_parser!(u32).range(128..))]
    samples: u32,
    /// Directory on the disk to be used; files written there are removed.
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Rounds of which medians are taken.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// One line of the table: medians.
#[derive(Serialize)]
struct Row {
    what: &'static str,
    samples: u64,
    bytes_per_sample: usize,
    samples_per_second: f64,
    /// GB/s, of 10⁹ bytes.
    bandwidth: f64,
    /// The same rows by plain positional reads.
    plain_samples_per_second: Option<f64>,
    /// Samples a second over those of plain reads, round by round.
    of_plain: Option<f64>,
}

/// The whole output.
#[derive(Serialize)]
struct Report {
    rounds: u16,
    rows: Vec<Row>,
}

/// Times all and prints the table.
///
/// # Errors
/// There are several ranks, or the file system refused.
pub fn table(comm: &Comm<Cpu>, args: &DataArgs) -> Result<()> {
    if comm.size() > 1 {
        let error =
            Error::input(format!("{} ranks would share the disk that is to be timed", comm.size()));
        return Err(error.hint("start it without mpirun: hpctrain bench data").shared());
    }
    let folder =
        tempfile::tempdir_in(&args.dir).map_err(|e| Error::io("write in", &args.dir, e))?;
    let timings = bench::time(folder.path(), args.samples as usize, usize::from(args.rounds))?;
    let rows: Vec<Row> = timings.iter().map(row).collect();
    if args.json {
        let report = Report { rounds: args.rounds, rows };
        json(&report)?;
        return Ok(());
    }
    say("what                                samples/s       GB/s  plain reads/s  of plain");
    for row in &rows {
        let Row { what, samples_per_second, bandwidth, .. } = row;
        let plain = match (row.plain_samples_per_second, row.of_plain) {
            (Some(plain), Some(of_plain)) => format!("{plain:>13.0} {of_plain:>9.2}"),
            _ => format!("{:>13} {:>9}", "–", "–"),
        };
        say(format_args!("{what:<34} {samples_per_second:>10.0} {bandwidth:>10.3}  {plain}"));
    }
    Ok(())
}

fn row(timing: &ReadTiming) -> Row {
    let rate = timing.samples as f64 / median(timing.seconds.clone());
    let ratios: Vec<f64> =
        timing.plain.iter().zip(&timing.seconds).map(|(plain, seconds)| plain / seconds).collect();
    let has_plain = !timing.plain.is_empty();
    Row {
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

/// The middle one; of an even number the upper of the two.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
