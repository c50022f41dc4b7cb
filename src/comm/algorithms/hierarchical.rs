//! First inside each node, then between the nodes: the fewest possible bytes cross the network.
//!
//! Each node has as many **lanes** as the smallest node has ranks. Inside a node rank i of the node
//! sums the elements of lane i; between nodes the ranks of one lane, one on each node, meet; both
//! by [`super::tree`]. So every network card carries its part, and a node sends each sum once.
//!
//! If nodes have equal numbers of consecutive ranks, a power of two, all of it is one tree over the
//! ranks: the result has the bits of `tree`.

use std::ops::Range;

use super::halving_doubling;
use super::partition::Shares;
use crate::reduce_buffer::{Combine, ReduceBuffer};
use crate::transport::{GroupRanks, Transport};
use hpctrain_base::error::Result;

/// The group seen as nodes and lanes.
struct Nodes<'a> {
    nodes: &'a [Vec<usize>],
    lanes: usize,
    /// My node.
    node: usize,
    /// My number on it.
    local: usize,
}

impl<'a> Nodes<'a> {
    fn of(group: &'a GroupRanks) -> Self {
        let nodes = group.by_node();
        let lanes = nodes.iter().map(Vec::len).min().unwrap_or(1);
        let place = |ranks: &Vec<usize>| ranks.iter().position(|&rank| rank == group.rank);
        let mine = nodes.iter().enumerate().find_map(|(node, ranks)| Some((node, place(ranks)?)));
        let (node, local) = mine.unwrap_or_default();
        Self { nodes, lanes, node, local }
    }

    /// Ranks of a node that belong to a lane.
    fn on(&self, node: usize, lane: usize) -> impl Iterator<Item = usize> {
        self.nodes[node].iter().copied().skip(lane).step_by(self.lanes)
    }

    /// Inside my node: everything that belongs to a lane, on its first rank.
    fn inside(&self, shares: &Shares) -> Shares {
        let of_lane =
            |lane| shares.of_all((0..self.nodes.len()).flat_map(move |node| self.on(node, lane)));
        let of_local = |local| if local < self.lanes { of_lane(local) } else { Vec::new() };
        Shares::new((0..self.nodes[self.node].len()).map(of_local).collect())
    }

    /// Between nodes: the elements of my lane, on the first rank of the lane on each node.
    fn between(&self, shares: &Shares) -> Shares {
        Shares::new(
            (0..self.nodes.len()).map(|node| shares.of_all(self.on(node, self.local))).collect(),
        )
    }

    /// The ranks of my lane, if I am its first on my node.
    fn lane(&self, group: &GroupRanks) -> Option<GroupRanks> {
        let first: Vec<usize> =
            self.nodes.iter().filter_map(|ranks| ranks.get(self.local).copied()).collect();
        if self.local < self.lanes { group.subset(&first) } else { None }
    }

    fn node(&self, group: &GroupRanks) -> Option<GroupRanks> {
        group.subset(&self.nodes[self.node])
    }

    /// Between the first rank of a lane and the lane's other ranks on the node: their shares, out
    /// or in.
    fn hand(
        &self,
        x: &mut dyn ReduceBuffer,
        wire: &mut dyn Transport,
        group: &GroupRanks,
        shares: &Shares,
        out: bool,
    ) -> Result<()> {
        let lane = self.local % self.lanes;
        let first = self.nodes[self.node][lane];
        for rank in self.on(self.node, lane).skip(1) {
            let (from, to) = if out { (first, rank) } else { (rank, first) };
            let share = shares.of(rank);
            if group.rank == from {
                x.exchange(wire, group, Combine::Replace, Some((to, share)), None)?;
            } else if group.rank == to {
                x.exchange(wire, group, Combine::Replace, None, Some((from, share)))?;
            }
        }
        Ok(())
    }
}

/// The ranks of each node, if they are equally many.
pub fn equal_nodes(group: &GroupRanks) -> Option<&[Vec<usize>]> {
    let nodes = group.by_node();
    nodes.iter().all(|ranks| ranks.len() == nodes[0].len()).then_some(nodes)
}

/// Whether the sum has the bits of the tree.
pub fn is_exact(group: &GroupRanks) -> bool {
    equal_nodes(group)
        .is_some_and(|nodes| nodes[0].len().is_power_of_two() && nodes.concat().is_sorted())
}

/// My share of the sum.
pub fn reduce_scatter(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let nodes = Nodes::of(group);
    if let Some(node) = nodes.node(group) {
        halving_doubling::reduce_scatter(x, wire, &node, &nodes.inside(shares))?;
    }
    if let Some(lane) = nodes.lane(group) {
        halving_doubling::reduce_scatter(x, wire, &lane, &nodes.between(shares))?;
    }
    nodes.hand(x, wire, group, shares, true)
}

/// The same backwards.
pub fn all_gather(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    shares: &Shares,
) -> Result<()> {
    let nodes = Nodes::of(group);
    nodes.hand(x, wire, group, shares, false)?;
    if let Some(lane) = nodes.lane(group) {
        halving_doubling::all_gather(x, wire, &lane, &nodes.between(shares))?;
    }
    match nodes.node(group) {
        Some(node) => halving_doubling::all_gather(x, wire, &node, &nodes.inside(shares)),
        None => Ok(()),
    }
}

/// From the root to one rank of each node, and from there to the others.
pub fn broadcast(
    x: &mut dyn ReduceBuffer,
    wire: &mut dyn Transport,
    group: &GroupRanks,
    range: &Range<usize>,
    root: usize,
) -> Result<()> {
    let Nodes { nodes, node, .. } = Nodes::of(group);
    // The root speaks for its node, the first rank for every other.
    let speaks = |ranks: &[usize]| if ranks.contains(&root) { root } else { ranks[0] };
    let speakers: Vec<usize> = nodes.iter().map(|ranks| speaks(ranks)).collect();
    let first = speakers.iter().position(|&rank| rank == root).unwrap_or(0);
    if let Some(between) = group.subset(&speakers) {
        halving_doubling::broadcast(x, wire, &between, range, first)?;
    }
    let mut here = nodes[node].clone();
    if let Some(place) = here.iter().position(|&rank| rank == root) {
        here.swap(0, place);
    }
    match group.subset(&here) {
        Some(inside) => halving_doubling::broadcast(x, wire, &inside, range, 0),
        None => Ok(()),
    }
}
