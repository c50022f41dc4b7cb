//! Estimates the memory that a run needs, and checks that it fits the memory of a node.

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
