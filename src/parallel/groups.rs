//! The process groups of a mesh, one for each use.

use hpctrain_base::error::Result;
use hpctrain_base::mesh::{Axis, Mesh};
use hpctrain_comm::{AlgorithmTable, Comm, Group};
use hpctrain_device::Kernels;

/// The process groups of a rank.
pub struct Groups<B: Kernels> {
    /// All ranks that train.
    pub world: Group<B>,
    /// Ranks of the stage among which one replica of its parameters is sharded.
    pub shard: Group<B>,
    /// Ranks of the stage that own the same range in different replicas.
    pub replica: Group<B>,
    /// Both of these axes: ranks of the stage with different data, replica-major.
    pub data: Group<B>,
    /// Tensor-parallel ranks of the stage.
    pub tensor: Group<B>,
    /// The pipeline stages that compute the same data, in order: for activations and their
    /// gradients.
    pub pipeline: Group<B>,
    /// The same ranks, for tied parameters of other stages and their gradients.
    pub ties: Group<B>,
    /// The groups of ranks that compute a step together.
    pub step: StepGroups<B>,
}

/// The groups of ranks that synchronize at every step: of all replicas, or with local SGD of one
/// replica.
pub struct StepGroups<B: Kernels> {
    /// All ranks that compute a step together.
    pub world: Group<B>,
    /// Ranks of the stage that own the same range in different replicas.
    pub replica: Group<B>,
    /// Ranks of the stage with different data.
    pub data: Group<B>,
    /// All ranks of the stage.
    pub stage: Group<B>,
}

impl<B: Kernels> Groups<B> {
    /// Creates the groups of `mesh`, whose ranks are those of `comm`; `local_sgd` is whether its
    /// replicas train with local SGD. Collective over the world of `comm`.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn split(comm: &Comm<B>, mesh: &Mesh, local_sgd: bool) -> Result<Self> {
        let group = |axes: &[Axis], name| Ok(comm.split(&mesh.colors(axes))?.named(name));
        let [world, shard] = [comm.world(), group(&[Axis::Shard], "shard")?];
        let replica = group(&[Axis::Replica], "replica")?;
        let data = group(&[Axis::Replica, Axis::Shard], "data")?;
        let step = match local_sgd {
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

    /// Sets the algorithms of the units' collectives over shards and over replicas.
    #[must_use]
    pub fn with_algorithms(self, of_shards: AlgorithmTable, of_replicas: AlgorithmTable) -> Self {
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
