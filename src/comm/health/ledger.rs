//! The last collectives of a rank: the evidence when a job stands still.
//!
//! An entry has its number in the rank and in the group, operation, group, unit, bytes, algorithm and times; the last
//! 256 are kept, without an allocation for each. Callers name the unit of a request: `group.about(&unit)`. In debug
//! builds each rank compares operation, algorithm, unit, bytes and root with its neighbour before each collective.
//! Release builds save that message; the watchdog compares their ledgers when a job stands still and reports the first
//! collective on which ranks differ.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::activity::{self, Message};
use crate::comm::wire::Members;

/// Collectives that are remembered.
const KEPT: usize = 256;

/// Description of a collective.
#[derive(Debug, Clone)]
pub struct Label {
    pub op: &'static str,
    /// Name of the group.
    pub group: &'static str,
    /// Name of the block it concerns.
    pub unit: Option<Arc<str>>,
    pub size: Size,
    pub algorithm: &'static str,
    /// The rank that has the data, if it is one.
    pub root: Option<usize>,
}

/// Bytes of a collective's operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// The same on all ranks.
    Same(usize),
    /// This rank's own; another rank's may differ.
    Own(usize),
}

impl Size {
    pub fn bytes(self) -> usize {
        let (Self::Same(bytes) | Self::Own(bytes)) = self;
        bytes
    }
}

/// One collective. Times are those of [`activity::now`].
#[derive(Debug, Clone)]
pub struct Entry {
    /// Running number among everything that this rank does with others, from 1.
    pub number: u64,
    /// Running number in the group, from 1.
    pub in_group: u64,
    pub label: Label,
    /// Ranks in the group, and the first of them.
    pub ranks: usize,
    pub first: usize,
    pub started: u64,
    /// None while it is under way.
    pub ended: Option<u64>,
}

impl Entry {
    /// The entry as an event of the trace.
    pub fn message(&self) -> Message {
        let Label { group, size, algorithm, .. } = self.label;
        Message { number: self.number, group, ranks: self.ranks, bytes: size.bytes(), algorithm }
    }
}

/// A ring of the last collectives. Once it is full, an entry costs no allocation.
pub struct CollectiveLedger {
    number: u64,
    by_group: HashMap<usize, u64>,
    entries: VecDeque<Entry>,
}

impl Default for CollectiveLedger {
    fn default() -> Self {
        Self { number: 0, by_group: HashMap::new(), entries: VecDeque::with_capacity(KEPT) }
    }
}

impl CollectiveLedger {
    /// A collective begins. Returns its number in the group.
    pub fn begin(&mut self, group: &Members, label: &Label) -> u64 {
        self.number += 1;
        let in_group = self.by_group.entry(group.id).or_default();
        *in_group += 1;
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(Entry {
            number: self.number,
            in_group: *in_group,
            label: label.clone(),
            ranks: group.size(),
            first: group.ranks[0],
            started: activity::now(),
            ended: None,
        });
        *in_group
    }

    /// The collective that began last has succeeded.
    pub fn end(&mut self) -> Option<&Entry> {
        let entry = self.entries.back_mut()?;
        entry.ended = Some(activity::now());
        Some(entry)
    }

    /// All that are remembered, oldest first.
    pub fn entries(&self) -> impl DoubleEndedIterator<Item = &Entry> {
        self.entries.iter()
    }

    /// The last one that was finished and the one under way.
    pub fn place(&self) -> (Option<&Entry>, Option<&Entry>) {
        let current = self.entries.back().filter(|entry| entry.ended.is_none());
        (self.entries.iter().rev().find(|entry| entry.ended.is_some()), current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_kept() {
        let label = |op| Label {
            op,
            group: "world",
            unit: Some("block0".into()),
            size: Size::Same(8),
            algorithm: "tree",
            root: None,
        };
        let nodes: Arc<[usize]> = [0; 4].into();
        let (world, pair) = (Members::world(2, nodes.clone()), Members::new(1, 2, vec![2, 3], nodes));
        let mut ledger = CollectiveLedger::default();
        assert!(ledger.place().0.is_none() && ledger.place().1.is_none());
        for i in 1..=300 {
            assert_eq!(ledger.begin(&world, &label("all_reduce")), i);
            assert_eq!(ledger.end().unwrap().number, i);
        }
        let room = ledger.entries.capacity();
        assert_eq!(ledger.begin(&pair, &label("barrier")), 1);
        let (finished, current) = ledger.place();
        let (finished, current) = (finished.unwrap(), current.unwrap());
        assert_eq!((finished.number, finished.label.op, finished.first, finished.ranks), (300, "all_reduce", 0, 4));
        assert_eq!((current.number, current.label.op, current.first, current.ranks), (301, "barrier", 2, 2));
        assert!(current.ended.is_none() && finished.ended >= Some(finished.started));
        let numbers: Vec<_> = ledger.entries().map(|entry| entry.number).collect();
        assert_eq!(numbers, (301 - KEPT as u64 + 1..=301).collect::<Vec<_>>());
        assert_eq!(ledger.entries.capacity(), room);
    }
}
