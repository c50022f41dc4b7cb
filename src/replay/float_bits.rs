//! Serialization of floats as bits: JSON has no NaN and infinities.

use serde::{Deserialize as _, Deserializer, Serializer};

/// Serializes the bits of a float.
///
/// # Errors
/// Returns an error if the serializer does.
pub fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(value.to_bits())
}

/// Deserializes a float from its bits.
///
/// # Errors
/// Returns an error if the value is not an integer.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    u64::deserialize(from).map(f64::from_bits)
}
