//! Opens HDF5 files that a test reads or changes itself.

use std::path::Path;
use std::time::{Duration, Instant};

use hdf5::File;

/// Opens a file for reading.
pub fn open(path: impl AsRef<Path>) -> File {
    unlocked(|| File::open(&path))
}

/// Opens a file for changes.
pub fn edit(path: impl AsRef<Path>) -> File {
    unlocked(|| File::open_rw(&path))
}

/// Retries while the file is locked: a program that another test starts at that moment holds all
/// locks of this process until its exec.
fn unlocked(open: impl Fn() -> hdf5::Result<File>) -> File {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        match open() {
            Err(e) if e.to_string().contains("temporarily unavailable") && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            opened => return opened.unwrap(),
        }
    }
}
