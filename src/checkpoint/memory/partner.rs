//! Copies of the slots of ranks on another node, in case that node is lost.
//!
//! The partner of a rank is the rank of the same local number on the next node. After each copy
//! every rank sends its slot to its partner, beside the next step. Slots of ranks whose node still
//! runs survive the ranks themselves, so ranks of a job on one node have no partners.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::slot::{ForeignSlot, SlotWriter};
use hpctrain_base::error::Result;
use hpctrain_comm::{Group, Pending};
use hpctrain_device::{Kernels, MemoryKind};

/// The number of elements of a message: 4 MiB.
const MESSAGE: usize = 1 << 20;

/// Returns the partner of every rank, from the nodes of the ranks; `None` if all are on one node.
pub fn partners(hosts: &[String]) -> Option<Vec<usize>> {
    let mut nodes: Vec<Vec<usize>> = Vec::new();
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    let mut places = Vec::with_capacity(hosts.len());
    for (rank, host) in hosts.iter().enumerate() {
        let node = *numbers.entry(host).or_insert(nodes.len());
        if node == nodes.len() {
            nodes.push(Vec::new());
        }
        places.push((node, nodes[node].len()));
        nodes[node].push(rank);
    }
    if nodes.len() < 2 {
        return None;
    }
    let partner = |(node, local): (usize, usize)| {
        let next = &nodes[(node + 1) % nodes.len()];
        next[local % next.len()]
    };
    Some(places.into_iter().map(partner).collect())
}

/// Returns the number of ranks of other nodes whose slots node `host` keeps.
pub fn foreign_ranks(hosts: &[String], host: &str) -> usize {
    let partners = partners(hosts).unwrap_or_default();
    partners.into_iter().filter(|partner| hosts[*partner] == host).count()
}

/// The exchange of slots with partners on other nodes.
pub struct PartnerCopies<B: Kernels> {
    backend: B,
    group: Group<B>,
    path: PathBuf,
    /// The rank that keeps this rank's slots.
    to: usize,
    /// The number of elements of a slot of this rank.
    len: usize,
    /// The ranks whose slots this rank keeps, with the numbers of elements.
    from: Vec<(usize, usize)>,
    /// Their slots, by rank and number.
    slots: HashMap<(usize, usize), ForeignSlot>,
    underway: Option<Exchange<B>>,
    block: Vec<f32>,
}

/// Messages in flight.
struct Exchange<B: Kernels> {
    /// The number of the slot.
    slot: usize,
    sends: Vec<Pending<B::Buf>>,
    /// Those from each rank, in order.
    receives: Vec<Vec<Pending<B::Buf>>>,
}

impl<B: Kernels> PartnerCopies<B> {
    /// Prepares the exchange of slots of `len` elements. `partners` are those of all ranks.
    /// Collective over `group`.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn new(
        group: Group<B>,
        backend: &B,
        path: &Path,
        partners: &[usize],
        len: usize,
    ) -> Result<Self> {
        let lens = group.all_gather_u64(&[len as u64])?;
        let rank = group.rank();
        let from = partners.iter().enumerate().filter(|(_, partner)| **partner == rank);
        Ok(Self {
            backend: backend.clone(),
            path: path.to_path_buf(),
            to: partners[rank],
            len,
            from: from.map(|(other, _)| (other, lens[other][0] as usize)).collect(),
            group,
            slots: HashMap::new(),
            underway: None,
            block: Vec::new(),
        })
    }

    /// Starts to exchange slot `number`. After an error of this rank, the content is that of a slot
    /// without a step, since the others send and receive all the same.
    ///
    /// # Errors
    /// Returns an error if the slot cannot be read, or the memory does not suffice.
    pub fn start(&mut self, number: usize, slot: Option<&SlotWriter>) -> Result<()> {
        // A rank whose messages are staged waits in its send until the receiver is ready.
        let mut receives = Vec::with_capacity(self.from.len());
        for (rank, len) in &self.from {
            let mut of_rank = Vec::new();
            for first in (0..*len).step_by(MESSAGE) {
                let len = MESSAGE.min(len - first);
                let buf = self.backend.alloc_f32(MemoryKind::MemoryCheckpoint, len)?;
                of_rank.push(self.group.recv(*rank, buf));
            }
            receives.push(of_rank);
        }
        let mut sends = Vec::new();
        let mut read = Ok(());
        for first in (0..self.len).step_by(MESSAGE) {
            self.block.clear();
            self.block.resize(MESSAGE.min(self.len - first), 0.0);
            if let (Some(slot), Ok(())) = (slot, &read) {
                read = slot.read(first, &mut self.block);
            }
            let buf = self.backend.upload_f32(MemoryKind::MemoryCheckpoint, &self.block)?;
            sends.push(self.group.send(self.to, buf));
        }
        self.underway = Some(Exchange { slot: number, sends, receives });
        read
    }

    /// Returns true if nothing is in flight. Writes the slots that have arrived.
    ///
    /// # Errors
    /// Returns an error if a message failed, or a slot cannot be written.
    pub fn is_done(&mut self) -> Result<bool> {
        let Some(Exchange { sends, receives, .. }) = &mut self.underway else { return Ok(true) };
        let are_sent = sends.iter_mut().all(Pending::is_done);
        if !(are_sent && receives.iter_mut().flatten().all(Pending::is_done)) {
            return Ok(false);
        }
        let Some(Exchange { slot, sends, receives }) = self.underway.take() else {
            return Ok(true);
        };
        for sent in sends {
            sent.wait()?;
        }
        for ((rank, len), messages) in self.from.iter().zip(receives) {
            let copy = match self.slots.entry((*rank, slot)) {
                std::collections::hash_map::Entry::Occupied(there) => there.into_mut(),
                std::collections::hash_map::Entry::Vacant(free) => {
                    let name = format!("rank-{:05}.of-{rank:05}.{slot}", self.group.rank());
                    free.insert(ForeignSlot::create(&self.path.join(name), *len)?)
                }
            };
            copy.begin()?;
            for message in messages {
                let buf = message.wait()?;
                self.block.resize(B::len(&buf), 0.0);
                self.backend.download(B::all(&buf), &mut self.block)?;
                copy.append(&self.block)?;
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partners_on(hosts: &[&str]) -> Option<Vec<usize>> {
        partners(&hosts.iter().map(|host| (*host).to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn partners_are_on_the_next_node() {
        assert_eq!(partners_on(&["a", "a"]), None);
        assert_eq!(partners_on(&["a", "a", "b", "b"]), Some(vec![2, 3, 0, 1]));
        // Ranks may be dealt in turn, and nodes may have different numbers of them.
        assert_eq!(partners_on(&["a", "b", "a", "b"]), Some(vec![1, 0, 3, 2]));
        assert_eq!(partners_on(&["a", "a", "b", "c", "c"]), Some(vec![2, 2, 3, 0, 1]));
        let hosts = ["a", "b", "b", "b"].map(String::from);
        assert_eq!(["a", "b", "c"].map(|host| foreign_ranks(&hosts, host)), [3, 1, 0]);
        assert_eq!(foreign_ranks(&hosts[1..], "b"), 0);
    }
}
