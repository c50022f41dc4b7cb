//! The handshake of a connection: both ends prove that they know the run's secret before anything else is read.
//!
//! Each end sends random numbers, and of both ends' numbers a keyed digest (HMAC with SHA-256, RFC 2104): a stranger who has
//! listened before can repeat none of it. Everything has a fixed length, and the whole handshake has one deadline.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit as _, Mac as _};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

use crate::error::{Error, Result};

/// The first bytes of every connection.
const MAGIC: [u8; 8] = *b"hpctrain";

/// Version of all that is said on a connection.
const VERSION: u32 = 1;

/// Time limit of a whole handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Random bytes of an end.
const NONCE: usize = 32;

/// Bytes of a proof.
const PROOF: usize = 32;

/// Bytes of magic and version.
const PREFIX: usize = MAGIC.len() + size_of::<u32>();

/// Bytes of magic, version and nonce.
const OPENING: usize = PREFIX + NONCE;

/// Bytes of a caller's place in the world.
const HELLO: usize = 12;

/// Bytes that the connecting end sends.
const CALL: usize = OPENING + HELLO + PROOF;

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
    fn bytes(self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        for (to, number) in bytes.as_chunks_mut::<4>().0.iter_mut().zip([self.rank, self.ranks, self.lane]) {
            *to = number.to_le_bytes();
        }
        bytes
    }

    fn from(bytes: &[u8]) -> Self {
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

/// A stream whose reads and writes all end by one deadline.
struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Timed<'_> {
    /// Returns the time that is left.
    fn left(&self) -> std::io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(into)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

/// Proves to the listening end that this process knows the secret, and lets it prove the same.
///
/// # Errors
/// Returns an error if the other end has another version or another secret, or the handshake is not over at the deadline.
pub fn call(stream: &TcpStream, secret: &Secret, caller: Caller, deadline: Instant) -> Result<()> {
    let lost = |e: std::io::Error| Error::comm(format!("the other end ended the handshake: {e}"));
    let mut timed = Timed { stream, deadline };
    let mut opened = [0; OPENING];
    timed
        .read_exact(&mut opened)
        .map_err(|e| Error::comm(format!("the other end did not begin the handshake in time: {e}")))?;
    let theirs = nonce_of(&opened)?;
    let mine = random::<NONCE>()?;
    let hello = caller.bytes();
    let proof = secret.proof("connect", &[&theirs, &mine, &hello])?.finalize().into_bytes();
    let message = [&opening(&mine)[..], &hello, &proof].concat();
    timed.write_all(&message).map_err(lost)?;
    let mut proof = [0; PROOF];
    timed.read_exact(&mut proof).map_err(|_| refused())?;
    secret.proof("accept", &[&mine, &theirs])?.verify_slice(&proof).map_err(|_| refused())?;
    let unlimited = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(None));
    unlimited.map_err(lost)
}

/// The listening end of a handshake. It never blocks, so that one thread advances any number of them.
pub struct Handshake {
    stream: TcpStream,
    nonce: [u8; NONCE],
    received: [u8; CALL],
    /// Bytes received so far.
    len: usize,
}

impl Handshake {
    /// Sends the opening on a stream that was accepted.
    ///
    /// # Errors
    /// Returns an error if the connection has ended or does not take the opening at once.
    pub fn begin(stream: TcpStream) -> Result<Self> {
        let nonce = random()?;
        let sent = stream.set_nonblocking(true).and_then(|()| (&stream).write_all(&opening(&nonce)));
        sent.map_err(ended)?;
        Ok(Self { stream, nonce, received: [0; CALL], len: 0 })
    }

    /// Returns the stream that is to be polled.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Reads the bytes that are there. Returns the caller once it has proved that it knows the secret, and has been sent this
    /// end's proof.
    ///
    /// # Errors
    /// Returns an error if the caller is not a process of hpctrain, has another version or another secret, or has ended the connection.
    pub fn advance(&mut self, secret: &Secret) -> Result<Option<Caller>> {
        while self.len < CALL {
            match self.stream.read(&mut self.received[self.len..]) {
                Ok(0) => return Err(ended(ErrorKind::UnexpectedEof.into())),
                Ok(bytes) => {
                    self.len += bytes;
                    if self.len >= PREFIX {
                        check_prefix(&self.received)?;
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(ended(e)),
            }
        }
        if self.len < CALL {
            return Ok(None);
        }
        let (opened, rest) = self.received.split_at(OPENING);
        let (hello, proof) = rest.split_at(HELLO);
        let theirs = nonce_of(opened)?;
        secret.proof("connect", &[&self.nonce, &theirs, hello])?.verify_slice(proof).map_err(|_| refused())?;
        let proof = secret.proof("accept", &[&theirs, &self.nonce])?.finalize().into_bytes();
        self.stream.write_all(&proof).map_err(ended)?;
        Ok(Some(Caller::from(hello)))
    }

    /// Returns the stream, which blocks from now on.
    ///
    /// # Errors
    /// Returns an error if the connection has ended.
    pub fn into_stream(self) -> Result<TcpStream> {
        self.stream.set_nonblocking(false).map_err(ended)?;
        Ok(self.stream)
    }
}

fn ended(e: std::io::Error) -> Error {
    Error::comm(format!("the connection ended within its handshake: {e}"))
}

fn opening(nonce: &[u8; NONCE]) -> [u8; OPENING] {
    let mut bytes = [0; OPENING];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..].copy_from_slice(nonce);
    bytes
}

/// Checks magic and version.
fn check_prefix(bytes: &[u8]) -> Result<()> {
    if bytes[..MAGIC.len()] != MAGIC {
        return Err(Error::comm("the other end is not a process of hpctrain"));
    }
    let version = u32::from_le_bytes([8, 9, 10, 11].map(|i| bytes[i]));
    if version != VERSION {
        return Err(Error::comm(format!("the other end speaks version {version}, this program version {VERSION}"))
            .hint("start all processes of a run with the same program"));
    }
    Ok(())
}

/// Returns the other end's nonce.
fn nonce_of(opening: &[u8]) -> Result<[u8; NONCE]> {
    check_prefix(opening)?;
    let mut nonce = [0; NONCE];
    nonce.copy_from_slice(&opening[PREFIX..OPENING]);
    Ok(nonce)
}

fn refused() -> Error {
    Error::comm("the other end does not know this run's secret")
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + HANDSHAKE_TIMEOUT
    }

    /// Returns both ends of a connection: the connecting one first.
    fn connection() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [caller, listener.accept().unwrap().0]
    }

    /// Advances a handshake to its end.
    fn answer(stream: TcpStream, secret: &Secret) -> Result<Caller> {
        let mut handshake = Handshake::begin(stream)?;
        loop {
            match handshake.advance(secret)? {
                Some(caller) => return Ok(caller),
                None => std::thread::yield_now(),
            }
        }
    }

    /// The results of both ends, each with a secret.
    fn greet(calls: &[u8], answers: &[u8]) -> (Result<()>, Result<Caller>) {
        let [calling, called] = connection();
        let [calls, answers] = [calls, answers].map(|secret| Secret::new(secret.to_vec()).unwrap());
        let caller = Caller { rank: 3, ranks: 4, lane: 1 };
        let calling = std::thread::spawn(move || call(&calling, &calls, caller, soon()));
        let answered = answer(called, &answers);
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
        let other_version = [&MAGIC[..], &9u32.to_le_bytes()].concat();
        let words: [(&[u8], &str); 4] = [
            (b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: curl/8.0 and more\r\n\r\n", "not a process of hpctrain"),
            (&[0xff; 12], "not a process of hpctrain"),
            (&other_version, "speaks version 9, this program version 1"),
            (b"hpctrain", "ended within its handshake"),
        ];
        for (said, told) in words {
            let [mut stranger, called] = connection();
            stranger.write_all(said).unwrap();
            stranger.shutdown(Shutdown::Write).unwrap();
            let error = answer(called, &secret).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }

    #[test]
    fn bytes_that_dribble_do_not_lengthen_a_handshake() {
        let [mut impostor, calling] = connection();
        let dribble = std::thread::spawn(move || {
            // Until the other end has given up.
            while impostor.write_all(&MAGIC[..1]).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let secret = Secret::new(vec![7; 32]).unwrap();
        let deadline = Instant::now() + Duration::from_millis(200);
        let error = call(&calling, &secret, Caller { rank: 0, ranks: 0, lane: 0 }, deadline).unwrap_err().to_string();
        assert!(error.contains("did not begin the handshake in time"), "{error}");
        drop(calling);
        dribble.join().unwrap();
    }
}
