//! The memory that a run takes: its estimate, the memory of a node, and whether the one is enough for the other.

mod available;
mod check;
mod estimate;

pub use available::available;
pub use check::check;
pub use estimate::{Held, estimate, resident, worst};
