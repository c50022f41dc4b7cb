//! Limits on decompression: a small file may decode to more than any memory holds.
//!
//! A decoder reads no more bytes than a header declares. The declared size itself is refused if it
//! is more than 64 MiB and more than 256 times that of the file.

use std::io::{ErrorKind, Read};

use hpctrain_base::error::{Error, Result};

/// Decoded bytes that are allowed for a file of any size.
const ALWAYS: u64 = 64 << 20;

/// The largest number of decoded bytes per stored byte. Images and tables have less than a tenth of
/// it; deflate reaches 1,032.
const RATIO: u64 = 256;

/// Returns an error if `decoded` bytes are too many for content of `stored` bytes.
pub(super) fn check(decoded: u64, stored: u64) -> Result<(), String> {
    if decoded <= ALWAYS || decoded <= stored.saturating_mul(RATIO) {
        return Ok(());
    }
    Err(format!("it decodes to {decoded} bytes from {stored}, more than {RATIO} times as many"))
}

/// Why a file cannot be decoded.
#[derive(Debug)]
pub(super) enum Fault {
    /// The content is invalid; the text says how.
    Content(String),
    /// Another error occurred.
    Other(Error),
}

impl From<String> for Fault {
    fn from(fault: String) -> Self {
        Self::Content(fault)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// The number of bytes that are decoded at once.
const PIECE: usize = 1 << 18;

/// Decodes content for which a header declares `declared` bytes, stored in `stored` bytes, a block
/// at a time. Returns the number of decoded bytes, which may be less.
///
/// # Errors
/// Returns an error if the content is longer than declared or exceeds the limits, if the decoder
/// fails, or if `each` does.
pub(super) fn decode(
    mut from: impl Read,
    declared: u64,
    stored: u64,
    mut each: impl FnMut(&[u8]) -> Result<()>,
) -> Result<u64, Fault> {
    check(declared, stored)?;
    let mut piece = vec![0; PIECE];
    let mut decoded = 0;
    loop {
        let count = match from.read(&mut piece) {
            Ok(0) => return Ok(decoded),
            Ok(count) => count,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(Fault::Content(e.to_string())),
        };
        decoded += count as u64;
        if decoded > declared {
            return Err(Fault::Content(format!(
                "it decodes to more than the {declared} bytes that its header declares"
            )));
        }
        each(&piece[..count])?;
    }
}

/// Returns the number of elements of a shape, or of a row of it; `None` if 16 bytes for each of
/// them, counting extents of 0 as 1, would overflow.
pub(super) fn extent(shape: &[usize]) -> Option<usize> {
    // An extent of 0 would hide an overflow of the others, which are multiplied without it
    // elsewhere.
    shape.iter().try_fold(16usize, |all, extent| all.checked_mul((*extent).max(1)))?;
    Some(shape.iter().product())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns all decoded bytes.
    fn decoded(from: &mut dyn Read, declared: u64, stored: u64) -> Result<Vec<u8>, Fault> {
        let mut bytes = Vec::new();
        let count = decode(from, declared, stored, |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        assert_eq!(count, bytes.len() as u64);
        Ok(bytes)
    }

    /// Returns the fault of content that is refused.
    fn refused(from: &mut dyn Read, declared: u64, stored: u64) -> String {
        match decoded(from, declared, stored) {
            Err(Fault::Content(what)) => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn more_than_declared_is_not_read() {
        // An endless input: only the limit ends it.
        let error = refused(&mut std::io::repeat(0), 1000, 10);
        assert!(error.contains("more than the 1000 bytes that its header declares"), "{error}");
        assert_eq!(decoded(&mut &[7; 1000][..], 1000, 10).unwrap(), [7; 1000]);
        assert_eq!(decoded(&mut &[7; 10][..], 1000, 10).unwrap().len(), 10);
        let error = refused(&mut std::io::repeat(0), 1 << 40, 1 << 20);
        assert!(error.contains("decodes to 1099511627776 bytes from 1048576"), "{error}");
        check(1 << 40, 1 << 32).unwrap();
        check(ALWAYS, 1).unwrap();
        assert!(check(u64::MAX, u64::MAX).is_ok() && check(ALWAYS + 1, 1).is_err());
    }

    #[test]
    fn products_do_not_overflow() {
        assert_eq!((extent(&[3, 4]), extent(&[0, 5]), extent(&[])), (Some(12), Some(0), Some(1)));
        assert_eq!(extent(&[0, 1 << 40, 1 << 40]), None);
        assert_eq!(extent(&[1 << 62]), None);
    }
}
