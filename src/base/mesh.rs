//! The four axes of parallelism: rank ↔ (pipeline, replica, shard, tensor).
//!
//! Every axis always exists; one of size one is the identity. Tensor varies fastest, so that its
//! groups stay inside a node.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// An axis of the mesh, slowest-varying first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Pipeline parallelism: stages of consecutive units.
    Pipeline,
    /// Data parallelism: copies of the parameters.
    Replica,
    /// Sharded data parallelism: owners of ranges of each unit.
    Shard,
    /// Tensor parallelism: slices of each block.
    Tensor,
}

/// The number of ranks along each axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    /// The number of pipeline stages.
    pub pipeline: usize,
    /// The number of copies of the sharded parameters.
    pub replica: usize,
    /// The number of ranks that share one copy of the parameters.
    pub shard: usize,
    /// The number of ranks that share one block.
    pub tensor: usize,
}

impl Mesh {
    /// Returns the total number of ranks.
    pub fn ranks(&self) -> usize {
        self.sizes().iter().product()
    }

    /// Returns the number of data-parallel ranks: replica × shard.
    pub fn data(&self) -> usize {
        self.replica * self.shard
    }

    /// Returns the pipeline stage of a rank.
    pub fn stage(&self, rank: usize) -> usize {
        self.coordinates(rank)[Axis::Pipeline as usize]
    }

    fn sizes(&self) -> [usize; 4] {
        [self.pipeline, self.replica, self.shard, self.tensor]
    }

    /// Returns the coordinates of a rank: pipeline, replica, shard, tensor.
    pub fn coordinates(&self, rank: usize) -> [usize; 4] {
        let mut rest = rank;
        let mut coordinates = [0; 4];
        for (coordinate, size) in coordinates.iter_mut().zip(self.sizes()).rev() {
            *coordinate = rest % size;
            rest /= size;
        }
        coordinates
    }

    /// Returns a colour for every rank. Ranks of one colour form a group along `axes`.
    pub fn colors(&self, axes: &[Axis]) -> Vec<usize> {
        (0..self.ranks()).map(|rank| self.color(rank, axes)).collect()
    }

    /// Returns the colour of a rank: its position along the axes that are not in `axes`.
    fn color(&self, rank: usize, axes: &[Axis]) -> usize {
        let coordinates = self.coordinates(rank);
        (0..4)
            .filter(|&i| !axes.iter().any(|&axis| axis as usize == i))
            .fold(0, |color, i| color * self.sizes()[i] + coordinates[i])
    }

    /// Checks that the sizes of the axes multiply to `ranks`. `shards` is whether parameters may be
    /// sharded.
    ///
    /// # Errors
    /// Returns an error with the equation if they do not, and a hint with the nearest values that
    /// do.
    pub fn check(&self, ranks: usize, shards: bool) -> Result<()> {
        if self.ranks() == ranks {
            return Ok(());
        }
        let others = self.pipeline * self.tensor;
        let mut fitting: Vec<(usize, usize)> = match ranks.is_multiple_of(others) {
            true => factors(ranks / others).filter(|(shard, _)| shards || *shard == 1).collect(),
            false => vec![],
        };
        fitting.sort_by_key(|(shard, replica)| {
            shard.abs_diff(self.shard) + replica.abs_diff(self.replica)
        });
        let mut fixes: Vec<String> = fitting
            .iter()
            .take(2)
            .map(|(shard, replica)| {
                format!("parallel.shard = {shard} with parallel.replica = {replica}")
            })
            .collect();
        fixes.push(format!("{} ranks", self.ranks()));
        Err(Error::input(format!(
            "pipeline({}) × replica({}) × shard({}) × tensor({}) = {} ranks, but {ranks} started",
            self.pipeline,
            self.replica,
            self.shard,
            self.tensor,
            self.ranks()
        ))
        .hint(format!("the nearest that fit: {}", fixes.join(", or "))))
    }
}

/// Iterates over all pairs of numbers that multiply to `number`.
fn factors(number: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..=number)
        .filter(move |first| number.is_multiple_of(*first))
        .map(move |first| (first, number / first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_varies_fastest() {
        let mesh = Mesh { pipeline: 2, replica: 1, shard: 3, tensor: 2 };
        assert_eq!(mesh.ranks(), 12);
        assert_eq!(mesh.coordinates(1), [0, 0, 0, 1]);
        assert_eq!(mesh.coordinates(11), [1, 0, 2, 1]);
        assert_eq!(mesh.colors(&[Axis::Tensor]), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
        assert_eq!(
            mesh.colors(&[Axis::Replica, Axis::Shard]),
            [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
        );
    }

    #[test]
    fn the_equation_is_in_the_error() {
        let mesh = Mesh { pipeline: 1, replica: 3, shard: 2, tensor: 1 };
        assert!(mesh.check(6, true).is_ok());
        let refusal = |ranks, shards| mesh.check(ranks, shards).unwrap_err().to_string();
        assert_eq!(
            refusal(8, true),
            "pipeline(1) × replica(3) × shard(2) × tensor(1) = 6 ranks, but 8 started\nhint: the nearest that fit: \
             parallel.shard = 2 with parallel.replica = 4, or parallel.shard = 4 with parallel.replica = 2, or 6 ranks"
        );
        assert!(
            refusal(7, false)
                .ends_with("fit: parallel.shard = 1 with parallel.replica = 7, or 6 ranks")
        );
        let mesh = Mesh { pipeline: 2, ..mesh };
        assert!(
            mesh.check(9, true)
                .unwrap_err()
                .to_string()
                .ends_with("the nearest that fit: 12 ranks")
        );
    }
}
