//! The thread of a process that does the work of its saves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{Activity, Doing, Track, span};
use hpctrain_base::spawn::spawn;

/// The result of work on the thread, or of work that needed none.
pub enum SaveTask<T> {
    /// Work on the thread.
    Begun {
        /// Receives the result.
        result: Receiver<T>,
        /// Set once the work is over.
        is_over: Arc<AtomicBool>,
    },
    /// A result.
    Ready(T),
}

impl<T> SaveTask<T> {
    /// Whether the result is there.
    pub fn is_finished(&self) -> bool {
        match self {
            Self::Begun { is_over, .. } => is_over.load(Ordering::Acquire),
            Self::Ready(_) => true,
        }
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// Returns an error if the work panicked.
    pub fn join(self) -> Result<T> {
        match self {
            Self::Begun { result, .. } => {
                result.recv().map_err(|_| Error::internal("the thread that saves panicked"))
            }
            Self::Ready(result) => Ok(result),
        }
    }
}

/// The thread that does the work of saves, one piece after the other. It runs from the first step
/// on: a system that has no room for it says so before any work could be lost. It ends once this is
/// dropped and its work is done.
pub struct SaveThread {
    tasks: Sender<Box<dyn FnOnce() + Send>>,
}

impl SaveThread {
    /// Starts the thread, which belongs to this rank.
    ///
    /// # Errors
    /// Returns an error if the system refuses it.
    pub fn start() -> Result<Self> {
        let activity = Activity::current();
        let (tasks, queue) = channel::<Box<dyn FnOnce() + Send>>();
        let work = move || {
            if let Some(activity) = activity {
                activity.here(Track::Saver);
            }
            while let Ok(task) = queue.recv() {
                task();
            }
        };
        spawn("saver", work)?;
        Ok(Self { tasks })
    }

    /// Begins a piece of work.
    pub fn begin<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> SaveTask<T> {
        let (tell, result) = channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let over = SetAtEnd(is_over.clone());
        let task = move || {
            let _over = over;
            let _span = span(Doing::Checkpoint, None);
            // The result of a save that was given up is of no use.
            let _ = tell.send(work());
        };
        // After a panic the thread is gone: the task is dropped, which its result says.
        let _ = self.tasks.send(Box::new(task));
        SaveTask::Begun { result, is_over }
    }
}

/// Sets a flag when it is dropped, also by a panic.
struct SetAtEnd(Arc<AtomicBool>);

impl Drop for SetAtEnd {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
