//! Algorithms of matrix products that are chosen by measurement, and what tells products apart.

use std::fmt;

use serde::{Deserialize, Serialize};

use hpctrain_base::error::Result;

/// All that the choice of an algorithm for a product on one kind of device depends on. The letters
/// are those of [`Gemm`](super::Gemm).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductKind {
    /// m, n and k.
    pub sizes: [usize; 3],
    /// Elements from a row of a, b and c, as they are stored, to the next.
    pub strides: [usize; 3],
    /// Whether a and b are stored transposed.
    pub transposed: [bool; 2],
    /// Whether the product is added to a matrix like the result.
    pub adds: bool,
    /// The library's number of the operation on the result before it is stored.
    pub epilogue: u32,
    /// Whether the input of that operation is kept, or read.
    pub keeps: bool,
    /// Bytes of an element of a, b and c: 4 is f32, 2 is bf16.
    pub bytes: [usize; 3],
    /// Whether f32 operands may be rounded to TF32.
    pub tf32: bool,
    /// Bytes that the addresses of a, b, and of c and the matrix added to it, are multiples of.
    pub alignments: [u32; 3],
}

impl fmt::Display for ProductKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([m, n, k], [a, b, c]) =
            (self.sizes, self.bytes.map(|bytes| if bytes == 2 { "bf16" } else { "f32" }));
        write!(f, "{m}×{n}×{k} of {a} and {b} in {c}")
    }
}

/// An algorithm as its library describes it, for the same version of the library on the same kind
/// of device. Written as 128 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Algorithm(pub [u64; 8]);

impl From<Algorithm> for String {
    fn from(algorithm: Algorithm) -> String {
        algorithm.0.iter().map(|word| format!("{word:016x}")).collect()
    }
}

impl TryFrom<String> for Algorithm {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        let wrong = || format!("{text:?} is no algorithm: 128 hexadecimal digits");
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

/// The choice for one product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chosen {
    /// The product.
    pub product: ProductKind,
    /// Its algorithm.
    pub algorithm: Algorithm,
    /// Its place among those that the library proposed, its best guess first.
    pub place: usize,
}

/// A device whose library of matrix products proposes several algorithms, with other last bits
/// each.
pub trait ProductAlgorithms: Sync {
    /// The kind of device and the version of the library, for which alone a choice holds.
    fn kind(&self) -> String;

    /// All products so far that have an algorithm, in order.
    fn seen(&self) -> Vec<ProductKind>;

    /// Whether the library takes an algorithm of an earlier choice.
    ///
    /// # Errors
    /// The library or the device failed.
    fn takes(&self, chosen: &Chosen) -> Result<bool>;

    /// The library's best guess for a product, unmeasured; none if it knows no algorithm.
    ///
    /// # Errors
    /// The library or the device failed.
    fn guess(&self, product: &ProductKind) -> Result<Option<Chosen>>;

    /// Measures the algorithms that the library proposes for a product, on operands of its own;
    /// none if it knows none.
    ///
    /// # Errors
    /// The library or the device failed.
    fn measure(&self, product: &ProductKind) -> Result<Option<Chosen>>;

    /// From now on these products go by these algorithms, others by the library's best guess.
    fn choose(&self, chosen: &[Chosen]);
}

/// A part of the time of the library's best guess that another algorithm must save: less is noise.
const WORTH: f64 = 0.02;

/// The place of the algorithm to take, of those that took so many seconds: the fastest, or the
/// library's best guess, which is the first, if none is faster by 2 % or more.
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
        // Of equals the earlier one, by the library's word.
        assert_eq!(fastest(&[1.0, 0.5, 0.5]), 1);
        assert_eq!(fastest(&[2.0, f64::INFINITY, 1.0]), 2);
        assert_eq!(fastest(&[f64::INFINITY, 1.0]), 1);
        assert_eq!(fastest(&[]), 0);
    }

    #[test]
    fn algorithms_are_written_and_read_back() {
        let algorithm = Algorithm([0, 1, u64::MAX, 0x0123_4567_89ab_cdef, 4, 5, 6, 7]);
        let text = serde_json::to_string(&algorithm).unwrap();
        assert_eq!(text.len(), 130);
        assert!(text.contains("0123456789abcdef"), "{text}");
        assert_eq!(serde_json::from_str::<Algorithm>(&text).unwrap(), algorithm);
        for damaged in
            ["\"\"", "\"12\"", &text.replace("ffff", "fffg"), &text.replace("ffff", "fff")]
        {
            assert!(serde_json::from_str::<Algorithm>(damaged).is_err(), "{damaged}");
        }
    }
}
