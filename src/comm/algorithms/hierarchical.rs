//! Hierarchical collectives: first inside each node, then between the nodes, so that the fewest
//! possible bytes cross the network.
//!
//! There are as many **rails** as the smallest node has ranks. Inside a node, rank i of the node
//! sums the elements of rail i; between nodes, the ranks of one rail, one on each node, exchange.
//! Both use [`super::halving_doubling`]. So every network card carries its share, and a node sends
//! each sum once.
//!
//! If the nodes have equal numbers of consecutive ranks, a power of two, the additions form one
//! tree over the ranks, and the result has the bits of `halving-doubling`.

use std::ops::Range;

use super::halving_doubling;
use super::partition::Shares;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// The ranks of a group, arranged by nodes and rails.
struct Nodes<'a> {
    nodes: &'a [Vec<usize>],
    rails: usize,
    /// The index of this rank's node.
    node: usize,
    /// This rank's index on its node.
    local: usize,
}

impl<'a> Nodes<'a> {
    fn new(group: &'a GroupRanks) -> Self {
        let nodes = group.by_node();
        let rails = nodes.iter().map(Vec::len).min().unwrap_or(1);
        let mine = nodes.iter().enumerate().find_map(|(node, ranks)| {
            Some((node, ranks.iter().position(|&rank| rank == group.rank)?))
        });
        let (node, local) = mine.unwrap_or_default();
        Self { nodes, rails, node, local }
    }

    /// Iterates over the ranks of a node that belong to a rail.
    fn on(&self, node: usize, rail: usize) -> impl Iterator<Item = usize> {
        self.nodes[node].iter().copied().skip(rail).step_by(self.rails)
    }

    /// Returns the shares inside this rank's node: the first rank of each rail owns all elements of
    /// the rail.
    fn inside(&self, shares: &Shares) -> Shares {
        let of_rail = |rail| {
            shares.ranges_of((0..self.nodes.len()).flat_map(move |node| self.on(node, rail)))
        };
        let of_locals = (0..self.nodes[self.node].len())
            .map(|local| if local < self.rails { of_rail(local) } else { Vec::new() });
        Shares::new(of_locals.collect())
    }

    /// Returns the shares between nodes: on each node the first rank of this rank's rail owns the
    /// node's elements of the rail.
    fn between(&self, shares: &Shares) -> Shares {
        Shares::new(
            (0..self.nodes.len()).map(|node| shares.ranges_of(self.on(node, self.local))).collect(),
        )
    }

    /// Returns the ranks of this rank's rail, one on each node, if this rank is its first on the
    /// node.
    fn rail(&self, group: &GroupRanks) -> Option<GroupRanks> {
        let first: Vec<usize> =
            self.nodes.iter().filter_map(|ranks| ranks.get(self.local).copied()).collect();
        if self.local < self.rails { group.subset(&first) } else { None }
    }

    fn node(&self, group: &GroupRanks) -> Option<GroupRanks> {
        group.subset(&self.nodes[self.node])
    }

    /// Moves the shares of a rail's other ranks on this node: from its first rank to them with
    /// `out`, and from them to it otherwise.
    fn move_rail_shares(
        &self,
        x: &mut dyn ReduceBuffer,
        transport: &mut dyn Transport,
        group: &GroupRanks,
        shares: &Shares,
        out: bool,
    ) -> Result<()> {
        let rail = self.local % self.rails;
        let first = self.nodes[self.node][rail];
        for rank in self.on(self.node, rail).skip(1) {
            let (from, to) = if out { (first, rank) } else { (rank, first) };
            let share = shares.ranges(rank);
            if group.rank == from {
                x.exchange(transport, group, Combine::Replace, Some((to, share)), None)?;
            } else if group.rank == to {
                x.exchange(transport, group, Combine::Replace, None, Some((from, share)))?;
            }
        }
        Ok(())
    }
}

/// Returns the ranks of each node, or `None` if nodes differ in their number of ranks.
pub fn equal_nodes(group: &GroupRanks) -> Option<&[Vec<usize>]> {
    let nodes = group.by_node();
    nodes.iter().all(|ranks| ranks.len() == nodes[0].len()).then_some(nodes)
}

/// Returns true if sums have the bits of the tree of [`super::halving_doubling`].
pub fn is_exact(group: &GroupRanks) -> bool {
    equal_nodes(group)
        .is_some_and(|nodes| nodes[0].len().is_power_of_two() && nodes.concat().is_sorted())
}

/// Leaves this rank's share of the sum in its memory.
pub fn reduce_scatter(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let nodes = Nodes::new(group);
    if let Some(node) = nodes.node(group) {
        halving_doubling::reduce_scatter(x, transport, &node, &nodes.inside(shares))?;
    }
    if let Some(rail) = nodes.rail(group) {
        halving_doubling::reduce_scatter(x, transport, &rail, &nodes.between(shares))?;
    }
    nodes.move_rail_shares(x, transport, group, shares, true)
}

/// Brings every rank's share to every rank: the reverse of [`reduce_scatter`].
pub fn all_gather(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let nodes = Nodes::new(group);
    nodes.move_rail_shares(x, transport, group, shares, false)?;
    if let Some(rail) = nodes.rail(group) {
        halving_doubling::all_gather(x, transport, &rail, &nodes.between(shares))?;
    }
    match nodes.node(group) {
        Some(node) => halving_doubling::all_gather(x, transport, &node, &nodes.inside(shares)),
        None => Ok(()),
    }
}

/// Broadcasts from the root to one rank of each node, and from there to the node's other ranks.
pub fn broadcast(
    x: &mut dyn ReduceBuffer,
    transport: &mut dyn Transport,
    group: &GroupRanks,
    range: &Range<usize>,
    root: usize,
) -> Result<()> {
    let Nodes { nodes, node, .. } = Nodes::new(group);
    // The leader of a node is the root, if it is there, and otherwise the first rank.
    let leaders = nodes.iter().map(|ranks| if ranks.contains(&root) { root } else { ranks[0] });
    let leaders: Vec<usize> = leaders.collect();
    let first = leaders.iter().position(|&rank| rank == root).unwrap_or(0);
    if let Some(between) = group.subset(&leaders) {
        halving_doubling::broadcast(x, transport, &between, range, first)?;
    }
    let mut here = nodes[node].clone();
    if let Some(place) = here.iter().position(|&rank| rank == root) {
        here.swap(0, place);
    }
    match group.subset(&here) {
        Some(inside) => halving_doubling::broadcast(x, transport, &inside, range, 0),
        None => Ok(()),
    }
}
