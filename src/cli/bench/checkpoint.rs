//! `hpctrain bench checkpoint`: benchmarks checkpoint saves and restores.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::backend::cpu::Cpu;
use crate::bench::checkpoints::{self, SaveTimes};
use crate::cli::json;
use crate::comm::Comm;
use crate::config::{Config, LayerList, Size};
use crate::error::Result;
use crate::telemetry::{bytes, say};

/// Arguments of `hpctrain bench checkpoint`.
#[derive(Args)]
pub struct CheckpointArgs {
    /// Approximate size of parameters and optimizer state.
    #[arg(long, default_value = "500MB")]
    size: Size,
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

/// The object of `--json`: medians, in seconds.
#[derive(Serialize)]
struct CheckpointReport {
    ranks: usize,
    bytes: u64,
    /// The times of saves and restores.
    #[serde(flatten)]
    saving: SaveTimes,
}

/// The width of the layers.
const WIDTH: usize = 512;

/// The approximate size in bytes of a layer's parameters and Adam's two moments.
const LAYER_BYTES: usize = 12 * WIDTH * WIDTH * 12;

/// Runs the benchmark and prints the table.
///
/// # Errors
/// Returns an error if the directory cannot be written or read, or a message between ranks fails.
pub fn table(comm: &Comm<Cpu>, args: &CheckpointArgs) -> Result<()> {
    let mut config = Config::default();
    (config.model.width, config.model.heads) = (WIDTH, 8);
    config.model.layers = LayerList::Count((args.size.0 / LAYER_BYTES).max(1));
    config.model.vocabulary = Some(64);
    config.batch.global = comm.size() as u64;
    let (bytes_written, rounds) =
        checkpoints::time(comm, &config, &args.dir, usize::from(args.rounds), |_| Ok(Cpu::new(1)))?;
    if comm.rank() != 0 {
        return Ok(());
    }
    let median = SaveTimes::median(&rounds);
    if args.json {
        let report = CheckpointReport { ranks: comm.size(), bytes: bytes_written, saving: median };
        json(&report)?;
        return Ok(());
    }
    say(format_args!(
        "{} in {} ranks, median of {} rounds",
        bytes(bytes_written as usize),
        comm.size(),
        rounds.len()
    ));
    print_rate("write and fsync of plain files", bytes_written, median.raw_write);
    print_rate("save, from the copy to the final rename", bytes_written, median.save);
    print_rate("memory copy of the state", bytes_written, median.raw_copy);
    print_rate("copy of the state, which blocks training", bytes_written, median.copy);
    print_rate("read of the files", bytes_written, median.raw_read);
    print_rate("restore, including checksums", bytes_written, median.restore);
    let compare =
        |what: &str, base: &str, ratio: f64| say(format_args!("{what} is {ratio:.2} of {base}"));
    compare(
        "the rate of saving",
        "a plain write's",
        SaveTimes::ratio(&rounds, |one| one.raw_write / one.save),
    );
    compare(
        "the time that blocks training",
        "a memory copy",
        SaveTimes::ratio(&rounds, |one| one.copy / one.raw_copy),
    );
    compare(
        "the rate of restoring",
        "a plain read's",
        SaveTimes::ratio(&rounds, |one| one.raw_read / one.restore),
    );
    Ok(())
}

/// Prints the time and the rate of an operation on `size` bytes.
fn print_rate(what: &str, size: u64, seconds: f64) {
    say(format_args!(
        "{what:<44} {:>8.1} ms  {:>8.1} MB/s",
        seconds * 1e3,
        size as f64 / seconds / 1e6
    ));
}
