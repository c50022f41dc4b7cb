//! The names that most programs with this crate need, in one line: `use hpctrain::prelude::*;`.

pub use crate::backend::cpu::Cpu;
pub use crate::backend::{Backend, Kernels, MemoryKind};
pub use crate::checkpoint::Progress;
pub use crate::comm::{Comm, Group};
pub use crate::config::{Config, Plan, Sources, load};
pub use crate::data::{Dataset, SampleMut, Sizes, Source};
pub use crate::engine::feed::{self, Feed};
pub use crate::engine::{Engine, Splits, advance, engine, on_threads, plan};
pub use crate::error::{Error, Result};
pub use crate::evaluate::{Evaluator, Measures};
pub use crate::job::start;
pub use crate::layout::{Init, Tensor};
pub use crate::nn::{Block, Blocks, BuildNetwork, Context, Grads, Input, Micro, OwnNetwork, Params};
pub use crate::parallel::{ControlFlags, Hyper, ReducedStep};
pub use crate::run_dir::Ending;
pub use crate::telemetry::metrics::Step;
pub use crate::train::{Hook, Outcome, Own, Request, train_on_device};
