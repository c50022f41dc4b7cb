//! The order of a communicator's work on the device: messages, ordered sums, and compute.
//!
//! Messages of all communicators of a device share a stream, and so do ordered sums, which run while
//! later messages are in flight. Events order the two, and an operation of both with compute.

use std::any::Any;
use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaEvent, CudaStream};

use super::event::{self, is_complete};
use super::libraries::check;
use super::ordered_sum::OrderedSumKernel;
use super::streams;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{DeviceEvent, DeviceOperation, DeviceTimer, OrderedSum};

/// The polling interval of a waiting thread.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// The streams that all communicators of a device share, so that the device runs their operations in
/// one order. Nothing else uses them.
pub struct CommStreams {
    /// The stream of messages.
    pub(super) messages: Arc<CudaStream>,
    /// The stream of ordered sums.
    sums: Arc<CudaStream>,
    /// The stream of the kernels.
    pub(super) compute: Arc<CudaStream>,
}

impl CommStreams {
    /// Creates the streams besides `compute`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn new(compute: &Arc<CudaStream>) -> Result<Self> {
        Ok(Self {
            messages: streams::high_priority(compute.context())?,
            sums: streams::high_priority(compute.context())?,
            compute: compute.clone(),
        })
    }
}

/// The state of a communicator's work that the device does not know.
pub trait CommState: Send + Sync {
    /// Returns true if all work started so far is in the stream of messages. Does not block.
    ///
    /// # Errors
    /// Returns an error if the communicator has failed; its cause may be another rank.
    fn is_settled(&self) -> Result<bool>;
}

/// The work of a communicator in the streams.
pub struct CommQueue {
    pub(super) streams: Arc<CommStreams>,
    state: Arc<dyn CommState>,
    kernel: OrderedSumKernel,
    /// Events at the ends of calls of [`CommQueue::sum_in_order`] for which no message waits yet, in
    /// order.
    summed: RefCell<VecDeque<CudaEvent>>,
    /// The start of the operation that was begun last.
    begun: RefCell<Option<Arc<CudaEvent>>>,
}

impl CommQueue {
    /// Creates the queue of a communicator.
    pub fn new(
        streams: Arc<CommStreams>,
        kernel: OrderedSumKernel,
        state: Arc<dyn CommState>,
    ) -> Self {
        Self { streams, state, kernel, summed: RefCell::default(), begun: RefCell::default() }
    }

    /// Begins an operation, see [`DeviceComm::begin`](hpctrain_device::DeviceComm::begin).
    ///
    /// # Errors
    /// Returns an error if the device fails, or the event is not of this kind of device.
    pub fn begin(&self, ready: Option<&dyn DeviceEvent>) -> Result<()> {
        let CommStreams { messages, compute, .. } = &*self.streams;
        check("be chosen", compute.context().bind_to_thread())?;
        if let Some(ready) = ready {
            let ready: &dyn Any = ready;
            let ready = ready
                .downcast_ref::<event::Mark>()
                .ok_or_else(|| Error::internal("an event of another kind of device"))?;
            check("wait for another stream", messages.wait(&ready.0))?;
        }
        *self.begun.borrow_mut() = Some(Arc::new(event::timed(messages)?));
        Ok(())
    }

    /// Ends the operation, see [`DeviceComm::end`](hpctrain_device::DeviceComm::end).
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn end(&self) -> Result<Arc<dyn DeviceOperation>> {
        self.wait_for_sums(0)?;
        let begun = self.begun.borrow_mut().take();
        let begun = begun.ok_or_else(|| Error::internal("an operation ends that has not begun"))?;
        Ok(Arc::new(Operation {
            state: self.state.clone(),
            begun,
            ended: event::timed(&self.streams.messages)?,
            compute: self.streams.compute.clone(),
        }))
    }

    /// Starts sums after the messages, see
    /// [`DeviceComm::sum_in_order`](hpctrain_device::DeviceComm::sum_in_order).
    ///
    /// # Errors
    /// Returns an error if the device fails, or a sum has too many terms.
    pub fn sum_in_order(&self, terms: &[OrderedSum<'_>]) -> Result<()> {
        let CommStreams { messages, sums, .. } = &*self.streams;
        if !terms.is_empty() {
            check("wait for another stream", sums.join(messages))?;
            terms.iter().try_for_each(|&sum| self.kernel.launch(sums, sum))?;
        }
        // A call without sums counts as a call too.
        self.summed.borrow_mut().push_back(check("record an event", sums.record_event(None))?);
        Ok(())
    }

    /// Orders later messages after sums, see
    /// [`DeviceComm::wait_for_sums`](hpctrain_device::DeviceComm::wait_for_sums).
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn wait_for_sums(&self, but: usize) -> Result<()> {
        let mut summed = self.summed.borrow_mut();
        let past = summed.len().saturating_sub(but);
        // The last event comes after the others.
        match summed.drain(..past).next_back() {
            Some(last) => check("wait for another stream", self.streams.messages.wait(&last)),
            None => Ok(()),
        }
    }

    /// Returns an event that completes when everything started so far has.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn mark(&self) -> Result<Box<dyn DeviceEvent>> {
        self.wait_for_sums(0)?;
        let stream = self.streams.messages.clone();
        Ok(Box::new(Mark { state: self.state.clone(), stream, point: OnceCell::new() }))
    }

    /// Returns an event that completes when everything started so far is in the streams.
    pub fn queued(&self) -> Box<dyn DeviceEvent> {
        Box::new(Queued(self.state.clone()))
    }

    /// Blocks until the streams have no work left.
    pub fn synchronize(&self) {
        let CommStreams { messages, sums, .. } = &*self.streams;
        // Sums may be queued behind the messages. If waiting for them fails, the device has failed.
        let _ = messages.synchronize().and_then(|()| sums.synchronize());
    }
}

/// An operation in the stream of messages.
struct Operation {
    state: Arc<dyn CommState>,
    begun: Arc<CudaEvent>,
    ended: CudaEvent,
    compute: Arc<CudaStream>,
}

impl DeviceOperation for Operation {
    fn is_done(&self) -> Result<bool> {
        // An error of another rank may keep the device from ever reaching the end.
        Ok(self.state.is_settled()? && is_complete(&self.ended)?)
    }

    fn before_compute(&self) -> Result<Box<dyn DeviceTimer>> {
        check("be chosen", self.compute.context().bind_to_thread())?;
        let idle_from = event::timed(&self.compute)?;
        check("wait for another stream", self.compute.wait(&self.ended))?;
        Ok(Box::new(Timer { begun: idle_from, ended: event::timed(&self.compute)? }))
    }

    fn seconds(&self) -> Result<f64> {
        Ok(f64::from(event::milliseconds(&self.begun, &self.ended)?) * 1e-3)
    }
}

/// The time between two events of a stream.
struct Timer {
    begun: CudaEvent,
    ended: CudaEvent,
}

impl DeviceTimer for Timer {
    fn seconds(&self) -> Result<Option<f64>> {
        if !is_complete(&self.ended)? {
            return Ok(None);
        }
        Ok(Some(f64::from(event::milliseconds(&self.begun, &self.ended)?) * 1e-3))
    }
}

/// Completes when the last operation started has been queued in its stream.
struct Queued(Arc<dyn CommState>);

impl DeviceEvent for Queued {
    fn is_done(&self) -> Result<bool> {
        self.0.is_settled()
    }

    fn wait(&self) -> Result<()> {
        while !self.is_done()? {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

/// Completes when all operations started have finished.
struct Mark {
    state: Arc<dyn CommState>,
    stream: Arc<CudaStream>,
    /// An event after the work in the stream, once that is queued.
    point: OnceCell<CudaEvent>,
}

impl DeviceEvent for Mark {
    fn is_done(&self) -> Result<bool> {
        // This is checked even while the stream works, since an error of another rank may keep it
        // from ever finishing.
        if !self.state.is_settled()? {
            return Ok(false);
        }
        let point = match self.point.get() {
            Some(point) => point,
            None => {
                let point = check("record an event", self.stream.record_event(None))?;
                self.point.get_or_init(|| point)
            }
        };
        is_complete(point)
    }

    fn wait(&self) -> Result<()> {
        while !self.is_done()? {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}
