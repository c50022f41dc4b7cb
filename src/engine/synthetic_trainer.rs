//! Training steps on random data, to measure the speed of training without real data.

use std::time::Instant;

use super::memory::{self, BaselineMemory};
use super::warmup::random_batch;
use super::{Engine, engine, micro_batches, train_round, vocabulary};
use hpctrain_base::error::Result;
use hpctrain_comm::{self as comm, Comm};
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, Environment, ModelKind, ResolvedConfig, WorkShares, resolve};
use hpctrain_data::Batch;
use hpctrain_device::Kernels;
use hpctrain_parallel::Progress;
use hpctrain_parallel::{ControlFlags, PipelineSchedule};

/// A network that trains on the same random micro-batch in every step.
pub struct SyntheticTrainer<B: Kernels> {
    /// The plan of the training.
    pub plan: ResolvedConfig,
    engine: Engine<B>,
    batch: Batch,
    progress: Progress,
}

impl<B: Kernels> SyntheticTrainer<B> {
    /// Creates the network of a configuration, with `samples` samples per rank and micro-batch.
    /// Default: the configuration's micro-batch. Collective over the world of `comm`.
    ///
    /// # Errors
    /// Returns an error if the configuration is invalid, or if it does not fit into memory.
    pub fn new(
        comm: &Comm<B>,
        config: Config,
        samples: Option<u64>,
        backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
    ) -> Result<Self> {
        let world = comm.world();
        let mut config = config.with_any_length();
        let topology = Topology::gather(&world, comm.node().host)?;
        // The vocabulary size of text is that of its tokenizer.
        let is_unknown =
            config.model.kind != ModelKind::Layers && config.model.vocabulary.is_none();
        let vocabulary = world.all_ok(is_unknown.then(|| vocabulary(&config)).transpose())?;
        let facts = Environment {
            ranks: world.size(),
            threads: topology.threads(),
            vocabulary,
            on_gpu: !B::ON_HOST,
        };
        let samples = match samples {
            Some(samples) => samples,
            None => world.all_ok(resolve(config.clone(), &facts))?.micro,
        };
        // A pipeline needs several micro-batches per stage to be filled.
        let stages = config.parallel.pipeline.max(1);
        let micros = if stages > 1 { 4 * stages } else { 1 };
        let global = samples * (world.size() / stages * micros) as u64;
        config.set_trial_batch(global);
        config.batch.micro = Some(samples);
        config.parallel.virtual_ranks = None;
        config.parallel.work_shares = WorkShares::Equal;
        let plan = world.all_ok(resolve(config, &facts))?;
        world.all_ok(memory::check::<B>(&plan, &topology, BaselineMemory::now(comm, &[]), None))?;
        let backend = world.all_ok(backend(&plan))?;
        Self::from_plan(comm, plan, backend)
    }

    /// Creates the network of a plan. Collective over the world of `comm`.
    ///
    /// # Errors
    /// Returns an error if memory runs out, or if a message between ranks fails.
    pub fn from_plan(comm: &Comm<B>, plan: ResolvedConfig, backend: B) -> Result<Self> {
        let comm = &comm.select_transport(plan.config.comm.transport, comm::probe_cuda_aware)?;
        let (engine, _) = engine(comm, &plan, backend, None)?;
        let batch = random_batch(&plan, plan.micro as usize);
        Ok(Self { plan, engine, batch, progress: Progress::default() })
    }

    /// Takes a step and returns its seconds on this rank. With local SGD, takes the steps up to the
    /// next average and returns their mean.
    ///
    /// # Errors
    /// Returns an error if the device or a message between ranks fails.
    pub fn step(&mut self) -> Result<f64> {
        let begun = Instant::now();
        let backend = self.engine.model.backend.clone();
        let batch = &self.batch;
        let time = self.plan.network.context();
        let stage = self.engine.model.sharded.stage().clone();
        let round = train_round(
            &self.plan,
            &mut self.engine,
            || micro_batches::upload(&backend, batch, time, 0, &stage),
            &mut self.progress,
            ControlFlags::empty,
        )?;
        Ok(begun.elapsed().as_secs_f64() / round.steps.len() as f64)
    }

    /// Defers wgrad from now on, as in a late stage of a zero-bubble pipeline.
    pub fn defer_wgrad(&mut self) {
        self.engine.geometry.schedule.order = PipelineSchedule::ZeroBubble;
    }

    /// Returns the device.
    pub fn backend(&self) -> &B {
        &self.engine.model.backend
    }

    /// Returns the number of parameters of the network.
    pub fn parameters(&self) -> u64 {
        self.engine.model.sharded.parameters()
    }
}
