//! Embedding offload: units on the host, whose rows the host looks up for a device.
//!
//! They are a separate [`Sharded`] of the CPU backend, over groups of the same ranks. The engine
//! computes with it directly; everything that is done to all units between two steps (norm, update,
//! SDC check, checkpoint) goes through the [`Sharded`] of the device.

use super::{Owned, Sharded};
use crate::optimizer_shard::Values;
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::Cpu;
use hpctrain_device::Kernels;

impl<B: Kernels> Sharded<B> {
    /// Adds the units before its stage, which are on the host.
    #[must_use]
    pub fn with_host_units(self, tables: Sharded<Cpu>) -> Self {
        Self { host_units: Some(Box::new(tables)), ..self }
    }

    /// Returns the units on the host.
    ///
    /// # Errors
    /// Returns an error if there are none.
    pub fn host_units(&mut self) -> Result<&mut Sharded<Cpu>> {
        self.host_units
            .as_deref_mut()
            .ok_or_else(|| Error::internal("no embedding tables are offloaded"))
    }

    /// Returns the first of the network's units that this rank's stage has, on the device or on the
    /// host.
    pub fn first_unit(&self) -> usize {
        self.host_units.as_ref().map_or(self.stage.units.start, |tables| tables.stage.units.start)
    }

    /// Returns the owned parts of the units on the host, as [`Sharded::owned`] does.
    pub(super) fn owned_on_host(tables: Option<&mut Sharded<Cpu>>) -> Result<Vec<Owned<'_, B>>> {
        let units = tables.map_or(Ok(vec![]), Sharded::owned)?.into_iter();
        Ok(units
            .map(|Owned { layout, range, params, state }| Owned {
                layout,
                range,
                params: on_host(params),
                state: state.into_iter().map(on_host).collect(),
            })
            .collect())
    }
}

/// Converts values of the CPU backend to host values of a device.
fn on_host<B: Kernels>(values: Values<'_, Cpu>) -> Values<'_, B> {
    match values {
        Values::Device(cpu, values) | Values::Host(cpu, values) => Values::Host(cpu, values),
    }
}
