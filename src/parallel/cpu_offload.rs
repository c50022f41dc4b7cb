//! CPU offload: master weights and optimizer state of a range that live on the host while a GPU
//! computes.
//!
//! Each range has one slot of pinned memory, which is used alternately: the gradient is downloaded
//! as soon as it is reduced, overlapped with compute; the CPU updates the range from it; the new
//! parameters replace it in the slot, rounded to the device's type, and are uploaded. Rounding on
//! the host halves the bytes that are uploaded with bf16; it reads a fourth of the bytes that the
//! update reads. While the CPU updates one range, the gradient of the next and the parameters of
//! the previous one may be in flight.
//!
//! Only slots are pinned: master weights and moments are read by the CPU only.
//!
//! Downloads start before the gradient norm of the step is known. `ComputeOrderedCopies` orders
//! copies and compute on the device itself, so no host thread waits to start a copy. The fraction
//! of the copies that compute hides has not been measured.
//!
//! The host needs four bytes per owned parameter for the master weights, for each buffer of
//! optimizer state and for the slot: 16 with AdamW. Updates on the CPU and on the device round
//! every operation separately and in the same order, so offload does not change any bit. LAMB and
//! LARS multiply by a ratio of norms that the host adds up in f64 in another order than the device;
//! rounded to f32 it has been the same in every test. Checkpoints do not depend on where the state
//! is.

use std::ops::Range;
use std::sync::Arc;

use super::device_state::{DeviceState, UpdateSettings};
use super::step_params::{Hyper, state_names};
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::Cpu;
use hpctrain_device::{
    Backend as _, CommBuffer, ComputeOrderedCopies, ElementwiseOps, Kernels, MemoryKind, Slot,
};
use hpctrain_nn::optim::SquaredNorms;

/// The CPU that updates parameters instead of the device, and the copies between them.
#[derive(Clone)]
pub struct HostUpdater {
    cpu: Cpu,
    /// None if the device's buffers are host memory.
    copies: Option<Arc<dyn ComputeOrderedCopies>>,
}

impl HostUpdater {
    /// Creates the updater of `backend`, which updates with `cpu`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn new<B: Kernels>(backend: &B, cpu: Cpu) -> Result<Self> {
        Ok(Self { cpu, copies: backend.copy_streams()? })
    }

    /// Makes later compute wait for the uploads of parameters that were started.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn wait_for_uploads(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.before_compute())
    }

    /// Makes later compute wait for the downloads of gradients, so that their buffers may be freed.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn wait_for_downloads(&self) -> Result<()> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.after_downloads())
    }

    fn copies(&self) -> Result<&dyn ComputeOrderedCopies> {
        self.copies
            .as_deref()
            .ok_or_else(|| Error::internal("the device has no copies to the host"))
    }
}

/// The content of the slot of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OffloadTransfer {
    Nothing,
    /// The reduced gradient of a step, not yet used.
    Gradient,
    /// The current parameters in the device's type.
    Parameters,
}

/// A range whose parameters and optimizer state are offloaded to the host.
pub struct Offloaded<B: Kernels> {
    /// The device that computes.
    backend: B,
    host: HostUpdater,
    state: DeviceState<Cpu>,
    slot: Slot,
    content: OffloadTransfer,
    /// The number of elements.
    len: usize,
    /// The size in bytes in the memory statistics.
    bytes: usize,
}

impl<B: Kernels> Offloaded<B> {
    /// Creates a range with parameters `values` and fresh optimizer state.
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice.
    pub fn new(
        backend: &B,
        host: &HostUpdater,
        recipe: UpdateSettings,
        values: &[f32],
    ) -> Result<Self> {
        let len = values.len();
        let slot = match &host.copies {
            Some(copies) => Slot::new(&**copies, len)?,
            None => Slot::from_pinned(Box::new(vec![0.0; len])),
        };
        // The outer optimizer has another buffer for its starting point.
        let states = state_names(recipe.rule, recipe.average, recipe.outer).len()
            + usize::from(recipe.outer.is_some());
        let bytes = host_bytes(states, len);
        let state = DeviceState::new(&host.cpu, recipe, values, true)?;
        backend.memory_stats().record_alloc(MemoryKind::Offloaded, bytes);
        Ok(Self {
            backend: backend.clone(),
            host: host.clone(),
            state,
            slot,
            content: OffloadTransfer::Nothing,
            len,
            bytes,
        })
    }

    /// Returns the state on the host.
    pub fn state(&self) -> &DeviceState<Cpu> {
        &self.state
    }

    /// Returns the state on the host, for SDC checks.
    pub fn state_mut(&mut self) -> &mut DeviceState<Cpu> {
        &mut self.state
    }

    /// Starts to download the reduced gradient, which must not change until the update.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn fetch(&mut self, grad: CommBuffer<'_>) -> Result<()> {
        match grad {
            CommBuffer::Host(grad) => self.slot.memory()?[..self.len].copy_from_slice(grad),
            CommBuffer::Device(grad, _) => {
                let copies = self.host.copies()?;
                copies.after_compute()?;
                self.slot.download(copies, &[(grad, 0)])?;
            }
        }
        self.content = OffloadTransfer::Gradient;
        Ok(())
    }

    /// Discards the gradient.
    pub fn forget(&mut self) {
        self.content = OffloadTransfer::Nothing;
    }

    /// Does the same as [`DeviceState::squares`], with the gradient that was fetched.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn squares(
        &mut self,
        hyper: Hyper,
        range: Range<usize>,
    ) -> Result<Vec<(usize, SquaredNorms<f64>)>> {
        self.has_gradient()?;
        self.state.squares(
            hyper,
            range,
            &self.slot.memory()?[..self.len],
            self.state.master()?.as_slice(),
        )
    }

    /// Updates the parameters with the gradient that was fetched; `trust` is as in
    /// [`DeviceState::update`].
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn update(&mut self, hyper: Hyper, trust: &[f32]) -> Result<()> {
        self.has_gradient()?;
        self.state.update(hyper, trust, &self.slot.memory()?[..self.len], None)?;
        self.load()
    }

    fn has_gradient(&self) -> Result<()> {
        match self.content {
            OffloadTransfer::Gradient => Ok(()),
            _ => Err(Error::internal("the gradient of the update is not on the host")),
        }
    }

    /// Does the same as [`DeviceState::swap_ema`].
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn swap_ema(&mut self) -> Result<()> {
        self.state.swap_ema(None)?;
        self.load()
    }

    /// Does the same as [`DeviceState::scaled_state`], into a buffer of the device.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn scaled_state(&self, rate: f32, to: &mut B::Buf) -> Result<()> {
        let mut scaled = self.host.cpu.alloc_f32(MemoryKind::Offloaded, B::len(to))?;
        self.state.scaled_state(rate, None, &mut scaled)?;
        self.backend.write(scaled.as_slice(), B::all_mut(to))
    }

    /// Does the same as [`DeviceState::apply_average`], from a buffer of the device.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn apply_average(&mut self, mean: B::View<'_>) -> Result<()> {
        let mut host =
            self.host.cpu.alloc_f32(MemoryKind::Offloaded, self.len * self.state.averaged())?;
        self.backend.download(mean, host.as_mut_slice())?;
        self.state.apply_average(Cpu::all(&host), self.len, None)?;
        self.load()
    }

    /// Uploads the parameters; later compute waits for them.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn copy_into(&mut self, full: CommBuffer<'_>) -> Result<()> {
        self.begin_copy_into(full)?;
        self.host.wait_for_uploads()
    }

    /// Starts to upload the parameters, which compute may read after [`HostUpdater::arrived`].
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn begin_copy_into(&mut self, full: CommBuffer<'_>) -> Result<()> {
        match self.content {
            OffloadTransfer::Parameters => {}
            OffloadTransfer::Nothing => self.load()?,
            OffloadTransfer::Gradient => {
                return Err(Error::internal("parameters were requested before their update"));
            }
        }
        match full {
            CommBuffer::Host(full) => full.copy_from_slice(&self.slot.memory()?[..self.len]),
            CommBuffer::Device(full, _) => {
                let copies = self.host.copies()?;
                // Kernels may still use the previous content of the buffer's memory.
                copies.after_compute()?;
                self.slot.upload(copies, &[(full, 0)])?;
            }
        }
        Ok(())
    }

    /// Does the same as [`DeviceState::restore`].
    ///
    /// # Errors
    /// Returns the error of `load`, or an error if the device fails.
    pub fn restore(&mut self, load: impl FnMut(usize) -> Result<Vec<f32>>) -> Result<()> {
        self.content = OffloadTransfer::Nothing;
        self.state.restore(load)
    }

    /// Writes the parameters into the slot.
    fn load(&mut self) -> Result<()> {
        let master = self.state.master()?.as_slice();
        let words = self.slot.memory()?;
        match self.backend.has_master_weights() {
            true => self.host.cpu.round_to_bf16(master, words),
            false => self.host.cpu.copy(master, &mut words[..self.len])?,
        }
        self.content = OffloadTransfer::Parameters;
        Ok(())
    }
}

impl<B: Kernels> Drop for Offloaded<B> {
    fn drop(&mut self) {
        self.backend.memory_stats().record_free(MemoryKind::Offloaded, self.bytes);
    }
}

/// Returns the size in bytes on the host of a range of `len` elements with `states` buffers of
/// optimizer state: master weights, state and the slot.
pub fn host_bytes(states: usize, len: usize) -> usize {
    (2 + states) * len * size_of::<f32>()
}
