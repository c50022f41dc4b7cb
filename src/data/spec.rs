//! The description of a data set: the location of its files, the names of their datasets, and the
//! parts of a sample.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::image_layout::Axes;
use super::raw_path;
use super::sample_fields::SampleSizes;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::pattern::Pattern;

/// The dataset of weights unless another is named.
pub(super) const WEIGHTS: &str = "/weights";

/// The default file names of training shards.
const TRAIN: &str = "train-*.h5";

/// The default file names of validation shards, which need not exist.
const VALIDATION: &str = "val-*.h5";

/// Where the validation samples are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ValidationSource {
    /// In separate shards.
    Shards,
    /// Among the training samples: the fraction [`DataSpec::val_fraction`] of them.
    Fraction,
    /// Nowhere: there are none.
    Nowhere,
}

/// The location of the data, and the names of its files and datasets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataSpec {
    /// A directory of shards, or one HDF5 file.
    #[serde(with = "raw_path")]
    pub path: PathBuf,
    /// The file names of the training shards: `*` stands for any characters, `[02-4]` for one of
    /// those in brackets.
    pub train: Pattern,
    /// The file names of the validation shards.
    pub validation: Pattern,
    /// The dataset of token ids, in one dimension.
    pub tokens: String,
    /// The dataset of input ids if samples are already cut, samples x context.
    pub inputs: String,
    /// The dataset of ids of categories, samples x categories.
    pub categories: String,
    /// The dataset of target ids, with the shape of the inputs.
    pub targets: String,
    /// The dataset with a factor of each row's loss; `/weights` if none is given and the files have
    /// it; no weights if empty.
    pub weights: Option<String>,
    /// The shape of a row as the network takes it; empty if any with as many elements is allowed.
    pub shape: Vec<usize>,
    /// The order of the axes of images.
    pub axes: Axes,
    /// The fraction of the samples that is kept for validation if there are no validation shards; 0
    /// keeps none.
    pub val_fraction: f64,
    /// The scaling of inputs. Default: the mean and standard deviation in the files.
    pub scale: Option<InputScale>,
    /// The number of ids, for files that do not record it; may also pad the files' own number.
    pub vocabulary: Option<usize>,
    /// The verification of blocks against their checksums as they are read.
    pub verify: Verify,
    /// The treatment of external raw files outside the directory of the file that names them.
    pub external_files: ExternalFiles,
    /// The samples to be read.
    pub samples: SampleSpec,
}

/// The verification of blocks against their checksums as they are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// No block is verified.
    Off,
    /// Each block is verified when this process first reads it.
    #[default]
    FirstPass,
    /// Every block is verified on every read.
    Always,
}

/// The treatment of external raw files of HDF5 outside the directory of the file that names them: a
/// file can name any path, so anything that the user may read could become data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExternalFiles {
    /// They are an error.
    #[default]
    Refuse,
    /// They are read.
    Allow,
}

/// The scaling of inputs, which replaces the mean and standard deviation that a file may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InputScale {
    /// Inputs are not scaled.
    None,
    /// Unsigned bytes are divided by 255.
    Unit,
}

/// The samples that a network takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SampleSpec {
    /// Token ids and the ids that follow them.
    Text,
    /// All parts found in the files, for inspection rather than training.
    Anything,
    /// A row of inputs and a target.
    Rows {
        /// The number of elements of the inputs.
        input: usize,
        /// The ids among or besides the inputs.
        ids: Ids,
        /// The target.
        target: Target,
    },
}

/// The ids of samples that are not text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ids {
    /// There are none: inputs are numbers.
    None,
    /// Inputs are ids below this number.
    Input(usize),
    /// Besides inputs, which are numbers, there is an id for each category: a row of its embedding
    /// table, below this number of rows. As parts of a sample, ids count through all tables: those
    /// of the second table start where those of the first end.
    Tables(#[serde(with = "tables")] Arc<[usize]>),
}

/// Serialisation of shared numbers of rows, as a list.
mod tables {
    use std::sync::Arc;

    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub fn serialize<S: Serializer>(tables: &Arc<[usize]>, to: S) -> Result<S::Ok, S::Error> {
        tables[..].serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<[usize]>, D::Error> {
        Ok(Vec::deserialize(from)?.into())
    }
}

/// The target of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// One of this number of classes.
    Class(usize),
    /// This number of values.
    Values(usize),
    /// No target: the network is to predict it.
    Unknown,
}

impl SampleSpec {
    /// Returns the number of elements of a sample's parts, with `context` predictions, and without
    /// weights, which rows may or may not have.
    pub fn sizes(&self, context: usize) -> SampleSizes {
        let Self::Rows { input, ids, target } = self else {
            return SampleSizes { ids: context, classes: context, ..SampleSizes::default() };
        };
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
        SampleSizes { ids, features, classes, values, weights: 0 }
    }

    /// Returns a bound that all ids are below; `None` for text, whose vocabulary is the network's.
    pub fn ids_below(&self) -> Option<usize> {
        let Self::Rows { ids, .. } = self else { return None };
        Some(match ids {
            Ids::None => 0,
            Ids::Input(below) => *below,
            Ids::Tables(tables) => tables.iter().sum(),
        })
    }
}

impl DataSpec {
    /// Creates a description with the names that the importer uses, at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            train: TRAIN.parse().expect("a valid pattern"),
            validation: VALIDATION.parse().expect("a valid pattern"),
            tokens: "/tokens".to_owned(),
            inputs: "/inputs".to_owned(),
            categories: "/categories".to_owned(),
            targets: "/targets".to_owned(),
            weights: None,
            shape: vec![],
            axes: Axes::default(),
            val_fraction: 0.0,
            scale: None,
            vocabulary: None,
            verify: Verify::default(),
            external_files: ExternalFiles::default(),
            samples: SampleSpec::Text,
        }
    }

    /// Returns the key with the pattern of file names of a split, and the pattern.
    pub(super) fn pattern(&self, split: Split) -> (&'static str, &Pattern) {
        match split {
            Split::Train => ("data.train", &self.train),
            Split::Validation => ("data.validation", &self.validation),
        }
    }

    /// Returns where the validation samples are.
    ///
    /// # Errors
    /// Returns an error if the data does not exist, or if no file matches a validation pattern that
    /// was given.
    pub fn validation_source(&self) -> Result<ValidationSource> {
        let has_shards =
            || Ok(file_names(&self.path)?.iter().any(|name| self.validation.matches(name)));
        if self.path.is_dir() && has_shards()? {
            return Ok(ValidationSource::Shards);
        }
        match self.val_fraction {
            fraction if fraction > 0.0 => Ok(ValidationSource::Fraction),
            _ if self.path.is_file()
                || self.path.is_dir() && self.validation.as_str() == VALIDATION =>
            {
                Ok(ValidationSource::Nowhere)
            }
            // The error names the missing files.
            _ => self.files(Split::Validation).map(|_| ValidationSource::Shards),
        }
    }

    /// Returns the shards of `split`, sorted by name; at least one.
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
                    .hint(
                        "give a directory with training and validation shards as data.path, or set data.val_fraction",
                    )),
            };
        }
        let (key, pattern) = self.pattern(split);
        let names = file_names(&self.path)?;
        let shards: Vec<PathBuf> = names
            .iter()
            .filter(|name| pattern.matches(name))
            .map(|name| self.path.join(name))
            .collect();
        if shards.is_empty() {
            return Err(Error::input(format!("no file in {path} matches {pattern}"))
                .hint(format!("it holds {}; set {key} to a pattern that fits", listing(&names))));
        }
        Ok(shards)
    }
}

/// Returns the names of all entries of a directory, sorted.
pub(super) fn file_names(directory: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io("list", directory, e);
    let entries: Vec<_> =
        std::fs::read_dir(directory).map_err(failed)?.collect::<Result<_, _>>().map_err(failed)?;
    let mut names: Vec<String> =
        entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// Lists the first few names, and their total number.
fn listing(names: &[String]) -> String {
    const SHOWN: usize = 5;
    match names.len() {
        0 => "nothing".to_owned(),
        1..=SHOWN => names.join(", "),
        n => format!("{} … ({n} files)", names[..SHOWN].join(", ")),
    }
}

/// The two splits of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Training samples.
    Train,
    /// Validation samples.
    Validation,
}

impl Split {
    /// Returns the name of the split in files and messages.
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
