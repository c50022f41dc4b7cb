//! Embedding tables with sparse gradients and updates.

mod partition;
mod row_copies;
mod rows;
mod squares;
mod tables;

pub use partition::{RowPartition, TableSharding};
pub use row_copies::{RowCopies, elements_of};
pub use rows::SparseRows;
pub use squares::SquareSum;
pub use tables::{RowSource, SparseTables};
