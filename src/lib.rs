//! hpctrain trains neural networks on clusters that speak MPI.

/// The command line.
pub mod cli {
    pub mod data;
}
pub mod data;
pub mod error;
