//! `hpctrain bench comm`: benchmarks collectives between ranks.

use clap::Args;
use serde::Serialize;

use crate::backend::cpu::Cpu;
use crate::bench::collectives::{self, CollectiveTiming};
use crate::cli::json;
use crate::comm::{Algorithm, Comm, Operation};
use crate::config::Size;
use crate::error::{Error, Result};
use crate::telemetry::{bytes, say};

/// Arguments of `hpctrain bench comm`.
#[derive(Args)]
pub struct CommArgs {
    /// Operations [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    operations: Vec<Operation>,
    /// Algorithms; `vendor` is the library's collective [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    algorithms: Vec<Algorithm>,
    /// Sizes of the whole buffer, such as 64KiB,1MiB [default: 1 KiB to 256 MiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    sizes: Vec<Size>,
    /// Number of batches, of which the median is printed.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..))]
    batches: u16,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// One line of the table.
#[derive(Serialize)]
struct CollectiveRow {
    operation: Operation,
    algorithm: Algorithm,
    bytes: usize,
    microseconds: f64,
    /// The algorithm bandwidth in GB/s (10⁹ bytes).
    algorithm_bandwidth: f64,
    bus_bandwidth: f64,
    /// The bus bandwidth divided by the bandwidth of a memory copy.
    of_copy: f64,
}

/// The object of `--json`.
#[derive(Serialize)]
struct CommReport {
    ranks: usize,
    library: String,
    shared_memory: bool,
    copy_bandwidth: f64,
    rows: Vec<CollectiveRow>,
}

/// Runs the benchmark and prints the table.
///
/// # Errors
/// Returns an error if there is only one rank, or a message fails.
pub fn table(comm: &Comm<Cpu>, args: &CommArgs) -> Result<()> {
    if comm.size() == 1 {
        return Err(Error::input("bench comm needs at least two ranks")
            .hint("mpirun -np 2 hpctrain bench comm"));
    }
    let world = comm.world();
    let backend = Cpu::new(1);
    let or_all =
        |some: &[Operation]| if some.is_empty() { Operation::ALL.to_vec() } else { some.to_vec() };
    let operations = or_all(&args.operations);
    let algorithms =
        if args.algorithms.is_empty() { Algorithm::ALL.to_vec() } else { args.algorithms.clone() };
    let sizes: Vec<usize> = if args.sizes.is_empty() {
        (10..=28).step_by(2).map(|bits| 1 << bits).collect()
    } else {
        args.sizes.iter().map(|size| size.0).collect()
    };
    let batches = usize::from(args.batches);

    let speaks = comm.rank() == 0;
    let copy = collectives::copy_limit(&world, batches)?;
    if speaks && !args.json {
        let path = if comm.shares_memory() { ", shared memory inside a node" } else { "" };
        say(format_args!("{} ranks, {}{path}", comm.size(), comm.library()));
        say(format_args!("a memory copy on all ranks at once: {:.2} GB/s per rank\n", copy / 1e9));
        say(
            "operation       algorithm      size         time µs   algbw GB/s  busbw GB/s  of copy",
        );
    }
    let mut rows = Vec::new();
    for &operation in &operations {
        for &bytes in &sizes {
            for &algorithm in &algorithms {
                let row = row(
                    &collectives::time(&world, &backend, operation, algorithm, bytes, batches)?,
                    copy,
                );
                if speaks && !args.json {
                    say(line(&row));
                }
                rows.push(row);
            }
        }
    }
    if speaks && args.json {
        let report = CommReport {
            ranks: comm.size(),
            library: comm.library().to_string(),
            shared_memory: comm.shares_memory(),
            copy_bandwidth: copy / 1e9,
            rows,
        };
        json(&report)?;
    }
    Ok(())
}

fn row(timing: &CollectiveTiming, copy: f64) -> CollectiveRow {
    CollectiveRow {
        operation: timing.operation,
        algorithm: timing.algorithm,
        bytes: timing.bytes,
        microseconds: timing.seconds * 1e6,
        algorithm_bandwidth: timing.algorithm_bandwidth() / 1e9,
        bus_bandwidth: timing.bus_bandwidth() / 1e9,
        of_copy: timing.bus_bandwidth() / copy,
    }
}

fn line(row: &CollectiveRow) -> String {
    format!(
        "{:<15} {:<14} {:<10} {:>9.1} {:>12.3} {:>11.3} {:>8.3}",
        row.operation,
        row.algorithm,
        bytes(row.bytes),
        row.microseconds,
        row.algorithm_bandwidth,
        row.bus_bandwidth,
        row.of_copy
    )
}
