//! The data of a run: the files that its configuration names, or samples that a program makes.
//!
//! A program's own source takes the place of the files for the whole run. Its samples are checked
//! as they are read, as `Dataset` checks those of files: to a kernel a class out of range would be
//! an address.

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
    /// Validation samples; without them nothing is evaluated, and the best checkpoint has the
    /// lowest mean training loss.
    pub validation: Option<Box<dyn Source>>,
}

impl Splits {
    /// The files of a configuration. Collective over `world`.
    ///
    /// # Errors
    /// As [`micro_batches::open_staged`].
    pub fn open<B: Backend>(
        config: &Config,
        world: &Group<B>,
        topology: &Topology,
    ) -> Result<Self> {
        let (train, validation) = micro_batches::open_staged(config, world, topology)?;
        let validation = validation.map(|validation| Box::new(validation) as Box<dyn Source>);
        Ok(Self { name: config.data.path.clone(), train: Box::new(train), validation })
    }

    /// The sources of both.
    pub fn sources(&self) -> Vec<&dyn Source> {
        let validation = self.validation.iter().map(|source| source as &dyn Source);
        std::iter::once(&self.train as &dyn Source).chain(validation).collect()
    }

    /// The same, with samples that are looked at as they are read: ids and classes that the network
    /// of `plan` does not know, and numbers that are none, are refused.
    /// [`Dataset`](hpctrain_data::Dataset) looks by itself.
    ///
    /// # Errors
    /// The samples have other sizes than the network takes, or there are none.
    pub fn checked(self, plan: &ResolvedConfig) -> Result<Self> {
        let check = |source: Box<dyn Source>, split: &str| -> Result<Box<dyn Source>> {
            check_sizes(plan, &source).map_err(|e| e.at(format_args!("{}, {split}", self.name)))?;
            let wanted = Wanted::by(plan, source.sizes());
            Ok(Box::new(Checked { source, name: self.name.clone(), wanted }))
        };
        let train = check(self.train, "training")?;
        let validation = self.validation.map(|source| check(source, "validation")).transpose()?;
        Ok(Self { name: self.name, train, validation })
    }
}

/// Samples must be of the sizes that the network takes.
///
/// # Errors
/// They are not, or there are none.
pub fn check_sizes(plan: &ResolvedConfig, source: &dyn Source) -> Result<()> {
    let samples = source.samples();
    let sizes = source.sizes();
    let wanted = Wanted::by(plan, sizes).sizes;
    if sizes == wanted && samples > 0 {
        return Ok(());
    }
    Err(Error::input(format!(
        "{samples} samples of {}, but the network takes {}",
        told(sizes),
        told(wanted)
    ))
    .hint("let samples() and sizes() of the source fit model and loss"))
}

/// Sizes for people.
fn told(SampleSizes { ids, features, classes, values, weights }: SampleSizes) -> String {
    let weights = if weights > 0 { format!(", {weights} weights") } else { String::new() };
    format!("{ids} ids, {features} features, {classes} classes and {values} values{weights}")
}

/// Sample sizes and id ranges of a network.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    sizes: SampleSizes,
    /// Ids and classes are below these.
    ids: usize,
    classes: usize,
}

impl Wanted {
    /// Sizes that the network requires of samples with `sizes`: rows may have weights, or not.
    fn by(plan: &ResolvedConfig, sizes: SampleSizes) -> Self {
        let spec = &plan.samples;
        let outputs = plan.network.outputs();
        // Text has no weights.
        let weights = if *spec == SampleSpec::Text { 0 } else { sizes.weights.min(1) };
        let sizes = SampleSizes { weights, ..spec.sizes(plan.network.context()) };
        Self { sizes, ids: spec.ids_below().unwrap_or(outputs), classes: outputs }
    }
}

/// A source whose samples are checked: a kernel would take an invalid class for a place in memory.
struct Checked {
    source: Box<dyn Source>,
    name: String,
    wanted: Wanted,
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
        self.wanted.sizes
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
        let sizes = self.wanted.sizes;
        let below = |what: &str, found: &[u32], a_sample: usize, limit: usize| {
            let place = found.iter().position(|id| *id as usize >= limit)?;
            let most = limit.saturating_sub(1);
            Some((
                place / a_sample,
                format!("{what} {}, but the network knows 0 to {most}", found[place]),
            ))
        };
        let finite = |found: &[f32], a_sample: usize| {
            let place = found.iter().position(|x| !x.is_finite())?;
            Some((place / a_sample, format!("{} is not a finite number", found[place])))
        };
        let found = [
            below("id", ids, sizes.ids, self.wanted.ids),
            below("class", classes, sizes.classes, self.wanted.classes),
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

    fn fingerprint(&self) -> Option<Fingerprint> {
        self.source.fingerprint()
    }

    fn cache_limit(&self) -> usize {
        self.source.cache_limit()
    }

    fn cached(&self) -> usize {
        self.source.cached()
    }

    fn left_out(&self) -> Option<String> {
        self.source.left_out()
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
