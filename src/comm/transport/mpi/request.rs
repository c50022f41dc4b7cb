//! Single MPI messages as non-blocking requests.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use super::ffi;

use super::calls::{check, count};
use crate::transport::{GroupRanks, Payload};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::DeviceSpan;

/// Bytes of the longest message: MPI's counts have 31 bits.
pub const LONGEST: usize = 1 << 30;

/// The longest time that a message of a revoked communicator takes to end.
const LET_GO_TIMEOUT: Duration = Duration::from_secs(10);

/// The number of tags that MPI guarantees: 0 to 32767.
const TAGS: usize = 1 << 15;

/// Memory that MPI reads or writes: the host's, or a device's if the library is CUDA-aware.
#[derive(Clone, Copy)]
pub struct Bytes {
    at: *mut u8,
    pub len: usize,
}

impl Bytes {
    /// Divides the memory into messages of at most [`LONGEST`] bytes.
    pub fn messages(self) -> impl Iterator<Item = Bytes> {
        (0..self.len).step_by(LONGEST).map(move |start| Bytes {
            at: self.at.wrapping_add(start),
            len: LONGEST.min(self.len - start),
        })
    }
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Self {
        Self { at: bytes.as_ptr().cast_mut(), len: bytes.len() }
    }
}

impl From<&mut [u8]> for Bytes {
    fn from(bytes: &mut [u8]) -> Self {
        Self { at: bytes.as_mut_ptr(), len: bytes.len() }
    }
}

impl From<DeviceSpan<'_>> for Bytes {
    fn from(span: DeviceSpan<'_>) -> Self {
        let at = std::ptr::with_exposed_provenance_mut(span.address());
        Self { at, len: span.words() * size_of::<f32>() }
    }
}

impl From<Payload<'_>> for Bytes {
    fn from(payload: Payload<'_>) -> Self {
        match payload {
            Payload::Host(bytes) => bytes.into(),
            Payload::Device(span) => span.into(),
        }
    }
}

/// A message in flight. It must be tested until it is complete.
pub struct MpiRequest(ffi::MPI_Request);

/// The two kinds of messages. Messages of one kind arrive in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageKind {
    /// A message of an exchange that both ranks are in.
    Exchange,
    /// A message that both ranks have posted.
    Posted,
}

/// Returns the tag of a group and kind. Messages between two ranks with the same tag arrive in
/// order.
fn tag(group: &GroupRanks, kind: MessageKind) -> Result<c_int> {
    count((2 * group.id + usize::from(kind == MessageKind::Posted)) % TAGS)
}

impl MpiRequest {
    /// Starts sending one message of at most [`LONGEST`] bytes.
    ///
    /// # Safety
    /// The bytes stay where they are, unchanged, until the request is complete.
    pub unsafe fn send(
        world: ffi::MPI_Comm,
        group: &GroupRanks,
        to: usize,
        kind: MessageKind,
        bytes: impl Into<Bytes>,
    ) -> Result<Self> {
        let bytes = bytes.into();
        let len = count(bytes.len)?;
        let to = count(group.ranks[to])?;
        let tag = tag(group, kind)?;
        // SAFETY: the caller keeps the bytes; the request is a live local.
        let (code, raw) = unsafe {
            let mut raw = ffi::request_null();
            let from = bytes.at.cast_const().cast();
            (ffi::MPI_Isend(from, len, ffi::uint8_t(), to, tag, world, &mut raw), raw)
        };
        check(code, "MPI_Isend")?;
        Ok(Self(raw))
    }

    /// Starts receiving one message of at most [`LONGEST`] bytes.
    ///
    /// # Safety
    /// Nothing touches the bytes until the request is complete.
    pub unsafe fn receive(
        world: ffi::MPI_Comm,
        group: &GroupRanks,
        from: usize,
        kind: MessageKind,
        bytes: impl Into<Bytes>,
    ) -> Result<Self> {
        let bytes = bytes.into();
        let len = count(bytes.len)?;
        let from = count(group.ranks[from])?;
        let tag = tag(group, kind)?;
        // SAFETY: the caller keeps the bytes; the request is a live local.
        let (code, raw) = unsafe {
            let mut raw = ffi::request_null();
            let to = bytes.at.cast();
            (ffi::MPI_Irecv(to, len, ffi::uint8_t(), from, tag, world, &mut raw), raw)
        };
        check(code, "MPI_Irecv")?;
        Ok(Self(raw))
    }

    /// Waits until the request is complete, with success or not, on a communicator that was revoked.
    ///
    /// # Errors
    /// Returns an error if MPI does not let go of the memory in time.
    pub fn let_go(&mut self) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < LET_GO_TIMEOUT {
            match self.test() {
                Ok(None) => std::thread::yield_now(),
                // An error completes the request, too.
                Ok(Some(_)) | Err(_) => return Ok(()),
            }
        }
        Err(Error::comm("MPI still uses the memory of a message after a rank was lost"))
    }

    /// Tests the request. Returns the number of bytes received once it is complete.
    pub fn test(&mut self) -> Result<Option<usize>> {
        let mut done = 0;
        // SAFETY: a status is plain integers that MPI overwrites; out-parameters are live locals.
        let (code, status) = unsafe {
            let mut status = std::mem::zeroed();
            (ffi::MPI_Test(&mut self.0, &mut done, &mut status), status)
        };
        check(code, "MPI_Test")?;
        if done == 0 {
            return Ok(None);
        }
        let mut bytes = 0;
        // SAFETY: the status is one that MPI wrote; the out-parameter is a live local.
        let code = unsafe { ffi::MPI_Get_count(&status, ffi::uint8_t(), &mut bytes) };
        check(code, "MPI_Get_count")?;
        Ok(Some(usize::try_from(bytes).unwrap_or(0)))
    }
}
