//! Collectives, told as exchanges between two ranks.
//!
//! Ring and tree move the least possible bytes: each rank sends 2·(n−1)/n of the buffer for an all-reduce.

pub mod bytes;
mod ring;
mod tree;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::operand::Operand;
use super::wire::{Members, Vendor, Wire};
use crate::error::{Error, Result};

/// How the ranks of a group add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// What the MPI library chooses. The order of additions is its secret.
    Mpi,
    /// Around a ring. Each element is added in another order, which depends on the number of ranks.
    Ring,
    /// Halving and doubling. Every element is summed by one fixed binary tree, whatever its position.
    Tree,
}

impl Algorithm {
    const ALL: [(Algorithm, &str); 3] = [(Algorithm::Mpi, "mpi"), (Algorithm::Ring, "ring"), (Algorithm::Tree, "tree")];

    /// How the configuration calls it.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(algorithm, _)| *algorithm == self).map_or("", |(_, name)| name)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.iter().find(|(_, name)| *name == text);
        found.map(|(algorithm, _)| *algorithm).ok_or_else(|| {
            Error::input(format!("unknown communication algorithm \"{text}\"")).hint("one of mpi, ring, tree")
        })
    }
}

/// Part `index` of `len` elements cut into `count` parts whose lengths differ by at most one.
fn part(len: usize, index: usize, count: usize) -> Range<usize> {
    let start = |index: usize| index * (len / count) + index.min(len % count);
    start(index)..start(index + 1)
}

/// The sum over all ranks, on every rank.
pub fn all_reduce(algorithm: Algorithm, x: &mut dyn Operand, wire: &mut dyn Wire, group: &Members) -> Result<()> {
    match algorithm {
        Algorithm::Mpi => x.vendor(wire, group, Vendor::AllReduce),
        Algorithm::Ring => {
            ring::reduce_scatter(x, wire, group)?;
            ring::all_gather(x, wire, group)
        }
        Algorithm::Tree => {
            tree::reduce_scatter(x, wire, group)?;
            tree::all_gather(x, wire, group)
        }
    }
}

/// The sum over all ranks of my part; the rest is unspecified.
pub fn reduce_scatter(algorithm: Algorithm, x: &mut dyn Operand, wire: &mut dyn Wire, group: &Members) -> Result<()> {
    match algorithm {
        Algorithm::Mpi => x.vendor(wire, group, Vendor::ReduceScatter),
        Algorithm::Ring => ring::reduce_scatter(x, wire, group),
        Algorithm::Tree => tree::reduce_scatter(x, wire, group),
    }
}

/// Every rank's part, on every rank.
pub fn all_gather(algorithm: Algorithm, x: &mut dyn Operand, wire: &mut dyn Wire, group: &Members) -> Result<()> {
    match algorithm {
        Algorithm::Mpi => x.vendor(wire, group, Vendor::AllGather),
        Algorithm::Ring => ring::all_gather(x, wire, group),
        Algorithm::Tree => tree::all_gather(x, wire, group),
    }
}

/// The root's elements, on every rank.
pub fn broadcast(
    algorithm: Algorithm,
    x: &mut dyn Operand,
    wire: &mut dyn Wire,
    group: &Members,
    root: usize,
) -> Result<()> {
    match algorithm {
        Algorithm::Mpi => x.vendor(wire, group, Vendor::Broadcast { root }),
        Algorithm::Ring => ring::broadcast(x, wire, group, root),
        Algorithm::Tree => tree::broadcast(x, wire, group, root),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_even_and_cover() {
        let parts: Vec<_> = (0..3).map(|i| part(7, i, 3)).collect();
        assert_eq!(parts, [0..3, 3..5, 5..7]);
        assert_eq!(part(2, 3, 4), 2..2);
        assert_eq!(part(8, 1, 4), 2..4);
    }

    #[test]
    fn names_round_trip() {
        for (algorithm, name) in Algorithm::ALL {
            assert_eq!(algorithm.to_string(), name);
            assert_eq!(name.parse::<Algorithm>(), Ok(algorithm));
            assert_eq!(serde_json::to_string(&algorithm).unwrap(), format!("\"{name}\""));
        }
        assert!("nccl".parse::<Algorithm>().unwrap_err().to_string().contains("mpi, ring, tree"));
    }
}
