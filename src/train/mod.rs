//! Training runs.

mod budget;
mod hooks;
mod meters;
mod placed;
mod records;
mod run;
mod stop_requests;

pub use hooks::{Hook, Outcome};
pub use placed::train_on_device;
pub use run::{GpuPlace, Own, Request, train};
