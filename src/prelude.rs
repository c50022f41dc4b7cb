//! The most common names, imported by `use hpctrain::prelude::*;`.

pub use crate::backend::cpu::Cpu;
pub use crate::backend::{Backend, Kernels, MemoryKind};
pub use crate::checkpoint::Progress;
pub use crate::comm::{Comm, Group};
pub use crate::config::{Config, ResolvedConfig, Sources, load};
pub use crate::data::{Dataset, SampleMut, SampleSizes, Source, Target};
pub use crate::engine::micro_batches::{self, MicroBatches};
pub use crate::engine::{Engine, Splits, engine, on_threads, plan, train_round};
pub use crate::error::{Error, Result};
pub use crate::evaluate::{Evaluator, Metrics};
pub use crate::job::start;
pub use crate::layout::{Init, Tensor};
pub use crate::nn::autograd::{self, Module, Tape, Targets, Var};
pub use crate::nn::loss::{CustomLoss, CustomMetric, LossFunction, MetricFunction};
pub use crate::nn::{
    Block, Blocks, Context, CustomModel, Grads, Input, MicroBatch, ModelBuilder, Params,
};
pub use crate::parallel::{ControlFlags, Hyper, ReducedStep};
pub use crate::run_dir::RunOutcome;
pub use crate::telemetry::metrics::Step;
pub use crate::train::{Customization, Hook, Outcome, TrainRequest, train};
