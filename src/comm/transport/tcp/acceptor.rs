//! Accepts connections, and passes on those whose other end is authenticated by the secret.
//!
//! One thread advances all handshakes without blocking: before it is authenticated a connection
//! costs a socket and some bytes, but no thread. A handshake has one deadline. The number of
//! pending handshakes is limited, in total and per source address; beyond a limit the oldest one is
//! closed, so that silent connections of strangers block no one. Authenticated connections are not
//! counted: all workers of a node have the same address.

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

/// The most pending handshakes.
const MAX_PENDING: usize = 256;

/// The most pending handshakes of one source address.
const MAX_PENDING_PER_ADDRESS: usize = 128;

/// The most connections that are accepted before pending handshakes are advanced: fewer than would
/// evict one another.
const ACCEPTS_PER_TURN: usize = 32;

/// Longest wait before the thread checks whether it must end, or handshakes are late.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Pause after a failure to accept a connection: the process may have no descriptors left.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(20);

/// Shortest time between two warnings about refused connections.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Accepts connections on a thread until it is dropped.
pub struct Acceptor {
    stopped: Arc<AtomicBool>,
}

impl Acceptor {
    /// Starts to accept connections from `listener`. Calls `known` on the acceptor's thread for
    /// each caller that knows the secret. If it returns an error, the connection is refused for
    /// that reason.
    ///
    /// # Errors
    /// Returns an error if the listener cannot be made non-blocking, or the thread cannot be
    /// started.
    pub fn open(
        listener: TcpListener,
        credentials: Credentials,
        mut known: impl FnMut(PeerId, Connection) -> Result<()> + Send + 'static,
    ) -> Result<Self> {
        listener.set_nonblocking(true).map_err(|e| Error::comm(format!("cannot listen: {e}")))?;
        let stopped = Arc::new(AtomicBool::new(false));
        let stop = stopped.clone();
        let mut thread = AcceptorThread {
            listener,
            credentials,
            pending: vec![],
            refusals: Refusals::default(),
        };
        spawn("acceptor", move || {
            while !stop.load(Ordering::Relaxed) {
                thread.turn(&mut known);
            }
        })?;
        Ok(Self { stopped })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

/// The state of the acceptor's thread.
struct AcceptorThread {
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

impl AcceptorThread {
    /// Waits for events of connections and handles them.
    fn turn(&mut self, known: &mut impl FnMut(PeerId, Connection) -> Result<()>) {
        let ready = self.wait();
        self.advance(&ready, known);
        self.close_late();
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok((stream, address)) => self.admit(stream, address.ip().to_canonical()),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e) => {
                    log::debug!("cannot accept a connection: {e}");
                    std::thread::sleep(ACCEPT_RETRY_DELAY);
                    break;
                }
            }
        }
        self.refusals.report();
    }

    /// Waits for events. Returns for each pending handshake whether it has some.
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

    /// Starts the handshake of a connection. If a limit is reached, closes the oldest pending one.
    fn admit(&mut self, stream: TcpStream, from: IpAddr) {
        let of_address = self.pending.iter().filter(|pending| pending.from == from).count();
        let oldest = if of_address >= MAX_PENDING_PER_ADDRESS {
            self.pending.iter().position(|pending| pending.from == from)
        } else {
            (self.pending.len() >= MAX_PENDING).then_some(0)
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
    /// The counts since the last warning, by reason.
    counts: BTreeMap<&'static str, u64>,
    /// The source and reason of the last refusal.
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
        if self.warned.is_some_and(|warned| warned.elapsed() < WARNING_INTERVAL) {
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

    /// Starts an acceptor. Returns it with its address and the callers that it accepts.
    fn acceptor() -> (Acceptor, std::net::SocketAddr, Receiver<(PeerId, Connection)>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, known) = channel();
        let acceptor = Acceptor::open(listener, credentials(), move |caller, connection| {
            sender.send((caller, connection)).map_err(|e| Error::comm(e.to_string()))
        });
        (acceptor.unwrap(), address, known)
    }

    fn credentials() -> Credentials {
        Credentials { secret: Secret::new(vec![7; 32]).unwrap(), encrypt: true }
    }

    const CALLER: PeerId = PeerId { rank: 1, ranks: 2, channel: 3 };

    #[test]
    fn silent_connections_make_room_for_callers_with_the_secret() {
        let (_acceptor, address, known) = acceptor();
        // More than the limit, each with its first byte.
        let silent = (0..MAX_PENDING_PER_ADDRESS + ACCEPTS_PER_TURN).map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"h").unwrap();
            stream
        });
        let mut silent: Vec<TcpStream> = silent.collect();
        let stream = TcpStream::connect(address).unwrap();
        call(stream, &credentials(), CALLER, Instant::now() + HANDSHAKE_TIMEOUT).unwrap();
        assert_eq!(known.recv().unwrap().0, CALLER);
        // The oldest one was closed: an opening, then the end.
        let mut answer = Vec::new();
        let _ = silent[0].read_to_end(&mut answer);
        assert!(answer.len() <= 12, "{} bytes", answer.len());
    }

    /// Admits a connection as if it came from an address. Returns the pending handshakes of
    /// 10.0.0.1 and of 10.0.0.2.
    fn admit_from(thread: &mut AcceptorThread, from: [u8; 4]) -> (usize, usize) {
        let address = thread.listener.local_addr().unwrap();
        let _caller = TcpStream::connect(address).unwrap();
        let (stream, _) = thread.listener.accept().unwrap();
        thread.admit(stream, from.into());
        let count = |address: [u8; 4]| {
            thread.pending.iter().filter(|one| one.from == IpAddr::from(address)).count()
        };
        (count([10, 0, 0, 1]), count([10, 0, 0, 2]))
    }

    #[test]
    fn a_source_address_evicts_its_own_handshakes_only() {
        let mut thread = AcceptorThread {
            listener: TcpListener::bind("127.0.0.1:0").unwrap(),
            credentials: credentials(),
            pending: vec![],
            refusals: Refusals::default(),
        };
        assert_eq!(admit_from(&mut thread, [10, 0, 0, 1]), (1, 0));
        assert_eq!(
            (0..MAX_PENDING).map(|_| admit_from(&mut thread, [10, 0, 0, 2])).last(),
            Some((1, MAX_PENDING_PER_ADDRESS))
        );
        assert_eq!(
            thread.refusals.counts["made room for others"] as usize,
            MAX_PENDING - MAX_PENDING_PER_ADDRESS
        );
    }
}
