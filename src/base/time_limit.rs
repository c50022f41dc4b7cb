//! Runs work with a time limit.

use std::cell::RefCell;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::spawn::spawn;

type Work = Box<dyn FnOnce() + Send>;

thread_local! {
    /// The helper of this thread, while it is idle.
    static HELPER: RefCell<Option<Sender<Work>>> = const { RefCell::new(None) };
}

/// Runs `work` on a helper thread and waits at most `seconds` for it. Returns `None` if it takes
/// longer; the work then continues, and its result is discarded.
///
/// The seconds are counted one at a time, so that time in which the process is stopped does not
/// count.
///
/// # Errors
/// Returns an error if the helper thread cannot be started, or ends because `work` panics.
pub fn within<T: Send + 'static>(
    seconds: u64,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Option<T>> {
    let ended = || Error::internal("a helper thread has ended");
    let helper = HELPER.take().map_or_else(start, Ok)?;
    let (sender, result) = channel();
    let send = move || {
        // The receiver is gone if the result is late.
        let _ = sender.send(work());
    };
    helper.send(Box::new(send)).map_err(|_| ended())?;
    for _ in 0..seconds {
        match result.recv_timeout(Duration::from_secs(1)) {
            Ok(done) => {
                HELPER.set(Some(helper));
                return Ok(Some(done));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(ended()),
        }
    }
    Ok(None)
}

/// Starts a helper, which ends when its sender is dropped.
fn start() -> Result<Sender<Work>> {
    let (sender, receiver) = channel::<Work>();
    spawn("helper", move || receiver.into_iter().for_each(|work| work()))?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_does_not_end_is_left_behind() {
        let name = || std::thread::current().id();
        let first = within(60, name).unwrap().unwrap();
        assert_eq!(within(60, name).unwrap(), Some(first), "a helper is used again");
        let (sender, receiver) = channel::<()>();
        assert_eq!(within(0, move || receiver.recv().is_ok()).unwrap(), None);
        assert_ne!(within(60, name).unwrap(), Some(first), "the helper is still busy");
        drop(sender);
    }
}
