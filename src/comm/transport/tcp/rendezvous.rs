//! Rendezvous of processes through a directory: each writes its address there, and connects to the
//! ranks before it.

use std::fmt;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::acceptor::Acceptor;
use super::handshake::{Credentials, HANDSHAKE_TIMEOUT, PeerId, call};
use super::secret::Secret;
use hpctrain_base::error::{Error, Result};

/// The number of connections between two ranks: one for exchanges, one for posted messages.
pub const CHANNELS: usize = 2;

/// Interval at which files are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Time limit of the rendezvous.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The environment variable that holds the [`TcpRendezvous`] of a process that `--spawn` started.
pub const RENDEZVOUS_VARIABLE: &str = "HPCTRAIN_RENDEZVOUS";

/// The rendezvous of the ranks of a world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpRendezvous {
    /// A directory that only this user can read.
    pub dir: PathBuf,
    /// The rank of this process.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
}

impl fmt::Display for TcpRendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.rank, self.ranks, self.dir.display())
    }
}

impl FromStr for TcpRendezvous {
    type Err = Error;

    /// Parses the format of `Display`: `RANK/RANKS/DIRECTORY`.
    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text).ok_or_else(|| {
            Error::input(format!(
                "{RENDEZVOUS_VARIABLE}={text} is not of the form RANK/RANKS/DIRECTORY"
            ))
            .hint("unset it: hpctrain --spawn N sets it for its processes")
        })
    }
}

impl TcpRendezvous {
    /// Returns the rendezvous that `Display` formats as `text`, if the rank is below the number of
    /// ranks.
    fn parse(text: &str) -> Option<Self> {
        let (rank, rest) = text.split_once('/')?;
        let (ranks, dir) = rest.split_once('/')?;
        let rank: usize = rank.parse().ok()?;
        let ranks: usize = ranks.parse().ok()?;
        (rank < ranks).then(|| Self { dir: dir.into(), rank, ranks })
    }
}

/// A rank's connections to another one.
pub struct Connected {
    /// The other rank's host.
    pub host: String,
    /// The connections to it, by channel; `None` for this rank itself.
    pub channels: Option<[TcpStream; CHANNELS]>,
}

/// Connects to the other ranks. Returns the connections to each rank, and this host's name.
///
/// # Errors
/// Returns an error if a rank does not connect in time, or the file system or the network fails.
pub fn connect_all(meeting: &TcpRendezvous) -> Result<(Vec<Connected>, String)> {
    let TcpRendezvous { dir, rank, ranks } = meeting;
    let rank = *rank;
    let ranks = *ranks;
    // No connection leaves this host.
    let credentials = Credentials { secret: Secret::read(dir)?, encrypt: false };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(|e| network("listen on 127.0.0.1", e))?;
    let address = listener.local_addr().map_err(|e| network("listen", e))?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    publish(dir, rank, &format!("{address} {host}"))?;
    let until = Instant::now() + TIMEOUT;
    let addresses: Vec<(SocketAddr, String)> =
        (0..ranks).map(|other| read_address(dir, other, until)).collect::<Result<_>>()?;

    let mut channels: Vec<[Option<TcpStream>; CHANNELS]> =
        (0..ranks).map(|_| Default::default()).collect();
    for (other, (address, _)) in addresses.iter().enumerate().take(rank) {
        for (channel, stream) in channels[other].iter_mut().enumerate() {
            let caller = PeerId { rank: rank as u32, ranks: ranks as u32, channel: channel as u32 };
            *stream = Some(connect(other, address, &credentials, caller, until)?);
        }
    }
    let (sender, known) = channel();
    let _acceptor = Acceptor::open(listener, credentials, move |caller, connection| {
        let stream = connection.into_stream()?;
        sender.send((caller, stream)).map_err(|_| Error::comm("the rendezvous is over"))
    })?;
    for _ in 0..CHANNELS * (ranks - 1 - rank) {
        let left = until.saturating_duration_since(Instant::now());
        let Ok((PeerId { rank: other, ranks: of, channel }, stream)) = known.recv_timeout(left)
        else {
            let late = (rank + 1..ranks).find(|other| channels[*other].iter().any(Option::is_none));
            return Err(Error::comm(format!(
                "rank {} has not connected in time",
                late.unwrap_or(ranks)
            )));
        };
        match channels
            .get_mut(other as usize)
            .and_then(|channels| channels.get_mut(channel as usize))
        {
            Some(slot) if of as usize == ranks && slot.is_none() => *slot = Some(stream),
            _ => {
                return Err(Error::comm(format!(
                    "rank {other} of {of} connected twice, or belongs to another world"
                )));
            }
        }
    }
    let connected = addresses.into_iter().zip(channels).map(|((_, host), channels)| {
        let [first, second] = channels;
        Connected { host, channels: first.zip(second).map(|(first, second)| [first, second]) }
    });
    Ok((connected.collect(), host))
}

/// Connects to a rank before this one, with retries because it may not listen yet.
///
/// # Errors
/// Returns an error if the rank cannot be reached until `until`.
fn connect(
    other: usize,
    address: &SocketAddr,
    credentials: &Credentials,
    caller: PeerId,
    until: Instant,
) -> Result<TcpStream> {
    loop {
        let connected = TcpStream::connect(address).map_err(|e| Error::comm(e.to_string()));
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        match connected
            .and_then(|stream| call(stream, credentials, caller, deadline)?.into_stream())
        {
            Ok(stream) => return Ok(stream),
            Err(_) if Instant::now() < until => std::thread::sleep(POLL_INTERVAL),
            Err(e) => {
                return Err(Error::comm(format!(
                    "cannot connect to rank {other} at {address}: {e}"
                )));
            }
        }
    }
}

fn network(doing: &str, e: std::io::Error) -> Error {
    Error::comm(format!("cannot {doing}: {e}"))
}

/// Writes a rank's address atomically.
fn publish(dir: &Path, rank: usize, text: &str) -> Result<()> {
    let path = dir.join(format!("rank-{rank}"));
    let new = dir.join(format!("rank-{rank}.new"));
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, &path))
        .map_err(|e| Error::io("write", &path, e))
}

/// Waits for a rank's address.
fn read_address(dir: &Path, rank: usize, until: Instant) -> Result<(SocketAddr, String)> {
    let path = dir.join(format!("rank-{rank}"));
    let text = loop {
        match fs::read_to_string(&path) {
            Ok(text) => break text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && Instant::now() < until => {
                std::thread::sleep(POLL_INTERVAL)
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::comm(format!(
                    "rank {rank} has written no address to {} in time",
                    dir.display()
                )));
            }
            Err(e) => return Err(Error::io("read", &path, e)),
        }
    };
    let parts = text
        .split_once(' ')
        .and_then(|(address, host)| Some((address.parse().ok()?, host.to_string())));
    parts.ok_or_else(|| {
        Error::comm(format!("{} does not hold an address: {text:?}", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::secret::write_secret;
    use super::*;

    #[test]
    fn strangers_do_not_keep_ranks_from_meeting() {
        let folder = tempfile::tempdir().unwrap();
        write_secret(folder.path()).unwrap();
        assert!(write_secret(folder.path()).is_err(), "the directory belongs to another world");
        let meeting = |rank| TcpRendezvous { dir: folder.path().into(), rank, ranks: 2 };
        let first = meeting(0);
        let second = meeting(1);
        let waiting =
            std::thread::spawn(move || connect_all(&first).map(|(connected, _)| connected.len()));
        let (address, _) = read_address(folder.path(), 0, Instant::now() + TIMEOUT).unwrap();
        // One speaks another protocol, the others are silent.
        let mut strangers: Vec<TcpStream> =
            (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
        strangers[7].write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let met = connect_all(&second).unwrap().0;
        assert_eq!(
            (met.len(), met[0].channels.is_some(), met[1].channels.is_some()),
            (2, true, false)
        );
        assert_eq!(waiting.join().unwrap(), Ok(2));
    }
}
