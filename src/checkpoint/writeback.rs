//! Lets the disk begin before the file is written to its end.

use std::fs::File;

/// Asks the kernel to start writing `len` bytes from `offset` on to the disk. It is free not to, and an error will be
/// seen by the `fsync` that follows all writes.
pub fn start(file: &File, offset: u64, len: u64) {
    #[cfg(target_os = "linux")]
    if let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) {
        use std::os::fd::AsRawFd as _;
        // SAFETY: the call takes no memory, and the descriptor is open as long as `file` is borrowed.
        unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE) };
    }
}
