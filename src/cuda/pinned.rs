//! Host memory that the device copies from and to without the driver's help.

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaContext, result};

use super::libraries::check;
use hpctrain_base::error::Result;

/// Page-locked memory for `len` values.
pub struct Pinned<T> {
    context: Arc<CudaContext>,
    pointer: *mut T,
    len: usize,
}

// SAFETY: it owns its memory, like a Vec.
unsafe impl<T: Send> Send for Pinned<T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Sync> Sync for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// Zeros.
    ///
    /// # Errors
    /// The system locks no more memory.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        check("be chosen", context.bind_to_thread())?;
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the context is bound; the memory is given back in `drop`.
        let pointer =
            check("lock host memory", unsafe { result::malloc_host(bytes, 0) })?.cast::<T>();
        // SAFETY: the allocation has so many bytes, and zeros are values of T.
        unsafe { pointer.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), pointer, len })
    }

    /// The values.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` values were allocated and set.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    /// The values, to write.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `malloc_host`, and given back once.
            let _ = unsafe { result::free_host(self.pointer.cast()) };
        }
    }
}
