//! Units on the host: tables whose rows it looks up for a device.
//!
//! They are a [`Sharded`] of their own, of the host's backend, over groups of the same ranks. The
//! engine computes with it; all that is done to every unit between two steps - norm, update, audit,
//! checkpoint - passes through the device's one.

use super::{Owned, Sharded};
use crate::optimizer_shard::Values;
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::Cpu;
use hpctrain_device::Kernels;

impl<B: Kernels> Sharded<B> {
    /// The same, with the units before its stage on the host.
    #[must_use]
    pub fn with_tables(self, tables: Sharded<Cpu>) -> Self {
        Self { tables: Some(Box::new(tables)), ..self }
    }

    /// The units on the host.
    ///
    /// # Errors
    /// There are none.
    pub fn tables(&mut self) -> Result<&mut Sharded<Cpu>> {
        self.tables.as_deref_mut().ok_or_else(|| Error::internal("tables that no host has"))
    }

    /// The first of the network's units that this rank's stage has, on the device or on the host.
    pub fn first_unit(&self) -> usize {
        self.tables.as_ref().map_or(self.stage.units.start, |tables| tables.stage.units.start)
    }

    /// As [`Sharded::owned`], of the units on the host.
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

/// Values of the host's backend, as a device's owner has them.
fn on_host<B: Kernels>(values: Values<'_, Cpu>) -> Values<'_, B> {
    match values {
        Values::Device(cpu, values) | Values::Host(cpu, values) => Values::Host(cpu, values),
    }
}
