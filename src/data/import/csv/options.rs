//! The options of an import of a table.

use std::path::PathBuf;

use super::format::{Missing, TableFormat};
use crate::import::row_writer::ImportOptions;
use crate::lookup::LookupOptions;
use crate::preprocessing::Preprocessing;
use crate::tokenizer::TokenizerKind;

/// The input and options of an import.
#[derive(Debug, Clone)]
pub struct ImportCsv {
    /// The table: a line of names, then a line for each sample.
    pub input: PathBuf,
    /// The format of the table.
    pub format: TableFormat,
    /// Names of the columns to predict; all others are inputs. If empty, rows have no targets,
    /// except that a table like an earlier one has the targets of the earlier one, if it has these
    /// columns.
    pub targets: Vec<String>,
    /// The name of the column with the weights of samples, which is neither input nor target.
    pub weight: Option<String>,
    /// Names of columns that are dropped.
    pub drop: Vec<String>,
    /// Targets are numbers, even where they look like classes.
    pub regression: bool,
    /// The values of the target are names of classes, even where they are numbers.
    pub classes: bool,
    /// The treatment of missing numbers among the inputs. Default: that of numbers that are not
    /// finite; for a table like an earlier one, that of the earlier one.
    pub missing: Option<Missing>,
    /// Whether every row is needed, as for predictions: hints do not suggest to skip rows.
    pub needs_all: bool,
    /// Columns of categories.
    pub categories: Categories,
    /// Columns of text, besides which a table has targets and weights only.
    pub text: Option<TextOptions>,
    /// The validation split, the shards and the destination of the rows.
    pub options: ImportOptions,
}

impl ImportCsv {
    /// Creates the options for a table with a header, without targets and categories.
    pub fn new(input: impl Into<PathBuf>, options: ImportOptions) -> Self {
        Self {
            input: input.into(),
            format: TableFormat::default(),
            targets: vec![],
            weight: None,
            drop: vec![],
            regression: false,
            classes: false,
            missing: None,
            needs_all: false,
            categories: Categories::NONE,
            text: None,
            options,
        }
    }
}

/// The columns of categories, and the mapping of their values to ids. An empty cell has id 0.
#[derive(Debug, Clone)]
pub enum Categories {
    /// Columns of these names.
    Named {
        /// The names.
        columns: Vec<String>,
        /// The ids of their values.
        ids: CategoryIds,
    },
    /// Inputs, categories, ids, texts, scale and classes as in an earlier import in this directory.
    /// Values that it did not have get the id of unknown ones; other columns are dropped.
    Like(PathBuf),
    /// Columns as a network was trained with, for rows that it is to predict: targets and columns
    /// that it does not know are dropped.
    Learned(Box<Preprocessing>),
}

impl Categories {
    /// No categories.
    pub const NONE: Self = Self::Named { columns: Vec::new(), ids: CategoryIds::APPEARANCE };
}

/// The ids of the values of named columns.
#[derive(Debug, Clone)]
pub enum CategoryIds {
    /// Values are listed: those of a file, or those of the table.
    Listed {
        /// The vocabularies of some of the columns: text files with a value in each line, by the
        /// names of the columns.
        vocabularies: Vec<(String, PathBuf)>,
        /// The choice among the table's values, for the other columns, and the number of OOV ids of
        /// all columns.
        options: LookupOptions,
    },
    /// Values are hashed to this number of ids in each column.
    Hashed(u32),
}

impl CategoryIds {
    /// Values have ids from 1 on in order of appearance.
    pub const APPEARANCE: Self =
        Self::Listed { vocabularies: Vec::new(), options: LookupOptions::ALL };
}

/// Columns of text, each of which becomes a row of token ids.
#[derive(Debug, Clone)]
pub struct TextOptions {
    /// Names of the columns.
    pub columns: Vec<String>,
    /// The tokenizer. `char` gets the characters of this table.
    pub tokenizer: TokenizerKind,
    /// The number of ids of each column: longer texts are truncated, shorter ones padded.
    pub length: usize,
}
