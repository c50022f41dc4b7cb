//! Parameters and optimizer state for checkpoints, and from them.

use std::ops::Range;

use super::Sharded;
use crate::backend::{Kernels, MemoryKind};
use crate::error::{Error, Result};
use crate::layout::UnitLayout;
use crate::parallel::Life;
use crate::parallel::shard_owner::Values;
use crate::parallel::unit::Slot;

/// Gives the values of a range of a tensor, as [`Sharded::restore`] has it.
type Read<'a> = dyn FnMut(&str, usize, Option<&Range<usize>>, Range<usize>, &mut [f32]) -> Result<()> + 'a;

/// The owned part of a unit, for checkpoints.
pub struct Owned<'a, B: Kernels> {
    /// The unit's layout.
    pub layout: &'a UnitLayout,
    /// The range of the unit that this view covers.
    pub range: Range<usize>,
    /// Its parameters.
    pub params: Values<'a, B>,
    /// Its optimizer state, one for each of [`Sharded::state_names`].
    pub state: Vec<Values<'a, B>>,
}

impl<B: Kernels> Sharded<B> {
    /// The parts of the units that this rank, and no other, writes to a checkpoint; none where it owns nothing. Of replicas that train apart it is the one
    /// whose turn it is; after an average all are equal.
    ///
    /// # Errors
    /// A gather under way failed.
    pub fn owned(&mut self) -> Result<Vec<Owned<'_, B>>> {
        let shards = self.virtual_shards(&self.groups.replica);
        if shards.is_empty() {
            return Ok(vec![]);
        }
        let total = self.parts();
        for unit in &mut self.units {
            unit.params.land()?;
        }
        let mut owned = Self::owned_on_host(self.tables.as_deref_mut())?;
        for unit in &self.units {
            let range = unit.layout.part(shards.start, total).start..unit.layout.part(shards.end - 1, total).end;
            let (params, state) = unit.owner.values(range.clone(), unit.params.here())?;
            owned.push(Owned { layout: &unit.layout, range, params, state });
        }
        Ok(owned)
    }

    /// Replaces parameters and optimizer state by the values that `read(tensor, part, columns, range, out)` gives for
    /// every range of every tensor that this rank stores: part 0 is the parameters, part k the k-th of
    /// [`Sharded::state_names`]. The range counts flat elements of the tensor, or of these columns of it if there are any.
    ///
    /// # Errors
    /// Of `read`, or of the device.
    pub fn restore(
        &mut self,
        mut read: impl FnMut(&str, usize, Option<&Range<usize>>, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        self.restore_by(&mut read)
    }

    fn restore_by(&mut self, read: &mut Read<'_>) -> Result<()> {
        if let Some(tables) = &mut self.tables {
            tables.restore_by(read)?;
        }
        for _ in 0..self.replicas_here() {
            self.restore_replica(read)?;
            self.next_replica();
        }
        Ok(())
    }

    /// As [`Sharded::restore`], of the replica whose turn it is.
    fn restore_replica(&mut self, read: &mut Read<'_>) -> Result<()> {
        let backend = &self.backend;
        let mut load_of = |layout: &UnitLayout, part, range: Range<usize>| {
            let mut host = vec![0.0; range.len()];
            for piece in layout.stored(range) {
                let (tensor, columns) = (&piece.tensor.name, piece.columns.as_ref());
                read(tensor, part, columns, piece.of_tensor, &mut host[piece.of_owned])?;
            }
            Ok::<_, Error>(host)
        };
        for unit in &mut self.units {
            let layout = &unit.layout;
            let mut load = |part, range| load_of(layout, part, range);
            // Old and new ones of a unit are not there at once.
            unit.params.land()?;
            unit.params = Slot::Gone;
            unit.params = match self.keep.params {
                Life::Step => Slot::Here(backend.upload(MemoryKind::Parameters, &load(0, 0..layout.padded)?)?),
                Life::Use => Slot::Gone,
            };
            unit.owner.restore(load)?;
        }
        for guest in &mut self.guests {
            let full = load_of(&guest.layout, 0, 0..guest.layout.padded)?;
            guest.set(backend, self.keep.params, &full)?;
        }
        Ok(())
    }
}
