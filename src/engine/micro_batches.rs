//! Opens the data of a run, and reads the micro-batches of a rank in the order of their use.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::model::Model;
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, DataOrder, ModelKind, ResolvedConfig, sample_spec};
use hpctrain_data::{
    Augment, Batch, DataSpec, Dataset, FileOrder, Loader, RankBatches, SampleOrder, SampleSpec,
    ShardIndex, Source, Split, Target, ValidationSource, bundled, local_cache,
};
use hpctrain_device::{Backend, Kernels, MemoryKind};
use hpctrain_nn::MicroBatch;
use hpctrain_parallel::Progress;
use hpctrain_parallel::Stage;

/// Opens the training and validation data of a configuration. Validation data is `None` if there is
/// none and the configuration requires none.
///
/// # Errors
/// Returns an error if data is missing or malformed; it names the file.
pub fn open(config: &Config) -> Result<(Dataset, Option<Dataset>)> {
    open_specs(&mut ShardIndex::recording(), config, &specs(config)?)
}

/// Opens data on all ranks of `world`: rank 0 inspects the files and sends their index to the other
/// ranks. Collective.
///
/// # Errors
/// Returns an error, shared by all ranks, if `open` fails, or if a message between ranks fails.
pub fn open_together<B: Backend, T>(
    world: &Group<B>,
    open: impl FnOnce(&mut ShardIndex) -> Result<T>,
) -> Result<T> {
    if world.rank() == 0 {
        let mut index = ShardIndex::recording();
        let opened = world.all_ok(open(&mut index))?;
        let message =
            world.all_ok(if world.size() > 1 { index.into_bytes() } else { Ok(Vec::new()) })?;
        world.gather_bytes(message).wait()?;
        return world.all_ok(Ok(opened));
    }
    world.all_ok(Ok(()))?;
    world.all_ok(Ok(()))?;
    let messages = world.gather_bytes(Vec::new()).wait()?;
    let opened = ShardIndex::from_bytes(&messages[0], world.is_first_of_node())
        .and_then(|mut index| open(&mut index));
    world.all_ok(opened)
}

/// Opens data like [`open`], on all ranks of a job. With `data.local_cache` one rank of each node
/// first copies the shards to local storage, and all read the copies. Collective.
///
/// # Errors
/// Returns an error if [`open`] does, or if the shards cannot be copied.
pub fn open_staged<B: Backend>(
    config: &Config,
    world: &Group<B>,
    topology: &Topology,
) -> Result<(Dataset, Option<Dataset>)> {
    let sources = world.all_ok(specs(config))?;
    let Some(root) = config.data.local_cache.as_ref().map(Path::new) else {
        return open_together(world, |index| open_specs(index, config, &sources));
    };
    let here = &topology.here().host;
    // The original files are checked first, so that errors name the paths in the configuration.
    world.all_ok(if world.rank() == 0 {
        check_self_contained(config, &sources)
    } else {
        Ok(())
    })?;
    let is_first = (0..world.rank()).all(|rank| topology.host(rank) != here);
    // Copies may take longer than the timeout of messages.
    world.with_keepalive(is_first.then_some(|| copy_shards(&sources, root, here)))?;
    let staged = sources.iter().map(|spec| local_cache::place(spec, root)).collect();
    let staged: Vec<DataSpec> = world.all_ok(staged)?;
    open_together(world, |index| open_specs(index, config, &staged))
}

/// Checks that no shard of a configuration's data sets refers to other files.
fn check_self_contained(config: &Config, sources: &[DataSpec]) -> Result<()> {
    let (train, validation) = open_specs(&mut ShardIndex::recording(), config, sources)?;
    std::iter::once(&train).chain(&validation).try_for_each(Dataset::check_self_contained)
}

/// Copies the shards of data sets to `root` on the node `host`, and logs their number and size.
fn copy_shards(sources: &[DataSpec], root: &Path, host: &str) -> Result<()> {
    for spec in sources {
        let local_cache::Staged { copied: (files, bytes), reused } =
            local_cache::stage(spec, root)?;
        let from = spec.path.display();
        let to = root.display();
        log::info!(
            "{host}: {files} shards ({bytes} bytes) of {from} copied to {to}, {reused} reused"
        );
    }
    Ok(())
}

fn open_specs(
    index: &mut ShardIndex,
    config: &Config,
    specs: &[DataSpec],
) -> Result<(Dataset, Option<Dataset>)> {
    let mut train = Dataset::open_with_index(index, specs, Split::Train, predictions(config))?;
    if config.data.augment != Augment::default() {
        // Samples of language models have no shape.
        let shape = config.model.input.as_deref().unwrap_or_default();
        train.augment(config.data.augment, shape, config.run.seed)?;
    }
    let mut validation = open_validation(index, config, specs)?;
    if let Some(validation) = &mut validation {
        validation.conform(train.preprocessing())?;
    }
    Ok((train, validation))
}

/// Opens data for evaluation, which ignores weights of samples.
fn open_measured(
    index: &mut ShardIndex,
    config: &Config,
    specs: &[DataSpec],
    split: Split,
) -> Result<Dataset> {
    let specs: Vec<DataSpec> = specs
        .iter()
        .map(|spec| DataSpec { weights: Some(String::new()), ..spec.clone() })
        .collect();
    Dataset::open_with_index(index, &specs, split, predictions(config))
}

/// Opens the validation data, if there is any.
fn open_validation(
    index: &mut ShardIndex,
    config: &Config,
    specs: &[DataSpec],
) -> Result<Option<Dataset>> {
    let held =
        specs.iter().map(|spec| index.validation_source(spec)).collect::<Result<Vec<_>>>()?;
    let fraction = config.data.val_fraction;
    if fraction > 0.0 && !held.contains(&ValidationSource::Fraction) {
        let path = specs[0].path.display();
        return Err(Error::input(format!(
            "data.val_fraction = {fraction}, but {path} has validation shards"
        ))
        .hint("remove data.val_fraction, or move the validation shards away"));
    }
    let without: Vec<&DataSpec> = specs
        .iter()
        .zip(&held)
        .filter(|(_, held)| **held == ValidationSource::Nowhere)
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
    open_measured(index, config, specs, Split::Validation).map(Some)
}

/// Opens the validation data of a configuration.
///
/// # Errors
/// Returns an error if [`open`] does, or if there is none.
pub fn validation(index: &mut ShardIndex, config: &Config) -> Result<Dataset> {
    open_for_eval(index, config, Split::Validation)
}

/// Opens a split of a configuration's data for evaluation.
///
/// # Errors
/// Returns an error if [`open`] does, or if there is none.
pub fn open_for_eval(index: &mut ShardIndex, config: &Config, split: Split) -> Result<Dataset> {
    let specs = specs(config)?;
    match split {
        Split::Train => open_measured(index, config, &specs, split),
        Split::Validation => open_validation(index, config, &specs)?
            .ok_or_else(|| no_validation("evaluation requires it", config)),
    }
}

/// Returns true if all data sets of a configuration have a split.
///
/// # Errors
/// Returns an error if the configuration names bundled data that does not exist.
pub fn has_split(config: &Config, split: Split) -> Result<bool> {
    let specs = specs(config)?;
    Ok(match split {
        Split::Train => specs.iter().all(|spec| spec.files(split).is_ok()),
        Split::Validation => specs.iter().all(|spec| {
            spec.validation_source().is_ok_and(|held| held != ValidationSource::Nowhere)
        }),
    })
}

/// Returns the error for missing validation data; `what` says what requires it.
pub fn no_validation(what: &str, config: &Config) -> Error {
    Error::input(format!("{} has no validation data: {what}", config.data.display_location()))
        .hint("add validation shards (data.validation), or keep a part of the samples for it, such as data.val_fraction = 0.1")
}

/// Opens the rows of a configuration's data without targets, which may be missing.
///
/// # Errors
/// Returns an error if [`open`] does.
pub fn open_inputs(index: &mut ShardIndex, config: &Config, split: Split) -> Result<Dataset> {
    let mut specs = specs(config)?;
    for spec in &mut specs {
        if let SampleSpec::Rows { target, .. } = &mut spec.samples {
            *target = Target::Unknown;
        }
    }
    Dataset::open_with_index(index, &specs, split, predictions(config))
}

/// Returns the number of predictions per sample.
fn predictions(config: &Config) -> usize {
    if config.model.kind == ModelKind::Layers { 1 } else { config.model.context }
}

/// Returns the descriptions of the data sets.
fn specs(config: &Config) -> Result<Vec<DataSpec>> {
    let data = &config.data;
    let samples = sample_spec(config)?;
    if data.mix.is_empty() {
        Ok(vec![data_spec(config, &data.path, &samples)?])
    } else {
        data.mix.iter().map(|one| data_spec(config, &one.path, &samples)).collect()
    }
}

/// Returns the description of the data set at `path`, which has such samples.
fn data_spec(config: &Config, path: &str, samples: &SampleSpec) -> Result<DataSpec> {
    let data = &config.data;
    let path = match path.strip_prefix("bundled:") {
        Some(name) => bundled::locate(name)?,
        None => PathBuf::from(path),
    };
    // Samples of language models are ids and have no shape.
    let shape = match samples {
        SampleSpec::Rows { .. } => config.model.input.clone().unwrap_or_default(),
        SampleSpec::Text | SampleSpec::Anything => vec![],
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
        shape,
        axes: data.image_layout,
        val_fraction: data.val_fraction,
        scale: data.scale,
        vocabulary: config.model.vocabulary,
        verify: data.verify,
        external_files: data.external_files,
        samples: samples.clone(),
    })
}

/// Returns the positions of the micro-batches of data-parallel rank `rank` in the order of their
/// use, from `progress` on, and the order that gives the sample at each of them.
///
/// # Errors
/// Returns an error if the weights of a mixture are invalid, or if there are no files for the rank.
pub fn read_schedule(
    plan: &ResolvedConfig,
    train: &dyn Source,
    rank: usize,
    progress: Progress,
) -> Result<(Positions, SampleOrder)> {
    let positions = Positions::new(plan, rank, progress);
    let order = match plan.config.data.order {
        DataOrder::Samples => order(&plan.config, train)?,
        DataOrder::Files => file_order(plan, &train.files(), rank, progress.position)?.into(),
    };
    Ok((positions, without_excluded(plan, order, progress.position)))
}

/// Returns an order without the excluded samples of a plan, for global batches from position
/// `first` on.
fn without_excluded(plan: &ResolvedConfig, order: SampleOrder, first: u64) -> SampleOrder {
    let config = &plan.config;
    match &plan.excluded {
        None => order,
        Some(excluded) => {
            order.excluding(excluded.clone(), config.run.seed, first, config.batch.global)
        }
    }
}

/// Returns the order of data-parallel rank `rank` in those of `files` that are dealt to it, for
/// global batches from position `first` on. `files` has the number of samples of each file.
fn file_order(plan: &ResolvedConfig, files: &[u64], rank: usize, first: u64) -> Result<FileOrder> {
    let batches = RankBatches {
        first,
        global: plan.config.batch.global,
        virtual_rank_samples: plan.virtual_rank_samples,
        virtual_ranks: plan.virtual_ranks_of_rank(rank).into_iter().flatten().collect(),
        ranks: plan.mesh.data(),
        rank,
    };
    FileOrder::new(files, seed(&plan.config), batches)
}

/// Returns the seed of the order of samples, if they are shuffled.
fn seed(config: &Config) -> Option<u64> {
    config.data.shuffle.then_some(config.run.seed)
}

/// Returns the order of samples in a run whose ranks draw from all of them.
fn order(config: &Config, train: &dyn Source) -> Result<SampleOrder> {
    let weights: Vec<f64> = match &config.data.mix[..] {
        [] => vec![1.0],
        mix => mix.iter().map(|one| one.weight).collect(),
    };
    SampleOrder::mixed(&train.parts(), &weights, seed(config))
}

/// Returns the vocabulary size of a configuration's data.
///
/// # Errors
/// Returns an error if the data cannot be opened.
pub fn vocabulary(config: &Config) -> Result<usize> {
    open(config).map(|(train, _)| train.vocabulary())
}

/// Copies a batch of samples with `time` predictions to the device: inputs in the first pipeline
/// stage, targets in the last. Ids stay on the host if it has their embedding tables. `base` is the
/// position of the global batch's first sample.
///
/// # Errors
/// Returns an error if the device is out of memory.
pub fn upload<B: Backend>(
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
    let host_ids = if stage.takes_embedding_rows() {
        std::mem::take(&mut parts.ids).to_vec()
    } else {
        Vec::new()
    };
    let samples = (batch.positions.end - batch.positions.start) as usize;
    let micro = MicroBatch::upload(backend, parts, samples, time, batch.positions.start - base)?;
    Ok(MicroBatch { host_ids, ..micro })
}

/// Checks that no step uses a sample twice, unless `data.repeat` allows it, that every rank has
/// files if they are dealt to ranks, and that not all samples are excluded.
///
/// # Errors
/// Returns an error if the data has fewer samples than a global batch, or fewer files than ranks.
pub fn check_size(plan: &ResolvedConfig, train: &dyn Source) -> Result<()> {
    let repeat = plan.config.data.repeat;
    let global = plan.config.batch.global;
    let is_refused = |(_, have, _): &(usize, u64, u64)| !repeat || *have == 0;
    let not_excluded =
        if plan.excluded.is_some() { " that data.exclude does not list" } else { "" };
    if plan.config.data.order == DataOrder::Files {
        let files = train.files();
        for rank in 0..plan.mesh.data() {
            let order = without_excluded(plan, file_order(plan, &files, rank, 0)?.into(), 0);
            if let Some((_, have, needed)) = order.repeats_within(global).filter(is_refused) {
                return Err(Error::input(format!(
                    "the shards of data-parallel rank {rank} have {have} training samples\
                     {not_excluded}, fewer than its {needed} of batch.global = {global}"
                ))
                .hint(match have {
                    0 => ALL_EXCLUDED.to_owned(),
                    _ => format!("reduce batch.global, give shards equal sizes, {OR_REPEAT}"),
                }));
            }
        }
        return Ok(());
    }
    let order = without_excluded(plan, order(&plan.config, train)?, 0);
    let Some((number, have, needed)) = order.repeats_within(global).filter(is_refused) else {
        return Ok(());
    };
    if have == 0 {
        let of_mix = plan.config.data.mix.get(number).map(|one| &one.path);
        let path = of_mix.unwrap_or(&plan.config.data.path);
        return Err(Error::input(format!("data.exclude lists all training samples of {path}"))
            .hint(ALL_EXCLUDED));
    }
    let Some(one) = plan.config.data.mix.get(number) else {
        let path = &plan.config.data.path;
        let is_text = matches!(sample_spec(&plan.config)?, SampleSpec::Text);
        let (of_tokens, or_shorten) = if is_text {
            (format!(" of {} tokens", plan.network.context()), ", shorten model.context")
        } else {
            (String::new(), "")
        };
        return Err(Error::input(format!(
            "{path} has {have} training samples{of_tokens}{not_excluded}, fewer than \
             batch.global = {needed}"
        ))
        .hint(format!("set batch.global to at most {have}{or_shorten}, {OR_REPEAT}")));
    };
    Err(Error::input(format!(
        "{} has {have} training samples{not_excluded}, but batch.global = {global} may take \
         {needed} of them",
        one.path
    ))
    .hint(format!("reduce batch.global or its weight in data.mix, {OR_REPEAT}")))
}

/// The hint for data all of whose samples are excluded.
const ALL_EXCLUDED: &str = "keep some of them, or omit the data set";

/// The end of hints for data with fewer samples than a batch.
const OR_REPEAT: &str = "or let a batch take samples again with data.repeat=true";

/// The micro-batches of a rank, read ahead on the host and copied to the device one at a time.
pub struct MicroBatches<B: Kernels> {
    backend: B,
    loader: Loader,
    stage: Stage,
    /// Predictions of a sample.
    time: usize,
    /// Position of the first sample of the first global batch, and samples per global batch.
    first: u64,
    global: u64,
    /// Bytes of the loader entered in the memory statistics.
    entered: usize,
}

impl<B: Kernels> MicroBatches<B> {
    /// Starts to read the samples of this rank of `model`, starting at `progress`.
    ///
    /// # Errors
    /// Returns an error if the reader thread cannot be started.
    pub fn start(
        model: &Model<B>,
        train: impl Source + 'static,
        plan: &ResolvedConfig,
        progress: Progress,
    ) -> Result<Self> {
        let rank = model.sharded.data().rank();
        let (positions, order) = read_schedule(plan, &train, rank, progress)?;
        Self::start_in_order(model, train, plan, progress.position, positions, order)
    }

    /// Starts to read the micro-batches at `positions`, of samples drawn from all files. Global
    /// batches are consecutive, starting at position `first`.
    ///
    /// # Errors
    /// Returns an error if [`MicroBatches::start`] does.
    pub fn start_at(
        model: &Model<B>,
        train: impl Source + 'static,
        plan: &ResolvedConfig,
        first: u64,
        positions: impl Iterator<Item = Range<u64>> + Send + 'static,
    ) -> Result<Self> {
        let order = order(&plan.config, &train)?;
        Self::start_in_order(model, train, plan, first, positions, order)
    }

    /// Starts to read the micro-batches at `positions`, of the samples that `order` gives. Global
    /// batches are consecutive, starting at position `first`.
    ///
    /// # Errors
    /// Returns an error if the reader thread cannot be started.
    pub fn start_in_order(
        model: &Model<B>,
        train: impl Source + 'static,
        plan: &ResolvedConfig,
        first: u64,
        positions: impl Iterator<Item = Range<u64>> + Send + 'static,
        order: SampleOrder,
    ) -> Result<Self> {
        let stage = model.sharded.stage().clone();
        let loader = Loader::start(train, order, positions, plan.config.data.prefetch)?;
        let time = plan.network.context();
        let global = plan.config.batch.global;
        let backend = model.backend.clone();
        Ok(Self { backend, loader, stage, time, first, global, entered: 0 })
    }

    /// Copies the next micro-batch to the device.
    ///
    /// # Errors
    /// Returns an error if the data cannot be read, or if the device is out of memory.
    pub fn next_micro(&mut self) -> Result<MicroBatch<B>> {
        let batch = self.loader.next()?;
        self.enter(self.loader.buffered_bytes());
        let start = batch.positions.start;
        let base = start - (start - self.first) % self.global;
        let micro = upload(&self.backend, &batch, self.time, base, &self.stage)?;
        self.loader.recycle(batch);
        Ok(micro)
    }

    /// Skips the next micro-batch.
    ///
    /// # Errors
    /// Returns an error if the data cannot be read.
    pub fn skip(&mut self) -> Result<()> {
        let batch = self.loader.next()?;
        self.loader.recycle(batch);
        Ok(())
    }

    /// Returns the total time that [`MicroBatches::next_micro`] has waited for the reader.
    pub fn waited(&self) -> Duration {
        self.loader.waited()
    }

    /// Enters the loader's memory in the memory statistics of the device.
    fn enter(&mut self, held: usize) {
        self.backend.memory_stats().record_resize(MemoryKind::Data, self.entered, held);
        self.entered = held;
    }
}

impl<B: Kernels> Drop for MicroBatches<B> {
    fn drop(&mut self) {
        self.enter(0);
    }
}

/// The positions of a rank's micro-batches, in the order of their use, up to the end of the run.
pub struct Positions {
    /// The virtual ranks of this rank.
    virtual_ranks: Vec<u64>,
    virtual_rank_samples: u64,
    micro: u64,
    global: u64,
    /// Position of the current global batch, and the number of batches left.
    base: u64,
    steps_left: u64,
    /// Samples of this rank's part of the batch that were returned already.
    done: u64,
}

impl Positions {
    /// Returns the number of micro-batches of the rank in a step.
    pub fn micros_per_step(&self) -> u64 {
        self.virtual_ranks.len() as u64 * self.virtual_rank_samples / self.micro
    }

    fn new(plan: &ResolvedConfig, rank: usize, progress: Progress) -> Self {
        Self {
            virtual_ranks: plan
                .virtual_ranks_of_rank(rank)
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
        if self.steps_left == 0 || self.virtual_ranks.is_empty() {
            return None;
        }
        let virtual_rank = self.done / self.virtual_rank_samples;
        let within_virtual_rank = self.done % self.virtual_rank_samples;
        let start = self.base
            + self.virtual_ranks[virtual_rank as usize] * self.virtual_rank_samples
            + within_virtual_rank;
        self.done += self.micro;
        Some(start..start + self.micro)
    }
}
