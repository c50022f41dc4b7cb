//! Squared norms of tensors that are sharded over ranks.
//!
//! LAMB and LARS scale the update of a tensor by norms of the whole tensor. Each rank computes the
//! squared norms of its virtual shards of all tensors and sends them in one small message, and
//! every rank adds them in the same tree before the first update.

use std::ops::Range;

use hpctrain_base::error::{Error, Result};
use hpctrain_base::tree_sum::tree_sum;
use hpctrain_nn::optim::SquaredNorms;

/// A rank's message about its virtual shards; encoded as little-endian f64.
pub struct Norms {
    /// The first virtual shard.
    first: usize,
    tensors: usize,
    /// Both squared norms of every tensor, for one virtual shard after another.
    squares: Vec<SquaredNorms<f64>>,
}

impl Norms {
    /// Creates a message with zeros for `tensors` tensors in these virtual shards.
    pub fn new(shards: Range<usize>, tensors: usize) -> Self {
        Self { first: shards.start, tensors, squares: vec![[0.0; 2]; shards.len() * tensors] }
    }

    /// Sets the squared norms of a tensor in virtual shard `shard`, relative to the first.
    pub fn set(&mut self, shard: usize, tensor: usize, squares: SquaredNorms<f64>) {
        self.squares[shard * self.tensors + tensor] = squares;
    }

    /// Encodes the message to all ranks.
    pub fn encode(&self) -> Vec<u8> {
        let squares = self.squares.iter().flatten();
        [self.first as f64].iter().chain(squares).flat_map(|x| x.to_le_bytes()).collect()
    }
}

/// Returns the squared norms of each whole tensor from the messages of all ranks, which may
/// overlap. They are added over all `shards` virtual shards in the same tree on every rank, so the
/// sum does not depend on which rank computed which shard.
///
/// # Errors
/// Returns an error if a message is malformed.
pub fn whole(
    messages: &[Vec<u8>],
    shards: usize,
    tensors: usize,
) -> Result<Vec<SquaredNorms<f64>>> {
    let malformed = || Error::comm("another rank sent malformed norms of its tensors");
    let mut squares = vec![[0.0; 2]; shards * tensors];
    for message in messages {
        let numbers: Vec<f64> =
            message.as_chunks().0.iter().map(|chunk| f64::from_le_bytes(*chunk)).collect();
        let (first, rest) = numbers.split_first().ok_or_else(malformed)?;
        let pairs = rest.as_chunks::<2>().0;
        let start = *first as usize * tensors;
        squares.get_mut(start..start + pairs.len()).ok_or_else(malformed)?.copy_from_slice(pairs);
    }
    let sum = |tensor: usize, which: usize| {
        let of_shards: Vec<f64> =
            (0..shards).map(|shard| squares[shard * tensors + tensor][which]).collect();
        tree_sum(&of_shards)
    };
    Ok((0..tensors).map(|tensor| [sum(tensor, 0), sum(tensor, 1)]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the message of a rank with these virtual shards of three tensors.
    fn message(shards: Range<usize>) -> Vec<u8> {
        let mut norms = Norms::new(shards.clone(), 3);
        for (at, shard) in shards.enumerate() {
            for tensor in 0..3 {
                norms.set(at, tensor, [0.1 * (shard + 1) as f64, (tensor + 7 * shard) as f64]);
            }
        }
        norms.encode()
    }

    #[test]
    fn norms_do_not_depend_on_the_ranks() {
        let alone = whole(&[message(0..4)], 4, 3).unwrap();
        assert_eq!(alone[2], [(0.1 + 0.2) + (0.1 * 3.0 + 0.4), 50.0]);
        assert_eq!(whole(&[message(0..2), message(2..4)], 4, 3).unwrap(), alone);
        assert_eq!(
            whole(&[0, 1, 2, 3].map(|shard| message(shard..shard + 1)), 4, 3).unwrap(),
            alone
        );
        assert!(whole(&[message(3..5)], 4, 3).is_err());
        assert!(whole(&[vec![]], 4, 3).is_err());
    }
}
