//! Restores from a checkpoint: every rank reads a share of the values, the part that it would save,
//! and sends it to the ranks that store the same values. All ranks together read the checkpoint
//! once, regardless of the layout.
//!
//! A rank whose device fails continues with zeros until the last message, as one that cannot read
//! does ([`Source`]).

use std::collections::VecDeque;
use std::ops::Range;

use super::Sharded;
use super::host_units::HostUnits;
use crate::fsdp_unit::BufferState;
use crate::restore_source::Source;
use crate::{Lifetime, Storage};
use hpctrain_base::error::Result;
use hpctrain_base::layout::{TensorRange, UnitLayout, share};
use hpctrain_comm::Group;
use hpctrain_device::{Kernels, MemoryKind};

impl<B: Kernels> Sharded<B> {
    /// Returns the ranges that [`Sharded::restore`] reads on this rank.
    pub fn restored(&self) -> Vec<TensorRange> {
        let share = self.share();
        let mut ranges = self.host_units.as_ref().map_or(vec![], HostUnits::restored);
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

    pub(super) fn restore_from(&mut self, source: &mut Source<'_>) -> Result<()> {
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
                let full = of_data.full(source, layout)?;
                let uploaded = backend.upload(MemoryKind::Parameters, &full);
                source.keep_error(uploaded.map(|full| unit.params = BufferState::InMemory(full)));
            }
            let mut parts = VecDeque::from(unit.owner.restored_parts());
            let restored = unit.owner.restore(|part, range| {
                parts.pop_front();
                of_replicas.owned(source, layout, part, range)
            });
            source.keep_error(restored);
            // The other ranks wait for the messages of the remaining parts.
            for part in parts {
                of_replicas.owned(source, layout, part, unit.owner.range())?;
            }
        }
        for guest in &mut self.tied_replicas {
            let full = of_data.full(source, &guest.layout)?;
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

impl<B: Kernels> Exchange<'_, B> {
    /// Returns the parameters of a whole unit.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    fn full(&self, source: &mut Source<'_>, layout: &UnitLayout) -> Result<Vec<f32>> {
        let longest = self.share.longest(layout, self.storage);
        self.values(source, layout, 0, 0..layout.padded, longest)
    }

    /// Returns a part of a unit's owned range.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    fn owned(
        &self,
        source: &mut Source<'_>,
        layout: &UnitLayout,
        part: usize,
        range: Range<usize>,
    ) -> Result<Vec<f32>> {
        let longest = match self.storage {
            Storage::Ranks => self.share.longest(layout, Storage::Ranks),
            // The range has only one owner.
            Storage::Central => 0,
        };
        self.values(source, layout, part, range, longest)
    }

    /// Returns the values of `range`, of which each rank of the group reads its share of at most
    /// `longest` elements.
    fn values(
        &self,
        source: &mut Source<'_>,
        layout: &UnitLayout,
        part: usize,
        range: Range<usize>,
        longest: usize,
    ) -> Result<Vec<f32>> {
        let share = self.share.range_of(layout);
        let mine =
            share.start.clamp(range.start, range.end)..share.end.clamp(range.start, range.end);
        source.gathered(layout, part, range, mine, self.group, longest)
    }
}
