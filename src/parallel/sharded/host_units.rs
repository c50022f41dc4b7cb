//! Embedding tables in host memory, whose rows the host looks up for a device.
//!
//! They are a separate [`Sharded`] of the CPU backend, or [`SparseTables`], over groups of the same
//! ranks. The engine computes with them directly; everything that is done to all units between two
//! steps (norm, update, SDC check, checkpoint) goes through the [`Sharded`] of the device.

use std::ops::Range;
use std::sync::Arc;

use super::Sharded;
use crate::optimizer_shard::Values;
use crate::owned::{Histograms, Owned};
use crate::pipeline_schedule::StepSchedule;
use crate::restore_source::Source;
use crate::sparse::{SparseRows, SparseTables, SquareSum};
use crate::step_params::Hyper;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::TensorRange;
use hpctrain_cpu::Cpu;
use hpctrain_device::Kernels;

/// The network's first unit, embedding tables, in host memory.
pub enum HostUnits {
    /// Gradients and updates are those of all rows.
    Dense(Box<Sharded<Cpu>>),
    /// Gradients and updates are those of the rows of the batch.
    Sparse(Box<SparseTables>),
}

impl HostUnits {
    /// Returns the name of the unit.
    pub fn name(&self) -> Arc<str> {
        match self {
            Self::Dense(units) => units.name(0).clone(),
            Self::Sparse(tables) => tables.layout().name.clone(),
        }
    }

    /// Takes the turn of the unit in a forward without computing it, so that this rank takes part
    /// in messages of the others.
    ///
    /// # Errors
    /// Returns an error if a message fails.
    pub fn skip_forward(&mut self) -> Result<()> {
        match self {
            Self::Dense(units) => units.skip_turn(0),
            Self::Sparse(tables) => tables.skip_rows(),
        }
    }

    /// Takes the turn of the unit in a backward, as [`HostUnits::skip_forward`] does in a forward.
    ///
    /// # Errors
    /// Returns an error if a message fails.
    pub fn skip_backward(&mut self) -> Result<()> {
        match self {
            Self::Dense(units) => units.skip_turn(0),
            Self::Sparse(_) => Ok(()),
        }
    }

    pub(super) fn begin_step(&mut self, schedule: StepSchedule) {
        if let Self::Dense(units) = self {
            units.begin_step(schedule);
        }
    }

    pub(super) fn begin_forward(&mut self) {
        if let Self::Dense(units) = self {
            units.begin_forward();
        }
    }

    /// Returns the squared norms of these virtual shards, and of sparse tables that of the rows for
    /// which this rank answers.
    pub(super) fn squares(
        &mut self,
        shards: &Range<usize>,
    ) -> Result<(Vec<f64>, Option<SquareSum>)> {
        match self {
            Self::Dense(units) => Ok((units.squares()?.0.values, None)),
            Self::Sparse(tables) => Ok((vec![0.0; shards.len()], Some(tables.squares()?))),
        }
    }

    pub(super) fn update(&mut self, hyper: Hyper) -> Result<()> {
        match self {
            Self::Dense(units) => units.update(hyper),
            Self::Sparse(tables) => tables.update(hyper),
        }
    }

    pub(super) fn skip(&mut self) -> Result<()> {
        match self {
            Self::Dense(units) => units.skip(),
            Self::Sparse(tables) => {
                tables.skip();
                Ok(())
            }
        }
    }

    pub(super) fn swap_ema(&mut self) -> Result<()> {
        match self {
            Self::Dense(units) => units.swap_ema(),
            Self::Sparse(_) => Err(no("an EMA")),
        }
    }

    pub(super) fn owned(&mut self) -> Result<Vec<Owned<'_, Cpu>>> {
        match self {
            Self::Dense(units) => units.owned(),
            Self::Sparse(tables) => Ok(tables.owned()?.into_iter().collect()),
        }
    }

    pub(super) fn restored(&self) -> Vec<TensorRange> {
        match self {
            Self::Dense(units) => units.restored(),
            Self::Sparse(tables) => tables.restored(),
        }
    }

    pub(super) fn restore_from(&mut self, source: &mut Source<'_>) -> Result<()> {
        match self {
            Self::Dense(units) => units.restore_from(source),
            Self::Sparse(tables) => tables.restore_from(source),
        }
    }

    pub(super) fn count_gradients_of(&mut self, step: u64) {
        match self {
            Self::Dense(units) => units.count_gradients_of(step),
            Self::Sparse(tables) => tables.count_gradients_of(step),
        }
    }

    pub(super) fn count_gradients(&mut self, step: u64) -> Result<()> {
        match self {
            Self::Dense(units) => units.count_gradients(step),
            Self::Sparse(tables) => tables.count_gradients(step),
        }
    }

    pub(super) fn counted_gradients(&mut self) -> Histograms {
        match self {
            Self::Dense(units) => units.counted_gradients(),
            Self::Sparse(tables) => tables.counted_gradients(),
        }
    }

    pub(super) fn suspect_since(&self) -> Option<u64> {
        match self {
            Self::Dense(units) => units.suspect_since(),
            Self::Sparse(_) => None,
        }
    }

    /// Returns the units, for SDC checks, which sparse tables do not support.
    pub(super) fn with_sdc_checks(&mut self) -> Option<&mut Sharded<Cpu>> {
        match self {
            Self::Dense(units) => Some(units),
            Self::Sparse(_) => None,
        }
    }
}

/// Returns the error for something that sparse tables do not have. Configurations with it are
/// refused, so it is a bug.
fn no(what: &str) -> Error {
    Error::internal(format!("tables with sparse updates have no {what}"))
}

impl<B: Kernels> Sharded<B> {
    /// Adds the units before its stage, which are on the host.
    #[must_use]
    pub fn with_host_units(self, tables: HostUnits) -> Self {
        Self { host_units: Some(tables), ..self }
    }

    /// Returns the units on the host.
    ///
    /// # Errors
    /// Returns an error if there are none.
    pub fn host_units(&mut self) -> Result<&mut HostUnits> {
        self.host_units
            .as_mut()
            .ok_or_else(|| Error::internal("no embedding tables are in host memory"))
    }

    /// Returns the reduced gradient of tables with sparse updates.
    ///
    /// # Errors
    /// Returns an error if there are none, or the gradient was not reduced.
    pub fn table_gradient(&self) -> Result<&SparseRows> {
        match &self.host_units {
            Some(HostUnits::Sparse(tables)) => tables.gradient(),
            _ => Err(Error::internal("no embedding tables have sparse updates")),
        }
    }

    /// Returns the first of the network's units that this rank's stage has, on the device or on the
    /// host.
    pub fn first_unit(&self) -> usize {
        // The tables are the first unit of the network.
        if self.host_units.is_some() { 0 } else { self.stage.units.start }
    }

    /// Returns the owned parts of the units on the host, as [`Sharded::owned`] does.
    pub(super) fn owned_on_host(tables: Option<&mut HostUnits>) -> Result<Vec<Owned<'_, B>>> {
        let units = tables.map_or(Ok(vec![]), HostUnits::owned)?.into_iter();
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
