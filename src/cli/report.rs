//! `hpctrain report`: a page about runs, a drawing of their losses, a table of their steps.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::error::{Error, Result};
use crate::report::{csv, page, svg};
use crate::run_records::RunRecords;
use crate::telemetry::{bytes, say};

/// Make a page about runs: curves, where time went, ranks, checkpoints, evaluations, settings
///
/// It is one file that needs no network: it opens from disk, in light and dark, and can be printed.
/// Several runs are shown side by side.
#[derive(Args)]
pub struct ReportArgs {
    /// Directories of runs, such as runs/gpt-char; a run may still be under way
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The page; report.html unless another output is asked for
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Draw the losses
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write all steps as comma-separated values
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

pub fn run(args: &ReportArgs) -> Result<()> {
    let mut seen: Vec<PathBuf> = Vec::new();
    for path in &args.runs {
        let whole = std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        if seen.contains(&whole) {
            return Err(
                Error::input(format!("{} is given twice", path.display())).hint("leave one out")
            );
        }
        seen.push(whole);
    }
    let runs = args.runs.iter().map(|path| RunRecords::open(path)).collect::<Result<Vec<_>>>()?;
    for run in &runs {
        run.notes.iter().for_each(|note| log::warn!("{}: {note}", run.path.display()));
    }
    let is_page_wanted = args.out.is_some() || (args.svg.is_none() && args.csv.is_none());
    if is_page_wanted {
        let path = args.out.clone().unwrap_or_else(|| "report.html".into());
        let page = page(&runs)?;
        write(&path, |file| {
            file.write_all(page.as_bytes()).map_err(|e| Error::io("write", &path, e))
        })?;
        say(format_args!("report in {} ({})", path.display(), bytes(page.len())));
    }
    if let Some(path) = &args.svg {
        write(path, |file| {
            file.write_all(svg::losses(&runs).as_bytes()).map_err(|e| Error::io("write", path, e))
        })?;
        say(format_args!("losses in {}", path.display()));
    }
    if let Some(path) = &args.csv {
        write(path, |file| csv::write(&runs, file))?;
        say(format_args!("steps in {}", path.display()));
    }
    Ok(())
}

/// Writes a file whole, or leaves the one that was there. A pipe or a device is written as it is.
fn write(path: &Path, content: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let refused =
        |e| Error::io("write", path, e).hint("give a file in a directory that can be written");
    let is_special = std::fs::metadata(path).is_ok_and(|there| !there.is_file());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let place = if is_special {
        path.into()
    } else {
        path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
    };
    let whole = || {
        let mut file = BufWriter::new(File::create(&place).map_err(refused)?);
        content(&mut file)?;
        file.flush().map_err(refused)?;
        if is_special { Ok(()) } else { std::fs::rename(&place, path).map_err(refused) }
    };
    whole().inspect_err(|_| {
        if !is_special {
            // Where it was never made there is nothing to remove.
            let _ = std::fs::remove_file(&place);
        }
    })
}
