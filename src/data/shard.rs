//! One shard: what a file holds, and whether that can be trained on.
//!
//! A shard is described once, when a data set is opened; the description keeps no handle.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hdf5::File;
use hdf5::dataset::Layout;

use super::axes::Planes;
use super::columns::Columns;
use super::compare::{Compared, Scratch, Verify};
use super::dataset::{DataSpec, Ids, InputScale, Target, Wants};
use super::dtype::Dtype;
use super::fingerprint::ShardPrint;
use super::format::{BlockSums, Checksums, Header};
use super::h5::{self, ChunkCache, SlabReader};
use super::import::{CLASSES, class_names, is_of_samples};
use super::preprocessing::{Scale, Told, tokenizer_names};
use super::rows::{ReadError, RowReader, Source};
use super::storage;
use super::stored::{As, Stored};
use crate::error::{Error, Result};
use crate::simd::simd;

/// The largest value means "too large", see [`Stored::to_ids`].
const MAX_VOCABULARY: usize = i32::MAX as usize;

/// The description of one file.
#[derive(Debug, Clone)]
pub(super) struct Shard {
    pub path: PathBuf,
    pub header: Header,
    pub content: Content,
    /// Tells it from other shards.
    pub print: ShardPrint,
    /// Its preprocessing, besides the tokenizer.
    pub told: Arc<Told>,
}

/// The datasets that samples are made of.
#[derive(Debug, Clone)]
pub(super) enum Content {
    /// A stream of ids, from which windows are cut.
    Tokens(Field),
    /// Samples of `context` ids each, with their targets.
    Samples { inputs: Field, targets: Field },
    /// A row of each for every sample.
    Rows(Box<Rows>),
}

/// The datasets of rows.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    /// None where samples have categories alone.
    pub inputs: Option<Field>,
    /// Ids of categories.
    pub categories: Option<Field>,
    /// None where they are not asked for.
    pub targets: Option<Field>,
    /// Factors of the rows' losses, one each.
    pub weights: Option<Field>,
    /// How inputs are brought to a common scale.
    pub standard: Option<Standard>,
    /// Images whose channels come first in the file.
    pub planes: Option<Planes>,
    /// Inputs are unsigned bytes, and nothing says how they are to be scaled.
    pub is_unscaled: bool,
}

/// Mean and standard deviation of inputs, one for each place of their last axis or of a whole row.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::data) struct Standard {
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
}

/// Names of the attributes of inputs that hold a [`Standard`].
pub(in crate::data) const MEAN: &str = "mean";
pub(in crate::data) const STD: &str = "std";

/// The dataset that weights are looked for in unless another is named.
pub(in crate::data) const WEIGHTS: &str = "/weights";

impl Standard {
    /// That of the inputs of a file: of `data.scale`, else the file's own.
    fn of_inputs(
        file: &File,
        inputs: &Field,
        planes: Option<Planes>,
        scale: Option<InputScale>,
    ) -> Result<Option<Self>> {
        match scale {
            Some(InputScale::None) => Ok(None),
            Some(InputScale::Unit) if inputs.dtype.is_byte() => Ok(Some(Self { mean: vec![0.0], std: vec![255.0] })),
            Some(InputScale::Unit) => {
                let message = format!("data.scale = \"unit\" is for unsigned bytes, but {} is of type", inputs.name);
                Err(Error::input(format!("{message} {}", inputs.dtype))
                    .hint("leave it out; attributes mean and std of the dataset scale any type"))
            }
            None => {
                let standard = Self::read(file, &inputs.name, inputs.row_len())?;
                let (Some(mut standard), Some(planes)) = (standard.clone(), planes) else { return Ok(standard) };
                match standard.mean.len() {
                    places if places == inputs.row_len() => {
                        planes.to_last(&mut standard.mean);
                        planes.to_last(&mut standard.std);
                    }
                    places if places == 1 || places == planes.channels => {}
                    places => {
                        let (name, channels) = (&inputs.name, planes.channels);
                        return Err(Error::input(format!("{name} has {channels} channels and {places} means"))
                            .hint("give one mean and one deviation for every channel, or for every element"));
                    }
                }
                Ok(Some(standard))
            }
        }
    }

    /// That of a dataset, if it has one.
    pub(super) fn read(file: &File, name: &str, row_len: usize) -> Result<Option<Self>> {
        let unreadable = |e| Error::input(format!("attributes {MEAN} and {STD} of {name}: {}", h5::one_line(&e)));
        let dataset = file.dataset(name).map_err(unreadable)?;
        let has = |attribute: &str| dataset.attr_names().map(|names| names.iter().any(|name| name == attribute));
        if !has(MEAN).map_err(unreadable)? {
            return Ok(None);
        }
        let numbers = |attribute: &str| dataset.attr(attribute)?.read_raw::<f32>();
        let standard = Self { mean: numbers(MEAN).map_err(unreadable)?, std: numbers(STD).map_err(unreadable)? };
        let places = standard.mean.len();
        if places == 0 || places != standard.std.len() || !row_len.is_multiple_of(places) {
            let stds = standard.std.len();
            return Err(Error::input(format!("{name} has rows of {row_len}, {places} means and {stds} deviations"))
                .hint("give one of each for every channel or column, or none"));
        }
        if let Some(std) = standard.std.iter().find(|std| !(**std > 0.0 && std.is_finite())) {
            return Err(Error::input(format!("{name} has a standard deviation of {std}")).hint("import it again"));
        }
        Ok(Some(standard))
    }

    /// Brings rows to the scale.
    pub(super) fn apply(&self, rows: &mut [f32]) {
        simd(
            #[inline(always)]
            || {
                if let ([mean], [std]) = (&self.mean[..], &self.std[..]) {
                    // The same, in a form that takes vector instructions.
                    return rows.iter_mut().for_each(|x| *x = (*x - mean) / std);
                }
                for row in rows.chunks_exact_mut(self.mean.len()) {
                    for ((x, mean), std) in row.iter_mut().zip(&self.mean).zip(&self.std) {
                        *x = (*x - mean) / std;
                    }
                }
            },
        );
    }
}

/// An open file, and where it is.
#[derive(Clone, Copy)]
struct Place<'a> {
    file: &'a File,
    path: &'a Path,
}

/// A dataset.
#[derive(Debug, Clone)]
pub(super) struct Field {
    pub name: String,
    /// What its elements become.
    pub kind: As,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// What its elements are in memory before they become ids or numbers.
    stored: Stored,
    /// The file has them bit by bit as they are in memory.
    is_native: bool,
    /// Shape of a chunk, if it is chunked.
    chunk: Option<Vec<usize>>,
    /// Chunks are compressed, or filtered otherwise.
    is_filtered: bool,
    /// Where its elements lie side by side in the shard's own file as they are in memory, if they do.
    offset: Option<u64>,
    /// None of its elements was ever written.
    is_unwritten: bool,
}

/// Bytes that blocks of rows have at least, unless chunks are larger: fewer are not worth their place in a table.
const BLOCK_BYTES: usize = 16 << 10;
/// Rows of so many bytes are not worth a call to the system each.
const SMALL_ROW: usize = 64;

impl Shard {
    /// Describes the file at `path`, whose datasets have the names that `spec` gives.
    pub(super) fn open(path: &Path, spec: &DataSpec) -> Result<Self> {
        let file = h5::open_file(path, None)?;
        let describe = || {
            let header = Header::read(&file)?;
            let content = Content::find(Place { file: &file, path }, spec)?;
            let print = ShardPrint::of(&file, path, &header, &content)?;
            let told = told(&file, &content)?.into();
            Ok(Self { path: path.to_owned(), header, content, print, told })
        };
        describe().map_err(|e: Error| e.at(path.display()))
    }

    /// Refuses a shard that does not fit the `first` one of its data set.
    pub(super) fn check_sibling(&self, first: &Self) -> Result<()> {
        self.check(first, &["set of datasets", "dtype", "sample shape", "scale of inputs", "vocabulary_size"])
    }

    /// Refuses a shard whose samples are not of the kind of those of the `first` one, which is of another data set. Types and
    /// scales may differ: what is read does not tell.
    pub(super) fn check_mixable(&self, first: &Self) -> Result<()> {
        self.check(first, &["set of datasets", "sample shape", "vocabulary_size"])
    }

    /// Refuses a shard that has weights where the `first` one has none, or the other way round.
    pub(super) fn check_weights(&self, first: &Self) -> Result<()> {
        let weights = |shard: &Self| shard.content.weights().map_or("none".to_owned(), |field| field.name.clone());
        let (own, expected) = (weights(self), weights(first));
        if own == expected {
            return Ok(());
        }
        Err(self
            .differs(first, "set of weights", &own, &expected)
            .hint("give every training shard weights, or leave them unread: data.weights = \"\""))
    }

    fn check(&self, first: &Self, checked: &[&str]) -> Result<()> {
        let aspects = |shard: &Self| {
            let describe = |one: &dyn Fn(&Field) -> String| {
                let mut fields = shard.content.datasets();
                // Validation shards need none.
                fields.truncate(fields.len() - shard.content.weights().iter().len());
                let all: Vec<String> = fields.into_iter().map(one).collect();
                all.join(", ")
            };
            [
                ("set of datasets", describe(&|ids| ids.name.clone())),
                ("dtype", describe(&|ids| format!("{} {}", ids.name, ids.dtype))),
                ("sample shape", describe(&|ids| format!("{} {}", ids.name, shape(&ids.shape[1..])))),
                ("scale of inputs", format!("{:?}", shard.content.standard())),
                ("vocabulary_size", shard.header.vocabulary_size.map_or("none".to_owned(), |size| size.to_string())),
            ]
        };
        for ((aspect, own), (_, expected)) in aspects(self).into_iter().zip(aspects(first)) {
            if checked.contains(&aspect) && own != expected {
                return Err(self.differs(first, aspect, &own, &expected));
            }
        }
        if self.header.tokenizer != first.header.tokenizer {
            let [own, expected] = tokenizer_names(self.header.tokenizer.as_ref(), first.header.tokenizer.as_ref());
            return Err(self.differs(first, "tokenizer", &own, &expected));
        }
        Ok(())
    }

    fn differs(&self, first: &Self, aspect: &str, own: &str, expected: &str) -> Error {
        let (path, first) = (self.path.display(), first.path.display());
        Error::input(format!("{aspect} differs: {path} has {own}, {first} has {expected}"))
            .hint("the shards of one data set must agree: import them in one go; those of data.mix must hold samples of one kind")
    }

    /// Refuses datasets that were made and never written.
    pub(super) fn check_written(&self) -> Result<()> {
        match self.content.datasets().into_iter().find(|field| field.is_unwritten) {
            Some(field) => Err(storage::unwritten(&field.name).at(self.path.display())),
            None => Ok(()),
        }
    }

    /// How many samples of `context` ids there are; at least one.
    pub(super) fn samples(&self, context: usize) -> Result<u64> {
        let at = self.path.display();
        match &self.content {
            Content::Tokens(tokens) => match tokens.rows().saturating_sub(1) / context {
                0 => Err(Error::input(format!(
                    "{} has {} tokens, but one sample takes {context} + 1",
                    tokens.name,
                    tokens.rows()
                ))
                .hint("use a smaller context or fewer, larger shards")
                .at(at)),
                windows => Ok(windows as u64),
            },
            Content::Rows(_) => {
                let first = self.content.datasets()[0];
                match first.rows() {
                    0 => Err(no_samples(first).at(at)),
                    rows => Ok(rows as u64),
                }
            }
            Content::Samples { inputs, .. } => {
                if inputs.row_len() != context {
                    let message = format!("{} has samples of {} ids", inputs.name, inputs.row_len());
                    return Err(Error::input(format!("{message}, but the model's context is {context}"))
                        .hint(format!("set the context to {}", inputs.row_len()))
                        .at(at));
                }
                match inputs.rows() {
                    0 => Err(no_samples(inputs).at(at)),
                    rows => Ok(rows as u64),
                }
            }
        }
    }

    /// The number of ids a model has to know: the shard's, or a larger one from the configuration.
    pub(super) fn vocabulary(&self, configured: Option<usize>) -> Result<usize> {
        let at = self.path.display();
        let own = self.header.vocabulary_size.map(|size| size.try_into().unwrap_or(usize::MAX));
        let vocabulary = match (configured, own) {
            (None, None) => {
                return Err(Error::input("the size of the vocabulary is unknown: no attribute vocabulary_size")
                    .hint("set model.vocabulary to the number of ids")
                    .at(at));
            }
            (Some(configured), Some(own)) if configured < own => {
                return Err(Error::input(format!("vocabulary_size is {own}, but model.vocabulary is {configured}"))
                    .hint(format!("set model.vocabulary to {own} or more, or leave it out"))
                    .at(at));
            }
            (Some(configured), _) => configured,
            (None, Some(own)) => own,
        };
        match vocabulary {
            1..=MAX_VOCABULARY => Ok(vocabulary),
            _ => Err(Error::input(format!("a vocabulary of {vocabulary} ids is outside 1..={MAX_VOCABULARY}")).at(at)),
        }
    }

    /// Opens the file anew and returns a reader for each dataset of its content. `cache_bytes` may be kept of each, more if
    /// a chunk is larger: else each read would decompress it again. What they read is compared with checksums as `verify` says.
    pub(super) fn readers(&self, cache_bytes: usize, verify: Verify, scratch: &Scratch) -> Result<Vec<RowReader>> {
        let datasets = self.content.datasets();
        // Of data whose blocks are kept by its reader, HDF5 has nothing to keep.
        let chunk_bytes = |field: &&Field| field.chunk_bytes().filter(|_| self.block(field, cache_bytes) == 0);
        let chunk_bytes = datasets.iter().filter_map(chunk_bytes).max();
        let bytes = chunk_bytes.map_or(0, |chunk_bytes| cache_bytes.max(chunk_bytes));
        let file = h5::open_file(&self.path, Some(ChunkCache { bytes, chunk_bytes: chunk_bytes.unwrap_or(0) }))?;
        let plain = std::fs::File::open(&self.path).map_err(|e| Error::io("read", &self.path, e))?;
        let plain = Arc::new(plain);
        let checksums = if verify != Verify::Off && self.header.has_checksums() {
            let checksums = Checksums::read(&file).map_err(|e| e.at(self.path.display()))?;
            Some(checksums.ok_or_else(|| self.without_checksums("the shard"))?)
        } else {
            None
        };
        let open = |field: &&Field| {
            let source = match field.offset {
                Some(offset) => Ok(Source::File(plain.clone(), offset)),
                None => file
                    .dataset(&field.name)
                    .and_then(|dataset| SlabReader::new(dataset, field.stored))
                    .map(Source::Library),
            };
            let source = source.map_err(|e| self.unreadable(field, e.into()))?;
            let (rows, block) = (field.rows() as u64, self.block(field, cache_bytes) as u64);
            let sums = checksums.as_ref().map(|checksums| self.sums(checksums, field)).transpose()?.flatten();
            let compared = sums.and_then(|sums| Compared::new(sums, verify, scratch.clone()));
            Ok(RowReader::new(source, field.stored, rows, field.row_len(), block, cache_bytes).compare(compared))
        };
        datasets.iter().map(open).collect()
    }

    /// The checksums of a dataset; none where its elements in memory are not those of the file.
    fn sums(&self, checksums: &Checksums, field: &Field) -> Result<Option<BlockSums>> {
        if !field.is_native {
            return Ok(None);
        }
        let sums = checksums.of(&field.name).ok_or_else(|| self.without_checksums(&field.name))?;
        let (has, needs) = (sums.crc32.len(), sums.needed(field.rows()));
        if has == needs {
            return Ok(Some(sums.clone()));
        }
        Err(Error::input(format!("{} has {has} checksums for {needs} blocks", field.name))
            .hint("copy or import it again")
            .at(self.path.display()))
    }

    fn without_checksums(&self, what: &str) -> Error {
        Error::input(format!("{what} has no checksums, although its format has"))
            .hint("copy or import it again, or read it without comparing: data.verify = \"off\"")
            .at(self.path.display())
    }

    /// Most bytes that the readers of all its datasets keep together, if `cache_bytes` may be kept of each.
    pub(super) fn cache_limit(&self, cache_bytes: usize) -> usize {
        let limit = |field: &Field| {
            let block = self.block(field, cache_bytes) * field.row_bytes();
            match (block, field.chunk_bytes()) {
                (0, Some(chunk_bytes)) => cache_bytes.max(chunk_bytes),
                (0, None) => 0,
                (block, _) => block.max(cache_bytes).min(field.rows() * field.row_bytes()),
            }
        };
        self.content.datasets().into_iter().map(limit).sum()
    }

    /// Rows of a dataset that are read at once and kept, if `cache_bytes` may be; 0 reads what is asked for and keeps nothing.
    fn block(&self, field: &Field, cache_bytes: usize) -> usize {
        let row_bytes = field.row_bytes().max(1);
        let fits = field.rows() * row_bytes <= cache_bytes;
        let enough_rows = BLOCK_BYTES.div_ceil(row_bytes);
        match &field.chunk {
            // Targets, mostly: all of them take less than a few samples.
            None if fits && row_bytes < SMALL_ROW && !matches!(self.content, Content::Tokens(_)) => enough_rows,
            None => 0,
            Some(chunk) if fits => enough_rows.next_multiple_of(chunk[0].max(1)),
            Some(chunk) => {
                let chunk_bytes = chunk[0] * row_bytes;
                let is_whole = chunk[1..] == field.shape[1..];
                // Of what is not compressed HDF5 reads just what is asked for.
                let pays = field.is_filtered && chunk_bytes >= BLOCK_BYTES && (is_whole || chunk_bytes <= cache_bytes);
                if pays { chunk[0] } else { 0 }
            }
        }
    }

    /// A read of `field` failed although the file once was in order.
    pub(super) fn unreadable(&self, field: &Field, error: ReadError) -> Error {
        match error {
            ReadError::Refused(error) if h5::is_newer(&error) => h5::newer(&field.name, &error).at(self.path.display()),
            ReadError::Refused(error) => {
                let place = PathBuf::from(format!("{}:{}", self.path.display(), field.name));
                Error::io("read", &place, h5::one_line(&error))
                    .hint("check it with `hpctrain data verify`; import or copy it again if it is damaged")
            }
            damaged @ ReadError::Damaged { .. } => Error::input(format!("{}{damaged}", field.name))
                .hint("copy or import the shard again; `hpctrain data verify` finds all such places")
                .at(self.path.display()),
        }
    }
}

impl Content {
    /// Tokens if there are any, else samples.
    fn find(place: Place<'_>, spec: &DataSpec) -> Result<Self> {
        let file = place.file;
        match &spec.wants {
            Wants::Rows { input, ids, target } => return Self::rows(place, spec, *input, ids, *target),
            Wants::Anything => {
                if let Some((input, ids, target)) = rows_of(place, spec)? {
                    return Self::rows(place, spec, input, &ids, target);
                }
            }
            Wants::Text => {}
        }
        if file.link_exists(&spec.tokens) {
            return Ok(Self::Tokens(Field::ids(place, &spec.tokens, 1)?));
        }
        if !file.link_exists(&spec.inputs) && !file.link_exists(&spec.targets) {
            let message = format!("has neither {} nor {} and {}", spec.tokens, spec.inputs, spec.targets);
            return Err(lacking(file, message));
        }
        for name in [&spec.inputs, &spec.targets] {
            if !file.link_exists(name) {
                return Err(lacking(file, format!("has no dataset {name}")));
            }
        }
        let inputs = Field::ids(place, &spec.inputs, 2)?;
        let targets = Field::ids(place, &spec.targets, 2)?;
        if inputs.shape != targets.shape {
            let (a, b) = (shape(&inputs.shape), shape(&targets.shape));
            return Err(Error::input(format!("{} is {a}, but {} is {b}", inputs.name, targets.name))
                .hint("each row of inputs needs a row of targets of the same length"));
        }
        Ok(Self::Samples { inputs, targets })
    }

    /// The scale of the inputs, if there is one.
    pub(super) fn standard(&self) -> Option<&Standard> {
        match self {
            Self::Rows(rows) => rows.standard.as_ref(),
            _ => None,
        }
    }

    /// Whether inputs are bytes that nothing scales.
    pub(super) fn is_unscaled(&self) -> bool {
        matches!(self, Self::Rows(rows) if rows.is_unscaled)
    }

    /// Images whose channels come first, if they do.
    pub(super) fn planes(&self) -> Option<Planes> {
        match self {
            Self::Rows(rows) => rows.planes,
            _ => None,
        }
    }

    /// Rows of `input` elements, ids of categories, and targets.
    fn rows(place: Place<'_>, spec: &DataSpec, input: usize, ids: &Ids, target: Target) -> Result<Self> {
        let file = place.file;
        let tables = if let Ids::Tables(tables) = ids { tables.len() } else { 0 };
        let wanted =
            [(&spec.inputs, input > 0), (&spec.categories, tables > 0), (&spec.targets, target != Target::Unknown)];
        if let Some((name, _)) = wanted.iter().find(|(name, is_wanted)| *is_wanted && !file.link_exists(name)) {
            return Err(lacking(file, format!("has no dataset {name}")));
        }
        let kind = if let Ids::Input(_) = ids { As::Ids } else { As::Numbers };
        let inputs = (input > 0).then(|| Field::describe(place, &spec.inputs, kind)).transpose()?;
        if let Some(inputs) = inputs.as_ref().filter(|inputs| inputs.row_len() != input) {
            let message = format!("{} has rows of {}", inputs.name, shape(&inputs.shape[1..]));
            return Err(Error::input(format!("{message}, but model.input has {input} elements"))
                .hint("set model.input to the shape of a row"));
        }
        let categories = (tables > 0).then(|| Field::describe(place, &spec.categories, As::Ids)).transpose()?;
        if let Some(categories) = categories.as_ref().filter(|categories| categories.row_len() != tables) {
            let message = format!("{} has rows of {}", categories.name, shape(&categories.shape[1..]));
            return Err(Error::input(format!("{message}, but the network has {tables} embedding tables"))
                .hint("let `ids` of embedding_tables have a number for each category"));
        }
        let targets = match target {
            Target::Unknown => None,
            Target::Class(classes) => Some(Field::classes(place, &spec.targets, classes)?),
            Target::Values(width) => Some(Field::values(place, &spec.targets, width)?),
        };
        if spec.scale.is_some() && (kind == As::Ids || inputs.is_none()) {
            return Err(Error::input("data.scale is for inputs that are numbers, but the network takes ids")
                .hint("leave it out"));
        }
        let (mut planes, mut standard, mut is_unscaled) = (None, None, false);
        if let Some(inputs) = &inputs {
            if !spec.shape.is_empty() {
                planes = Planes::check(&inputs.name, &inputs.shape[1..], &spec.shape, spec.axes)?;
            }
            if kind == As::Numbers {
                standard = Standard::of_inputs(file, inputs, planes, spec.scale)?;
                is_unscaled = inputs.dtype.is_byte() && standard.is_none() && spec.scale.is_none();
            }
        }
        let rows = inputs.iter().chain(&categories).map(Field::rows).next().unwrap_or(0);
        let weights = match targets {
            Some(_) => Self::find_weights(place, spec, rows)?,
            None => None,
        };
        let content =
            Self::Rows(Box::new(Rows { inputs, categories, targets, weights, standard, planes, is_unscaled }));
        if let [first, rest @ ..] = &content.datasets()[..]
            && let Some(other) = rest.iter().find(|other| other.rows() != first.rows())
        {
            let (a, b) = (first.rows(), other.rows());
            return Err(Error::input(format!("{} has {a} rows, but {} has {b}", first.name, other.name))
                .hint("all datasets need a row for each sample"));
        }
        Ok(content)
    }

    /// A number for each of `rows` rows, if there is to be one.
    fn find_weights(place: Place<'_>, spec: &DataSpec, rows: usize) -> Result<Option<Field>> {
        let file = place.file;
        let name = match spec.weights.as_deref() {
            Some("") => return Ok(None),
            Some(name) => name,
            None if file.link_exists(WEIGHTS) => WEIGHTS,
            None => return Ok(None),
        };
        if !file.link_exists(name) {
            return Err(lacking(file, format!("has no dataset {name}"))
                .hint("name a dataset that is there as data.weights, or leave it out"));
        }
        let weights = Field::describe(place, name, As::Numbers)?;
        if (weights.rows(), weights.row_len()) != (rows, 1) {
            let message = format!("{name} has shape {}, but there are {rows} samples", shape(&weights.shape));
            return Err(Error::input(message).hint("give one weight for each sample, or data.weights = \"\""));
        }
        Ok(Some(weights))
    }

    /// The dataset of weights, if there is one.
    pub(super) fn weights(&self) -> Option<&Field> {
        match self {
            Self::Rows(rows) => rows.weights.as_ref(),
            _ => None,
        }
    }

    pub(super) fn datasets(&self) -> Vec<&Field> {
        match self {
            Self::Tokens(tokens) => vec![tokens],
            Self::Samples { inputs, targets } => vec![inputs, targets],
            Self::Rows(rows) => {
                rows.inputs.iter().chain(&rows.categories).chain(&rows.targets).chain(&rows.weights).collect()
            }
        }
    }
}

/// Reads the preprocessing that a file describes.
fn told(file: &File, content: &Content) -> Result<Told> {
    let Content::Rows(rows) = content else { return Ok(Told::default()) };
    let scale = rows.standard.as_ref().map(Scale::from);
    // Datasets of these names may be anything in files of other make.
    if !is_of_samples(file) {
        return Ok(Told { scale, ..Told::default() });
    }
    let unreadable = |e| Error::input(format!("dataset {CLASSES} cannot be read: {}", h5::one_line(&e)));
    let classes = class_names(file).map_err(unreadable)?.unwrap_or_default();
    Ok(Told { scale, columns: Columns::read(file)?.map(Arc::new), classes })
}

/// Elements of a row, the ids beside them and the kind of its target, if a file holds rows rather than text.
fn rows_of(place: Place<'_>, spec: &DataSpec) -> Result<Option<(usize, Ids, Target)>> {
    let file = place.file;
    let has = |name: &str| file.link_exists(name);
    if has(&spec.tokens) || !(has(&spec.inputs) || has(&spec.categories)) {
        return Ok(None);
    }
    let describe = |name: &str, kind: As| has(name).then(|| Field::describe(place, name, kind)).transpose();
    let inputs = describe(&spec.inputs, As::Numbers)?;
    let ids = match describe(&spec.categories, As::Ids)? {
        Some(categories) => Ids::Tables(vec![MAX_VOCABULARY; categories.row_len()].into()),
        None => Ids::None,
    };
    let input = inputs.as_ref().map_or(0, Field::row_len);
    if !file.link_exists(&spec.targets) {
        return Ok(Some((input, ids, Target::Unknown)));
    }
    let targets = Field::describe(place, &spec.targets, As::Numbers)?;
    let is_integer = |field: &Field| field.dtype.is_integer();
    // Windows of text: an id to predict for each id.
    let is_text = |inputs: &Field| is_integer(inputs) && inputs.shape.len() == 2 && inputs.shape == targets.shape;
    if is_integer(&targets) && inputs.as_ref().is_some_and(is_text) && ids == Ids::None {
        return Ok(None);
    }
    let is_class = is_integer(&targets) && targets.row_len() == 1;
    let target = if is_class { Target::Class(MAX_VOCABULARY) } else { Target::Values(targets.row_len()) };
    Ok(Some((input, ids, target)))
}

fn no_samples(field: &Field) -> Error {
    Error::input(format!("{} has no samples", field.name)).hint("write some, or leave the file out")
}

fn lacking(file: &File, message: String) -> Error {
    let existing = h5::dataset_names(file).unwrap_or_default();
    let existing = if existing.is_empty() { "no dataset".to_owned() } else { existing.join(", ") };
    Error::input(message).hint(format!(
        "the file holds {existing}; name its datasets in data.tokens, or data.inputs, data.categories and data.targets"
    ))
}

impl Field {
    /// A dataset of token ids in so many dimensions.
    fn ids(place: Place<'_>, name: &str, rank: usize) -> Result<Self> {
        let field = Self::describe(place, name, As::Ids)?;
        if field.shape.len() != rank {
            let want = if rank == 1 { "one dimension" } else { "two dimensions, samples x context" };
            return Err(Error::input(format!("{name} has shape {}, but {want} is expected", shape(&field.shape)))
                .hint("name another dataset, or store the ids in that shape"));
        }
        Ok(field)
    }

    /// A class a row, or a one-hot row of all classes.
    fn classes(place: Place<'_>, name: &str, classes: usize) -> Result<Self> {
        let dataset = storage::open(place.file, place.path, name)?;
        match dataset.shape().get(1..).map_or(1, |row| row.iter().product()) {
            1 => Self::describe(place, name, As::Ids),
            columns if columns == classes => Self::describe(place, name, As::Numbers),
            columns => {
                Err(Error::input(format!("{name} has rows of {columns}, but the network tells {classes} classes apart"))
                    .hint(format!("store the number of the class of each row, or one-hot rows of {classes}; for several labels a row, set loss.kind = \"binary-cross-entropy\"")))
            }
        }
    }

    /// So many numbers a row.
    fn values(place: Place<'_>, name: &str, width: usize) -> Result<Self> {
        let targets = Self::describe(place, name, As::Numbers)?;
        if targets.row_len() == width {
            return Ok(targets);
        }
        let message = format!("{name} has rows of {}", targets.row_len());
        Err(Error::input(format!("{message}, but the network predicts {width} of each sample"))
            .hint("the last of model.layers must give as many, and loss.kind must fit the targets"))
    }

    fn describe(place: Place<'_>, name: &str, kind: As) -> Result<Self> {
        let Place { file, path } = place;
        let unreadable = |e: hdf5::Error| storage::unreadable(name, &e);
        let dataset = storage::open(file, path, name)?;
        let dtype = dataset.dtype().and_then(|dtype| Dtype::of(&dtype)).map_err(unreadable)?;
        dtype.check(name, kind)?;
        let dims = dataset.get_shape().map_err(unreadable)?;
        if dataset.space().map_err(unreadable)?.is_null() {
            return Err(Error::input(format!("{name} has no elements")).hint("store one row for each sample"));
        }
        if dims.is_empty() {
            return Err(Error::input(format!("{name} is a scalar")).hint("store one row for each sample"));
        }
        // Sizes are counted in bytes from here on.
        if dims.iter().try_fold(dtype.size().max(8), |bytes, extent| bytes.checked_mul(*extent)).is_none() {
            return Err(Error::input(format!("{name} has shape {}, too large for any memory", shape(&dims)))
                .hint("write it with the shape that its data has"));
        }
        storage::check(&dataset, path, name)?;
        let native = dataset.dtype().and_then(|dtype| Stored::of(&dtype)).map_err(unreadable)?;
        let properties = dataset.create_plist().map_err(unreadable)?;
        // A link may lead into another file, and elements may lie in files without structure.
        let is_here = dataset.filename() == file.filename() && properties.external().is_empty();
        let is_plain = dataset.layout() == Layout::Contiguous && is_here && native.is_some();
        Ok(Self {
            name: name.to_owned(),
            kind,
            dtype,
            shape: dims,
            stored: native.unwrap_or(Stored::converted(kind)),
            is_native: native.is_some(),
            chunk: dataset.chunk(),
            is_filtered: !dataset.filters().is_empty(),
            offset: dataset.offset().filter(|_| is_plain),
            is_unwritten: storage::is_unwritten(&dataset).map_err(unreadable)?,
        })
    }

    /// Whether its elements are in memory bit by bit what they are in the file.
    pub(super) fn is_native(&self) -> bool {
        self.is_native
    }

    /// Bytes of a row in memory.
    fn row_bytes(&self) -> usize {
        self.row_len() * self.stored.width()
    }

    /// Decompressed bytes of a chunk, if there are chunks.
    fn chunk_bytes(&self) -> Option<usize> {
        self.chunk.as_ref().map(|chunk| chunk.iter().product::<usize>() * self.dtype.size())
    }

    /// Elements, or rows of elements if there are two dimensions.
    pub(super) fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of a row.
    pub(super) fn row_len(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// All ids.
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Names the element at `offset` as in `/inputs[3, 17]`.
    pub(super) fn element(&self, offset: usize) -> String {
        match self.shape.len() {
            1 => format!("{}[{offset}]", self.name),
            _ => format!("{}[{}, {}]", self.name, offset / self.row_len(), offset % self.row_len()),
        }
    }
}

/// `100 x 64`; a single number for one dimension.
pub(super) fn shape(dims: &[usize]) -> String {
    if dims.is_empty() {
        return "scalar".to_owned();
    }
    let dims: Vec<String> = dims.iter().map(usize::to_string).collect();
    dims.join(" x ")
}

/// The place of the first id outside the vocabulary.
pub(super) fn first_invalid(ids: &[u32], vocabulary: usize) -> Option<usize> {
    // Nearly always there is none, which vector instructions tell sooner than a search.
    let largest = simd(
        #[inline(always)]
        || ids.iter().fold(0, |largest, id| largest.max(*id)),
    );
    if (largest as usize) < vocabulary {
        return None;
    }
    ids.iter().position(|&id| id as usize >= vocabulary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_named_by_row_and_column() {
        let dtype = Dtype::of(&hdf5::Datatype::from_type::<u8>().unwrap()).unwrap();
        let ids = |shape| Field {
            name: "/x".into(),
            kind: As::Ids,
            dtype: dtype.clone(),
            shape,
            stored: Stored::U8,
            is_native: true,
            chunk: None,
            is_filtered: false,
            offset: None,
            is_unwritten: false,
        };
        assert_eq!(ids(vec![100]).element(42), "/x[42]");
        assert_eq!(ids(vec![10, 8]).element(42), "/x[5, 2]");
    }

    #[test]
    fn ids_outside_the_vocabulary_are_found() {
        assert_eq!(first_invalid(&[0, 4, 5, 9], 5), Some(2));
        assert_eq!(first_invalid(&[0, 4], 5), None);
        assert_eq!(first_invalid(&[-1i32 as u32], i32::MAX as usize), Some(0));
    }
}
