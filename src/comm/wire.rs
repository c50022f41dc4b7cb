//! What algorithms stand on: bytes between two ranks.

use std::sync::Arc;

use crate::error::{Error, Result};

/// The ranks of a group, seen from one of them.
#[derive(Debug, Clone)]
pub struct Members {
    /// Number of the group on the wire; the same on all its ranks.
    pub id: usize,
    /// My number in the group.
    pub rank: usize,
    /// Their numbers in the world, ascending.
    pub ranks: Arc<[usize]>,
}

impl Members {
    pub fn new(id: usize, world_rank: usize, ranks: Vec<usize>) -> Self {
        let rank = ranks.partition_point(|&other| other < world_rank);
        Self { id, rank, ranks: ranks.into() }
    }

    pub fn world(rank: usize, size: usize) -> Self {
        Self { id: 0, rank, ranks: (0..size).collect() }
    }

    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The next rank around the ring.
    pub fn next(&self) -> usize {
        (self.rank + 1) % self.size()
    }

    /// The previous rank around the ring.
    pub fn previous(&self) -> usize {
        (self.rank + self.size() - 1) % self.size()
    }
}

/// A collective of the MPI library, in place.
#[derive(Debug, Clone, Copy)]
pub enum Vendor {
    AllReduce,
    /// My part of the memory holds the sum afterwards.
    ReduceScatter,
    /// My part of the memory is contributed.
    AllGather,
    Broadcast {
        root: usize,
    },
}

/// A message that the wire owns until it has left: its memory must neither move nor change before.
pub trait Parcel: Send {
    /// The message. Its address stays the same until [`Parcel::finish`].
    fn bytes(&mut self) -> Result<&[u8]>;

    /// Gives the memory back to its owner.
    fn finish(self: Box<Self>, sent: Result<()>);

    /// Reports a message that may never leave. Its memory is leaked: the network may still read it.
    fn abandon(self: Box<Self>, error: Error);
}

/// Moves bytes between ranks. Lives on the communication thread; ranks are numbers in the group.
///
/// After an error the wire's state is unknown: nothing but [`Wire::leave`] and [`Wire::abort`] is called.
pub trait Wire {
    /// Sends and receives at once; returns when both buffers may be used again. The receiver knows the
    /// length: a message of another length is an error. Empty messages are not sent.
    fn exchange(
        &mut self,
        group: &Members,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
    ) -> Result<()>;

    /// Starts a message that is received by an [`exchange`](Wire::exchange), and returns before it has left.
    /// Otherwise two neighbours that send to each other before they receive would wait for ever.
    fn post(&mut self, group: &Members, to: usize, parcel: Box<dyn Parcel>) -> Result<()>;

    /// Lets started messages go on; whether any have not left yet.
    fn progress(&mut self) -> Result<bool>;

    /// Runs a collective of the MPI library.
    fn vendor(&mut self, group: &Members, call: Vendor, memory: &mut [f32]) -> Result<()>;

    /// Collective over the world: a group of the ranks of one colour. Returns its number.
    fn split(&mut self, color: usize) -> Result<usize>;

    /// Ends all ranks.
    fn abort(&mut self, code: i32);

    /// This rank takes no further part: in good order, or because a request failed.
    fn leave(&mut self, in_order: bool);
}
