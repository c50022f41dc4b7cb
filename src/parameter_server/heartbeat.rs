//! A thread that tells another end again and again that this process lives.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::Duration;

use hpctrain_base::error::Result;
use hpctrain_base::spawn::spawn;

/// Longest pause between two beats.
const PAUSE: Duration = Duration::from_secs(2);

/// Beats until it is dropped.
pub struct HeartbeatThread {
    over: Arc<AtomicBool>,
    thread: Thread,
}

impl HeartbeatThread {
    /// Calls `beat` ten times and more within `patience`.
    ///
    /// # Errors
    /// The system refused a thread.
    pub fn start(patience: Duration, mut beat: impl FnMut() + Send + 'static) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let pause = (patience / 10).min(PAUSE);
        let beats = move || {
            while !ends.load(Ordering::Relaxed) {
                beat();
                std::thread::park_timeout(pause);
            }
        };
        let thread = spawn("heart", beats)?;
        Ok(Self { over, thread: thread.thread().clone() })
    }
}

impl Drop for HeartbeatThread {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }
}
