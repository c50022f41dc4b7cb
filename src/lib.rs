//! hpctrain trains neural networks on MPI clusters. It is a program, and this crate, the library
//! that the program and your own programs are built on:
//!
//! | to | use |
//! |---|---|
//! | start a rank, under `mpirun` or alone | [`job::start`]; [`job::spawn`] for ranks of a program that nothing launches, [`engine::on_threads`] for threads as ranks |
//! | configure a run | [`config::load`], [`engine::plan`] |
//! | run a whole training, as `hpctrain train` does | [`train::train`] with a [`train::TrainRequest`] |
//! | add callbacks for steps, evaluations and checkpoints, and stop early | [`train::Hook`] |
//! | train on custom data | [`data::Source`], [`engine::Splits`] |
//! | train on arrays of `ndarray` | [`data::Arrays`] |
//! | write a custom training loop | [`engine::engine`], [`engine::micro_batches::MicroBatches`], [`engine::Engine::gradients`], [`parallel::Sharded::update`] |
//! | add a kind of block | [`nn::Block`], [`nn::gradcheck`], [`engine::engine_with_blocks`] |
//! | train a custom model of such blocks | [`nn::ModelBuilder`], [`train::Customization::network`] |
//! | compute on GPUs | [`train::train`], or [`gpu_assignment::assign_gpus`] and [`gpu_assignment::Gpu::backend`] |
//! | train with parameter servers | [`servers::train()`] |
//! | call functions on elastic workers, with parameters on servers | [`servers::Coordinator`], [`servers::Parameters`] |
//! | evaluate, predict, generate text | [`evaluate::Evaluator`], [`evaluate::predict()`], [`evaluate::predict_array()`], [`evaluate::generate()`] |
//! | export models to safetensors and ONNX | [`checkpoint::export`] |
//! | evaluate beside a trainer, or process its checkpoints | [`train::evaluate_run`], [`evaluate::NewCheckpoints`] |
//! | read checkpoints, and write them asynchronously | [`checkpoint::Reader`], [`checkpoint::Saver`] |
//!
//! [`prelude`] re-exports the most common names. `examples/` has a program for each of these tasks;
//! they run under `mpirun` on any number of ranks.
//!
//! Everything is generic over the device ([`backend::Kernels`]). Operations on several ranks are
//! *collective*: all ranks of a group make the same calls in the same order. Pass results that may
//! be errors on some ranks only to [`comm::Group::all_ok`], so that all ranks return an error.
//!
//! ```
//! use hpctrain::prelude::*;
//!
//! /// Points of a line, which the model learns.
//! struct Line;
//!
//! impl Source for Line {
//!     fn samples(&self) -> u64 {
//!         64
//!     }
//!
//!     fn sizes(&self) -> SampleSizes {
//!         SampleSizes { features: 1, values: 1, ..SampleSizes::default() }
//!     }
//!
//!     fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
//!         into.features[0] = sample as f32 / 32.0 - 1.0;
//!         into.values[0] = 2.0 * into.features[0] + 1.0;
//!         Ok(())
//!     }
//! }
//!
//! let settings = [
//!     "model.kind=layers",
//!     "model.input=[1]",
//!     "model.layers=[{kind='dense', units=1}]",
//!     "loss.kind=mse",
//!     "optimizer.lr=0.1",
//!     "optimizer.weight_decay=0.0",
//!     "lr_schedule.warmup=0",
//!     "run.steps=150",
//! ];
//! let (config, _) = load(&Sources { overrides: &settings.map(String::from), ..Sources::default() })?;
//!
//! // Two ranks, as threads of this process, share the samples of every step.
//! let losses = on_threads(2, |comm| {
//!     let plan = plan(comm, config.clone(), &Line, Some(1))?;
//!     let (mut engine, _) = engine(comm, &plan, Cpu::new(plan.threads), None)?;
//!     let mut progress = Progress::default();
//!     let mut feed = MicroBatches::start(&engine.model, Line, &plan, progress)?;
//!     let mut loss = f64::INFINITY;
//!     while progress.step < plan.config.run.steps {
//!         let round =
//!             train_round(&plan, &mut engine, || feed.next_micro(), &mut progress, ControlFlags::empty)?;
//!         loss = round.steps[0].loss;
//!     }
//!     Ok(loss)
//! })?;
//! assert!(losses[0] < 1e-3 && losses[0] == losses[1], "{losses:?}");
//! # Ok::<(), Error>(())
//! ```
//!
//! Modules that are not listed here are public only for the program and its tests, and may change
//! at any time.

#![warn(missing_docs)]
#![forbid(unsafe_code)]

#[doc(inline)]
pub use hpctrain_base::{energy, error, layout, mesh, random, signals};
pub(crate) use hpctrain_base::{fd_limit, own_files, safe_open, spawn};
#[doc(hidden)]
pub use hpctrain_base::{panics, spans};
#[doc(inline)]
pub use hpctrain_checkpoint as checkpoint;
#[doc(inline)]
pub use hpctrain_checkpoint::run_dir;
#[doc(inline)]
pub use hpctrain_comm as comm;
#[doc(inline)]
pub use hpctrain_config as config;
#[doc(inline)]
pub(crate) use hpctrain_config::elastic_ranks;
#[doc(hidden)]
pub use hpctrain_config::topology;
#[doc(inline)]
pub use hpctrain_config::{gpu_assignment, job, telemetry};
#[doc(inline)]
pub use hpctrain_data as data;
#[doc(inline)]
pub use hpctrain_engine as engine;
#[doc(inline)]
pub use hpctrain_nn as nn;
#[doc(inline)]
pub use hpctrain_nn::optim;
#[doc(inline)]
pub use hpctrain_parallel as parallel;
#[doc(inline)]
pub use hpctrain_parameter_server as servers;
#[doc(hidden)]
pub use hpctrain_report as report;
#[doc(hidden)]
pub use hpctrain_report::{run_records, runs};
#[doc(inline)]
pub use hpctrain_train as train;
#[doc(inline)]
pub use hpctrain_train::{evaluate, planner};
pub(crate) use hpctrain_watch as watch;

/// Memory and operations of devices: CPUs and NVIDIA GPUs.
pub mod backend {
    #[doc(inline)]
    pub use hpctrain_cpu as cpu;
    #[doc(inline)]
    pub use hpctrain_cuda as cuda;
    #[doc(inline)]
    pub use hpctrain_device::*;
}

#[doc(hidden)]
pub mod bench;
#[doc(hidden)]
pub mod cli;
#[doc(hidden)]
pub mod doctor;
mod elastic;
pub mod prelude;
#[doc(hidden)]
pub mod replay;
#[doc(hidden)]
pub mod submit;
pub mod supervise;
#[doc(hidden)]
pub mod verify;
