//! Connections between every two ranks of a world whose addresses are known.
//!
//! Each rank connects to the ranks before it and accepts those after it. Callers are authenticated
//! by the secret.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::acceptor::Acceptor;
use super::handshake::{Credentials, HANDSHAKE_TIMEOUT, PeerId, call};
use hpctrain_base::error::{Error, Result};

/// The number of connections between two ranks: one for exchanges, one for posted messages.
pub const CHANNELS: usize = 2;

/// The pause before another attempt to connect.
const RETRY_DELAY: Duration = Duration::from_millis(5);

/// Interval at which a rank that waits for others checks whether they are gone.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A rank's connections to another one.
pub struct Connected {
    /// The other rank's host.
    pub host: String,
    /// The connections to it, by channel; `None` for this rank itself.
    pub channels: Option<[TcpStream; CHANNELS]>,
}

/// A world of ranks whose addresses are known.
pub struct TcpMesh {
    /// The rank of this process.
    pub rank: usize,
    /// The address at which each rank listens, and its host.
    pub peers: Vec<(SocketAddr, String)>,
    /// The listener at this rank's address.
    pub listener: TcpListener,
    /// The secret of the job.
    pub credentials: Credentials,
    /// The time until which all ranks must have connected.
    pub until: Instant,
    /// Returns true if a rank is known to be gone, so that the others need not wait for it.
    pub is_gone: Box<dyn Fn(usize) -> bool + Send>,
}

/// The connections to each rank so far.
type Channels = Vec<[Option<TcpStream>; CHANNELS]>;

impl TcpMesh {
    /// Connects to the other ranks. Returns the connections to each rank.
    ///
    /// # Errors
    /// Returns an error if a rank is gone or does not connect in time, or the network fails.
    pub fn connect(self) -> Result<Vec<Connected>> {
        let Self { rank, peers, listener, credentials, until, is_gone } = self;
        let ranks = peers.len();
        let mut channels: Channels = (0..ranks).map(|_| Default::default()).collect();
        for (other, (address, _)) in peers.iter().enumerate().take(rank) {
            for (channel, stream) in channels[other].iter_mut().enumerate() {
                let caller =
                    PeerId { rank: rank as u32, ranks: ranks as u32, channel: channel as u32 };
                *stream = Some(connect(other, address, &credentials, caller, until, &*is_gone)?);
            }
        }
        let (sender, known) = channel();
        let _acceptor = Acceptor::open(listener, credentials, move |caller, connection| {
            let stream = connection.into_stream()?;
            sender.send((caller, stream)).map_err(|_| Error::comm("the rendezvous is over"))
        })?;
        let mut missing = CHANNELS * (ranks - 1 - rank);
        while missing > 0 {
            let left = until.saturating_duration_since(Instant::now());
            match known.recv_timeout(left.min(CHECK_INTERVAL)) {
                Ok((caller, stream)) => {
                    accept(&mut channels, caller, stream)?;
                    missing -= 1;
                }
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {
                    check_peers(&channels, rank, &*is_gone)?;
                }
                Err(_) => {
                    let late = late(&channels, rank).next().unwrap_or(ranks);
                    return Err(Error::lost(format!("rank {late} has not connected in time")));
                }
            }
        }
        let connected = peers.into_iter().zip(channels).map(|((_, host), channels)| {
            let [first, second] = channels;
            Connected { host, channels: first.zip(second).map(|(first, second)| [first, second]) }
        });
        Ok(connected.collect())
    }
}

/// Adds a connection of a rank after this one.
fn accept(channels: &mut Channels, caller: PeerId, stream: TcpStream) -> Result<()> {
    let PeerId { rank, ranks, channel } = caller;
    let count = channels.len();
    let slot = channels.get_mut(rank as usize).and_then(|one| one.get_mut(channel as usize));
    match slot {
        Some(slot) if ranks as usize == count && slot.is_none() => {
            *slot = Some(stream);
            Ok(())
        }
        _ => Err(Error::comm(format!(
            "rank {rank} of {ranks} connected twice, or belongs to another world"
        ))),
    }
}

/// Returns the ranks after `rank` that have not connected.
fn late(channels: &Channels, rank: usize) -> impl Iterator<Item = usize> {
    (rank + 1..channels.len()).filter(|other| channels[*other].iter().any(Option::is_none))
}

/// Returns an error if a rank that has not connected is gone, or one that has connected has given
/// up.
fn check_peers(channels: &Channels, rank: usize, is_gone: &dyn Fn(usize) -> bool) -> Result<()> {
    if let Some(gone) = late(channels, rank).find(|other| is_gone(*other)) {
        return Err(Error::lost(format!("rank {gone} is gone")));
    }
    for (other, streams) in channels.iter().enumerate() {
        if streams.iter().flatten().any(has_ended) {
            return Err(Error::lost(format!("rank {other} has ended its connection")));
        }
    }
    Ok(())
}

/// Returns true if the other end has closed a connection, whose reads block.
pub fn has_ended(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return true;
    }
    let ended = match stream.peek(&mut [0]) {
        Ok(0) => true,
        Ok(_) => false,
        Err(e) => !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    };
    ended || stream.set_nonblocking(false).is_err()
}

/// Connects to a rank before this one, with retries because it may not listen yet.
fn connect(
    other: usize,
    address: &SocketAddr,
    credentials: &Credentials,
    caller: PeerId,
    until: Instant,
    is_gone: &dyn Fn(usize) -> bool,
) -> Result<TcpStream> {
    loop {
        let now = Instant::now();
        let left = until.saturating_duration_since(now).min(HANDSHAKE_TIMEOUT);
        let connected = TcpStream::connect_timeout(address, left.max(RETRY_DELAY))
            .map_err(|e| Error::comm(e.to_string()));
        match connected.and_then(|stream| {
            call(stream, credentials, caller, now + HANDSHAKE_TIMEOUT)?.into_stream()
        }) {
            Ok(stream) => return Ok(stream),
            Err(_) if is_gone(other) => return Err(Error::lost(format!("rank {other} is gone"))),
            Err(_) if Instant::now() < until => std::thread::sleep(RETRY_DELAY),
            Err(e) => {
                let message = format!("cannot connect to rank {other} at {address}: {e}");
                return Err(Error::lost(message));
            }
        }
    }
}
