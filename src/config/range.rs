//! Values outside their range.

use std::fmt::Display;

use hpctrain_base::error::Error;

/// The refusal of a key's value, where others are `wanted`.
pub fn out_of_range(key: &str, value: impl Display, wanted: &str) -> Error {
    Error::input(format!("{key} = {value} is out of range")).hint(format!("{key} must be {wanted}"))
}
