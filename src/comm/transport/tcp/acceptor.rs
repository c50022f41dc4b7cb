//! Accepts connections, and passes on those whose other end proves that it knows the secret.
//!
//! One thread advances all handshakes without blocking: before it is authenticated a connection
//! costs a socket and some bytes, no thread. A handshake has one deadline. Pending handshakes are
//! limited in all and per source address; beyond a limit the oldest one is closed, so that silent
//! connections of strangers hold up nobody. Authenticated connections are not counted: all workers
//! of a node have the same address.

use std::collections::BTreeMap;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::connection::Connection;
use super::handshake::{Credentials, HANDSHAKE_TIMEOUT, Handshake, PeerId, Refusal};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn;

/// Pending handshakes.
const PENDING: usize = 256;

/// Pending handshakes of one source address.
const PENDING_OF_ADDRESS: usize = 128;

/// Connections that are accepted before pending handshakes are advanced: fewer than would evict one
/// another.
const BURST: usize = 32;

/// Longest wait before the thread looks whether it is to end, or handshakes are late.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Pause after the system refused to accept a connection: it may have no descriptors left.
const PAUSE: Duration = Duration::from_millis(20);

/// Shortest time between two warnings about refused connections.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(60);

/// Accepts connections on a thread until it is dropped.
pub struct Acceptor {
    over: Arc<AtomicBool>,
}

impl Acceptor {
    /// Begins to accept connections from `listener`. Calls `known` on the acceptor's thread for
    /// each caller that knows the secret; an error that it returns is the reason why the connection
    /// is refused.
    ///
    /// # Errors
    /// Returns an error if the system refused a thread.
    pub fn open(
        listener: TcpListener,
        credentials: Credentials,
        mut known: impl FnMut(PeerId, Connection) -> Result<()> + Send + 'static,
    ) -> Result<Self> {
        listener.set_nonblocking(true).map_err(|e| Error::comm(format!("cannot listen: {e}")))?;
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let mut entrance =
            Entrance { listener, credentials, pending: vec![], refusals: Refusals::default() };
        let accept = move || {
            while !ends.load(Ordering::Relaxed) {
                entrance.turn(&mut known);
            }
        };
        spawn("acceptor", accept)?;
        Ok(Self { over })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// The state of the acceptor's thread.
struct Entrance {
    listener: TcpListener,
    credentials: Credentials,
    /// The oldest one first.
    pending: Vec<Pending>,
    refusals: Refusals,
}

/// A connection whose handshake is not over.
struct Pending {
    handshake: Handshake,
    from: IpAddr,
    since: Instant,
}

impl Entrance {
    /// Waits until a connection has news, and acts on them.
    fn turn(&mut self, known: &mut impl FnMut(PeerId, Connection) -> Result<()>) {
        let ready = self.wait();
        self.advance(&ready, known);
        self.close_late();
        for _ in 0..BURST {
            match self.listener.accept() {
                Ok((stream, address)) => self.admit(stream, address.ip().to_canonical()),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e) => {
                    log::debug!("a connection was not accepted: {e}");
                    std::thread::sleep(PAUSE);
                    break;
                }
            }
        }
        self.refusals.report();
    }

    /// Waits for news; returns whether there are some for each pending handshake.
    fn wait(&self) -> Vec<bool> {
        let streams = self
            .pending
            .iter()
            .map(|pending| PollFd::new(pending.handshake.stream(), PollFlags::IN));
        let mut polled: Vec<PollFd<'_>> =
            std::iter::once(PollFd::new(&self.listener, PollFlags::IN)).chain(streams).collect();
        let longest = Timespec::try_from(POLL_INTERVAL).ok();
        // A signal ends the wait early, which does no harm.
        let _ = poll(&mut polled, longest.as_ref());
        polled[1..].iter().map(|one| !one.revents().is_empty()).collect()
    }

    /// Advances the handshakes that are ready.
    fn advance(
        &mut self,
        ready: &[bool],
        known: &mut impl FnMut(PeerId, Connection) -> Result<()>,
    ) {
        let mut index = 0;
        for is_ready in ready {
            let advanced =
                if *is_ready { self.pending[index].handshake.advance() } else { Ok(None) };
            let outcome = match advanced {
                Ok(None) => {
                    index += 1;
                    continue;
                }
                Ok(Some(caller)) => Ok(caller),
                Err(e) => Err(e),
            };
            let Pending { handshake, from, .. } = self.pending.remove(index);
            let passed = outcome.and_then(|caller| {
                let connection = handshake.into_connection()?;
                known(caller, connection).map_err(|e| Refusal::Caller(e.message().into()))
            });
            passed.unwrap_or_else(|refusal| self.refusals.note(from, refusal));
        }
    }

    /// Closes the connections whose handshake is not over in time.
    fn close_late(&mut self) {
        let late = self
            .pending
            .iter()
            .take_while(|pending| pending.since.elapsed() >= HANDSHAKE_TIMEOUT)
            .count();
        for Pending { from, .. } in self.pending.drain(..late) {
            self.refusals.note(from, Refusal::Late);
        }
    }

    /// Begins the handshake of a connection. Closes the oldest pending one if that is needed to
    /// make room.
    fn admit(&mut self, stream: TcpStream, from: IpAddr) {
        let of_address = self.pending.iter().filter(|pending| pending.from == from).count();
        let oldest = if of_address >= PENDING_OF_ADDRESS {
            self.pending.iter().position(|pending| pending.from == from)
        } else {
            (self.pending.len() >= PENDING).then_some(0)
        };
        if let Some(oldest) = oldest {
            let Pending { from, .. } = self.pending.remove(oldest);
            self.refusals.note(from, Refusal::Evicted);
        }
        let begun = stream.set_nodelay(true).map_err(|e| Error::comm(e.to_string()));
        match begun.and_then(|()| Handshake::begin(stream, &self.credentials)) {
            Ok(handshake) => self.pending.push(Pending { handshake, from, since: Instant::now() }),
            Err(e) => self.refusals.note(from, Refusal::Ended(e.message().into())),
        }
    }
}

/// Counts refused connections by reason. One warning a minute reports them, the first at once.
#[derive(Default)]
struct Refusals {
    /// Since the last warning.
    counts: BTreeMap<&'static str, u64>,
    /// Source and reason of the last one.
    last: Option<(IpAddr, Refusal)>,
    warned: Option<Instant>,
}

impl Refusals {
    fn note(&mut self, from: IpAddr, refusal: Refusal) {
        log::debug!("refused a connection from {from}: {refusal}");
        *self.counts.entry(refusal.counted()).or_default() += 1;
        self.last = Some((from, refusal));
    }

    fn report(&mut self) {
        if self.warned.is_some_and(|warned| warned.elapsed() < BETWEEN_WARNINGS) {
            return;
        }
        let Some((from, refusal)) = self.last.take() else { return };
        let counts = std::mem::take(&mut self.counts);
        match counts.values().sum() {
            1 => log::warn!("refused a connection from {from}: {refusal}"),
            count => {
                let counts: Vec<String> =
                    counts.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
                let counts = counts.join(", ");
                log::warn!(
                    "refused {count} connections since the last such warning ({counts}); the last was from {from}: {refusal}"
                );
            }
        }
        self.warned = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::sync::mpsc::{Receiver, channel};

    use super::super::handshake::call;
    use super::super::secret::Secret;
    use super::*;

    /// An acceptor with the callers that it let in.
    fn acceptor() -> (Acceptor, std::net::SocketAddr, Receiver<(PeerId, Connection)>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (tell, known) = channel();
        let take = move |caller, connection| {
            tell.send((caller, connection)).map_err(|e| Error::comm(e.to_string()))
        };
        (Acceptor::open(listener, credentials(), take).unwrap(), address, known)
    }

    fn credentials() -> Credentials {
        Credentials { secret: Secret::new(vec![7; 32]).unwrap(), encrypt: true }
    }

    const CALLER: PeerId = PeerId { rank: 1, ranks: 2, lane: 3 };

    #[test]
    fn silent_connections_make_room_for_callers_with_the_secret() {
        let (_acceptor, address, known) = acceptor();
        // More than there is room for, each with its first byte.
        let connect = || {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"h").unwrap();
            stream
        };
        let mut silent: Vec<TcpStream> =
            (0..PENDING_OF_ADDRESS + BURST).map(|_| connect()).collect();
        let stream = TcpStream::connect(address).unwrap();
        call(stream, &credentials(), CALLER, Instant::now() + HANDSHAKE_TIMEOUT).unwrap();
        assert_eq!(known.recv().unwrap().0, CALLER);
        // The oldest one was closed: an opening, then the end.
        let mut answer = Vec::new();
        let _ = silent[0].read_to_end(&mut answer);
        assert!(answer.len() <= 12, "{} bytes", answer.len());
    }

    #[test]
    fn a_source_address_evicts_its_own_handshakes_only() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut entrance = Entrance {
            listener,
            credentials: credentials(),
            pending: vec![],
            refusals: Refusals::default(),
        };
        let mut admit = |from: [u8; 4]| {
            let _caller = TcpStream::connect(address).unwrap();
            let (stream, _) = entrance.listener.accept().unwrap();
            entrance.admit(stream, from.into());
            let of = |address: [u8; 4]| {
                entrance.pending.iter().filter(|one| one.from == IpAddr::from(address)).count()
            };
            (of([10, 0, 0, 1]), of([10, 0, 0, 2]))
        };
        assert_eq!(admit([10, 0, 0, 1]), (1, 0));
        assert_eq!(
            (0..PENDING).map(|_| admit([10, 0, 0, 2])).last(),
            Some((1, PENDING_OF_ADDRESS))
        );
        assert_eq!(
            entrance.refusals.counts["made room for others"] as usize,
            PENDING - PENDING_OF_ADDRESS
        );
    }
}
