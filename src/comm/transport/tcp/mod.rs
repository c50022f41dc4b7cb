//! Ranks as processes that meet by themselves and exchange over TCP: without MPI, on one machine.
//!
//! Every two ranks have two connections: one for exchanges, which are over when the call returns,
//! and one for posted messages, which go on in the background. A message is a header and its bytes;
//! it is read straight into its memory where that is known when it arrives, else kept until it is
//! asked for. All sockets are polled, as [`Backoff`] has it.

mod acceptor;
mod connection;
mod framing;
mod handshake;
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
pub use rendezvous::{MEETING, TcpRendezvous};
pub use secret::{Secret, write_secret};

use framing::{
    Bytes, ElementPieces, HEADER, Inbox, Received, Sink, abort, bye, gone, header, write,
};
use rendezvous::meet;

use super::{
    DeviceCollective, GroupRanks, InFlight, Incoming, NodeInfo, Outgoing, P2pBuffer, Payload, Peer,
    Transport, World, check_length, no_addresses, no_library,
};
use crate::algorithms;
use crate::polling::Backoff;
use crate::shared::Shared;
use hpctrain_base::error::{Error, Result};
use hpctrain_device::DeviceSpan;

/// Interval at which a rank that waits for one connection listens to the others: an abort may come
/// over any.
const LISTEN: Duration = Duration::from_millis(20);

/// Meets the other ranks on this thread.
///
/// # Errors
/// They do not come, or the network refused.
pub(crate) fn open(
    meeting: &TcpRendezvous,
    shared: Arc<Shared>,
) -> Result<(Box<dyn Transport>, World)> {
    let (connected, host) = meet(meeting)?;
    let rank = meeting.rank;
    let ranks = meeting.ranks;
    let hosts: Vec<String> = connected.iter().map(|one| one.host.clone()).collect();
    let first = |host: &String| hosts.iter().position(|other| other == host).unwrap_or(0);
    let nodes: Arc<[usize]> = hosts.iter().map(first).collect();
    let links = connected.into_iter().map(|one| one.lanes.map(Link::new).transpose());
    let links = links.collect::<Result<Vec<_>>>()?;
    let here = |ranks: &[usize]| ranks.iter().filter(|&&node| node == nodes[rank]).count();
    let local_rank = here(&nodes[..rank]);
    let local_size = here(&nodes);
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    if local_size > cores {
        shared.set_oversubscribed();
    }
    let wire = Tcp {
        rank,
        links,
        splits: HashMap::new(),
        aside: Vec::new(),
        listened: Instant::now(),
        shared,
    };
    let world = World {
        rank,
        nodes: nodes.clone(),
        node: NodeInfo { local_rank, local_size, host },
        library: "TCP".into(),
        shares_memory: false,
        vendor: false,
        claims_devices: false,
        threads: None,
        staging: algorithms::staging(ranks) + framing::STAGING,
    };
    Ok((Box::new(wire), world))
}

/// The connections to another rank.
struct Link {
    exchanges: TcpStream,
    inbox: Inbox,
    posts: TcpStream,
    posted: Inbox,
    leaving: VecDeque<Leaving>,
    /// Memory of messages that are to arrive, by group, in order.
    expected: VecDeque<(u64, Box<dyn P2pBuffer>)>,
    /// The one that is being filled, so far.
    filling: Option<(Box<dyn P2pBuffer>, usize)>,
}

/// A posted message on its way out.
struct Leaving {
    header: [u8; HEADER],
    parcel: Box<dyn P2pBuffer>,
    sent: usize,
}

/// The bytes of a message; empty ones are never sent.
fn bytes(parcel: &mut dyn P2pBuffer) -> Result<&mut [u8]> {
    match parcel.payload()? {
        Payload::Host(bytes) => Ok(bytes),
        Payload::Device(_) => Err(no_addresses()),
    }
}

impl Link {
    fn new([exchanges, posts]: [TcpStream; rendezvous::LANES]) -> Result<Self> {
        for stream in [&exchanges, &posts] {
            let set = stream.set_nodelay(true).and_then(|()| stream.set_nonblocking(true));
            set.map_err(|e| Error::comm(format!("a connection was lost at its start: {e}")))?;
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

    /// Lets posted messages go on.
    fn progress(&mut self, peer: usize) -> Result<()> {
        while let Some(first) = self.leaving.front_mut() {
            let payload = bytes(&mut *first.parcel)?;
            let len = HEADER + payload.len();
            write(&mut self.posts, &[&first.header, payload], &mut first.sent, peer)?;
            if first.sent < len {
                break;
            }
            if let Some(done) = self.leaving.pop_front() {
                done.parcel.finish(Ok(()));
            }
        }
        loop {
            self.deliver(peer)?;
            if let Some((parcel, at)) = &mut self.filling {
                let mut sink = Bytes { into: bytes(&mut **parcel)?, at: *at };
                let found = self.posted.read_into(&mut self.posts, peer, &mut sink)?;
                *at = sink.at;
                match found {
                    Received::Whole => self
                        .filling
                        .take()
                        .into_iter()
                        .for_each(|(parcel, _)| parcel.finish(Ok(()))),
                    Received::Some | Received::Nothing => return Ok(()),
                }
                continue;
            }
            let begun = self.posted.undecided(&mut self.posts, peer)?;
            let wanted = begun.and_then(|(group, len)| {
                let index = self.expected.iter().position(|(other, _)| *other == group)?;
                Some((len, self.expected.remove(index)?.1))
            });
            match wanted {
                Some((len, mut parcel)) => {
                    check_length(peer, len, bytes(&mut *parcel)?.len())?;
                    self.filling = Some((parcel, 0));
                }
                None if !self.posted.keep(&mut self.posts, peer)? => return Ok(()),
                None => {}
            }
        }
    }

    /// Hands out messages that came before their memory did.
    fn deliver(&mut self, peer: usize) -> Result<()> {
        let mut index = 0;
        while let Some((group, _)) = self.expected.get(index) {
            let Some(message) = self.posted.take(*group) else {
                index += 1;
                continue;
            };
            if let Some((_, mut parcel)) = self.expected.remove(index) {
                let into = bytes(&mut *parcel)?;
                check_length(peer, message.len(), into.len())?;
                into.copy_from_slice(&message);
                parcel.finish(Ok(()));
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
    /// By rank; none to this one.
    links: Vec<Option<Link>>,
    /// Times that each group was split.
    splits: HashMap<usize, u64>,
    /// Memory for elements that are to be added.
    aside: Vec<f32>,
    /// The last time that all connections were listened to.
    listened: Instant,
    shared: Arc<Shared>,
}

/// A message that is awaited.
struct Awaited<'a> {
    from: usize,
    len: usize,
    sink: &'a mut dyn Sink,
    /// Whether it is the one that is arriving.
    begun: bool,
    done: bool,
}

impl Awaited<'_> {
    /// Takes in what is there. Whether something moved.
    fn go_on(&mut self, link: &mut Link, group: u64) -> Result<bool> {
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
            match inbox.undecided(exchanges, self.from)? {
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

    /// Sends some bytes to one rank, and takes a message of another one, at once.
    fn run(
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
            let mut moved = false;
            if let Some((to, pieces)) = sending.as_ref().filter(|_| sent < total) {
                moved |= write(&mut self.link(*to)?.exchanges, pieces, &mut sent, *to)?;
            }
            if let Some(awaited) = awaited.as_mut().filter(|awaited| !awaited.done) {
                moved |= awaited.go_on(self.link(awaited.from)?, id)?;
            }
            let all_sent = sending.is_none() || sent == total;
            if all_sent && awaited.as_ref().is_none_or(|awaited| awaited.done) {
                return Ok(());
            }
            if moved {
                backoff.restart();
            } else {
                self.poll()?;
                backoff.pause(&self.shared);
            }
        }
    }

    /// Lets posted messages go on, and hears an abort of this rank or another.
    fn poll(&mut self) -> Result<()> {
        if let Some(code) = self.shared.aborted() {
            self.abort(code);
        }
        let listens = self.listened.elapsed() >= LISTEN;
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
        _: Option<(usize, DeviceSpan<'_>)>,
        _: Option<(usize, DeviceSpan<'_>)>,
    ) -> Result<()> {
        Err(no_addresses())
    }

    fn post(
        &mut self,
        group: &GroupRanks,
        peer: Peer,
        mut parcel: Box<dyn P2pBuffer>,
    ) -> Result<()> {
        let len = match bytes(&mut *parcel).map(|bytes| bytes.len()) {
            Ok(len) if len > 0 => len,
            other => {
                let done = other.map(drop);
                parcel.finish(done.clone());
                return done;
            }
        };
        let id = group.id as u64;
        let (Peer::To(other) | Peer::From(other)) = peer;
        let other = group.ranks[other];
        let link = self.link(other)?;
        match peer {
            Peer::To(_) => {
                link.leaving.push_back(Leaving { header: header(id, len), parcel, sent: 0 });
                link.progress(other)?;
                self.shared.add_sent(len);
                Ok(())
            }
            Peer::From(_) => {
                link.expected.push_back((id, parcel));
                link.progress(other)
            }
        }
    }

    fn progress(&mut self) -> Result<InFlight> {
        self.poll()?;
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
        // All ranks of the parent have split it as often, whatever else they have done.
        let count = self.splits.entry(parent.id).or_default();
        *count += 1;
        let words = [parent.id as u64, *count, color as u64];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        // The world is 0, and the largest numbers are no groups.
        Ok(1 + crc32fast::hash(&bytes) as usize + ((*count as usize) << 32))
    }

    fn abort(&mut self, code: i32) {
        let words = abort(code);
        for (peer, link) in self.links.iter_mut().enumerate() {
            if let Some(link) = link {
                // A rank that does not hear it finds that the connection ends.
                let _ = write(&mut link.exchanges, &[&words], &mut 0, peer);
            }
        }
        std::process::exit(code)
    }

    fn leave(&mut self, in_order: bool) {
        let links = self
            .links
            .iter_mut()
            .enumerate()
            .filter_map(|(peer, link)| Some((peer, link.as_mut()?)));
        for (peer, link) in links {
            for (_, parcel) in link.expected.drain(..) {
                parcel
                    .finish(Err(Error::comm("another message failed before this one had arrived")));
            }
            if in_order {
                for stream in [&mut link.exchanges, &mut link.posts] {
                    let _ = write(stream, &[&bye()], &mut 0, peer);
                    let _ = stream.shutdown(Shutdown::Write);
                }
            }
        }
        // A socket that is closed before all is read takes back what the other end has not read.
        while in_order && self.shared.aborted().is_none() {
            let mut links = self
                .links
                .iter_mut()
                .enumerate()
                .filter_map(|(peer, link)| Some((peer, link.as_mut()?)));
            let waits = |(peer, link): (usize, &mut Link)| {
                let heard = link.inbox.listen(&mut link.exchanges, peer);
                // One that still sends expects a message that will not come.
                heard.is_ok() && !link.inbox.has_left() && !link.inbox.is_arriving()
            };
            if !links.any(waits) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.links.clear();
    }
}
