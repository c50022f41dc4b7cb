//! The groups of ranks that a mesh makes.

use hpctrain_base::error::Result;
use hpctrain_base::mesh::{Axis, Mesh};
use hpctrain_comm::{Comm, Group, Table};
use hpctrain_device::Kernels;

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
    /// The stages that compute the same data, in order: for activations and their gradients.
    pub pipeline: Group<B>,
    /// The same, for parameters that one stage borrows from another and for their gradients.
    pub ties: Group<B>,
    /// Those of these ranks that take a step together.
    pub step: StepGroups<B>,
}

/// The groups whose ranks meet in a step: of all replicas, or where those train apart, of one.
pub struct StepGroups<B: Kernels> {
    /// All of them.
    pub world: Group<B>,
    /// Those of the stage that own the same range in different copies.
    pub replica: Group<B>,
    /// Those of the stage with different data.
    pub data: Group<B>,
    /// Every one of the stage.
    pub stage: Group<B>,
}

impl<B: Kernels> Groups<B> {
    /// The groups of `mesh`, whose ranks are those of `comm`; `apart` is whether its replicas train
    /// apart. Collective over its world.
    ///
    /// # Errors
    /// A message between ranks failed.
    pub fn split(comm: &Comm<B>, mesh: &Mesh, apart: bool) -> Result<Self> {
        let group = |axes: &[Axis], name| Ok(comm.split(&mesh.colors(axes))?.named(name));
        let [world, shard] = [comm.world(), group(&[Axis::Shard], "shard")?];
        let replica = group(&[Axis::Replica], "replica")?;
        let data = group(&[Axis::Replica, Axis::Shard], "data")?;
        let step = match apart {
            false => StepGroups {
                world: world.clone(),
                replica: replica.clone(),
                data: data.clone(),
                stage: group(&[Axis::Replica, Axis::Shard, Axis::Tensor], "stage")?,
            },
            true => StepGroups {
                world: group(&[Axis::Pipeline, Axis::Shard, Axis::Tensor], "one replica")?,
                replica: group(&[], "one rank")?,
                data: group(&[Axis::Shard], "shard")?,
                stage: group(&[Axis::Shard, Axis::Tensor], "stage")?,
            },
        };
        Ok(Self {
            tensor: group(&[Axis::Tensor], "tensor")?,
            pipeline: group(&[Axis::Pipeline], "pipeline")?,
            ties: group(&[Axis::Pipeline], "ties")?,
            world,
            shard,
            replica,
            data,
            step,
        })
    }

    /// The same groups, with algorithms for the units' exchanges over shards and over replicas.
    #[must_use]
    pub fn with_algorithms(self, of_shards: Table, of_replicas: Table) -> Self {
        let step = StepGroups {
            replica: self.step.replica.with_algorithms(of_replicas.clone()),
            ..self.step
        };
        Self {
            shard: self.shard.with_algorithms(of_shards),
            replica: self.replica.with_algorithms(of_replicas),
            step,
            ..self
        }
    }
}
