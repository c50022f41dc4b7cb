//! The training engine: the training step, and the network on its mesh, its samples and its memory.

#![forbid(unsafe_code)]

mod activation_offload;
mod build;
mod chunked_loss;
mod collectives;
mod forward_backward;
mod host_embedding;
mod matmul_autotune;
pub mod memory;
pub mod micro_batches;
mod model;
mod pipeline_p2p;
mod planning;
mod splits;
mod synthetic_trainer;
#[cfg(test)]
mod tests;
mod threads;
mod train_round;
mod warmup;

pub use activation_offload::ActivationOffload;
pub use build::with_host_embedding;
pub use build::{engine, engine_with_blocks};
pub use collectives::CollectiveChoices;
pub use forward_backward::{Engine, Geometry};
pub use matmul_autotune::{MatmulChoices, autotune_matmuls};
pub use micro_batches::check_size;
pub use micro_batches::vocabulary;
pub use model::Model;
pub use planning::plan;
pub use splits::Splits;
pub use synthetic_trainer::SyntheticTrainer;
pub use threads::on_threads;
pub use train_round::clip;
pub use train_round::{Round, StepResult, train_round};
