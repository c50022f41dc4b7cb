//! Matmul algorithms that are chosen by measurement, and the keys of the matmuls they are chosen
//! for.

use std::fmt;

use serde::{Deserialize, Serialize};

use hpctrain_base::error::Result;

/// The key of a matmul: everything that the choice of its algorithm on one kind of device depends
/// on. The letters are those of [`Gemm`](super::Gemm).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulKey {
    /// The sizes m, n and k.
    pub sizes: [usize; 3],
    /// The leading dimensions of a, b and c as they are stored: elements from one row to the next.
    pub strides: [usize; 3],
    /// Whether a and b are stored transposed.
    pub transposed: [bool; 2],
    /// Whether a matrix of the result's shape is added (beta is 1).
    pub adds: bool,
    /// Whether the matrix that is added is another one than the result.
    pub out_of_place: bool,
    /// The library's number for the epilogue, the operation on the result before it is stored.
    pub epilogue: u32,
    /// Whether the epilogue writes or reads an auxiliary matrix, the input of its function.
    pub keeps: bool,
    /// Bytes of an element of a, b and c: 4 is f32, 2 is bf16.
    pub bytes: [usize; 3],
    /// Whether f32 operands may be rounded to TF32.
    pub tf32: bool,
    /// The alignments in bytes of the addresses of a, of b, and of c and the matrix added to it.
    pub alignments: [u32; 3],
}

impl fmt::Display for MatmulKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([m, n, k], [a, b, c]) =
            (self.sizes, self.bytes.map(|bytes| if bytes == 2 { "bf16" } else { "f32" }));
        write!(f, "{m}×{n}×{k} of {a} and {b} in {c}")
    }
}

/// An opaque description of an algorithm by its library, valid for the same version of the library
/// on the same kind of device. Serialised as 128 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MatmulAlgorithm(pub [u64; 8]);

impl From<MatmulAlgorithm> for String {
    fn from(algorithm: MatmulAlgorithm) -> String {
        algorithm.0.iter().map(|word| format!("{word:016x}")).collect()
    }
}

impl TryFrom<String> for MatmulAlgorithm {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        let wrong = || format!("{text:?} is not an algorithm: expected 128 hexadecimal digits");
        let words: Vec<u64> = text
            .as_bytes()
            .chunks(16)
            .map(|digits| {
                std::str::from_utf8(digits)
                    .ok()
                    .and_then(|digits| u64::from_str_radix(digits, 16).ok())
            })
            .collect::<Option<_>>()
            .filter(|_| text.len() == 128)
            .ok_or_else(wrong)?;
        words.try_into().map(Self).map_err(|_| wrong())
    }
}

/// The algorithm chosen for one matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChosenAlgorithm {
    /// The matmul.
    pub product: MatmulKey,
    /// The algorithm.
    pub algorithm: MatmulAlgorithm,
    /// Its index among the algorithms that the library proposed, the heuristic's best guess first.
    pub place: usize,
}

/// A device whose matmul library offers several algorithms, whose results differ in the last bits.
pub trait MatmulAlgorithms: Sync {
    /// Returns the kind of device and the version of the library: choices are valid for these only.
    fn device_and_version(&self) -> String;

    /// Returns all matmuls run so far for which the library has an algorithm, sorted.
    fn seen(&self) -> Vec<MatmulKey>;

    /// Returns whether the library accepts an algorithm chosen earlier.
    ///
    /// # Errors
    /// Returns an error if the library or the device fails.
    fn accepts(&self, chosen: &ChosenAlgorithm) -> Result<bool>;

    /// Returns the first algorithm of the library's heuristic for a matmul, unmeasured, or `None`
    /// if the library has none.
    ///
    /// # Errors
    /// Returns an error if the library or the device fails.
    fn heuristic(&self, product: &MatmulKey) -> Result<Option<ChosenAlgorithm>>;

    /// Times the algorithms that the library proposes for a matmul, on scratch operands, and
    /// returns the fastest, or `None` if the library has none.
    ///
    /// # Errors
    /// Returns an error if the library or the device fails.
    fn measure(&self, product: &MatmulKey) -> Result<Option<ChosenAlgorithm>>;

    /// Sets the algorithms of these matmuls; others use the library's heuristic.
    fn choose(&self, chosen: &[ChosenAlgorithm]);
}

/// The fraction of the time of the heuristic's choice that another algorithm must save; less is
/// noise.
const WORTH: f64 = 0.02;

/// Returns the index of the algorithm to use, given the seconds that each took: the fastest, or the
/// first, which the library's heuristic prefers, if none is faster by 2 % or more.
pub fn fastest(seconds: &[f64]) -> usize {
    let (place, least) = seconds
        .iter()
        .enumerate()
        .min_by(|(_, a), (_, b)| a.total_cmp(b))
        .map_or((0, 0.0), |(place, least)| (place, *least));
    match seconds.first() {
        Some(first) if least <= first * (1.0 - WORTH) => place,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_algorithm_is_taken_if_it_saves_more_than_noise() {
        assert_eq!(fastest(&[1.0]), 0);
        assert_eq!(fastest(&[1.0, 0.99, 0.985]), 0);
        assert_eq!(fastest(&[1.0, 0.981]), 0);
        assert_eq!(fastest(&[1.0, 0.98]), 1);
        assert_eq!(fastest(&[1.0, 0.97, 0.96, 0.99]), 2);
        // Ties go to the earlier one, which the library's heuristic prefers.
        assert_eq!(fastest(&[1.0, 0.5, 0.5]), 1);
        assert_eq!(fastest(&[2.0, f64::INFINITY, 1.0]), 2);
        assert_eq!(fastest(&[f64::INFINITY, 1.0]), 1);
        assert_eq!(fastest(&[]), 0);
    }

    #[test]
    fn algorithms_are_written_and_read_back() {
        let algorithm = MatmulAlgorithm([0, 1, u64::MAX, 0x0123_4567_89ab_cdef, 4, 5, 6, 7]);
        let text = serde_json::to_string(&algorithm).unwrap();
        assert_eq!(text.len(), 130);
        assert!(text.contains("0123456789abcdef"), "{text}");
        assert_eq!(serde_json::from_str::<MatmulAlgorithm>(&text).unwrap(), algorithm);
        for damaged in
            ["\"\"", "\"12\"", &text.replace("ffff", "fffg"), &text.replace("ffff", "fff")]
        {
            assert!(serde_json::from_str::<MatmulAlgorithm>(damaged).is_err(), "{damaged}");
        }
    }
}
