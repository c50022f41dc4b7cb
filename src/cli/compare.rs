//! `hpctrain compare`: prints the differences between two runs.

use std::path::PathBuf;

use clap::Args;

use super::json;
use crate::error::Result;
use crate::run_records::RunRecords;
use crate::runs::Comparison;
use crate::telemetry::say;

/// Arguments of `hpctrain compare`.
#[derive(Args)]
#[command(after_help = "Example: hpctrain compare runs/gpt-char runs/gpt-char-2")]
pub struct CompareArgs {
    /// Directory of a run
    a: PathBuf,
    /// Directory of another run
    b: PathBuf,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// Prints the differences.
pub fn run(args: &CompareArgs) -> Result<()> {
    let found = Comparison::new(&RunRecords::open(&args.a)?, &RunRecords::open(&args.b)?);
    if args.json {
        return json(&found);
    }
    say(found.to_text().trim_end());
    Ok(())
}
