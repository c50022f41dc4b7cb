//! The small message that each rank sends to all others once its gradients of a step are reduced.
//!
//! All ranks of all stages (with local SGD, those of one replica) add the losses and the squared
//! norms in the same tree. So all have the same loss and norm, and all skip a step that is not
//! finite.

use super::control_flags::ControlFlags;
use super::sparse::SquareSum;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::tree_sum::tree_sum;

/// A rank's message about its virtual ranks and virtual shards; encoded as little-endian f64.
#[derive(Debug, Clone, PartialEq)]
pub struct StepSummary {
    /// The compute time of the rank in this step, in seconds.
    pub compute: f64,
    /// The control flags of the rank.
    pub flags: ControlFlags,
    /// The losses of its virtual ranks, in order.
    pub losses: Vec<f64>,
    /// The squared norms of its virtual shards.
    pub squares: Squares,
    /// The squared norm of its rows of tables with sparse gradients, if there are any.
    pub of_rows: Option<SquareSum>,
}

/// The squared norms of the gradient of some units, by virtual shards.
#[derive(Debug, Clone, PartialEq)]
pub struct Squares {
    /// The first unit, by index in the network.
    pub first_unit: usize,
    /// The first virtual shard.
    pub first_shard: usize,
    /// The number of virtual shards.
    pub shards: usize,
    /// The squared norms, unit after unit, with the virtual shards of each in order.
    pub values: Vec<f64>,
}

impl StepSummary {
    pub fn encode(&self) -> Vec<u8> {
        let Squares { first_unit, first_shard, shards, values } = &self.squares;
        let counts = [self.losses.len(), *first_unit, *first_shard, *shards, values.len()]
            .map(|count| count as f64);
        let head = [self.compute, f64::from(self.flags.bits())];
        let all = head.iter().chain(&counts).chain(&self.losses).chain(values);
        let of_rows = self.of_rows.iter().flat_map(SquareSum::encode);
        all.copied().chain(of_rows).flat_map(f64::to_le_bytes).collect()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let numbers: Vec<f64> =
            bytes.as_chunks().0.iter().map(|chunk| f64::from_le_bytes(*chunk)).collect();
        let malformed = || Error::comm("another rank sent a malformed summary of its step");
        let [compute, flags, losses, first_unit, first_shard, shards, values, rest @ ..] =
            numbers.as_slice()
        else {
            return Err(malformed());
        };
        let (losses, rest) = rest.split_at_checked(*losses as usize).ok_or_else(malformed)?;
        let (values, of_rows) = rest.split_at_checked(*values as usize).ok_or_else(malformed)?;
        let shards = *shards as usize;
        if !values.len().is_multiple_of(shards.max(1)) {
            return Err(malformed());
        }
        let first_unit = *first_unit as usize;
        let first_shard = *first_shard as usize;
        Ok(Self {
            compute: *compute,
            flags: ControlFlags::from_bits_retain(*flags as u32),
            losses: losses.to_vec(),
            squares: Squares { first_unit, first_shard, shards, values: values.to_vec() },
            of_rows: match of_rows {
                [] => None,
                numbers => Some(SquareSum::decode(numbers)?),
            },
        })
    }
}

/// Returns the sum of the squared norms of a network with `units` units and `shards` virtual
/// shards: over the units of each virtual shard in network order, then over virtual shards by the
/// tree of virtual ranks. The order does not depend on which rank has which.
///
/// # Errors
/// Returns an error if a message has units or virtual shards that do not exist, or some are
/// missing.
pub fn sum_of_squares<'a>(
    parts: impl Iterator<Item = &'a Squares>,
    units: usize,
    shards: usize,
) -> Result<f64> {
    let mut all = vec![None; units * shards];
    for part in parts.filter(|part| part.shards > 0) {
        for (unit, values) in (part.first_unit..).zip(part.values.chunks_exact(part.shards)) {
            let from = unit * shards + part.first_shard;
            let exists = unit < units && part.first_shard + part.shards <= shards;
            let to = all.get_mut(from..from + part.shards).filter(|_| exists);
            let to = to.ok_or_else(|| Error::comm("another rank has units that do not exist"))?;
            to.iter_mut().zip(values).for_each(|(to, square)| *to = Some(*square));
        }
    }
    let all: Vec<f64> = all
        .into_iter()
        .collect::<Option<_>>()
        .ok_or_else(|| Error::comm("the squared norms of a unit are missing"))?;
    let of_shard =
        |shard: usize| all.iter().skip(shard).step_by(shards).fold(0.0, |sum, square| sum + square);
    Ok(tree_sum(&(0..shards).map(of_shard).collect::<Vec<f64>>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn squares(first_unit: usize, first_shard: usize, shards: usize, values: &[f64]) -> Squares {
        Squares { first_unit, first_shard, shards, values: values.to_vec() }
    }

    #[test]
    fn summaries_are_decoded_as_encoded() {
        let summary = StepSummary {
            compute: 0.25,
            flags: ControlFlags::from_bits_retain(u32::MAX),
            losses: vec![1.5, f64::INFINITY],
            squares: squares(3, 4, 2, &[0.1, 2.0, 3.0, 4.0]),
            of_rows: None,
        };
        assert_eq!(StepSummary::decode(&summary.encode()).unwrap(), summary);
        assert!(StepSummary::decode(&summary.encode()[..56]).is_err());
        assert!(StepSummary::decode(&summary.encode()[..80]).is_err());
        let with_rows =
            StepSummary { of_rows: Some(SquareSum::of_rows(2, &[0.3, 1e20])), ..summary };
        assert_eq!(StepSummary::decode(&with_rows.encode()).unwrap(), with_rows);
        assert!(StepSummary::decode(&[]).is_err());
    }

    #[test]
    fn squares_are_added_in_an_order_that_does_not_depend_on_ranks() {
        // Rounding shows the order: a large number between small ones.
        let value = |unit: usize, shard: usize| {
            if (unit, shard) == (1, 1) { 1e16 } else { 0.7 + unit as f64 + shard as f64 }
        };
        let part = |units: std::ops::Range<usize>, shards: std::ops::Range<usize>| {
            let values: Vec<f64> =
                units.clone().flat_map(|u| shards.clone().map(move |s| value(u, s))).collect();
            squares(units.start, shards.start, shards.len(), &values)
        };
        let sum = |parts: &[Squares]| sum_of_squares(parts.iter(), 3, 4).map(f64::to_bits);
        let whole = sum(&[part(0..3, 0..4)]).unwrap();
        assert_eq!(sum(&[part(0..3, 2..4), part(0..3, 0..2)]), Ok(whole));
        assert_eq!(sum(&[part(2..3, 0..4), part(0..2, 0..1), part(0..2, 1..4)]), Ok(whole));
        assert!(sum(&[part(0..3, 0..3)]).is_err());
        assert!(sum(&[part(0..3, 0..4), part(3..4, 0..4)]).is_err());
        assert!(sum(&[part(0..3, 0..4), squares(0, 3, 2, &[1.0; 2])]).is_err());
    }
}
