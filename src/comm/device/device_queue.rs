//! Operations that the device runs in order with compute and has not finished yet.
//!
//! The communication thread starts such an operation and serves the next request. While the queue
//! is not empty, the thread polls it, so an error of another rank is found although no thread waits,
//! and the flight recorder shows what is in flight.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::polling::{self, Backoff};
use crate::shared::Shared;
use crate::transport::Transport;
use hpctrain_base::error::Result;
use hpctrain_device::DeviceOperation;

/// Operations in the order in which the device runs them, each with its number in the flight
/// recorder.
pub struct DeviceQueue {
    operations: VecDeque<(u64, Arc<dyn DeviceOperation>)>,
    shared: Arc<Shared>,
}

impl DeviceQueue {
    /// Creates an empty queue.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { operations: VecDeque::new(), shared }
    }

    /// Returns true if the device has finished all operations, as of the last poll.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Adds an operation that was started.
    pub fn push(&mut self, number: u64, operation: Arc<dyn DeviceOperation>) {
        self.operations.push_back((number, operation));
    }

    /// Removes the operations that the device has finished and records their ends.
    ///
    /// # Errors
    /// Returns an error if the device or the library fails.
    pub fn poll(&mut self) -> Result<()> {
        while let Some((number, operation)) = self.operations.front() {
            if !operation.is_done()? {
                break;
            }
            self.shared.record_end(*number);
            self.shared.add_busy_seconds(operation.seconds()?);
            self.operations.pop_front();
        }
        Ok(())
    }

    /// Waits until the device has finished all operations, while progressing posted messages and
    /// checking for an abort.
    ///
    /// # Errors
    /// Returns an error if the device, the library or a message fails, or an abort was requested.
    pub fn drain(&mut self, transport: &mut dyn Transport) -> Result<()> {
        let mut backoff = Backoff::new(false);
        self.poll()?;
        if !self.is_empty() {
            self.shared.add_host_wait();
        }
        while !self.is_empty() {
            polling::progress(transport, &self.shared)?;
            backoff.pause(&self.shared);
            self.poll()?;
        }
        Ok(())
    }

    /// Forgets all operations, after a failure.
    pub fn clear(&mut self) {
        self.operations.clear();
    }
}
