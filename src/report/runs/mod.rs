//! Several runs: a table of the runs in a directory, and the comparison of two.
//!
//! The table reads only the ends of files, so that it is fast for many long runs.

mod compare;
mod jsonl_tail;
mod listing;
mod summary;

pub use compare::Comparison;
pub use listing::{Listing, SortBy};
pub use summary::{RunState, RunSummary, state};
