//! The last collectives of a rank: the evidence when a job stands still.
//!
//! An entry has its number in the rank and in the group, operation, group, unit, bytes, algorithm
//! and times; the last 256 are kept, without an allocation for each. Callers name the unit of a
//! request: `group.about(&unit)`. In debug builds each rank compares operation, algorithm, unit,
//! bytes and root with its neighbour before each collective. Release builds save that message; the
//! watchdog compares their ledgers when a job stands still and reports the first collective on
//! which ranks differ.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::transport::GroupRanks;
use hpctrain_base::spans;
use hpctrain_base::spans::Message;

/// Collectives that are remembered.
const KEPT: usize = 256;

/// The operation of a message from one rank, which only its receiver records.
pub const RECV: &str = "recv";

/// The operation by which a rank leaves the world, as collectives go: it ends when all have left.
pub const LEAVE: &str = "leave";

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
pub struct CollectiveRecord {
    /// Running number among everything that this rank does with others, from 1.
    pub number: u64,
    /// Running number from 1 among the collectives of the group, or among the messages of one rank
    /// in it.
    pub in_group: u64,
    pub label: Label,
    /// The group's ranks in the world.
    pub members: Arc<[usize]>,
    pub started: u64,
    /// None while it is under way.
    pub ended: Option<u64>,
}

impl CollectiveRecord {
    /// The entry as an event of the trace.
    pub fn message(&self) -> Message {
        let Label { group, size, algorithm, .. } = self.label;
        Message {
            number: self.number,
            group,
            ranks: self.members.len(),
            bytes: size.bytes(),
            algorithm,
        }
    }
}

/// A ring of the last collectives. Once it is full, an entry costs no allocation.
pub struct FlightRecorder {
    number: u64,
    /// Collectives of each group, and messages from each rank in it.
    by_group: HashMap<(usize, Option<usize>), u64>,
    entries: VecDeque<CollectiveRecord>,
}

impl Default for FlightRecorder {
    fn default() -> Self {
        Self { number: 0, by_group: HashMap::new(), entries: VecDeque::with_capacity(KEPT) }
    }
}

impl FlightRecorder {
    /// A collective begins. Returns its running number, and that in the group.
    pub fn begin(&mut self, group: &GroupRanks, label: &Label) -> (u64, u64) {
        self.number += 1;
        let from = label.root.filter(|_| label.op == RECV);
        let in_group = self.by_group.entry((group.id, from)).or_default();
        *in_group += 1;
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(CollectiveRecord {
            number: self.number,
            in_group: *in_group,
            label: label.clone(),
            members: group.ranks.clone(),
            started: spans::now(),
            ended: None,
        });
        (self.number, *in_group)
    }

    /// Collective `number` has succeeded. None if it is no longer remembered.
    pub fn end(&mut self, number: u64) -> Option<&CollectiveRecord> {
        let entry = self.entries.iter_mut().rev().find(|entry| entry.number == number)?;
        entry.ended = Some(spans::now());
        Some(entry)
    }

    /// All that are remembered, oldest first.
    pub fn entries(&self) -> impl DoubleEndedIterator<Item = &CollectiveRecord> {
        self.entries.iter()
    }

    /// The last one that was finished, and the one under way that holds up the others: a
    /// collective, or the oldest message where there is none.
    pub fn place(&self) -> (Option<&CollectiveRecord>, Option<&CollectiveRecord>) {
        let mut underway = self.entries.iter().filter(|entry| entry.ended.is_none());
        let current =
            underway.clone().find(|entry| entry.label.op != RECV).or_else(|| underway.next());
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
            algorithm: "halving-doubling",
            root: None,
        };
        let nodes: Arc<[usize]> = [0; 4].into();
        let world = GroupRanks::world(2, nodes.clone());
        let pair = GroupRanks::new(1, 2, vec![2, 3], nodes);
        let mut ledger = FlightRecorder::default();
        assert!(ledger.place().0.is_none() && ledger.place().1.is_none());
        for i in 1..=300 {
            assert_eq!(ledger.begin(&world, &label("all_reduce")), (i, i));
            assert_eq!(ledger.end(i).unwrap().number, i);
        }
        let room = ledger.entries.capacity();
        assert_eq!(ledger.begin(&pair, &label("barrier")), (301, 1));
        let (finished, current) = ledger.place();
        let finished = finished.unwrap();
        let current = current.unwrap();
        assert_eq!(
            (finished.number, finished.label.op, &*finished.members),
            (300, "all_reduce", &[0, 1, 2, 3][..])
        );
        assert_eq!(
            (current.number, current.label.op, &*current.members),
            (301, "barrier", &[2, 3][..])
        );
        assert!(current.ended.is_none() && finished.ended >= Some(finished.started));
        let numbers: Vec<_> = ledger.entries().map(|entry| entry.number).collect();
        assert_eq!(numbers, (301 - KEPT as u64 + 1..=301).collect::<Vec<_>>());
        assert_eq!(ledger.entries.capacity(), room);
    }

    #[test]
    fn messages_are_counted_apart_and_end_in_any_order() {
        let label = |op, root| Label {
            op,
            group: "pipeline",
            unit: None,
            size: Size::Same(8),
            algorithm: "direct",
            root,
        };
        let group = GroupRanks::world(0, [0; 3].into());
        let mut ledger = FlightRecorder::default();
        let began = [
            (RECV, Some(1)),
            ("barrier", None),
            (RECV, Some(2)),
            (RECV, Some(1)),
            ("broadcast", Some(1)),
        ]
        .map(|(op, root)| ledger.begin(&group, &label(op, root)));
        assert_eq!(began, [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]);
        ledger.end(2);
        ledger.end(1);
        let (finished, current) = ledger.place();
        assert_eq!(
            (finished.unwrap().number, current.unwrap().number),
            (2, 5),
            "a collective holds up messages"
        );
        ledger.end(5);
        assert_eq!(ledger.place().1.unwrap().number, 3);
        ledger.begin(&group, &label("barrier", None));
        assert_eq!(
            ledger.place().1.unwrap().number,
            6,
            "messages that were posted before do not hold it up"
        );
        assert!(ledger.end(9).is_none());
    }
}
