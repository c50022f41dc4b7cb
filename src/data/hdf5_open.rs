//! Creation and opening of HDF5 files: in a format with checksums, and with descriptors that child
//! processes do not inherit.
//!
//! Files are written in the format of HDF5 1.8 (superblock 2), whose headers, groups and heaps have
//! checksums: a damaged header is refused instead of being followed. The newer format of 1.10 is
//! not used: it marks a file as open while it is written, so that the file of a killed writer is
//! refused until somebody clears the mark, and HDF5 1.8 does not read it. Groups and datasets have
//! no times: the same content is the same bytes.
//!
//! HDF5 opens files without close-on-exec and locks them, and a lock belongs to every process with
//! the descriptor. A program that is started while a file is open would hold the lock after this
//! process has closed it, and no process could open the file before that program ends. Here
//! descriptors are marked close-on-exec as soon as they are open.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::ptr;

use hdf5::file::FileBuilder;
use hdf5::plist::file_access::{FileDriver, LibraryVersion};
use hdf5::{File, Group, Result};
use hdf5_sys::h5f::H5Fget_vfd_handle;
use hdf5_sys::h5p::H5P_DEFAULT;

/// Creates a file, or overwrites the one that is there.
///
/// # Errors
/// Returns an error if HDF5 does.
pub fn create(path: &Path) -> Result<File> {
    let mut options = File::with_options();
    options.with_fapl(|fapl| fapl.libver_bounds(LibraryVersion::V18, LibraryVersion::V18));
    // The root group.
    options.with_fcpl(|fcpl| fcpl.obj_track_times(false));
    close_on_exec(options.create(path)?)
}

/// Creates a group in a file that is being written.
///
/// # Errors
/// Returns an error if HDF5 does.
pub fn create_group(parent: &Group, name: &str) -> Result<Group> {
    parent.create_group_builder().obj_track_times(false).create(name)
}

/// Opens a file for reading.
///
/// # Errors
/// Returns an error if HDF5 does.
pub fn open(path: &Path) -> Result<File> {
    open_with(&File::with_options(), path)
}

/// Opens a file for reading with options.
///
/// # Errors
/// Returns an error if HDF5 does.
pub fn open_with(options: &FileBuilder, path: &Path) -> Result<File> {
    close_on_exec(options.open(path)?)
}

/// Marks the descriptor of a file close-on-exec. Drivers other than the default one, which the
/// environment can select, are left unchanged.
fn close_on_exec(file: File) -> Result<File> {
    if !matches!(file.access_plist()?.driver(), FileDriver::Sec2) {
        return Ok(file);
    }
    let mut handle: *mut c_void = ptr::null_mut();
    // SAFETY: the file is open, and `handle` receives the pointer to its descriptor.
    let status =
        hdf5::sync::sync(|| unsafe { H5Fget_vfd_handle(file.id(), H5P_DEFAULT, &raw mut handle) });
    if status < 0 || handle.is_null() {
        return Err("HDF5 does not return the descriptor of a file".into());
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

    /// Far longer than a forked child keeps its parent's files before exec (other tests start
    /// some), and far shorter than the child processes of this test live.
    const TIMEOUT: Duration = Duration::from_secs(20);

    /// Files have a superblock version with checksums, and no timestamps.
    #[test]
    fn files_are_of_the_format_with_checksums() {
        let folder = tempfile::tempdir().unwrap();
        let first = written(&folder.path().join("a.h5"));
        // The signature, and the version of the superblock.
        assert_eq!(first[..9], *b"\x89HDF\r\n\x1a\n\x02");
        // HDF5 stamps whole seconds where it stamps at all.
        std::thread::sleep(Duration::from_millis(1100));
        assert!(first == written(&folder.path().join("b.h5")));
    }

    /// Writes a file with a dataset in a group, and returns its bytes.
    fn written(path: &Path) -> Vec<u8> {
        let file = create(path).unwrap();
        let group = create_group(&file, "group").unwrap();
        group
            .new_dataset::<f32>()
            .shape(3)
            .create("x")
            .unwrap()
            .write_raw(&[1f32, 2.0, 3.0])
            .unwrap();
        file.close().unwrap();
        std::fs::read(path).unwrap()
    }

    /// A program that is started while a file is being written keeps running, and holds no
    /// descriptor of the file.
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

    /// Opens a file and closes it, retrying until that succeeds or the time is over.
    fn soon(open: impl Fn() -> Result<File>) -> Result<()> {
        let started = Instant::now();
        loop {
            let opened = open().map(drop);
            if opened.is_ok() || started.elapsed() > TIMEOUT {
                return opened;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
