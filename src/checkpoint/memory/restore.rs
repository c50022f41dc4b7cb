//! Reads an in-memory checkpoint into the ranks of another job.
//!
//! Every rank reads the pieces that it needs from the slots of its own node; only those that are on
//! no node but others are sent.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::find::{Candidate, NodeSlots, decoded, encoded};
use super::slot::{Slot, SlotPiece};
use crate::Progress;
use crate::manifest::Manifest;
use crate::piece_source::PieceSource;
use crate::read::{ONE_ROW, Run, Slice};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::TensorRange;
use hpctrain_comm::Group;
use hpctrain_device::Backend;

/// The number of bytes that a rank sends in one message.
const MESSAGE: usize = 16 << 20;

impl Candidate {
    /// Returns the manifest of the checkpoint, without pieces, on all ranks; `None` if its outline
    /// is missing or malformed. Collective over `world`.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn manifest<B: Backend>(
        &self,
        world: &Group<B>,
        here: &NodeSlots,
    ) -> Result<Option<Manifest>> {
        let mine = here.directories().find_map(|node| node.outline(&self.job, self.outline_crc32));
        let flags = world.gather_bytes(vec![u8::from(mine.is_some())]).wait()?;
        let Some(sender) = flags.iter().position(|flag| *flag == [1]) else { return Ok(None) };
        let mine = mine.filter(|_| sender == world.rank()).unwrap_or_default();
        let outline = world.gather_bytes(mine).wait()?;
        let Ok(outline) = serde_json::from_slice::<Manifest>(&outline[sender]) else {
            return Ok(None);
        };
        let Progress { step, updates, position } = self.progress;
        Ok(Some(Manifest { step, updates, position, ..outline }))
    }

    /// Opens the slots that this rank reads, and receives the elements of the ranges `wanted` that
    /// are only on other nodes. Collective over `world`.
    ///
    /// # Errors
    /// Returns an error if a slot cannot be read on this rank, or a message between ranks fails.
    pub fn open<B: Backend>(
        &self,
        world: &Group<B>,
        here: &NodeSlots,
        wanted: &[TensorRange],
        parts: usize,
    ) -> Result<SlotSource> {
        let opened = SlotSource::open(self, here);
        let mut source = world.all_ok(opened)?;
        let missing: Vec<TensorRange> =
            wanted.iter().filter(|range| !source.has(range)).cloned().collect();
        let messages = world.gather_bytes(encoded(&(&here.host, &missing))?).wait()?;
        let needs: Vec<(String, Vec<TensorRange>)> =
            messages.iter().map(|bytes| decoded(bytes)).collect::<Result<_>>()?;
        if needs.iter().all(|(_, ranges)| ranges.is_empty()) {
            return Ok(source);
        }
        let prefilled = source.expect(missing, parts);
        world.all_ok(prefilled)?;
        let mut sent = if here.share[0] == 0 {
            self.supply(&source, here, &needs, parts).into_iter()
        } else {
            vec![].into_iter()
        };
        loop {
            let mut mine = Vec::new();
            let mut read = Ok(());
            while mine.len() < MESSAGE && read.is_ok() {
                let Some(record) = sent.next() else { break };
                read = record.append(&source, &mut mine);
            }
            world.all_ok(read)?;
            let messages = world.gather_bytes(mine).wait()?;
            if messages.iter().all(Vec::is_empty) {
                return Ok(source);
            }
            let received =
                messages.iter().try_for_each(|message| source.receive(world.rank(), message));
            world.all_ok(received)?;
        }
    }

    /// Returns what this rank, the first one of its node, sends: of the ranks' needs the elements
    /// in slots that are not on the node of the rank that needs them, and that no earlier node has.
    fn supply(
        &self,
        source: &SlotSource,
        here: &NodeSlots,
        needs: &[(String, Vec<TensorRange>)],
        parts: usize,
    ) -> Vec<Record> {
        let mut records = Vec::new();
        for (to, (host, ranges)) in needs.iter().enumerate() {
            for (need, range) in ranges.iter().enumerate() {
                for found in source.runs(range) {
                    let slots = &self.slots[found.owner];
                    let is_first = slots.keys().next() == Some(&here.host);
                    if slots.contains_key(host) || !is_first {
                        continue;
                    }
                    for part in 0..parts {
                        records.push(Record { to, need, part, found });
                    }
                }
            }
        }
        records
    }
}

/// Elements of a needed range in a slot.
#[derive(Debug, Clone, Copy)]
struct FoundRun {
    /// The rank that owns them.
    owner: usize,
    /// The piece in its slot.
    piece: usize,
    /// The first element in the piece.
    here: usize,
    /// The first element in the needed range.
    there: usize,
    len: usize,
}

/// Elements of a needed range that are sent to the rank that needs them.
struct Record {
    to: usize,
    need: usize,
    part: usize,
    found: FoundRun,
}

impl Record {
    /// The number of numbers before the elements.
    const NUMBERS: usize = 5;

    /// Appends the elements to a message.
    fn append(&self, source: &SlotSource, message: &mut Vec<u8>) -> Result<()> {
        let Self { to, need, part, found } = self;
        let mut values = vec![0.0; found.len];
        source.read_run(found, *part, &mut values)?;
        let numbers = [*to, *need, *part, found.there, found.len];
        message.extend(numbers.iter().flat_map(|number| (*number as u64).to_le_bytes()));
        message.extend_from_slice(bytemuck::cast_slice(&values));
        Ok(())
    }
}

/// The elements of an in-memory checkpoint that this rank can read.
pub struct SlotSource {
    /// The slots on this node, by the rank that owns them.
    slots: BTreeMap<usize, Slot>,
    /// For every tensor, the owners and numbers of its pieces in these slots.
    pieces: HashMap<String, Vec<(usize, usize)>>,
    /// The ranges that are not all on this node, each with the elements of every part.
    received: Vec<(TensorRange, Vec<Vec<f32>>)>,
}

impl SlotSource {
    fn open(candidate: &Candidate, here: &NodeSlots) -> Result<Self> {
        let mut source =
            Self { slots: BTreeMap::new(), pieces: HashMap::new(), received: Vec::new() };
        for (owner, places) in candidate.slots.iter().enumerate() {
            let Some(file) = places.get(&here.host) else { continue };
            let slot = Slot::open_header(file)?;
            for (number, piece) in slot.header.pieces.iter().enumerate() {
                let pieces = source.pieces.entry(piece.tensor.clone()).or_default();
                pieces.push((owner, number));
            }
            source.slots.insert(owner, slot);
        }
        Ok(source)
    }

    /// Returns the elements of a range that are in slots on this node.
    fn runs(&self, wanted: &TensorRange) -> Vec<FoundRun> {
        let mut found = Vec::new();
        for (owner, number) in self.pieces.get(&wanted.tensor).into_iter().flatten() {
            let piece = &self.slots[owner].header.pieces[*number];
            let runs = common(piece, wanted).into_iter();
            found.extend(runs.map(|Run { here, there, len }| FoundRun {
                owner: *owner,
                piece: *number,
                here,
                there,
                len,
            }));
        }
        found
    }

    /// Returns true if all elements of a range are in slots on this node.
    fn has(&self, wanted: &TensorRange) -> bool {
        self.runs(wanted).iter().map(|run| run.len).sum::<usize>() == wanted.range.len()
    }

    fn read_run(&self, run: &FoundRun, part: usize, out: &mut [f32]) -> Result<()> {
        let slot = &self.slots[&run.owner];
        slot.read(&slot.header.pieces[run.piece], part, run.here, out)
    }

    /// Allocates the buffers of ranges that other nodes send elements of, and fills in those that
    /// are here.
    fn expect(&mut self, missing: Vec<TensorRange>, parts: usize) -> Result<()> {
        let mut received = Vec::with_capacity(missing.len());
        for range in missing {
            let mut values = vec![vec![0.0; range.range.len()]; parts];
            for run in self.runs(&range) {
                for (part, values) in values.iter_mut().enumerate() {
                    self.read_run(&run, part, &mut values[run.there..][..run.len])?;
                }
            }
            received.push((range, values));
        }
        self.received = received;
        Ok(())
    }

    /// Takes the elements for rank `rank` from a message.
    fn receive(&mut self, rank: usize, message: &[u8]) -> Result<()> {
        let malformed = || Error::comm("another rank sent a malformed part of its state");
        let mut rest = message;
        while !rest.is_empty() {
            let (head, more) =
                rest.split_at_checked(Record::NUMBERS * size_of::<u64>()).ok_or_else(malformed)?;
            let numbers: Vec<usize> =
                head.as_chunks().0.iter().map(|n| u64::from_le_bytes(*n) as usize).collect();
            let [to, need, part, there, len] = numbers[..] else { return Err(malformed()) };
            let (values, more) = len
                .checked_mul(size_of::<f32>())
                .and_then(|bytes| more.split_at_checked(bytes))
                .ok_or_else(malformed)?;
            rest = more;
            if to != rank {
                continue;
            }
            let out = self
                .received
                .get_mut(need)
                .and_then(|(_, parts)| parts.get_mut(part))
                .and_then(|part| part.get_mut(there..)?.get_mut(..len))
                .ok_or_else(malformed)?;
            bytemuck::cast_slice_mut(out).copy_from_slice(values);
        }
        Ok(())
    }
}

/// Returns the elements that a piece and a wanted range have in common.
fn common(piece: &SlotPiece, wanted: &TensorRange) -> Vec<Run> {
    let all = 0..piece.shape.last().copied().unwrap_or(1).max(1);
    let of_stored = piece.columns.as_ref().unwrap_or(&all);
    let of_wanted = wanted.columns.as_ref().unwrap_or(&all);
    // If the columns are the same, elements are numbered as if they were one row.
    let (of_stored, of_wanted) =
        if of_stored == of_wanted { (&ONE_ROW, &ONE_ROW) } else { (of_stored, of_wanted) };
    if of_wanted.is_empty() {
        return vec![];
    }
    let stored = Slice { columns: of_stored, range: piece.start..piece.start + piece.len };
    stored.common(&Slice { columns: of_wanted, range: wanted.range.clone() }).collect()
}

impl PieceSource for SlotSource {
    fn read(
        &mut self,
        tensor: &str,
        part: usize,
        columns: Option<&Range<usize>>,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let received = self.received.iter().find(|(there, _)| {
            there.tensor == tensor
                && there.columns.as_ref() == columns
                && there.range.start <= range.start
                && range.end <= there.range.end
        });
        if let Some((there, parts)) = received {
            let values = parts.get(part).map(|values| &values[range.start - there.range.start..]);
            let values = values.ok_or_else(|| Error::internal(format!("no part {part}")))?;
            out.copy_from_slice(&values[..out.len()]);
            return Ok(());
        }
        let wanted = TensorRange { tensor: tensor.into(), columns: columns.cloned(), range };
        let mut written = 0;
        for run in self.runs(&wanted) {
            self.read_run(&run, part, &mut out[run.there..][..run.len])?;
            written += run.len;
        }
        if written != out.len() {
            return Err(Error::internal(format!(
                "{written} of the elements {:?} of {tensor} are in slots of this node",
                wanted.range
            )));
        }
        Ok(())
    }
}
