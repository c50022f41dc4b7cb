//! Columns of an imported table: their names, and the mapping of categories to ids.
//!
//! Shards store them as JSON, so that another table can be converted to the same ids and scale.

use std::collections::HashMap;

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
    /// Names of the columns to predict; empty in rows without targets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<String>,
    /// The numbers that replace missing values, one for each input; empty if rows with missing
    /// values were not imported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fill: Vec<f32>,
}

/// A column of categories.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Category {
    /// Its name.
    pub name: String,
    /// Mapping of its values to ids.
    pub coding: Coding,
}

/// The mapping of values to ids; id 0 stands for an empty cell or an unknown value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Coding {
    /// Listed values: the first has id 1, and so on.
    Values(Vec<String>),
    /// The CRC-32 of the value, reduced below this number of ids.
    Hash(u32),
}

impl Coding {
    /// Returns the number of ids, which is the number of rows of the embedding table.
    pub fn ids(&self) -> usize {
        match self {
            Coding::Values(values) => 1 + values.len(),
            Coding::Hash(ids) => *ids as usize,
        }
    }

    /// Returns whether every value can be mapped to an id other than 0.
    fn is_possible(&self) -> bool {
        match self {
            Coding::Values(_) => true,
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

    /// Returns an error unless every category has an id other than that of empty cells, and either
    /// no input or every input has a number for missing values.
    fn check(&self) -> Result<()> {
        let fill = self.fill.len();
        let inputs = self.inputs.len();
        if fill > 0 && fill != inputs {
            return Err(Error::input(format!(
                "dataset {COLUMNS} has {inputs} inputs, but {fill} numbers for missing values"
            ))
            .hint("import the table again"));
        }
        match self.categories.iter().find(|category| !category.coding.is_possible()) {
            Some(Category { name, coding }) => {
                let ids = coding.ids();
                Err(Error::input(format!(
                    "dataset {COLUMNS} has {ids} ids for the category {name:?}"
                ))
                .hint("a category needs at least 2 ids, since id 0 stands for empty cells: import the table again"))
            }
            None => Ok(()),
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

/// Assigns ids to the values of a column.
pub(super) enum Coder {
    /// Listed values; `grows` gives new ones the next id.
    Values {
        ids: HashMap<String, u32>,
        order: Vec<String>,
        grows: bool,
    },
    Hash(u32),
}

impl Coder {
    /// Creates the coder of a first table: hashed ids if a number of ids is given, otherwise ids in
    /// order of appearance.
    pub fn new(hash: Option<u32>) -> Self {
        match hash {
            Some(ids) => Self::Hash(ids),
            None => Self::Values { ids: HashMap::new(), order: Vec::new(), grows: true },
        }
    }

    /// Creates the coder of a table with the ids of an earlier one.
    pub fn like(coding: &Coding) -> Self {
        match coding {
            Coding::Hash(ids) => Self::Hash(*ids),
            Coding::Values(values) => {
                let ids = values.iter().cloned().zip(1..).collect();
                Self::Values { ids, order: values.clone(), grows: false }
            }
        }
    }

    /// Returns the id of a value.
    pub fn id(&mut self, value: &str) -> u32 {
        match self {
            _ if value.is_empty() => UNKNOWN,
            Self::Hash(ids) => 1 + crc32fast::hash(value.as_bytes()) % (*ids - 1),
            Self::Values { ids, order, grows } => match ids.get(value) {
                Some(id) => *id,
                None if *grows => {
                    order.push(value.to_owned());
                    let id = order.len() as u32;
                    ids.insert(value.to_owned(), id);
                    id
                }
                None => UNKNOWN,
            },
        }
    }

    /// Returns the mapping so far.
    pub fn coding(self) -> Coding {
        match self {
            Self::Hash(ids) => Coding::Hash(ids),
            Self::Values { order, .. } => Coding::Values(order),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_ids_in_the_order_of_their_appearance() {
        let mut coder = Coder::new(None);
        assert_eq!(["b", "a", "", "b", "c"].map(|value| coder.id(value)), [1, 2, 0, 1, 3]);
        let coding = coder.coding();
        assert_eq!(coding.ids(), 4);
        let mut later = Coder::like(&coding);
        assert_eq!(["c", "new", "a"].map(|value| later.id(value)), [3, 0, 2]);
        assert_eq!(later.coding(), coding);
    }

    #[test]
    fn hashes_stay_below_their_number() {
        let mut coder = Coder::new(Some(3));
        let ids: Vec<u32> = (0..100).map(|i| coder.id(&i.to_string())).collect();
        assert!(ids.iter().all(|id| (1..3).contains(id)) && ids.contains(&1) && ids.contains(&2));
        assert_eq!((coder.id(""), coder.coding().ids()), (0, 3));
    }
}
