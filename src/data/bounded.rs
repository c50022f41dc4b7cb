//! Decompression within bounds: a small file may decode to more than any memory holds.
//!
//! A decoder reads as many bytes as a header declares, and one more tells that there are others. The declared size itself is
//! refused if it is more than 64 MiB and more than 256 times that of the file.

use std::io::Read;

/// Decoded bytes that a file of any size may have.
const ALWAYS: u64 = 64 << 20;

/// Decoded bytes for each stored one, at most. Images and tables have less than a tenth of it; deflate reaches 1,032.
const RATIO: u64 = 256;

/// Refuses content of `decoded` bytes in `stored` ones, if it is far too much; the error says so.
pub(super) fn check(decoded: u64, stored: u64) -> Result<(), String> {
    if decoded <= ALWAYS || decoded <= stored.saturating_mul(RATIO) {
        return Ok(());
    }
    Err(format!("it decodes to {decoded} bytes from {stored}, more than {RATIO} times as many"))
}

/// Decodes content of which a header declares `declared` bytes, in `stored` ones.
///
/// # Errors
/// It is more than declared, or far too much, or the decoder's own; the error names the fault. Less is no error.
pub(super) fn read(from: impl Read, declared: u64, stored: u64) -> Result<Vec<u8>, String> {
    check(declared, stored)?;
    // Memory grows with the bytes that come, whatever is declared.
    let mut decoded = Vec::with_capacity(declared.min(stored.saturating_mul(4)) as usize);
    from.take(declared.saturating_add(1)).read_to_end(&mut decoded).map_err(|e| e.to_string())?;
    match decoded.len() as u64 > declared {
        true => Err(format!("it decodes to more than the {declared} bytes that its header declares")),
        false => Ok(decoded),
    }
}

/// Elements of a shape, or of a row of it; none if any product of its extents, or twice as many words, overflows.
pub(super) fn extent(shape: &[usize]) -> Option<usize> {
    // An extent of 0 makes the product 0, but its neighbours are multiplied by themselves elsewhere.
    shape.iter().try_fold(16usize, |all, extent| all.checked_mul((*extent).max(1)))?;
    Some(shape.iter().product())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_declared_is_not_read() {
        // Without an end: only the bound ends it.
        let error = read(std::io::repeat(0), 1000, 10).unwrap_err();
        assert!(error.contains("more than the 1000 bytes that its header declares"), "{error}");
        assert_eq!(read(&[7; 1000][..], 1000, 10).unwrap(), [7; 1000]);
        assert_eq!(read(&[7; 10][..], 1000, 10).unwrap().len(), 10);
        let error = read(std::io::repeat(0), 1 << 40, 1 << 20).unwrap_err();
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
