//! Pulls of parameters and pushes of gradients between a worker and all servers.
//!
//! Ranges are sent in several messages, which are pipelined on each of the
//! `parameter_server.connections` connections to a server: while one message is in flight, server
//! and worker process the one before.

use std::io::Read;
use std::ops::Range;

use super::codec;
use super::partitioner::ParamRange;
use super::protocol::{Pushed, ServerRequest, ServerResponse, Values, lost, read_body};
use super::rpc_client::RpcClient;
use super::run_spec::RunSpec;
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_config::MessageDtype;
use hpctrain_device::Kernels;
use hpctrain_engine::Model;

/// The maximum size in bytes of the values of a message with several ranges, which fits a core's
/// cache.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// The number of messages sent before the first response is read. More could fill the socket
/// buffers of both ends and deadlock.
const PIPELINE_DEPTH: usize = 8;

/// Whether the generation is current.
pub type Current = bool;

/// The parameters of a process, into which values are pulled.
pub trait PullTarget {
    /// Replaces a range of the parameters of a unit.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn set(&mut self, unit: usize, range: Range<usize>, values: &[f32]) -> Result<()>;

    /// Returns a range of the parameters of a unit, to replace it, if all parameters are in host
    /// memory as f32.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn on_host(&mut self, unit: usize, range: Range<usize>) -> Result<Option<&mut [f32]>>;
}

/// The gradients of a process, which are pushed.
pub trait PushSource {
    /// Returns the gradients of ranges, one after another; those of another device are downloaded
    /// into `downloads`.
    ///
    /// # Errors
    /// Returns an error if there are no gradients, or the device fails.
    fn gradients<'a>(
        &'a self,
        pieces: &[ParamRange],
        downloads: &'a mut Vec<f32>,
    ) -> Result<Vec<&'a [f32]>>;
}

impl<B: Kernels> PullTarget for Model<B> {
    fn set(&mut self, unit: usize, range: Range<usize>, values: &[f32]) -> Result<()> {
        self.sharded.set(unit - self.sharded.stage().units.start, range, values)
    }

    fn on_host(&mut self, unit: usize, range: Range<usize>) -> Result<Option<&mut [f32]>> {
        self.sharded.on_host(unit - self.sharded.stage().units.start, range)
    }
}

impl<B: Kernels> PushSource for Model<B> {
    fn gradients<'a>(
        &'a self,
        pieces: &[ParamRange],
        downloads: &'a mut Vec<f32>,
    ) -> Result<Vec<&'a [f32]>> {
        let reduced = self.sharded.gradients()?;
        let first = self.sharded.stage().units.start;
        let of_piece = |ParamRange { unit, range }: &ParamRange| {
            B::split_at(B::split_at(reduced[unit - first].grad, range.end).0, range.start).1
        };
        if let Some(on_host) = pieces.iter().map(|piece| B::on_host(of_piece(piece))).collect() {
            return Ok(on_host);
        }
        downloads.resize(elements(pieces), 0.0);
        let mut rest = &mut downloads[..];
        for piece in pieces {
            let to = rest.split_off_mut(..piece.range.len()).unwrap_or_default();
            self.backend.download(of_piece(piece), to)?;
        }
        Ok(vec![downloads])
    }
}

/// A worker's connections to all servers of a run.
pub struct ServerConnections {
    generation: u64,
    member: u64,
    format: MessageDtype,
    /// The ranges of each server.
    pieces: Vec<Vec<ParamRange>>,
    /// The version of each range that this worker has.
    known: Vec<Vec<Option<u64>>>,
    connections: Vec<ServerConnection>,
    push_buffer: PushBuffer,
    body: Vec<u8>,
}

/// Memory for the gradients of a message that cannot be sent from where they are.
#[derive(Default)]
struct PushBuffer {
    /// Gradients of another device.
    downloads: Vec<f32>,
    /// The encoded values, if the format is not f32.
    encoded: Vec<u8>,
}

impl PushBuffer {
    /// Returns the gradients of ranges as the parts of a body.
    fn parts<'a>(
        &'a mut self,
        source: &'a impl PushSource,
        pieces: &[ParamRange],
        format: MessageDtype,
    ) -> Result<Vec<&'a [u8]>> {
        let gradients = source.gradients(pieces, &mut self.downloads)?;
        if format == MessageDtype::F32 {
            return Ok(gradients.into_iter().map(bytemuck::cast_slice).collect());
        }
        self.encoded.clear();
        gradients.iter().for_each(|values| codec::encode(format, values, &mut self.encoded));
        Ok(vec![&self.encoded])
    }
}

/// A connection to a server.
struct ServerConnection {
    server: usize,
    /// The index among the connections to the same server; each delivers pushes in order.
    number: usize,
    client: RpcClient,
    /// The ranges of each message, by index among those of the server.
    messages: Vec<Range<usize>>,
    /// The number of push messages so far.
    pushes: u64,
    /// Whether the connection has not failed since the first outstanding request.
    is_up: bool,
}

impl ServerConnection {
    /// Sends a request without waiting for its response.
    fn send(&mut self, request: &ServerRequest, body: &[&[u8]]) {
        self.is_up = self.is_up && self.client.send(request, body).is_ok();
    }

    /// Returns the response to the oldest outstanding request, whose body `take_body` reads, or none
    /// if the connection failed; then the request must be repeated.
    fn answer(
        &mut self,
        limit: usize,
        take_body: impl FnOnce(&ServerResponse, usize, &mut dyn Read) -> Result<()>,
    ) -> Option<Result<ServerResponse>> {
        if !self.is_up {
            return None;
        }
        let answer = self.client.receive_with(limit, take_body);
        self.is_up = answer.is_ok();
        match answer {
            Err(e) if e.kind() == Kind::Comm => None,
            answer => Some(answer.flatten()),
        }
    }
}

/// Distributes messages over at most `connections` connections, neighbours to the same one.
fn distribute(messages: Vec<Range<usize>>, connections: usize) -> Vec<Vec<Range<usize>>> {
    let of_each = messages.len().div_ceil(connections).max(1);
    messages.chunks(of_each).map(<[_]>::to_vec).collect()
}

/// Groups ranges into messages, without the first `skipped` ones.
fn messages(pieces: &[ParamRange], skipped: usize) -> Vec<Range<usize>> {
    let mut messages: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0;
    for (index, piece) in pieces.iter().enumerate().skip(skipped) {
        let more = piece.range.len() * size_of::<f32>();
        match messages.last_mut() {
            Some(last) if bytes + more <= MAX_MESSAGE_BYTES => last.end = index + 1,
            _ => {
                messages.push(index..index + 1);
                bytes = 0;
            }
        }
        bytes += more;
    }
    messages
}

/// Returns the number of elements of ranges.
fn elements(pieces: &[ParamRange]) -> usize {
    pieces.iter().map(|piece| piece.range.len()).sum()
}

/// Returns the size in bytes of the largest message to any server, apart from those with rows of
/// tables.
pub fn max_message_bytes(terms: &RunSpec) -> usize {
    let sizes = terms.pieces.iter().enumerate().flat_map(|(server, pieces)| {
        let messages = messages(pieces, terms.table_ranges(server));
        messages.into_iter().map(move |message| elements(&pieces[message]))
    });
    sizes.max().unwrap_or(0) * size_of::<f32>()
}

impl ServerConnections {
    /// Creates the connections, which `client` makes for an address. Each connects at its first
    /// request.
    pub fn new(terms: &RunSpec, member: u64, client: impl Fn(&str) -> RpcClient) -> Self {
        let mut connections = Vec::new();
        for (server, (address, pieces)) in terms.addresses.iter().zip(&terms.pieces).enumerate() {
            // A `RowClient` has the ranges of tables with sparse updates.
            let messages = messages(pieces, terms.table_ranges(server));
            let of_server = distribute(messages, terms.config.parameter_server.connections);
            connections.extend(of_server.into_iter().enumerate().map(|(number, messages)| {
                ServerConnection {
                    server,
                    number,
                    client: client(address),
                    messages,
                    pushes: 0,
                    is_up: true,
                }
            }));
        }
        Self {
            generation: terms.generation,
            member,
            format: terms.config.parameter_server.message_dtype,
            pieces: terms.pieces.clone(),
            known: terms.pieces.iter().map(|pieces| vec![None; pieces.len()]).collect(),
            connections,
            push_buffer: PushBuffer::default(),
            body: Vec::new(),
        }
    }

    /// Returns the versions of the ranges that the worker has, by server.
    pub fn versions(&self) -> Vec<Vec<u64>> {
        self.known
            .iter()
            .map(|known| known.iter().map(|known| known.unwrap_or(0)).collect())
            .collect()
    }

    /// Makes the next pull transfer all values, for another target than that of the last pull.
    pub fn forget_versions(&mut self) {
        self.known.iter_mut().for_each(|known| known.fill(None));
    }

    /// Replaces the values on all servers by those of all units, and clears the optimizer state.
    ///
    /// # Errors
    /// Returns an error if a server cannot be reached.
    pub fn write(&mut self, units: &[Vec<f32>]) -> Result<Current> {
        let Self { generation, pieces, connections, body, .. } = self;
        for ServerConnection { server, client, messages, .. } in connections {
            for message in messages {
                let request =
                    ServerRequest::Set { generation: *generation, pieces: message.clone() };
                let values: Vec<&[u8]> = pieces[*server][message.clone()]
                    .iter()
                    .map(|piece| bytemuck::cast_slice(&units[piece.unit][piece.range.clone()]))
                    .collect();
                match client.call_with_body(&request, &values, 0, body)? {
                    ServerResponse::Done => {}
                    _ => return Ok(false),
                }
            }
        }
        Ok(true)
    }

    /// Pulls the values that have changed since the last pull from all servers. Returns false if
    /// the generation is over.
    ///
    /// # Errors
    /// Returns an error if a server cannot be reached, or the device fails.
    pub fn pull(&mut self, target: &mut impl PullTarget, of: Values) -> Result<Current> {
        let Self { generation, format, pieces, known, connections, body, .. } = self;
        let request = |message: &Range<usize>, known: &[Option<u64>]| {
            let known = known[message.clone()].to_vec();
            ServerRequest::Pull { generation: *generation, of, pieces: message.clone(), known }
        };
        for connection in &mut *connections {
            connection.is_up = true;
            let first: Vec<_> = connection.messages.iter().take(PIPELINE_DEPTH).cloned().collect();
            for message in first {
                connection.send(&request(&message, &known[connection.server]), &[]);
            }
        }
        for turn in 0..most_messages(connections) {
            for connection in &mut *connections {
                let Some(message) = connection.messages.get(turn).cloned() else { continue };
                let pieces = &pieces[connection.server];
                let known = &mut known[connection.server];
                let limit = elements(&pieces[message.clone()]) * size_of::<f32>();
                let mut changed = vec![];
                let mut in_place = false;
                let mut take_body = |answer: &ServerResponse, len, stream: &mut dyn Read| {
                    changed = changed_ranges(answer, &message, known, of);
                    let pieces = || changed.iter().map(|(i, _)| &pieces[*i]);
                    codec::check_len(*format, len, pieces().map(|piece| piece.range.len()).sum())?;
                    in_place =
                        *format == MessageDtype::F32 && read_in_place(pieces(), target, stream)?;
                    if in_place { Ok(()) } else { read_body(len, stream, body) }
                };
                let answer = match connection.answer(limit, &mut take_body) {
                    Some(answer) => answer?,
                    None => {
                        let repeated = request(&message, known);
                        connection.client.call_with(&repeated, &[], limit, take_body)?
                    }
                };
                let ServerResponse::Pulled { .. } = answer else { return Ok(false) };
                if !in_place {
                    set_values(*format, changed.iter().map(|(i, _)| &pieces[*i]), target, body)?;
                }
                for (i, version) in changed {
                    known[i] = (of == Values::Live).then_some(version);
                }
                if let Some(next) = connection.messages.get(turn + PIPELINE_DEPTH).cloned() {
                    connection.send(&request(&next, known), &[]);
                }
            }
        }
        Ok(true)
    }

    /// Pushes the reduced gradient to all servers; `of` describes its samples for given ranges of a
    /// server. Returns the largest staleness, or none if the generation is over.
    ///
    /// # Errors
    /// Returns an error if a server cannot be reached, or the device fails.
    pub fn push(
        &mut self,
        source: &impl PushSource,
        of: impl Fn(usize, Range<usize>) -> Pushed,
    ) -> Result<Option<u64>> {
        let mut most = 0;
        self.connections.iter_mut().for_each(|connection| connection.is_up = true);
        for turn in 0..most_messages(&self.connections) + PIPELINE_DEPTH {
            for connection in 0..self.connections.len() {
                if turn < self.connections[connection].messages.len() {
                    self.send_push(source, &of, connection, turn)?;
                }
                if let Some(before) = turn.checked_sub(PIPELINE_DEPTH)
                    && before < self.connections[connection].messages.len()
                {
                    match self.receive_push(source, &of, connection, before)? {
                        Some(staleness) => most = most.max(staleness),
                        None => return Ok(None),
                    }
                }
            }
        }
        for connection in &mut self.connections {
            connection.pushes += connection.messages.len() as u64;
        }
        Ok(Some(most))
    }

    /// Sends the gradients of a message.
    fn send_push(
        &mut self,
        source: &impl PushSource,
        of: &impl Fn(usize, Range<usize>) -> Pushed,
        connection: usize,
        message: usize,
    ) -> Result<()> {
        let head = self.push_request(of, connection, message);
        let Self { format, connections, pieces, push_buffer, .. } = self;
        let connection = &mut connections[connection];
        let pieces = &pieces[connection.server][connection.messages[message].clone()];
        connection.send(&head, &push_buffer.parts(source, pieces, *format)?);
        Ok(())
    }

    /// Waits for the response to a push message and returns its staleness, or none if the
    /// generation is over.
    fn receive_push(
        &mut self,
        source: &impl PushSource,
        of: &impl Fn(usize, Range<usize>) -> Pushed,
        connection: usize,
        message: usize,
    ) -> Result<Option<u64>> {
        let answer = match self.connections[connection].answer(0, |_, _, _| Ok(())) {
            Some(answer) => answer?,
            // The server applies a repeated message once.
            None => {
                let head = self.push_request(of, connection, message);
                let Self { format, connections, pieces, push_buffer, .. } = self;
                let ServerConnection { server, client, messages, .. } =
                    &mut connections[connection];
                let pieces = &pieces[*server][messages[message].clone()];
                let parts = push_buffer.parts(source, pieces, *format)?;
                client.call_with_body(&head, &parts, 0, &mut Vec::new())?
            }
        };
        Ok(match answer {
            ServerResponse::Pushed { staleness } => Some(staleness),
            _ => None,
        })
    }

    fn push_request(
        &self,
        of: &impl Fn(usize, Range<usize>) -> Pushed,
        connection: usize,
        message: usize,
    ) -> ServerRequest {
        let ServerConnection { server, number: line, messages, pushes, .. } =
            &self.connections[connection];
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

/// Returns the index and the version of those ranges of a message whose values are in the response.
fn changed_ranges(
    answer: &ServerResponse,
    message: &Range<usize>,
    known: &[Option<u64>],
    of: Values,
) -> Vec<(usize, u64)> {
    let ServerResponse::Pulled { versions } = answer else { return vec![] };
    let all = message.clone().zip(versions.iter().copied());
    all.filter(|(i, version)| of != Values::Live || known[*i] != Some(*version)).collect()
}

/// Reads the values of ranges from a stream into the parameters themselves, and returns true; or
/// reads nothing and returns false if they are not in host memory.
fn read_in_place<'a>(
    pieces: impl Iterator<Item = &'a ParamRange>,
    target: &mut impl PullTarget,
    stream: &mut dyn Read,
) -> Result<bool> {
    for (index, ParamRange { unit, range }) in pieces.enumerate() {
        let Some(params) = target.on_host(*unit, range.clone())? else {
            return match index {
                0 => Ok(false),
                _ => Err(Error::internal("only some parameters are in host memory")),
            };
        };
        stream.read_exact(bytemuck::cast_slice_mut(params)).map_err(lost)?;
    }
    Ok(true)
}

/// Replaces ranges by the values in a body.
fn set_values<'a>(
    format: MessageDtype,
    pieces: impl Iterator<Item = &'a ParamRange>,
    target: &mut impl PullTarget,
    body: &[u8],
) -> Result<()> {
    let mut rest = body;
    for ParamRange { unit, range } in pieces {
        let of_piece;
        (of_piece, rest) = rest.split_at(range.len() * codec::width(format));
        target.set(*unit, range.clone(), &codec::decode(format, of_piece, range.len())?)?;
    }
    Ok(())
}

fn most_messages(connections: &[ServerConnection]) -> usize {
    connections.iter().map(|connection| connection.messages.len()).max().unwrap_or(0)
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
    fn messages_fit_a_cache() {
        let mib = 1 << 20;
        assert_eq!(
            messages(&pieces(&[mib / 2, mib / 2, 4, 3 * mib, 4, mib]), 0),
            [0..2, 2..3, 3..4, 4..5, 5..6]
        );
        assert_eq!(messages(&pieces(&[4; 9]), 0), vec![0..9; 1]);
        assert_eq!(messages(&pieces(&[4; 9]), 2), vec![2..9; 1]);
        assert!(messages(&[], 0).is_empty());
        assert_eq!(distribute(vec![0..2, 2..3, 3..9], 2), [vec![0..2, 2..3], vec![3..9; 1]]);
        assert_eq!(distribute(vec![0..2, 2..3], 3), [vec![0..2; 1], vec![2..3; 1]]);
        assert!(distribute(vec![], 2).is_empty());
    }
}
