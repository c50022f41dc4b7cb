//! Collectives, composed of exchanges between two ranks.
//!
//! Ring, tree and hierarchical move the least possible bytes: each rank sends 2·(n−1)/n of the
//! buffer for an all-reduce. Long buffers go block by block, so that each step finds the elements
//! of the one before in the cache.
//!
//! Blocks have 1 MiB a rank, so a buffer of 64 MiB is exchanged at the same rate as one of 1 MiB.
//! All algorithms but the ring and the library's own add every element in the order of one binary
//! tree over the ranks; `hierarchical` does so where nodes have equally many consecutive ranks, a
//! power of two.

pub mod bytes;
mod halving_doubling;
mod hierarchical;
mod partition;
mod power_of_two;
mod ring;
mod root_reduce;
mod subtrees;

use std::fmt;
use std::ops::Range;
use std::slice::from_ref;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::reduce_buffer::ReduceBuffer;
use super::transport::{DeviceCollective, GroupRanks, Transport};
pub use hierarchical::equal_nodes;
use hpctrain_base::error::{Error, Result};
pub use partition::Shares;

/// The algorithm by which the ranks of a group exchange and add.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// The library's own: MPI's, or NCCL's where that carries messages. The order of additions is
    /// unspecified.
    Vendor,
    /// Around a ring. Each element is added in another order, which depends on the number of ranks.
    Ring,
    /// Recursive halving, then doubling (Rabenseifner, 2004). Every element is summed by one fixed
    /// binary tree, independent of its position.
    HalvingDoubling,
    /// Inside each node first, then between the nodes.
    Hierarchical,
    /// Everything through one rank.
    ReduceToOne,
}

/// A collective operation of a group on a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// The sum over all ranks, on every rank.
    AllReduce,
    /// The sum over all ranks, on the first one.
    Reduce,
    /// The sum over all ranks, each rank its part.
    ReduceScatter,
    /// Every rank's part, on every rank.
    AllGather,
    /// The elements of one rank, on every rank.
    Broadcast,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Algorithm; 5] = [
        Algorithm::Vendor,
        Algorithm::Ring,
        Algorithm::HalvingDoubling,
        Algorithm::Hierarchical,
        Algorithm::ReduceToOne,
    ];

    /// Its name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Vendor => "vendor",
            Algorithm::Ring => "ring",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::ReduceToOne => "reduce-to-one",
        }
    }

    /// Whether no rank sends more bytes of a long buffer than it must.
    pub(super) fn moves_least(self) -> bool {
        matches!(self, Algorithm::Ring | Algorithm::HalvingDoubling | Algorithm::Hierarchical)
    }

    /// Whether sums over `group` have the bits of [`Algorithm::HalvingDoubling`].
    pub(super) fn is_exact(self, group: &GroupRanks) -> bool {
        match self {
            Algorithm::Vendor | Algorithm::Ring => false,
            Algorithm::HalvingDoubling | Algorithm::ReduceToOne => true,
            Algorithm::Hierarchical => hierarchical::is_exact(group),
        }
    }
}

impl Operation {
    /// Every operation.
    pub const ALL: [Operation; 5] = [
        Operation::AllReduce,
        Operation::Reduce,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::Broadcast,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::Reduce => "reduce",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllGather => "all_gather",
            Operation::Broadcast => "broadcast",
        }
    }

    /// Whether it adds.
    pub fn adds(self) -> bool {
        matches!(self, Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The one of `all` that has this name.
fn by_name<T: Copy>(
    what: &str,
    all: &[T],
    name: impl Fn(T) -> &'static str,
    text: &str,
) -> Result<T> {
    all.iter().copied().find(|&one| name(one) == text).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|&one| name(one)).collect();
        Error::input(format!("unknown {what} \"{text}\""))
            .hint(format!("one of {}", names.join(", ")))
    })
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        by_name("communication algorithm", &Self::ALL, Self::name, text)
    }
}

impl FromStr for Operation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        by_name("collective operation", &Self::ALL, Self::name, text)
    }
}

/// Elements of a rank in one block, 1 MiB: all steps of a block find it in the cache.
const BLOCK: usize = 1 << 18;

/// Bytes that the algorithms of a world of `ranks` keep aside, at most.
pub fn staging(ranks: usize) -> usize {
    // Groups have divisors of the ranks, of which powers of two have none that is another number.
    let groups = if ranks.is_power_of_two() { 0..0 } else { 1..ranks + 1 };
    groups.map(halving_doubling::aside).max().unwrap_or(0) * size_of::<f32>()
}

/// Cuts a range into blocks, and each into even shares.
pub fn blocks(range: Range<usize>, size: usize) -> impl Iterator<Item = (Range<usize>, Shares)> {
    let block = BLOCK * size;
    range.clone().step_by(block).map(move |start| {
        let block = start..range.end.min(start + block);
        let shares = Shares::even(&block, size);
        (block, shares)
    })
}

/// Cuts the even shares of a range into blocks.
fn blocks_of_shares(len: usize, size: usize) -> impl Iterator<Item = Shares> {
    let shares = Shares::even(&(0..len), size);
    (0..shares.longest()).step_by(BLOCK).map(move |start| shares.window(&(start..start + BLOCK)))
}

/// A step towards everybody's share.
type OnShares = fn(&mut dyn ReduceBuffer, &mut dyn Transport, &GroupRanks, &Shares) -> Result<()>;

/// A range from one rank to all.
type FromRoot =
    fn(&mut dyn ReduceBuffer, &mut dyn Transport, &GroupRanks, &Range<usize>, usize) -> Result<()>;

/// The collectives of an algorithm, on one block.
struct Steps {
    reduce_scatter: OnShares,
    all_gather: OnShares,
    broadcast: FromRoot,
}

impl Algorithm {
    /// None for the library's own.
    fn steps(self) -> Option<Steps> {
        macro_rules! steps {
            ($module:ident) => {
                Some(Steps {
                    reduce_scatter: $module::reduce_scatter,
                    all_gather: $module::all_gather,
                    broadcast: $module::broadcast,
                })
            };
        }
        match self {
            Algorithm::Vendor => None,
            Algorithm::Ring => steps!(ring),
            Algorithm::HalvingDoubling => steps!(halving_doubling),
            Algorithm::Hierarchical => steps!(hierarchical),
            Algorithm::ReduceToOne => steps!(root_reduce),
        }
    }
}

/// A collective that all ranks of a group run alike.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub operation: Operation,
    pub algorithm: Algorithm,
    /// Of a broadcast.
    pub root: usize,
}

/// Runs a collective.
pub fn run(
    call: Call,
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<()> {
    match call.operation {
        Operation::AllReduce => all_reduce(call.algorithm, x, wire, group),
        Operation::Reduce => reduce(call.algorithm, x, wire, group),
        Operation::ReduceScatter => reduce_scatter(call.algorithm, x, wire, group),
        Operation::AllGather => all_gather(call.algorithm, x, wire, group),
        Operation::Broadcast => broadcast(call.algorithm, x, wire, group, call.root),
    }
}

/// The sum over all ranks, on every rank.
fn all_reduce(
    algorithm: Algorithm,
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<()> {
    let Some(steps) = algorithm.steps() else {
        return x.vendor(wire, group, DeviceCollective::AllReduce);
    };
    for (range, shares) in blocks(0..x.len(), group.size()) {
        if algorithm == Algorithm::ReduceToOne {
            // The sum is in one place already.
            root_reduce::all_reduce(x, wire, group, &range)?;
        } else {
            (steps.reduce_scatter)(x, wire, group, &shares)?;
            (steps.all_gather)(x, wire, group, &shares)?;
        }
    }
    Ok(())
}

/// The sum over all ranks, on the first one; elsewhere the elements are unspecified.
fn reduce(
    algorithm: Algorithm,
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<()> {
    let Some(steps) = algorithm.steps() else {
        return x.vendor(wire, group, DeviceCollective::Reduce);
    };
    for (range, shares) in blocks(0..x.len(), group.size()) {
        if algorithm == Algorithm::ReduceToOne {
            halving_doubling::reduce(x, wire, group, from_ref(&range))?;
        } else {
            (steps.reduce_scatter)(x, wire, group, &shares)?;
            halving_doubling::gather(x, wire, group, &shares)?;
        }
    }
    Ok(())
}

/// The sum over all ranks of my part; the rest is unspecified.
fn reduce_scatter(
    algorithm: Algorithm,
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<()> {
    let Some(steps) = algorithm.steps() else {
        return x.vendor(wire, group, DeviceCollective::ReduceScatter);
    };
    blocks_of_shares(x.len(), group.size())
        .try_for_each(|shares| (steps.reduce_scatter)(x, wire, group, &shares))
}

/// Every rank's part, on every rank.
fn all_gather(
    algorithm: Algorithm,
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<()> {
    let Some(steps) = algorithm.steps() else {
        return x.vendor(wire, group, DeviceCollective::AllGather);
    };
    blocks_of_shares(x.len(), group.size())
        .try_for_each(|shares| (steps.all_gather)(x, wire, group, &shares))
}

/// The root's elements, on every rank.
fn broadcast(
    algorithm: Algorithm,
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    root: usize,
) -> Result<()> {
    let Some(steps) = algorithm.steps() else {
        return x.vendor(wire, group, DeviceCollective::Broadcast { root });
    };
    let whole = 0..x.len();
    if algorithm == Algorithm::Ring {
        // A chain cuts by itself: between blocks it would run dry.
        return (steps.broadcast)(x, wire, group, &whole, root);
    }
    blocks(whole, group.size())
        .try_for_each(|(range, _)| (steps.broadcast)(x, wire, group, &range, root))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse::<Algorithm>(), Ok(algorithm));
            assert_eq!(serde_json::to_string(&algorithm).unwrap(), format!("\"{algorithm}\""));
        }
        for operation in Operation::ALL {
            assert_eq!(operation.to_string().parse::<Operation>(), Ok(operation));
            assert_eq!(serde_json::to_string(&operation).unwrap(), format!("\"{operation}\""));
        }
        let error = "nccl".parse::<Algorithm>().unwrap_err().to_string();
        assert!(
            error.contains("vendor, ring, halving-doubling, hierarchical, reduce-to-one"),
            "{error}"
        );
    }
}
