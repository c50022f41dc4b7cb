//! `hpctrain bench connection`: benchmarks TCP connections between two hosts, as parameter servers
//! use them.

use clap::Args;

use crate::backend::cpu::Cpu;
use crate::cli::json;
use crate::comm::Comm;
use crate::config::Size;
use crate::error::{Error, Result};
use crate::servers::{Rate, rates};
use crate::telemetry::{bytes, say};

/// The message sizes without `--sizes`.
const DEFAULT_SIZES: [usize; 4] = [1 << 10, 64 << 10, 1 << 20, 16 << 20];

/// Arguments of `hpctrain bench connection`.
#[derive(Args)]
pub struct ConnectionArgs {
    /// Message sizes, such as 64KiB,1MiB [default: 1 KiB to 16 MiB]
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    sizes: Vec<Size>,
    /// Network interface on which rank 0 listens, by name or network like comm.interface.
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
    /// Number of batches, of which the median is printed.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    batches: u16,
    /// Print one JSON array instead of the table.
    #[arg(long)]
    json: bool,
}

/// Benchmarks connections of rank 1 to rank 0 and prints the table.
///
/// # Errors
/// Returns an error if there is only one rank, the first two are on the same host, or a connection
/// fails.
pub fn table(comm: &Comm<Cpu>, args: &ConnectionArgs) -> Result<()> {
    if comm.size() == 1 {
        return Err(Error::input("bench connection needs at least two ranks")
            .hint("mpirun -np 2 --host node1,node2 hpctrain bench connection"));
    }
    let sizes = args.sizes.iter().map(|size| size.0).collect::<Vec<_>>();
    let sizes = if sizes.is_empty() { DEFAULT_SIZES.to_vec() } else { sizes };
    let rates = rates(comm, args.interface.as_deref(), &sizes, usize::from(args.batches))?;
    if comm.rank() != 0 {
        return Ok(());
    }
    if args.json {
        return json(&rates);
    }
    say("direction  size         plain GB/s  encrypted GB/s  ratio");
    for Rate { direction, bytes: size, plain, encrypted } in rates {
        let direction = format!("{direction:?}").to_lowercase();
        let [plain, encrypted] = [plain, encrypted].map(|seconds| size as f64 / seconds / 1e9);
        say(format_args!(
            "{direction:<9}  {:<10} {plain:>12.3} {encrypted:>15.3} {:>6.2}",
            bytes(size),
            encrypted / plain
        ));
    }
    Ok(())
}
