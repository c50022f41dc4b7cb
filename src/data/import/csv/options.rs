//! Input and options of an import.

use std::path::PathBuf;

use super::format::{Missing, TableFormat};
use crate::import::row_writer::ImportOptions;
use crate::preprocessing::Preprocessing;

/// Input and options of an import.
#[derive(Debug, Clone)]
pub struct ImportCsv {
    /// The table: a line of names, then a line for each sample.
    pub input: PathBuf,
    /// The way in which it is written.
    pub format: TableFormat,
    /// Names of the columns to predict. All others are inputs. With none of them rows have no
    /// targets; but a table like an earlier one has those of the earlier one, if it has these
    /// columns.
    pub targets: Vec<String>,
    /// Name of the column with the weights of samples, neither input nor target.
    pub weight: Option<String>,
    /// Names of columns that are left out.
    pub drop: Vec<String>,
    /// Targets are numbers, even where they look like classes.
    pub regression: bool,
    /// The values of the target are names of classes, even where they are numbers.
    pub classes: bool,
    /// Treatment of missing numbers among the inputs. Left out, it is that of numbers that are not
    /// finite; of a table like an earlier one, that of the earlier one.
    pub missing: Option<Missing>,
    /// Every row is needed, as where they are to be predicted: errors do not advise to leave some
    /// out.
    pub needs_all: bool,
    /// Columns of categories.
    pub categories: Categories,
    /// Validation split, shards and destination of the rows.
    pub kept: ImportOptions,
}

impl ImportCsv {
    /// A table with a header, without targets and categories.
    pub fn new(input: impl Into<PathBuf>, kept: ImportOptions) -> Self {
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
            kept,
        }
    }
}

/// Columns of categories, and the mapping of their values to ids. An empty cell has id 0.
#[derive(Debug, Clone)]
pub enum Categories {
    /// Columns of these names.
    Named {
        /// The names.
        columns: Vec<String>,
        /// Ids of each category, to which values are hashed. Without it, values have ids from 1 on
        /// in the order of their appearance.
        hash: Option<u32>,
    },
    /// Inputs, categories, ids, scale and classes of an earlier import in this directory. Values
    /// that it did not have get id 0; other columns are left out.
    Like(PathBuf),
    /// Those from which a network has learned, for rows that it is to predict: targets are left
    /// out, and so are columns that it does not know.
    Learned(Box<Preprocessing>),
}

impl Categories {
    /// None.
    pub const NONE: Self = Self::Named { columns: Vec::new(), hash: None };
}
