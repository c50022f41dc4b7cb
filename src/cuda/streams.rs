//! Streams by urgency: messages and copies go before kernels that compute.
//!
//! Work of a stream of higher priority is given to a multiprocessor before waiting blocks of
//! others. A message is small beside the kernels that compute, and the ranks that wait for it stand
//! still; the order of results does not depend on it.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};

use super::libraries::check;
use hpctrain_base::error::Result;

/// A stream of the device's lowest priority, which is the driver's own choice: for kernels that
/// compute.
///
/// # Errors
/// The driver failed.
pub fn patient(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
    check("make a stream", context.new_stream())
}

/// A stream of the device's highest priority: for messages and copies. On devices that know no
/// priorities it is as any other.
///
/// # Errors
/// The driver failed.
pub fn urgent(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
    check("be chosen", context.bind_to_thread())?;
    // The second number is the smaller one, and the more urgent.
    let (_, highest) =
        check("tell the priorities of streams", result::stream::get_priority_range())?;
    check("make a stream", context.new_stream_with_priority(highest))
}

/// The priority that the driver knows of a stream.
#[cfg(test)]
pub fn priority(stream: &CudaStream) -> Result<i32> {
    let mut priority = 0;
    // SAFETY: the stream is alive, and the number is written to.
    let told =
        unsafe { cudarc::driver::sys::cuStreamGetPriority(stream.cu_stream(), &mut priority) };
    check("tell a stream's priority", told.result())?;
    Ok(priority)
}
