//! Parameters and optimizer state of a range that live on the host, though a GPU computes.
//!
//! The range's traffic goes through one slot of page-locked memory, by turns: the gradient comes
//! down as soon as it is reduced, beside compute; the CPU's kernels update the range from it; the
//! new parameters take its place, rounded to the device's type, and go up. Rounding on the host
//! halves the bytes that go up with bf16; it reads a fourth of the bytes that the update reads.
//! While the CPU updates one range, gradients of the next and parameters of the one before may be
//! on their way.
//!
//! Only slots are page-locked: the CPU alone reads masters and moments.
//!
//! Fetching begins before the norm of the step is known. `ComputeOrderedCopies` orders copies and
//! compute on the device itself, so no host thread waits to start a copy. The share of the copies
//! that compute hides has not been measured.
//!
//! The host takes four bytes an owned parameter for the master, for each buffer of optimizer state
//! and for the slot: 16 with AdamW. Updates on the CPU and on the device round every operation
//! separately and in the same order, so the place of the state does not change any bit. LAMB and
//! LARS multiply by a ratio of norms that the host adds up in f64 in another order than the device;
//! rounded to f32 it has been the same in every test. Checkpoints read the state where it is and do
//! not record its place.

use std::ops::Range;
use std::sync::Arc;

use super::device_state::{DeviceState, Recipe};
use super::step_params::{Hyper, state_names};
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::Cpu;
use hpctrain_device::{
    Backend as _, CommBuffer, ComputeOrderedCopies, ElementwiseOps, Kernels, MemoryKind, Slot,
};
use hpctrain_nn::optim::Pair;

/// The host's side of a device: the CPU that updates in its stead, and the copies between them.
#[derive(Clone)]
pub struct HostUpdater {
    cpu: Cpu,
    /// None where the device's buffers are host memory.
    copies: Option<Arc<dyn ComputeOrderedCopies>>,
}

impl HostUpdater {
    /// The host of `backend`, which updates with `cpu`.
    ///
    /// # Errors
    /// The device failed.
    pub fn new<B: Kernels>(backend: &B, cpu: Cpu) -> Result<Self> {
        Ok(Self { cpu, copies: backend.copies()? })
    }

    /// All that compute requests from now on finds the parameters that were started to be brought
    /// up.
    ///
    /// # Errors
    /// The device failed.
    pub fn arrived(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.before_compute())
    }

    /// The gradients that were fetched may be freed: all that compute requests from now on comes
    /// after their copies.
    ///
    /// # Errors
    /// The device failed.
    pub fn fetched(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.after_downloads())
    }

    fn copies(&self) -> Result<&dyn ComputeOrderedCopies> {
        self.copies.as_deref().ok_or_else(|| Error::internal("a device that nothing copies to"))
    }
}

/// Contents of the slot of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OffloadTransfer {
    Nothing,
    /// The reduced gradient of a step, to be used.
    Gradient,
    /// The parameters as they are, in the device's type.
    Parameters,
}

/// A range on the host.
pub struct Offloaded<B: Kernels> {
    /// The device that computes.
    backend: B,
    host: HostUpdater,
    held: DeviceState<Cpu>,
    slot: Slot,
    cargo: OffloadTransfer,
    /// Elements.
    len: usize,
    /// Bytes, as they are counted.
    bytes: usize,
}

impl<B: Kernels> Offloaded<B> {
    /// Parameters `values` with fresh optimizer state.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(backend: &B, host: &HostUpdater, recipe: Recipe, values: &[f32]) -> Result<Self> {
        let len = values.len();
        let slot = match &host.copies {
            Some(copies) => Slot::new(&**copies, len)?,
            None => Slot::of(Box::new(vec![0.0; len])),
        };
        // The outer step's starting point is one more.
        let states = state_names(recipe.rule, recipe.average, recipe.outer).len()
            + usize::from(recipe.outer.is_some());
        let bytes = bytes(states, len);
        let held = DeviceState::new(&host.cpu, recipe, values, true)?;
        backend.ledger().take(MemoryKind::Offloaded, bytes);
        Ok(Self {
            backend: backend.clone(),
            host: host.clone(),
            held,
            slot,
            cargo: OffloadTransfer::Nothing,
            len,
            bytes,
        })
    }

    /// The state on the host.
    pub fn held(&self) -> &DeviceState<Cpu> {
        &self.held
    }

    /// The state on the host, to be audited.
    pub fn held_mut(&mut self) -> &mut DeviceState<Cpu> {
        &mut self.held
    }

    /// The reduced gradient is there: starts to bring it down. It must stay as it is until the
    /// update.
    ///
    /// # Errors
    /// The device failed.
    pub fn fetch(&mut self, grad: CommBuffer<'_>) -> Result<()> {
        match grad {
            CommBuffer::Host(grad) => self.slot.memory()?[..self.len].copy_from_slice(grad),
            CommBuffer::Device(grad, _) => {
                let copies = self.host.copies()?;
                copies.after_compute()?;
                self.slot.download(copies, &[(grad, 0)])?;
            }
        }
        self.cargo = OffloadTransfer::Gradient;
        Ok(())
    }

    /// The gradient is not to be used.
    pub fn forget(&mut self) {
        self.cargo = OffloadTransfer::Nothing;
    }

    /// As [`DeviceState::squares`], of the gradient that was fetched.
    ///
    /// # Errors
    /// The device failed.
    pub fn squares(
        &mut self,
        hyper: Hyper,
        range: Range<usize>,
    ) -> Result<Vec<(usize, Pair<f64>)>> {
        self.has_gradient()?;
        self.held.squares(
            hyper,
            range,
            &self.slot.memory()?[..self.len],
            self.held.master()?.as_slice(),
        )
    }

    /// Updates the parameters from the gradient that was fetched; `trust` as in
    /// [`DeviceState::update`].
    ///
    /// # Errors
    /// The device failed.
    pub fn update(&mut self, hyper: Hyper, trust: &[f32]) -> Result<()> {
        self.has_gradient()?;
        self.held.update(hyper, trust, &self.slot.memory()?[..self.len], None)?;
        self.load()
    }

    fn has_gradient(&self) -> Result<()> {
        match self.cargo {
            OffloadTransfer::Gradient => Ok(()),
            _ => Err(Error::internal("an update without a gradient on the host")),
        }
    }

    /// As [`DeviceState::swap`].
    ///
    /// # Errors
    /// The device failed.
    pub fn swap_ema(&mut self) -> Result<()> {
        self.held.swap_ema(None)?;
        self.load()
    }

    /// As [`DeviceState::share`], to the device.
    ///
    /// # Errors
    /// The device failed.
    pub fn scaled_state(&self, rate: f32, to: &mut B::Buf) -> Result<()> {
        let mut mine = self.host.cpu.alloc_f32(MemoryKind::Offloaded, B::len(to))?;
        self.held.scaled_state(rate, None, &mut mine)?;
        self.backend.write(mine.as_slice(), B::all_mut(to))
    }

    /// As [`DeviceState::adopt`], from the device.
    ///
    /// # Errors
    /// The device failed.
    pub fn apply_average(&mut self, mean: B::View<'_>) -> Result<()> {
        let mut host =
            self.host.cpu.alloc_f32(MemoryKind::Offloaded, self.len * self.held.averaged())?;
        self.backend.download(mean, host.as_mut_slice())?;
        self.held.apply_average(Cpu::all(&host), self.len, None)?;
        self.load()
    }

    /// Brings the parameters up: work that compute requests from now on waits for them.
    ///
    /// # Errors
    /// The device failed.
    pub fn copy_into(&mut self, full: CommBuffer<'_>) -> Result<()> {
        self.begin_copy_into(full)?;
        self.host.arrived()
    }

    /// Starts to bring the parameters up. Compute may read them after [`HostUpdater::arrived`].
    ///
    /// # Errors
    /// The device failed.
    pub fn begin_copy_into(&mut self, full: CommBuffer<'_>) -> Result<()> {
        match self.cargo {
            OffloadTransfer::Parameters => {}
            OffloadTransfer::Nothing => self.load()?,
            OffloadTransfer::Gradient => {
                return Err(Error::internal("parameters wanted before their update"));
            }
        }
        match full {
            CommBuffer::Host(full) => full.copy_from_slice(&self.slot.memory()?[..self.len]),
            CommBuffer::Device(full, _) => {
                let copies = self.host.copies()?;
                // The buffer's memory may have been another's, which kernels still use.
                copies.after_compute()?;
                self.slot.upload(copies, &[(full, 0)])?;
            }
        }
        Ok(())
    }

    /// As [`DeviceState::restore`].
    ///
    /// # Errors
    /// Of `load`.
    pub fn restore(&mut self, load: impl FnMut(usize) -> Result<Vec<f32>>) -> Result<()> {
        self.cargo = OffloadTransfer::Nothing;
        self.held.restore(load)
    }

    /// Puts the parameters into the slot.
    fn load(&mut self) -> Result<()> {
        let master = self.held.master()?.as_slice();
        let words = self.slot.memory()?;
        match self.backend.has_master_weights() {
            true => self.host.cpu.narrow(master, words),
            false => self.host.cpu.copy(master, &mut words[..self.len])?,
        }
        self.cargo = OffloadTransfer::Parameters;
        Ok(())
    }
}

impl<B: Kernels> Drop for Offloaded<B> {
    fn drop(&mut self) {
        self.backend.ledger().give(MemoryKind::Offloaded, self.bytes);
    }
}

/// Bytes on the host for so many elements with so many buffers of state: masters, state and the
/// slot.
pub fn bytes(states: usize, len: usize) -> usize {
    (2 + states) * len * size_of::<f32>()
}
