//! The memory that a run takes: its estimate, the memory of a node, and whether the one is enough for the other.

mod available;
mod check;
mod cut;
mod estimate;
mod room;
mod tables;

pub use available::available;
pub use check::{check, fit_stages, least_change, room};
pub use estimate::{Held, estimate, resident, worst};
pub use room::Room;
