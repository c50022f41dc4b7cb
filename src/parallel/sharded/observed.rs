//! Gradients of a step as observers of tensors see them: before the virtual ranks are added, and
//! after the reduction.

use super::Sharded;
use super::host_units::HostUnits;
use crate::fsdp_unit::Reduction;
use hpctrain_base::error::Result;
use hpctrain_base::layout::UnitLayout;
use hpctrain_device::Kernels;

/// Takes the index and the layout of a unit, the name of a tensor, and a part of its gradient.
type VisitGradient<'a> = dyn FnMut(usize, &UnitLayout, &str, &[f32]) -> Result<()> + 'a;

/// The gradient of a unit for a virtual rank that has not ended.
pub struct OpenGradient<'a, B: Kernels> {
    /// The unit's layout.
    pub layout: &'a UnitLayout,
    /// The gradient of the whole unit.
    pub own: B::View<'a>,
    /// The gradient of the tensor of another unit that the block is tied to, with its name.
    pub tied: Option<(&'a str, &'a B::Buf)>,
}

impl<B: Kernels> Sharded<B> {
    /// Returns the gradient of unit `unit` that the backwards of the current virtual rank have
    /// added so far; `None` if there is none.
    pub fn open_gradient(&self, unit: usize) -> Option<OpenGradient<'_, B>> {
        let found = self.units.get(unit)?;
        let own = B::all(found.grads.as_ref()?);
        let lender = self.stage.tied_imports[unit].and_then(|loan| self.layout_of_slot(loan.slot));
        let tied = lender
            .and_then(|layout| layout.tensors.first())
            .zip(found.tied_grads.as_ref())
            .map(|(tensor, grads)| (tensor.name.as_str(), grads));
        Some(OpenGradient { layout: &found.layout, own, tied })
    }

    /// Returns the layout of the unit in a slot.
    fn layout_of_slot(&self, slot: usize) -> Option<&UnitLayout> {
        match slot.checked_sub(self.units.len()) {
            None => self.units.get(slot).map(|unit| &unit.layout),
            Some(replica) => self.tied_replicas.get(replica).map(|replica| &replica.layout),
        }
    }

    /// Returns the number of units on the host, which are before those of the stage.
    pub fn units_before(&self) -> usize {
        self.stage.units.start - self.first_unit()
    }

    /// Calls `visit` with the index of each unit, those on the host first, and the names and values
    /// of the parts of its reduced gradient that only this rank reports, between
    /// [`Sharded::reduce`] and the update. Gradients that are on the host already
    /// (`offload.optimizer`) are omitted, and so are rows without a gradient.
    ///
    /// # Errors
    /// Returns an error if the device fails, or `visit` returns one.
    pub fn visit_reduced(&self, visit: &mut VisitGradient<'_>) -> Result<()> {
        match &self.host_units {
            Some(HostUnits::Dense(units)) => units.visit_reduced(visit)?,
            Some(HostUnits::Sparse(tables)) => {
                for (tensor, values, _) in tables.own_gradients()? {
                    visit(0, tables.layout(), tensor, values)?;
                }
            }
            None => {}
        }
        let before = self.units_before();
        let shards = self.virtual_shards(&self.groups.step.replica);
        if shards.is_empty() {
            return Ok(());
        }
        let parts = self.parts();
        for (index, unit) in self.units.iter().enumerate() {
            let owned = unit.owner.range();
            let Some(Reduction::Done(sum)) = &unit.reduction else { continue };
            if sum.window.len() != owned.len() {
                continue;
            }
            let first = unit.layout.part(shards.start, parts).start;
            let mine = first..unit.layout.part(shards.end - 1, parts).end;
            let at = |element: usize| element - owned.start + sum.window.start;
            let mut host = vec![0.0; mine.len()];
            self.backend.download(B::view(&sum.grad, at(mine.start)..at(mine.end)), &mut host)?;
            for piece in unit.layout.pieces(mine) {
                visit(before + index, &unit.layout, &piece.tensor.name, &host[piece.of_owned])?;
            }
        }
        Ok(())
    }
}
