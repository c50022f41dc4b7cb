//! Buffers that the transport owns while a point-to-point message is in flight.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::host_staged::{PinnedStaging, SlotGuard, Slots};
use super::pending::Reply;
use super::shared::Shared;
use super::transport::{P2pBuffer, Payload};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, CommBuffer};

/// Returns the memory of a whole buffer.
pub fn whole<B: Backend>(buf: &mut B::Buf) -> Result<CommBuffer<'_>> {
    let len = B::len(buf);
    B::comm_buffer(buf, 0..len)
}

/// A buffer that is sent to another rank, or received from one.
pub struct P2pRequest<B: Backend> {
    pub buf: B::Buf,
    pub reply: Reply<B::Buf>,
    /// The flight recorder's entry of a message that is received.
    pub entry: Option<P2pRecord>,
}

impl<B: Backend> P2pBuffer for P2pRequest<B> {
    fn payload(&mut self) -> Result<Payload<'_>> {
        Ok(match whole::<B>(&mut self.buf)? {
            CommBuffer::Host(memory) => Payload::Host(bytemuck::cast_slice_mut(memory)),
            CommBuffer::Device(memory, _) => Payload::Device(memory),
        })
    }

    fn finish(self: Box<Self>, done: Result<()>) {
        let Self { buf, reply, entry } = *self;
        if let (Some(entry), Ok(())) = (entry, &done) {
            entry.ended();
        }
        reply.send(done.map(|()| buf));
    }

    fn abandon(self: Box<Self>, error: Error) {
        let Self { buf, reply, .. } = *self;
        std::mem::forget(buf);
        reply.send(Err(error));
    }
}

/// The flight recorder's entry of a message in flight.
pub struct P2pRecord {
    shared: Arc<Shared>,
    number: u64,
}

impl P2pRecord {
    pub fn new(shared: &Arc<Shared>, number: u64) -> Self {
        Self { shared: shared.clone(), number }
    }

    fn ended(&self) {
        self.shared.record_end(self.number);
    }
}

/// A buffer that a host-staged message fills slot by slot.
struct StagedRecv<B: Backend> {
    /// The request; taken when the last slot has been copied, or one has failed.
    posted: Option<Box<P2pRequest<B>>>,
    /// The number of slots that have not been copied yet.
    left: usize,
}

/// A slot of a [`StagedRecv`] that receives a part of the message.
pub struct RecvChunk<B: Backend> {
    slot: SlotGuard,
    words: Range<usize>,
    whole: Arc<Mutex<StagedRecv<B>>>,
}

impl<B: Backend> RecvChunk<B> {
    /// Copies the slot to the device.
    fn copy(&mut self, buf: &mut B::Buf) -> Result<()> {
        match whole::<B>(buf)? {
            CommBuffer::Device(memory, copies) => {
                self.slot.upload(&*copies, memory.part(self.words.clone()))
            }
            CommBuffer::Host(_) => Err(on_host()),
        }
    }
}

impl<B: Backend> P2pBuffer for RecvChunk<B> {
    fn payload(&mut self) -> Result<Payload<'_>> {
        let words = self.words.len();
        Ok(Payload::Host(bytemuck::cast_slice_mut(self.slot.memory(words)?)))
    }

    fn finish(mut self: Box<Self>, done: Result<()>) {
        let staged = self.whole.clone();
        let mut staged = staged.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(posted) = &mut staged.posted else { return };
        let done = done.and_then(|()| self.copy(&mut posted.buf));
        staged.left -= 1;
        if (staged.left == 0 || done.is_err())
            && let Some(posted) = staged.posted.take()
        {
            posted.finish(done);
        }
    }

    fn abandon(mut self: Box<Self>, error: Error) {
        self.slot.leak();
        self.finish(Err(error));
    }
}

/// Creates the receives of a host-staged message for device memory. An empty message has none and
/// finishes at once. After an error the request is finished with it.
pub fn chunks<B: Backend>(
    mut posted: Box<P2pRequest<B>>,
    slots: &Arc<Slots>,
    words: usize,
) -> Result<Vec<RecvChunk<B>>> {
    let taken = whole::<B>(&mut posted.buf).and_then(|memory| match memory {
        CommBuffer::Device(memory, copies) => {
            PinnedStaging { copies: &*copies, slots, words }.chunks_to_fill(memory)
        }
        CommBuffer::Host(_) => Err(on_host()),
    });
    match taken {
        Ok(taken) if !taken.is_empty() => {
            let whole =
                Arc::new(Mutex::new(StagedRecv { posted: Some(posted), left: taken.len() }));
            let chunks = taken.into_iter().map(|(slot, words)| RecvChunk {
                slot,
                words,
                whole: whole.clone(),
            });
            Ok(chunks.collect())
        }
        done => {
            let done = done.map(drop);
            posted.finish(done.clone());
            done.map(|()| vec![])
        }
    }
}

/// Creates the error of a device backend whose memory is on the host.
pub fn on_host() -> Error {
    Error::internal("a device backend returned host memory")
}
