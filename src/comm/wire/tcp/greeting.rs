//! The first words on a connection: both ends prove that they know the run's secret before anything else is read.
//!
//! Each end sends random numbers, and of both ends' numbers a keyed digest (HMAC with SHA-256, RFC 2104): a stranger who has
//! listened before can repeat none of it. Everything has a fixed length, and the time for all of it is limited.

use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hmac::{Hmac, KeyInit as _, Mac as _};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

use crate::error::{Error, Result};

/// The first bytes of every connection.
const MAGIC: [u8; 8] = *b"hpctrain";

/// Version of all that is said on a connection.
const VERSION: u32 = 1;

/// Time limit of each read and write of a greeting.
const PATIENCE: Duration = Duration::from_secs(5);

/// Random bytes of an end.
const NONCE: usize = 32;

/// Bytes of a proof.
const PROOF: usize = 32;

/// Bytes of magic, version and nonce.
const OPENING: usize = MAGIC.len() + size_of::<u32>() + NONCE;

/// The key that the processes of a run share.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

/// The connecting end's place in the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// Its rank.
    pub rank: u32,
    /// Ranks of its world.
    pub ranks: u32,
    /// The purpose of the connection.
    pub lane: u32,
}

impl Secret {
    /// Bytes of a new one.
    pub const LEN: usize = 32;

    /// Any bytes, of at least 16.
    ///
    /// # Errors
    /// They are fewer.
    pub fn new(bytes: Vec<u8>) -> Result<Self> {
        if bytes.len() < 16 {
            return Err(Error::input(format!("a secret of {} bytes is too short", bytes.len()))
                .hint("use at least 16 random bytes"));
        }
        Ok(Self(bytes))
    }

    /// The file of a directory that holds one.
    pub fn path(dir: &Path) -> PathBuf {
        dir.join("secret")
    }

    /// That of a directory.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = Self::path(dir);
        Self::new(std::fs::read(&path).map_err(|e| Error::io("read", &path, e))?)
    }

    fn proof(&self, role: &str, parts: &[&[u8]]) -> Result<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).map_err(|e| Error::internal(format!("HMAC: {e}")))?;
        mac.update(role.as_bytes());
        parts.iter().for_each(|part| mac.update(part));
        Ok(mac)
    }
}

impl Caller {
    fn bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        for (to, number) in bytes.as_chunks_mut::<4>().0.iter_mut().zip([self.rank, self.ranks, self.lane]) {
            *to = number.to_le_bytes();
        }
        bytes
    }

    fn from(bytes: [u8; 12]) -> Self {
        let [rank, ranks, lane] = [0, 4, 8].map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i])));
        Self { rank, ranks, lane }
    }
}

/// Writes a new secret into `dir`, which only this user can read.
///
/// # Errors
/// The file system refused, or there is one already.
pub fn write_secret(dir: &Path) -> Result<()> {
    let path = Secret::path(dir);
    let secret = random::<{ Secret::LEN }>()?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    file.and_then(|mut file| file.write_all(&secret)).map_err(|e| Error::io("write", &path, e))
}

/// Random bytes of the system.
///
/// # Errors
/// It has none.
fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let got = getrandom(&mut bytes[..], GetRandomFlags::empty());
    match got {
        Ok(len) if len == N => Ok(bytes),
        other => Err(Error::internal(format!("the system gave no random bytes: {other:?}"))),
    }
}

/// Greets the process that listens at the other end, as `caller`.
///
/// # Errors
/// It is of another version, does not know the secret, or says nothing in time.
pub fn call(stream: &mut TcpStream, secret: &Secret, caller: Caller) -> Result<()> {
    let lost = |e: std::io::Error| Error::comm(format!("the other end ended the greeting: {e}"));
    limit(stream, Some(PATIENCE))?;
    let theirs = read_opening(stream)?;
    let (mine, hello) = (random::<NONCE>()?, caller.bytes());
    let proof = secret.proof("connect", &[&theirs, &mine, &hello])?.finalize().into_bytes();
    let message = [&opening(&mine)[..], &hello, &proof].concat();
    stream.write_all(&message).map_err(lost)?;
    let mut proof = [0; PROOF];
    stream.read_exact(&mut proof).map_err(|_| refused())?;
    secret.proof("accept", &[&mine, &theirs])?.verify_slice(&proof).map_err(|_| refused())?;
    limit(stream, None)
}

/// Greets a process that has connected; returns its place.
///
/// # Errors
/// It is a stranger, of another version, or says nothing in time.
pub fn answer(stream: &mut TcpStream, secret: &Secret) -> Result<Caller> {
    let lost = |e: std::io::Error| Error::comm(format!("the other end ended the greeting: {e}"));
    limit(stream, Some(PATIENCE))?;
    let mine = random::<NONCE>()?;
    stream.write_all(&opening(&mine)).map_err(lost)?;
    let theirs = read_opening(stream)?;
    let (mut hello, mut proof) = ([0; 12], [0; PROOF]);
    stream.read_exact(&mut hello).map_err(lost)?;
    stream.read_exact(&mut proof).map_err(lost)?;
    secret.proof("connect", &[&mine, &theirs, &hello])?.verify_slice(&proof).map_err(|_| refused())?;
    let proof = secret.proof("accept", &[&theirs, &mine])?.finalize().into_bytes();
    stream.write_all(&proof).map_err(lost)?;
    limit(stream, None)?;
    Ok(Caller::from(hello))
}

fn opening(nonce: &[u8; NONCE]) -> [u8; OPENING] {
    let mut bytes = [0; OPENING];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..].copy_from_slice(nonce);
    bytes
}

/// The other end's nonce.
fn read_opening(stream: &mut TcpStream) -> Result<[u8; NONCE]> {
    let mut bytes = [0; OPENING];
    stream.read_exact(&mut bytes).map_err(|e| Error::comm(format!("the other end does not greet: {e}")))?;
    if bytes[..8] != MAGIC {
        return Err(Error::comm("the other end is no process of hpctrain"));
    }
    let version = u32::from_le_bytes([8, 9, 10, 11].map(|i| bytes[i]));
    if version != VERSION {
        return Err(Error::comm(format!("the other end speaks version {version}, this program version {VERSION}"))
            .hint("start all processes of a run with the same program"));
    }
    let mut nonce = [0; NONCE];
    nonce.copy_from_slice(&bytes[12..]);
    Ok(nonce)
}

fn refused() -> Error {
    Error::comm("the other end does not know this run's secret")
}

fn limit(stream: &TcpStream, time: Option<Duration>) -> Result<()> {
    let set = stream.set_read_timeout(time).and_then(|()| stream.set_write_timeout(time));
    set.map_err(|e| Error::comm(format!("a connection was lost at its start: {e}")))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// The results of both ends, each with a secret.
    fn greet(calls: &[u8], answers: &[u8]) -> (Result<()>, Result<Caller>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let [calls, answers] = [calls, answers].map(|secret| Secret::new(secret.to_vec()).unwrap());
        let caller = Caller { rank: 3, ranks: 4, lane: 1 };
        let calling = std::thread::spawn(move || call(&mut TcpStream::connect(address).unwrap(), &calls, caller));
        let answered = answer(&mut listener.accept().unwrap().0, &answers);
        (calling.join().unwrap(), answered)
    }

    #[test]
    fn who_knows_the_secret_is_known() {
        let (called, answered) = greet(&[7; 32], &[7; 32]);
        assert_eq!((called, answered), (Ok(()), Ok(Caller { rank: 3, ranks: 4, lane: 1 })));
    }

    #[test]
    fn strangers_are_refused() {
        let (called, answered) = greet(&[7; 32], &[8; 32]);
        assert!(called.unwrap_err().to_string().contains("does not know this run's secret"));
        assert!(answered.unwrap_err().to_string().contains("does not know this run's secret"));
        assert!(Secret::new(vec![1; 15]).is_err());

        let secret = Secret::new(vec![7; 32]).unwrap();
        let other_version = [&MAGIC[..], &9u32.to_le_bytes(), &[0; 100]].concat();
        let words: [(&[u8], &str); 4] = [
            (b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: curl/8.0 and more\r\n\r\n", "no process of hpctrain"),
            (&[0xff; 200], "no process of hpctrain"),
            (&other_version, "speaks version 9, this program version 1"),
            (b"hpctrain", "does not greet"),
        ];
        for (said, told) in words {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            stranger.write_all(said).unwrap();
            stranger.shutdown(std::net::Shutdown::Write).unwrap();
            let error = answer(&mut listener.accept().unwrap().0, &secret).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}
