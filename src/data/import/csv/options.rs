//! The options of an import of a table.

use std::path::PathBuf;

use super::format::{Missing, TableFormat};
use crate::import::row_writer::ImportOptions;
use crate::preprocessing::Preprocessing;

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
        /// The number of ids of each category, to which values are hashed. Without it, values have
        /// ids from 1 on in order of appearance.
        hash: Option<u32>,
    },
    /// Inputs, categories, ids, scale and classes as in an earlier import in this directory. Values
    /// that it did not have get id 0; other columns are dropped.
    Like(PathBuf),
    /// Columns as a network was trained with, for rows that it is to predict: targets and columns
    /// that it does not know are dropped.
    Learned(Box<Preprocessing>),
}

impl Categories {
    /// No categories.
    pub const NONE: Self = Self::Named { columns: Vec::new(), hash: None };
}
