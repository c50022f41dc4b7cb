//! A connection to a server or to the coordinator, made anew when it is cut.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::{self, Fault};
use super::site;
use crate::comm::{Caller, Secret, call};
use crate::error::{Error, Result};

/// Pause between two attempts to connect.
const BETWEEN: Duration = Duration::from_millis(100);

/// The purpose of a connection, in its greeting: apart from those of ranks.
pub const SERVERS: u32 = 0x5e72;

/// One end of a connection: asks.
pub struct Line {
    /// The other end, for messages.
    place: String,
    address: String,
    secret: Secret,
    /// Time within which the other end must answer.
    patience: Duration,
    /// Time within which it must come back once it is cut off.
    comeback: Duration,
    stream: Option<TcpStream>,
}

impl Line {
    /// To `address`, connected at the first request.
    pub fn new(place: impl Into<String>, address: impl Into<String>, secret: Secret, patience: Duration) -> Self {
        Self { place: place.into(), address: address.into(), secret, patience, comeback: patience, stream: None }
    }

    /// The same, to one that must come back within another time once it is cut off.
    #[must_use]
    pub fn comes_back(self, comeback: Duration) -> Self {
        Self { comeback, ..self }
    }

    /// The other end's address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends a request whose answer [`Line::receive`] takes.
    ///
    /// # Errors
    /// The connection failed, and is closed.
    pub fn send(&mut self, head: &impl Serialize, body: &[&[u8]]) -> Result<()> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            empty => {
                let mut stream = site::connect(&self.address, self.patience)?;
                call(&mut stream, &self.secret, Caller { rank: 0, ranks: 0, lane: SERVERS })?;
                let limit =
                    stream.set_read_timeout(Some(self.patience)).and(stream.set_write_timeout(Some(self.patience)));
                limit.map_err(|e| Error::comm(e.to_string()))?;
                empty.insert(stream)
            }
        };
        message::write(stream, head, body).inspect_err(|_| self.stream = None)
    }

    /// The answer to the request that was sent; its body, of at most `limit` bytes, goes into `body`.
    ///
    /// # Errors
    /// The connection failed, and is closed; or an error of the other end.
    pub fn receive<T: DeserializeOwned>(&mut self, limit: usize, body: &mut Vec<u8>) -> Result<Result<T>> {
        let stream = self.stream.as_mut().ok_or_else(|| Error::comm("nothing was asked"))?;
        let read = message::read::<Result<T, Fault>>(stream, limit, body);
        match read {
            Ok(Some(answer)) => Ok(answer.map_err(Fault::error)),
            Ok(None) => {
                self.stream = None;
                Err(Error::comm("the connection ended"))
            }
            Err(e) => {
                self.stream = None;
                Err(e)
            }
        }
    }

    /// Asks once more and again until there is an answer: requests are such that a second one does no harm.
    ///
    /// # Errors
    /// There was none in time; or an error of the other end.
    pub fn ask<T: DeserializeOwned>(
        &mut self,
        head: &impl Serialize,
        body: &[&[u8]],
        limit: usize,
        into: &mut Vec<u8>,
    ) -> Result<T> {
        self.ask_while(|| true, head, body, limit, into)
    }

    /// As [`Line::ask`], as long as it `makes_sense`.
    ///
    /// # Errors
    /// As [`Line::ask`].
    pub fn ask_while<T: DeserializeOwned>(
        &mut self,
        makes_sense: impl Fn() -> bool,
        head: &impl Serialize,
        body: &[&[u8]],
        limit: usize,
        into: &mut Vec<u8>,
    ) -> Result<T> {
        let since = Instant::now();
        loop {
            match self.send(head, body).and_then(|()| self.receive(limit, into)) {
                Ok(answer) => return answer,
                Err(_) if since.elapsed() < self.comeback && makes_sense() => std::thread::sleep(BETWEEN),
                Err(e) => return Err(e.at(format_args!("{} at {}", self.place, self.address))),
            }
        }
    }

    /// As [`Line::ask`], without bodies.
    ///
    /// # Errors
    /// As [`Line::ask`].
    pub fn tell<T: DeserializeOwned>(&mut self, head: &impl Serialize) -> Result<T> {
        self.ask(head, &[], 0, &mut Vec::new())
    }

    /// As [`Line::tell`], once: a connection that is cut is not made anew.
    ///
    /// # Errors
    /// There was no answer; or an error of the other end.
    pub fn tell_once<T: DeserializeOwned>(&mut self, head: &impl Serialize) -> Result<T> {
        self.send(head, &[]).and_then(|()| self.receive(0, &mut Vec::new()))?
    }
}
