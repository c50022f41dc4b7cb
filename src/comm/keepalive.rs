//! Lets ranks wait for long work of other ranks without the watchdog reporting a hang.

use std::time::Duration;

use super::group::Group;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn_scoped;
use hpctrain_device::Backend;

/// The first and the longest pause between two keepalive collectives. The pause doubles each time.
const FIRST: Duration = Duration::from_micros(200);
const LONGEST: Duration = Duration::from_secs(1);

impl<B: Backend> Group<B> {
    /// Runs the work of the ranks that have some, while all ranks run small keepalive collectives,
    /// so that no single wait is long while every rank is alive. Returns the result of this rank's
    /// work. For work that may take longer than a collective's timeout, and has its own time limit
    /// or reports progress. Collective.
    ///
    /// # Errors
    /// Returns an error if the work of any rank failed, the same on all ranks, or a message between
    /// them failed.
    pub fn with_keepalive<T: Send>(
        &self,
        work: Option<impl FnOnce() -> Result<T> + Send>,
    ) -> Result<Option<T>> {
        if self.size() == 1 {
            return work.map(|work| work()).transpose();
        }
        std::thread::scope(|scope| {
            let mut begun = work.map(|work| spawn_scoped(scope, "keepalive-work", work));
            let mut pause = FIRST;
            loop {
                let is_done = match &begun {
                    Some(Ok(thread)) => thread.is_finished(),
                    _ => true,
                };
                let reports = self.gather_as("meet", vec![u8::from(is_done)]).wait()?;
                if reports.iter().all(|done| *done == [1]) {
                    break;
                }
                std::thread::sleep(pause);
                pause = (2 * pause).min(LONGEST);
            }
            let done = begun.take().map(|thread| match thread {
                Ok(thread) => {
                    thread.join().map_err(|_| Error::internal("a thread panicked")).flatten()
                }
                Err(e) => Err(e),
            });
            self.all_ok(done.transpose())
        })
    }
}
