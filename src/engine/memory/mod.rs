//! Estimates the memory that a run needs, and checks that it fits the memory of a node.

mod available;
mod budget;
mod estimate;
mod fit;
mod placement;
mod stage_split;
mod tables;

pub use available::available;
pub use budget::MemoryBudget;
pub use estimate::{BaselineMemory, estimate, resident, worst};
pub use fit::{budget, check, fit_stages, smallest_change};
pub use placement::{BlockPlacement, MemoryPlace, PlacedPart, placement};
