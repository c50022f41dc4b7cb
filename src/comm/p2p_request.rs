//! Buffers that the wire owns while a message leaves or arrives.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::host_staged::{Lent, PinnedStaging, Slots};
use super::pending::Reply;
use super::shared::Shared;
use super::transport::{P2pBuffer, Payload};
use hpctrain_base::error::{Error, Result};
use hpctrain_device::{Backend, CommBuffer};

/// All of a buffer.
pub fn whole<B: Backend>(buf: &mut B::Buf) -> Result<CommBuffer<'_>> {
    let len = B::len(buf);
    B::comm_buffer(buf, 0..len)
}

/// A buffer on its way to another rank, or from one.
pub struct P2pRequest<B: Backend> {
    pub buf: B::Buf,
    pub reply: Reply<B::Buf>,
    /// The entry of one that arrives.
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

/// The ledger's entry of a message under way.
pub struct P2pRecord {
    shared: Arc<Shared>,
    number: u64,
}

impl P2pRecord {
    pub fn new(shared: &Arc<Shared>, number: u64) -> Self {
        Self { shared: shared.clone(), number }
    }

    fn ended(&self) {
        self.shared.ended(self.number);
    }
}

/// A buffer that a message fills by way of the host, a slot at a time.
struct StagedRecv<B: Backend> {
    /// Taken when the last slot has been copied, or one has failed.
    posted: Option<Box<P2pRequest<B>>>,
    /// Slots that have not been copied.
    left: usize,
}

/// A slot of a [`StagedRecv`] that a message arrives in.
pub struct RecvChunk<B: Backend> {
    slot: Lent,
    words: Range<usize>,
    whole: Arc<Mutex<StagedRecv<B>>>,
}

impl<B: Backend> RecvChunk<B> {
    /// Brings the slot to the device.
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
        let filling = self.whole.clone();
        let mut filling = filling.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(posted) = &mut filling.posted else { return };
        let done = done.and_then(|()| self.copy(&mut posted.buf));
        filling.left -= 1;
        if (filling.left == 0 || done.is_err())
            && let Some(posted) = filling.posted.take()
        {
            posted.finish(done);
        }
    }

    fn abandon(mut self: Box<Self>, error: Error) {
        self.slot.leak();
        self.finish(Err(error));
    }
}

/// The parcels in which a message for device memory arrives by way of the host; none of an empty
/// one, which is there. After an error the buffer is given back with it.
pub fn chunks<B: Backend>(
    mut posted: Box<P2pRequest<B>>,
    slots: &Arc<Slots>,
    words: usize,
) -> Result<Vec<RecvChunk<B>>> {
    let taken = whole::<B>(&mut posted.buf).and_then(|reach| match reach {
        CommBuffer::Device(memory, copies) => {
            PinnedStaging { copies: &*copies, slots, words }.chunks_to_fill(memory)
        }
        CommBuffer::Host(_) => Err(on_host()),
    });
    match taken {
        Ok(taken) if !taken.is_empty() => {
            let whole =
                Arc::new(Mutex::new(StagedRecv { posted: Some(posted), left: taken.len() }));
            let parcel = |(slot, words)| RecvChunk { slot, words, whole: whole.clone() };
            Ok(taken.into_iter().map(parcel).collect())
        }
        done => {
            let done = done.map(drop);
            posted.finish(done.clone());
            done.map(|()| vec![])
        }
    }
}

/// The memory of a backend on a device.
pub fn on_host() -> Error {
    Error::internal("device memory turned out to be the host's")
}
