//! The result of a request that may still be in flight.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};

use super::shared::Shared;
use hpctrain_base::error::{Error, Result};

/// A value that the communication thread will return.
#[must_use = "the buffer comes back, and errors show, only through `wait`"]
pub struct Pending<T>(State<T>);

enum State<T> {
    Ready(Result<T>),
    Requested { answer: Receiver<Result<T>>, shared: Arc<Shared> },
}

/// The sending end of an answer, for the communication thread.
pub struct Reply<T>(SyncSender<Result<T>>);

/// Creates both ends of one answer.
pub fn reply<T>(shared: &Arc<Shared>) -> (Reply<T>, Pending<T>) {
    let (sender, answer) = sync_channel(1);
    (Reply(sender), Pending(State::Requested { answer, shared: shared.clone() }))
}

impl<T> Reply<T> {
    pub fn send(self, value: Result<T>) {
        // Nobody listens to a `Pending` that was dropped; the buffer then returns to its pool here.
        let _ = self.0.send(value);
    }
}

impl<T> Pending<T> {
    /// Creates a result that needed no communication.
    pub fn ready(value: T) -> Self {
        Self(State::Ready(Ok(value)))
    }

    /// Creates the result of a request that was refused.
    pub(super) fn refused(error: Error) -> Self {
        Self(State::Ready(Err(error)))
    }

    /// Returns the value if it needed no communication.
    pub(super) fn ready_value(&self) -> Option<&T> {
        match &self.0 {
            State::Ready(value) => value.as_ref().ok(),
            State::Requested { .. } => None,
        }
    }

    /// Returns true if the request is done: [`Pending::wait`] would not block.
    pub fn is_done(&mut self) -> bool {
        if let State::Requested { answer, .. } = &self.0 {
            self.0 = State::Ready(match answer.try_recv() {
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => Err(ended()),
                Ok(value) => value,
            });
        }
        true
    }

    /// Blocks until the request is done and returns its value.
    ///
    /// # Errors
    /// Returns an error if this request or an earlier one failed, for example because a message was
    /// lost or a rank has exited.
    pub fn wait(self) -> Result<T> {
        let (answer, shared) = match self.0 {
            State::Ready(value) => return value,
            State::Requested { answer, shared } => (answer, shared),
        };
        match answer.try_recv() {
            Ok(value) => value,
            Err(TryRecvError::Disconnected) => Err(ended()),
            Err(TryRecvError::Empty) => shared.blocked(|| answer.recv()).map_err(|_| ended())?,
        }
    }
}

fn ended() -> Error {
    Error::comm("the communication thread has ended")
}
