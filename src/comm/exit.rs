//! The ways a rank ends: an orderly exit, or an abort of all ranks.
//!
//! The communication thread aborts the job, with MPI by `MPI_Abort` or by its own end. If that has not ended the
//! process after two seconds, it exits by itself.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::shared::Shared;
use super::transport::in_process::Aborted;
use super::worker::{CommRequest, Worker};

/// Time limit of an abort, after which the process exits by itself.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);

/// How a rank ends when it aborts.
#[derive(Debug, Clone, Copy)]
pub enum Abort {
    /// Its process exits.
    Exit,
    /// The thread unwinds with [`Aborted`], because other ranks share the process.
    Unwind,
}

/// Ends a rank. Its handles and its watchdog share it.
#[derive(Clone)]
pub struct Exit {
    abort: Abort,
    has_others: bool,
    shared: Arc<Shared>,
    /// The communication thread; `None` in a world of one rank, and once the thread has ended.
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

    /// Takes the communication thread, to end it.
    pub fn take_worker(&self) -> Option<Worker> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Requests an abort of all ranks.
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
                    std::thread::sleep(ABORT_TIMEOUT);
                }
                exit_process(code)
            }
        }
    }

    /// Ends the job and this process. Called by the watchdog when the job hangs.
    pub fn end_job(&self, code: i32) -> ! {
        if let Abort::Exit = self.abort {
            self.request_abort(code);
            std::thread::sleep(ABORT_TIMEOUT);
        }
        exit_process(code)
    }
}

/// Exits this process. The exit handlers of libraries may wait for a lock that a stuck thread
/// holds, so after [`ABORT_TIMEOUT`] the process aborts without them.
pub fn exit_process(code: i32) -> ! {
    // If no thread can be started, the process waits for the handlers.
    let _ = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(ABORT_TIMEOUT);
        std::process::abort()
    });
    std::process::exit(code)
}
