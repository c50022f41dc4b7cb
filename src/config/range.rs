//! Errors for values outside of their range.

use std::fmt::Display;

use hpctrain_base::error::Error;

/// Returns an error for a key whose value is outside of its range `expected`.
pub fn out_of_range(key: &str, value: impl Display, expected: &str) -> Error {
    Error::input(format!("{key} = {value} is out of range"))
        .hint(format!("{key} must be {expected}"))
}
