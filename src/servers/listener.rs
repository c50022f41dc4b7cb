//! The answering end of connections: a thread for each.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::line::SERVERS;
use super::message::{self, Fault};
use crate::comm::{Secret, answer};
use crate::error::{Error, Result};

/// Interval at which callers are looked for.
const LOOK: Duration = Duration::from_millis(5);

/// Greetings at a time: more callers are sent away.
const GREETINGS: usize = 64;

/// Connections at a time.
const CONNECTIONS: usize = 4096;

/// The work of an answering end.
pub trait Service: Send + Sync + 'static {
    /// A request.
    type Request: DeserializeOwned;
    /// An answer.
    type Answer: Serialize;
    /// The state of a connection.
    type Visit: Default;

    /// Most bytes of a request's body.
    fn limit(&self) -> usize;

    /// Answers a request. `body` holds the request's body, and the answer's afterwards.
    ///
    /// # Errors
    /// Told to the asking end.
    fn answer(&self, visit: &mut Self::Visit, request: Self::Request, body: &mut Vec<u8>) -> Result<Self::Answer>;

    /// A connection has ended.
    fn left(&self, visit: Self::Visit);
}

/// Answers until it is dropped.
pub struct Listener {
    over: Arc<AtomicBool>,
}

impl Listener {
    /// Answers those that connect to `listener` and know the secret. A connection that says nothing for `idle` is closed.
    ///
    /// # Errors
    /// The system refused a thread.
    pub fn open<S: Service>(listener: TcpListener, secret: Secret, service: Arc<S>, idle: Duration) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        listener.set_nonblocking(true).map_err(|e| Error::comm(format!("cannot listen: {e}")))?;
        let (ends, greetings, connections) = (over.clone(), Arc::new(AtomicUsize::new(0)), Arc::new(()));
        let body = move || {
            while !ends.load(Ordering::Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    std::thread::sleep(LOOK);
                    continue;
                };
                if greetings.load(Ordering::Relaxed) >= GREETINGS || Arc::strong_count(&connections) > CONNECTIONS {
                    continue;
                }
                greetings.fetch_add(1, Ordering::Relaxed);
                let (greeting, secret, service) = (greetings.clone(), secret.clone(), service.clone());
                let (ends, connection) = (ends.clone(), connections.clone());
                let serve = move || {
                    let greeted = greet(stream, &secret, idle);
                    greeting.fetch_sub(1, Ordering::Relaxed);
                    match greeted {
                        Ok(stream) => converse(stream, &*service, &ends),
                        Err(e) => log::debug!("a connection was refused: {e}"),
                    }
                    drop(connection);
                };
                // If the system refuses a thread the connection ends, and a known caller calls again.
                if std::thread::Builder::new().name("connection".into()).spawn(serve).is_err() {
                    greetings.fetch_sub(1, Ordering::Relaxed);
                }
            }
        };
        let thread = std::thread::Builder::new().name("listener".into()).spawn(body);
        thread.map_err(|e| Error::comm(format!("cannot start a thread: {e}")))?;
        Ok(Self { over })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Lets a caller prove that it knows the secret.
fn greet(mut stream: TcpStream, secret: &Secret, idle: Duration) -> Result<TcpStream> {
    let lost = |e: std::io::Error| Error::comm(e.to_string());
    stream.set_nonblocking(false).map_err(lost)?;
    stream.set_nodelay(true).map_err(lost)?;
    if answer(&mut stream, secret)?.lane != SERVERS {
        return Err(Error::comm("the caller is a rank, not one of a run on servers"));
    }
    stream.set_read_timeout(Some(idle)).map_err(lost)?;
    stream.set_write_timeout(Some(idle)).map_err(lost)?;
    Ok(stream)
}

/// Answers the requests of a connection until it ends.
fn converse<S: Service>(mut stream: TcpStream, service: &S, over: &AtomicBool) {
    let (mut visit, mut body) = (S::Visit::default(), Vec::new());
    while !over.load(Ordering::Relaxed) {
        // A connection that fails or ends has nothing more to say.
        let Ok(Some(request)) = message::read(&mut stream, service.limit(), &mut body) else { break };
        let answer = service.answer(&mut visit, request, &mut body);
        if answer.is_err() {
            body.clear();
        }
        let answer: Result<S::Answer, Fault> = answer.map_err(|e| Fault::from(&e));
        if message::write(&mut stream, &answer, &[&body]).is_err() {
            break;
        }
    }
    service.left(visit);
}
