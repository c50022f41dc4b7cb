//! The flight recorder: the last collectives of a rank, for the report of a hang.
//!
//! An entry has its numbers on the rank and in the group, the operation, group, unit, bytes,
//! algorithm and times. The last 256 are kept, without an allocation for each. Callers name the
//! unit of a request by `group.with_label(&unit)`. In debug builds each rank compares operation,
//! algorithm, unit, bytes and root with its neighbour before each collective. Release builds omit
//! that message; instead the watchdog compares the ranks' records when a job hangs, and reports the
//! first collective on which they differ.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::transport::GroupRanks;
use hpctrain_base::spans;
use hpctrain_base::spans::Message;

/// The number of collectives that are kept.
const CAPACITY: usize = 256;

/// The operation name of a point-to-point message, which only its receiver records.
pub const RECV: &str = "recv";

/// The operation name of leaving the world, which counts as a collective: it ends when all ranks
/// have left.
pub const LEAVE: &str = "leave";

/// The description of a collective.
#[derive(Debug, Clone)]
pub struct Label {
    pub op: &'static str,
    /// The name of the group.
    pub group: &'static str,
    /// The name of the unit that it concerns.
    pub unit: Option<Arc<str>>,
    pub size: Size,
    pub algorithm: &'static str,
    /// The rank that has the data, if one rank has it.
    pub root: Option<usize>,
}

/// The size of a collective's operand, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// The same on all ranks.
    Same(usize),
    /// The size on this rank, which may differ on other ranks.
    Own(usize),
}

impl Size {
    pub fn bytes(self) -> usize {
        let (Self::Same(bytes) | Self::Own(bytes)) = self;
        bytes
    }
}

/// The record of one collective. Times are those of [`spans::now`].
#[derive(Debug, Clone)]
pub struct CollectiveRecord {
    /// The running number, from 1, among all collectives and messages of this rank.
    pub number: u64,
    /// The running number, from 1, among the collectives of the group, or among the messages from
    /// one rank of it.
    pub in_group: u64,
    pub label: Label,
    /// The group's ranks in the world.
    pub members: Arc<[usize]>,
    pub started: u64,
    /// The end; `None` while it is in flight.
    pub ended: Option<u64>,
}

impl CollectiveRecord {
    /// Returns the details of the record for the trace.
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

/// A ring buffer of the last collectives. Once it is full, an entry needs no allocation.
pub struct FlightRecorder {
    number: u64,
    /// The numbers of collectives of each group, and of messages from each rank of it.
    by_group: HashMap<(usize, Option<usize>), u64>,
    entries: VecDeque<CollectiveRecord>,
}

impl Default for FlightRecorder {
    fn default() -> Self {
        Self { number: 0, by_group: HashMap::new(), entries: VecDeque::with_capacity(CAPACITY) }
    }
}

impl FlightRecorder {
    /// Records the start of a collective. Returns its running number, and that in the group.
    pub fn begin(&mut self, group: &GroupRanks, label: &Label) -> (u64, u64) {
        self.number += 1;
        let from = label.root.filter(|_| label.op == RECV);
        let in_group = self.by_group.entry((group.id, from)).or_default();
        *in_group += 1;
        if self.entries.len() == CAPACITY {
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

    /// Records the success of collective `number`. Returns `None` if it is no longer kept.
    pub fn end(&mut self, number: u64) -> Option<&CollectiveRecord> {
        let entry = self.entries.iter_mut().rev().find(|entry| entry.number == number)?;
        entry.ended = Some(spans::now());
        Some(entry)
    }

    /// Iterates over the records, oldest first.
    pub fn entries(&self) -> impl DoubleEndedIterator<Item = &CollectiveRecord> {
        self.entries.iter()
    }

    /// Returns the last collective that finished, and the one in flight that blocks later ones: the
    /// first collective, or the oldest message if no collective is in flight.
    pub fn place(&self) -> (Option<&CollectiveRecord>, Option<&CollectiveRecord>) {
        let mut in_flight = self.entries.iter().filter(|entry| entry.ended.is_none());
        let current =
            in_flight.clone().find(|entry| entry.label.op != RECV).or_else(|| in_flight.next());
        (self.entries.iter().rev().find(|entry| entry.ended.is_some()), current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the label of an operation on 8 bytes.
    fn label(op: &'static str, root: Option<usize>) -> Label {
        Label {
            op,
            group: "world",
            unit: Some("block0".into()),
            size: Size::Same(8),
            algorithm: "halving-doubling",
            root,
        }
    }

    #[test]
    fn the_last_ones_are_kept() {
        let nodes: Arc<[usize]> = [0; 4].into();
        let world = GroupRanks::world(2, nodes.clone());
        let pair = GroupRanks::new(1, 2, vec![2, 3], nodes);
        let mut recorder = FlightRecorder::default();
        assert!(recorder.place().0.is_none() && recorder.place().1.is_none());
        for i in 1..=300 {
            assert_eq!(recorder.begin(&world, &label("all_reduce", None)), (i, i));
            assert_eq!(recorder.end(i).unwrap().number, i);
        }
        let capacity = recorder.entries.capacity();
        assert_eq!(recorder.begin(&pair, &label("barrier", None)), (301, 1));
        let (finished, current) = recorder.place();
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
        let numbers: Vec<_> = recorder.entries().map(|entry| entry.number).collect();
        assert_eq!(numbers, (301 - CAPACITY as u64 + 1..=301).collect::<Vec<_>>());
        assert_eq!(recorder.entries.capacity(), capacity);
    }

    #[test]
    fn messages_are_counted_separately_and_end_in_any_order() {
        let group = GroupRanks::world(0, [0; 3].into());
        let mut recorder = FlightRecorder::default();
        let began = [
            (RECV, Some(1)),
            ("barrier", None),
            (RECV, Some(2)),
            (RECV, Some(1)),
            ("broadcast", Some(1)),
        ]
        .map(|(op, root)| recorder.begin(&group, &label(op, root)));
        assert_eq!(began, [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]);
        recorder.end(2);
        recorder.end(1);
        let (finished, current) = recorder.place();
        assert_eq!(
            (finished.unwrap().number, current.unwrap().number),
            (2, 5),
            "a collective holds up messages"
        );
        recorder.end(5);
        assert_eq!(recorder.place().1.unwrap().number, 3);
        recorder.begin(&group, &label("barrier", None));
        assert_eq!(
            recorder.place().1.unwrap().number,
            6,
            "messages that were posted before do not hold it up"
        );
        assert!(recorder.end(9).is_none());
    }
}
