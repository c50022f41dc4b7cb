//! Counts, strings and return codes of MPI calls.

use std::ffi::{CStr, c_char, c_int};

use super::ffi;

use super::ulfm::is_loss;
use hpctrain_base::error::{Error, Result};

/// Bytes for any string that MPI may write; MPICH's version string is the longest.
const TEXT: usize = 8192;

/// Converts a count to MPI's type.
///
/// # Errors
/// Returns an error if it has more than 31 bits.
pub(super) fn count(len: usize) -> Result<c_int> {
    c_int::try_from(len).map_err(|_| Error::comm(format!("MPI cannot count {len} elements")))
}

/// Converts a count or number from MPI, which is never negative.
pub(super) fn count_up(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// Reads a string that MPI writes.
pub(super) fn text(write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> String {
    let mut text = [0 as c_char; TEXT];
    let mut len = 0;
    if write(text.as_mut_ptr(), &mut len) != 0 {
        return "unknown".into();
    }
    text[TEXT - 1] = 0;
    // SAFETY: the array outlives the borrow and ends in a zero.
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}

/// Turns a return code into an error.
pub(super) fn check(code: c_int, call: &str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: MPI is initialised whenever one of its codes is checked; the buffer has room for any
    // text.
    let reason = text(|to, len| unsafe { ffi::MPI_Error_string(code, to, len) });
    let message = format!("{call} failed: {reason}");
    Err(if is_loss(code) { Error::lost(message) } else { Error::comm(message) })
}
