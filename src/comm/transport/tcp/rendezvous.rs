//! Rendezvous of processes through a directory: each writes its address there, and connects to the
//! ranks before it.

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use super::handshake::Credentials;
use super::mesh::{Connected, TcpMesh};
use super::secret::Secret;
use hpctrain_base::error::{Error, Result};

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
    /// The address of this host at which the rank listens: the loopback address if all ranks are on
    /// this host.
    pub address: IpAddr,
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
    /// Creates the rendezvous of rank `rank` of `ranks` ranks on this host in directory `dir`.
    pub fn on_this_host(dir: PathBuf, rank: usize, ranks: usize) -> Self {
        Self { dir, rank, ranks, address: Ipv4Addr::LOCALHOST.into() }
    }

    /// Returns the rendezvous that `Display` formats as `text`, if the rank is below the number of
    /// ranks.
    fn parse(text: &str) -> Option<Self> {
        let (rank, rest) = text.split_once('/')?;
        let (ranks, dir) = rest.split_once('/')?;
        let rank: usize = rank.parse().ok()?;
        let ranks: usize = ranks.parse().ok()?;
        (rank < ranks).then(|| Self::on_this_host(dir.into(), rank, ranks))
    }
}

/// Connects to the other ranks. Returns the connections to each rank, and this host's name.
///
/// # Errors
/// Returns an error if a rank does not connect in time, or the file system or the network fails.
pub fn connect_all(meeting: &TcpRendezvous) -> Result<(Vec<Connected>, String)> {
    let TcpRendezvous { dir, rank, ranks, address } = meeting;
    // The messages of ranks are authenticated, but not encrypted.
    let credentials = Credentials { secret: Secret::read(dir)?, encrypt: false };
    let listener = TcpListener::bind((*address, 0))
        .map_err(|e| network(&format!("listen on {address}"), e))?;
    let address = listener.local_addr().map_err(|e| network("listen", e))?;
    let host = host_name();
    publish(dir, *rank, &format!("{address} {host}"))?;
    let until = Instant::now() + TIMEOUT;
    let peers = (0..*ranks).map(|other| read_address(dir, other, until)).collect::<Result<_>>()?;
    let mesh =
        TcpMesh { rank: *rank, peers, listener, credentials, until, is_gone: Box::new(|_| false) };
    Ok((mesh.connect()?, host))
}

/// Returns the name of this host.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
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
    use std::net::TcpStream;

    use super::super::secret::write_secret;
    use super::*;

    #[test]
    fn strangers_do_not_keep_ranks_from_meeting() {
        let folder = tempfile::tempdir().unwrap();
        write_secret(folder.path()).unwrap();
        assert!(write_secret(folder.path()).is_err(), "the directory belongs to another world");
        let meeting = |rank| TcpRendezvous::on_this_host(folder.path().into(), rank, 2);
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
