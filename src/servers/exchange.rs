//! Values and gradients between a worker and all servers.
//!
//! Ranges travel in several messages, one after the other on a server's connection: while one is on its way, the server works on
//! the one before, and so does the worker.

use std::ops::Range;

use super::division::Piece;
use super::line::Line;
use super::message::{FromServer, Pushed, ToServer, Values};
use super::terms::Terms;
use super::wire;
use crate::backend::Kernels;
use crate::config::WireFormat;
use crate::engine::Model;
use crate::error::Result;

/// Bytes of the values in a message, if ranges are not larger: as many stay in a core's cache.
pub const MESSAGE: usize = 1 << 20;

/// Messages that are sent before the first answer is read. More could fill the buffers of both ends, which would wait for each other.
const AHEAD: usize = 8;

/// Whether the generation goes on.
pub type Current = bool;

/// All servers of a run, as a worker sees them.
pub struct Servers {
    generation: u64,
    member: u64,
    format: WireFormat,
    servers: Vec<Server>,
    /// Messages with gradients so far.
    pushes: u64,
    parcel: Parcel,
    body: Vec<u8>,
}

/// The gradients of a message.
#[derive(Default)]
struct Parcel {
    values: Vec<f32>,
    /// As they travel, if that is in another format.
    narrow: Vec<u8>,
}

impl Parcel {
    /// Takes the gradients of pieces from the device.
    fn fill<B: Kernels>(&mut self, model: &Model<B>, pieces: &[Piece]) -> Result<()> {
        let reduced = model.sharded.gradients()?;
        self.values.clear();
        for Piece { unit, range } in pieces {
            let grad = B::cut(B::cut(reduced[*unit].grad, range.end).0, range.start).1;
            let start = self.values.len();
            self.values.resize(start + range.len(), 0.0);
            model.backend.download(grad, &mut self.values[start..])?;
        }
        Ok(())
    }

    fn bytes(&mut self, format: WireFormat) -> &[u8] {
        wire::encoded(format, &self.values, &mut self.narrow)
    }
}

/// A server, as a worker sees it.
struct Server {
    line: Line,
    pieces: Vec<Piece>,
    /// The pieces of each message.
    messages: Vec<Range<usize>>,
    /// The version of each of its ranges that this worker has.
    known: Vec<Option<u64>>,
    /// Whether the connection stands since the first of the requests that are to be answered.
    stands: bool,
}

impl Server {
    fn new(line: Line, pieces: &[Piece]) -> Self {
        let (pieces, known) = (pieces.to_vec(), vec![None; pieces.len()]);
        Self { line, messages: messages(&pieces), pieces, known, stands: true }
    }

    /// Sends a request whose answer comes after those of the ones before.
    fn send(&mut self, request: &ToServer, body: &[u8]) {
        self.stands = self.stands && self.line.send(request, &[body]).is_ok();
    }

    /// The answer to the next of the requests that were sent; none once the connection was cut: then it is to be made again.
    fn answer(&mut self, limit: usize, into: &mut Vec<u8>) -> Option<Result<FromServer>> {
        if self.stands {
            let answer = self.line.receive(limit, into);
            self.stands = answer.is_ok();
            return answer.ok();
        }
        None
    }
}

/// The pieces of each message.
fn messages(pieces: &[Piece]) -> Vec<Range<usize>> {
    let mut messages: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0;
    for (index, piece) in pieces.iter().enumerate() {
        let more = piece.range.len() * size_of::<f32>();
        match messages.last_mut() {
            Some(last) if bytes + more <= MESSAGE => last.end = index + 1,
            _ => {
                messages.push(index..index + 1);
                bytes = 0;
            }
        }
        bytes += more;
    }
    messages
}

/// Elements of pieces.
fn elements(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.range.len()).sum()
}

/// Most bytes of the values in a message, of those that any server has.
pub fn longest(pieces: &[Vec<Piece>]) -> usize {
    let of_server =
        |pieces: &Vec<Piece>| messages(pieces).into_iter().map(|message| elements(&pieces[message])).max().unwrap_or(0);
    pieces.iter().map(of_server).max().unwrap_or(0) * size_of::<f32>()
}

impl Servers {
    /// Those of the terms, each connected at the first request, by the line that `line` makes for an address.
    pub fn new(terms: &Terms, member: u64, line: impl Fn(&str) -> Line) -> Self {
        let servers = terms.addresses.iter().zip(&terms.pieces);
        Self {
            generation: terms.generation,
            member,
            format: terms.config.servers.wire,
            servers: servers.map(|(address, pieces)| Server::new(line(address), pieces)).collect(),
            pushes: 0,
            parcel: Parcel::default(),
            body: Vec::new(),
        }
    }

    /// The versions of the ranges that the worker has, by server.
    pub fn versions(&self) -> Vec<Vec<u64>> {
        let of_server = |server: &Server| server.known.iter().map(|known| known.unwrap_or(0)).collect();
        self.servers.iter().map(of_server).collect()
    }

    /// Takes values from all servers: those that have changed since.
    ///
    /// # Errors
    /// A server is gone, or the device failed.
    pub fn pull<B: Kernels>(&mut self, model: &mut Model<B>, of: Values) -> Result<Current> {
        let Self { generation, format, servers, body, .. } = self;
        let request = |message: &Range<usize>, known: &[Option<u64>]| {
            let known = known[message.clone()].to_vec();
            ToServer::Pull { generation: *generation, of, pieces: message.clone(), known }
        };
        for server in &mut *servers {
            server.stands = true;
            for message in server.messages.iter().take(AHEAD).cloned().collect::<Vec<_>>() {
                server.send(&request(&message, &server.known), &[]);
            }
        }
        for server in servers {
            for (index, message) in server.messages.clone().into_iter().enumerate() {
                let limit = elements(&server.pieces[message.clone()]) * size_of::<f32>();
                let answer = match server.answer(limit, body) {
                    Some(answer) => answer?,
                    None => server.line.ask(&request(&message, &server.known), &[], limit, body)?,
                };
                let FromServer::Pulled { versions } = answer else { return Ok(false) };
                if let Some(next) = server.messages.get(index + AHEAD).cloned() {
                    server.send(&request(&next, &server.known), &[]);
                }
                let version = |piece: usize| versions.get(piece - message.start).copied();
                let changed: Vec<usize> =
                    message.clone().filter(|&i| of != Values::Live || server.known[i] != version(i)).collect();
                let values = wire::decode(*format, body, changed.iter().map(|&i| server.pieces[i].range.len()).sum())?;
                let mut rest = &values[..];
                for i in changed {
                    let (piece, of_piece) = (&server.pieces[i], rest.split_off(..server.pieces[i].range.len()));
                    model.sharded.set(piece.unit, piece.range.clone(), of_piece.unwrap_or_default())?;
                    server.known[i] = if of == Values::Live { version(i) } else { None };
                }
            }
        }
        Ok(true)
    }

    /// Gives the reduced gradient to all servers; `of` has the samples whose gradient it is, for pieces of a server. Returns the
    /// largest staleness, or none if the generation is over.
    ///
    /// # Errors
    /// A server is gone, or the device failed.
    pub fn push<B: Kernels>(
        &mut self,
        model: &Model<B>,
        of: impl Fn(usize, Range<usize>) -> Pushed,
    ) -> Result<Option<u64>> {
        let mut most = 0;
        let mut note = |staleness: Option<u64>| staleness.map(|staleness| most = most.max(staleness)).is_some();
        let counts: Vec<usize> = self.servers.iter().map(|server| server.messages.len()).collect();
        let mut firsts = Vec::with_capacity(counts.len());
        for (server, &count) in counts.iter().enumerate() {
            self.servers[server].stands = true;
            firsts.push(self.pushes);
            for message in 0..count {
                self.pushes += 1;
                self.give(model, &of, server, message, self.pushes)?;
                if message >= AHEAD && !note(self.given(model, &of, server, message - AHEAD, firsts[server])?) {
                    return Ok(None);
                }
            }
        }
        for (server, &count) in counts.iter().enumerate() {
            for message in count.saturating_sub(AHEAD)..count {
                if !note(self.given(model, &of, server, message, firsts[server])?) {
                    return Ok(None);
                }
            }
        }
        Ok(Some(most))
    }

    /// Sends the gradients of a message under its number.
    fn give<B: Kernels>(
        &mut self,
        model: &Model<B>,
        of: &impl Fn(usize, Range<usize>) -> Pushed,
        server: usize,
        message: usize,
        number: u64,
    ) -> Result<()> {
        let head = self.push_request(of, server, message, number);
        let Self { format, servers, parcel, .. } = self;
        let server = &mut servers[server];
        parcel.fill(model, &server.pieces[server.messages[message].clone()])?;
        server.send(&head, parcel.bytes(*format));
        Ok(())
    }

    /// The staleness of the gradients of a message, once they are taken; `first` is the number before those of the server's
    /// messages. None if the generation is over.
    fn given<B: Kernels>(
        &mut self,
        model: &Model<B>,
        of: &impl Fn(usize, Range<usize>) -> Pushed,
        server: usize,
        message: usize,
        first: u64,
    ) -> Result<Option<u64>> {
        let head = self.push_request(of, server, message, first + message as u64 + 1);
        let Self { format, servers, parcel, .. } = self;
        let server = &mut servers[server];
        let answer = match server.answer(0, &mut Vec::new()) {
            Some(answer) => answer?,
            // A message that comes twice counts once.
            None => {
                parcel.fill(model, &server.pieces[server.messages[message].clone()])?;
                server.line.ask(&head, &[parcel.bytes(*format)], 0, &mut Vec::new())?
            }
        };
        Ok(match answer {
            FromServer::Pushed { staleness } => Some(staleness),
            _ => None,
        })
    }

    fn push_request(
        &self,
        of: &impl Fn(usize, Range<usize>) -> Pushed,
        server: usize,
        message: usize,
        number: u64,
    ) -> ToServer {
        let (generation, member) = (self.generation, self.member);
        let pieces = self.servers[server].messages[message].clone();
        ToServer::Push { generation, member, number, of: of(server, pieces.clone()), pieces }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(bytes: &[usize]) -> Vec<Piece> {
        bytes.iter().map(|bytes| Piece { unit: 0, range: 0..bytes / size_of::<f32>() }).collect()
    }

    #[test]
    fn messages_hold_what_a_cache_does() {
        let mib = 1 << 20;
        assert_eq!(messages(&pieces(&[mib / 2, mib / 2, 4, 3 * mib, 4, mib])), [0..2, 2..3, 3..4, 4..5, 5..6]);
        assert_eq!(messages(&pieces(&[4; 9])), vec![0..9; 1]);
        assert!(messages(&[]).is_empty());
        assert_eq!(longest(&[pieces(&[4, 8]), pieces(&[3 * mib, 4]), vec![]]), 3 * mib);
    }
}
