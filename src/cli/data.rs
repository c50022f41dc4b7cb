//! `hpctrain data`: import, look at and check training data.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::data::import::{
    Arrays, Categories, ImportCsv, ImportIds, ImportIdx, ImportImages, ImportNumpy, ImportOptions,
    ImportText, Meaning, Missing, NotFinite, StreamShards, TableFormat, import_csv, import_ids,
    import_idx, import_images, import_numpy, import_text,
};
use crate::data::{TokenizerKind, inspect, verify};
use crate::error::Result;
use crate::telemetry::say;

/// Import, look at and check training data
#[derive(Debug, Args)]
pub struct DataArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Turn other formats into HDF5 shards
    Import(ImportArgs),
    /// Show the contents of HDF5 files: shapes, types, layout, compression, provenance
    Inspect {
        /// An HDF5 file, or a directory of .h5 files
        path: PathBuf,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
    /// Read everything and compare it with its checksums, vocabulary and sibling shards
    Verify {
        /// An HDF5 file, or a directory of .h5 files
        path: PathBuf,
        /// Print one JSON object instead of the table
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
struct ImportArgs {
    #[command(subcommand)]
    source: Source,
}

#[derive(Debug, Subcommand)]
enum Source {
    /// Tokenize texts into train-*.h5 and val-*.h5
    #[command(
        after_help = "Example: hpctrain data import text input.txt --tokenizer char --shards 4 --out data/mine\n         hpctrain data import text articles.jsonl --field text --tokenizer gpt2 --end-of-text '<|endoftext|>' --out data/articles"
    )]
    Text(TextArgs),
    /// Token ids of another program, an array of NumPy or a dataset of an HDF5 file, into
    /// train-*.h5 and val-*.h5
    #[command(
        after_help = "Example: hpctrain data import ids packed.npy --tokenizer gpt2 --out data/packed"
    )]
    Ids(IdsArgs),
    /// Images and labels in the IDX format of MNIST, plain or gzipped, into train-*.h5 and val-*.h5
    #[command(
        after_help = "Example: hpctrain data import idx t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz --out data/mnist"
    )]
    Idx {
        /// The images
        images: PathBuf,
        /// Their classes
        labels: PathBuf,
        #[command(flatten)]
        kept: KeptArgs,
    },
    /// PNG and JPEG images in folders, one folder a class, into train-*.h5 and val-*.h5
    #[command(
        after_help = "Example: hpctrain data import images photos --size 64 --out data/photos"
    )]
    Images {
        /// Holds a folder for each class, which are numbered in the order of their names, and
        /// nothing else
        folder: PathBuf,
        /// Bring every image to this height and width (one number: both): scaled until it covers
        /// them, then cut to them around the middle [default: as they are, all of one size]
        #[arg(long, value_name = "HxW", value_parser = size)]
        size: Option<[u32; 2]>,
        /// One channel instead of three
        #[arg(long)]
        grey: bool,
        /// The folder holds the images themselves, in no class: rows to be predicted, in the order
        /// of their names
        #[arg(long, conflicts_with = "val_every")]
        no_target: bool,
        #[command(flatten)]
        kept: KeptArgs,
    },
    /// A table into train-*.h5 and val-*.h5: numbers, columns of categories, classes by name
    #[command(
        after_help = "Example: hpctrain data import csv clicks.csv --target clicked --categorical site,device --out data/clicks\n         hpctrain data import csv iris.csv --target species --drop id --missing mean --out data/iris"
    )]
    Csv(Box<CsvArgs>),
    /// NumPy arrays of features and labels, as numpy.save writes them, into train-*.h5 and val-*.h5
    #[command(after_help = "Example: hpctrain data import npy X.npy Y.npy --out data/mine")]
    Npy {
        /// The features: a row for each sample; rows × height × width are images of one channel
        features: PathBuf,
        /// The labels. One integer from 0 on for each row is a class
        #[arg(required_unless_present = "no_target")]
        labels: Option<PathBuf>,
        /// There are no labels: rows are to be predicted
        #[arg(long, conflicts_with_all = ["labels", "regression", "val_every"])]
        no_target: bool,
        /// A factor of each sample's loss in training: as many numbers of 0 or more
        #[arg(long, value_name = "FILE")]
        weights: Option<PathBuf>,
        /// Predict numbers, even where they look like classes
        #[arg(long)]
        regression: bool,
        #[command(flatten)]
        kept: KeptArgs,
    },
    /// Two arrays of an archive, as numpy.savez and numpy.savez_compressed write it, into
    /// train-*.h5 and val-*.h5
    #[command(
        after_help = "Example: hpctrain data import npz mnist.npz --features x_train --labels y_train --out data/mnist"
    )]
    Npz {
        /// The archive
        input: PathBuf,
        /// Name of the features
        #[arg(long, value_name = "NAME", default_value = "x")]
        features: String,
        /// Name of the labels
        #[arg(long, value_name = "NAME", default_value = "y")]
        labels: String,
        /// There are no labels: rows are to be predicted
        #[arg(long, conflicts_with_all = ["labels", "regression", "val_every"])]
        no_target: bool,
        /// Name of a factor of each sample's loss in training: as many numbers of 0 or more
        #[arg(long, value_name = "NAME")]
        weights: Option<String>,
        /// Predict numbers, even where they look like classes
        #[arg(long)]
        regression: bool,
        #[command(flatten)]
        kept: KeptArgs,
    },
}

#[derive(Debug, Args)]
struct CsvArgs {
    /// The table: a line of names, then a line for each row
    input: PathBuf,
    #[command(flatten)]
    format: TableFormat,
    /// A column to predict; may be given several times. One column of integers from 0 on, or of
    /// words, is of classes [with --like: those of the earlier table, if this one has them]
    #[arg(long = "target", value_name = "COLUMN", required_unless_present_any = ["like", "no_target"])]
    targets: Vec<String>,
    /// Rows have no targets: they are to be predicted
    #[arg(long, conflicts_with_all = ["targets", "regression", "classes", "like", "val_every"])]
    no_target: bool,
    /// A column with a factor of each sample's loss in training, neither input nor target
    #[arg(long, value_name = "COLUMN")]
    weight: Option<String>,
    /// Columns that are left out, such as numbers of rows
    #[arg(long, value_name = "COLUMN,…", value_delimiter = ',', conflicts_with = "like")]
    drop: Vec<String>,
    /// Predict numbers, even where they look like classes
    #[arg(long)]
    regression: bool,
    /// Values of the target are names of classes, even where they are numbers
    #[arg(long, conflicts_with_all = ["regression", "like"])]
    classes: bool,
    /// Missing numbers of inputs: an error, rows left out, filled up with the mean of their column,
    /// or with a number [default: error; with --like, as in the earlier table; with --not-finite
    /// skip, skip]
    #[arg(long, value_name = "error|skip|mean|NUMBER", allow_negative_numbers = true)]
    missing: Option<Missing>,
    /// Columns of categories, whose values become ids from 1 on; empty cells have id 0
    #[arg(long, value_name = "COLUMN,…", value_delimiter = ',')]
    categorical: Vec<String>,
    /// Hash the values of each category to so many ids, rather than list them
    #[arg(long, value_name = "IDS", requires = "categorical")]
    hash: Option<u32>,
    /// Take inputs, categories, ids, scale, classes and targets from the table that was imported
    /// into this directory
    #[arg(long, value_name = "DIR", conflicts_with_all = ["categorical", "hash"])]
    like: Option<PathBuf>,
    #[command(flatten)]
    kept: KeptArgs,
}

impl From<CsvArgs> for ImportCsv {
    fn from(args: CsvArgs) -> Self {
        let CsvArgs { input, format, targets, weight, drop, regression, classes, missing, .. } =
            args;
        let categories = match args.like {
            Some(earlier) => Categories::Like(earlier),
            None => Categories::Named { columns: args.categorical, hash: args.hash },
        };
        let kept = args.kept.into();
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
            kept,
            needs_all: false,
        }
    }
}

#[derive(Debug, Args)]
struct KeptArgs {
    /// Directory to write to; it may hold no shards yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number of training shards
    #[arg(long, value_name = "N", default_value_t = 1)]
    shards: usize,
    /// Of so many samples in a row the last is kept for validation; 0 keeps none. Rows without
    /// targets stay together
    #[arg(long, value_name = "N", default_value_t = 5)]
    val_every: usize,
    /// Leave numbers as they are, rather than bring each channel or column to mean 0 and deviation
    /// 1
    #[arg(long)]
    raw: bool,
    /// Treatment of rows with a number that is not finite; empty cells of tables count as such,
    /// too, if they are skipped
    #[arg(long, value_enum, default_value_t)]
    not_finite: NotFinite,
}

impl From<KeptArgs> for ImportOptions {
    fn from(args: KeptArgs) -> Self {
        let KeptArgs { out, shards, val_every, raw, not_finite } = args;
        Self { not_finite, every: val_every, shards, normalize: !raw, out }
    }
}

/// `32x48`, or `32` for `32x32`.
fn size(text: &str) -> Result<[u32; 2], String> {
    const MOST: u32 = 8192;
    let (height, width) = text.split_once('x').unwrap_or((text, text));
    match (height.parse(), width.parse()) {
        (Ok(height @ 1..=MOST), Ok(width @ 1..=MOST)) => Ok([height, width]),
        _ => Err(format!(
            "height and width, such as 32x48, or one number for both, from 1 to {MOST}"
        )),
    }
}

#[derive(Debug, Args)]
struct TextArgs {
    /// Text files, directories of them, or - for the standard input; UTF-8 unless the tokenizer is
    /// byte
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
    /// Inputs are lines of JSON objects, with the text of a document in this field
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// How text becomes token ids: one for each of its characters, or for each byte; GPT-2's
    /// byte-pair encoding; or that of a Hugging Face tokenizer.json
    #[arg(long, value_name = "char|byte|gpt2|FILE", default_value = "char")]
    tokenizer: TokenizerKind,
    /// A token after each document (each file, or line of JSON), by its text, such as
    /// '<|endoftext|>'
    #[arg(long, value_name = "TOKEN")]
    end_of_text: Option<String>,
    #[command(flatten)]
    to: StreamArgs,
}

#[derive(Debug, Args)]
struct IdsArgs {
    /// An array (.npy) or an HDF5 file, of ids in one dimension, or of documents x ids
    input: PathBuf,
    /// The dataset of an HDF5 file
    #[arg(long, value_name = "NAME", default_value = "/tokens")]
    dataset: String,
    /// The tokenizer that made them, for hpctrain sample
    #[arg(long, value_name = "byte|gpt2|FILE", required_unless_present = "vocabulary")]
    tokenizer: Option<TokenizerKind>,
    /// The number of different ids, where no tokenizer is known
    #[arg(long, value_name = "N", conflicts_with = "tokenizer")]
    vocabulary: Option<usize>,
    /// Leave out this id at the end of documents, which it fills up
    #[arg(long, value_name = "ID")]
    pad: Option<u32>,
    #[command(flatten)]
    to: StreamArgs,
}

impl From<IdsArgs> for ImportIds {
    fn from(args: IdsArgs) -> Self {
        let IdsArgs { input, dataset, tokenizer, vocabulary, pad, to } = args;
        let of = tokenizer.map_or(Meaning::Below(vocabulary.unwrap_or(0)), Meaning::Tokenizer);
        Self { input, dataset, of, pad, to: to.into() }
    }
}

#[derive(Debug, Args)]
struct StreamArgs {
    /// Number of training shards
    #[arg(long, value_name = "N", default_value_t = 1)]
    shards: usize,
    /// Share of the tokens, from their end, kept for validation
    #[arg(long, value_name = "F", default_value_t = 0.1)]
    val_fraction: f64,
    /// Directory to write to; it may hold no shards yet
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Compress with deflate, level 0 to 9 [default: no compression, the fastest to read]
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(0..=9))]
    compress: Option<u8>,
}

impl From<StreamArgs> for StreamShards {
    fn from(args: StreamArgs) -> Self {
        let StreamArgs { shards, val_fraction, out, compress } = args;
        Self { shards, val_fraction, out, compress }
    }
}

/// Runs the command and prints its outcome to the standard output.
pub fn run(args: DataArgs) -> Result<()> {
    match args.command {
        Command::Import(ImportArgs { source: Source::Text(text) }) => {
            let TextArgs { inputs, field, tokenizer, end_of_text, to } = text;
            say(import_text(&ImportText { inputs, field, end_of_text, tokenizer, to: to.into() })?);
        }
        Command::Import(ImportArgs { source: Source::Ids(ids) }) => say(import_ids(&ids.into())?),
        Command::Import(ImportArgs { source: Source::Idx { images, labels, kept } }) => {
            say(import_idx(&ImportIdx { images, labels, kept: kept.into() })?);
        }
        Command::Import(ImportArgs {
            source: Source::Images { folder, size, grey, no_target, kept },
        }) => {
            say(import_images(&ImportImages { folder, no_target, size, grey, kept: kept.into() })?);
        }
        Command::Import(ImportArgs { source: Source::Csv(args) }) => {
            say(import_csv(&(*args).into())?)
        }
        Command::Import(ImportArgs {
            source: Source::Npy { features, labels, no_target: _, weights, regression, kept },
        }) => {
            let arrays = Arrays::Files { features, labels, weights };
            say(import_numpy(&ImportNumpy { arrays, regression, kept: kept.into() })?);
        }
        Command::Import(ImportArgs {
            source: Source::Npz { input, features, labels, no_target, weights, regression, kept },
        }) => {
            let labels = (!no_target).then_some(labels);
            let arrays = Arrays::Archive { path: input, features, labels, weights };
            say(import_numpy(&ImportNumpy { arrays, regression, kept: kept.into() })?);
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
