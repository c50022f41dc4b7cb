//! `hpctrain report`: writes an HTML report of runs, an SVG chart of their losses, or a CSV table
//! of their steps.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::error::{Error, Result};
use crate::report::{csv, page, svg};
use crate::run_records::RunRecords;
use crate::telemetry::{bytes, say};

/// Write an HTML report of runs: curves, time breakdown, ranks, checkpoints, evaluations, settings
///
/// The report is one self-contained file that opens offline. Several runs are shown side by side.
#[derive(Args)]
pub struct ReportArgs {
    /// Directories of runs, such as runs/gpt-char; runs may still be in progress
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Write the HTML report to this file [default: report.html, unless --svg or --csv is given]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a chart of the losses to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write all steps as comma-separated values to this file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// Writes the outputs that the arguments ask for.
pub fn run(args: &ReportArgs) -> Result<()> {
    let mut seen: Vec<PathBuf> = Vec::new();
    for path in &args.runs {
        let canonical = std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        if seen.contains(&canonical) {
            return Err(Error::input(format!("{} is given twice", path.display()))
                .hint("give each run once"));
        }
        seen.push(canonical);
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

/// Writes a file atomically: on an error, an existing file stays as it was. A pipe or a device is
/// written directly.
fn write(path: &Path, content: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let refused = |e: std::io::Error| {
        Error::io("write", path, e).hint("give a file in a directory that can be written")
    };
    let is_special = std::fs::metadata(path).is_ok_and(|there| !there.is_file());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let target = if is_special {
        path.into()
    } else {
        path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
    };
    let mut written = write_directly(&target, content, refused);
    if written.is_ok() && !is_special {
        written = std::fs::rename(&target, path).map_err(refused);
    }
    written.inspect_err(|_| {
        if !is_special {
            // This fails if the file was never created.
            let _ = std::fs::remove_file(&target);
        }
    })
}

/// Writes a file in place; `refused` converts the errors of the file system.
fn write_directly(
    path: &Path,
    content: impl FnOnce(&mut BufWriter<File>) -> Result<()>,
    refused: impl Fn(std::io::Error) -> Error,
) -> Result<()> {
    let mut file = BufWriter::new(File::create(path).map_err(&refused)?);
    content(&mut file)?;
    file.flush().map_err(refused)
}
