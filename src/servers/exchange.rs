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
            for message in server.messages.clone() {
                server.send(&request(&message, &server.known), &[]);
            }
        }
        for server in servers {
            for message in server.messages.clone() {
                let limit = elements(&server.pieces[message.clone()]) * size_of::<f32>();
                let answer = match server.answer(limit, body) {
                    Some(answer) => answer?,
                    None => server.line.ask(&request(&message, &server.known), &[], limit, body)?,
                };
                let FromServer::Pulled { versions } = answer else { return Ok(false) };
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
        let Self { generation, member, format, servers, pushes, parcel, .. } = self;
        let request = |server: usize, pieces: &Range<usize>, number: u64| {
            let (generation, member, pieces) = (*generation, *member, pieces.clone());
            ToServer::Push { generation, member, number, of: of(server, pieces.clone()), pieces }
        };
        let first = *pushes;
        for (index, server) in servers.iter_mut().enumerate() {
            server.stands = true;
            for message in server.messages.clone() {
                *pushes += 1;
                parcel.fill(model, &server.pieces[message.clone()])?;
                server.send(&request(index, &message, *pushes), parcel.bytes(*format));
            }
        }
        let (mut number, mut most) = (first, 0);
        for (index, server) in servers.iter_mut().enumerate() {
            for message in server.messages.clone() {
                number += 1;
                let answer = match server.answer(0, &mut Vec::new()) {
                    Some(answer) => answer?,
                    // A message that comes twice counts once.
                    None => {
                        parcel.fill(model, &server.pieces[message.clone()])?;
                        let head = request(index, &message, number);
                        server.line.ask(&head, &[parcel.bytes(*format)], 0, &mut Vec::new())?
                    }
                };
                let FromServer::Pushed { staleness } = answer else { return Ok(None) };
                most = most.max(staleness);
            }
        }
        Ok(Some(most))
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
