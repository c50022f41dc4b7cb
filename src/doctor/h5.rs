//! Checks of HDF5 (its version, and whether it writes, reads and locks files in the run root) and of
//! the bundled data.

use std::fs::{File, TryLockError};
use std::path::Path;

use super::Finding;
use super::probe::ProbeReporter;
use super::run_root::{nearest, scratch};
use crate::data::hdf5_open;
use crate::data::{DataSpec, Dataset, Split, bundled, one_line};
use crate::error::{Error, Result};
use crate::telemetry::grouped;

/// The environment variable that sets whether HDF5 locks files.
const LOCKING: &str = "HDF5_USE_FILE_LOCKING";

/// The bundled data, and the context length to open it with.
const BUNDLED: &str = "tiny-shakespeare";
const CONTEXT: usize = 64;

pub(super) fn probe(reporter: &ProbeReporter, run_root: &Path) {
    reporter.attempt("hdf5", || {
        let (major, minor, patch) = hdf5::library_version();
        let safe = if hdf5::is_library_threadsafe() {
            "thread-safe"
        } else {
            "not thread-safe: threads take turns"
        };
        Finding::ok(format!("{major}.{minor}.{patch}, {safe}"))
    });
    reporter.attempt("hdf5 files", || {
        let dir = nearest(run_root);
        let locks = round_trip(&dir).map(|locks| match (locks, std::env::var(LOCKING)) {
            (true, _) => "locked while they are open".to_owned(),
            (false, Ok(value)) => format!("not locked ({LOCKING}={value})"),
            (false, Err(_)) => "not locked".to_owned(),
        });
        locks.map(|locks| format!("written and read in {}, {locks}", dir.display())).into()
    });
}

/// Writes a file and reads it back; returns true if HDF5 locks a file that it writes.
fn round_trip(dir: &Path) -> Result<bool> {
    let folder = scratch(dir)?;
    let path = folder.path().join("probe.h5");
    let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let locked = write(&path, &values).map_err(|e| failed("write", &path, &e))?;
    if read(&path).map_err(|e| failed("read", &path, &e))? != values {
        return Err(Error::io("read", &path, "the values differ from those written")
            .hint("choose another --run-root"));
    }
    Ok(locked)
}

/// Writes values into a new file; returns true if HDF5 locks it.
fn write(path: &Path, values: &[f32]) -> hdf5::Result<bool> {
    let file = hdf5_open::create(path)?;
    file.new_dataset::<f32>().shape(values.len()).create("values")?.write_raw(values)?;
    file.flush()?;
    Ok(is_locked(path))
}

/// Returns the values in a file.
fn read(path: &Path) -> hdf5::Result<Vec<f32>> {
    hdf5_open::open(path)?.dataset("values")?.read_raw::<f32>()
}

/// Returns the error of an action of HDF5, with a hint.
fn failed(action: &str, path: &Path, e: &hdf5::Error) -> Error {
    let detail = one_line(e);
    let hint = if detail.contains("lock") {
        format!("set {LOCKING}=FALSE in the environment of all ranks")
    } else {
        "check free space and permissions there".to_owned()
    };
    Error::io(action, path, detail).hint(hint)
}

/// Returns true if a process holds a lock on a file, as HDF5 does; false if the file system does
/// not support locks.
fn is_locked(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
}

/// Unpacks the bundled data and opens it.
pub(super) fn probe_data(reporter: &ProbeReporter) {
    reporter.attempt("bundled data", || {
        let opened = bundled::locate(BUNDLED).and_then(|folder| {
            let dataset = Dataset::open(&DataSpec::new(&folder), Split::Train, CONTEXT)?;
            Ok(format!("{BUNDLED}, {} tokens, in {}", grouped(dataset.tokens()), folder.display()))
        });
        opened.into()
    });
}
