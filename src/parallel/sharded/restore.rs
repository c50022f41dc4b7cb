//! Restores from a checkpoint: every rank reads a share of the values, the part that it would save,
//! and sends it to the ranks that store the same values. All ranks together read the checkpoint
//! once, regardless of the layout.
//!
//! A rank that cannot read, or whose device fails, continues with zeros until the last message,
//! because the others wait for it, and returns its error afterwards.

use std::collections::VecDeque;
use std::ops::Range;

use super::Sharded;
use crate::fsdp_unit::BufferState;
use crate::{Lifetime, Storage};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::{TensorRange, UnitLayout, share};
use hpctrain_comm::Group;
use hpctrain_device::{Kernels, MemoryKind};

/// Reads the values of a range of a tensor, as described at [`Sharded::restore`].
type Read<'a> =
    dyn FnMut(&str, usize, Option<&Range<usize>>, Range<usize>, &mut [f32]) -> Result<()> + 'a;

/// The number of elements that all ranks of a group together send at once.
const CHUNK: usize = 1 << 24;

impl<B: Kernels> Sharded<B> {
    /// Returns the ranges that [`Sharded::restore`] reads on this rank.
    pub fn restored(&self) -> Vec<TensorRange> {
        let share = self.share();
        let mut ranges = self.host_units.as_ref().map_or(vec![], |tables| tables.restored());
        let of_units = self.units.iter().map(|unit| &unit.layout);
        for layout in of_units.chain(self.tied_replicas.iter().map(|guest| &guest.layout)) {
            let pieces = layout.stored(share.range_of(layout));
            ranges.extend(pieces.map(|piece| TensorRange {
                tensor: piece.tensor.name.clone(),
                columns: piece.columns,
                range: piece.of_tensor,
            }));
        }
        ranges
    }

    /// Replaces parameters and optimizer state by the values that `read(tensor, part, columns,
    /// range, out)` reads: part 0 is the parameters, part k the k-th of [`Sharded::state_names`].
    /// The range counts flat elements of the tensor, or of these columns of it if there are any.
    /// Collective: each rank reads a share, the ranges of [`Sharded::restored`].
    ///
    /// # Errors
    /// Returns the first error of `read` or of the device on this rank, or an error if a message
    /// between ranks failed.
    pub fn restore(
        &mut self,
        mut read: impl FnMut(&str, usize, Option<&Range<usize>>, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let mut source = Source { read: &mut read, failed: None };
        self.restore_from(&mut source)?;
        source.failed.map_or(Ok(()), Err)
    }

    fn restore_from(&mut self, source: &mut Source<'_>) -> Result<()> {
        if let Some(tables) = &mut self.host_units {
            tables.restore_from(source)?;
        }
        for _ in 0..self.replicas_here() {
            self.restore_replica(source)?;
            self.next_replica();
        }
        Ok(())
    }

    /// Restores the current replica.
    fn restore_replica(&mut self, source: &mut Source<'_>) -> Result<()> {
        let share = self.share();
        let backend = &self.backend;
        let params = self.policy.params;
        let of_data = Exchange { group: &self.groups.data, share: &share, storage: self.storage };
        let of_replicas = Exchange { group: &self.groups.replica, ..of_data };
        for unit in &mut self.units {
            let layout = &unit.layout;
            // The old parameters are freed before the new ones are allocated.
            unit.params.wait()?;
            unit.params = BufferState::Freed;
            if params == Lifetime::Step {
                let full = source.full(layout, &of_data)?;
                let uploaded = backend.upload(MemoryKind::Parameters, &full);
                source.keep_error(uploaded.map(|full| unit.params = BufferState::InMemory(full)));
            }
            let mut parts = VecDeque::from(unit.owner.restored_parts());
            let restored = unit.owner.restore(|part, range| {
                parts.pop_front();
                source.owned(layout, part, range, &of_replicas)
            });
            source.keep_error(restored);
            // The other ranks wait for the messages of the remaining parts.
            for part in parts {
                source.owned(layout, part, unit.owner.range(), &of_replicas)?;
            }
        }
        for guest in &mut self.tied_replicas {
            let full = source.full(&guest.layout, &of_data)?;
            source.keep_error(guest.set(backend, params, &full));
        }
        Ok(())
    }

    /// Returns this rank's share of every unit.
    fn share(&self) -> Share {
        let shard = [self.groups.shard.rank(), self.groups.shard.size()];
        let replicas = self.groups.replica.size();
        Share {
            shard,
            replicas,
            parts: self.virtual_shards(&self.groups.replica),
            of: self.parts(),
        }
    }
}

/// The part of every unit that a rank reads, which is the part that it saves.
struct Share {
    /// The index of the shard, and the number of shards.
    shard: [usize; 2],
    /// The number of replicas.
    replicas: usize,
    /// The virtual shards; none on a rank that owns nothing.
    parts: Range<usize>,
    /// The number of all virtual shards.
    of: usize,
}

impl Share {
    /// Returns the range of a unit.
    fn range_of(&self, layout: &UnitLayout) -> Range<usize> {
        let [shard, shards] = self.shard;
        match self.parts.is_empty() {
            true => {
                let start = layout.parts(share(self.of, shard, shards), self.of).start;
                start..start
            }
            false => layout.parts(self.parts.clone(), self.of),
        }
    }

    /// Returns the most elements of a unit that a rank reads.
    fn longest(&self, layout: &UnitLayout, storage: Storage) -> usize {
        let of_shard = self.of.div_ceil(self.shard[1]);
        let of_rank = match storage {
            Storage::Ranks => of_shard.div_ceil(self.replicas),
            Storage::Central => of_shard,
        };
        layout.parts(0..of_rank, self.of).len()
    }
}

/// The ranks that store the same values and exchange them.
struct Exchange<'a, B: Kernels> {
    group: &'a Group<B>,
    share: &'a Share,
    storage: Storage,
}

/// The source of the values to restore.
struct Source<'a> {
    read: &'a mut Read<'a>,
    /// The first error of this rank.
    failed: Option<Error>,
}

impl Source<'_> {
    /// Keeps the error of a result, if it is the first.
    fn keep_error(&mut self, done: Result<()>) {
        self.failed = self.failed.take().or(done.err());
    }

    /// Returns the parameters of a whole unit.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    fn full<B: Kernels>(
        &mut self,
        layout: &UnitLayout,
        exchange: &Exchange<'_, B>,
    ) -> Result<Vec<f32>> {
        let longest = exchange.share.longest(layout, exchange.storage);
        self.values(layout, 0, 0..layout.padded, exchange, longest)
    }

    /// Returns a part of a unit's owned range.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    fn owned<B: Kernels>(
        &mut self,
        layout: &UnitLayout,
        part: usize,
        range: Range<usize>,
        exchange: &Exchange<'_, B>,
    ) -> Result<Vec<f32>> {
        let longest = match exchange.storage {
            Storage::Ranks => exchange.share.longest(layout, Storage::Ranks),
            // The range has only one owner.
            Storage::Central => 0,
        };
        self.values(layout, part, range, exchange, longest)
    }

    /// Returns the values of `range`, of which each rank of the group reads its share of at most
    /// `longest` elements.
    fn values<B: Kernels>(
        &mut self,
        layout: &UnitLayout,
        part: usize,
        range: Range<usize>,
        exchange: &Exchange<'_, B>,
        longest: usize,
    ) -> Result<Vec<f32>> {
        let mut values = vec![0.0; range.len()];
        let share = exchange.share.range_of(layout);
        let mine =
            share.start.clamp(range.start, range.end)..share.end.clamp(range.start, range.end);
        if self.failed.is_none() {
            let read = self.read(
                layout,
                part,
                &mine,
                &mut values[mine.start - range.start..][..mine.len()],
            );
            self.keep_error(read);
        }
        let group = exchange.group.with_label(&layout.name);
        let chunk = (CHUNK / group.size()).max(1);
        let steps = if group.size() == 1 { 0 } else { longest.div_ceil(chunk) };
        for step in 0..steps {
            let sent = (mine.start + step * chunk).min(mine.end)
                ..(mine.start + (step + 1) * chunk).min(mine.end);
            let message =
                message(sent.start, &values[sent.start - range.start..sent.end - range.start]);
            for theirs in group.gather_bytes(message).wait()? {
                put(&theirs, &range, &mut values)?;
            }
        }
        Ok(values)
    }

    /// Reads a range of a unit into `out`.
    fn read(
        &mut self,
        layout: &UnitLayout,
        part: usize,
        range: &Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        for piece in layout.stored(range.clone()) {
            let tensor = &piece.tensor.name;
            let columns = piece.columns.as_ref();
            (self.read)(tensor, part, columns, piece.of_tensor, &mut out[piece.of_owned])?;
        }
        Ok(())
    }
}

/// Encodes the elements of a unit from `start` on as a message.
fn message(start: usize, values: &[f32]) -> Vec<u8> {
    [&(start as u64).to_le_bytes()[..], bytemuck::cast_slice(values)].concat()
}

/// Copies the elements of a message to their place in the values of `range`.
fn put(message: &[u8], range: &Range<usize>, values: &mut [f32]) -> Result<()> {
    let len = message.len();
    let malformed =
        || Error::comm(format!("a malformed message of {len} bytes for values of {range:?}"));
    let (start, sent) = message.split_first_chunk().ok_or_else(malformed)?;
    let start = u64::from_le_bytes(*start) as usize;
    let first = start.checked_sub(range.start).ok_or_else(malformed)?;
    let into: &mut [u8] = bytemuck::cast_slice_mut(values);
    let into = into.get_mut(first * size_of::<f32>()..).and_then(|into| into.get_mut(..sent.len()));
    into.ok_or_else(malformed)?.copy_from_slice(sent);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_put_in_place_or_refused() {
        let mut values = [0.0; 4];
        put(&message(11, &[1.0, 2.0]), &(10..14), &mut values).unwrap();
        put(&message(10, &[]), &(10..14), &mut values).unwrap();
        assert_eq!(values, [0.0, 1.0, 2.0, 0.0]);
        for refused in [message(9, &[1.0]), message(13, &[1.0, 2.0]), message(15, &[]), vec![1, 2]]
        {
            assert_eq!(
                put(&refused, &(10..14), &mut values).unwrap_err().kind(),
                hpctrain_base::error::Kind::Comm
            );
        }
        assert_eq!(values, [0.0, 1.0, 2.0, 0.0]);
    }
}
