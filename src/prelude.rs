//! What most programs that use this crate need, in one line: `use hpctrain::prelude::*;`.

pub use crate::backend::cpu::Cpu;
pub use crate::backend::{Backend, Kernels, MemoryKind};
pub use crate::checkpoint::Progress;
pub use crate::comm::{Comm, Group};
pub use crate::config::{Config, Plan, Sources, load};
pub use crate::data::{Dataset, SampleMut, Sizes, Source};
pub use crate::error::{Error, Result};
pub use crate::evaluate::{Evaluator, Measures};
pub use crate::job::start;
pub use crate::layout::{Init, Tensor};
pub use crate::nn::{Block, Context, Grads, Micro, Params};
pub use crate::parallel::{ControlFlags, Hyper, ReducedStep};
pub use crate::telemetry::metrics::Step;
pub use crate::train::feed::{self, Feed};
pub use crate::train::{
    Ending, Engine, Hook, Outcome, Own, Request, Splits, advance, engine, on_threads, plan, train_on_device,
};
