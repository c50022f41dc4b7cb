//! Runs side by side: a table of the runs in a directory, and the differences of two.
//!
//! The table reads the ends of files alone, so that it is quick for long runs and many of them.

mod compare;
mod listing;
mod summary;
mod tail;

pub use compare::Comparison;
pub use listing::{Listing, SortBy};
pub use summary::{State, Summary};
