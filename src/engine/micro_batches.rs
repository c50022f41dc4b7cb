//! The data of a run: opening it, and the micro-batches of a rank in the order of their use.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::model::Model;
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, ModelKind, ResolvedConfig, sample_spec};
use hpctrain_data::{
    Augment, Batch, DataSpec, Dataset, Held, Loader, SampleOrder, SampleSpec, ShardIndex, Source,
    Split, Target, bundled, local_cache,
};
use hpctrain_device::{Backend, Kernels, MemoryKind};
use hpctrain_nn::MicroBatch;
use hpctrain_parallel::Progress;
use hpctrain_parallel::Stage;

/// Training and validation data of a configuration; none to validate on where there is none and
/// none was asked for.
///
/// # Errors
/// Data is missing or malformed; the error names the place.
pub fn open(config: &Config) -> Result<(Dataset, Option<Dataset>)> {
    open_specs(&mut ShardIndex::to_be_told(), config, &specs(config)?)
}

/// Opens data on all ranks of `world`: rank 0 looks at its files, and tells the others of them.
/// Collective.
///
/// # Errors
/// Those of `open`, which all ranks share; or a message between ranks failed.
pub fn together<B: Backend, T>(
    world: &Group<B>,
    open: impl FnOnce(&mut ShardIndex) -> Result<T>,
) -> Result<T> {
    if world.rank() == 0 {
        let mut catalogue = ShardIndex::to_be_told();
        let opened = world.all_ok(open(&mut catalogue))?;
        let told =
            world.all_ok(if world.size() > 1 { catalogue.tell() } else { Ok(Vec::new()) })?;
        world.gather_bytes(told).wait()?;
        return world.all_ok(Ok(opened));
    }
    world.all_ok(Ok(()))?;
    world.all_ok(Ok(()))?;
    let told = world.gather_bytes(Vec::new()).wait()?;
    let opened = ShardIndex::told(&told[0], world.is_first_of_node())
        .and_then(|mut catalogue| open(&mut catalogue));
    world.all_ok(opened)
}

/// As [`open`], on all ranks of a job: with `data.local_cache` one rank of each node copies the
/// shards first, and all read the copies.
///
/// # Errors
/// As [`open`], or the shards could not be copied.
pub fn open_staged<B: Backend>(
    config: &Config,
    world: &Group<B>,
    topology: &Topology,
) -> Result<(Dataset, Option<Dataset>)> {
    let sources = world.all_ok(specs(config))?;
    let Some(root) = config.data.local_cache.as_ref().map(Path::new) else {
        return together(world, |catalogue| open_specs(catalogue, config, &sources));
    };
    let here = &topology.here().host;
    // Errors of the data name the place that the user knows.
    let looked = || {
        let (train, validation) = open_specs(&mut ShardIndex::to_be_told(), config, &sources)?;
        std::iter::once(&train).chain(&validation).try_for_each(Dataset::check_self_contained)
    };
    world.all_ok(if world.rank() == 0 { looked() } else { Ok(()) })?;
    let copies = || {
        for spec in &sources {
            let local_cache::Staged { copied: (files, bytes), reused } =
                local_cache::stage(spec, root)?;
            let from = spec.path.display();
            let to = root.display();
            log::info!(
                "{here}: {files} shards ({bytes} bytes) of {from} copied to {to}, {reused} were there"
            );
        }
        Ok(())
    };
    let is_first = (0..world.rank()).all(|rank| topology.host(rank) != here);
    // Copies may take longer than any message.
    world.with_keepalive(is_first.then_some(copies))?;
    let staged =
        || sources.iter().map(|spec| local_cache::place(spec, root)).collect::<Result<Vec<_>>>();
    let staged = world.all_ok(staged())?;
    together(world, |catalogue| open_specs(catalogue, config, &staged))
}

fn open_specs(
    catalogue: &mut ShardIndex,
    config: &Config,
    specs: &[DataSpec],
) -> Result<(Dataset, Option<Dataset>)> {
    let mut train = Dataset::open_by(catalogue, specs, Split::Train, predictions(config))?;
    if config.data.augment != Augment::default() {
        // Models of text have no shape of a sample.
        let shape = config.model.input.as_deref().unwrap_or_default();
        train.augment(config.data.augment, shape, config.run.seed)?;
    }
    let mut validation = open_validation(catalogue, config, specs)?;
    if let Some(validation) = &mut validation {
        validation.conform(train.preprocessing())?;
    }
    Ok((train, validation))
}

/// Evaluations look at no weights.
fn open_measured(
    catalogue: &mut ShardIndex,
    config: &Config,
    specs: &[DataSpec],
    split: Split,
) -> Result<Dataset> {
    let unweighted = |spec: &DataSpec| DataSpec { weights: Some(String::new()), ..spec.clone() };
    let specs: Vec<DataSpec> = specs.iter().map(unweighted).collect();
    Dataset::open_by(catalogue, &specs, split, predictions(config))
}

/// Opens the validation data, if there is any.
fn open_validation(
    catalogue: &mut ShardIndex,
    config: &Config,
    specs: &[DataSpec],
) -> Result<Option<Dataset>> {
    let held = specs.iter().map(|spec| catalogue.held(spec)).collect::<Result<Vec<_>>>()?;
    let fraction = config.data.val_fraction;
    if fraction > 0.0 && !held.contains(&Held::Fraction) {
        let path = specs[0].path.display();
        return Err(Error::input(format!(
            "data.val_fraction = {fraction}, but {path} has validation shards"
        ))
        .hint("leave data.val_fraction out, or move the validation shards away"));
    }
    let without: Vec<&DataSpec> = specs
        .iter()
        .zip(&held)
        .filter(|(_, held)| **held == Held::Nowhere)
        .map(|(spec, _)| spec)
        .collect();
    match without[..] {
        [] => {}
        _ if without.len() == specs.len() => return Ok(None),
        [first, ..] => {
            let path = first.path.display();
            return Err(Error::input(format!(
                "{path} has no validation data, but others of data.mix have some"
            ))
            .hint("set data.val_fraction to keep a part of its samples for validation"));
        }
    }
    open_measured(catalogue, config, specs, Split::Validation).map(Some)
}

/// The validation data of a configuration.
///
/// # Errors
/// As [`open`], or there is none.
pub fn validation(catalogue: &mut ShardIndex, config: &Config) -> Result<Dataset> {
    measured(catalogue, config, Split::Validation)
}

/// A part of a configuration's data, to be measured on.
///
/// # Errors
/// As [`open`], or there is none.
pub fn measured(catalogue: &mut ShardIndex, config: &Config, split: Split) -> Result<Dataset> {
    let specs = specs(config)?;
    match split {
        Split::Train => open_measured(catalogue, config, &specs, split),
        Split::Validation => open_validation(catalogue, config, &specs)?
            .ok_or_else(|| no_validation("nothing can be evaluated on it", config)),
    }
}

/// Whether all data sets of a configuration have a part.
///
/// # Errors
/// The bundled data that it names does not exist.
pub fn has(config: &Config, split: Split) -> Result<bool> {
    let has = |spec: &DataSpec| match split {
        Split::Train => spec.files(split).is_ok(),
        Split::Validation => spec.held().is_ok_and(|held| held != Held::Nowhere),
    };
    Ok(specs(config)?.iter().all(has))
}

/// The error where validation data is needed and there is none.
pub fn no_validation(what: &str, config: &Config) -> Error {
    Error::input(format!("{} has no validation data: {what}", config.data.told()))
        .hint("add validation shards (data.validation), or keep a part of the samples for it, such as data.val_fraction = 0.1")
}

/// The rows of a configuration's data without their targets, which need not be there.
///
/// # Errors
/// As [`open`].
pub fn inputs(catalogue: &mut ShardIndex, config: &Config, split: Split) -> Result<Dataset> {
    let mut specs = specs(config)?;
    for spec in &mut specs {
        if let SampleSpec::Rows { target, .. } = &mut spec.samples {
            *target = Target::Unknown;
        }
    }
    Dataset::open_by(catalogue, &specs, split, predictions(config))
}

/// Predictions of a sample.
fn predictions(config: &Config) -> usize {
    if config.model.kind == ModelKind::Layers { 1 } else { config.model.context }
}

/// Descriptions of the data sets.
fn specs(config: &Config) -> Result<Vec<DataSpec>> {
    let data = &config.data;
    let samples = sample_spec(config)?;
    // Models of text take ids: they have no shape of a sample.
    let shape = match &samples {
        SampleSpec::Rows { .. } => config.model.input.clone().unwrap_or_default(),
        SampleSpec::Text | SampleSpec::Anything => vec![],
    };
    let spec = |path: &String| {
        let path = match path.strip_prefix("bundled:") {
            Some(name) => bundled::locate(name)?,
            None => PathBuf::from(path),
        };
        Ok(DataSpec {
            path,
            train: data.train.clone(),
            validation: data.validation.clone(),
            tokens: data.tokens.clone(),
            inputs: data.inputs.clone(),
            categories: data.categories.clone(),
            targets: data.targets.clone(),
            weights: data.weights.clone(),
            shape: shape.clone(),
            axes: data.image_layout,
            val_fraction: data.val_fraction,
            scale: data.scale,
            vocabulary: config.model.vocabulary,
            verify: data.verify,
            external_files: data.external_files,
            samples: samples.clone(),
        })
    };
    if data.mix.is_empty() {
        Ok(vec![spec(&data.path)?])
    } else {
        data.mix.iter().map(|one| spec(&one.path)).collect()
    }
}

/// The order of samples in the run.
fn order(config: &Config, train: &dyn Source) -> Result<SampleOrder> {
    let weights: Vec<f64> = match &config.data.mix[..] {
        [] => vec![1.0],
        mix => mix.iter().map(|one| one.weight).collect(),
    };
    SampleOrder::mixed(&train.parts(), &weights, config.data.shuffle.then_some(config.run.seed))
}

/// Token ids that the data of a configuration uses.
///
/// # Errors
/// The data cannot be opened.
pub fn vocabulary(config: &Config) -> Result<usize> {
    open(config).map(|(train, _)| train.vocabulary())
}

/// A batch on the device, of samples of `time` predictions: inputs in the first stage of a
/// pipeline, targets in the last; but ids on the host where that has their tables. `base` is the
/// position of the global batch's first sample.
///
/// # Errors
/// The device is out of memory.
pub fn micro<B: Backend>(
    backend: &B,
    batch: &Batch,
    time: usize,
    base: u64,
    stage: &Stage,
) -> Result<MicroBatch<B>> {
    let mut parts = batch.parts.as_ref().map(Vec::as_slice, Vec::as_slice);
    if !stage.is_first() {
        (parts.ids, parts.features) = (&[], &[]);
    }
    if !stage.is_last() {
        (parts.classes, parts.values, parts.weights) = (&[], &[], &[]);
    }
    let host_ids =
        if stage.takes_rows() { std::mem::take(&mut parts.ids).to_vec() } else { Vec::new() };
    let samples = (batch.positions.end - batch.positions.start) as usize;
    let micro = MicroBatch::upload(backend, parts, samples, time, batch.positions.start - base)?;
    Ok(MicroBatch { host_ids, ..micro })
}

/// A step must not see a sample twice.
///
/// # Errors
/// The data is shorter than one batch.
pub fn check_size(plan: &ResolvedConfig, train: &dyn Source) -> Result<()> {
    let Some((number, have, want)) =
        order(&plan.config, train)?.repeats_within(plan.config.batch.global)
    else {
        return Ok(());
    };
    let Some(one) = plan.config.data.mix.get(number) else {
        let path = &plan.config.data.path;
        let is_text = matches!(sample_spec(&plan.config)?, SampleSpec::Text);
        let (of_tokens, or_shorten) = if is_text {
            (format!(" of {} tokens", plan.network.context()), ", or shorten model.context")
        } else {
            (String::new(), "")
        };
        return Err(Error::input(format!(
            "{path} has {have} training samples{of_tokens}, fewer than batch.global = {want}"
        ))
        .hint(format!("set batch.global to at most {have}{or_shorten}")));
    };
    Err(Error::input(format!(
        "{} has {have} training samples, but batch.global = {} may take {want} of them",
        one.path, plan.config.batch.global
    ))
    .hint("make batch.global or its weight in data.mix smaller"))
}

/// A rank's micro-batches, read ahead on the host and put on the device one at a time.
pub struct MicroBatches<B: Kernels> {
    backend: B,
    loader: Loader,
    stage: Stage,
    /// Predictions of a sample.
    time: usize,
    /// Position of the first sample of the first global batch, and samples of each.
    first: u64,
    global: u64,
    /// Bytes of the loader that the ledger knows of.
    entered: usize,
}

impl<B: Kernels> MicroBatches<B> {
    /// Starts to read the samples that this rank of `model` will compute from `progress` on.
    ///
    /// # Errors
    /// The reader's thread could not be started.
    pub fn start(
        model: &Model<B>,
        train: impl Source + 'static,
        plan: &ResolvedConfig,
        progress: Progress,
    ) -> Result<Self> {
        let positions = Positions::new(plan, model.sharded.data().rank(), progress);
        Self::of(model, train, plan, progress.position, positions)
    }

    /// As [`MicroBatches::start`], of the micro-batches at `positions`, where global batches follow
    /// one another from position `first` on.
    ///
    /// # Errors
    /// As [`MicroBatches::start`].
    pub fn of(
        model: &Model<B>,
        train: impl Source + 'static,
        plan: &ResolvedConfig,
        first: u64,
        positions: impl Iterator<Item = Range<u64>> + Send + 'static,
    ) -> Result<Self> {
        let order = order(&plan.config, &train)?;
        let stage = model.sharded.stage().clone();
        let loader = Loader::start(train, order, positions, plan.config.data.prefetch)?;
        let time = plan.network.context();
        let global = plan.config.batch.global;
        let backend = model.backend.clone();
        Ok(Self { backend, loader, stage, time, first, global, entered: 0 })
    }

    /// The next micro-batch on the device.
    ///
    /// # Errors
    /// A failure of the data, or the device is out of memory.
    pub fn next_micro(&mut self) -> Result<MicroBatch<B>> {
        let batch = self.loader.next()?;
        self.enter(self.loader.held());
        let start = batch.positions.start;
        let base = start - (start - self.first) % self.global;
        let micro = micro(&self.backend, &batch, self.time, base, &self.stage)?;
        self.loader.recycle(batch);
        Ok(micro)
    }

    /// Leaves the next micro-batch out.
    ///
    /// # Errors
    /// A failure of the data.
    pub fn skip(&mut self) -> Result<()> {
        let batch = self.loader.next()?;
        self.loader.recycle(batch);
        Ok(())
    }

    /// The time that [`MicroBatches::next_micro`] has waited for the reader, in sum.
    pub fn waited(&self) -> Duration {
        self.loader.waited()
    }

    /// The loader knows no device: its memory is entered here.
    fn enter(&mut self, held: usize) {
        self.backend.ledger().resize(MemoryKind::Data, self.entered, held);
        self.entered = held;
    }
}

impl<B: Kernels> Drop for MicroBatches<B> {
    fn drop(&mut self) {
        self.enter(0);
    }
}

/// The positions of this rank's micro-batches, in the order of their use, to the end of the run.
struct Positions {
    /// Virtual ranks of this rank.
    virtual_ranks: Vec<u64>,
    virtual_rank_samples: u64,
    micro: u64,
    global: u64,
    /// Position of the next global batch, and batches left.
    base: u64,
    steps_left: u64,
    /// Samples of this rank's part of the batch already handed out.
    done: u64,
}

impl Positions {
    fn new(plan: &ResolvedConfig, rank: usize, progress: Progress) -> Self {
        Self {
            virtual_ranks: plan
                .virtual_ranks_of(rank)
                .into_iter()
                .flatten()
                .map(|virtual_rank| virtual_rank as u64)
                .collect(),
            virtual_rank_samples: plan.virtual_rank_samples,
            micro: plan.micro,
            global: plan.config.batch.global,
            base: progress.position,
            steps_left: plan.config.run.steps - progress.step,
            done: 0,
        }
    }
}

impl Iterator for Positions {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        if self.done == self.virtual_ranks.len() as u64 * self.virtual_rank_samples {
            (self.done, self.base, self.steps_left) =
                (0, self.base + self.global, self.steps_left.saturating_sub(1));
        }
        if self.steps_left == 0 {
            return None;
        }
        let virtual_rank = self.done / self.virtual_rank_samples;
        let of_virtual_rank = self.done % self.virtual_rank_samples;
        let start = self.base
            + self.virtual_ranks[virtual_rank as usize] * self.virtual_rank_samples
            + of_virtual_rank;
        self.done += self.micro;
        Some(start..start + self.micro)
    }
}
