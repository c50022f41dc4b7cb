//! The fastest algorithm of each collective: measured at the start of a run, kept in a table.

pub(super) mod choice;
pub(super) mod table;
