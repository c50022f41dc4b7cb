//! Runs side by side: a table of the runs in a directory, and the differences of two.
//!
//! The table reads the ends of files alone, so that it is quick for long runs and many of them.

mod compare;
mod jsonl_tail;
mod listing;
mod summary;

pub use compare::Comparison;
pub use listing::{Listing, SortBy};
pub use summary::{RunSummary, State};
