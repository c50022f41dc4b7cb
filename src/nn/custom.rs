//! Custom networks: user-defined blocks and the samples that they take.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Blocks;
use super::loss::Loss;
use hpctrain_cpu::Cpu;
use hpctrain_cuda::Cuda;
use hpctrain_data::{Ids, SampleSpec};
use hpctrain_device::Kernels;

/// A custom network, built of [blocks](super::Block).
pub trait ModelBuilder: Send + Sync + 'static {
    /// Returns the name of the network, which may include its size. It is stored in checkpoints,
    /// and a resumed run reports if it has changed.
    fn name(&self) -> String;

    /// Returns the kind of samples that it takes.
    fn input(&self) -> Input;

    /// Returns the number of output elements per prediction: the logits of all classes (all token
    /// ids for text), or the predicted values.
    fn outputs(&self) -> usize;

    /// Returns the blocks in order. Blocks are not sharded by tensor parallelism; every other kind
    /// of parallelism works. The first block reads its input from
    /// [`Context::micro`](super::Context); its argument `x` is empty.
    fn blocks<B: Kernels>(&self) -> Blocks<B>;
}

/// The samples of a custom network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Input {
    /// Text: a token id at each position, and the next one as the target.
    Text {
        /// The number of positions.
        context: usize,
        /// The number of token ids.
        vocabulary: usize,
    },
    /// A row of numbers of this shape, and a target.
    Numbers(Vec<usize>),
    /// A row of ids, and a target.
    Ids {
        /// The number of ids per row.
        count: usize,
        /// The exclusive upper bound of the ids.
        below: usize,
    },
}

/// A custom [network](ModelBuilder) on any device. In files only its name is stored.
#[derive(Clone, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct CustomModel {
    name: String,
    built: Option<Built>,
}

/// The result of the builder: samples, outputs and blocks.
#[derive(Clone)]
struct Built {
    input: Input,
    outputs: usize,
    make: Arc<dyn Make>,
}

/// Builds the blocks for a device.
trait Make: Send + Sync {
    fn on_cpu(&self) -> Blocks<Cpu>;
    fn on_gpu(&self) -> Blocks<Cuda>;
}

impl<N: ModelBuilder> Make for N {
    fn on_cpu(&self) -> Blocks<Cpu> {
        self.blocks()
    }

    fn on_gpu(&self) -> Blocks<Cuda> {
        self.blocks()
    }
}

impl CustomModel {
    /// Creates a custom network from its builder.
    pub fn new(network: impl ModelBuilder) -> Self {
        let name = network.name();
        let input = network.input();
        let outputs = network.outputs();
        Self { name, built: Some(Built { input, outputs, make: Arc::new(network) }) }
    }

    /// Returns the name of the network.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the kind of samples that it takes, or `None` if the network was only read from a
    /// file and has no builder in this program.
    pub fn input(&self) -> Option<&Input> {
        self.built.as_ref().map(|built| &built.input)
    }

    /// Returns the number of output elements per prediction.
    pub fn outputs(&self) -> usize {
        self.built.as_ref().map_or(0, |built| built.outputs)
    }

    /// Returns the blocks in order, or none if the network has no builder in this program.
    pub fn blocks<B: Kernels>(&self) -> Blocks<B> {
        let Some(Built { make, .. }) = &self.built else { return vec![] };
        // The CPU and CUDA are the only devices.
        let blocks: Box<dyn Any> = match TypeId::of::<B>() == TypeId::of::<Cpu>() {
            true => Box::new(make.on_cpu()),
            false => Box::new(make.on_gpu()),
        };
        blocks.downcast().map_or_else(|_| vec![], |blocks| *blocks)
    }

    /// Returns the number of predictions per sample.
    pub(super) fn context(&self) -> usize {
        match self.input() {
            Some(Input::Text { context, .. }) => *context,
            _ => 1,
        }
    }

    /// Returns the number of token ids, if the samples are text.
    pub(super) fn vocabulary(&self) -> Option<usize> {
        match self.input() {
            Some(Input::Text { vocabulary, .. }) => Some(*vocabulary),
            _ => None,
        }
    }

    /// Returns the samples required to train with `loss`.
    pub(super) fn sample_spec(&self, loss: &Loss) -> SampleSpec {
        let target = loss.target(self.outputs());
        match self.input() {
            Some(Input::Text { .. }) | None => SampleSpec::Text,
            Some(Input::Numbers(shape)) => {
                SampleSpec::Rows { input: shape.iter().product(), ids: Ids::None, target }
            }
            Some(Input::Ids { count, below }) => {
                SampleSpec::Rows { input: *count, ids: Ids::Input(*below), target }
            }
        }
    }
}

/// Custom networks are equal if their names are equal.
impl PartialEq for CustomModel {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for CustomModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CustomModel({:?})", self.name)
    }
}

impl From<String> for CustomModel {
    fn from(name: String) -> Self {
        Self { name, built: None }
    }
}

impl From<CustomModel> for String {
    fn from(network: CustomModel) -> Self {
        network.name
    }
}
