//! Names and ids that rank 0 chooses for all ranks.

use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_config::telemetry::unix_time;
use hpctrain_device::Kernels;

/// Returns rank 0's text, or its error, on every rank.
pub(super) fn share<B: Kernels>(world: &Group<B>, mine: Option<Result<String>>) -> Result<String> {
    let mine = world.all_ok(mine.transpose())?;
    let all = world.gather_bytes(mine.unwrap_or_default().into_bytes()).wait()?;
    let text = all.first().map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    text.ok_or_else(|| Error::internal("no rank 0"))
}

/// Returns a job id that no other job has.
pub fn fresh_id() -> String {
    format!("{:x}{:x}", (unix_time() * 1e3) as u64, std::process::id())
}
