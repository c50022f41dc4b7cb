//! The checkpoints of a run as a table for people.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use crate::checkpoint::directory::name_of;
use crate::checkpoint::{Checkpoints, Manifest};
use crate::data::inspect::table;
use crate::error::{Error, Kind, Result};
use crate::telemetry::bytes;
use crate::telemetry::evaluations::{self, Over};

/// A line for every published checkpoint, ascending by step.
///
/// # Errors
/// The directory, the evaluations or the leases cannot be read.
pub fn list(checkpoints: &Checkpoints) -> Result<String> {
    let evaluated = checkpoints.evaluated()?;
    if let Err(e) = evaluated.all() {
        log::warn!("{}", e.to_string().replace('\n', "; "));
    }
    let loss = match evaluations::over(evaluated.known()) {
        Over::Validation => "validation loss",
        Over::Training => "training loss",
    };
    let mut rows = vec![["step", "size", "written", loss, "marks", "id"].map(str::to_owned)];
    for step in checkpoints.steps()? {
        let found = checkpoints.sound(step);
        let loss = match &found {
            Ok(manifest) => evaluations::loss_of(evaluated.known(), step, &manifest.id),
            Err(_) => evaluations::loss(evaluated.known(), step),
        };
        let loss = loss.map_or_else(|| "-".into(), |loss| format!("{loss:.4}"));
        let marks = marks(checkpoints, step, found.as_ref().err())?;
        let [size, written, id] = match found {
            Ok(manifest) => [bytes(manifest.bytes() as usize), written(&manifest), manifest.id],
            Err(_) => ["-"; 3].map(str::to_owned),
        };
        rows.push([step.to_string(), size, written, loss, marks, id]);
    }
    Ok(match rows.len() {
        1 => format!("no checkpoint in {}", checkpoints.root().display()),
        _ => table(&rows),
    })
}

/// Marks of a checkpoint: latest, best, leased, and its fault.
fn marks(checkpoints: &Checkpoints, step: u64, fault: Option<&Error>) -> Result<String> {
    let name = name_of(step);
    let linked = |link: &Path| std::fs::read_link(link).is_ok_and(|target| target.as_os_str() == name.as_str());
    let mut marks = Vec::new();
    for (mark, holds) in [
        ("latest", linked(&checkpoints.latest())),
        ("best", linked(&checkpoints.best())),
        ("leased", checkpoints.leases().holds(&name)?),
    ] {
        marks.extend(holds.then(|| mark.to_string()));
    }
    marks.extend(fault.map(|e| match e.kind() {
        Kind::Damaged => format!("damaged: {}", e.message()),
        _ => e.message().to_string(),
    }));
    Ok(marks.join(", "))
}

/// Time at which a checkpoint was written, in UTC.
pub(super) fn written(manifest: &Manifest) -> String {
    let time = Duration::try_from_secs_f64(manifest.origin.time).ok().and_then(|since| UNIX_EPOCH.checked_add(since));
    time.map_or_else(|| "-".into(), |time| humantime::format_rfc3339_seconds(time).to_string())
}
