//! Values and gradients between a worker and all servers.
//!
//! Ranges travel in several messages, one after the other on each connection
//! (`parameter_server.connections` to a server): while one is on its way, the server works on the
//! one before, and so does the worker.

use std::ops::Range;

use super::codec;
use super::partitioner::ParamRange;
use super::protocol::{Pushed, ServerRequest, ServerResponse, Values};
use super::rpc_client::RpcClient;
use super::run_spec::RunSpec;
use hpctrain_base::error::Result;
use hpctrain_config::WireFormat;
use hpctrain_device::Kernels;
use hpctrain_engine::Model;

/// Bytes of the values in a message, if ranges are not larger: as many stay in a core's cache.
pub const MESSAGE: usize = 1 << 20;

/// Messages that are sent before the first answer is read. More could fill the buffers of both
/// ends, which would wait for each other.
const AHEAD: usize = 8;

/// Whether the generation goes on.
pub type Current = bool;

/// All servers of a run, as a worker sees them.
pub struct Servers {
    generation: u64,
    member: u64,
    format: WireFormat,
    /// The ranges of each.
    pieces: Vec<Vec<ParamRange>>,
    /// The version of each of them that this worker has.
    known: Vec<Vec<Option<u64>>>,
    links: Vec<Link>,
    parcel: PushBuffer,
    body: Vec<u8>,
}

/// The gradients of a message.
#[derive(Default)]
struct PushBuffer {
    values: Vec<f32>,
    /// As they travel, if that is in another format.
    narrow: Vec<u8>,
}

impl PushBuffer {
    /// Takes the gradients of pieces from the device.
    fn fill<B: Kernels>(&mut self, model: &Model<B>, pieces: &[ParamRange]) -> Result<()> {
        let reduced = model.sharded.gradients()?;
        self.values.clear();
        for ParamRange { unit, range } in pieces {
            let grad = B::split_at(B::split_at(reduced[*unit].grad, range.end).0, range.start).1;
            let start = self.values.len();
            self.values.resize(start + range.len(), 0.0);
            model.backend.download(grad, &mut self.values[start..])?;
        }
        Ok(())
    }

    fn bytes(&mut self, format: WireFormat) -> &[u8] {
        codec::encoded(format, &self.values, &mut self.narrow)
    }
}

/// A connection to a server.
struct Link {
    server: usize,
    /// Its number among those to the same server: pushes of each come in order.
    number: usize,
    line: RpcClient,
    /// The ranges of each message, by their place among those of the server.
    messages: Vec<Range<usize>>,
    /// Messages with gradients so far.
    pushes: u64,
    /// Whether the connection stands since the first of the requests that are to be answered.
    stands: bool,
}

impl Link {
    /// Sends a request whose answer comes after those of the ones before.
    fn send(&mut self, request: &ServerRequest, body: &[u8]) {
        self.stands = self.stands && self.line.send(request, &[body]).is_ok();
    }

    /// The answer to the next of the requests that were sent; none once the connection was cut:
    /// then it is to be made again.
    fn answer(&mut self, limit: usize, into: &mut Vec<u8>) -> Option<Result<ServerResponse>> {
        if self.stands {
            let answer = self.line.receive(limit, into);
            self.stands = answer.is_ok();
            return answer.ok();
        }
        None
    }
}

/// Messages dealt out among as many connections, but no more than there are messages: neighbours to
/// the same one.
fn deal(messages: Vec<Range<usize>>, connections: usize) -> Vec<Vec<Range<usize>>> {
    let of_each = messages.len().div_ceil(connections).max(1);
    messages.chunks(of_each).map(<[_]>::to_vec).collect()
}

/// The pieces of each message.
fn messages(pieces: &[ParamRange]) -> Vec<Range<usize>> {
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
fn elements(pieces: &[ParamRange]) -> usize {
    pieces.iter().map(|piece| piece.range.len()).sum()
}

/// Most bytes of the values in a message, of those that any server has.
pub fn longest(pieces: &[Vec<ParamRange>]) -> usize {
    let of_server = |pieces: &Vec<ParamRange>| {
        messages(pieces).into_iter().map(|message| elements(&pieces[message])).max().unwrap_or(0)
    };
    pieces.iter().map(of_server).max().unwrap_or(0) * size_of::<f32>()
}

impl Servers {
    /// Those of the terms, each connected at the first request, by lines that `line` makes for an
    /// address.
    pub fn new(terms: &RunSpec, member: u64, line: impl Fn(&str) -> RpcClient) -> Self {
        let mut links = Vec::new();
        for (server, (address, pieces)) in terms.addresses.iter().zip(&terms.pieces).enumerate() {
            let dealt = deal(messages(pieces), terms.config.parameter_server.connections);
            links.extend(dealt.into_iter().enumerate().map(|(number, messages)| Link {
                server,
                number,
                line: line(address),
                messages,
                pushes: 0,
                stands: true,
            }));
        }
        Self {
            generation: terms.generation,
            member,
            format: terms.config.parameter_server.wire,
            pieces: terms.pieces.clone(),
            known: terms.pieces.iter().map(|pieces| vec![None; pieces.len()]).collect(),
            links,
            parcel: PushBuffer::default(),
            body: Vec::new(),
        }
    }

    /// The versions of the ranges that the worker has, by server.
    pub fn versions(&self) -> Vec<Vec<u64>> {
        let of_server =
            |known: &Vec<Option<u64>>| known.iter().map(|known| known.unwrap_or(0)).collect();
        self.known.iter().map(of_server).collect()
    }

    /// Takes values from all servers: those that have changed since.
    ///
    /// # Errors
    /// A server is gone, or the device failed.
    pub fn pull<B: Kernels>(&mut self, model: &mut Model<B>, of: Values) -> Result<Current> {
        let Self { generation, format, pieces, known, links, body, .. } = self;
        let request = |message: &Range<usize>, known: &[Option<u64>]| {
            let known = known[message.clone()].to_vec();
            ServerRequest::Pull { generation: *generation, of, pieces: message.clone(), known }
        };
        for link in &mut *links {
            link.stands = true;
            for message in link.messages.iter().take(AHEAD).cloned().collect::<Vec<_>>() {
                link.send(&request(&message, &known[link.server]), &[]);
            }
        }
        for turn in 0..most_messages(links) {
            for link in &mut *links {
                let Some(message) = link.messages.get(turn).cloned() else { continue };
                let pieces = &pieces[link.server];
                let known = &mut known[link.server];
                let limit = elements(&pieces[message.clone()]) * size_of::<f32>();
                let answer = match link.answer(limit, body) {
                    Some(answer) => answer?,
                    None => link.line.ask(&request(&message, known), &[], limit, body)?,
                };
                let ServerResponse::Pulled { versions } = answer else { return Ok(false) };
                if let Some(next) = link.messages.get(turn + AHEAD).cloned() {
                    link.send(&request(&next, known), &[]);
                }
                let version = |piece: usize| versions.get(piece - message.start).copied();
                let changed: Vec<usize> = message
                    .clone()
                    .filter(|&i| of != Values::Live || known[i] != version(i))
                    .collect();
                let values = codec::decode(
                    *format,
                    body,
                    changed.iter().map(|&i| pieces[i].range.len()).sum(),
                )?;
                let mut rest = &values[..];
                for i in changed {
                    let piece = &pieces[i];
                    let of_piece = rest.split_off(..pieces[i].range.len());
                    model.sharded.set(
                        piece.unit,
                        piece.range.clone(),
                        of_piece.unwrap_or_default(),
                    )?;
                    known[i] = if of == Values::Live { version(i) } else { None };
                }
            }
        }
        Ok(true)
    }

    /// Gives the reduced gradient to all servers; `of` has the samples whose gradient it is, for
    /// pieces of a server. Returns the largest staleness, or none if the generation is over.
    ///
    /// # Errors
    /// A server is gone, or the device failed.
    pub fn push<B: Kernels>(
        &mut self,
        model: &Model<B>,
        of: impl Fn(usize, Range<usize>) -> Pushed,
    ) -> Result<Option<u64>> {
        let mut most = 0;
        self.links.iter_mut().for_each(|link| link.stands = true);
        for turn in 0..most_messages(&self.links) + AHEAD {
            for link in 0..self.links.len() {
                if turn < self.links[link].messages.len() {
                    self.give(model, &of, link, turn)?;
                }
                if let Some(before) = turn.checked_sub(AHEAD)
                    && before < self.links[link].messages.len()
                {
                    match self.given(model, &of, link, before)? {
                        Some(staleness) => most = most.max(staleness),
                        None => return Ok(None),
                    }
                }
            }
        }
        self.links.iter_mut().for_each(|link| link.pushes += link.messages.len() as u64);
        Ok(Some(most))
    }

    /// Sends the gradients of a message.
    fn give<B: Kernels>(
        &mut self,
        model: &Model<B>,
        of: &impl Fn(usize, Range<usize>) -> Pushed,
        link: usize,
        message: usize,
    ) -> Result<()> {
        let head = self.push_request(of, link, message);
        self.fill(model, link, message)?;
        let Self { format, links, parcel, .. } = self;
        links[link].send(&head, parcel.bytes(*format));
        Ok(())
    }

    /// The staleness of the gradients of a message, once they are taken. None if the generation is
    /// over.
    fn given<B: Kernels>(
        &mut self,
        model: &Model<B>,
        of: &impl Fn(usize, Range<usize>) -> Pushed,
        link: usize,
        message: usize,
    ) -> Result<Option<u64>> {
        let answer = match self.links[link].answer(0, &mut Vec::new()) {
            Some(answer) => answer?,
            // A message that comes twice counts once.
            None => {
                let head = self.push_request(of, link, message);
                self.fill(model, link, message)?;
                let Self { format, links, parcel, .. } = self;
                links[link].line.ask(&head, &[parcel.bytes(*format)], 0, &mut Vec::new())?
            }
        };
        Ok(match answer {
            ServerResponse::Pushed { staleness } => Some(staleness),
            _ => None,
        })
    }

    fn fill<B: Kernels>(&mut self, model: &Model<B>, link: usize, message: usize) -> Result<()> {
        let Link { server, messages, .. } = &self.links[link];
        self.parcel.fill(model, &self.pieces[*server][messages[message].clone()])
    }

    fn push_request(
        &self,
        of: &impl Fn(usize, Range<usize>) -> Pushed,
        link: usize,
        message: usize,
    ) -> ServerRequest {
        let Link { server, number: line, messages, pushes, .. } = &self.links[link];
        let pieces = messages[message].clone();
        let number = pushes + message as u64 + 1;
        let generation = self.generation;
        let member = self.member;
        ServerRequest::Push {
            generation,
            member,
            line: *line,
            number,
            of: of(*server, pieces.clone()),
            pieces,
        }
    }
}

fn most_messages(links: &[Link]) -> usize {
    links.iter().map(|link| link.messages.len()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(bytes: &[usize]) -> Vec<ParamRange> {
        bytes
            .iter()
            .map(|bytes| ParamRange { unit: 0, range: 0..bytes / size_of::<f32>() })
            .collect()
    }

    #[test]
    fn messages_hold_what_a_cache_does() {
        let mib = 1 << 20;
        assert_eq!(
            messages(&pieces(&[mib / 2, mib / 2, 4, 3 * mib, 4, mib])),
            [0..2, 2..3, 3..4, 4..5, 5..6]
        );
        assert_eq!(messages(&pieces(&[4; 9])), vec![0..9; 1]);
        assert!(messages(&[]).is_empty());
        assert_eq!(deal(vec![0..2, 2..3, 3..9], 2), [vec![0..2, 2..3], vec![3..9; 1]]);
        assert_eq!(deal(vec![0..2, 2..3], 3), [vec![0..2; 1], vec![2..3; 1]]);
        assert!(deal(vec![], 2).is_empty());
        assert_eq!(longest(&[pieces(&[4, 8]), pieces(&[3 * mib, 4]), vec![]]), 3 * mib);
    }
}
