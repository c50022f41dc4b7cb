//! Ranks as threads of one process: for tests, and to simulate a cluster on one machine.
//!
//! Messages are copied through mailboxes, a FIFO queue for each sender, receiver and group. A rank
//! whose communication thread has ended is *gone*: ranks that wait for a message from it, or send
//! it one, get an error instead of waiting for ever.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{
    DeviceCollective, DeviceMessage, GroupRanks, InFlight, Incoming, NodeInfo, Outgoing, P2pBuffer,
    Payload, Peer, Transport, World, check_length, no_addresses, no_library,
};
use crate::algorithms;
use crate::shared::Shared;
use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::add_serial;
use hpctrain_device::DeviceSpan;

/// The panic payload with which a thread that calls [`Comm::abort`](crate::Comm::abort) silently
/// unwinds, because other ranks share the process.
#[derive(Debug)]
pub struct Aborted {
    /// The requested exit code.
    pub code: i32,
}

/// Interval at which a rank that waits for a message checks whether its own side requested an
/// abort.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Creates the transport and the world of each rank; `nodes` has their nodes.
pub(crate) fn open(
    nodes: &[usize],
    shared: &[Arc<Shared>],
) -> Vec<(Box<dyn Transport + Send>, World)> {
    let ranks = nodes.len();
    let hub = Arc::new(InProcessHub {
        post: Mutex::new(MailboxState { gone: vec![false; ranks], ..MailboxState::default() }),
        arrivals: (0..ranks).map(|_| Condvar::new()).collect(),
    });
    (0..ranks).map(|rank| open_rank(rank, nodes, &hub, &shared[rank])).collect()
}

/// Creates the transport and the world of one rank.
fn open_rank(
    rank: usize,
    nodes: &[usize],
    hub: &Arc<InProcessHub>,
    shared: &Arc<Shared>,
) -> (Box<dyn Transport + Send>, World) {
    let on = |others: &[usize]| others.iter().filter(|&&node| node == nodes[rank]).count();
    let host =
        if nodes[rank] == 0 { "localhost".into() } else { format!("simulated-{}", nodes[rank]) };
    let world = World {
        rank,
        launch_rank: rank,
        is_renumbered: false,
        nodes: nodes.into(),
        node: NodeInfo { local_rank: on(&nodes[..rank]), local_size: on(nodes), host },
        library: "threads of one process".into(),
        shares_memory: false,
        vendor: false,
        claims_cuda_aware: false,
        thread_level: None,
        staging: algorithms::staging(nodes.len()),
    };
    let transport =
        Mailboxes { rank, hub: hub.clone(), shared: shared.clone(), splits: 0, posted: Vec::new() };
    (Box::new(transport), world)
}

/// Sender and receiver in the world, the group, and whether messages are posted ones.
type Route = (usize, usize, usize, bool);

/// State shared by all ranks.
struct InProcessHub {
    post: Mutex<MailboxState>,
    /// Signals arrivals, by receiver.
    arrivals: Vec<Condvar>,
}

/// A message, and the length of the chain of exchanges that it depends on.
struct Message {
    bytes: Vec<u8>,
    round: u64,
}

#[derive(Default)]
struct MailboxState {
    mail: HashMap<Route, VecDeque<Message>>,
    gone: Vec<bool>,
    /// The rank that aborted the world, and its exit code.
    aborted: Option<(usize, i32)>,
}

impl MailboxState {
    /// Returns an error if the world was aborted, or this rank is gone.
    fn check(&self, peer: usize) -> Result<()> {
        if let Some((rank, code)) = self.aborted {
            return Err(Error::comm(format!("rank {rank} aborted with code {code}")));
        }
        if self.gone[peer] {
            return Err(Error::comm(format!("rank {peer} is gone")));
        }
        Ok(())
    }
}

impl InProcessHub {
    fn lock(&self) -> MutexGuard<'_, MailboxState> {
        self.post.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fills a posted receive if its message has arrived. Returns true if it has.
    fn arrived(&self, route: Route, buffer: &mut dyn P2pBuffer) -> Result<bool> {
        let mut post = self.lock();
        let Some(message) = post.mail.get_mut(&route).and_then(VecDeque::pop_front) else {
            return post.check(route.0).map(|()| false);
        };
        drop(post);
        if let Payload::Host(into) = buffer.payload()? {
            check_length(route.0, message.bytes.len(), into.len())?;
            into.copy_from_slice(&message.bytes);
        }
        Ok(true)
    }

    fn wake_all(&self) {
        self.arrivals.iter().for_each(Condvar::notify_all);
    }
}

/// One rank's access to the mailboxes.
struct Mailboxes {
    rank: usize,
    hub: Arc<InProcessHub>,
    shared: Arc<Shared>,
    /// The number of groups created so far, without the world.
    splits: usize,
    /// Posted receives, and their routes.
    posted: Vec<(Route, Box<dyn P2pBuffer>)>,
}

impl Mailboxes {
    fn put(&self, group: &GroupRanks, to: usize, is_posted: bool, bytes: Vec<u8>) -> Result<()> {
        let to = group.ranks[to];
        let len = bytes.len();
        let message = Message { bytes, round: self.shared.rounds() };
        let mut post = self.hub.lock();
        post.check(to)?;
        post.mail.entry((self.rank, to, group.id, is_posted)).or_default().push_back(message);
        drop(post);
        self.hub.arrivals[to].notify_all();
        self.shared.add_sent(len);
        Ok(())
    }

    fn take(&mut self, group: &GroupRanks, from: usize) -> Result<Message> {
        let from = group.ranks[from];
        let hub = self.hub.clone();
        let mut post = hub.lock();
        loop {
            if let Some(message) =
                post.mail.entry((from, self.rank, group.id, false)).or_default().pop_front()
            {
                return Ok(message);
            }
            post.check(from)?;
            if let Some(code) = self.shared.aborted() {
                drop(post);
                self.abort(code);
                return Err(Error::comm(format!("aborted with code {code}")));
            }
            let arrival = &hub.arrivals[self.rank];
            post =
                arrival.wait_timeout(post, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Transport for Mailboxes {
    fn exchange(
        &mut self,
        group: &GroupRanks,
        _sums: bool,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_, '_>>,
    ) -> Result<()> {
        let mut sends = false;
        if let Some(Outgoing { to, pieces }) = send {
            let mut message =
                Vec::with_capacity(pieces.iter().map(|piece| size_of_val(*piece)).sum());
            pieces.iter().for_each(|piece| message.extend_from_slice(bytemuck::cast_slice(piece)));
            if !message.is_empty() {
                self.put(group, to, false, message)?;
                sends = true;
            }
        }
        let len = receive
            .as_ref()
            .map_or(0, |receive| receive.pieces.iter().map(|piece| piece.len()).sum());
        let Some(Incoming { from, pieces, add }) = receive.filter(|_| len > 0) else {
            self.shared.exchanged(sends, None);
            return Ok(());
        };
        let Message { bytes, round } = self.take(group, from)?;
        self.shared.exchanged(sends, Some(round));
        check_length(group.ranks[from], bytes.len(), len * size_of::<f32>())?;
        let message: Vec<f32> = bytemuck::allocation::pod_collect_to_vec(&bytes);
        let mut rest = &message[..];
        for piece in pieces.iter_mut() {
            let (here, after) = rest.split_at(piece.len());
            if add {
                add_serial(here, piece)
            } else {
                piece.copy_from_slice(here)
            }
            rest = after;
        }
        Ok(())
    }

    fn exchange_bytes(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
    ) -> Result<()> {
        let send = send.filter(|(_, message)| !message.is_empty());
        if let Some((to, message)) = send {
            self.put(group, to, false, message.to_vec())?;
        }
        let Some((from, into)) = receive.filter(|(_, into)| !into.is_empty()) else {
            self.shared.exchanged(send.is_some(), None);
            return Ok(());
        };
        let Message { bytes, round } = self.take(group, from)?;
        self.shared.exchanged(send.is_some(), Some(round));
        check_length(group.ranks[from], bytes.len(), into.len())?;
        into.copy_from_slice(&bytes);
        Ok(())
    }

    fn post(
        &mut self,
        group: &GroupRanks,
        peer: Peer,
        mut buffer: Box<dyn P2pBuffer>,
    ) -> Result<()> {
        let posted = buffer.payload().and_then(|payload| match (payload, peer) {
            (Payload::Host([]), _) => Ok(true),
            (Payload::Host(bytes), Peer::To(to)) => {
                self.put(group, to, true, bytes.to_vec()).map(|()| true)
            }
            (Payload::Host(_), Peer::From(_)) => Ok(false),
            (Payload::Device(_), _) => Err(no_addresses()),
        });
        match (posted, peer) {
            (Ok(false), Peer::From(from)) => {
                self.posted.push(((group.ranks[from], self.rank, group.id, true), buffer));
                self.progress().map(drop)
            }
            (posted, _) => {
                let posted = posted.map(drop);
                buffer.finish(posted.clone());
                posted
            }
        }
    }

    fn progress(&mut self) -> Result<InFlight> {
        let mut index = 0;
        while index < self.posted.len() {
            let (before, rest) = self.posted.split_at_mut(index);
            let (route, buffer) = &mut rest[0];
            // A receive that was posted earlier takes the next message of its route.
            let has_turn = before.iter().all(|(other, _)| other != route);
            let arrived =
                if has_turn { self.hub.arrived(*route, &mut **buffer) } else { Ok(false) };
            match arrived {
                Ok(false) => index += 1,
                done => {
                    let done = done.map(drop);
                    self.posted.remove(index).1.finish(done.clone());
                    done?;
                }
            }
        }
        // A thread that waits for a device must see an abort.
        self.hub.lock().check(self.rank)?;
        // Sends are complete at once, when the message is in the mailbox.
        Ok(if self.posted.is_empty() { InFlight::Nothing } else { InFlight::Arriving })
    }

    fn exchange_device(
        &mut self,
        _: &GroupRanks,
        _: Option<DeviceMessage<'_>>,
        _: Option<DeviceMessage<'_>>,
    ) -> Result<()> {
        Err(no_addresses())
    }

    fn vendor_device(
        &mut self,
        _: &GroupRanks,
        _: DeviceCollective,
        _: DeviceSpan<'_>,
    ) -> Result<()> {
        Err(no_addresses())
    }

    fn vendor(&mut self, _: &GroupRanks, _: DeviceCollective, _: &mut [f32]) -> Result<()> {
        Err(no_library())
    }

    fn split(&mut self, _: &GroupRanks, _: usize) -> Result<usize> {
        self.splits += 1;
        Ok(self.splits)
    }

    fn abort(&mut self, code: i32) {
        self.hub.lock().aborted.get_or_insert((self.rank, code));
        self.hub.wake_all();
    }

    fn leave(&mut self, _in_order: bool) {
        for (_, buffer) in self.posted.drain(..) {
            buffer.finish(Err(Error::comm("another message failed before this one had arrived")));
        }
        self.hub.lock().gone[self.rank] = true;
        self.hub.wake_all();
    }
}

impl Drop for Mailboxes {
    fn drop(&mut self) {
        // Needed when a panic has ended the communication thread.
        self.leave(false);
    }
}
