//! The data of a run: the files that its configuration names, or custom sources.
//!
//! A custom source replaces the files for the whole run. Its samples are checked as they are read,
//! as `Dataset` checks those of files, since a kernel would use a class out of range as an index.

use super::micro_batches;
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_config::topology::Topology;
use hpctrain_config::{Config, ResolvedConfig};
use hpctrain_data::{
    Fingerprint, Preprocessing, SampleMut, SampleSizes, SampleSpec, Source, Tokenizer, is_weight,
};
use hpctrain_device::Backend;

/// Training and validation samples of a network.
pub struct Splits {
    /// Replaces `data.path` in messages and in checkpoints.
    pub name: String,
    /// Training samples.
    pub train: Box<dyn Source>,
    /// Validation samples. Without them nothing is evaluated, and the best checkpoint is the one
    /// with the lowest mean training loss.
    pub validation: Option<Box<dyn Source>>,
}

impl Splits {
    /// Opens the files of a configuration. Collective over `world`.
    ///
    /// # Errors
    /// Returns an error if [`micro_batches::open_staged`] does.
    pub fn open<B: Backend>(
        config: &Config,
        world: &Group<B>,
        topology: &Topology,
    ) -> Result<Self> {
        let (train, validation) = micro_batches::open_staged(config, world, topology)?;
        let validation = validation.map(|validation| Box::new(validation) as Box<dyn Source>);
        Ok(Self { name: config.data.path.clone(), train: Box::new(train), validation })
    }

    /// Returns the sources of both splits.
    pub fn sources(&self) -> Vec<&dyn Source> {
        let validation = self.validation.iter().map(|source| source as &dyn Source);
        std::iter::once(&self.train as &dyn Source).chain(validation).collect()
    }

    /// Makes the sources check their samples as they are read: ids and classes out of the range of
    /// `plan`'s network, and numbers that are not finite, are errors.
    /// [`Dataset`](hpctrain_data::Dataset) checks these itself.
    ///
    /// # Errors
    /// Returns an error if the samples have other sizes than the network takes, or if there are
    /// none.
    pub fn checked(self, plan: &ResolvedConfig) -> Result<Self> {
        let train = check_split(self.train, plan, &self.name, "training")?;
        let validation =
            self.validation.map(|source| check_split(source, plan, &self.name, "validation"));
        Ok(Self { name: self.name, train, validation: validation.transpose()? })
    }
}

/// Makes the source of a split check its samples; an error names the split.
fn check_split(
    source: Box<dyn Source>,
    plan: &ResolvedConfig,
    name: &str,
    split: &str,
) -> Result<Box<dyn Source>> {
    check_source(source, plan, name).map_err(|e| e.at(format_args!("{name}, {split}")))
}

/// Makes a source check its samples as they are read, as [`Splits::checked`] does. Messages name it
/// `name`.
///
/// # Errors
/// Returns an error if the samples have other sizes than the network of `plan` takes, or if there
/// are none.
pub fn check_source(
    source: Box<dyn Source>,
    plan: &ResolvedConfig,
    name: &str,
) -> Result<Box<dyn Source>> {
    check_sizes(plan, &source)?;
    let required = Requirements::new(plan, source.sizes());
    Ok(Box::new(Checked { source, name: name.into(), required }))
}

/// Checks that samples have the sizes that the network takes.
///
/// # Errors
/// Returns an error if they do not, or if there are none.
pub fn check_sizes(plan: &ResolvedConfig, source: &dyn Source) -> Result<()> {
    let samples = source.samples();
    let sizes = source.sizes();
    let required = Requirements::new(plan, sizes).sizes;
    if sizes == required && samples > 0 {
        return Ok(());
    }
    Err(Error::input(format!(
        "{samples} samples of {}, but the network takes {}",
        describe(sizes),
        describe(required)
    ))
    .hint("make samples() and sizes() of the source match the model and the loss"))
}

/// Formats sizes for display.
fn describe(SampleSizes { ids, features, classes, values, weights }: SampleSizes) -> String {
    let weights = if weights > 0 { format!(", {weights} weights") } else { String::new() };
    format!("{ids} ids, {features} features, {classes} classes and {values} values{weights}")
}

/// The sample sizes and id ranges that a network requires.
#[derive(Debug, Clone, Copy)]
struct Requirements {
    sizes: SampleSizes,
    /// Ids and classes must be below these.
    ids: usize,
    classes: usize,
}

impl Requirements {
    /// Returns the requirements of a plan's network for samples with `sizes`, whose rows may have
    /// weights or not.
    fn new(plan: &ResolvedConfig, sizes: SampleSizes) -> Self {
        let spec = &plan.samples;
        let outputs = plan.network.outputs();
        // Text has no weights.
        let weights = if *spec == SampleSpec::Text { 0 } else { sizes.weights.min(1) };
        let sizes = SampleSizes { weights, ..spec.sizes(plan.network.context()) };
        Self { sizes, ids: spec.ids_below().unwrap_or(outputs), classes: outputs }
    }
}

/// A source whose samples are checked, since a kernel would use an invalid class as an index.
struct Checked {
    source: Box<dyn Source>,
    name: String,
    required: Requirements,
}

impl Checked {
    fn at(&self, sample: u64, error: Error) -> Error {
        error.at(format_args!("{}: sample {sample}", self.name))
    }
}

impl Source for Checked {
    fn samples(&self) -> u64 {
        self.source.samples()
    }

    fn sizes(&self) -> SampleSizes {
        self.required.sizes
    }

    fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        self.read_run(sample, 1, 0, into)
    }

    fn read_run(
        &mut self,
        first: u64,
        count: usize,
        epoch: u64,
        mut into: SampleMut<'_>,
    ) -> Result<()> {
        self.source
            .read_run(first, count, epoch, into.reborrow())
            .map_err(|e| self.at(first, e))?;
        let SampleMut { ids, features, classes, values, weights } = into;
        let sizes = self.required.sizes;
        let finite = |found: &[f32], per_sample: usize| {
            let index = found.iter().position(|x| !x.is_finite())?;
            Some((index / per_sample, format!("{} is not a finite number", found[index])))
        };
        let found = [
            first_out_of_range("id", ids, sizes.ids, self.required.ids),
            first_out_of_range("class", classes, sizes.classes, self.required.classes),
            finite(features, sizes.features),
            finite(values, sizes.values),
            weights.iter().position(|x| !is_weight(*x)).map(|sample| {
                (sample, format!("weight {} is not a finite number of 0 or more", weights[sample]))
            }),
        ];
        match found.into_iter().flatten().min_by_key(|(sample, _)| *sample) {
            Some((sample, message)) => Err(self.at(first + sample as u64, Error::input(message))),
            None => Ok(()),
        }
    }

    fn parts(&self) -> Vec<u64> {
        self.source.parts()
    }

    fn files(&self) -> Vec<u64> {
        self.source.files()
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        self.source.fingerprint()
    }

    fn cache_limit(&self) -> usize {
        self.source.cache_limit()
    }

    fn cached(&self) -> usize {
        self.source.cached()
    }

    fn skipped_note(&self) -> Option<String> {
        self.source.skipped_note()
    }

    fn unscaled(&self) -> Option<String> {
        self.source.unscaled()
    }

    fn context(&self) -> usize {
        self.source.context()
    }

    fn vocabulary(&self) -> usize {
        self.source.vocabulary()
    }

    fn tokens(&self) -> u64 {
        self.source.tokens()
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        self.source.tokenizer()
    }

    fn preprocessing(&self) -> Preprocessing {
        self.source.preprocessing()
    }

    fn conform(&mut self, to: &Preprocessing) -> Result<Vec<String>> {
        self.source.conform(to)
    }
}

/// Returns the sample of the first number in `found` that is not below `limit`, and a message.
/// Samples have `per_sample` numbers each.
fn first_out_of_range(
    what: &str,
    found: &[u32],
    per_sample: usize,
    limit: usize,
) -> Option<(usize, String)> {
    let index = found.iter().position(|id| *id as usize >= limit)?;
    let most = limit.saturating_sub(1);
    let message = format!("{what} {}, but the network knows 0 to {most}", found[index]);
    Some((index / per_sample, message))
}
