//! All shards of one split as one numbered sequence of samples.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Tokenizer;
use super::augment::{Augment, Augmenter};
use super::import::left_out;
use super::rows::RowReader;
use super::shard::{Content, Field, Rows, Shard, first_invalid};
use crate::error::{Error, Result};
use crate::pattern::matches;
use crate::simd::simd;

/// Shards kept open at a time: well below the usual limit of 1024 files.
const MAX_OPEN: usize = 256;
/// What may be kept in memory of all shards together, unless single chunks are larger.
const CACHE_TOTAL: usize = 128 << 20;

/// Where the data is and what it is called there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataSpec {
    /// A directory of shards, or one HDF5 file.
    pub path: PathBuf,
    /// File names of the training shards; `*` stands for any characters.
    pub train: String,
    /// File names of the validation shards.
    pub validation: String,
    /// The dataset of token ids, one dimension.
    pub tokens: String,
    /// The dataset of input ids where samples are ready-made, samples x context.
    pub inputs: String,
    /// The dataset of ids of categories, samples x categories.
    pub categories: String,
    /// The dataset of target ids, of the same shape.
    pub targets: String,
    /// The dataset with a factor of each row's loss; `/weights` if none is given and files have one, none if empty.
    pub weights: Option<String>,
    /// The number of ids, for files that do not tell; may also pad the files' own number.
    pub vocabulary: Option<usize>,
    /// What a sample is to be made of.
    pub wants: Wants,
}

/// What a network wants of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wants {
    /// Token ids and the ids that follow them.
    Text,
    /// Whatever is there: to look at, not to learn from.
    Anything,
    /// A row of inputs and a target.
    Rows {
        /// Elements of the inputs.
        input: usize,
        /// The ids among them or beside them.
        ids: Ids,
        /// The target.
        target: Target,
    },
}

/// Ids that are not of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ids {
    /// There are none: inputs are numbers.
    None,
    /// Inputs are ids below this.
    Input(usize),
    /// Beside inputs, which are numbers, there is an id of each category, below its own number: rows of its table. As parts of
    /// a sample they count through all tables, those of the second from where those of the first end.
    Tables(Arc<[usize]>),
}

/// The target of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// One of so many classes.
    Class(usize),
    /// So many numbers.
    Values(usize),
    /// None: the network is to predict it.
    Unknown,
}

/// Elements of a sample's parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Ids of the input.
    pub ids: usize,
    /// Numbers of the input.
    pub features: usize,
    /// Classes to predict.
    pub classes: usize,
    /// Numbers to predict.
    pub values: usize,
    /// Factors of the loss in training: one, or none where all samples count alike.
    pub weights: usize,
}

/// Where samples go: each part has the length that [`Dataset::sizes`] tells, times the number of samples.
#[derive(Default)]
pub struct SampleMut<'a> {
    /// Ids of the input; those of several tables count through all of them, as [`Ids::Tables`] says.
    pub ids: &'a mut [u32],
    /// Numbers of the input.
    pub features: &'a mut [f32],
    /// Classes to predict.
    pub classes: &'a mut [u32],
    /// Numbers to predict.
    pub values: &'a mut [f32],
    /// Factors of the loss in training, of 0 or more.
    pub weights: &'a mut [f32],
}

impl Sizes {
    /// Of so many samples.
    fn times(self, count: usize) -> Self {
        let Self { ids, features, classes, values, weights } = self;
        Self {
            ids: ids * count,
            features: features * count,
            classes: classes * count,
            values: values * count,
            weights: weights * count,
        }
    }
}

impl<'a> SampleMut<'a> {
    /// Of text: ids and the ids that follow them.
    pub fn text(ids: &'a mut [u32], classes: &'a mut [u32]) -> Self {
        Self { ids, classes, ..Self::default() }
    }
}

impl DataSpec {
    /// The names that the importer gives, at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            train: "train-*.h5".to_owned(),
            validation: "val-*.h5".to_owned(),
            tokens: "/tokens".to_owned(),
            inputs: "/inputs".to_owned(),
            categories: "/categories".to_owned(),
            targets: "/targets".to_owned(),
            weights: None,
            vocabulary: None,
            wants: Wants::Text,
        }
    }

    /// The shards of `split`, sorted by name; at least one.
    pub fn files(&self, split: Split) -> Result<Vec<PathBuf>> {
        let path = self.path.display();
        let metadata = std::fs::metadata(&self.path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::input(format!("{path} does not exist"))
                .hint("data.path is a directory of .h5 shards or one .h5 file"),
            _ => Error::io("read", &self.path, e),
        })?;
        if metadata.is_file() {
            return match split {
                Split::Train => Ok(vec![self.path.clone()]),
                Split::Validation => Err(Error::input(format!("{path} is a single file and has no validation split"))
                    .hint("give a directory with training and validation shards as data.path")),
            };
        }
        let (key, pattern) = match split {
            Split::Train => ("data.train", &self.train),
            Split::Validation => ("data.validation", &self.validation),
        };
        let names = file_names(&self.path)?;
        let shards: Vec<PathBuf> =
            names.iter().filter(|name| matches(pattern, name)).map(|name| self.path.join(name)).collect();
        if shards.is_empty() {
            return Err(Error::input(format!("no file in {path} matches {pattern}"))
                .hint(format!("it holds {}; set {key} to a pattern that fits", listing(&names))));
        }
        Ok(shards)
    }
}

/// The names of all entries of a directory, sorted.
pub(super) fn file_names(directory: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io("list", directory, e);
    let entries: Vec<_> = std::fs::read_dir(directory).map_err(failed)?.collect::<Result<_, _>>().map_err(failed)?;
    let mut names: Vec<String> = entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// The first few names, and how many there are.
fn listing(names: &[String]) -> String {
    const SHOWN: usize = 5;
    match names.len() {
        0 => "nothing".to_owned(),
        1..=SHOWN => names.join(", "),
        n => format!("{} … ({n} files)", names[..SHOWN].join(", ")),
    }
}

/// The two parts of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// What the model learns from.
    Train,
    /// What it is measured on.
    Validation,
}

impl Split {
    /// The word for it in files and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The samples of one split: rows with their targets, or, for language models, `context` input ids and as many targets.
///
/// A token stream is cut into windows of `context + 1` ids at stride `context`, so that each
/// token is a target at most once. Windows never cross shards; what is left at a shard's end is
/// not used.
pub struct Dataset {
    shards: Vec<Shard>,
    /// The number of the first sample of each shard, and of all samples at the end.
    first_sample: Vec<u64>,
    /// Samples of each data set.
    parts: Vec<u64>,
    context: usize,
    wants: Wants,
    /// Ids are below this: of text, or of rows of ids.
    vocabulary: usize,
    open: OpenShards,
    /// What is done to images before they are brought to their scale.
    augmenter: Option<Augmenter>,
}

impl Dataset {
    /// Opens and checks every shard of `split`.
    ///
    /// # Errors
    /// What is missing or malformed, and where.
    pub fn open(spec: &DataSpec, split: Split, context: usize) -> Result<Self> {
        Self::open_all(std::slice::from_ref(spec), split, context)
    }

    /// Opens and checks every shard of several data sets of the same kind, whose samples are numbered one after the other.
    ///
    /// # Errors
    /// As [`Dataset::open`], or the data sets do not go together.
    pub fn open_all(specs: &[DataSpec], split: Split, context: usize) -> Result<Self> {
        if context == 0 {
            return Err(Error::input("a sample of 0 tokens teaches nothing").hint("set the context to 1 or more"));
        }
        let (mut shards, mut first_sample, mut parts) = (Vec::<Shard>::new(), vec![0], Vec::new());
        let mut samples = 0;
        for spec in specs {
            let (own, before) = (shards.len(), samples);
            for path in spec.files(split)? {
                let shard = Shard::open(&path, spec)?;
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
            parts.push(samples - before);
        }
        let spec = specs.first().ok_or_else(|| Error::internal("no data set is to be opened"))?;
        let vocabulary = match &spec.wants {
            Wants::Text | Wants::Anything => shards[0].vocabulary(spec.vocabulary)?,
            Wants::Rows { ids: Ids::Input(below), .. } => *below,
            Wants::Rows { .. } => 0,
        };
        let open = OpenShards::new(&shards, MAX_OPEN);
        Ok(Self { shards, first_sample, parts, context, wants: spec.wants.clone(), vocabulary, open, augmenter: None })
    }

    /// Has images of `shape`, which is that of a row, moved and mirrored at random, by `seed`, from now on.
    ///
    /// # Errors
    /// Samples are no images, or they would be moved out of sight.
    pub fn augment(&mut self, by: Augment, shape: &[usize], seed: u64) -> Result<()> {
        if self.sizes().ids > 0 {
            return Err(Error::input("data.augment is for images, but samples have ids").hint("leave it out"));
        }
        self.augmenter = Some(Augmenter::new(by, shape, seed)?);
        Ok(())
    }

    /// How many samples there are; at least one.
    pub fn samples(&self) -> u64 {
        self.first_sample[self.shards.len()]
    }

    /// How many samples each of the data sets has.
    pub fn parts(&self) -> &[u64] {
        &self.parts
    }

    /// All ids are below this.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Predictions of a sample; of text, its ids.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Elements of a sample's parts.
    pub fn sizes(&self) -> Sizes {
        match &self.wants {
            Wants::Text | Wants::Anything => Sizes { ids: self.context, classes: self.context, ..Sizes::default() },
            Wants::Rows { input, ids, target } => {
                let (ids, features) = match ids {
                    Ids::None => (0, *input),
                    Ids::Input(_) => (*input, 0),
                    Ids::Tables(tables) => (tables.len(), *input),
                };
                let (classes, values) = match target {
                    Target::Class(_) => (1, 0),
                    Target::Values(width) => (0, *width),
                    Target::Unknown => (0, 0),
                };
                let weights = usize::from(self.shards[0].content.weights().is_some());
                Sizes { ids, features, classes, values, weights }
            }
        }
    }

    /// How many elements of inputs the shards hold; of text, those outside any whole window included.
    pub fn tokens(&self) -> u64 {
        self.shards.iter().map(|shard| shard.content.datasets()[0].len() as u64).sum()
    }

    /// What there is to say of rows that an import has left out, if it has.
    pub fn left_out(&self) -> Option<String> {
        // Every shard tells of its whole import, which the first one of a source stands for.
        let mut sources: Vec<_> = self.shards.iter().map(|shard| (shard.path.parent(), &shard.header)).collect();
        sources.dedup_by_key(|(folder, _)| *folder);
        let rows: u64 = sources.iter().filter_map(|(_, header)| header.skipped_rows).sum();
        (rows > 0).then(|| left_out(rows))
    }

    /// What turns ids into text, if the shards tell.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.shards[0].header.tokenizer.as_ref()
    }

    /// Most bytes that are kept of what was read, for further reads.
    pub fn cache_limit(&self) -> usize {
        let mut limits: Vec<usize> = self.shards.iter().map(|shard| shard.cache_limit(self.open.cache_bytes)).collect();
        limits.sort_unstable_by(|a, b| b.cmp(a));
        limits.iter().take(self.open.max_open).sum()
    }

    /// Bytes that are kept now of what was read, for further reads.
    pub fn cached(&self) -> usize {
        self.open.shards.iter().flatten().flat_map(|open| &open.readers).map(RowReader::held).sum()
    }

    /// Overwrites `into` with sample number `sample`.
    ///
    /// # Errors
    /// The file system refused, an id or a class is out of its range, or a number is none.
    pub fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
        self.read_run(sample, 1, 0, into)
    }

    /// As [`Dataset::read`], of `count` samples from `first` on, whose parts stand one after the other: samples that are
    /// neighbours in the file are read at once. In another `epoch` images are augmented otherwise.
    ///
    /// # Errors
    /// As [`Dataset::read`].
    pub fn read_run(&mut self, first: u64, count: usize, epoch: u64, into: SampleMut<'_>) -> Result<()> {
        let sizes = self.sizes();
        let SampleMut { mut ids, mut features, mut classes, mut values, mut weights } = into;
        let lens = Sizes {
            ids: ids.len(),
            features: features.len(),
            classes: classes.len(),
            values: values.len(),
            weights: weights.len(),
        };
        let last = first.saturating_add(count as u64);
        if last > self.samples() || lens != sizes.times(count) {
            let all = self.samples();
            return Err(Error::internal(format!("samples {first}..{last} of {all} of {sizes:?} wanted in {lens:?}")));
        }
        let mut next = first;
        while next < last {
            let index = self.first_sample.partition_point(|&first| first <= next) - 1;
            let here = (self.first_sample[index + 1].min(last) - next) as usize;
            let into = SampleMut {
                ids: front(&mut ids, here * sizes.ids),
                features: front(&mut features, here * sizes.features),
                classes: front(&mut classes, here * sizes.classes),
                values: front(&mut values, here * sizes.values),
                weights: front(&mut weights, here * sizes.weights),
            };
            let seen = Seen { epoch, first: next };
            self.read_rows(index, next - self.first_sample[index], seen, into)?;
            next += here as u64;
        }
        Ok(())
    }

    /// Reads samples of shard `index` from its sample `row` on, as many as there is room for.
    fn read_rows(&mut self, index: usize, row: u64, seen: Seen, into: SampleMut<'_>) -> Result<()> {
        let SampleMut { ids, features, classes, values, weights: factors } = into;
        let shard = &self.shards[index];
        let readers = self.open.readers(shard, index)?;
        match &shard.content {
            Content::Tokens(tokens) => {
                let start = row * self.context as u64;
                let read = readers[0].read_shifted(start, ids, classes);
                read.map_err(|e| shard.unreadable(tokens, &e))?;
                let last = classes.len().saturating_sub(1);
                check_ids(shard, tokens, start, ids, self.vocabulary)?;
                check_ids(shard, tokens, start + ids.len() as u64, &classes[last..], self.vocabulary)?;
            }
            Content::Samples { inputs: input_ids, targets: target_ids } => {
                read_checked(shard, input_ids, &mut readers[0], row, ids, self.vocabulary)?;
                read_checked(shard, target_ids, &mut readers[1], row, classes, self.vocabulary)?;
            }
            Content::Rows(rows) => {
                let Rows { inputs, categories, targets, weights: of_weights, standard } = &**rows;
                // In the order of the content's datasets.
                let mut readers = readers.iter_mut();
                let mut of = |field| readers.next().map(|reader| (field, reader));
                let (inputs, categories) = (inputs.as_ref().and_then(&mut of), categories.as_ref().and_then(&mut of));
                let targets = targets.as_ref().and_then(&mut of);
                let of_weights = of_weights.as_ref().and_then(of);
                match inputs {
                    None => {}
                    Some((inputs, reader)) if self.vocabulary > 0 => {
                        read_checked(shard, inputs, reader, row, ids, self.vocabulary)?;
                    }
                    Some((inputs, reader)) => {
                        read_numbers(shard, inputs, reader, row, features)?;
                        if let Some(augmenter) = &mut self.augmenter {
                            for (image, sample) in features.chunks_exact_mut(inputs.row_len()).zip(seen.first..) {
                                augmenter.apply(seen.epoch, sample, image);
                            }
                        }
                        standard.iter().for_each(|standard| standard.apply(features));
                    }
                }
                if let Some((categories, reader)) = categories
                    && let Wants::Rows { ids: Ids::Tables(tables), .. } = &self.wants
                {
                    read_categories(shard, categories, reader, row, ids, tables)?;
                }
                match (&self.wants, targets) {
                    (_, None) => {}
                    (Wants::Rows { target: Target::Class(all), .. }, Some((targets, reader))) => {
                        read_class(shard, targets, reader, row, classes, *all)?;
                    }
                    (_, Some((targets, reader))) => read_numbers(shard, targets, reader, row, values)?,
                }
                if let Some((weights, reader)) = of_weights {
                    read_weights(shard, weights, reader, row, factors)?;
                }
            }
        }
        Ok(())
    }
}

/// When samples are seen, and the number of the first of them in the whole data set.
#[derive(Clone, Copy)]
struct Seen {
    epoch: u64,
    first: u64,
}

/// Splits off the first `count` elements.
fn front<'a, T>(slice: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    let (front, rest) = std::mem::take(slice).split_at_mut(count);
    *slice = rest;
    front
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
    reader.read(first, out).map_err(|e| shard.unreadable(ids, &e))?;
    check_ids(shard, ids, first, out, vocabulary)
}

/// Reads rows' ids of categories, refuses one that has no row in its table, and has them count through all tables.
fn read_categories(
    shard: &Shard,
    field: &Field,
    reader: &mut RowReader,
    row: u64,
    out: &mut [u32],
    tables: &[usize],
) -> Result<()> {
    reader.read(row, out).map_err(|e| shard.unreadable(field, &e))?;
    for (i, ids) in out.chunks_exact_mut(tables.len()).enumerate() {
        let mut before = 0;
        for (category, (id, &rows)) in ids.iter_mut().zip(tables).enumerate() {
            if *id as usize >= rows {
                let element = field.element((row as usize + i) * tables.len() + category);
                let id = *id as i32;
                return Err(Error::input(format!("{element} is id {id}, but table {category} has {rows} rows"))
                    .hint("give embedding_tables more ids, or import the data again")
                    .at(shard.path.display()));
            }
            *id += before;
            before += rows as u32;
        }
    }
    Ok(())
}

/// Refuses ids outside the vocabulary among rows from `first` on.
fn check_ids(shard: &Shard, ids: &Field, first: u64, out: &[u32], vocabulary: usize) -> Result<()> {
    match first_invalid(out, vocabulary) {
        None => Ok(()),
        Some(at) => {
            let (element, id) = (ids.element(first as usize * ids.row_len() + at), out[at] as i32);
            Err(Error::input(format!("{element} is token id {id}, outside the vocabulary of {vocabulary}"))
                .hint("import the text again, or set model.vocabulary to the true number of ids")
                .at(shard.path.display()))
        }
    }
}

/// Reads rows' classes and refuses one that is not among `all`.
fn read_class(
    shard: &Shard,
    field: &Field,
    reader: &mut RowReader,
    row: u64,
    out: &mut [u32],
    all: usize,
) -> Result<()> {
    reader.read(row, out).map_err(|e| shard.unreadable(field, &e))?;
    match first_invalid(out, all) {
        None => Ok(()),
        Some(at) => Err(Error::input(format!(
            "{} is class {}, but the network knows 0 to {}",
            field.element(row as usize + at),
            out[at] as i32,
            all - 1
        ))
        .hint("give the last of model.layers more units, or mend the data")
        .at(shard.path.display())),
    }
}

/// Reads rows of numbers and refuses what is none.
fn read_numbers(shard: &Shard, field: &Field, reader: &mut RowReader, row: u64, out: &mut [f32]) -> Result<()> {
    reader.read_numbers(row, out).map_err(|e| shard.unreadable(field, &e))?;
    // No search, unless there is something to find: this way it takes vector instructions.
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

/// Reads rows' weights and refuses what is no number of 0 or more.
fn read_weights(shard: &Shard, field: &Field, reader: &mut RowReader, row: u64, out: &mut [f32]) -> Result<()> {
    reader.read_numbers(row, out).map_err(|e| shard.unreadable(field, &e))?;
    match out.iter().position(|x| !is_weight(*x)) {
        None => Ok(()),
        Some(at) => Err(Error::input(format!("{} is {}", field.element(row as usize + at), out[at]))
            .hint("mend the data: the weight of a sample is a finite number of 0 or more; data.weights = \"\" leaves them unread")
            .at(shard.path.display())),
    }
}

/// Whether a number can be the weight of a sample.
pub fn is_weight(x: f32) -> bool {
    x >= 0.0 && x.is_finite()
}

/// The shards with open files; the least recently used one makes room for another.
struct OpenShards {
    /// Of every shard, what is open of it.
    shards: Vec<Option<OpenShard>>,
    /// How many are open.
    count: usize,
    max_open: usize,
    cache_bytes: usize,
    /// Counts uses; orders `OpenShard::last_use`.
    clock: u64,
}

struct OpenShard {
    readers: Vec<RowReader>,
    last_use: u64,
}

impl OpenShards {
    fn new(shards: &[Shard], max_open: usize) -> Self {
        let datasets = shards.len().min(max_open) * shards[0].content.datasets().len();
        let cache_bytes = CACHE_TOTAL / datasets;
        let shards = shards.iter().map(|_| None).collect();
        Self { shards, count: 0, max_open, cache_bytes, clock: 0 }
    }

    /// A reader for each dataset of the shard, which is number `index`.
    fn readers(&mut self, shard: &Shard, index: usize) -> Result<&mut [RowReader]> {
        if self.shards[index].is_none() {
            if self.count == self.max_open {
                let of_open = |(i, shard): (usize, &Option<OpenShard>)| shard.as_ref().map(|shard| (shard.last_use, i));
                let oldest = self.shards.iter().enumerate().filter_map(of_open).min();
                oldest.inspect(|(_, oldest)| self.shards[*oldest] = None);
                self.count -= 1;
            }
            self.shards[index] = Some(OpenShard { readers: shard.readers(self.cache_bytes)?, last_use: 0 });
            self.count += 1;
        }
        self.clock += 1;
        let open = self.shards[index].as_mut().ok_or_else(|| Error::internal("a shard that was opened is not open"))?;
        open.last_use = self.clock;
        Ok(&mut open.readers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::format::TokenShard;

    #[test]
    fn only_so_many_shards_stay_open() {
        let dir = tempfile::tempdir().unwrap();
        for shard in 0..4 {
            let (ids, tokenizer) = ([shard as u32; 3], &Tokenizer::Byte);
            let (source, source_sha256, split) = ("", "", Split::Train);
            TokenShard { ids: &ids, tokenizer, source, source_sha256, split, shard, num_shards: 4, compress: None }
                .write(&dir.path().join(format!("train-{shard}.h5")))
                .unwrap();
        }
        let mut dataset = Dataset::open(&DataSpec::new(dir.path()), Split::Train, 1).unwrap();
        dataset.open = OpenShards::new(&dataset.shards, 2);
        let (mut inputs, mut targets) = ([9], [9]);
        for sample in [0, 7, 2, 1, 5, 6] {
            dataset.read(sample, SampleMut::text(&mut inputs, &mut targets)).unwrap();
            assert_eq!((inputs[0], targets[0]), ((sample / 2) as u32, (sample / 2) as u32));
            assert!(dataset.open.shards.iter().flatten().count() <= 2);
        }
        let open: Vec<bool> = dataset.open.shards.iter().map(Option::is_some).collect();
        assert_eq!(open, [false, false, true, true], "the two used last");
    }
}
