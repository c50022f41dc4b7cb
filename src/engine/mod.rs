//! The training engine: the training step, and the network on its mesh, its samples and its memory.
//!
//! # The training step
//!
//! [`train_round()`] takes a step: [`Engine::gradients`] does 1 to 6, then the reduced gradients
//! are applied. All layouts run the same code, over the list of a rank's forwards, backwards and
//! messages between stages in `parallel/pipeline_schedule.rs`.
//!
//! 1. **Forward.** Each micro-batch passes through the blocks of the stage. With ZeRO 3,
//!    all-gathers run `parallel.prefetch` visits ahead (`parallel/param_prefetch.rs`).
//! 2. **Loss.** The loss overwrites the logits with their gradient (`nn/loss.rs`). Language models
//!    do this in chunks of tokens (`chunked_loss.rs`).
//! 3. **Backward.** Each `Block::backward` *adds* into the flat gradient of its unit. With the
//!    zero-bubble schedule, weight gradients are deferred (`nn/wgrad.rs`).
//! 4. **End of a virtual rank.** Its gradient joins the rank's tree of virtual ranks
//!    (`Sharded::virtual_rank_done`).
//! 5. **Reduce.** After the last virtual rank, the sum *moves* to the communication thread, which
//!    reduces it during the backward of the previous block (`Sharded::start_reductions`).
//! 6. **Agree.** `Sharded::reduce` waits for all units. Each rank sends one small message to the
//!    ranks of all stages (`parallel/step_summary.rs`), so all have the same loss and norm, and all
//!    skip a step that is not finite.
//! 7. **Update.** With SDC checks, `Sharded::check_sdc` verifies the digests of the update before
//!    (`parallel/sdc_checksum.rs`). `Sharded::update` runs one fused kernel on each owned range,
//!    with the clip as a factor. LAMB and LARS send one more small message before it
//!    (`parallel/norms.rs`).
//! 8. **All-gather.** With ZeRO 0 to 2, the all-gather of a unit starts when the unit is updated,
//!    in the order of the next forward. Its block waits for it before its first use.
//!
//! With local SGD a rank with several replicas trains them in turn (`Sharded::next_replica`), and a
//! round ends with their average (`Sharded::average`).
//!
//! Two threads work beside these steps: a loader reads data ahead (`data/loader.rs`), and a save
//! thread writes checkpoints from a copy (`checkpoint/async_save.rs`). The order of requests to the
//! communication thread depends on the position in the step, never on arrivals, so it is the same
//! on all ranks.

#![forbid(unsafe_code)]

mod activation_offload;
mod batch_loss;
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
mod step_samples;
mod synthetic_trainer;
mod tensor_observer;
#[cfg(test)]
mod tests;
mod threads;
mod train_round;
mod warmup;

pub use activation_offload::ActivationOffload;
pub use build::{engine, engine_with_blocks};
pub use build::{with_host_embedding, with_tables_elsewhere};
pub use collectives::{CollectiveChoices, connect_devices};
pub use forward_backward::{Engine, Geometry};
pub use matmul_autotune::{MatmulChoices, autotune_matmuls};
pub use micro_batches::check_size;
pub use micro_batches::vocabulary;
pub use model::Model;
pub use planning::{plan, plan_for};
pub use splits::{Splits, check_source};
pub use step_samples::{RankSchedule, StepSample, samples_of_step};
pub use synthetic_trainer::SyntheticTrainer;
pub use tensor_observer::{
    ObservedTensor, TensorKind, TensorObserver, TensorStatistics, observe_parameters,
};
pub use threads::on_threads;
pub use train_round::clip;
pub use train_round::{Round, RoundObserver, StepResult, apply_gradients, train_round};
pub use warmup::warmup_step;
