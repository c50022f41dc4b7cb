//! Streams with priorities: messages and copies have a higher one than compute kernels.
//!
//! Blocks of a stream with higher priority are scheduled before waiting blocks of other streams.
//! Messages are small compared with compute kernels, and other ranks are blocked until they arrive.
//! Results do not depend on priorities.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};

use super::libraries::check;
use hpctrain_base::error::Result;

/// Creates a stream with the lowest priority, the driver's default, for compute kernels.
///
/// # Errors
/// Returns an error if the driver fails.
pub fn low_priority(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
    check("make a stream", context.new_stream())
}

/// Creates a stream with the highest priority, for messages and copies. Devices without priorities
/// ignore it.
///
/// # Errors
/// Returns an error if the driver fails.
pub fn high_priority(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
    check("be chosen", context.bind_to_thread())?;
    // The second number is the smaller one, which is the higher priority.
    let (_, highest) = check("report stream priorities", result::stream::get_priority_range())?;
    check("make a stream", context.new_stream_with_priority(highest))
}

/// Returns the priority of a stream from the driver.
#[cfg(test)]
pub fn priority(stream: &CudaStream) -> Result<i32> {
    let mut priority = 0;
    // SAFETY: the stream is alive, and the number is written to.
    let status =
        unsafe { cudarc::driver::sys::cuStreamGetPriority(stream.cu_stream(), &mut priority) };
    check("report a stream's priority", status.result())?;
    Ok(priority)
}
