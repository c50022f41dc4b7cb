//! The ids of a table's categories.

use std::path::Path;

use crate::columns::{Category, UNKNOWN};
use crate::import::spool::Elements;
use crate::import::unknown_values::UnknownValues;
use crate::lookup::{Lookup, LookupOptions, ValueCounts};
use hpctrain_base::error::Result;

/// A column of categories while its cells are read.
pub(super) struct CategoryColumn {
    /// The index of the column.
    pub column: usize,
    ids: Ids,
    unknown: UnknownValues,
}

enum Ids {
    /// The values are counted, and those that get ids are chosen at the end.
    Counted(ValueCounts, LookupOptions),
    Known(Lookup),
}

/// The categories of a table whose cells have all been read.
pub(super) struct FinishedCategories {
    pub categories: Vec<Category>,
    /// The final ids, row after row.
    pub ids: Elements<u32>,
    pub unknown: Vec<UnknownValues>,
}

impl CategoryColumn {
    /// Creates a column whose values get ids as `options` say.
    pub fn counted(column: usize, options: LookupOptions) -> Self {
        let ids = Ids::Counted(ValueCounts::default(), options);
        Self { column, ids, unknown: UnknownValues::default() }
    }

    /// Creates a column whose values have the ids of `lookup`.
    pub fn known(column: usize, lookup: Lookup) -> Self {
        Self { column, ids: Ids::Known(lookup), unknown: UnknownValues::default() }
    }

    /// Returns the id of a cell. That of a counted value is its position in order of appearance
    /// plus 1, until [`finish`] has chosen the final ids.
    pub fn id(&mut self, cell: &str) -> u32 {
        if cell.is_empty() {
            return UNKNOWN;
        }
        self.unknown.values += 1;
        match &mut self.ids {
            Ids::Counted(counts, _) => 1 + counts.add(cell),
            Ids::Known(lookup) => lookup.get(cell).unwrap_or_else(|| {
                self.unknown.add(cell, 1);
                lookup.oov_id(cell)
            }),
        }
    }

    /// Returns the category with this name, its unknown values, and the final id of each id that
    /// was returned, unless all stay.
    fn finish(self, name: &str) -> Result<(Category, UnknownValues, Option<Vec<u32>>)> {
        let mut unknown = UnknownValues { column: name.to_owned(), ..self.unknown };
        let (lookup, renumbered) = match self.ids {
            Ids::Known(lookup) => (lookup, None),
            Ids::Counted(counts, options) => {
                let lookup =
                    counts.lookup(&options).map_err(|e| e.at(format!("column {name:?}")))?;
                let mut renumbered = vec![UNKNOWN];
                for (value, count) in counts.values().iter().zip(counts.counts()) {
                    renumbered.push(lookup.get(value).unwrap_or_else(|| {
                        unknown.add(value, *count);
                        lookup.oov_id(value)
                    }));
                }
                let stays = renumbered.iter().copied().eq(0..renumbered.len() as u32);
                (lookup, (!stays).then_some(renumbered))
            }
        };
        let category = Category { name: name.to_owned(), coding: lookup.coding().clone() };
        Ok((category, unknown, renumbered))
    }
}

/// Returns the categories with these names, and the final ids of `ids`, which
/// [`CategoryColumn::id`] has returned row after row.
pub(super) fn finish(
    columns: Vec<CategoryColumn>,
    names: &[String],
    ids: Elements<u32>,
    out: &Path,
) -> Result<FinishedCategories> {
    let mut finished = FinishedCategories { categories: vec![], ids, unknown: vec![] };
    let mut renumbered = Vec::new();
    for (column, name) in columns.into_iter().zip(names) {
        let (category, unknown, final_ids) = column.finish(name)?;
        finished.categories.push(category);
        finished.unknown.push(unknown);
        renumbered.push(final_ids);
    }
    if renumbered.iter().any(Option::is_some) {
        let mut column = renumbered.iter().cycle();
        finished.ids = finished.ids.map(out, |id| match column.next() {
            Some(Some(final_ids)) => final_ids[id as usize],
            _ => id,
        })?;
    }
    Ok(finished)
}
