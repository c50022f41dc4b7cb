//! The handshake of a connection: Noise NNpsk0 with the run's secret as the pre-shared key.
//!
//! Perrin, "The Noise Protocol Framework", revision 34 (2018), by the crate `snow`: X25519,
//! AES-256-GCM, SHA-256. Both ends prove that they know the secret, and agree on session keys that
//! the secret does not reveal later (forward secrecy). `snow` is built with the ciphers of `ring`,
//! which use the CPU's AES instructions; the default ones are several times slower.
//!
//! ```text
//! listening end                                          connecting end
//! magic, version                                     →
//!                                                    ←   magic, version, psk, e
//! e, ee, whether this end asks for encryption        →
//!                                                    ←   the caller's rank, whether it asks for encryption
//! ```
//!
//! The last message proves that the caller is live: an attacker could replay a recording of the
//! second one alone. Every message has a fixed length, and the whole handshake has one deadline.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use snow::{Builder, HandshakeState, TransportState};

use super::connection::{Connection, TAG};
use super::secret::Secret;
use hpctrain_base::error::{Error, Result};

/// The first bytes that each end sends.
const MAGIC: [u8; 8] = *b"hpctrain";

/// Version of the protocol, which covers the handshake and all messages after it.
const VERSION: u32 = 2;

/// The name of the Noise protocol.
const NOISE: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// Time limit of a whole handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes of an ephemeral public key.
const EPHEMERAL: usize = 32;

/// Bytes of magic and version.
const OPENING: usize = MAGIC.len() + size_of::<u32>();

/// Bytes of the caller's first Noise message.
const FIRST: usize = EPHEMERAL + TAG;

/// Bytes of the listening end's answer.
const ANSWER: usize = EPHEMERAL + 1 + TAG;

/// Bytes of a caller's [`PeerId`], and whether it asks for encryption.
const HELLO: usize = 13;

/// Bytes that the connecting end sends before the answer, and after it.
const STAGES: [usize; 2] = [OPENING + FIRST, HELLO + TAG];

/// Identifies the connecting end in its world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerId {
    /// The rank of the connecting end.
    pub rank: u32,
    /// The number of ranks of its world.
    pub ranks: u32,
    /// The channel, by which connections of the same rank differ in purpose.
    pub channel: u32,
}

/// The secret of a run, and its policy on encryption.
#[derive(Clone)]
pub struct Credentials {
    /// The secret.
    pub secret: Secret,
    /// Whether to encrypt connections between hosts. They are encrypted if either end asks for it.
    pub encrypt: bool,
}

impl Credentials {
    /// Returns whether this end asks for encryption of a connection, which it does only between
    /// hosts.
    fn ask_encryption(&self, stream: &TcpStream) -> std::io::Result<bool> {
        let [peer, own] =
            [stream.peer_addr()?, stream.local_addr()?].map(|address| address.ip().to_canonical());
        Ok(self.encrypt && !peer.is_loopback() && peer != own)
    }

    fn noise<T>(&self, build: impl FnOnce(Builder<'_>) -> Result<T, snow::Error>) -> Result<T> {
        let broken = |e: &dyn std::fmt::Display| Error::internal(format!("{NOISE}: {e}"));
        let parameters = NOISE.parse().map_err(|e| broken(&e))?;
        let key = self.secret.key();
        let opening = opening();
        let builder =
            Builder::new(parameters).prologue(&opening).and_then(|builder| builder.psk(0, &key));
        builder.and_then(build).map_err(|e| broken(&e))
    }
}

/// The reason why a connection is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The other end does not speak this protocol.
    Stranger,
    /// The other end speaks another version of the protocol.
    Version(u32),
    /// The other end failed to authenticate: it does not know the secret.
    Secret,
    /// The connection ended, with this error.
    Ended(String),
    /// The handshake took too long.
    Late,
    /// The connection was closed in favour of a newer one.
    Evicted,
    /// The caller knows the secret, but cannot be served.
    Caller(String),
}

impl Refusal {
    /// Returns the reason as the predicate of a count of connections.
    pub fn counted(&self) -> &'static str {
        match self {
            Self::Stranger => "spoke another protocol",
            Self::Version(_) => "spoke another version",
            Self::Secret => "did not know the secret",
            Self::Ended(_) => "ended within the handshake",
            Self::Late => "took too long",
            Self::Evicted => "made room for others",
            Self::Caller(_) => "could not be served",
        }
    }

    /// Returns the error of the connecting end.
    fn error(self) -> Error {
        let error = Error::comm(self.to_string());
        match self {
            Self::Version(_) => error.hint("start all processes of a run with the same program"),
            _ => error,
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stranger => f.write_str("the other end is not a process of hpctrain"),
            Self::Version(version) => {
                write!(
                    f,
                    "the other end speaks version {version} of the protocol, this program version {VERSION}"
                )
            }
            Self::Secret => f.write_str("the other end does not know this run's secret"),
            Self::Ended(why) => write!(f, "the connection ended within its handshake: {why}"),
            Self::Late => f.write_str("its handshake took too long"),
            Self::Evicted => f.write_str("too many handshakes were pending"),
            Self::Caller(why) => f.write_str(why),
        }
    }
}

impl PeerId {
    fn hello(self, encrypts: bool) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        for (to, number) in
            bytes.as_chunks_mut::<4>().0.iter_mut().zip([self.rank, self.ranks, self.channel])
        {
            *to = number.to_le_bytes();
        }
        bytes[HELLO - 1] = u8::from(encrypts);
        bytes
    }

    /// Returns the caller, and whether it asks for encryption.
    fn from(hello: [u8; HELLO]) -> (Self, bool) {
        let [rank, ranks, channel] =
            [0, 4, 8].map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|i| hello[at + i])));
        (Self { rank, ranks, channel }, hello[HELLO - 1] != 0)
    }
}

/// Returns magic and version.
fn opening() -> [u8; OPENING] {
    let mut bytes = [0; OPENING];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()..].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// Checks magic and version.
fn check_opening(bytes: &[u8]) -> Result<(), Refusal> {
    if bytes[..MAGIC.len()] != MAGIC {
        return Err(Refusal::Stranger);
    }
    match u32::from_le_bytes([8, 9, 10, 11].map(|i| bytes[i])) {
        VERSION => Ok(()),
        other => Err(Refusal::Version(other)),
    }
}

/// A stream whose reads and writes all end by one deadline.
struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Timed<'_> {
    /// Returns the time until the deadline.
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

/// Authenticates this process and the listening end to each other by the secret. Returns the
/// connection.
///
/// # Errors
/// Returns an error if the other end has another version or another secret, or the handshake is not
/// over at the deadline.
pub fn call(
    stream: TcpStream,
    credentials: &Credentials,
    caller: PeerId,
    deadline: Instant,
) -> Result<Connection> {
    let lost = |e: std::io::Error| ended(e).error();
    let broken = |e: snow::Error| Error::internal(format!("{NOISE}: {e}"));
    let asks = credentials.ask_encryption(&stream).map_err(lost)?;
    let mut timed = Timed { stream: &stream, deadline };
    let mut opened = [0; OPENING];
    timed.read_exact(&mut opened).map_err(|e| {
        Error::comm(format!("the other end did not begin the handshake in time: {e}"))
    })?;
    check_opening(&opened).map_err(Refusal::error)?;
    let mut noise = credentials.noise(|builder| builder.build_initiator())?;
    let mut first = [0; OPENING + FIRST];
    first[..OPENING].copy_from_slice(&opening());
    noise.write_message(&[], &mut first[OPENING..]).map_err(broken)?;
    timed.write_all(&first).map_err(lost)?;
    let mut answer = [0; ANSWER];
    timed.read_exact(&mut answer).map_err(|e| match e.kind() {
        // An end with another secret closes the connection.
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => Refusal::Secret.error(),
        _ => lost(e),
    })?;
    let mut asked = [0; 1];
    noise.read_message(&answer, &mut asked).map_err(|_| Refusal::Secret.error())?;
    let mut transport = noise.into_transport_mode().map_err(broken)?;
    let mut last = [0; HELLO + TAG];
    transport.write_message(&caller.hello(asks), &mut last).map_err(broken)?;
    timed.write_all(&last).map_err(lost)?;
    let unlimited = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(None));
    unlimited.map_err(lost)?;
    Ok(Connection::new(stream, (asks || asked != [0]).then_some(transport)))
}

/// The listening end of a handshake. It never blocks, so that one thread advances any number of
/// them.
pub struct Handshake {
    stream: TcpStream,
    /// Whether this end asks for encryption.
    asks: bool,
    stage: Stage,
    received: [u8; OPENING + FIRST],
    /// Bytes of this stage's message that were received so far.
    len: usize,
}

/// The progress of a handshake.
enum Stage {
    /// The handshake waits for the caller's first message.
    First(Box<HandshakeState>),
    /// The handshake waits for the caller's last message.
    Last(Box<TransportState>),
    /// The caller is authenticated. `None` if the connection is not encrypted.
    Done(Option<TransportState>),
    /// The handshake has failed.
    Failed,
}

impl Handshake {
    /// Sends the opening on a stream that was accepted.
    ///
    /// # Errors
    /// Returns an error if the connection has ended or cannot buffer the opening.
    pub fn begin(stream: TcpStream, credentials: &Credentials) -> Result<Self> {
        let lost = |e: std::io::Error| ended(e).error();
        let asks = credentials.ask_encryption(&stream).map_err(lost)?;
        let sent = stream.set_nonblocking(true).and_then(|()| (&stream).write_all(&opening()));
        sent.map_err(lost)?;
        let noise = credentials.noise(|builder| builder.build_responder())?;
        Ok(Self { stream, asks, stage: Stage::First(Box::new(noise)), received: [0; _], len: 0 })
    }

    /// Returns the stream, for polling.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Reads the bytes that have arrived. Returns the caller once it is authenticated.
    ///
    /// # Errors
    /// Returns an error if the caller is not a process of hpctrain, has another version or another
    /// secret, or has ended the connection.
    pub fn advance(&mut self) -> Result<Option<PeerId>, Refusal> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Failed) {
                Stage::First(mut noise) => {
                    if !self.receive(STAGES[0])? {
                        self.stage = Stage::First(noise);
                        return Ok(None);
                    }
                    noise
                        .read_message(&self.received[OPENING..], &mut [])
                        .map_err(|_| Refusal::Secret)?;
                    let mut answer = [0; ANSWER];
                    noise.write_message(&[u8::from(self.asks)], &mut answer).map_err(broken)?;
                    // The socket has sent little so far, so its buffer has space.
                    self.stream.write_all(&answer).map_err(ended)?;
                    self.stage =
                        Stage::Last(Box::new(noise.into_transport_mode().map_err(broken)?));
                    self.len = 0;
                }
                Stage::Last(mut transport) => {
                    if !self.receive(STAGES[1])? {
                        self.stage = Stage::Last(transport);
                        return Ok(None);
                    }
                    let mut hello = [0; HELLO];
                    let read = transport.read_message(&self.received[..HELLO + TAG], &mut hello);
                    read.map_err(|_| Refusal::Secret)?;
                    let (caller, asked) = PeerId::from(hello);
                    self.stage = Stage::Done((self.asks || asked).then_some(*transport));
                    return Ok(Some(caller));
                }
                Stage::Done(_) | Stage::Failed => {
                    return Err(Refusal::Ended("the handshake is over".into()));
                }
            }
        }
    }

    /// Returns the connection of an authenticated caller. Its reads and writes block.
    ///
    /// # Errors
    /// Returns an error if the connection has ended, or the caller is not authenticated.
    pub fn into_connection(self) -> Result<Connection, Refusal> {
        let Stage::Done(transport) = self.stage else { return Err(Refusal::Secret) };
        self.stream.set_nonblocking(false).map_err(ended)?;
        Ok(Connection::new(self.stream, transport))
    }

    /// Reads the bytes that have arrived. Returns true if the message of this length is complete.
    /// Later bytes stay in the socket.
    fn receive(&mut self, length: usize) -> Result<bool, Refusal> {
        while self.len < length {
            match self.stream.read(&mut self.received[self.len..length]) {
                Ok(0) => return Err(ended(ErrorKind::UnexpectedEof.into())),
                Ok(bytes) => {
                    self.len += bytes;
                    if length == STAGES[0] && self.len >= OPENING {
                        check_opening(&self.received)?;
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(ended(e)),
            }
        }
        Ok(true)
    }
}

fn ended(e: std::io::Error) -> Refusal {
    Refusal::Ended(e.to_string())
}

fn broken(e: snow::Error) -> Refusal {
    Refusal::Ended(format!("{NOISE}: {e}"))
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + HANDSHAKE_TIMEOUT
    }

    fn credentials(secret: &[u8]) -> Credentials {
        Credentials { secret: Secret::new(secret.to_vec()).unwrap(), encrypt: true }
    }

    const CALLER: PeerId = PeerId { rank: 3, ranks: 4, channel: 1 };

    /// Returns both ends of a connection: the connecting one first.
    fn connection() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [caller, listener.accept().unwrap().0]
    }

    /// Advances a handshake to its end.
    fn answer(mut handshake: Handshake) -> Result<(PeerId, Connection), Refusal> {
        loop {
            match handshake.advance()? {
                Some(caller) => {
                    return handshake.into_connection().map(|connection| (caller, connection));
                }
                None => std::thread::yield_now(),
            }
        }
    }

    /// Returns the results of both ends, each with a secret.
    fn greet(
        calls: &[u8],
        answers: &[u8],
    ) -> (Result<Connection>, Result<(PeerId, Connection), Refusal>) {
        let [calling, called] = connection();
        let [calls, answers] = [calls, answers].map(credentials);
        let calling = std::thread::spawn(move || call(calling, &calls, CALLER, soon()));
        let answered = answer(Handshake::begin(called, &answers).unwrap());
        (calling.join().unwrap(), answered)
    }

    #[test]
    fn callers_that_know_the_secret_are_let_in() {
        let (called, answered) = greet(&[7; 32], &[7; 32]);
        let (caller, connection) = answered.unwrap();
        assert_eq!(caller, CALLER);
        // On one host nothing is encrypted.
        assert!(!called.unwrap().is_encrypted() && !connection.is_encrypted());
    }

    #[test]
    fn strangers_are_refused() {
        let (called, answered) = greet(&[7; 32], &[8; 32]);
        assert!(called.err().unwrap().to_string().contains("does not know this run's secret"));
        assert_eq!(answered.err(), Some(Refusal::Secret));

        let other_version = [&MAGIC[..], &9u32.to_le_bytes()].concat();
        let guess = [&opening()[..], &[9; FIRST]].concat();
        let words: [(&[u8], &str); 5] = [
            (
                b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: curl/8.0 and more\r\n\r\n",
                "not a process of hpctrain",
            ),
            (&[0xff; 12], "not a process of hpctrain"),
            (&other_version, "speaks version 9 of the protocol, this program version 2"),
            (b"hpctrain", "ended within its handshake"),
            (&guess, "does not know this run's secret"),
        ];
        for (said, expected) in words {
            let [mut stranger, called] = connection();
            stranger.write_all(said).unwrap();
            stranger.shutdown(Shutdown::Write).unwrap();
            let error = answer(Handshake::begin(called, &credentials(&[7; 32])).unwrap())
                .err()
                .unwrap()
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// Forwards `length` bytes from one stream to another, and returns them.
    fn forwarded(mut from: &TcpStream, mut to: &TcpStream, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        from.read_exact(&mut bytes).unwrap();
        to.write_all(&bytes).unwrap();
        bytes
    }

    /// A stranger who replays a recorded handshake gets no further than the answer, whose keys it
    /// cannot compute.
    #[test]
    fn recorded_messages_prove_nothing() {
        let known = credentials(&[7; 32]);
        let [calling, called] = connection();
        let knows = known.clone();
        let calls = std::thread::spawn(move || call(calling, &knows, CALLER, soon()));
        // This end is the stranger's: it forwards to the listening end, and records.
        let [forward, listening] = connection();
        let knows = known.clone();
        let listens = std::thread::spawn(move || {
            answer(Handshake::begin(listening, &knows).unwrap()).map(drop)
        });
        forwarded(&forward, &called, OPENING);
        let first = forwarded(&called, &forward, STAGES[0]);
        forwarded(&forward, &called, ANSWER);
        let last = forwarded(&called, &forward, STAGES[1]);
        calls.join().unwrap().unwrap();
        listens.join().unwrap().unwrap();

        let [mut stranger, called] = connection();
        let repeated =
            std::thread::spawn(move || answer(Handshake::begin(called, &known).unwrap()).err());
        stranger.write_all(&[first, last].concat()).unwrap();
        let mut heard = Vec::new();
        stranger.read_to_end(&mut heard).unwrap();
        assert_eq!(heard.len(), OPENING + ANSWER);
        assert_eq!(repeated.join().unwrap(), Some(Refusal::Secret));
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
        let deadline = Instant::now() + Duration::from_millis(200);
        let error =
            call(calling, &credentials(&[7; 32]), CALLER, deadline).err().unwrap().to_string();
        assert!(error.contains("did not begin the handshake in time"), "{error}");
        dribble.join().unwrap();
    }
}
