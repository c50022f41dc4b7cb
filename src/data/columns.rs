//! Columns of an imported table: their names, and the mapping of categories to ids.
//!
//! Shards store them as JSON, so that another table can be converted to the same ids and scale.

use hdf5::File;
use hdf5::types::VarLenUnicode;
use serde::{Deserialize, Serialize};

use super::h5::{one_line, var_len};
use hpctrain_base::error::{Error, Result};

/// The dataset that holds the columns.
pub(super) const COLUMNS: &str = "/columns";

/// The id of an empty cell, and of a value that the first table did not have.
pub(super) const UNKNOWN: u32 = 0;

/// Columns of a table by their use, in the order of the shards' datasets.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Columns {
    /// Names of the columns of numbers.
    pub inputs: Vec<String>,
    /// Columns of categories.
    pub categories: Vec<Category>,
    /// Columns of text, instead of numbers and categories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<TextColumns>,
    /// Names of the columns to predict; empty in rows without targets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<String>,
    /// The numbers that replace missing values, one for each input; empty if rows with missing
    /// values were not imported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fill: Vec<f32>,
}

/// Columns of text, which a tokenizer turns into ids ([`TextVectorizer`](crate::TextVectorizer)).
/// Shards and checkpoints store the tokenizer itself in a separate place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextColumns {
    /// Their names: a sample has the ids of the first column, then those of the next.
    pub names: Vec<String>,
    /// The number of ids of each column.
    pub length: usize,
}

/// A column of categories.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Category {
    /// Its name.
    pub name: String,
    /// Mapping of its values to ids.
    pub coding: Coding,
}

/// The mapping of values to ids; id 0 stands for an empty cell. [`Lookup`](crate::Lookup) applies
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Coding {
    /// Listed values: the first has id 1, and so on. Others have id 0.
    Values(Vec<String>),
    /// Listed values after OOV (out-of-vocabulary) ids.
    Oov {
        /// The number of OOV ids, to which the CRC-32 of a value that is not listed is reduced:
        /// they begin at 1.
        ids: u32,
        /// The values: the first has the id after the OOV ids, and so on.
        values: Vec<String>,
    },
    /// The CRC-32 of the value, reduced below this number of ids.
    Hash(u32),
}

impl Coding {
    /// Returns the number of ids, which is the number of rows of the embedding table.
    pub fn ids(&self) -> usize {
        match self {
            Coding::Values(values) => 1 + values.len(),
            Coding::Oov { ids, values } => 1 + *ids as usize + values.len(),
            Coding::Hash(ids) => *ids as usize,
        }
    }

    /// Returns the listed values.
    pub fn values(&self) -> &[String] {
        match self {
            Coding::Values(values) | Coding::Oov { values, .. } => values,
            Coding::Hash(_) => &[],
        }
    }

    /// Returns whether every value can be mapped to an id.
    fn is_possible(&self) -> bool {
        match self {
            Coding::Values(_) => true,
            Coding::Oov { ids, .. } => (1..i32::MAX as u32).contains(ids),
            Coding::Hash(ids) => *ids >= 2,
        }
    }
}

impl Columns {
    /// Reads the columns of a shard, if it has any.
    pub fn read(file: &File) -> Result<Option<Self>> {
        if !file.link_exists(COLUMNS) {
            return Ok(None);
        }
        let json: VarLenUnicode =
            file.dataset(COLUMNS).and_then(|dataset| dataset.read_scalar()).map_err(|e| {
                Error::input(format!("dataset {COLUMNS} cannot be read: {}", one_line(&e)))
            })?;
        let columns: Self = serde_json::from_str(&json)
            .map_err(|e| Error::input(format!("dataset {COLUMNS} has no columns: {e}")))?;
        columns.check().map(|()| Some(columns))
    }

    /// Returns an error unless every category has an id other than that of empty cells, either no
    /// input or every input has a number for missing values, and text is the only input if there is
    /// any.
    fn check(&self) -> Result<()> {
        let fill = self.fill.len();
        let inputs = self.inputs.len();
        if fill > 0 && fill != inputs {
            return Err(Error::input(format!(
                "dataset {COLUMNS} has {inputs} inputs, but {fill} numbers for missing values"
            ))
            .hint("import the table again"));
        }
        if let Some(Category { name, coding }) =
            self.categories.iter().find(|category| !category.coding.is_possible())
        {
            let ids = coding.ids();
            return Err(Error::input(format!(
                "dataset {COLUMNS} has {ids} ids for the category {name:?}"
            ))
            .hint("a category needs at least 2 ids, since id 0 stands for empty cells: import the table again"));
        }
        let has_others = !self.inputs.is_empty() || !self.categories.is_empty();
        match &self.text {
            Some(TextColumns { names, length })
                if *length == 0 || names.is_empty() || has_others =>
            {
                let texts = names.len();
                Err(Error::input(format!(
                    "dataset {COLUMNS} has {texts} columns of text of {length} ids, besides {inputs} inputs"
                ))
                .hint("import the table again"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the columns as a shard stores them.
    pub fn stored(&self) -> Result<VarLenUnicode> {
        var_len(
            &serde_json::to_string(self)
                .map_err(|e| Error::internal(format!("columns as JSON: {e}")))?,
        )
    }
}
