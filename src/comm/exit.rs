//! The ends of a rank: in good order, or with all others.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::shared::Shared;
use super::transport::in_process::Aborted;
use super::worker::{CommRequest, Worker};

/// Time limit of an abort, after which the process ends on its own.
const ABORT_PATIENCE: Duration = Duration::from_secs(2);

/// The end of a rank that aborts.
#[derive(Debug, Clone, Copy)]
pub enum Abort {
    /// With its process.
    Exit,
    /// By unwinding with [`Aborted`]: the process is shared with other ranks.
    Unwind,
}

/// A rank's way to its end, which its handles and its watch share.
#[derive(Clone)]
pub struct Exit {
    abort: Abort,
    has_others: bool,
    shared: Arc<Shared>,
    /// None in a world of one, which needs no communication, and once it has ended.
    worker: Arc<Mutex<Option<Worker>>>,
}

impl Exit {
    pub fn new(
        abort: Abort,
        has_others: bool,
        shared: Arc<Shared>,
        worker: Option<Worker>,
    ) -> Self {
        Self { abort, has_others, shared, worker: Arc::new(Mutex::new(worker)) }
    }

    /// Queues a request. If the thread has ended, the request is dropped, which its `Pending`
    /// reports.
    pub fn submit(&self, request: CommRequest) {
        if let Some(worker) = &*self.worker.lock().unwrap_or_else(PoisonError::into_inner) {
            worker.submit(request);
        }
    }

    /// The communication thread, for its end.
    pub fn take_worker(&self) -> Option<Worker> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Orders an abort.
    pub fn request_abort(&self, code: i32) {
        self.shared.abort(code);
        // The thread may be asleep on its queue.
        self.submit(CommRequest::run(|_| {}));
    }

    /// Ends all ranks, and the calling thread or its process.
    pub fn abort(&self, code: i32) -> ! {
        self.request_abort(code);
        match self.abort {
            Abort::Unwind => std::panic::resume_unwind(Box::new(Aborted { code })),
            Abort::Exit => {
                if self.has_others {
                    std::thread::sleep(ABORT_PATIENCE);
                }
                leave(code)
            }
        }
    }

    /// Ends the job from a thread that knows it to be stuck, and this process with it.
    pub fn end_job(&self, code: i32) -> ! {
        if let Abort::Exit = self.abort {
            self.request_abort(code);
            std::thread::sleep(ABORT_PATIENCE);
        }
        leave(code)
    }
}

/// Ends this process. Libraries clean up when a process ends, and may wait for a lock that a stuck
/// thread holds: after a while it ends without.
pub fn leave(code: i32) -> ! {
    let impatient = || {
        std::thread::sleep(ABORT_PATIENCE);
        std::process::abort()
    };
    // Without a thread the process waits for them.
    let _ = std::thread::Builder::new().spawn(impatient);
    std::process::exit(code)
}
