//! Decompression within bounds: a small file may decode to more than any memory holds.
//!
//! A decoder reads no more bytes than a header declares. The declared size itself is refused if it
//! is more than 64 MiB and more than 256 times that of the file.

use std::io::{ErrorKind, Read};

use hpctrain_base::error::{Error, Result};

/// Decoded bytes that a file of any size may have.
const ALWAYS: u64 = 64 << 20;

/// Decoded bytes for each stored one, at most. Images and tables have less than a tenth of it;
/// deflate reaches 1,032.
const RATIO: u64 = 256;

/// Refuses content of `decoded` bytes in `stored` ones, if it is far too much; the error says so.
pub(super) fn check(decoded: u64, stored: u64) -> Result<(), String> {
    if decoded <= ALWAYS || decoded <= stored.saturating_mul(RATIO) {
        return Ok(());
    }
    Err(format!("it decodes to {decoded} bytes from {stored}, more than {RATIO} times as many"))
}

/// Fault of a file that is decoded.
#[derive(Debug)]
pub(super) enum Fault {
    /// Of its content; the text names it.
    Content(String),
    /// Another one.
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

/// Bytes that are decoded at once.
const PIECE: usize = 1 << 18;

/// Decodes content of which a header declares `declared` bytes, in `stored` ones, a piece at a
/// time. Returns the number of bytes, which may be less.
///
/// # Errors
/// It is more than declared, or far too much; the decoder's own; or that of `each`.
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

/// Elements of a shape, or of a row of it; none if any product of its extents, or twice as many
/// words, overflows.
pub(super) fn extent(shape: &[usize]) -> Option<usize> {
    // An extent of 0 makes the product 0, but its neighbours are multiplied by themselves
    // elsewhere.
    shape.iter().try_fold(16usize, |all, extent| all.checked_mul((*extent).max(1)))?;
    Some(shape.iter().product())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_declared_is_not_read() {
        let decoded = |from: &mut dyn Read, declared: u64, stored: u64| {
            let mut bytes = Vec::new();
            let decoded = decode(from, declared, stored, |piece| {
                bytes.extend_from_slice(piece);
                Ok(())
            });
            decoded.map(|count| {
                assert_eq!(count, bytes.len() as u64);
                bytes
            })
        };
        let refused =
            |from: &mut dyn Read, declared: u64, stored: u64| match decoded(from, declared, stored)
            {
                Err(Fault::Content(what)) => what,
                other => panic!("{other:?}"),
            };
        // Without an end: only the bound ends it.
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
