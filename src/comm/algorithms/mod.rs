//! Collectives, composed of exchanges between two ranks. They are written once, over host or device
//! memory.
//!
//! Ring, halving-doubling and hierarchical are bandwidth-optimal: each rank sends 2·(n−1)/n of the
//! buffer for an all-reduce. Long buffers go block by block, so that each step finds the elements
//! of the one before in the cache.
//!
//! Blocks have 1 MiB per rank, so a buffer of 64 MiB is exchanged at the same rate as one of 1 MiB.
//! All algorithms but the ring and the vendor's add every element in the order of one binary tree
//! over the ranks. `hierarchical` does so only where every node has the same number of consecutive
//! ranks, a power of two.

pub mod bytes;
mod halving_doubling;
mod hierarchical;
mod partition;
mod power_of_two;
mod ring;
mod root_reduce;
mod subtrees;
mod unequal;

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
pub use unequal::{TermOrder, UNEQUAL_SCRATCH, UnequalCollective};

/// The algorithm of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// The collectives of MPI, or of NCCL where it is the transport. The order of additions is
    /// unspecified.
    Vendor,
    /// A ring. The order of additions differs between elements and depends on the number of ranks.
    Ring,
    /// Recursive halving, then doubling (Rabenseifner, 2004). Every element is summed by one fixed
    /// binary tree, independent of its position.
    HalvingDoubling,
    /// Inside each node first, then between the nodes.
    Hierarchical,
    /// Everything goes through one rank.
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
    /// The sum over all ranks, of which each rank receives its part.
    ReduceScatter,
    /// Every rank's part, on every rank.
    AllGather,
    /// The elements of one rank, on every rank.
    Broadcast,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Algorithm; 5] = [
        Algorithm::Vendor,
        Algorithm::Ring,
        Algorithm::HalvingDoubling,
        Algorithm::Hierarchical,
        Algorithm::ReduceToOne,
    ];

    /// Returns the name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Vendor => "vendor",
            Algorithm::Ring => "ring",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::ReduceToOne => "reduce-to-one",
        }
    }

    /// Returns true if the algorithm is bandwidth-optimal for long buffers.
    pub(super) fn moves_least(self) -> bool {
        matches!(self, Algorithm::Ring | Algorithm::HalvingDoubling | Algorithm::Hierarchical)
    }

    /// Returns true if sums over `group` have the bits of [`Algorithm::HalvingDoubling`].
    pub(super) fn is_exact(self, group: &GroupRanks) -> bool {
        match self {
            Algorithm::Vendor | Algorithm::Ring => false,
            Algorithm::HalvingDoubling | Algorithm::ReduceToOne => true,
            Algorithm::Hierarchical => hierarchical::is_exact(group),
        }
    }
}

impl Operation {
    /// All operations.
    pub const ALL: [Operation; 5] = [
        Operation::AllReduce,
        Operation::Reduce,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::Broadcast,
    ];

    /// Returns the name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::Reduce => "reduce",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllGather => "all_gather",
            Operation::Broadcast => "broadcast",
        }
    }

    /// Returns true if the operation sums.
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

/// Returns the value of `all` that has the name `text`.
fn find_by_name<T: Copy>(
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
        find_by_name("communication algorithm", &Self::ALL, Self::name, text)
    }
}

impl FromStr for Operation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        find_by_name("collective operation", &Self::ALL, Self::name, text)
    }
}

/// Elements of a rank in one block, 1 MiB: all steps of a block find them in the cache.
const BLOCK: usize = 1 << 18;

/// Returns the most bytes of scratch memory that the algorithms of a world of `ranks` need.
pub fn staging(ranks: usize) -> usize {
    // The size of a group divides the number of ranks, and divisors of a power of two are powers of
    // two, which need no scratch.
    let groups = if ranks.is_power_of_two() { 0..0 } else { 1..ranks + 1 };
    groups.map(halving_doubling::scratch_elements).max().unwrap_or(0) * size_of::<f32>()
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

/// A reduce-scatter or all-gather of shares.
type OnShares = fn(&mut dyn ReduceBuffer, &mut dyn Transport, &GroupRanks, &Shares) -> Result<()>;

/// A broadcast of a range.
type FromRoot =
    fn(&mut dyn ReduceBuffer, &mut dyn Transport, &GroupRanks, &Range<usize>, usize) -> Result<()>;

/// The collectives of an algorithm on one block.
struct Steps {
    reduce_scatter: OnShares,
    all_gather: OnShares,
    broadcast: FromRoot,
}

impl Algorithm {
    /// Returns the functions of this algorithm, or `None` for the vendor's.
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

/// A collective, the same on all ranks of a group.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    pub operation: Operation,
    pub algorithm: Algorithm,
    /// The root of a broadcast.
    pub root: usize,
}

impl Call {
    /// Returns the collective of the vendor's library that does the same.
    pub fn vendor_collective(self) -> DeviceCollective {
        match self.operation {
            Operation::AllReduce => DeviceCollective::AllReduce,
            Operation::Reduce => DeviceCollective::Reduce,
            Operation::ReduceScatter => DeviceCollective::ReduceScatter,
            Operation::AllGather => DeviceCollective::AllGather,
            Operation::Broadcast => DeviceCollective::Broadcast { root: self.root },
        }
    }
}

/// Runs a collective.
pub fn run(
    call: Call,
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<()> {
    let Some(steps) = call.algorithm.steps() else {
        return x.vendor(transport, group, call.vendor_collective());
    };
    match call.operation {
        Operation::AllReduce => all_reduce(call.algorithm, steps, x, transport, group),
        Operation::Reduce => reduce(call.algorithm, steps, x, transport, group),
        Operation::ReduceScatter => {
            let mut shares = blocks_of_shares(x.len(), group.size());
            shares.try_for_each(|shares| (steps.reduce_scatter)(x, transport, group, &shares))
        }
        Operation::AllGather => {
            let mut shares = blocks_of_shares(x.len(), group.size());
            shares.try_for_each(|shares| (steps.all_gather)(x, transport, group, &shares))
        }
        Operation::Broadcast => broadcast(call.algorithm, steps, x, transport, group, call.root),
    }
}

/// Leaves the sum over all ranks on every rank.
fn all_reduce(
    algorithm: Algorithm,
    steps: Steps,
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<()> {
    for (range, shares) in blocks(0..x.len(), group.size()) {
        if algorithm == Algorithm::ReduceToOne {
            // Rank 0 has the whole sum: it need not be scattered first.
            root_reduce::all_reduce(x, transport, group, &range)?;
        } else {
            (steps.reduce_scatter)(x, transport, group, &shares)?;
            (steps.all_gather)(x, transport, group, &shares)?;
        }
    }
    Ok(())
}

/// Leaves the sum over all ranks on rank 0. The elements of the other ranks are unspecified.
fn reduce(
    algorithm: Algorithm,
    steps: Steps,
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
) -> Result<()> {
    for (range, shares) in blocks(0..x.len(), group.size()) {
        if algorithm == Algorithm::ReduceToOne {
            halving_doubling::reduce(x, transport, group, from_ref(&range))?;
        } else {
            (steps.reduce_scatter)(x, transport, group, &shares)?;
            halving_doubling::gather(x, transport, group, &shares)?;
        }
    }
    Ok(())
}

/// Brings the root's elements to every rank.
fn broadcast(
    algorithm: Algorithm,
    steps: Steps,
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    root: usize,
) -> Result<()> {
    let whole = 0..x.len();
    if algorithm == Algorithm::Ring {
        // The chain divides the range itself: with blocks it would drain between any two.
        return (steps.broadcast)(x, transport, group, &whole, root);
    }
    blocks(whole, group.size())
        .try_for_each(|(range, _)| (steps.broadcast)(x, transport, group, &range, root))
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
