//! hpctrain trains neural networks on clusters that speak MPI.

pub mod data;
pub mod error;
