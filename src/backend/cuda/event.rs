//! Events of the driver.

use cudarc::driver::CudaEvent;

use super::libraries::check;
use crate::error::Result;

/// Whether an event is over. It may be the first call of the thread into the driver: unlike cudarc's other calls, its
/// query chooses no context.
pub fn passed(event: &CudaEvent) -> Result<bool> {
    check("be chosen", event.context().bind_to_thread())?;
    check("tell how far it is", event.try_is_complete())
}
