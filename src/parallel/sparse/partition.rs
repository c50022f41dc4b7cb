//! The rows of embedding tables that each rank holds.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::pipeline_split::partition;
use hpctrain_base::layout::share;

/// How embedding tables with sparse updates are divided among the ranks with different data
/// (`parallel.tables`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TableSharding {
    /// Every rank holds all rows, and their optimizer state.
    Replicated,
    /// Every rank holds as many consecutive rows.
    RowWise,
    /// Every rank holds whole tables, consecutive ones.
    TableWise,
    /// Parameter servers hold all rows.
    Servers,
}

/// The rows of all tables, counted from the first row of the first, that each rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPartition {
    is_replicated: bool,
    rank: usize,
    /// The first row of every rank, and the end of the last one. If all ranks hold all rows, the
    /// parts for which one of them answers.
    bounds: Vec<usize>,
}

impl RowPartition {
    /// Divides tables with these numbers of rows among `ranks` ranks, of which this is `rank`.
    pub fn new(sharding: TableSharding, tables: &[usize], rank: usize, ranks: usize) -> Self {
        let rows: usize = tables.iter().sum();
        let bounds = match sharding {
            TableSharding::Replicated | TableSharding::RowWise | TableSharding::Servers => {
                (0..=ranks).map(|rank| share(rows, rank, ranks).start).collect()
            }
            TableSharding::TableWise => {
                let costs: Vec<f64> = tables.iter().map(|rows| *rows as f64).collect();
                let owners = ranks.min(tables.len());
                let parts = partition(&costs, owners, |_, _| true).unwrap_or_default();
                let first_row = |table: usize| tables[..table].iter().sum();
                // Ranks for which no table is left hold none.
                let starts = parts.iter().map(|part| first_row(part.start));
                starts.chain(std::iter::repeat_n(rows, ranks + 1 - owners)).collect()
            }
        };
        Self { is_replicated: sharding == TableSharding::Replicated, rank, bounds }
    }

    /// Returns the number of rows of all tables.
    pub fn rows(&self) -> usize {
        self.bounds.last().copied().unwrap_or_default()
    }

    /// Returns true if every rank holds all rows.
    pub fn is_replicated(&self) -> bool {
        self.is_replicated
    }

    /// Returns the rows that this rank holds.
    pub fn held(&self) -> Range<usize> {
        if self.is_replicated { 0..self.rows() } else { self.own() }
    }

    /// Returns the rows that this rank saves, and whose norm it computes; each row belongs to one
    /// rank.
    pub fn own(&self) -> Range<usize> {
        self.of_rank(self.rank)
    }

    /// Returns the rows that another rank saves.
    pub fn of_rank(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Returns the most rows that a rank holds.
    pub fn most_held(&self) -> usize {
        match self.is_replicated {
            true => self.rows(),
            false => self.most_owned(),
        }
    }

    /// Returns the most rows that a rank saves.
    pub fn most_owned(&self) -> usize {
        (0..self.ranks()).map(|rank| self.of_rank(rank).len()).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_belongs_to_one_rank() {
        let tables = [7, 1, 4, 4, 20];
        for ranks in 1..9 {
            for sharding in
                [TableSharding::Replicated, TableSharding::RowWise, TableSharding::TableWise]
            {
                let of = |rank| RowPartition::new(sharding, &tables, rank, ranks);
                let own: Vec<usize> = (0..ranks).flat_map(|rank| of(rank).own()).collect();
                assert_eq!(own, (0..36).collect::<Vec<_>>(), "{sharding:?} of {ranks}");
                let held: Vec<usize> = (0..ranks).map(|rank| of(rank).held().len()).collect();
                assert_eq!(held.iter().max(), Some(&of(0).most_held()));
                if sharding == TableSharding::Replicated {
                    assert_eq!(held, vec![36; ranks]);
                }
            }
        }
        let of = |rank| RowPartition::new(TableSharding::TableWise, &tables, rank, 2).held();
        assert_eq!([of(0), of(1)], [0..16, 16..36]);
        let of = |rank| RowPartition::new(TableSharding::TableWise, &tables, rank, 7).held();
        assert_eq!([of(4), of(5), of(6)], [16..36, 36..36, 36..36]);
    }
}
