//! Work of some ranks that the others wait for, however long it takes, without being taken for
//! stuck.

use std::time::Duration;

use super::group::Group;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn_scoped;
use hpctrain_device::Backend;

/// Times between two meetings: the first, which doubles, and the longest.
const FIRST: Duration = Duration::from_micros(200);
const LONGEST: Duration = Duration::from_secs(1);

impl<B: Backend> Group<B> {
    /// Does the work of the ranks that have some; the others meet meanwhile with a message from
    /// time to time, so that no wait is longer than a moment as long as every rank lives. Returns
    /// the result of this rank's work, or the error of any. For work that takes longer than a
    /// collective may, and has a time limit of its own or shows progress by itself. Collective.
    ///
    /// # Errors
    /// That of the work of a rank, which all ranks share; or a message between them failed.
    pub fn with_keepalive<T: Send>(
        &self,
        work: Option<impl FnOnce() -> Result<T> + Send>,
    ) -> Result<Option<T>> {
        if self.size() == 1 {
            return work.map(|work| work()).transpose();
        }
        std::thread::scope(|scope| {
            let mut begun = work.map(|work| spawn_scoped(scope, "patient", work));
            let mut pause = FIRST;
            loop {
                let is_done = match &begun {
                    Some(Ok(thread)) => thread.is_finished(),
                    _ => true,
                };
                let told = self.gather_as("meet", vec![u8::from(is_done)]).wait()?;
                if told.iter().all(|done| *done == [1]) {
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
