//! Uploads through pinned memory, for which the host does not wait: the features of a micro-batch.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use super::event::is_complete;
use super::libraries::check;
use super::pinned::Pinned;
use hpctrain_base::error::Result;

/// The most bytes of an upload. The host waits for larger ones, such as parameters.
const LARGEST: usize = 16 << 20;

/// The most buffers: uploads that the device has not done yet.
const BUFFERS: usize = 8;

/// Pinned buffers for uploads.
pub struct UploadStaging {
    context: Arc<CudaContext>,
    buffers: Mutex<Vec<Buffer>>,
}

struct Buffer {
    memory: Pinned<u8>,
    /// Recorded after the last copy from it.
    copied: CudaEvent,
}

impl UploadStaging {
    /// Creates a staging area without buffers.
    pub fn new(context: &Arc<CudaContext>) -> Self {
        Self { context: context.clone(), buffers: Mutex::default() }
    }

    /// Queues a copy of `bytes` to the address `to`, in order with `stream`. Returns false, with
    /// nothing queued, if they are too many, or if all buffers are in use.
    ///
    /// # Errors
    /// Returns an error if no more memory can be pinned, or the device fails.
    pub fn upload(&self, bytes: &[u8], to: u64, stream: &CudaStream) -> Result<bool> {
        if bytes.len() > LARGEST {
            return Ok(false);
        }
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = None;
        for (i, buffer) in buffers.iter().enumerate() {
            if buffer.memory.as_slice().len() >= bytes.len() && is_complete(&buffer.copied)? {
                free = Some(i);
                break;
            }
        }
        let place = match free {
            Some(place) => place,
            None if buffers.len() == BUFFERS => return Ok(false),
            None => {
                let memory = Pinned::new(&self.context, bytes.len().next_power_of_two())?;
                let copied = check("make an event", self.context.new_event(None))?;
                buffers.push(Buffer { memory, copied });
                buffers.len() - 1
            }
        };
        let Buffer { memory, copied } = &mut buffers[place];
        memory.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let from = &memory.as_slice()[..bytes.len()];
        // SAFETY: the caller's memory at `to` has as many bytes; the buffer is not touched before
        // the event is complete.
        let queued = unsafe { result::memcpy_htod_async(to, from, stream.cu_stream()) };
        check("copy from the host", queued)?;
        check("record a copy", copied.record(stream))?;
        Ok(true)
    }
}

impl Drop for UploadStaging {
    fn drop(&mut self) {
        for buffer in self.buffers.get_mut().unwrap_or_else(PoisonError::into_inner) {
            // The device may still read the memory. A failure means that it no longer does.
            let _ = buffer.copied.synchronize();
        }
    }
}
