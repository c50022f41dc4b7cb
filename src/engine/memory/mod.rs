//! The memory that a run takes: its estimate, the memory of a node, and whether the one is enough
//! for the other.

mod available;
mod budget;
mod estimate;
mod fit;
mod stage_split;
mod tables;

pub use available::available;
pub use budget::MemoryBudget;
pub use estimate::{Held, estimate, resident, worst};
pub use fit::{check, fit_stages, least_change, room};
