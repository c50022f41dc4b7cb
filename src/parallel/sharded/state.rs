//! Parameters and optimizer state for checkpoints.

use std::ops::Range;

use super::Sharded;
use crate::fsdp_unit::Unit;
use crate::owned::Owned;
use hpctrain_base::error::Result;
use hpctrain_device::Kernels;

impl<B: Kernels> Sharded<B> {
    /// Returns the parts of the units that only this rank writes to a checkpoint; none if it owns
    /// nothing. With local SGD they are those of the current replica; after an average all are
    /// equal.
    ///
    /// # Errors
    /// Returns an error if an all-gather in flight fails.
    pub fn owned(&mut self) -> Result<Vec<Owned<'_, B>>> {
        let shards = self.virtual_shards(&self.groups.replica);
        if shards.is_empty() {
            return Ok(vec![]);
        }
        let total = self.parts();
        for unit in &mut self.units {
            unit.params.wait()?;
        }
        let mut owned = Self::owned_on_host(self.host_units.as_mut())?;
        for unit in &self.units {
            owned.push(unit.owned(&shards, total)?);
        }
        Ok(owned)
    }
}

impl<B: Kernels> Unit<B> {
    /// Returns the virtual shards `shards` of `total`, of which there is at least one.
    pub(super) fn owned(&self, shards: &Range<usize>, total: usize) -> Result<Owned<'_, B>> {
        let range = self.layout.parts(shards.clone(), total);
        let (params, state) = self.owner.values(range.clone(), self.params.get())?;
        Ok(Owned { layout: &self.layout, range, params, state })
    }
}
