//! Scalars that kernels compute and the host reads later, many at a time.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaStream, result};

use super::counters::Counters;
use super::libraries::check;
use super::pinned::Pinned;
use super::pool::{DevicePool, PoolAllocation};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::MemoryKind;

/// The largest number of scalars that may exist at once.
const SLOTS: usize = 1 << 14;

/// The bytes of their slots on the device.
pub const BYTES: usize = SLOTS * size_of::<f64>();

/// Slots for scalars on the device, and their last copy on the host.
pub struct Scalars {
    slots: PoolAllocation,
    counters: Arc<Counters>,
    state: Mutex<State>,
}

struct State {
    free: Vec<u32>,
    /// The number of scalars created so far, and how many of them the copy contains.
    begun: u64,
    copied: u64,
    copy: Pinned<f64>,
}

/// A scalar that a kernel computes.
pub struct Scalar {
    home: Arc<Scalars>,
    slot: u32,
    /// Its serial number: copies made after its creation contain it.
    number: u64,
}

impl Scalars {
    /// Creates the slots.
    ///
    /// # Errors
    /// Returns an error if memory is exhausted.
    pub fn new(
        pool: &Arc<DevicePool>,
        stream: &CudaStream,
        counters: Arc<Counters>,
    ) -> Result<Arc<Self>> {
        let slots = pool.allocate(MemoryKind::Workspace, BYTES)?;
        let copy = Pinned::new(stream.context(), SLOTS)?;
        let free = (0..SLOTS as u32).rev().collect();
        Ok(Arc::new(Self {
            slots,
            counters,
            state: Mutex::new(State { free, begun: 0, copied: 0, copy }),
        }))
    }

    /// Creates a scalar, which the next kernel will write at [`Scalar::pointer`].
    ///
    /// # Errors
    /// Returns an error if too many scalars exist.
    pub fn begin(self: &Arc<Self>) -> Result<Scalar> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = state
            .free
            .pop()
            .ok_or_else(|| Error::internal(format!("more than {SLOTS} scalars wait to be read")))?;
        state.begun += 1;
        Ok(Scalar { home: self.clone(), slot, number: state.begun })
    }
}

impl Scalar {
    /// Returns the address to which a kernel on the stream of [`Scalar::read`] writes it.
    pub fn pointer(&self) -> u64 {
        self.home.slots.pointer() + u64::from(self.slot) * size_of::<f64>() as u64
    }

    /// Returns its value. Unless it has already been copied, all scalars computed so far are copied
    /// at once.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn read(&self, stream: &CudaStream) -> Result<f64> {
        let mut state = self.home.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.copied < self.number {
            check("be chosen", stream.context().bind_to_thread())?;
            // SAFETY: the slots and their copy are of one length and live as long as `home`, whose
            // lock is held until the copy is complete.
            let copied = unsafe {
                result::memcpy_dtoh_async(
                    state.copy.as_mut_slice(),
                    self.home.slots.pointer(),
                    stream.cu_stream(),
                )
            };
            check("copy scalars to the host", copied)?;
            self.home.counters.add_host_wait();
            check("finish its work", stream.synchronize())?;
            state.copied = state.begun;
        }
        Ok(state.copy.as_slice()[self.slot as usize])
    }
}

impl Drop for Scalar {
    fn drop(&mut self) {
        self.home.state.lock().unwrap_or_else(PoisonError::into_inner).free.push(self.slot);
    }
}
