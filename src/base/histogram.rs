//! Histograms of f32 that merge exactly: histograms of the parts of a tensor merge to the bits of
//! that of the whole tensor.
//!
//! Values fall into bins by the upper bits of their representation: sign, exponent, and three bits
//! of the fraction, so eight bins for each power of two. Counts are integers. Sum and sum of
//! squares are kept without rounding ([`ExactSum`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::exact_sum::ExactSum;

/// The low bits of an f32 that do not affect its bin.
const BELOW: u32 = 20;

/// The number of bins.
const BINS: usize = 1 << (32 - BELOW);

/// A histogram of values.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    /// The count of each non-empty bin. Bin numbers ascend with values.
    counts: BTreeMap<u16, u64>,
    /// The smallest and the largest finite value, if there are any.
    bounds: Option<(f32, f32)>,
    /// The sum, in units of 2^-149.
    sum: ExactSum,
    /// The sum of squares, in units of 2^-298.
    squares: ExactSum,
    /// The number of values that are not finite, which count nowhere else.
    not_finite: u64,
}

impl Histogram {
    /// Adds values.
    pub fn add(&mut self, values: &[f32]) {
        // This many additions cannot overflow a digit.
        values.chunks(1 << 30).for_each(|values| self.add_some(values));
    }

    fn add_some(&mut self, values: &[f32]) {
        let mut counts = vec![0u64; BINS];
        let (mut smallest, mut largest) = self.bounds.unwrap_or((f32::INFINITY, f32::NEG_INFINITY));
        for &value in values {
            if !value.is_finite() {
                self.not_finite += 1;
                continue;
            }
            counts[bin(value)] += 1;
            (smallest, largest) = (smallest.min(value), largest.max(value));
            let (mantissa, shift) = parts(value);
            self.sum.add(mantissa, shift, value < 0.0);
            self.squares.add(mantissa * mantissa, 2 * shift, false);
        }
        self.sum.carry();
        self.squares.carry();
        // Zeros of both signs are one value.
        self.bounds = (smallest <= largest).then_some((smallest + 0.0, largest + 0.0));
        for (bin, count) in (0..).zip(counts).filter(|(_, count)| *count > 0) {
            *self.counts.entry(bin).or_default() += count;
        }
    }

    /// Adds `count` zeros.
    pub fn add_zeros(&mut self, count: u64) {
        if count == 0 {
            return;
        }
        *self.counts.entry(bin(0.0) as u16).or_default() += count;
        let (smallest, largest) = self.bounds.unwrap_or((0.0, 0.0));
        self.bounds = Some((smallest.min(0.0), largest.max(0.0)));
    }

    /// Adds the values of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (bin, count) in &other.counts {
            *self.counts.entry(*bin).or_default() += count;
        }
        self.bounds = match (self.bounds, other.bounds) {
            (Some((smallest, largest)), Some((other_smallest, other_largest))) => {
                Some((smallest.min(other_smallest), largest.max(other_largest)))
            }
            (one, other) => one.or(other),
        };
        self.sum.merge(&other.sum);
        self.squares.merge(&other.squares);
        self.not_finite += other.not_finite;
    }

    /// Returns the smallest and the largest finite value, if there are any.
    pub fn bounds(&self) -> Option<(f32, f32)> {
        self.bounds
    }

    /// Returns the number of finite values.
    pub fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    /// Returns the number of values that are not finite.
    pub fn not_finite(&self) -> u64 {
        self.not_finite
    }

    /// Returns the sum of the finite values.
    pub fn sum(&self) -> f64 {
        self.sum.value(-149)
    }

    /// Returns the sum of the squares of the finite values.
    pub fn sum_of_squares(&self) -> f64 {
        self.squares.value(-298)
    }

    /// Returns the upper limits of bins, ascending, with their counts: all non-empty bins, and one
    /// empty bin wherever empty ones lie between two of them.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let mut buckets = Vec::with_capacity(self.counts.len());
        let mut next = None;
        for (&bin, &count) in &self.counts {
            if next.is_some_and(|next| next != bin) {
                buckets.push((limit(bin - 1), 0));
            }
            buckets.push((limit(bin), count));
            next = Some(bin + 1);
        }
        buckets
    }
}

/// Returns the bin of a finite value. Bins ascend with values.
fn bin(value: f32) -> usize {
    // Zeros of both signs are one value.
    let bits = (value + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    (ascending >> BELOW) as usize
}

/// Returns the upper limit of a bin: for positive values the smallest value above the bin, for
/// negative ones the largest value in it.
fn limit(bin: u16) -> f64 {
    const HALF: u32 = BINS as u32 / 2;
    match u32::from(bin) {
        bin if bin >= HALF => match f32::from_bits((bin + 1 - HALF) << BELOW) {
            limit if limit.is_finite() => f64::from(limit),
            _ => f64::from(f32::MAX),
        },
        bin => f64::from(f32::from_bits(!((bin << BELOW) | ((1 << BELOW) - 1)))) + 0.0,
    }
}

/// Splits the magnitude of a finite value into `mantissa · 2^(shift - 149)`.
fn parts(value: f32) -> (u64, usize) {
    let bits = value.to_bits();
    let exponent = (bits >> 23 & 0xff) as usize;
    let fraction = u64::from(bits & 0x7f_ffff);
    match exponent {
        0 => (fraction, 0),
        _ => (fraction | 1 << 23, exponent - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Stream, derive};

    fn histogram_of(values: &[f32]) -> Histogram {
        let mut histogram = Histogram::default();
        histogram.add(values);
        histogram
    }

    fn normal(count: usize, scale: f32) -> Vec<f32> {
        let mut values = vec![0.0; count];
        Stream::new(derive(7, &[count as u64])).fill_normal(&mut values);
        values.iter_mut().for_each(|value| *value *= scale);
        values
    }

    #[test]
    fn parts_of_any_size_in_any_order_give_the_same_bits() {
        let mut values = normal(10_007, 1e-3);
        values.extend([
            f32::MAX,
            -f32::MAX,
            f32::MIN_POSITIVE / 64.0,
            0.0,
            -0.0,
            1e30,
            f32::NAN,
            f32::INFINITY,
        ]);
        let whole = histogram_of(&values);
        for cut in [1, 3, 31, 1024] {
            let mut merged = Histogram::default();
            values
                .chunks(values.len().div_ceil(cut))
                .rev()
                .for_each(|part| merged.merge(&histogram_of(part)));
            assert_eq!(merged, whole);
            let json = serde_json::to_vec(&merged).unwrap();
            assert_eq!(serde_json::from_slice::<Histogram>(&json).unwrap(), whole);
        }
        assert_eq!((whole.count(), whole.not_finite()), (values.len() as u64 - 2, 2));
        assert_eq!(whole.bounds(), Some((-f32::MAX, f32::MAX)));
    }

    #[test]
    fn sums_are_exact() {
        // Added one after the other in f64, the ones would be lost.
        let histogram = histogram_of(&[1e30, 1.0, -1e30, 1.0, -3.0]);
        assert_eq!(histogram.sum(), -1.0);
        let expected = 2.0 * f64::from(1e30f32) * f64::from(1e30f32) + 11.0;
        assert_eq!(histogram.sum_of_squares(), expected);
        assert_eq!(
            histogram_of(&[f32::MIN_POSITIVE / 8.0; 3]).sum(),
            3.0 * f64::from(f32::MIN_POSITIVE) / 8.0
        );
        assert_eq!(histogram_of(&[-0.5; 6]).sum(), -3.0);
        let values = normal(4096, 0.02);
        let sum: f64 = values.iter().map(|value| f64::from(*value)).sum();
        assert!((histogram_of(&values).sum() - sum).abs() < 1e-12);
    }

    /// Returns true if a value is in a bin. The limits of positive bins belong to the next bin,
    /// those of negative ones to their own.
    fn is_within(value: f64, lower: f64, upper: f64) -> bool {
        if value > 0.0 { value >= lower && value < upper } else { value > lower && value <= upper }
    }

    #[test]
    fn every_value_lies_below_the_limit_of_its_bin() {
        let mut values = normal(5000, 1.0);
        values.extend([
            0.0,
            -0.0,
            1.0,
            -1.0,
            1.125,
            2.0,
            f32::MAX,
            -f32::MAX,
            f32::MIN_POSITIVE,
            1e-45,
            -1e-45,
        ]);
        for &value in &values {
            let number = bin(value) as u16;
            let wide = f64::from(value);
            assert!(
                wide <= limit(number) && wide >= limit(number - 1),
                "{value}: {} to {}",
                limit(number - 1),
                limit(number)
            );
        }
        values.retain(|value| *value != 0.0);
        let buckets = histogram_of(&values).buckets();
        assert!(buckets.is_sorted_by(|one, next| one.0 < next.0), "{buckets:?}");
        for (at, &(upper, count)) in buckets.iter().enumerate() {
            let lower = at.checked_sub(1).map_or(f64::NEG_INFINITY, |before| buckets[before].0);
            let last =
                values.iter().filter(|value| f64::from(**value) == f64::from(f32::MAX)).count()
                    as u64;
            let inside =
                values.iter().filter(|value| is_within(f64::from(**value), lower, upper)).count()
                    as u64;
            let expected = if upper == f64::from(f32::MAX) { inside + last } else { inside };
            assert_eq!(count, expected, "{lower} to {upper}");
        }
    }

    #[test]
    fn nothing_has_no_bounds() {
        let nothing = histogram_of(&[f32::NAN]);
        assert_eq!(
            (nothing.bounds(), nothing.buckets(), nothing.count(), nothing.sum()),
            (None, vec![], 0, 0.0)
        );
        let mut merged = Histogram::default();
        merged.merge(&histogram_of(&[]));
        merged.merge(&histogram_of(&[2.0]));
        assert_eq!(merged.bounds(), Some((2.0, 2.0)));
    }
}
