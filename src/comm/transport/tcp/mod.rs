//! Ranks as processes that communicate over TCP, without MPI, on one machine.
//!
//! Every two ranks have two connections: one for exchanges, which are over when the call returns,
//! and one for posted messages, which progress in the background. A message is a header and its
//! bytes. It is read directly into its destination if that is known when it arrives, and otherwise
//! buffered until it is requested. All sockets are polled with a [`Backoff`].
//!
//! Connections begin with a Noise handshake (`handshake.rs`). `--spawn` uses this transport.
//! Parameter servers use its connections, encrypted between hosts.

mod acceptor;
mod connection;
mod framing;
mod handshake;
mod mesh;
mod rendezvous;
mod secret;

use std::collections::{HashMap, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::num::NonZero;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use acceptor::Acceptor;
pub use connection::Connection;
pub use handshake::{Credentials, HANDSHAKE_TIMEOUT, Handshake, PeerId, call};
pub use mesh::{TcpMesh, has_ended};
pub use rendezvous::{RENDEZVOUS_VARIABLE, TcpRendezvous, host_name};
pub use secret::{Secret, write_secret};

use framing::{
    Bytes, ElementPieces, HEADER, Inbox, Received, Sink, abort, gone, goodbye, header, write,
};
use mesh::{CHANNELS, Connected};
use rendezvous::connect_all;

use super::{
    DeviceCollective, DeviceMessage, GroupRanks, InFlight, Incoming, NodeInfo, Outgoing, P2pBuffer,
    Payload, Peer, Transport, World, check_length, no_addresses, no_library,
};
use crate::algorithms;
use crate::polling::Backoff;
use crate::shared::Shared;
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_device::DeviceSpan;

/// Interval at which a rank that waits for one connection checks the others: an abort may arrive on
/// any.
const LISTEN_INTERVAL: Duration = Duration::from_millis(20);

/// Connects to the other ranks of a rendezvous, on this thread.
///
/// # Errors
/// Returns an error if a rank does not connect in time, or the network fails.
pub(crate) fn open(
    meeting: &TcpRendezvous,
    shared: Arc<Shared>,
) -> Result<(Box<dyn Transport>, World)> {
    let (connected, host) = connect_all(meeting)?;
    open_connected(meeting.rank, connected, host, shared)
}

/// Connects to the other ranks of a mesh, on this thread.
///
/// # Errors
/// Returns an error if a rank is gone or does not connect in time, or the network fails.
pub(crate) fn open_mesh(mesh: TcpMesh, shared: Arc<Shared>) -> Result<(Box<dyn Transport>, World)> {
    let rank = mesh.rank;
    open_connected(rank, mesh.connect()?, host_name(), shared)
}

/// Returns the transport over connections to the other ranks, and the world.
fn open_connected(
    rank: usize,
    connected: Vec<Connected>,
    host: String,
    shared: Arc<Shared>,
) -> Result<(Box<dyn Transport>, World)> {
    let ranks = connected.len();
    let hosts: Vec<String> = connected.iter().map(|one| one.host.clone()).collect();
    // The number of a node is the first rank on its host.
    let nodes: Arc<[usize]> = hosts
        .iter()
        .map(|host| hosts.iter().position(|other| other == host).unwrap_or(0))
        .collect();
    let links = connected.into_iter().map(|one| one.channels.map(Link::new).transpose());
    let links = links.collect::<Result<Vec<_>>>()?;
    let here = |ranks: &[usize]| ranks.iter().filter(|&&node| node == nodes[rank]).count();
    let local_rank = here(&nodes[..rank]);
    let local_size = here(&nodes);
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    if local_size > cores {
        shared.set_oversubscribed();
    }
    let transport = Tcp {
        rank,
        links,
        splits: HashMap::new(),
        aside: Vec::new(),
        listened: Instant::now(),
        shared,
    };
    let world = World {
        rank,
        launch_rank: rank,
        is_renumbered: false,
        nodes: nodes.clone(),
        node: NodeInfo { local_rank, local_size, host },
        library: "TCP".into(),
        shares_memory: false,
        vendor: false,
        claims_cuda_aware: false,
        thread_level: None,
        staging: algorithms::staging(ranks) + framing::STAGING,
    };
    Ok((Box::new(transport), world))
}

/// The connections to another rank.
struct Link {
    exchanges: TcpStream,
    inbox: Inbox,
    posts: TcpStream,
    posted: Inbox,
    leaving: VecDeque<PostedSend>,
    /// Posted receives with their groups, in order.
    expected: VecDeque<(u64, Box<dyn P2pBuffer>)>,
    /// The receive that is being filled, and the bytes filled so far.
    filling: Option<(Box<dyn P2pBuffer>, usize)>,
}

/// A posted message that is being sent.
struct PostedSend {
    header: [u8; HEADER],
    buffer: Box<dyn P2pBuffer>,
    sent: usize,
}

/// Returns the bytes of a message. Empty messages are never sent.
fn bytes(buffer: &mut dyn P2pBuffer) -> Result<&mut [u8]> {
    match buffer.payload()? {
        Payload::Host(bytes) => Ok(bytes),
        Payload::Device(_) => Err(no_addresses()),
    }
}

impl Link {
    fn new([exchanges, posts]: [TcpStream; CHANNELS]) -> Result<Self> {
        for stream in [&exchanges, &posts] {
            let set = stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true));
            set.map_err(|e| Error::comm(format!("cannot configure a connection: {e}")))?;
        }
        Ok(Self {
            exchanges,
            inbox: Inbox::default(),
            posts,
            posted: Inbox::default(),
            leaving: VecDeque::new(),
            expected: VecDeque::new(),
            filling: None,
        })
    }

    /// Progresses posted messages.
    fn progress(&mut self, peer: usize) -> Result<()> {
        while let Some(first) = self.leaving.front_mut() {
            let payload = bytes(&mut *first.buffer)?;
            let len = HEADER + payload.len();
            write(&mut self.posts, &[&first.header, payload], &mut first.sent, peer)?;
            if first.sent < len {
                break;
            }
            if let Some(done) = self.leaving.pop_front() {
                done.buffer.finish(Ok(()));
            }
        }
        loop {
            self.deliver(peer)?;
            if let Some((buffer, at)) = &mut self.filling {
                let mut sink = Bytes { into: bytes(&mut **buffer)?, at: *at };
                let found = self.posted.read_into(&mut self.posts, peer, &mut sink)?;
                *at = sink.at;
                match found {
                    Received::Whole => self
                        .filling
                        .take()
                        .into_iter()
                        .for_each(|(buffer, _)| buffer.finish(Ok(()))),
                    Received::Some | Received::Nothing => return Ok(()),
                }
                continue;
            }
            let begun = self.posted.unclaimed(&mut self.posts, peer)?;
            let wanted = begun.and_then(|(group, len)| {
                let index = self.expected.iter().position(|(other, _)| *other == group)?;
                Some((len, self.expected.remove(index)?.1))
            });
            match wanted {
                Some((len, mut buffer)) => {
                    check_length(peer, len, bytes(&mut *buffer)?.len())?;
                    self.filling = Some((buffer, 0));
                }
                None if !self.posted.keep(&mut self.posts, peer)? => return Ok(()),
                None => {}
            }
        }
    }

    /// Delivers messages that arrived before their receive was posted.
    fn deliver(&mut self, peer: usize) -> Result<()> {
        let mut index = 0;
        while let Some((group, _)) = self.expected.get(index) {
            let Some(message) = self.posted.take(*group) else {
                index += 1;
                continue;
            };
            if let Some((_, mut buffer)) = self.expected.remove(index) {
                let into = bytes(&mut *buffer)?;
                check_length(peer, message.len(), into.len())?;
                into.copy_from_slice(&message);
                buffer.finish(Ok(()));
            }
        }
        Ok(())
    }

    fn under_way(&self) -> InFlight {
        match (self.leaving.is_empty(), self.expected.is_empty() && self.filling.is_none()) {
            (false, _) => InFlight::Leaving,
            (true, false) => InFlight::Arriving,
            (true, true) => InFlight::Nothing,
        }
    }
}

struct Tcp {
    rank: usize,
    /// The connections by rank; `None` for this one.
    links: Vec<Option<Link>>,
    /// How often each group was split.
    splits: HashMap<usize, u64>,
    /// Staging memory for elements that are added.
    aside: Vec<f32>,
    /// The last time that all connections were checked.
    listened: Instant,
    shared: Arc<Shared>,
}

/// A message that an exchange waits for.
struct Awaited<'a> {
    from: usize,
    len: usize,
    sink: &'a mut dyn Sink,
    /// Whether it is the message that is being received.
    begun: bool,
    done: bool,
}

impl Awaited<'_> {
    /// Reads what has arrived. Returns true on progress.
    fn advance(&mut self, link: &mut Link, group: u64) -> Result<bool> {
        let Link { exchanges, inbox, .. } = link;
        if !self.begun {
            if let Some(message) = inbox.take(group) {
                check_length(self.from, message.len(), self.len)?;
                let mut rest = &message[..];
                while !rest.is_empty() {
                    let room = self.sink.room();
                    let len = room.len().min(rest.len());
                    room[..len].copy_from_slice(&rest[..len]);
                    self.sink.filled(len);
                    rest = &rest[len..];
                }
                self.done = true;
                return Ok(true);
            }
            match inbox.unclaimed(exchanges, self.from)? {
                Some((other, len)) if other == group => {
                    check_length(self.from, len, self.len)?;
                    self.begun = true;
                }
                _ if inbox.has_left() => return Err(gone(self.from)),
                _ => return inbox.keep(exchanges, self.from),
            }
        }
        let found = inbox.read_into(exchanges, self.from, self.sink)?;
        self.done = matches!(found, Received::Whole);
        Ok(!matches!(found, Received::Nothing))
    }
}

impl Tcp {
    fn link(&mut self, rank: usize) -> Result<&mut Link> {
        let me = self.rank;
        let link = self.links.get_mut(rank).and_then(Option::as_mut);
        link.ok_or_else(|| Error::internal(format!("no connection from rank {me} to rank {rank}")))
    }

    /// Sends bytes to one rank and receives a message from another one at the same time.
    fn run(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, &[&[u8]])>,
        receive: Option<(usize, usize, &mut dyn Sink)>,
    ) -> Result<()> {
        self.run_exchange(group, send, receive).map_err(|error| self.cause(error))
    }

    /// Returns the cause of an error: a rank that is gone may have ended because another one has
    /// aborted, and forwarded that.
    fn cause(&mut self, error: Error) -> Error {
        if error.kind() != Kind::Lost {
            return error;
        }
        for (peer, link) in self.links.iter_mut().enumerate() {
            let Some(link) = link else { continue };
            if let Err(other) = link.inbox.listen(&mut link.exchanges, peer)
                && other.kind() != Kind::Lost
            {
                return other;
            }
        }
        error
    }

    fn run_exchange(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, &[&[u8]])>,
        receive: Option<(usize, usize, &mut dyn Sink)>,
    ) -> Result<()> {
        let id = group.id as u64;
        let lens = send.map(|(_, pieces)| pieces.iter().map(|piece| piece.len()).sum::<usize>());
        let head = header(id, lens.unwrap_or(0));
        let sending = send.filter(|_| lens != Some(0)).map(|(to, pieces)| {
            let pieces: Vec<&[u8]> =
                std::iter::once(&head[..]).chain(pieces.iter().copied()).collect();
            (group.ranks[to], pieces)
        });
        let total = lens.map_or(0, |len| HEADER + len);
        self.shared.add_sent(lens.unwrap_or(0));
        let mut awaited = receive.filter(|(_, len, _)| *len > 0).map(|(from, len, sink)| Awaited {
            from: group.ranks[from],
            len,
            sink,
            begun: false,
            done: false,
        });
        let mut sent = 0;
        let mut backoff = Backoff::new(false);
        loop {
            let mut progressed = false;
            if let Some((to, pieces)) = sending.as_ref().filter(|_| sent < total) {
                progressed |= write(&mut self.link(*to)?.exchanges, pieces, &mut sent, *to)?;
            }
            if let Some(awaited) = awaited.as_mut().filter(|awaited| !awaited.done) {
                progressed |= awaited.advance(self.link(awaited.from)?, id)?;
            }
            let all_sent = sending.is_none() || sent == total;
            if all_sent && awaited.as_ref().is_none_or(|awaited| awaited.done) {
                return Ok(());
            }
            if progressed {
                backoff.restart();
            } else {
                self.poll()?;
                backoff.pause(&self.shared);
            }
        }
    }

    /// Sends an abort to all ranks.
    fn send_abort(&mut self, code: i32) {
        let words = abort(code);
        for (peer, link) in self.links.iter_mut().enumerate() {
            if let Some(link) = link {
                // A rank that does not receive it sees the connection end.
                let _ = write(&mut link.exchanges, &[&words], &mut 0, peer);
            }
        }
    }

    /// Progresses posted messages, and checks for an abort of this rank or another.
    fn poll(&mut self) -> Result<()> {
        if let Some(code) = self.shared.aborted() {
            self.abort(code);
        }
        self.shared.check_interruption()?;
        let listens = self.listened.elapsed() >= LISTEN_INTERVAL;
        if listens {
            self.listened = Instant::now();
        }
        for (peer, link) in self.links.iter_mut().enumerate() {
            let Some(link) = link else { continue };
            if link.under_way() != InFlight::Nothing {
                link.progress(peer)?;
            }
            if listens {
                link.inbox.listen(&mut link.exchanges, peer)?;
            }
        }
        Ok(())
    }
}

impl Transport for Tcp {
    fn exchange(
        &mut self,
        group: &GroupRanks,
        _sums: bool,
        send: Option<Outgoing<'_>>,
        receive: Option<Incoming<'_, '_>>,
    ) -> Result<()> {
        let pieces: Vec<&[u8]> = send
            .iter()
            .flat_map(|send| send.pieces)
            .map(|piece| bytemuck::cast_slice(piece))
            .collect();
        let send = send.map(|send| (send.to, &pieces[..]));
        let mut aside = std::mem::take(&mut self.aside);
        let done = match receive {
            None => self.run(group, send, None),
            Some(Incoming { from, pieces, add }) => {
                let len = pieces.iter().map(|piece| size_of_val(*piece)).sum();
                let mut sink = ElementPieces::new(pieces, add.then_some(&mut aside));
                self.run(group, send, Some((from, len, &mut sink)))
            }
        };
        self.aside = aside;
        done
    }

    fn exchange_bytes(
        &mut self,
        group: &GroupRanks,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
    ) -> Result<()> {
        let piece = send.map(|(to, bytes)| (to, [bytes]));
        let send = piece.as_ref().map(|(to, pieces)| (*to, &pieces[..]));
        match receive {
            None => self.run(group, send, None),
            Some((from, into)) => {
                let len = into.len();
                self.run(group, send, Some((from, len, &mut Bytes { into, at: 0 })))
            }
        }
    }

    fn exchange_device(
        &mut self,
        _: &GroupRanks,
        _: Option<DeviceMessage<'_>>,
        _: Option<DeviceMessage<'_>>,
    ) -> Result<()> {
        Err(no_addresses())
    }

    fn post(
        &mut self,
        group: &GroupRanks,
        peer: Peer,
        mut buffer: Box<dyn P2pBuffer>,
    ) -> Result<()> {
        let len = match bytes(&mut *buffer).map(|bytes| bytes.len()) {
            Ok(len) if len > 0 => len,
            other => {
                let done = other.map(drop);
                buffer.finish(done.clone());
                return done;
            }
        };
        let id = group.id as u64;
        let (Peer::To(other) | Peer::From(other)) = peer;
        let other = group.ranks[other];
        let link = self.link(other)?;
        match peer {
            Peer::To(_) => {
                link.leaving.push_back(PostedSend { header: header(id, len), buffer, sent: 0 });
                link.progress(other)?;
                self.shared.add_sent(len);
                Ok(())
            }
            Peer::From(_) => {
                link.expected.push_back((id, buffer));
                link.progress(other)
            }
        }
    }

    fn progress(&mut self) -> Result<InFlight> {
        self.poll().map_err(|error| self.cause(error))?;
        Ok(self.links.iter().flatten().map(Link::under_way).max().unwrap_or(InFlight::Nothing))
    }

    fn vendor(&mut self, _: &GroupRanks, _: DeviceCollective, _: &mut [f32]) -> Result<()> {
        Err(no_library())
    }

    fn vendor_device(
        &mut self,
        _: &GroupRanks,
        _: DeviceCollective,
        _: DeviceSpan<'_>,
    ) -> Result<()> {
        Err(no_addresses())
    }

    fn split(&mut self, parent: &GroupRanks, color: usize) -> Result<usize> {
        // All ranks of the parent have split it equally often.
        let count = self.splits.entry(parent.id).or_default();
        *count += 1;
        let words = [parent.id as u64, *count, color as u64];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        // The world is 0, and the largest numbers are reserved.
        Ok(1 + crc32fast::hash(&bytes) as usize + ((*count as usize) << 32))
    }

    fn abort(&mut self, code: i32) {
        self.send_abort(code);
        std::process::exit(code)
    }

    fn leave(&mut self, in_order: bool) {
        if let Some(code) = self.links.iter().flatten().find_map(|link| link.inbox.aborted()) {
            // Without this, a rank that has not received the abort would find that this one is gone.
            self.send_abort(code);
        }
        let links = self
            .links
            .iter_mut()
            .enumerate()
            .filter_map(|(peer, link)| Some((peer, link.as_mut()?)));
        for (peer, link) in links {
            for (_, buffer) in link.expected.drain(..) {
                buffer
                    .finish(Err(Error::comm("another message failed before this one had arrived")));
            }
            if in_order {
                for stream in [&mut link.exchanges, &mut link.posts] {
                    let _ = write(stream, &[&goodbye()], &mut 0, peer);
                    let _ = stream.shutdown(Shutdown::Write);
                }
            }
        }
        // Closing a socket with unread data would discard what the other end has not read yet.
        while in_order
            && self.shared.aborted().is_none()
            && self.shared.check_interruption().is_ok()
        {
            let mut links = self
                .links
                .iter_mut()
                .enumerate()
                .filter_map(|(peer, link)| Some((peer, link.as_mut()?)));
            let waits = links.any(|(peer, link)| {
                let heard = link.inbox.listen(&mut link.exchanges, peer);
                // A rank that still sends expects a message that will not come.
                heard.is_ok() && !link.inbox.has_left() && !link.inbox.is_arriving()
            });
            if !waits {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.links.clear();
    }
}
