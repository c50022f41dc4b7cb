//! The squared norm of the rows of a gradient, which does not depend on the ranks that hold them.

use hpctrain_base::error::{Error, Result};
use hpctrain_base::exact_sum::ExactSum;

/// The exponent of the unit of the sum: squares of f32 are multiples of 2^-298.
const UNIT: i32 = -298;

/// The sum of the squares of some rows. The squares of a row are added in order, those of the rows
/// without rounding, so ranks can divide the rows in any way.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SquareSum {
    sum: ExactSum,
    /// Whether a row is not finite.
    is_not_finite: bool,
}

impl SquareSum {
    /// Adds up the squares of rows of `width` elements.
    pub fn of_rows(width: usize, rows: &[f32]) -> Self {
        let mut all = Self::default();
        // This many additions cannot overflow a digit.
        for rows in rows.chunks(width << 30) {
            for row in rows.chunks_exact(width) {
                let square = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>();
                match parts(square) {
                    Some((mantissa, shift)) => all.sum.add(mantissa, shift, false),
                    None => all.is_not_finite = true,
                }
            }
            all.sum.carry();
        }
        all
    }

    /// Adds the squares of other rows.
    pub fn merge(&mut self, other: &Self) {
        self.sum.merge(&other.sum);
        self.is_not_finite |= other.is_not_finite;
    }

    /// Returns the sum; NaN if a row is not finite.
    pub fn value(&self) -> f64 {
        if self.is_not_finite { f64::NAN } else { self.sum.value(UNIT) }
    }

    /// Encodes the sum as numbers.
    pub fn encode(&self) -> impl Iterator<Item = f64> {
        std::iter::once(f64::from(u8::from(self.is_not_finite))).chain(self.sum.digits())
    }

    /// Decodes the numbers of [`SquareSum::encode`].
    ///
    /// # Errors
    /// Returns an error if there are not as many.
    pub fn decode(numbers: &[f64]) -> Result<Self> {
        numbers
            .split_first()
            .and_then(|(is_not_finite, digits)| {
                Some(Self {
                    sum: ExactSum::from_digits(digits)?,
                    is_not_finite: *is_not_finite != 0.0,
                })
            })
            .ok_or_else(|| Error::comm("another rank sent a malformed norm of embedding tables"))
    }
}

/// Splits a sum of squares of f32 into `mantissa · 2^(shift + UNIT)`; `None` if it is not finite.
fn parts(square: f64) -> Option<(u64, usize)> {
    if !square.is_finite() {
        return None;
    }
    let bits = square.to_bits();
    let exponent = (bits >> 52) as i32;
    if exponent == 0 {
        // The least square is far above the subnormal numbers.
        return Some((0, 0));
    }
    let mantissa = bits & ((1 << 52) - 1) | 1 << 52;
    let shift = exponent - 1075 - UNIT;
    // It is a multiple of the unit, so no bits are lost.
    Some(match usize::try_from(shift) {
        Ok(shift) => (mantissa, shift),
        Err(_) => (mantissa >> -shift, 0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_base::random::Stream;

    #[test]
    fn any_division_of_the_rows_gives_the_same_bits() {
        let (width, rows) = (5, 40);
        let mut values = vec![0.0; width * rows];
        Stream::new(3).fill_normal(&mut values);
        for (row, values) in values.chunks_exact_mut(width).enumerate() {
            values.iter_mut().for_each(|x| *x *= 10f32.powi(row as i32 % 60 - 30));
        }
        values[7] = f32::from_bits(1);
        let whole = SquareSum::of_rows(width, &values);
        let expected: f64 = values.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((whole.value() / expected - 1.0).abs() < 1e-12, "{} {expected}", whole.value());
        for cut in [0, 1, 13, 40] {
            let (first, last) = values.split_at(cut * width);
            let mut sum = SquareSum::of_rows(width, last);
            let first: Vec<f64> = SquareSum::of_rows(width, first).encode().collect();
            sum.merge(&SquareSum::decode(&first).unwrap());
            assert_eq!(sum, whole, "{cut}");
        }
        // Alone, the smallest number is not lost, nor a large one.
        for x in [f32::from_bits(1), f32::MIN_POSITIVE, 1.0, 3.1, f32::MAX] {
            let square = f64::from(x) * f64::from(x);
            assert_eq!(SquareSum::of_rows(1, &[x]).value(), square);
            assert_eq!(SquareSum::of_rows(1, &[x, x]).value(), 2.0 * square);
        }
        assert!(SquareSum::of_rows(1, &[1.0, f32::INFINITY]).value().is_nan());
        assert!(SquareSum::decode(&[0.0; 3]).is_err());
    }
}
