//! The fastest algorithm of each collective: measured at the start of a run, kept in a table.
//!
//! Buffers of up to the size of the largest unit are timed, for the operations that the layout
//! needs; the slowest rank counts. If the next size would take too long, measuring ends, and larger
//! buffers use the algorithm that was fastest at the last size among the bandwidth-optimal ones:
//! small buffers measure latency, not bandwidth. Halving-doubling is kept unless another algorithm
//! takes less than 0.9 of its time; the vendor's must take less than 0.6, because it occupies the
//! core while it waits. Unless `comm.deterministic` is false, only algorithms with the tree's order
//! of additions are candidates for sums, so no measurement changes a bit. The choice is printed,
//! kept in `collectives.json`, and used again by a resumed run.

pub(super) mod choice;
pub(super) mod table;
