//! CUDA events.

use std::sync::OnceLock;

use cudarc::driver::sys::{CUevent, CUevent_flags, CUresult};
use cudarc::driver::{CudaEvent, CudaStream};

use super::libraries::check;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::library::open_first;
use hpctrain_device::{DeviceEvent, library_functions};

library_functions! {
    /// A function of the driver, by the name that all drivers have: cudarc uses a newer name,
    /// introduced with CUDA 12.8.
    Clock {
        elapsed = "cuEventElapsedTime"(*mut f32, CUevent, CUevent) -> CUresult;
    }
}

/// An event in a stream, without a time.
pub struct Mark(pub(super) CudaEvent);

impl DeviceEvent for Mark {
    fn is_done(&self) -> Result<bool> {
        is_complete(&self.0)
    }

    fn wait(&self) -> Result<()> {
        check("finish its work", self.0.synchronize())
    }
}

/// Returns true if an event is complete. Sets the context first, since this may be the thread's
/// first driver call, and cudarc's query does not.
pub fn is_complete(event: &CudaEvent) -> Result<bool> {
    check("be chosen", event.context().bind_to_thread())?;
    check("query an event", event.try_is_complete())
}

/// Records an event that has a time.
///
/// # Errors
/// Returns an error if the device fails.
pub fn timed(stream: &CudaStream) -> Result<CudaEvent> {
    check("record an event", stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)))
}

/// Returns the milliseconds between two timed events. Blocks until the second one is complete.
///
/// # Errors
/// Returns an error if the device has failed.
pub fn milliseconds(begun: &CudaEvent, ended: &CudaEvent) -> Result<f32> {
    static CLOCK: OnceLock<Result<Clock>> = OnceLock::new();
    let clock = CLOCK.get_or_init(|| {
        let lacks = |function: &str| Error::device(format!("the CUDA driver has no {function}"));
        // SAFETY: the library is open already, as there are events.
        let file = unsafe { open_first(&["libcuda.so.1", "libcuda.so"]) };
        let file = file.ok_or_else(|| lacks("library"))?;
        // SAFETY: it is open, and its function has had this type since it was introduced.
        let clock = unsafe { Clock::load(&file, lacks) }?;
        // It stays open as long as the process.
        std::mem::forget(file);
        Ok(clock)
    });
    let clock = clock.as_ref().map_err(Clone::clone)?;
    check("finish its work", ended.synchronize())?;
    let mut milliseconds = 0.0;
    // SAFETY: both events are alive; writes one number.
    let status = unsafe { (clock.elapsed)(&mut milliseconds, begun.cu_event(), ended.cu_event()) };
    check("measure the time between events", status.result())?;
    Ok(milliseconds)
}
