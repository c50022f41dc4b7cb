//! Embedding tables with sparse gradients and updates.

mod partition;
mod rows;
mod squares;
mod tables;

pub use partition::{RowPartition, TableSharding};
pub use squares::SquareSum;
pub use tables::SparseTables;
