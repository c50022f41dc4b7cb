//! The kernel's copy of a file: the disk begins before the file is written to its end, and a file
//! is read back from the disk.

use std::fs::File;
use std::path::Path;

use rustix::fs::{Advice, fadvise};

/// Asks the kernel to start writing `len` bytes from `offset` on to the disk. It is free not to,
/// and an error will be seen by the `fsync` that follows all writes.
pub fn start(file: &File, offset: u64, len: u64) {
    #[cfg(target_os = "linux")]
    if let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) {
        use std::os::fd::AsRawFd as _;
        // SAFETY: the call takes no memory, and the descriptor is open as long as `file` is
        // borrowed.
        unsafe {
            libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE)
        };
    }
}

/// Asks the kernel to drop its copy of a file that is durable, so that the next read comes from the
/// disk or from the file server. Local file systems and NFS do so. The disk or the server may have
/// a copy of its own in memory, and on tmpfs the copy is the file.
pub fn forget(file: &File, path: &Path) {
    if let Err(e) = fadvise(file, 0, None, Advice::DontNeed) {
        log::warn!(
            "{}: the next read may come from memory rather than from the disk: {e}",
            path.display()
        );
    }
}
