//! hpctrain trains neural networks on clusters that speak MPI.

pub mod backend;
pub mod comm;
pub mod data;
pub mod error;
pub mod random;
