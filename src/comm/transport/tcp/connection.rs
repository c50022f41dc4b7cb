//! An authenticated connection, encrypted if one of its ends asks for it.
//!
//! An encrypted connection is a sequence of Noise messages, each preceded by its length (two bytes,
//! most significant first): at most 65,535 bytes of AES-256-GCM. Both ends change their key
//! after the same number of messages, long before the cipher's bound.

use std::io::{ErrorKind, IoSlice, Read, Result, Write};
use std::net::TcpStream;

use snow::TransportState;

use hpctrain_base::error;

/// Bytes of an authentication tag.
pub const TAG: usize = 16;

/// Bytes of a message's length.
const PREFIX: usize = 2;

/// The most bytes of a message.
const MESSAGE: usize = u16::MAX as usize;

/// The most bytes of plain text in a message.
const PLAIN: usize = MESSAGE - TAG;

/// The most bytes of plain text that are encrypted before they are sent.
const BATCH: usize = 4 * PLAIN;

/// The largest and the first size of the receive buffer: connections with small messages keep it
/// small.
const RECEIVED: [usize; 2] = [4 * (PREFIX + MESSAGE), 4096];

/// The number of messages with one key, at most 64 GiB. NIST SP 800-38D and RFC 8446 (section 5.5)
/// allow more.
const MESSAGES: u64 = 1 << 20;

/// An authenticated connection.
pub struct Connection {
    stream: TcpStream,
    cipher: Option<Box<Cipher>>,
}

/// Both directions of an encrypted connection.
struct Cipher {
    transport: TransportState,
    /// The numbers of messages sent and received.
    messages: [u64; 2],
    /// Received bytes, of which `received[begin..end]` are not decrypted yet.
    received: Vec<u8>,
    begin: usize,
    end: usize,
    /// Plain text; bytes before `taken` have been read.
    plain: Vec<u8>,
    taken: usize,
    /// Encrypted messages; bytes before `sent` have been sent.
    outgoing: Vec<u8>,
    sent: usize,
}

impl Connection {
    /// Creates a connection on a stream, encrypted by `transport` if there is one.
    pub(super) fn new(stream: TcpStream, transport: Option<TransportState>) -> Self {
        let cipher = transport.map(|transport| {
            Box::new(Cipher {
                transport,
                messages: [0; 2],
                received: vec![0; RECEIVED[1]],
                begin: 0,
                end: 0,
                plain: Vec::new(),
                taken: 0,
                outgoing: Vec::new(),
                sent: 0,
            })
        });
        Self { stream, cipher }
    }

    /// Returns the stream, whose timeouts apply to reads and writes.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Returns whether the connection is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.cipher.is_some()
    }

    /// Returns the stream of a connection that is not encrypted.
    ///
    /// # Errors
    /// Returns an error if it is encrypted.
    pub fn into_stream(self) -> error::Result<TcpStream> {
        match self.cipher {
            None => Ok(self.stream),
            Some(_) => {
                Err(error::Error::comm("the other end asks for encryption, which ranks do not use"))
            }
        }
    }
}

impl Cipher {
    /// Returns the length of the first message in `received`, if all of it is there.
    fn message(&self) -> Option<usize> {
        let bytes = &self.received[self.begin..self.end];
        let length = usize::from(u16::from_be_bytes(*bytes.first_chunk()?));
        (bytes.len() >= PREFIX + length).then_some(length)
    }

    /// Receives bytes until a message is complete. Returns its length, or `None` at the end of the
    /// stream.
    fn receive(&mut self, mut stream: &TcpStream) -> Result<Option<usize>> {
        loop {
            if let Some(length) = self.message() {
                return Ok(Some(length));
            }
            if self.begin > 0 {
                self.received.copy_within(self.begin..self.end, 0);
                (self.begin, self.end) = (0, self.end - self.begin);
            }
            if self.end == self.received.len() {
                self.received.resize(RECEIVED[0], 0);
            }
            match stream.read(&mut self.received[self.end..])? {
                0 if self.end == 0 => return Ok(None),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                bytes => self.end += bytes,
            }
        }
    }

    /// Decrypts the first message, of this length, into `into` if it fits, and otherwise into
    /// `plain`. Returns the number of bytes written to `into`.
    fn decrypt(&mut self, length: usize, into: &mut [u8]) -> Result<usize> {
        let from = self.begin + PREFIX;
        self.begin = from + length;
        let message = &self.received[from..self.begin];
        // Decryption also needs space for the tag after the plain text.
        let is_direct = into.len() >= length;
        let to = if is_direct {
            into
        } else {
            self.plain.resize(length, 0);
            &mut self.plain[..]
        };
        let bytes = self.transport.read_message(message, to).map_err(|_| {
            std::io::Error::new(
                ErrorKind::InvalidData,
                "a message was modified in transit, or belongs to another connection",
            )
        })?;
        self.messages[1] += 1;
        if self.messages[1].is_multiple_of(MESSAGES) {
            self.transport.rekey_incoming();
        }
        if is_direct {
            return Ok(bytes);
        }
        self.plain.truncate(bytes);
        self.taken = 0;
        Ok(0)
    }

    /// Encrypts bytes as one message and appends it to those to send.
    fn encrypt(&mut self, plain: &[u8]) -> Result<()> {
        let from = self.outgoing.len();
        self.outgoing.resize(from + PREFIX + plain.len() + TAG, 0);
        let (prefix, message) = self.outgoing[from..].split_at_mut(PREFIX);
        let length = self.transport.write_message(plain, message).map_err(std::io::Error::other)?;
        prefix.copy_from_slice(&(length as u16).to_be_bytes());
        self.messages[0] += 1;
        if self.messages[0].is_multiple_of(MESSAGES) {
            self.transport.rekey_outgoing();
        }
        Ok(())
    }

    /// Sends encrypted messages. After an error the next call continues.
    fn send(&mut self, mut stream: &TcpStream) -> Result<()> {
        while self.sent < self.outgoing.len() {
            match stream.write(&self.outgoing[self.sent..])? {
                0 => return Err(ErrorKind::WriteZero.into()),
                bytes => self.sent += bytes,
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(())
    }
}

impl Read for Connection {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let Some(cipher) = &mut self.cipher else { return self.stream.read(into) };
        loop {
            let rest = &cipher.plain[cipher.taken..];
            if !rest.is_empty() || into.is_empty() {
                let bytes = rest.len().min(into.len());
                into[..bytes].copy_from_slice(&rest[..bytes]);
                cipher.taken += bytes;
                return Ok(bytes);
            }
            let Some(length) = cipher.receive(&self.stream)? else { return Ok(0) };
            let bytes = cipher.decrypt(length, into)?;
            if bytes > 0 {
                return Ok(bytes);
            }
        }
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    /// Accepts as many bytes as it returns. Some of them may be sent only by the next call, at the
    /// latest by [`Write::flush`].
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> Result<usize> {
        let Some(cipher) = &mut self.cipher else { return self.stream.write_vectored(slices) };
        cipher.send(&self.stream)?;
        let mut taken = 0;
        for plain in slices.iter().flat_map(|slice| slice.chunks(PLAIN)) {
            let plain = &plain[..plain.len().min(BATCH - taken)];
            if plain.is_empty() {
                break;
            }
            cipher.encrypt(plain)?;
            taken += plain.len();
        }
        match cipher.send(&self.stream) {
            // The bytes are accepted and will be sent later.
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                Ok(taken)
            }
            sent => sent.map(|()| taken),
        }
    }

    fn flush(&mut self) -> Result<()> {
        self.cipher.as_mut().map_or(Ok(()), |cipher| cipher.send(&self.stream))
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use snow::Builder;

    use super::*;

    /// Returns both ends of an encrypted connection.
    fn connections() -> [Connection; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let calling = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let called = listener.accept().unwrap().0;
        let parameters: snow::params::NoiseParams =
            "Noise_NNpsk0_25519_AESGCM_SHA256".parse().unwrap();
        let builder = || Builder::new(parameters.clone()).psk(0, &[7; 32]).unwrap();
        let mut initiator = builder().build_initiator().unwrap();
        let mut responder = builder().build_responder().unwrap();
        let mut message = [0; 200];
        let mut none = [0; 200];
        let length = initiator.write_message(&[], &mut message).unwrap();
        responder.read_message(&message[..length], &mut none).unwrap();
        let length = responder.write_message(&[], &mut message).unwrap();
        initiator.read_message(&message[..length], &mut none).unwrap();
        let ends = [(calling, initiator), (called, responder)];
        ends.map(|(stream, noise)| {
            Connection::new(stream, Some(noise.into_transport_mode().unwrap()))
        })
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    #[test]
    fn bytes_of_any_length_arrive() {
        let [mut from, mut to] = connections();
        for len in [1, 15, 4078, PLAIN - 1, PLAIN, PLAIN + 1, BATCH, BATCH + 1, 1_000_003] {
            let sent = bytes(len);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    from.write_all(&sent).unwrap();
                    from.flush().unwrap();
                });
                // In pieces that are smaller and larger than a message.
                let mut first = vec![0; len / 3];
                let mut rest = vec![0; len - len / 3];
                to.read_exact(&mut first).unwrap();
                to.read_exact(&mut rest).unwrap();
                assert!([first, rest].concat() == sent, "{len}");
            });
        }
        drop(from);
        assert_eq!(to.read(&mut [0; 9]).unwrap(), 0);
    }

    /// Nothing is lost where reads and writes time out.
    #[test]
    fn time_limits_lose_nothing() {
        let [mut from, mut to] = connections();
        from.stream().set_write_timeout(Some(Duration::from_millis(5))).unwrap();
        to.stream().set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let sent = bytes(40 << 20);
        let timed_out =
            |e: &std::io::Error| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                let mut at = 0;
                let mut waits = 0;
                while at < sent.len() || from.flush().is_err() {
                    match from.write(&sent[at..]) {
                        Ok(bytes) => at += bytes,
                        Err(e) => {
                            assert!(timed_out(&e), "{e}");
                            waits += 1;
                        }
                    }
                }
                waits
            });
            std::thread::sleep(Duration::from_millis(100));
            let mut read = vec![0; sent.len()];
            let mut at = 0;
            let mut waits = 0;
            while at < read.len() {
                match to.read(&mut read[at..]) {
                    Ok(bytes) => at += bytes,
                    Err(e) => {
                        assert!(timed_out(&e), "{e}");
                        waits += 1;
                    }
                }
                if at % 7 == 0 {
                    std::thread::sleep(Duration::from_micros(300));
                }
            }
            assert!(read == sent);
            assert!(sender.join().unwrap() + waits > 0, "no time limit was met");
        });
    }

    #[test]
    fn changed_and_repeated_messages_are_refused() {
        let change: [fn(&mut Vec<u8>); 3] = [
            |message| message[10] ^= 1,
            |message| message.extend_from_within(..),
            |message| *message.last_mut().unwrap() ^= 0x80,
        ];
        for change in change {
            let [mut from, mut to] = connections();
            let cipher = from.cipher.as_mut().unwrap();
            cipher.encrypt(b"a gradient").unwrap();
            change(&mut cipher.outgoing);
            from.flush().unwrap();
            drop(from);
            let error = to.read_to_end(&mut Vec::new()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        }
    }

    #[test]
    fn both_ends_change_their_keys_together() {
        let [mut from, mut to] = connections();
        for end in [&mut from, &mut to] {
            end.cipher.as_mut().unwrap().messages = [MESSAGES - 2; 2];
        }
        for word in [&b"one"[..], b"two", b"three", b"four"] {
            from.write_all(word).unwrap();
            from.flush().unwrap();
            let mut read = vec![0; word.len()];
            to.read_exact(&mut read).unwrap();
            assert_eq!(read, word);
        }
        assert_eq!(to.cipher.as_ref().unwrap().messages[1], MESSAGES + 2);
    }
}
