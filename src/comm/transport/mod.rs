//! The transport under the algorithms: exchanges of numbers and bytes between two ranks.

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

/// Groups whose ranks this process has sorted by their nodes.
static SORTED: AtomicU64 = AtomicU64::new(0);

/// Number of times that this process has sorted the ranks of a group by their nodes, for tests of
/// scale.
#[doc(hidden)]
pub fn sorted_by_node() -> u64 {
    SORTED.load(Relaxed)
}

/// The node of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeInfo {
    /// This rank's number among the ranks of its node.
    pub local_rank: usize,
    /// Ranks on this node.
    pub local_size: usize,
    /// The node's name.
    pub host: String,
}

/// The world of a rank, as it was started.
#[derive(Clone)]
pub struct World {
    pub rank: usize,
    /// The node of every rank, as a number.
    pub nodes: Arc<[usize]>,
    pub node: NodeInfo,
    pub library: String,
    /// Whether ranks of this node exchange through shared memory.
    pub shares_memory: bool,
    /// Whether the library has collectives of its own.
    pub vendor: bool,
    /// Whether the library says that it takes addresses of GPUs.
    pub claims_devices: bool,
    /// Thread level of MPI; none without MPI.
    pub threads: Option<&'static str>,
    /// Bytes that messages pass through, at most.
    pub staging: usize,
}

/// The ranks of a group, seen from one of them.
#[derive(Debug, Clone)]
pub struct GroupRanks {
    /// Number of the group on the wire; the same on all its ranks.
    pub id: usize,
    /// My number in the group.
    pub rank: usize,
    /// Their numbers in the world, ascending.
    pub ranks: Arc<[usize]>,
    /// The node of every rank of the world.
    nodes: Arc<[usize]>,
    /// The result of [`GroupRanks::by_node`], once it was asked for: collectives ask for it each
    /// time.
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

    /// The next rank around the ring.
    pub fn next(&self) -> usize {
        (self.rank + 1) % self.size()
    }

    /// The previous rank around the ring.
    pub fn previous(&self) -> usize {
        (self.rank + self.size() - 1) % self.size()
    }

    /// The group's ranks node by node, in the order of the nodes' first ranks. Clones of a group
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

    /// Some of the group's ranks by themselves, or none if I am not one of them.
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

/// Elements for one rank, gathered from pieces of memory.
#[derive(Clone, Copy)]
pub struct Outgoing<'a> {
    pub to: usize,
    pub pieces: &'a [&'a [f32]],
}

/// Elements from one rank, spread over pieces of memory that are as long as the sender's.
pub struct Incoming<'a, 'b> {
    pub from: usize,
    pub pieces: &'a mut [&'b mut [f32]],
    /// Whether they are added to those in memory, or replace them.
    pub add: bool,
}

/// The memory of a message.
pub enum Payload<'a> {
    Host(&'a mut [u8]),
    /// Device memory, for a wire that takes its addresses.
    Device(DeviceSpan<'a>),
}

/// The other rank of a posted message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Its receiver.
    To(usize),
    /// Its sender.
    From(usize),
}

/// Posted messages that are neither gone nor here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InFlight {
    /// None.
    Nothing,
    /// Some are to arrive, none is leaving.
    Arriving,
    /// Some are leaving: another rank may wait for them.
    Leaving,
}

/// A message that the wire owns until it has left or arrived: its memory must neither move nor be
/// touched before.
pub trait P2pBuffer: Send {
    /// The message. Its address stays the same until [`P2pBuffer::finish`].
    fn payload(&mut self) -> Result<Payload<'_>>;

    /// Gives the memory back to its owner.
    fn finish(self: Box<Self>, done: Result<()>);

    /// Reports a message that may never be done with. Its memory is leaked: the network may still
    /// use it.
    fn abandon(self: Box<Self>, error: Error);
}

/// Moves numbers and bytes between ranks. Lives on the communication thread; ranks are numbers in
/// the group.
///
/// After an error the wire's state is unknown: nothing but [`Transport::leave`] and
/// [`Transport::abort`] is called.
pub trait Transport {
    /// Sends and receives at once; returns when all memory may be used again. It may return before
    /// the receiver has its elements. Nothing is sent where there are no elements. `sums` says, to
    /// sender and receiver alike, whether the elements are about to be added: then the way through
    /// the cache is the shorter one.
    fn exchange(
        &mut self,
        group: &GroupRanks,
        sums: bool,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_, '_>>,
    ) -> Result<()>;

    /// As [`Transport::exchange`], of bytes. The receiver knows the length: a message of another
    /// length is an error.
    fn exchange_bytes(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
    ) -> Result<()>;

    /// As [`Transport::exchange_bytes`], of device memory by its address. Compute and the device
    /// have finished their work on it.
    fn exchange_device(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, DeviceSpan<'_>)>,
        receive: Option<(usize, DeviceSpan<'_>)>,
    ) -> Result<()>;

    /// Starts a message, and returns before it has left or arrived: otherwise two neighbours that
    /// send to each other before they receive would wait for ever. Posted messages between two
    /// ranks of a group arrive in the order of their posts, apart from those of exchanges. The
    /// receiver knows the length: a message of another length is an error.
    fn post(&mut self, group: &GroupRanks, peer: Peer, parcel: Box<dyn P2pBuffer>) -> Result<()>;

    /// Lets started messages go on; those that are still under way.
    fn progress(&mut self) -> Result<InFlight>;

    /// Runs a collective of the MPI library.
    fn vendor(
        &mut self,
        group: &GroupRanks,
        call: DeviceCollective,
        memory: &mut [f32],
    ) -> Result<()>;

    /// As [`Transport::vendor`], of device memory by its address; but the sum of a reduce-scatter
    /// ends where part 0 was.
    fn vendor_device(
        &mut self,
        group: &GroupRanks,
        call: DeviceCollective,
        memory: DeviceSpan<'_>,
    ) -> Result<()>;

    /// Collective over `parent`: a group of its ranks of one colour. Returns its number.
    fn split(&mut self, parent: &GroupRanks, color: usize) -> Result<usize>;

    /// Ends all ranks.
    fn abort(&mut self, code: i32);

    /// This rank takes no further part: in good order, or because a request failed.
    fn leave(&mut self, in_order: bool);
}

/// Bytes that a rank sends in a collective of a library, if that sends no more than it must.
pub fn least_sent(group: &GroupRanks, call: DeviceCollective, words: usize) -> usize {
    let others = words * size_of::<f32>() / group.size() * (group.size() - 1);
    if let DeviceCollective::AllReduce = call { 2 * others } else { others }
}

/// Wires other than MPI copy memory that the host can read.
fn no_addresses() -> Error {
    Error::input("comm.transport = cuda-aware requires MPI").hint("use host-staged or auto")
}

/// Wires other than MPI have no collectives of a library.
fn no_library() -> Error {
    Error::input("comm.algorithm = vendor requires MPI").hint("use ring or halving-doubling")
}

/// Whether a message had the length that the receiver knew it would have.
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
