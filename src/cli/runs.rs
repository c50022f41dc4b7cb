//! `hpctrain runs`: lists the runs of a directory.

use std::path::PathBuf;

use clap::Args;

use super::json;
use crate::error::Result;
use crate::runs::{Listing, SortBy};
use crate::telemetry::say;

/// Arguments of `hpctrain runs`.
#[derive(Args)]
#[command(
    after_help = "A run is running, finished, preempted, failed, or stale: killed without recording its end.\n\
                        Example: hpctrain runs --sort best"
)]
pub struct RunsArgs {
    /// The directory that contains the runs.
    #[arg(default_value = "runs")]
    root: PathBuf,
    /// Sort by this column; runs without a value come last.
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t = SortBy::Name)]
    sort: SortBy,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// Prints the table of runs.
pub fn run(args: &RunsArgs) -> Result<()> {
    let found = Listing::scan(&args.root, args.sort)?;
    if args.json {
        return json(&found);
    }
    say(found.to_table().trim_end());
    Ok(())
}
