//! The small message of a step: what each rank tells all others once its gradients are reduced.

use crate::error::{Error, Result};

/// What a rank tells of its lanes and virtual shards; little-endian f64 on the wire.
#[derive(Debug, Clone, PartialEq)]
pub struct StepSummary {
    /// First virtual shard of `squares`.
    pub first: usize,
    /// Seconds that the rank computed in this step.
    pub compute: f64,
    /// What the caller wants all ranks to know.
    pub note: u32,
    /// Losses of its lanes, in order.
    pub losses: Vec<f64>,
    /// Squares of its virtual shards.
    pub squares: Vec<f64>,
}

impl StepSummary {
    pub fn encode(&self) -> Vec<u8> {
        let head = [self.first as f64, self.compute, f64::from(self.note), self.losses.len() as f64];
        head.iter().chain(&self.losses).chain(&self.squares).flat_map(|x| x.to_le_bytes()).collect()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let numbers: Vec<f64> = bytes.as_chunks().0.iter().map(|chunk| f64::from_le_bytes(*chunk)).collect();
        match numbers.as_slice() {
            [first, compute, note, losses, rest @ ..] if *losses as usize <= rest.len() => {
                let (losses, squares) = rest.split_at(*losses as usize);
                let (losses, squares) = (losses.to_vec(), squares.to_vec());
                Ok(Self { first: *first as usize, compute: *compute, note: *note as u32, losses, squares })
            }
            _ => Err(Error::comm("another rank sent a malformed summary of its lanes")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_arrive_as_they_were() {
        let facts = StepSummary {
            first: 4,
            compute: 0.25,
            note: u32::MAX,
            losses: vec![1.5, f64::INFINITY],
            squares: vec![0.1, 2.0, 3.0],
        };
        assert_eq!(StepSummary::decode(&facts.encode()).unwrap(), facts);
        assert!(StepSummary::decode(&facts.encode()[..40]).is_err());
        assert!(StepSummary::decode(&[]).is_err());
    }
}
