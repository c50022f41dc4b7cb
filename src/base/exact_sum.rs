//! Sums without rounding, which no order of additions changes: long fixed-point numbers (after
//! Kulisch, *Computer Arithmetic and Validity*, 2013).

use serde::{Deserialize, Serialize};

/// The number of 32-bit digits in a sum: squares of f32 span 2^-298 to 2^256, and 2^63 of them must
/// fit.
const DIGITS: usize = 20;

/// A sum without rounding, in units of a power of two that the caller chooses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExactSum {
    /// The number is the sum of `digits[k] · 2^(32 k)`. Between additions all but the last are from
    /// 0 to 2^32 - 1.
    digits: [i64; DIGITS],
}

impl Default for ExactSum {
    fn default() -> Self {
        Self { digits: [0; DIGITS] }
    }
}

impl ExactSum {
    /// Adds or subtracts `mantissa · 2^shift`. [`ExactSum::carry`] must be called after at most
    /// 2^30 additions.
    pub fn add(&mut self, mantissa: u64, shift: usize, is_negative: bool) {
        let first = shift / 32;
        let mut rest = u128::from(mantissa) << (shift % 32);
        for digit in &mut self.digits[first..first + 3] {
            let part = (rest & 0xffff_ffff) as i64;
            *digit += if is_negative { -part } else { part };
            rest >>= 32;
        }
    }

    /// Normalises all digits but the last.
    pub fn carry(&mut self) {
        let mut carried = 0;
        for digit in &mut self.digits[..DIGITS - 1] {
            let sum = *digit + carried;
            *digit = sum & 0xffff_ffff;
            carried = sum >> 32;
        }
        self.digits[DIGITS - 1] += carried;
    }

    /// Adds another sum in the same unit. Both must have been carried.
    pub fn merge(&mut self, other: &Self) {
        self.digits.iter_mut().zip(&other.digits).for_each(|(digit, other)| *digit += other);
        self.carry();
    }

    /// Returns the sum, given that its unit is 2^`exponent`.
    pub fn value(&self, exponent: i32) -> f64 {
        let mut magnitude = self.clone();
        let is_negative = magnitude.digits[DIGITS - 1] < 0;
        if is_negative {
            magnitude.digits.iter_mut().for_each(|digit| *digit = -*digit);
            magnitude.carry();
        }
        let weighed =
            |(k, digit): (usize, &i64)| *digit as f64 * 2f64.powi(32 * k as i32 + exponent);
        let sum: f64 = magnitude.digits.iter().enumerate().rev().map(weighed).sum();
        if is_negative { -sum } else { sum }
    }

    /// Returns the digits, each of which an f64 holds exactly. The sum must have been carried.
    pub fn digits(&self) -> impl Iterator<Item = f64> {
        self.digits.iter().map(|digit| *digit as f64)
    }

    /// Returns the sum with these [`ExactSum::digits`]; `None` if there are not as many.
    pub fn from_digits(digits: &[f64]) -> Option<Self> {
        let digits: [f64; DIGITS] = digits.try_into().ok()?;
        Some(Self { digits: digits.map(|digit| digit as i64) })
    }
}
