//! The four axes of parallelism: rank ↔ (pipeline, replica, shard, tensor).
//!
//! Every axis always exists; one of size one is the identity. Tensor varies fastest, so that its groups stay
//! inside a node.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// An axis of the mesh, slowest-varying first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Stages of consecutive units.
    Pipeline,
    /// Copies of the parameters.
    Replica,
    /// Owners of ranges of each unit.
    Shard,
    /// Slices of each block.
    Tensor,
}

/// Ranks along each axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    /// Stages.
    pub pipeline: usize,
    /// Copies of the sharded parameters.
    pub replica: usize,
    /// Ranks that share one copy of the parameters.
    pub shard: usize,
    /// Ranks that share one block.
    pub tensor: usize,
}

impl Mesh {
    /// Ranks in all.
    pub fn ranks(&self) -> usize {
        self.sizes().iter().product()
    }

    /// Ranks that see different data: replica × shard.
    pub fn data(&self) -> usize {
        self.replica * self.shard
    }

    fn sizes(&self) -> [usize; 4] {
        [self.pipeline, self.replica, self.shard, self.tensor]
    }

    /// Coordinates of a rank: pipeline, replica, shard, tensor.
    pub fn coordinates(&self, rank: usize) -> [usize; 4] {
        let mut rest = rank;
        let mut coordinates = [0; 4];
        for (coordinate, size) in coordinates.iter_mut().zip(self.sizes()).rev() {
            *coordinate = rest % size;
            rest /= size;
        }
        coordinates
    }

    /// For every rank a colour: ranks of one colour form a group along `axes`.
    pub fn colors(&self, axes: &[Axis]) -> Vec<usize> {
        let color = |rank| {
            let coordinates = self.coordinates(rank);
            (0..4)
                .filter(|&i| !axes.iter().any(|&axis| axis as usize == i))
                .fold(0, |color, i| color * self.sizes()[i] + coordinates[i])
        };
        (0..self.ranks()).map(color).collect()
    }

    /// Checks that the axes multiply to the ranks there are.
    ///
    /// # Errors
    /// The equation that does not hold, and the replica count that would mend it.
    pub fn check(&self, ranks: usize) -> Result<()> {
        if self.ranks() == ranks {
            return Ok(());
        }
        let others = self.pipeline * self.shard * self.tensor;
        let hint = match ranks.checked_div(others) {
            Some(replica) if replica > 0 && replica * others == ranks => format!("set parallel.replica = {replica}"),
            _ => format!("start {} ranks, or leave out parallel.replica", self.ranks()),
        };
        Err(Error::input(format!(
            "pipeline({}) × replica({}) × shard({}) × tensor({}) = {} ranks, but {ranks} started",
            self.pipeline,
            self.replica,
            self.shard,
            self.tensor,
            self.ranks()
        ))
        .hint(hint))
    }
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
        assert_eq!(mesh.colors(&[Axis::Replica, Axis::Shard]), [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]);
    }

    #[test]
    fn the_equation_is_in_the_error() {
        let mesh = Mesh { pipeline: 1, replica: 3, shard: 2, tensor: 1 };
        assert!(mesh.check(6).is_ok());
        let message = mesh.check(8).unwrap_err().to_string();
        assert!(message.contains("= 6 ranks, but 8 started") && message.contains("parallel.replica = 4"), "{message}");
        assert!(mesh.check(7).unwrap_err().to_string().contains("start 6 ranks"));
    }
}
