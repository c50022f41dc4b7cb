//! The small message of a step, from each rank to all others once its gradients are reduced.

use super::control_flags::ControlFlags;
use crate::error::{Error, Result};

/// A rank's message about its lanes and virtual shards; little-endian f64 on the wire.
#[derive(Debug, Clone, PartialEq)]
pub struct StepSummary {
    /// First virtual shard of `squares`.
    pub first: usize,
    /// Seconds that the rank computed in this step.
    pub compute: f64,
    /// The rank's requests.
    pub flags: ControlFlags,
    /// Losses of its lanes, in order.
    pub losses: Vec<f64>,
    /// Squares of its virtual shards.
    pub squares: Vec<f64>,
}

impl StepSummary {
    pub fn encode(&self) -> Vec<u8> {
        let head = [self.first as f64, self.compute, f64::from(self.flags.bits()), self.losses.len() as f64];
        head.iter().chain(&self.losses).chain(&self.squares).flat_map(|x| x.to_le_bytes()).collect()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let numbers: Vec<f64> = bytes.as_chunks().0.iter().map(|chunk| f64::from_le_bytes(*chunk)).collect();
        match numbers.as_slice() {
            [first, compute, flags, losses, rest @ ..] if *losses as usize <= rest.len() => {
                let (losses, squares) = rest.split_at(*losses as usize);
                let (losses, squares) = (losses.to_vec(), squares.to_vec());
                Ok(Self {
                    first: *first as usize,
                    compute: *compute,
                    flags: ControlFlags::from_bits_retain(*flags as u32),
                    losses,
                    squares,
                })
            }
            _ => Err(Error::comm("another rank sent a malformed summary of its lanes")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_arrive_as_they_were() {
        let summary = StepSummary {
            first: 4,
            compute: 0.25,
            flags: ControlFlags::from_bits_retain(u32::MAX),
            losses: vec![1.5, f64::INFINITY],
            squares: vec![0.1, 2.0, 3.0],
        };
        assert_eq!(StepSummary::decode(&summary.encode()).unwrap(), summary);
        assert!(StepSummary::decode(&summary.encode()[..40]).is_err());
        assert!(StepSummary::decode(&[]).is_err());
    }
}
