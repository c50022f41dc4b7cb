//! The thread of a rank that writes its saves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{Activity, ActivityKind, Track, span};
use hpctrain_base::spawn::spawn;

/// The result of work on the save thread, or of work that did not need it.
pub enum SaveTask<T> {
    /// The work is on the thread.
    Begun {
        /// Receives the result.
        result: Receiver<T>,
        /// Set once the work has ended.
        is_over: Arc<AtomicBool>,
    },
    /// The result is available.
    Ready(T),
}

impl<T> SaveTask<T> {
    /// Returns true if the result is available.
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

/// The thread that does the work of saves, one task after another. It starts before the first step,
/// so that a system that refuses the thread fails before work could be lost. It ends once this is
/// dropped and its tasks are done.
pub struct SaveThread {
    tasks: Sender<Box<dyn FnOnce() + Send>>,
}

impl SaveThread {
    /// Starts the thread of this rank.
    ///
    /// # Errors
    /// Returns an error if the system refuses the thread.
    pub fn start() -> Result<Self> {
        let activity = Activity::current();
        let (tasks, queue) = channel::<Box<dyn FnOnce() + Send>>();
        spawn("saver", move || run_tasks(activity, &queue))?;
        Ok(Self { tasks })
    }

    /// Queues a task.
    pub fn begin<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> SaveTask<T> {
        let (sender, result) = channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let over = SetAtEnd(is_over.clone());
        // After a panic the thread is gone: the task is dropped, and waiting for its result fails.
        let _ = self.tasks.send(Box::new(move || {
            let _over = over;
            let _span = span(ActivityKind::Checkpoint, None);
            // A save that was given up does not need its result.
            let _ = sender.send(work());
        }));
        SaveTask::Begun { result, is_over }
    }
}

/// Runs tasks one after another until all senders are dropped.
fn run_tasks(activity: Option<Activity>, queue: &Receiver<Box<dyn FnOnce() + Send>>) {
    if let Some(activity) = activity {
        activity.register_thread(Track::Saver);
    }
    while let Ok(task) = queue.recv() {
        task();
    }
}

/// Sets a flag when it is dropped, even by a panic.
struct SetAtEnd(Arc<AtomicBool>);

impl Drop for SetAtEnd {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
