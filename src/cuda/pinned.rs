//! Pinned host memory, which the device copies asynchronously.

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaContext, result};

use super::libraries::check;
use hpctrain_base::error::Result;

/// Pinned host memory for `len` values.
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
    /// Allocates `len` zeros.
    ///
    /// # Errors
    /// Returns an error if no more memory can be pinned.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        check("be chosen", context.bind_to_thread())?;
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the context is bound; the memory is freed in `drop`.
        let pointer =
            check("allocate pinned host memory", unsafe { result::malloc_host(bytes, 0) })?
                .cast::<T>();
        // SAFETY: the allocation has `bytes` bytes, and zeros are values of T.
        unsafe { pointer.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), pointer, len })
    }

    /// Returns the address of the values, which the device has, too.
    pub fn as_ptr(&self) -> *mut T {
        self.pointer
    }

    /// Returns the values.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` values were allocated and set.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    /// Returns the values, mutably.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `malloc_host`, and freed once.
            let _ = unsafe { result::free_host(self.pointer.cast()) };
        }
    }
}
