//! The fastest algorithm of each collective: measured at the start of a run, kept in a table.
//!
//! Buffers of up to the size of the largest unit are timed, for the operations that the layout
//! needs; the slowest rank counts. If that would take too long, larger sizes are left out, and
//! above the last one that was timed the fastest of the algorithms that move the least bytes is
//! taken: a small buffer tells latencies, not bandwidth. The tree is kept unless an algorithm takes
//! less than 0.9 of its time, and the library's own must take less than 0.6, because the library
//! keeps the core while it waits. For sums only algorithms with the tree's order take part, unless
//! `comm.deterministic` is false, so no measurement changes a bit. The choice is printed, kept in
//! `collectives.json`, and used again by a resumed run.

pub(super) mod choice;
pub(super) mod table;
