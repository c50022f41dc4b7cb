//! HDF5 files that no other program inherits.
//!
//! HDF5 opens files without close-on-exec and locks them, and a lock belongs to every process with the descriptor. A
//! program that is started while a file is open would hold the lock after this process has closed it, and nobody could
//! open the file before that program ends. Here descriptors are marked as soon as they are open.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::ptr;

use hdf5::file::FileBuilder;
use hdf5::plist::file_access::FileDriver;
use hdf5::{File, Result};
use hdf5_sys::h5f::H5Fget_vfd_handle;
use hdf5_sys::h5p::H5P_DEFAULT;

/// Creates a file, in the place of one that is there.
///
/// # Errors
/// HDF5's own.
pub fn create(path: &Path) -> Result<File> {
    close_on_exec(File::create(path)?)
}

/// Opens a file for reading.
///
/// # Errors
/// HDF5's own.
pub fn open(path: &Path) -> Result<File> {
    open_with(&File::with_options(), path)
}

/// Opens a file for reading, with options.
///
/// # Errors
/// HDF5's own.
pub fn open_with(options: &FileBuilder, path: &Path) -> Result<File> {
    close_on_exec(options.open(path)?)
}

/// Marks the descriptor of a file. Drivers other than the default one, which the environment can name, are left alone.
fn close_on_exec(file: File) -> Result<File> {
    if !matches!(file.access_plist()?.driver(), FileDriver::Sec2) {
        return Ok(file);
    }
    let mut handle: *mut c_void = ptr::null_mut();
    // SAFETY: the file is open, and `handle` is where the pointer to its descriptor goes.
    let status = hdf5::sync::sync(|| unsafe { H5Fget_vfd_handle(file.id(), H5P_DEFAULT, &raw mut handle) });
    if status < 0 || handle.is_null() {
        return Err("HDF5 does not tell the descriptor of a file".into());
    }
    // SAFETY: this driver's handle points to the descriptor, which stays open as long as the file.
    let descriptor = unsafe { BorrowedFd::borrow_raw(*handle.cast::<i32>()) };
    rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::CLOEXEC)
        .map_err(|e| hdf5::Error::from(format!("cannot mark the descriptor of a file: {e}")))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    /// Far more time than a program has the files of the one that starts it (from fork to exec: other tests start some),
    /// far less than the programs of this test live.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// A program that is started while a file is being written lives on, and has nothing of it.
    #[test]
    fn a_program_that_is_started_meanwhile_holds_no_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.h5");
        let file = create(&path).unwrap();
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        drop(file);
        let opened = soon(|| open(&path));
        let again = soon(|| File::append(&path));
        let kept = open(&path).unwrap();
        let mut other = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        drop(kept);
        let written = soon(|| create(&path));
        for child in [&mut child, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        opened.and(again).and(written).unwrap();
    }

    /// Opens a file and closes it, as soon as that succeeds.
    fn soon(open: impl Fn() -> Result<File>) -> Result<()> {
        let started = Instant::now();
        loop {
            let opened = open().map(drop);
            if opened.is_ok() || started.elapsed() > PATIENCE {
                return opened;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
