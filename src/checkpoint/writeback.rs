//! Control of the page cache: writeback starts before a file is complete, and files are read back
//! from the disk. `sync_file_range` is called by `unsafe` code; it accesses no memory.

use std::fs::File;
use std::path::Path;

use rustix::fs::{Advice, fadvise};

/// Asks the kernel to start writing `len` bytes from `offset` to the disk. This is a hint; the
/// `fsync` that follows all writes reports errors.
pub fn start(file: &File, offset: u64, len: u64) {
    #[cfg(target_os = "linux")]
    if let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) {
        use std::os::fd::AsRawFd as _;
        // SAFETY: the call accesses no memory, and the descriptor is open while `file` is borrowed.
        unsafe {
            libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE)
        };
    }
}

/// Asks the kernel to drop a durable file from its page cache, so that the next read comes from the
/// disk or the file server. Local file systems and NFS do so. The disk or the server may still
/// cache it, and on tmpfs the cache is the file.
pub fn forget(file: &File, path: &Path) {
    if let Err(e) = fadvise(file, 0, None, Advice::DontNeed) {
        log::warn!(
            "{}: the next read may come from memory rather than from the disk: {e}",
            path.display()
        );
    }
}
