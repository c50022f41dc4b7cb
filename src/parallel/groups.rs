//! The groups of ranks that a mesh makes.

use crate::backend::Kernels;
use crate::comm::{Comm, Group};
use crate::error::Result;
use crate::mesh::{Axis, Mesh};

/// The groups of a rank.
pub struct Groups<B: Kernels> {
    /// All ranks that train.
    pub world: Group<B>,
    /// Ranks of the stage that share one copy of its parameters.
    pub shard: Group<B>,
    /// Ranks of the stage that own the same range in different copies.
    pub replica: Group<B>,
    /// Both: ranks of the stage with different data, replica-major.
    pub data: Group<B>,
    /// Ranks of the stage that compute slices of the same blocks.
    pub tensor: Group<B>,
    /// Every rank of the stage.
    pub stage: Group<B>,
    /// The stages that compute the same data, in order: for activations and their gradients.
    pub pipeline: Group<B>,
    /// The same, for parameters that one stage borrows from another and for their gradients.
    pub ties: Group<B>,
}

impl<B: Kernels> Groups<B> {
    /// The groups of `mesh`, whose ranks are those of `comm`. Collective over its world.
    ///
    /// # Errors
    /// A message between ranks failed.
    pub fn split(comm: &Comm<B>, mesh: &Mesh) -> Result<Self> {
        let group = |axes: &[Axis], name| Ok(comm.split(&mesh.colors(axes))?.named(name));
        Ok(Self {
            world: comm.world(),
            shard: group(&[Axis::Shard], "shard")?,
            replica: group(&[Axis::Replica], "replica")?,
            data: group(&[Axis::Replica, Axis::Shard], "data")?,
            tensor: group(&[Axis::Tensor], "tensor")?,
            stage: group(&[Axis::Replica, Axis::Shard, Axis::Tensor], "stage")?,
            pipeline: group(&[Axis::Pipeline], "pipeline")?,
            ties: group(&[Axis::Pipeline], "ties")?,
        })
    }
}
