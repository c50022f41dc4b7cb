//! The transports under the algorithms: exchanges of numbers and bytes between two ranks.

pub(super) mod in_process;
pub(super) mod launch;
pub mod mpi;
pub mod tcp;
pub(super) mod tracked;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use hpctrain_base::error::{Error, Result};
use hpctrain_device::DeviceSpan;

pub use hpctrain_device::DeviceCollective;

/// The number of groups whose ranks this process has sorted by node.
static SORTED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of times that this process has sorted the ranks of a group by node, for tests
/// of scale.
#[doc(hidden)]
pub fn sorted_by_node() -> u64 {
    SORTED.load(Relaxed)
}

/// The node of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeInfo {
    /// This rank's number among the ranks of its node.
    pub local_rank: usize,
    /// The number of ranks on this node.
    pub local_size: usize,
    /// The node's name.
    pub host: String,
}

/// The world of a rank, as the transport found it at the start.
#[derive(Clone)]
pub struct World {
    pub rank: usize,
    /// The number that the launcher gave to this rank.
    pub launch_rank: usize,
    /// Whether the ranks have other numbers than the launcher's.
    pub is_renumbered: bool,
    /// The number of every rank's node.
    pub nodes: Arc<[usize]>,
    pub node: NodeInfo,
    pub library: String,
    /// Whether ranks of this node exchange through shared memory.
    pub shares_memory: bool,
    /// Whether the transport has vendor collectives.
    pub vendor: bool,
    /// Whether the MPI library claims to be CUDA-aware.
    pub claims_cuda_aware: bool,
    /// The thread level of MPI; `None` without MPI.
    pub thread_level: Option<&'static str>,
    /// The most bytes of staging memory that messages need.
    pub staging: usize,
}

/// The ranks of a group, seen from one of them.
#[derive(Debug, Clone)]
pub struct GroupRanks {
    /// The number by which the transport knows the group; the same on all its ranks.
    pub id: usize,
    /// This rank's number in the group.
    pub rank: usize,
    /// The numbers of the group's ranks in the world, ascending.
    pub ranks: Arc<[usize]>,
    /// The node of every rank of the world.
    nodes: Arc<[usize]>,
    /// The cached result of [`GroupRanks::by_node`], which every collective uses.
    by_node: Arc<OnceLock<Vec<Vec<usize>>>>,
}

impl GroupRanks {
    pub fn new(id: usize, world_rank: usize, ranks: Vec<usize>, nodes: Arc<[usize]>) -> Self {
        let rank = ranks.partition_point(|&other| other < world_rank);
        Self { id, rank, ranks: ranks.into(), nodes, by_node: Arc::default() }
    }

    pub fn world(rank: usize, nodes: Arc<[usize]>) -> Self {
        Self { id: 0, rank, ranks: (0..nodes.len()).collect(), nodes, by_node: Arc::default() }
    }

    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the next rank around the ring.
    pub fn next(&self) -> usize {
        (self.rank + 1) % self.size()
    }

    /// Returns the previous rank around the ring.
    pub fn previous(&self) -> usize {
        (self.rank + self.size() - 1) % self.size()
    }

    /// Returns the group's ranks by node, in the order of the nodes' first ranks. Clones of a group
    /// share the result.
    pub fn by_node(&self) -> &[Vec<usize>] {
        self.by_node.get_or_init(|| {
            SORTED.fetch_add(1, Relaxed);
            let mut places: HashMap<usize, usize> = HashMap::new();
            let mut nodes: Vec<Vec<usize>> = Vec::new();
            for (rank, &world_rank) in self.ranks.iter().enumerate() {
                let place = *places.entry(self.nodes[world_rank]).or_insert(nodes.len());
                if place == nodes.len() {
                    nodes.push(Vec::new());
                }
                nodes[place].push(rank);
            }
            nodes
        })
    }

    /// Returns some of the group's ranks as a group, or `None` if this rank is not one of them.
    pub fn subset(&self, chosen: &[usize]) -> Option<GroupRanks> {
        let rank = chosen.iter().position(|&rank| rank == self.rank)?;
        let ranks = chosen.iter().map(|&rank| self.ranks[rank]).collect();
        Some(GroupRanks {
            id: self.id,
            rank,
            ranks,
            nodes: self.nodes.clone(),
            by_node: Arc::default(),
        })
    }
}

/// Elements to send to one rank, gathered from pieces of memory.
#[derive(Clone, Copy)]
pub struct Outgoing<'a> {
    pub to: usize,
    pub pieces: &'a [&'a [f32]],
}

/// Elements to receive from one rank, scattered to pieces of memory with the sender's total length.
pub struct Incoming<'a, 'b> {
    pub from: usize,
    pub pieces: &'a mut [&'b mut [f32]],
    /// Whether they are added to those in memory instead of replacing them.
    pub add: bool,
}

/// A message of device memory: the other rank, and the memory.
pub type DeviceMessage<'a> = (usize, DeviceSpan<'a>);

/// The memory of a message.
pub enum Payload<'a> {
    Host(&'a mut [u8]),
    /// Device memory, for a CUDA-aware transport.
    Device(DeviceSpan<'a>),
}

/// The other rank of a posted message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// The receiver.
    To(usize),
    /// The sender.
    From(usize),
}

/// Which posted messages are in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InFlight {
    /// No message is in flight.
    Nothing,
    /// Some are being received, none is being sent.
    Arriving,
    /// Some are being sent: another rank may wait for them.
    Leaving,
}

/// A message that the transport owns until it is sent or received. Until then its memory must
/// neither move nor be accessed.
pub trait P2pBuffer: Send {
    /// Returns the message's memory. Its address stays the same until [`P2pBuffer::finish`].
    fn payload(&mut self) -> Result<Payload<'_>>;

    /// Returns the memory to its owner, with the result of the message.
    fn finish(self: Box<Self>, done: Result<()>);

    /// Reports a message that may never complete. Its memory is leaked, because the network may
    /// still use it.
    fn abandon(self: Box<Self>, error: Error);
}

/// Moves numbers and bytes between ranks. It is used on the communication thread; ranks are numbers
/// in the group.
///
/// After an error the transport's state is unknown: only [`Transport::leave`], [`Transport::abort`]
/// and after the loss of a rank [`Transport::shrink`] may be called.
pub trait Transport {
    /// Sends and receives at the same time. Returns when all memory may be used again, which may be
    /// before the receiver has the elements. Nothing is sent if there are no elements. `sums` must
    /// be the same on sender and receiver: it is true if received elements will be added, in which
    /// case shared memory is the faster path.
    fn exchange(
        &mut self,
        group: &GroupRanks,
        sums: bool,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_, '_>>,
    ) -> Result<()>;

    /// Sends and receives bytes at the same time, like [`Transport::exchange`]. The receiver knows
    /// the length: a message of another length is an error.
    fn exchange_bytes(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
    ) -> Result<()>;

    /// Sends and receives device memory by its address, like [`Transport::exchange_bytes`]. The
    /// device must have finished its work on the memory.
    fn exchange_device(
        &mut self,
        group: &GroupRanks,
        send: Option<DeviceMessage<'_>>,
        receive: Option<DeviceMessage<'_>>,
    ) -> Result<()>;

    /// Sends and receives any number of pieces of device memory, like
    /// [`Transport::exchange_device`], with as many messages in flight together as the transport
    /// allows. Messages between two ranks arrive in the order of the slices. Returns when all are
    /// complete.
    fn exchange_device_group(
        &mut self,
        _group: &GroupRanks,
        _sends: &[DeviceMessage<'_>],
        _receives: &[DeviceMessage<'_>],
    ) -> Result<()> {
        Err(no_addresses())
    }

    /// Starts a message and returns before it is complete: otherwise two neighbours that send to
    /// each other before they receive would wait for ever. Posted messages between two ranks of a
    /// group arrive in the order in which they were posted, independently of exchanges. The
    /// receiver knows the length: a message of another length is an error.
    fn post(&mut self, group: &GroupRanks, peer: Peer, buffer: Box<dyn P2pBuffer>) -> Result<()>;

    /// Progresses posted messages and returns which are still in flight.
    fn progress(&mut self) -> Result<InFlight>;

    /// Runs a vendor collective on host memory.
    fn vendor(
        &mut self,
        group: &GroupRanks,
        call: DeviceCollective,
        memory: &mut [f32],
    ) -> Result<()>;

    /// Runs a vendor collective on device memory by its address. Unlike in [`Transport::vendor`],
    /// the sum of a reduce-scatter ends up where part 0 was.
    fn vendor_device(
        &mut self,
        group: &GroupRanks,
        call: DeviceCollective,
        memory: DeviceSpan<'_>,
    ) -> Result<()>;

    /// Splits `parent` by colours and returns the number of the group of this rank's colour.
    /// Collective over `parent`.
    fn split(&mut self, parent: &GroupRanks, color: usize) -> Result<usize>;

    /// Forms a world of the ranks that are left after a loss, and returns it. Groups of the one
    /// before do not exist any more. Collective over the ranks that are left.
    fn shrink(&mut self) -> Result<World> {
        Err(Error::internal("the ranks of this transport connect anew after a loss"))
    }

    /// Aborts all ranks.
    fn abort(&mut self, code: i32);

    /// Leaves the world: in an orderly way, or because a request failed.
    fn leave(&mut self, in_order: bool);
}

/// Returns the bytes that a rank sends in a bandwidth-optimal collective.
pub fn least_sent(group: &GroupRanks, call: DeviceCollective, words: usize) -> usize {
    let others = words * size_of::<f32>() / group.size() * (group.size() - 1);
    if let DeviceCollective::AllReduce = call { 2 * others } else { others }
}

/// Creates the error of transports other than MPI for device addresses.
fn no_addresses() -> Error {
    Error::input("comm.transport = cuda-aware requires MPI").hint("use host-staged or auto")
}

/// Creates the error of transports other than MPI for vendor collectives.
fn no_library() -> Error {
    Error::input("comm.algorithm = vendor requires MPI").hint("use ring or halving-doubling")
}

/// Checks that a message had the length that the receiver expected.
pub fn check_length(from: usize, received: usize, expected: usize) -> Result<()> {
    if received == expected {
        return Ok(());
    }
    Err(Error::comm(format!("rank {from} sent {received} bytes where {expected} were expected")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_found_by_node_and_chosen() {
        let group = GroupRanks::new(3, 5, vec![1, 3, 5, 6], [0, 0, 0, 1, 1, 0, 1].into());
        assert_eq!((group.rank, group.by_node()), (2, &[vec![0, 2], vec![1, 3]][..]));
        // Collectives of clones do not count again.
        assert!(std::ptr::eq(group.by_node(), group.clone().by_node()));
        let chosen = group.subset(&[0, 2]).unwrap();
        assert_eq!((chosen.rank, &chosen.ranks[..], chosen.id), (1, &[1, 5][..], 3));
        assert!(group.subset(&[0, 1]).is_none());
    }
}
