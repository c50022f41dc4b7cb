//! `hpctrain watch`: shows a run in the terminal.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::config::Time;
use crate::error::{Error, Result};
use crate::telemetry::say;
use crate::watch::{screen_text, watch};

/// The size of a terminal that is not known.
const SIZE: (u16, u16) = (80, 24);

/// Arguments of `hpctrain watch`.
#[derive(Args)]
#[command(
    after_help = "Keys: 1 to 7, Tab: loss, throughput, MFU, gradient norm, memory, ranks, log; \
                  z: the last tenth of the steps; l: logarithmic values; q: quit.\n\
                  Only the files of the run are read, so it works on any node that sees them.\n\
                  Example: hpctrain watch runs/gpt-char"
)]
pub struct WatchArgs {
    /// The directory of the run, such as runs/gpt-char; the run may have ended.
    run: PathBuf,
    /// Read the files of the run this often.
    #[arg(long, value_name = "TIME", default_value = "1s")]
    interval: Time,
    /// Print one screen as text instead, for example where there is no terminal.
    #[arg(long)]
    once: bool,
    /// The columns and rows of that screen.
    #[arg(long, value_name = "COLUMNSxROWS", requires = "once", value_parser = size)]
    size: Option<(u16, u16)>,
    /// The panel of that screen, by its key.
    #[arg(long, value_name = "KEY", requires = "once", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=7))]
    panel: u16,
}

/// Shows the run.
pub fn run(args: &WatchArgs) -> Result<()> {
    if args.once {
        let (columns, rows) = args.size.unwrap_or(SIZE);
        say(screen_text(&args.run, columns, rows, args.panel.into())?.trim_end());
        return Ok(());
    }
    if args.interval.0 < Duration::from_millis(100) {
        return Err(
            Error::input("--interval is less than 100 ms").hint("give a second, such as 1s")
        );
    }
    watch(&args.run, args.interval.0)
}

fn size(text: &str) -> std::result::Result<(u16, u16), String> {
    let parsed = text.split_once('x').and_then(|(columns, rows)| {
        let size = (columns.parse().ok()?, rows.parse().ok()?);
        (size.0 > 0 && size.1 > 0 && size.0 <= 1000 && size.1 <= 1000).then_some(size)
    });
    parsed.ok_or_else(|| "give columns and rows, each at most 1000, such as 80x24".into())
}
