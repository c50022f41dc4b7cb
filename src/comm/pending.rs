//! The result of a request that may still be in flight.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvError, SyncSender, TryRecvError, sync_channel};

use super::shared::Shared;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::DeviceOperation;

/// A value that the communication thread will return.
#[must_use = "the buffer comes back, and errors show, only through `wait`"]
pub struct Pending<T>(State<T>);

enum State<T> {
    Ready(Result<T>),
    Requested { answer: Receiver<Result<Answer<T>>>, shared: Arc<Shared> },
    Answered { answer: Result<Answer<T>>, shared: Arc<Shared> },
}

/// The value of an answer.
struct Answer<T> {
    /// Dropped before the value: what uses its memory next is ordered after the operation.
    order: ComputeOrder,
    value: T,
}

/// The operation of the device that compute has to be ordered after, if there is one.
struct ComputeOrder(Option<Arc<dyn DeviceOperation>>);

impl Drop for ComputeOrder {
    fn drop(&mut self) {
        if let Some(operation) = self.0.take() {
            // A device that fails fails the next request too.
            let _ = operation.before_compute();
        }
    }
}

/// The sending end of an answer, for the communication thread.
pub struct Reply<T>(SyncSender<Result<Answer<T>>>);

/// Creates both ends of one answer.
pub fn reply<T>(shared: &Arc<Shared>) -> (Reply<T>, Pending<T>) {
    let (sender, answer) = sync_channel(1);
    (Reply(sender), Pending(State::Requested { answer, shared: shared.clone() }))
}

impl<T> Reply<T> {
    pub fn send(self, value: Result<T>) {
        self.answer(value.map(|value| Answer { order: ComputeOrder(None), value }));
    }

    /// Sends a value whose memory an operation of the device may still use.
    pub fn send_started(self, value: Result<(T, Arc<dyn DeviceOperation>)>) {
        self.answer(
            value.map(|(value, operation)| Answer { order: ComputeOrder(Some(operation)), value }),
        );
    }

    fn answer(self, answer: Result<Answer<T>>) {
        // Nobody listens to a `Pending` that was dropped; the buffer then returns to its pool here.
        let _ = self.0.send(answer);
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
            State::Requested { .. } | State::Answered { .. } => None,
        }
    }

    /// Returns true if [`Pending::wait`] would not block.
    pub fn is_done(&mut self) -> bool {
        if let State::Requested { answer, shared } = &self.0 {
            let answer = match answer.try_recv() {
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => Err(ended()),
                Ok(answer) => answer,
            };
            self.0 = State::Answered { answer, shared: shared.clone() };
        }
        true
    }

    /// Blocks until the request is done and returns its value. Where the device orders the request
    /// with compute, it blocks only until the device has it in its queue, and all that compute
    /// requests from then on comes after it.
    ///
    /// # Errors
    /// Returns an error if this request or an earlier one failed, for example because a message was
    /// lost or a rank has exited. The errors of requests that the device has only queued are
    /// returned by later requests.
    pub fn wait(self) -> Result<T> {
        let (mut order, value, shared) = self.receive()?;
        if let (Some(operation), Some(shared)) = (order.0.take(), shared) {
            shared.add_idle(operation.before_compute()?);
        }
        Ok(value)
    }

    /// Blocks until the request is done, on the device too, and returns its value: for measurements.
    ///
    /// # Errors
    /// Returns an error if [`Pending::wait`] does, or if the device fails.
    pub fn synchronize(self) -> Result<T> {
        let (mut order, value, shared) = self.receive()?;
        if let (Some(operation), Some(shared)) = (order.0.take(), shared) {
            let (done, time) = shared.waiting(|| {
                while !operation.is_done()? {
                    std::thread::yield_now();
                }
                Ok(())
            });
            shared.add_blocked(time);
            done?;
        }
        Ok(value)
    }

    /// Blocks until the communication thread has answered.
    fn receive(self) -> Result<(ComputeOrder, T, Option<Arc<Shared>>)> {
        let (answer, shared) = match self.0 {
            State::Ready(value) => return Ok((ComputeOrder(None), value?, None)),
            State::Answered { answer, shared } => (answer, shared),
            State::Requested { answer, shared } => (receive(&answer, &shared), shared),
        };
        let Answer { order, value } = answer?;
        Ok((order, value, Some(shared)))
    }

    /// Returns the value on the communication thread, which runs requests in order, so that the
    /// request is done or, on the device, before the next one.
    pub(super) fn in_order(self) -> Result<T> {
        let answer = match self.0 {
            State::Ready(value) => return value,
            State::Answered { answer, .. } => answer?,
            State::Requested { answer, .. } => answer.try_recv().map_err(|_| ended())??,
        };
        let Answer { mut order, value } = answer;
        order.0.take();
        Ok(value)
    }
}

/// Receives an answer. Time in which the thread is blocked counts, unless the device orders compute
/// after the operation, in which case it measures the time.
fn receive<T>(answer: &Receiver<Result<Answer<T>>>, shared: &Shared) -> Result<Answer<T>> {
    match answer.try_recv() {
        Ok(answer) => answer,
        Err(TryRecvError::Disconnected) => Err(ended()),
        Err(TryRecvError::Empty) => {
            let (answer, time) = shared.waiting(|| answer.recv());
            let answer = answer.map_err(|RecvError| ended())?;
            if !answer.as_ref().is_ok_and(|answer| answer.order.0.is_some()) {
                shared.add_blocked(time);
            }
            answer
        }
    }
}

fn ended() -> Error {
    Error::comm("the communication thread has ended")
}
