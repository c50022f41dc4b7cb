//! Pulls of parameters and pushes of gradients between a worker and all servers.
//!
//! Ranges are sent in several messages, which are pipelined on each of the
//! `parameter_server.connections` connections to a server: while one message is in flight, server
//! and worker process the one before.

use std::ops::Range;

use super::codec;
use super::partitioner::ParamRange;
use super::protocol::{Pushed, ServerRequest, ServerResponse, Values};
use super::rpc_client::RpcClient;
use super::run_spec::RunSpec;
use hpctrain_base::error::Result;
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
}

/// The gradients of a process, which are pushed.
pub trait PushSource {
    /// Appends the gradients of ranges to `into`.
    ///
    /// # Errors
    /// Returns an error if there are no gradients, or the device fails.
    fn gradients(&self, pieces: &[ParamRange], into: &mut Vec<f32>) -> Result<()>;
}

impl<B: Kernels> PullTarget for Model<B> {
    fn set(&mut self, unit: usize, range: Range<usize>, values: &[f32]) -> Result<()> {
        self.sharded.set(unit - self.sharded.stage().units.start, range, values)
    }
}

impl<B: Kernels> PushSource for Model<B> {
    fn gradients(&self, pieces: &[ParamRange], into: &mut Vec<f32>) -> Result<()> {
        let reduced = self.sharded.gradients()?;
        let first = self.sharded.stage().units.start;
        for ParamRange { unit, range } in pieces {
            let grad = reduced[unit - first].grad;
            let grad = B::split_at(B::split_at(grad, range.end).0, range.start).1;
            match B::on_host(grad) {
                // They are sent at once, so they stay in the caches.
                Some(elements) => into.extend_from_slice(elements),
                None => {
                    let start = into.len();
                    into.resize(start + range.len(), 0.0);
                    self.backend.download(grad, &mut into[start..])?;
                }
            }
        }
        Ok(())
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

/// The gradients of a message.
#[derive(Default)]
struct PushBuffer {
    values: Vec<f32>,
    /// The encoded values, if the format is not f32.
    encoded: Vec<u8>,
}

impl PushBuffer {
    /// Takes the gradients of ranges.
    fn fill(&mut self, source: &impl PushSource, pieces: &[ParamRange]) -> Result<()> {
        self.values.clear();
        source.gradients(pieces, &mut self.values)
    }

    fn bytes(&mut self, format: MessageDtype) -> &[u8] {
        codec::encoded(format, &self.values, &mut self.encoded)
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
    fn send(&mut self, request: &ServerRequest, body: &[u8]) {
        self.is_up = self.is_up && self.client.send(request, &[body]).is_ok();
    }

    /// Returns the response to the oldest outstanding request, or none if the connection failed;
    /// then the request must be repeated.
    fn answer(&mut self, limit: usize, into: &mut Vec<u8>) -> Option<Result<ServerResponse>> {
        if self.is_up {
            let answer = self.client.receive(limit, into);
            self.is_up = answer.is_ok();
            return answer.ok();
        }
        None
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
                let answer = match connection.answer(limit, body) {
                    Some(answer) => answer?,
                    None => connection.client.call_with_body(
                        &request(&message, known),
                        &[],
                        limit,
                        body,
                    )?,
                };
                let ServerResponse::Pulled { versions } = answer else { return Ok(false) };
                if let Some(next) = connection.messages.get(turn + PIPELINE_DEPTH).cloned() {
                    connection.send(&request(&next, known), &[]);
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
                    target.set(piece.unit, piece.range.clone(), of_piece.unwrap_or_default())?;
                    known[i] = if of == Values::Live { version(i) } else { None };
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
        self.fill(source, connection, message)?;
        let Self { format, connections, push_buffer, .. } = self;
        connections[connection].send(&head, push_buffer.bytes(*format));
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
        let answer = match self.connections[connection].answer(0, &mut Vec::new()) {
            Some(answer) => answer?,
            // The server applies a repeated message once.
            None => {
                let head = self.push_request(of, connection, message);
                self.fill(source, connection, message)?;
                let Self { format, connections, push_buffer, .. } = self;
                connections[connection].client.call_with_body(
                    &head,
                    &[push_buffer.bytes(*format)],
                    0,
                    &mut Vec::new(),
                )?
            }
        };
        Ok(match answer {
            ServerResponse::Pushed { staleness } => Some(staleness),
            _ => None,
        })
    }

    fn fill(&mut self, source: &impl PushSource, connection: usize, message: usize) -> Result<()> {
        let ServerConnection { server, messages, .. } = &self.connections[connection];
        self.push_buffer.fill(source, &self.pieces[*server][messages[message].clone()])
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
