//! Starts its own ranks: this program needs no launcher, and no MPI at run time. The ranks compute
//! an integral, each a part of it, and add the parts up.
//!
//! ```sh
//! cargo run --release --example spawn
//! cargo run --release --example spawn -- 4
//! hpctrain spawn -n 3 target/release/examples/spawn
//! ```

use std::process::ExitCode;

use hpctrain::job::spawn;

/// The number of intervals.
const INTERVALS: usize = 1 << 20;

/// Returns the part of the integral of 4 / (1 + x²) from 0 to 1 that one of `ranks` ranks computes.
fn part(rank: usize, ranks: usize) -> f64 {
    let width = 1.0 / INTERVALS as f64;
    let middles = (rank..INTERVALS).step_by(ranks).map(|i| (i as f64 + 0.5) * width);
    middles.map(|x| width * 4.0 / (1.0 + x * x)).sum()
}

fn main() -> ExitCode {
    let ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(2);
    spawn(ranks, |comm| {
        let mine = part(comm.rank(), comm.size());
        let parts = comm.world().all_gather_u64(&[mine.to_bits()])?;
        let sum: f64 = parts.iter().map(|part| f64::from_bits(part[0])).sum();
        if comm.rank() == 0 {
            println!("{} ranks: the integral is {sum:.9}", comm.size());
        }
        Ok(())
    })
}
