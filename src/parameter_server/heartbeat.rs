//! A thread that sends heartbeats.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::Duration;

use hpctrain_base::error::Result;
use hpctrain_base::spawn::spawn;

/// The longest interval between two heartbeats.
const MAX_INTERVAL: Duration = Duration::from_secs(2);

/// Sends heartbeats until it is dropped.
pub struct HeartbeatThread {
    stopped: Arc<AtomicBool>,
    thread: Thread,
}

impl HeartbeatThread {
    /// Starts a thread that calls `beat` at least ten times within `timeout`.
    ///
    /// # Errors
    /// Returns an error if the system cannot start a thread.
    pub fn start(timeout: Duration, mut beat: impl FnMut() + Send + 'static) -> Result<Self> {
        let stopped = Arc::new(AtomicBool::new(false));
        let stop = stopped.clone();
        let interval = (timeout / 10).min(MAX_INTERVAL);
        let thread = spawn("heart", move || {
            while !stop.load(Ordering::Relaxed) {
                beat();
                std::thread::park_timeout(interval);
            }
        })?;
        Ok(Self { stopped, thread: thread.thread().clone() })
    }
}

impl Drop for HeartbeatThread {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }
}
