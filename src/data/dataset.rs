//! All shards of one split as one numbered sequence of samples.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::augment::{Augment, Augmenter};
use super::block_checksums::{Scratch, Seen};
use super::element_convert::ReadAs;
use super::import::skipped_note;
use super::preprocessing::{self, Converted, Preprocessing, Recoded, Transform};
use super::rows::RowReader;
use super::sample_fields::{SampleMut, SampleSizes};
use super::shard::{Shard, first_invalid};
use super::shard_index::ShardIndex;
use super::shard_schema::{Field, Rows, ShardSchema};
use super::spec::{DataSpec, Ids, SampleSpec, Split, Target, ValidationSource, Verify};
use super::train_val_split::{TrainValSplit, millionths};
use super::{Fingerprint, Tokenizer, shard_set_check};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::fd_limit;
use hpctrain_base::simd::simd;

/// The largest number of shards kept open at once; fewer if the process may open fewer files.
const MAX_OPEN: usize = 256;
/// The largest number of bytes cached for all shards together, unless single chunks are larger.
const CACHE_TOTAL: usize = 128 << 20;

/// The samples of one split: rows with their targets, or, for language models, `context` input ids
/// and as many targets.
///
/// A token stream is cut into windows of `context + 1` ids at stride `context`, so that each token
/// is a target at most once. Windows never cross shards, nor documents where those are rows; the
/// remainder at the end of either is not used.
pub struct Dataset {
    shards: Vec<Shard>,
    /// The number of the first sample of each shard, and of all samples at the end.
    first_sample: Vec<u64>,
    /// The number of samples of each data set.
    parts: Vec<u64>,
    /// For each data set, which of its stored samples belong to the split.
    divisions: Vec<TrainValSplit>,
    /// The fraction of the stored samples that is kept for validation, in millionths; 0 for none.
    held_out: u64,
    context: usize,
    spec: SampleSpec,
    /// All ids are below this, whether of text or of rows.
    vocabulary: usize,
    open: OpenShards,
    /// The preprocessing of all samples, and the conversion to it for each shard.
    preprocessing: Preprocessing,
    forms: Vec<Arc<Transform>>,
    /// Augmentation of images, before they are scaled.
    augmenter: Option<Augmenter>,
}

impl Dataset {
    /// Opens and checks every shard of `split`.
    ///
    /// # Errors
    /// Returns an error that names the file or dataset if data is missing or malformed.
    pub fn open(spec: &DataSpec, split: Split, context: usize) -> Result<Self> {
        Self::open_all(std::slice::from_ref(spec), split, context)
    }

    /// Opens and checks every shard of several data sets of the same kind, whose samples are
    /// numbered one after the other.
    ///
    /// # Errors
    /// Returns an error if [`Dataset::open`] would for one of them, or if the data sets do not fit
    /// together.
    pub fn open_all(specs: &[DataSpec], split: Split, context: usize) -> Result<Self> {
        Self::open_with_index(&mut ShardIndex::of_files(), specs, split, context)
    }

    /// Opens data sets like [`Dataset::open_all`], with the descriptions of files that
    /// `shard_index` provides.
    ///
    /// # Errors
    /// Returns an error if [`Dataset::open_all`] would.
    pub fn open_with_index(
        shard_index: &mut ShardIndex,
        specs: &[DataSpec],
        split: Split,
        context: usize,
    ) -> Result<Self> {
        if context == 0 {
            return Err(Error::input("the context is 0 tokens, but must be at least 1")
                .hint("set model.context to 1 or more"));
        }
        let mut shards = Vec::<Shard>::new();
        let mut first_sample = vec![0];
        let mut divisions = Vec::new();
        let mut held_out = 0;
        let mut samples = 0;
        for spec in specs {
            let own = shards.len();
            let before = samples;
            let is_divided = spec.val_fraction > 0.0
                && shard_index.validation_source(spec)? == ValidationSource::Fraction;
            // Both splits are in the same shards.
            let of_files = if is_divided { Split::Train } else { split };
            for path in shard_index.files(spec, of_files)? {
                let mut shard = shard_index.shard(&path, spec)?;
                // Lists of values may be long, and are usually the same in all shards: one copy is
                // kept.
                if let Some(last) =
                    shards.last().filter(|last| last.preprocessing == shard.preprocessing)
                {
                    shard.preprocessing = last.preprocessing.clone();
                }
                if let Some(first) = shards.get(own) {
                    shard.check_sibling(first)?;
                } else if let Some(first) = shards.first() {
                    shard.check_mixable(first)?;
                }
                if let Some(first) = shards.first() {
                    shard.check_weights(first)?;
                }
                samples += shard.samples(context)?;
                first_sample.push(samples);
                shards.push(shard);
            }
            check_completeness(spec, of_files, &shards[own..])?;
            let stored = samples - before;
            divisions.push(if is_divided {
                held_out = millionths(spec.val_fraction);
                let is_text = matches!(spec.samples, SampleSpec::Text);
                TrainValSplit::new(
                    stored,
                    spec.val_fraction,
                    is_text,
                    split,
                    &spec.path.to_string_lossy(),
                )?
            } else {
                TrainValSplit::all(stored)
            });
        }
        shards.iter().try_for_each(Shard::check_written)?;
        let spec = specs.first().ok_or_else(|| Error::internal("no data set is to be opened"))?;
        let vocabulary = match &spec.samples {
            SampleSpec::Text | SampleSpec::Anything => shards[0].vocabulary(spec.vocabulary)?,
            SampleSpec::Rows { ids: Ids::Input(below), .. } => *below,
            SampleSpec::Rows { .. } => 0,
        };
        let open = OpenShards::new(&shards, fd_limit::share(MAX_OPEN), spec.verify);
        let parts = divisions.iter().map(TrainValSplit::count).collect();
        let spec = spec.samples.clone();
        let preprocessing = Preprocessing::default();
        let forms = Vec::new();
        let mut dataset = Self {
            shards,
            first_sample,
            parts,
            divisions,
            held_out,
            context,
            spec,
            vocabulary,
            open,
            preprocessing,
            forms,
            augmenter: None,
        };
        let own = dataset.described_preprocessing();
        dataset.conform(&own)?;
        Ok(dataset)
    }

    /// Returns the preprocessing that the shards describe; columns and classes are those of the
    /// first shard that has any.
    fn described_preprocessing(&self) -> Preprocessing {
        let mut own = Preprocessing {
            tokenizer: self.shards[0].header.tokenizer.clone(),
            ..Preprocessing::default()
        };
        for described in self.shards.iter().map(|shard| &shard.preprocessing) {
            if self.sizes().features > 0 && !own.scales.contains(&described.scale) {
                own.scales.push(described.scale.clone());
            }
            own.columns = own.columns.or_else(|| described.columns.as_deref().cloned());
            if own.classes.is_empty() {
                own.classes.clone_from(&described.classes);
            }
        }
        own
    }

    /// Returns the preprocessing of samples as they are read: the shards' own, or the last one
    /// given to [`Dataset::conform`].
    pub fn preprocessing(&self) -> &Preprocessing {
        &self.preprocessing
    }

    /// Makes later reads return samples with the preprocessing `to` that a network was trained
    /// with: its scale, its order of columns, and its numbers of categories and classes. Returns a
    /// description of each conversion, one line each.
    ///
    /// # Errors
    /// Returns an error that names the shard and the remedy if samples cannot be converted, or if
    /// the tokenizers differ.
    pub fn conform(&mut self, to: &Preprocessing) -> Result<Vec<String>> {
        let own = self.described_preprocessing();
        let tokenizer = preprocessing::tokenizer(own.tokenizer.as_ref(), to.tokenizer.as_ref());
        let tokenizer = tokenizer.map_err(|e| e.at(self.shards[0].path.display()))?.cloned();
        let is_class = matches!(self.spec, SampleSpec::Rows { target: Target::Class(_), .. });
        let parts = Converted { numbers: self.sizes().features, classes: is_class };
        let mut notes = Vec::new();
        let mut forms = Vec::<Arc<Transform>>::new();
        for (index, shard) in self.shards.iter().enumerate() {
            // The shards of a data set usually describe the same preprocessing.
            let form = match forms.last() {
                Some(before) if shard.preprocessing == self.shards[index - 1].preprocessing => {
                    before.clone()
                }
                _ => Transform::new(&shard.preprocessing, to, parts, &mut notes)
                    .map_err(|e| e.at(shard.path.display()))?
                    .into(),
            };
            forms.push(form);
        }
        // Parts that the network's preprocessing lacks come from the data.
        self.preprocessing = Preprocessing {
            scales: if to.scales.is_empty() { own.scales } else { to.scales.clone() },
            columns: to.columns.clone().or(own.columns),
            classes: if to.classes.is_empty() { own.classes } else { to.classes.clone() },
            tokenizer,
        };
        self.forms = forms;
        Ok(notes)
    }

    /// Makes later reads augment images at random, derived from `seed`; `shape` is the shape of a
    /// row.
    ///
    /// # Errors
    /// Returns an error if samples are not images, or if a shift or crop is not smaller than they
    /// are.
    pub fn augment(&mut self, by: Augment, shape: &[usize], seed: u64) -> Result<()> {
        if self.sizes().ids > 0 {
            return Err(
                Error::input("data.augment is for images, but samples have ids").hint("omit it")
            );
        }
        self.augmenter = Some(Augmenter::new(by, shape, seed)?);
        Ok(())
    }

    /// Refuses shards some of whose elements are in other files: a copy of such a shard would lack
    /// them, or read the originals.
    ///
    /// # Errors
    /// Returns an error that names the first such dataset and its shard.
    pub fn check_self_contained(&self) -> Result<()> {
        let first = self.shards.iter().find_map(|shard| {
            let field = shard.content.datasets().into_iter().find(|field| field.is_elsewhere)?;
            Some((&shard.path, &field.name))
        });
        match first {
            None => Ok(()),
            Some((path, name)) => Err(Error::input(format!(
                "{}: {name} has elements in other files, which data.local_cache does not copy",
                path.display()
            ))
            .hint("read it where it is, without data.local_cache, or write the elements into the file itself")),
        }
    }

    /// Returns the number of samples; at least one.
    pub fn samples(&self) -> u64 {
        self.parts.iter().sum()
    }

    /// Returns the index of sample `number` among all stored samples, and the number of consecutive
    /// stored samples of the split from there on.
    fn stored(&self, number: u64) -> (u64, u64) {
        let mut number = number;
        let mut before = 0;
        for (division, count) in self.divisions.iter().zip(&self.parts) {
            if number < *count {
                let (place, run) = division.run(number);
                return (before + place, run);
            }
            number -= count;
            before += division.stored();
        }
        (before, 0)
    }

    /// Returns the number of samples of each data set.
    pub fn parts(&self) -> &[u64] {
        &self.parts
    }

    /// Returns the number of samples of the split in each shard.
    pub fn samples_of_shards(&self) -> Vec<u64> {
        let firsts: Vec<u64> =
            self.first_sample.iter().map(|stored| self.first_number(*stored)).collect();
        firsts.windows(2).map(|shard| shard[1] - shard[0]).collect()
    }

    /// Returns the number of the first sample of the split that is stored at index `stored` or
    /// after it.
    fn first_number(&self, stored: u64) -> u64 {
        let mut number = 0;
        let mut beyond = self.samples();
        while number < beyond {
            let middle = number + (beyond - number) / 2;
            if self.stored(middle).0 < stored {
                number = middle + 1;
            } else {
                beyond = middle;
            }
        }
        number
    }

    /// Returns the file that stores sample `number`, and its index there: a row, or for text the
    /// number of a window of [`context`](Self::context) tokens.
    pub fn locate(&self, number: u64) -> (&Path, u64) {
        let (place, _) = self.stored(number);
        let shard = self.first_sample.partition_point(|&first| first <= place) - 1;
        (&self.shards[shard].path, place - self.first_sample[shard])
    }

    /// Returns the number of the data set that sample `number` belongs to.
    pub fn data_set(&self, number: u64) -> usize {
        let mut end = 0;
        let ends = self.parts.iter().map(|samples| {
            end += samples;
            end
        });
        ends.take_while(|end| *end <= number).count()
    }

    /// Returns the samples as they are stored: later reads neither scale nor augment inputs.
    #[must_use]
    pub fn as_stored(mut self) -> Self {
        for form in &mut self.forms {
            Arc::make_mut(form).scale = None;
        }
        self.augmenter = None;
        self
    }

    /// Returns the shards whose files are open.
    pub fn open_shards(&self) -> impl Iterator<Item = &Path> {
        let shards = self.shards.iter().zip(&self.open.shards);
        shards.filter(|(_, open)| open.is_some()).map(|(shard, _)| &*shard.path)
    }

    /// Returns the form of the samples.
    pub(super) fn sample_spec(&self) -> &SampleSpec {
        &self.spec
    }

    /// Returns a bound that all ids are below.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns the number of predictions per sample; for text, the number of its ids.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Returns the number of elements of each part of a sample.
    pub fn sizes(&self) -> SampleSizes {
        let sizes = self.spec.sizes(self.context);
        match self.spec {
            SampleSpec::Text | SampleSpec::Anything => sizes,
            SampleSpec::Rows { .. } => SampleSizes {
                weights: usize::from(self.shards[0].content.weights().is_some()),
                ..sizes
            },
        }
    }

    /// Returns the fingerprint of the data.
    pub fn fingerprint(&self) -> Fingerprint {
        let shards = self.shards.iter().map(|shard| shard.print.clone()).collect();
        Fingerprint { samples: self.samples(), held_out: self.held_out, shards }
    }

    /// Returns the number of input elements in the shards; for text, including ids outside any
    /// whole window.
    pub fn tokens(&self) -> u64 {
        let all: u64 =
            self.shards.iter().map(|shard| shard.content.datasets()[0].len() as u64).sum();
        let stored = self.first_sample[self.shards.len()];
        match self.samples() {
            samples if samples == stored => all,
            // Tokens outside any whole window are divided in proportion.
            samples => (u128::from(all) * u128::from(samples) / u128::from(stored)) as u64,
        }
    }

    /// Returns a warning if the network would get unscaled bytes.
    pub fn unscaled(&self) -> Option<String> {
        let mut shards = self.shards.iter().zip(&self.forms);
        let (shard, _) =
            shards.find(|(shard, form)| shard.content.is_unscaled() && form.scale.is_none())?;
        Some(format!(
            "inputs of {} are unsigned bytes without mean and std: the network sees 0 to 255; data.scale = \"unit\" divides them by 255, \"none\" keeps them",
            shard.path.display()
        ))
    }

    /// Returns a note on rows that an import has skipped, if there are any.
    pub fn skipped_note(&self) -> Option<String> {
        // Every shard describes its whole import, so the first one of each source suffices.
        let mut sources: Vec<_> =
            self.shards.iter().map(|shard| (shard.path.parent(), &shard.header)).collect();
        sources.dedup_by_key(|(folder, _)| *folder);
        let rows: u64 = sources.iter().filter_map(|(_, header)| header.skipped_rows).sum();
        (rows > 0).then(|| skipped_note(rows))
    }

    /// Returns the tokenizer, if the shards describe one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.preprocessing.tokenizer.as_ref()
    }

    /// Returns the largest number of bytes of data cached for later reads.
    pub fn cache_limit(&self) -> usize {
        let limits = self
            .shards
            .iter()
            .map(|shard| shard.cache_limit(self.open.cache_bytes, self.open.verify));
        let mut limits: Vec<usize> = limits.collect();
        limits.sort_unstable_by(|a, b| b.cmp(a));
        limits.iter().take(self.open.max_open).sum()
    }

    /// Returns the number of bytes of data cached now for later reads.
    pub fn cached(&self) -> usize {
        self.open
            .shards
            .iter()
            .flatten()
            .flat_map(|open| &open.readers)
            .map(RowReader::cached_bytes)
            .sum()
    }

    /// Overwrites `into` with sample number `sample`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, an id or class is out of range, or a number is
    /// not finite.
    pub fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        self.read_run(sample, 1, 0, into)
    }

    /// Reads `count` samples from `first` on into `into`, whose parts hold them one after the
    /// other; samples that are adjacent in the file are read in one call. The augmentation of
    /// images depends on `epoch`.
    ///
    /// # Errors
    /// Returns an error if [`Dataset::read`] would for one of the samples.
    pub fn read_run(
        &mut self,
        first: u64,
        count: usize,
        epoch: u64,
        mut into: SampleMut<'_>,
    ) -> Result<()> {
        let sizes = self.sizes();
        let lens = into.lens();
        let last = first.saturating_add(count as u64);
        if last > self.samples() || lens != sizes.times(count) {
            let all = self.samples();
            return Err(Error::internal(format!(
                "samples {first}..{last} of {all} of {sizes:?} wanted in {lens:?}"
            )));
        }
        let mut next = first;
        while next < last {
            let (place, run) = self.stored(next);
            let index = self.first_sample.partition_point(|&first| first <= place) - 1;
            let here = (self.first_sample[index + 1] - place).min(run).min(last - next) as usize;
            let into = into.samples(sizes, (next - first) as usize, here);
            let when = When { epoch, first: next };
            self.read_rows(index, place - self.first_sample[index], when, into)?;
            next += here as u64;
        }
        Ok(())
    }

    /// Reads samples of shard `index` from its sample `row` on, as many as `into` has space for.
    fn read_rows(&mut self, index: usize, row: u64, when: When, into: SampleMut<'_>) -> Result<()> {
        let SampleMut { ids, features, classes, values, weights: factors } = into;
        let shard = &self.shards[index];
        let form = &*self.forms[index];
        let readers = self.open.readers(shard, index)?;
        match &shard.content {
            ShardSchema::Tokens(tokens) if tokens.shape.len() > 1 => {
                let context = self.context;
                let len = tokens.document();
                let windows = ((len - 1) / context) as u64;
                let mut whole = vec![0; len];
                let mut held = None;
                let samples = ids.chunks_exact_mut(context).zip(classes.chunks_exact_mut(context));
                for (sample, (ids, classes)) in (row..).zip(samples) {
                    let document = sample / windows;
                    if held.replace(document) != Some(document) {
                        read_checked(
                            shard,
                            tokens,
                            &mut readers[0],
                            document,
                            &mut whole,
                            self.vocabulary,
                        )?;
                    }
                    let first = (sample % windows) as usize * context;
                    ids.copy_from_slice(&whole[first..first + context]);
                    classes.copy_from_slice(&whole[first + 1..first + 1 + context]);
                }
            }
            ShardSchema::Tokens(tokens) => {
                let start = row * self.context as u64;
                let read = readers[0].read_shifted(start, ids, classes);
                read.map_err(|e| shard.unreadable(tokens, e))?;
                let last = classes.len().saturating_sub(1);
                check_ids(shard, tokens, start, ids, self.vocabulary)?;
                check_ids(
                    shard,
                    tokens,
                    start + ids.len() as u64,
                    &classes[last..],
                    self.vocabulary,
                )?;
            }
            ShardSchema::Samples { inputs: input_ids, targets: target_ids } => {
                read_checked(shard, input_ids, &mut readers[0], row, ids, self.vocabulary)?;
                read_checked(shard, target_ids, &mut readers[1], row, classes, self.vocabulary)?;
            }
            ShardSchema::Rows(rows) => {
                let Rows { inputs, categories, targets, weights: of_weights, planes, .. } = &**rows;
                // In the order of `ShardSchema::datasets`.
                let mut readers = readers.iter_mut();
                let mut of = |field| readers.next().map(|reader| (field, reader));
                let inputs = inputs.as_ref().and_then(&mut of);
                let categories = categories.as_ref().and_then(&mut of);
                let targets = targets.as_ref().and_then(&mut of);
                let of_weights = of_weights.as_ref().and_then(of);
                match inputs {
                    None => {}
                    Some((inputs, reader)) if self.vocabulary > 0 => {
                        read_checked(shard, inputs, reader, row, ids, self.vocabulary)?;
                    }
                    Some((inputs, reader)) => {
                        read_numbers(shard, inputs, reader, row, features)?;
                        planes.iter().for_each(|planes| planes.to_last(features));
                        form.numbers.iter().for_each(|places| reorder(places, features));
                        if let Some(augmenter) = &mut self.augmenter {
                            for (image, sample) in
                                features.chunks_exact_mut(inputs.row_len()).zip(when.first..)
                            {
                                augmenter.apply(when.epoch, sample, image);
                            }
                        }
                        form.scale.iter().for_each(|scale| scale.apply(features));
                    }
                }
                if let Some((categories, reader)) = categories
                    && let SampleSpec::Rows { ids: Ids::Tables(tables), .. } = &self.spec
                {
                    reader.read(row, ids).map_err(|e| shard.unreadable(categories, e))?;
                    if let Some(recoded) = &form.categories {
                        recode(shard, categories, row, ids, recoded)?;
                    }
                    check_categories(shard, categories, row, ids, tables)?;
                }
                match (&self.spec, targets) {
                    (_, None) => {}
                    (
                        SampleSpec::Rows { target: Target::Class(all), .. },
                        Some((targets, reader)),
                    ) => {
                        read_class(shard, targets, reader, row, classes)?;
                        if let Some(numbers) = &form.classes {
                            check_classes(
                                shard,
                                targets,
                                row,
                                classes,
                                numbers.len(),
                                "the data has names for",
                            )?;
                            classes.iter_mut().for_each(|class| *class = numbers[*class as usize]);
                        }
                        check_classes(shard, targets, row, classes, *all, "the network knows")?;
                    }
                    (_, Some((targets, reader))) => {
                        read_numbers(shard, targets, reader, row, values)?
                    }
                }
                if let Some((weights, reader)) = of_weights {
                    read_weights(shard, weights, reader, row, factors)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns an error if shards of an import are missing or duplicated, unless the pattern excludes
/// them or one file is named.
fn check_completeness(spec: &DataSpec, split: Split, shards: &[Shard]) -> Result<()> {
    if spec.path.is_file() {
        return Ok(());
    }
    let (key, pattern) = spec.pattern(split);
    match shard_set_check::problems(shards, |name| pattern.matches(name)).into_iter().next() {
        None => Ok(()),
        Some(problem) => Err(Error::input(format!("{}: {problem}", spec.path.display())).hint(format!(
            "copy or import the shards again; to omit some on purpose, set {key} to a pattern that matches the others only, as \"{}\" does",
            pattern.as_str().replacen('*', "0000[013]", 1)
        ))),
    }
}

/// The hint for a negative id or class, which other programs use for targets without a loss.
const IGNORED: &str = "targets without a loss, such as PyTorch's ignore_index of -100, are not supported: omit their samples";

/// The epoch in which samples are read, and the number of the first of them in the whole data set.
#[derive(Clone, Copy)]
struct When {
    epoch: u64,
    first: u64,
}

/// Reads rows from `first` on and refuses ids outside the vocabulary.
fn read_checked(
    shard: &Shard,
    ids: &Field,
    reader: &mut RowReader,
    first: u64,
    out: &mut [u32],
    vocabulary: usize,
) -> Result<()> {
    reader.read(first, out).map_err(|e| shard.unreadable(ids, e))?;
    check_ids(shard, ids, first, out, vocabulary)
}

/// Reorders the numbers of rows; `places` has the present index of each of them.
fn reorder(places: &[usize], rows: &mut [f32]) {
    let mut stored = vec![0.0; places.len()];
    for row in rows.chunks_exact_mut(places.len()) {
        stored.copy_from_slice(row);
        row.iter_mut().zip(places).for_each(|(number, place)| *number = stored[*place]);
    }
}

/// Converts the categories of rows from `row` on to the order and the ids that a network was
/// trained with.
fn recode(
    shard: &Shard,
    field: &Field,
    row: u64,
    out: &mut [u32],
    recoded: &[Recoded],
) -> Result<()> {
    let width = recoded.len();
    let mut stored = vec![0; width];
    for (i, ids) in out.chunks_exact_mut(width).enumerate() {
        stored.copy_from_slice(ids);
        for (id, Recoded { column, ids }) in ids.iter_mut().zip(recoded) {
            *id = match ids {
                None => stored[*column],
                Some(ids) => *ids.get(stored[*column] as usize).ok_or_else(|| {
                    let element = field.element((row as usize + i) * width + column);
                    Error::input(format!(
                        "{element} is id {}, for which /columns lists no value",
                        stored[*column] as i32
                    ))
                    .hint("import the data again")
                    .at(shard.path.display())
                })?,
            };
        }
    }
    Ok(())
}

/// Returns an error if an id of a category has no row in its embedding table. Otherwise makes ids
/// count through all tables.
fn check_categories(
    shard: &Shard,
    field: &Field,
    row: u64,
    out: &mut [u32],
    tables: &[usize],
) -> Result<()> {
    for (i, ids) in out.chunks_exact_mut(tables.len()).enumerate() {
        let mut before = 0;
        for (category, (id, &rows)) in ids.iter_mut().zip(tables).enumerate() {
            if *id as usize >= rows {
                let element = field.element((row as usize + i) * tables.len() + category);
                let id = *id as i32;
                return Err(Error::input(format!(
                    "{element} is id {id}, but table {category} has {rows} rows"
                ))
                .hint("give embedding_tables more ids, or import the data again")
                .at(shard.path.display()));
            }
            *id += before;
            before += rows as u32;
        }
    }
    Ok(())
}

/// Returns an error if rows from `first` on have ids outside the vocabulary.
fn check_ids(shard: &Shard, ids: &Field, first: u64, out: &[u32], vocabulary: usize) -> Result<()> {
    match first_invalid(out, vocabulary) {
        None => Ok(()),
        Some(at) => {
            let element = ids.element(first as usize * ids.row_len() + at);
            let id = out[at] as i32;
            let hint = if id < 0 {
                IGNORED
            } else {
                "import the text again, or set model.vocabulary, or ids of the embedding layer, to the \
                 number of ids that the data has"
            };
            Err(Error::input(format!(
                "{element} is token id {id}, outside the vocabulary of {vocabulary}"
            ))
            .hint(hint)
            .at(shard.path.display()))
        }
    }
}

/// Reads the classes of rows. A field of numbers has one-hot rows.
fn read_class(
    shard: &Shard,
    field: &Field,
    reader: &mut RowReader,
    row: u64,
    out: &mut [u32],
) -> Result<()> {
    if field.kind == ReadAs::Numbers {
        return read_one_hot(shard, field, reader, row, out);
    }
    reader.read(row, out).map_err(|e| shard.unreadable(field, e))
}

/// Returns an error if rows from `row` on have a class that is not below `all`; `who` names the
/// origin of the bound in the message.
fn check_classes(
    shard: &Shard,
    field: &Field,
    row: u64,
    found: &[u32],
    all: usize,
    who: &str,
) -> Result<()> {
    match first_invalid(found, all) {
        None => Ok(()),
        Some(at) => {
            let element = field.element(row as usize + at);
            let class = found[at] as i32;
            let hint = if class < 0 {
                IGNORED
            } else {
                "give the last of model.layers more units, or correct the data"
            };
            Err(Error::input(format!("{element} is class {class}, but {who} 0 to {}", all - 1))
                .hint(hint)
                .at(shard.path.display()))
        }
    }
}

/// Reads one-hot rows as classes. Returns an error if a row is not one-hot.
fn read_one_hot(
    shard: &Shard,
    field: &Field,
    reader: &mut RowReader,
    row: u64,
    out: &mut [u32],
) -> Result<()> {
    let mut columns = vec![0.0; out.len() * field.row_len()];
    reader.read_numbers(row, &mut columns).map_err(|e| shard.unreadable(field, e))?;
    for (i, (class, columns)) in
        out.iter_mut().zip(columns.chunks_exact(field.row_len())).enumerate()
    {
        let (ones, zeros) = [1.0, 0.0].map(|x| columns.iter().filter(|y| **y == x).count()).into();
        match columns.iter().position(|x| *x == 1.0) {
            Some(place) if ones == 1 && zeros == columns.len() - 1 => *class = place as u32,
            _ => {
                let element = format!("{}[{}]", field.name, row as usize + i);
                return Err(Error::input(format!("{element} is not a one-hot row: it has {ones} ones and {zeros} zeros in {} columns", columns.len()))
                    .hint("store the number of the class of each row, or a 1 in its column and 0 in all others; for several labels a row, set loss.kind = \"binary-cross-entropy\"")
                    .at(shard.path.display()));
            }
        }
    }
    Ok(())
}

/// Reads rows of numbers. Returns an error if one is NaN or infinite.
fn read_numbers(
    shard: &Shard,
    field: &Field,
    reader: &mut RowReader,
    row: u64,
    out: &mut [f32],
) -> Result<()> {
    reader.read_numbers(row, out).map_err(|e| shard.unreadable(field, e))?;
    // Folds instead of searching, which the compiler vectorises; usually there is nothing to find.
    let all_finite = || {
        simd(
            #[inline(always)]
            || out.iter().fold(true, |all, x| all & x.is_finite()),
        )
    };
    if !reader.is_float() || all_finite() {
        return Ok(());
    }
    match out.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(at) => {
            let element = field.element(row as usize * field.row_len() + at);
            Err(Error::input(format!("{element} is {}", out[at]))
                .hint("mend the data: every input and target must be a finite number")
                .at(shard.path.display()))
        }
    }
}

/// Reads the weights of rows. Returns an error if one is not a finite number of 0 or more.
fn read_weights(
    shard: &Shard,
    field: &Field,
    reader: &mut RowReader,
    row: u64,
    out: &mut [f32],
) -> Result<()> {
    reader.read_numbers(row, out).map_err(|e| shard.unreadable(field, e))?;
    match out.iter().position(|x| !is_weight(*x)) {
        None => Ok(()),
        Some(at) => Err(Error::input(format!("{} is {}", field.element(row as usize + at), out[at]))
            .hint("mend the data: the weight of a sample is a finite number of 0 or more; data.weights = \"\" leaves them unread")
            .at(shard.path.display())),
    }
}

/// Returns whether a number can be the weight of a sample.
pub fn is_weight(x: f32) -> bool {
    x >= 0.0 && x.is_finite()
}

/// The shards with open files; opening one more closes the least recently used.
struct OpenShards {
    /// The open files of each shard; `None` for closed shards.
    shards: Vec<Option<OpenShard>>,
    /// The number of open shards.
    count: usize,
    max_open: usize,
    cache_bytes: usize,
    verify: Verify,
    scratch: Scratch,
    /// The blocks of each dataset that were compared, for shards that were closed.
    seen: HashMap<usize, Vec<Seen>>,
    /// The number of uses so far; orders `OpenShard::last_use`.
    clock: u64,
}

struct OpenShard {
    readers: Vec<RowReader>,
    last_use: u64,
}

impl OpenShards {
    fn new(shards: &[Shard], max_open: usize, verify: Verify) -> Self {
        let datasets = shards.len().min(max_open) * shards[0].content.datasets().len();
        let cache_bytes = CACHE_TOTAL / datasets;
        let shards = shards.iter().map(|_| None).collect();
        let scratch = Scratch::default();
        let seen = HashMap::new();
        Self { shards, count: 0, max_open, cache_bytes, verify, scratch, seen, clock: 0 }
    }

    /// Returns a reader for each dataset of the shard, which is number `index`.
    fn readers(&mut self, shard: &Shard, index: usize) -> Result<&mut [RowReader]> {
        if self.shards[index].is_none() {
            if self.count == self.max_open {
                let shards = self.shards.iter().enumerate();
                let oldest = shards.filter_map(|(i, shard)| Some((shard.as_ref()?.last_use, i)));
                let oldest = oldest.min();
                if let Some((_, oldest)) = oldest
                    && let Some(closed) = self.shards[oldest].take()
                {
                    self.seen.insert(
                        oldest,
                        closed.readers.into_iter().map(RowReader::into_seen).collect(),
                    );
                }
                self.count -= 1;
            }
            let mut readers = shard.readers(self.cache_bytes, self.verify, &self.scratch)?;
            for (reader, seen) in
                readers.iter_mut().zip(self.seen.remove(&index).into_iter().flatten())
            {
                reader.resume(seen);
            }
            self.shards[index] = Some(OpenShard { readers, last_use: 0 });
            self.count += 1;
        }
        self.clock += 1;
        let open = self.shards[index]
            .as_mut()
            .ok_or_else(|| Error::internal("a shard that was opened is not open"))?;
        open.last_use = self.clock;
        Ok(&mut open.readers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::TokenShard;

    #[test]
    fn only_so_many_shards_stay_open() {
        let dir = tempfile::tempdir().unwrap();
        for shard in 0..4 {
            let ids = [shard as u32; 3];
            let tokenizer = &Tokenizer::Byte;
            let source = "";
            let source_sha256 = "";
            let split = Split::Train;
            TokenShard {
                tokenizer: Some(tokenizer),
                vocabulary: 256,
                ids: &ids,
                source,
                source_sha256,
                split,
                shard,
                num_shards: 4,
                compress: None,
            }
            .write(&dir.path().join(format!("train-{shard}.h5")))
            .unwrap();
        }
        let mut dataset = Dataset::open(&DataSpec::new(dir.path()), Split::Train, 1).unwrap();
        dataset.open = OpenShards::new(&dataset.shards, 2, Verify::FirstPass);
        let mut inputs = [9];
        let mut targets = [9];
        for sample in [0, 7, 2, 1, 5, 6] {
            dataset.read(sample, SampleMut::text(&mut inputs, &mut targets)).unwrap();
            assert_eq!((inputs[0], targets[0]), ((sample / 2) as u32, (sample / 2) as u32));
            assert!(dataset.open.shards.iter().flatten().count() <= 2);
        }
        let open: Vec<bool> = dataset.open.shards.iter().map(Option::is_some).collect();
        assert_eq!(open, [false, false, true, true], "the two used last");
    }

    /// Shards that were closed and opened again are not compared anew; shards never read before
    /// are.
    #[test]
    fn what_was_compared_is_not_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let path = |shard| dir.path().join(format!("train-{shard}.h5"));
        for shard in 0..3 {
            let ids = [7; 3];
            let tokenizer = &Tokenizer::Byte;
            let source = "";
            let source_sha256 = "";
            let split = Split::Train;
            TokenShard {
                tokenizer: Some(tokenizer),
                vocabulary: 256,
                ids: &ids,
                source,
                source_sha256,
                split,
                shard,
                num_shards: 3,
                compress: None,
            }
            .write(&path(shard))
            .unwrap();
        }
        let mut dataset = Dataset::open(&DataSpec::new(dir.path()), Split::Train, 1).unwrap();
        dataset.open = OpenShards::new(&dataset.shards, 1, Verify::FirstPass);
        let mut read = |sample| {
            let mut inputs = [9];
            let mut targets = [9];
            dataset.read(sample, SampleMut::text(&mut inputs, &mut targets)).map(|()| inputs[0])
        };
        assert_eq!((read(0).unwrap(), read(2).unwrap()), (7, 7));
        for shard in [0, 2] {
            let offset =
                hdf5::File::open(path(shard)).unwrap().dataset("tokens").unwrap().offset().unwrap();
            let file = std::fs::File::options().write(true).open(path(shard)).unwrap();
            std::os::unix::fs::FileExt::write_at(&file, &[8], offset).unwrap();
        }
        assert_eq!(read(0).unwrap(), 8);
        let error = read(5).unwrap_err().to_string();
        assert!(error.contains("train-2.h5: /tokens[0..3] has checksum "), "{error}");
        assert!(error.contains("\nhint: copy or import the shard again"), "{error}");
    }
}
