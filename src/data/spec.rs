//! Description of a data set: location of its files, names of their datasets, and the parts of a
//! sample.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::image_layout::Axes;
use super::raw_path;
use super::sample_fields::SampleSizes;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::pattern::Pattern;

/// The dataset that weights are looked for in unless another is named.
pub(super) const WEIGHTS: &str = "/weights";

/// File names of training shards unless others are given.
const TRAIN: &str = "train-*.h5";

/// File names of validation shards unless others are given: they need not be there.
const VALIDATION: &str = "val-*.h5";

/// Location of the validation samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Held {
    /// In shards of their own.
    Shards,
    /// Among those for training: [`DataSpec::val_fraction`] of them.
    Fraction,
    /// There are none.
    Nowhere,
}

/// Location of the data, and the names of its files and datasets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataSpec {
    /// A directory of shards, or one HDF5 file.
    #[serde(with = "raw_path")]
    pub path: PathBuf,
    /// File names of the training shards: `*` stands for any characters, `[02-4]` for one of those
    /// in brackets.
    pub train: Pattern,
    /// File names of the validation shards.
    pub validation: Pattern,
    /// The dataset of token ids, one dimension.
    pub tokens: String,
    /// The dataset of input ids where samples are ready-made, samples x context.
    pub inputs: String,
    /// The dataset of ids of categories, samples x categories.
    pub categories: String,
    /// The dataset of target ids, of the same shape.
    pub targets: String,
    /// The dataset with a factor of each row's loss; `/weights` if none is given and files have
    /// one, none if empty.
    pub weights: Option<String>,
    /// Shape of a row as the network takes it; empty where any with as many elements will do.
    pub shape: Vec<usize>,
    /// Order of the axes of images.
    pub axes: Axes,
    /// The part of the samples that is kept for validation where there are no validation shards; 0
    /// keeps none.
    pub val_fraction: f64,
    /// Scaling of inputs; if left out, the mean and standard deviation in the files.
    pub scale: Option<InputScale>,
    /// The number of ids, for files that do not tell; may also pad the files' own number.
    pub vocabulary: Option<usize>,
    /// Verification of blocks against their checksums as they are read.
    pub verify: Verify,
    /// Treatment of external raw files outside the directory of the file that names them.
    pub external_files: ExternalFiles,
    /// The samples to be read.
    pub samples: SampleSpec,
}

/// Verification of blocks against their checksums as they are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// No block.
    Off,
    /// Each block on the first read of it by this process.
    #[default]
    FirstPass,
    /// Every block on every read.
    Always,
}

/// Treatment of external raw files of HDF5 outside the directory of the file that names them: such
/// a file names any path, and all that the user may read would become data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExternalFiles {
    /// They are an error.
    #[default]
    Refuse,
    /// They are read.
    Allow,
}

/// Scaling of inputs, in the place of the mean and standard deviation that a file may give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InputScale {
    /// Not at all.
    None,
    /// Unsigned bytes are divided by 255.
    Unit,
}

/// The samples that a network takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SampleSpec {
    /// Token ids and the ids that follow them.
    Text,
    /// All parts found in the files: to inspect, not to train on.
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ids {
    /// There are none: inputs are numbers.
    None,
    /// Inputs are ids below this.
    Input(usize),
    /// Beside inputs, which are numbers, there is an id of each category, below its own number:
    /// rows of its table. As parts of a sample they count through all tables, those of the second
    /// from where those of the first end.
    Tables(#[serde(with = "tables")] Arc<[usize]>),
}

/// Rows of tables that several hold, as a list.
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
    /// One of so many classes.
    Class(usize),
    /// So many numbers.
    Values(usize),
    /// None: the network is to predict it.
    Unknown,
}

impl SampleSpec {
    /// Elements of a sample's parts, of `context` predictions; no weights, which rows may have or
    /// not.
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

    /// The number that all ids are below; none of text, whose vocabulary is the network's.
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
    /// The names that the importer gives, at `path`.
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

    /// The key with the pattern of names of a split, and the pattern.
    pub(super) fn pattern(&self, split: Split) -> (&'static str, &Pattern) {
        match split {
            Split::Train => ("data.train", &self.train),
            Split::Validation => ("data.validation", &self.validation),
        }
    }

    /// Location of the validation samples.
    ///
    /// # Errors
    /// The data does not exist, or file names that were asked for fit none.
    pub fn held(&self) -> Result<Held> {
        let has_shards =
            || Ok(file_names(&self.path)?.iter().any(|name| self.validation.matches(name)));
        if self.path.is_dir() && has_shards()? {
            return Ok(Held::Shards);
        }
        match self.val_fraction {
            fraction if fraction > 0.0 => Ok(Held::Fraction),
            _ if self.path.is_file()
                || self.path.is_dir() && self.validation.as_str() == VALIDATION =>
            {
                Ok(Held::Nowhere)
            }
            // The error names the missing files.
            _ => self.files(Split::Validation).map(|_| Held::Shards),
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

/// The names of all entries of a directory, sorted.
pub(super) fn file_names(directory: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io("list", directory, e);
    let entries: Vec<_> =
        std::fs::read_dir(directory).map_err(failed)?.collect::<Result<_, _>>().map_err(failed)?;
    let mut names: Vec<String> =
        entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// The first few names, and their total number.
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
    /// Training samples.
    Train,
    /// Validation samples.
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
