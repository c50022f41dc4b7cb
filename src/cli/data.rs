//! `hpctrain data`: imports, inspects and verifies training data.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::data_order::{self, OrderArgs};
use super::data_which::{self, WhichArgs};
use crate::data::import::{
    Arrays, Categories, CategoryIds, IdVocabulary, ImportCsv, ImportIds, ImportIdx, ImportImages,
    ImportNumpy, ImportOptions, ImportText, Missing, NotFinite, StreamShards, TableFormat,
    TextOptions, import_csv, import_ids, import_idx, import_images, import_numpy, import_text,
};
use crate::data::{LookupOptions, TokenizerKind, inspect, verify};
use crate::error::Result;
use crate::telemetry::say;

/// Import, inspect and verify training data
#[derive(Debug, Args)]
pub struct DataArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Convert other formats to HDF5 shards
    Import(ImportArgs),
    /// Show the contents of HDF5 files: shapes, types, layout, compression, provenance
    Inspect {
        /// An HDF5 file, or a directory of .h5 files
        path: PathBuf,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
    /// Read all data and compare it with its checksums, vocabulary and sibling shards
    Verify {
        /// An HDF5 file, or a directory of .h5 files
        path: PathBuf,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
    /// Show which samples each rank reads in each step and micro-batch, without running
    #[command(
        after_help = "Example: hpctrain data order --ranks 4 --steps 3 --set data.path=data/mine"
    )]
    Order(Box<OrderArgs>),
    /// Show the samples of a step of a run: virtual rank, rank, data set, epoch, file, row, text
    #[command(
        after_help = "Example: hpctrain data which runs/gpt-char --step 400 --text\n         hpctrain data which runs/gpt-char --step 400 --virtual-rank 1 --numbers >> exclude.txt"
    )]
    Which(Box<WhichArgs>),
}

#[derive(Debug, Args)]
struct ImportArgs {
    #[command(subcommand)]
    source: Source,
}

#[derive(Debug, Subcommand)]
enum Source {
    /// Tokenize text into train-*.h5 and val-*.h5
    #[command(
        after_help = "Example: hpctrain data import text input.txt --tokenizer char --shards 4 --out data/mine\n         hpctrain data import text articles.jsonl --field text --tokenizer gpt2 --end-of-text '<|endoftext|>' --out data/articles"
    )]
    Text(TextArgs),
    /// Convert token ids of another program (a NumPy array or a dataset of an HDF5 file) to
    /// train-*.h5 and val-*.h5
    #[command(
        after_help = "Example: hpctrain data import ids packed.npy --tokenizer gpt2 --out data/packed"
    )]
    Ids(IdsArgs),
    /// Convert images and labels in MNIST's IDX format, plain or gzipped, to train-*.h5 and
    /// val-*.h5
    #[command(
        after_help = "Example: hpctrain data import idx t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz --out data/mnist"
    )]
    Idx {
        /// The images
        images: PathBuf,
        /// Their classes
        labels: PathBuf,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Convert PNG and JPEG images, one folder per class, to train-*.h5 and val-*.h5
    #[command(
        after_help = "Example: hpctrain data import images photos --size 64 --out data/photos"
    )]
    Images {
        /// A directory that contains only one folder per class; classes are numbered by folder name
        folder: PathBuf,
        /// Resize every image until it covers this height and width (one number: both), then
        /// center-crop it [default: images keep their size, which must be the same for all]
        #[arg(long, value_name = "HxW", value_parser = size)]
        size: Option<[u32; 2]>,
        /// Convert images to one channel (greyscale) instead of three
        #[arg(long)]
        grey: bool,
        /// The folder contains images without classes, to be predicted in the order of their file
        /// names
        #[arg(long, conflicts_with = "val_every")]
        no_target: bool,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Convert a CSV table of numbers and categories, or of text, to train-*.h5 and val-*.h5
    #[command(
        after_help = "Example: hpctrain data import csv clicks.csv --target clicked --categorical site,device --out data/clicks\n         hpctrain data import csv iris.csv --target species --drop id --missing mean --out data/iris\n         hpctrain data import csv reviews.csv --target stars --text review --tokenizer byte --length 256 --out data/reviews"
    )]
    Csv(Box<CsvArgs>),
    /// Convert NumPy arrays of features and labels (numpy.save) to train-*.h5 and val-*.h5
    #[command(after_help = "Example: hpctrain data import npy X.npy Y.npy --out data/mine")]
    Npy {
        /// The features, one row per sample; rows × height × width are images of one channel
        features: PathBuf,
        /// The labels; one integer of at least 0 per row is a class
        #[arg(required_unless_present = "no_target")]
        labels: Option<PathBuf>,
        /// The data has no labels and is to be predicted
        #[arg(long, conflicts_with_all = ["labels", "regression", "val_every"])]
        no_target: bool,
        /// Loss weights of the samples in training: one number of at least 0 per row
        #[arg(long, value_name = "FILE")]
        weights: Option<PathBuf>,
        /// Treat labels as numbers (regression), even if they look like classes
        #[arg(long)]
        regression: bool,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Convert two arrays of a NumPy archive (numpy.savez or numpy.savez_compressed) to train-*.h5
    /// and val-*.h5
    #[command(
        after_help = "Example: hpctrain data import npz mnist.npz --features x_train --labels y_train --out data/mnist"
    )]
    Npz {
        /// The archive
        input: PathBuf,
        /// Name of the array of features
        #[arg(long, value_name = "NAME", default_value = "x")]
        features: String,
        /// Name of the array of labels
        #[arg(long, value_name = "NAME", default_value = "y")]
        labels: String,
        /// The data has no labels and is to be predicted
        #[arg(long, conflicts_with_all = ["labels", "regression", "val_every"])]
        no_target: bool,
        /// Name of the array of loss weights in training: one number of at least 0 per row
        #[arg(long, value_name = "NAME")]
        weights: Option<String>,
        /// Treat labels as numbers (regression), even if they look like classes
        #[arg(long)]
        regression: bool,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
struct CsvArgs {
    /// The table: a line of column names, then a line for each row
    input: PathBuf,
    #[command(flatten)]
    format: TableFormat,
    /// Column to predict; may be repeated. A single column of words, or of integers of at least 0,
    /// is a class [with --like: the targets of the earlier table, if this one has them]
    #[arg(long = "target", value_name = "COLUMN", required_unless_present_any = ["like", "no_target"])]
    targets: Vec<String>,
    /// The table has no targets and is to be predicted
    #[arg(long, conflicts_with_all = ["targets", "regression", "classes", "like", "val_every"])]
    no_target: bool,
    /// Column of loss weights in training, which is neither input nor target
    #[arg(long, value_name = "COLUMN")]
    weight: Option<String>,
    /// Columns to ignore, such as row numbers
    #[arg(long, value_name = "COLUMN,…", value_delimiter = ',', conflicts_with = "like")]
    drop: Vec<String>,
    /// Treat targets as numbers (regression), even if they look like classes
    #[arg(long)]
    regression: bool,
    /// Treat values of the target as class names, even if they are numbers
    #[arg(long, conflicts_with_all = ["regression", "like"])]
    classes: bool,
    /// Handling of missing input numbers: fail, skip the row, or fill in the mean of the column
    /// or a number [default: error; with --like, as for the earlier table; with --not-finite skip,
    /// skip]
    #[arg(long, value_name = "error|skip|mean|NUMBER", allow_negative_numbers = true)]
    missing: Option<Missing>,
    /// Categorical columns, whose values become ids from 1 on; empty cells have id 0
    #[arg(long, value_name = "COLUMN,…", value_delimiter = ',')]
    categorical: Vec<String>,
    /// Hash the values of each categorical column to this number of ids instead of listing them
    #[arg(long, value_name = "IDS", requires = "categorical")]
    hash: Option<u32>,
    /// Take the values of a categorical column, in the order of their ids, from a text file with a
    /// value in each line; may be repeated
    #[arg(
        long = "vocabulary",
        value_name = "COLUMN=FILE",
        value_parser = vocabulary,
        requires = "categorical",
        conflicts_with = "hash"
    )]
    vocabularies: Vec<(String, PathBuf)>,
    /// Give ids only to values of a categorical column that occur N times or more, the most
    /// frequent first; the others are unknown
    #[arg(
        long,
        value_name = "N",
        requires = "categorical",
        conflicts_with = "hash",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    min_count: Option<u64>,
    /// Use at most N ids for each categorical column, including those of empty cells and unknown
    /// values: only the most frequent values get ids
    #[arg(long, value_name = "N", requires = "categorical", conflicts_with = "hash")]
    max_ids: Option<u32>,
    /// Hash unknown values of each categorical column to N ids, 1 to N; empty cells keep id 0
    /// [default: unknown values have id 0, too]
    #[arg(
        long,
        value_name = "N",
        requires = "categorical",
        conflicts_with = "hash",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    oov: Option<u32>,
    /// Column of text, whose tokens become the inputs; may be repeated. All other columns are
    /// targets, weights or dropped
    #[arg(
        long = "text",
        value_name = "COLUMN",
        requires_all = ["tokenizer", "length"],
        conflicts_with = "categorical"
    )]
    texts: Vec<String>,
    /// Tokenizer of the text: one id per character, one per byte, GPT-2's byte-pair encoding, or a
    /// Hugging Face tokenizer.json
    #[arg(long, value_name = "char|byte|gpt2|FILE", requires = "texts")]
    tokenizer: Option<TokenizerKind>,
    /// Number of ids of each text: longer texts are truncated, shorter ones padded with id 0
    #[arg(
        long,
        value_name = "N",
        requires = "texts",
        value_parser = clap::value_parser!(u32).range(1..=MAX_TEXT)
    )]
    length: Option<u32>,
    /// Use the inputs, categories, ids, texts, scaling, classes and targets of the table that was
    /// imported into this directory
    #[arg(long, value_name = "DIR", conflicts_with_all = ["categorical", "hash", "texts", "vocabularies", "min_count", "max_ids", "oov", "tokenizer", "length"])]
    like: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// The largest number of ids of a text.
const MAX_TEXT: i64 = 1 << 20;

/// Parses `COLUMN=FILE`.
fn vocabulary(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((column, file)) if !column.is_empty() && !file.is_empty() => {
            Ok((column.to_owned(), file.into()))
        }
        _ => Err("expected a column and a file, such as site=sites.txt".to_owned()),
    }
}

impl From<CsvArgs> for ImportCsv {
    fn from(args: CsvArgs) -> Self {
        let CsvArgs { input, format, targets, weight, drop, regression, classes, missing, .. } =
            args;
        let ids = match args.hash {
            Some(ids) => CategoryIds::Hashed(ids),
            None => CategoryIds::Listed {
                vocabularies: args.vocabularies,
                options: LookupOptions {
                    min_count: args.min_count.unwrap_or(1),
                    max_ids: args.max_ids,
                    oov: args.oov.unwrap_or(0),
                },
            },
        };
        let categories = match args.like {
            Some(earlier) => Categories::Like(earlier),
            None => Categories::Named { columns: args.categorical, ids },
        };
        let text = args.tokenizer.zip(args.length).map(|(tokenizer, length)| TextOptions {
            columns: args.texts,
            tokenizer,
            length: length as usize,
        });
        let options = args.output.into();
        Self {
            input,
            format,
            targets,
            weight,
            drop,
            regression,
            classes,
            missing,
            categories,
            text,
            options,
            needs_all: false,
        }
    }
}

#[derive(Debug, Args)]
struct OutputArgs {
    /// Output directory; it must not contain shards yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number of training shards
    #[arg(long, value_name = "N", default_value_t = 1)]
    shards: usize,
    /// Keep every N-th sample for validation; 0 keeps none. Data without targets is not split
    #[arg(long, value_name = "N", default_value_t = 5)]
    val_every: usize,
    /// Keep numbers as they are, instead of normalizing each channel or column to mean 0 and
    /// standard deviation 1
    #[arg(long)]
    raw: bool,
    /// Handling of rows that have a number that is not finite; skip includes rows with empty
    /// cells
    #[arg(long, value_enum, default_value_t)]
    not_finite: NotFinite,
}

impl From<OutputArgs> for ImportOptions {
    fn from(args: OutputArgs) -> Self {
        let OutputArgs { out, shards, val_every, raw, not_finite } = args;
        Self { not_finite, every: val_every, shards, normalize: !raw, out }
    }
}

/// Parses `32x48`, or `32` for `32x32`.
fn size(text: &str) -> Result<[u32; 2], String> {
    const MAX_SIZE: u32 = 8192;
    let (height, width) = text.split_once('x').unwrap_or((text, text));
    match (height.parse(), width.parse()) {
        (Ok(height @ 1..=MAX_SIZE), Ok(width @ 1..=MAX_SIZE)) => Ok([height, width]),
        _ => Err(format!(
            "expected height and width, such as 32x48, or one number for both, from 1 to {MAX_SIZE}"
        )),
    }
}

#[derive(Debug, Args)]
struct TextArgs {
    /// Text files, directories of text files, or - for standard input; UTF-8 unless the tokenizer
    /// is byte
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
    /// Read inputs as lines of JSON objects (JSONL), with the text of a document in this field
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// Tokenizer: one id per character of the text, one per byte, GPT-2's byte-pair encoding, or a
    /// Hugging Face tokenizer.json
    #[arg(long, value_name = "char|byte|gpt2|FILE", default_value = "char")]
    tokenizer: TokenizerKind,
    /// Token to append to each document (each file, or line of JSON), given as text such as
    /// '<|endoftext|>'
    #[arg(long, value_name = "TOKEN")]
    end_of_text: Option<String>,
    #[command(flatten)]
    to: StreamArgs,
}

#[derive(Debug, Args)]
struct IdsArgs {
    /// A NumPy array (.npy) or an HDF5 file, one-dimensional or documents × ids
    input: PathBuf,
    /// Name of the dataset in an HDF5 file
    #[arg(long, value_name = "NAME", default_value = "/tokens")]
    dataset: String,
    /// Tokenizer that made the ids, for hpctrain sample
    #[arg(long, value_name = "byte|gpt2|FILE", required_unless_present = "vocabulary")]
    tokenizer: Option<TokenizerKind>,
    /// Vocabulary size, if the tokenizer is not known
    #[arg(long, value_name = "N", conflicts_with = "tokenizer")]
    vocabulary: Option<usize>,
    /// Padding id, which is removed from the end of documents
    #[arg(long, value_name = "ID")]
    pad: Option<u32>,
    #[command(flatten)]
    to: StreamArgs,
}

impl From<IdsArgs> for ImportIds {
    fn from(args: IdsArgs) -> Self {
        let IdsArgs { input, dataset, tokenizer, vocabulary, pad, to } = args;
        let of =
            tokenizer.map_or(IdVocabulary::Below(vocabulary.unwrap_or(0)), IdVocabulary::Tokenizer);
        Self { input, dataset, vocabulary: of, pad, to: to.into() }
    }
}

#[derive(Debug, Args)]
struct StreamArgs {
    /// Number of training shards
    #[arg(long, value_name = "N", default_value_t = 1)]
    shards: usize,
    /// Fraction of the tokens, at the end, kept for validation
    #[arg(long, value_name = "F", default_value_t = 0.1)]
    val_fraction: f64,
    /// Output directory; it must not contain shards yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Compress with deflate at this level, 0 to 9 [default: no compression, the fastest to read]
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(0..=9))]
    compress: Option<u8>,
}

impl From<StreamArgs> for StreamShards {
    fn from(args: StreamArgs) -> Self {
        let StreamArgs { shards, val_fraction, out, compress } = args;
        Self { shards, val_fraction, out, compress }
    }
}

/// Runs the subcommand and prints its result to standard output.
pub fn run(args: DataArgs) -> Result<()> {
    match args.command {
        Command::Order(args) => data_order::run(&args)?,
        Command::Which(args) => data_which::run(&args)?,
        Command::Import(ImportArgs { source: Source::Text(text) }) => {
            let TextArgs { inputs, field, tokenizer, end_of_text, to } = text;
            say(import_text(&ImportText { inputs, field, end_of_text, tokenizer, to: to.into() })?);
        }
        Command::Import(ImportArgs { source: Source::Ids(ids) }) => say(import_ids(&ids.into())?),
        Command::Import(ImportArgs { source: Source::Idx { images, labels, output } }) => {
            say(import_idx(&ImportIdx { images, labels, options: output.into() })?);
        }
        Command::Import(ImportArgs {
            source: Source::Images { folder, size, grey, no_target, output },
        }) => {
            say(import_images(&ImportImages {
                folder,
                no_target,
                size,
                grey,
                options: output.into(),
            })?);
        }
        Command::Import(ImportArgs { source: Source::Csv(args) }) => {
            say(import_csv(&(*args).into())?)
        }
        Command::Import(ImportArgs {
            source: Source::Npy { features, labels, no_target: _, weights, regression, output },
        }) => {
            let arrays = Arrays::Files { features, labels, weights };
            say(import_numpy(&ImportNumpy { arrays, regression, options: output.into() })?);
        }
        Command::Import(ImportArgs {
            source: Source::Npz { input, features, labels, no_target, weights, regression, output },
        }) => {
            let labels = (!no_target).then_some(labels);
            let arrays = Arrays::Archive { path: input, features, labels, weights };
            say(import_numpy(&ImportNumpy { arrays, regression, options: output.into() })?);
        }
        Command::Inspect { path, json: true } => super::json(&inspect::inspect(&path)?)?,
        Command::Inspect { path, json: false } => {
            say(inspect::inspect(&path)?.to_string().trim_end())
        }
        Command::Verify { path, json: true } => super::json(&verify::verify(&path)?)?,
        Command::Verify { path, json: false } => say(verify::verify(&path)?),
    }
    Ok(())
}
