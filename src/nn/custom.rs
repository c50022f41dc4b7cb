//! Networks of a program's own: blocks that it makes, and the samples that they take.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Blocks;
use super::loss::Loss;
use hpctrain_cpu::Cpu;
use hpctrain_cuda::Cuda;
use hpctrain_data::{Ids, SampleSpec, Target};
use hpctrain_device::Kernels;

/// A network that a program builds of [blocks](super::Block).
pub trait ModelBuilder: Send + Sync + 'static {
    /// Its name, and its size, for people. Checkpoints keep it, and a run that goes on says if it
    /// has changed.
    fn name(&self) -> String;

    /// The samples that it takes.
    fn input(&self) -> Input;

    /// Elements of its output at each prediction: a logit for each class, or numbers. Of text, a
    /// logit for each id.
    fn outputs(&self) -> usize;

    /// Its blocks in order. Those of any number of ranks are whole: other axes than
    /// `parallel.tensor` divide them. The first finds its input in
    /// [`Context::micro`](super::Context), and its argument `x` is empty.
    fn blocks<B: Kernels>(&self) -> Blocks<B>;
}

/// Samples of a network of a program's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Text: at each position an id, and the one that follows to predict.
    Text {
        /// Positions.
        context: usize,
        /// Ids are below this.
        vocabulary: usize,
    },
    /// A row of numbers of this shape, and a target.
    Numbers(Vec<usize>),
    /// A row of ids, and a target.
    Ids {
        /// Ids of a row.
        count: usize,
        /// They are below this.
        below: usize,
    },
}

/// A [network](ModelBuilder) of a program's own on any device. In a file it is its name alone.
#[derive(Clone, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct CustomModel {
    name: String,
    built: Option<Built>,
}

/// Samples, outputs and blocks.
#[derive(Clone)]
struct Built {
    input: Input,
    outputs: usize,
    make: Arc<dyn Make>,
}

/// Makes the blocks for a device.
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
    /// The network that `network` builds.
    pub fn new(network: impl ModelBuilder) -> Self {
        let name = network.name();
        let input = network.input();
        let outputs = network.outputs();
        Self { name, built: Some(Built { input, outputs, make: Arc::new(network) }) }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The samples that it takes; none of one that was read from a file, and that no program has
    /// built here.
    pub fn input(&self) -> Option<&Input> {
        self.built.as_ref().map(|built| &built.input)
    }

    /// Elements of its output at each prediction.
    pub fn outputs(&self) -> usize {
        self.built.as_ref().map_or(0, |built| built.outputs)
    }

    /// Its blocks; none where no program has built it here.
    pub fn blocks<B: Kernels>(&self) -> Blocks<B> {
        let Some(Built { make, .. }) = &self.built else { return vec![] };
        // There are no other devices.
        let blocks: Box<dyn Any> = match TypeId::of::<B>() == TypeId::of::<Cpu>() {
            true => Box::new(make.on_cpu()),
            false => Box::new(make.on_gpu()),
        };
        blocks.downcast().map_or_else(|_| vec![], |blocks| *blocks)
    }

    /// Predictions a sample.
    pub(super) fn context(&self) -> usize {
        match self.input() {
            Some(Input::Text { context, .. }) => *context,
            _ => 1,
        }
    }

    /// Ids of text.
    pub(super) fn vocabulary(&self) -> Option<usize> {
        match self.input() {
            Some(Input::Text { vocabulary, .. }) => Some(*vocabulary),
            _ => None,
        }
    }

    /// The samples that it takes to be trained with `loss`.
    pub(super) fn sample_spec(&self, loss: &Loss) -> SampleSpec {
        let target = match loss {
            Loss::CrossEntropy { .. } => Target::Class(self.outputs()),
            Loss::Deviation(_) => Target::Values(self.outputs()),
        };
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

/// Two of one name are taken for one network.
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
