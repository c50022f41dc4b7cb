//! Rows of embedding tables on servers: a worker pulls and pushes only those whose ids its batch
//! contains.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::codec;
use super::protocol::{Pushed, ServerRequest, ServerResponse, Values};
use super::rpc_client::RpcClient;
use super::run_spec::RunSpec;
use hpctrain_base::error::{Error, Result};
use hpctrain_config::MessageDtype;
use hpctrain_parallel::{RowSource, SparseRows};

/// A worker's connections to the servers for rows of tables.
pub struct RowClient {
    generation: u64,
    member: u64,
    format: MessageDtype,
    /// Elements of a row.
    width: usize,
    servers: Vec<ServerOfRows>,
    /// Which values are pulled.
    of: Values,
    body: Vec<u8>,
}

/// A connection to a server that has rows.
struct ServerOfRows {
    client: RpcClient,
    /// The ids of the rows of each of its ranges.
    ranges: Vec<Range<usize>>,
    /// The versions of the ranges at the first pull since [`RowClient::begin`].
    versions: Option<Vec<u64>>,
    /// The number of push messages so far.
    pushes: u64,
}

impl ServerOfRows {
    /// Returns the places of the rows that the server has among ascending ids.
    fn places(&self, ids: &SparseRows) -> Vec<Range<usize>> {
        let places = self.ranges.iter().map(|range| ids.within(range));
        places.filter(|places| !places.is_empty()).collect()
    }

    /// Sends a request, unless the connection has failed, and returns whether it was sent.
    fn send(&mut self, request: &ServerRequest, body: &[&[u8]]) -> bool {
        self.client.send(request, body).is_ok()
    }

    /// Returns the response to a request, which is repeated if the connection has failed.
    fn receive(
        &mut self,
        was_sent: bool,
        (request, body): (&ServerRequest, &[&[u8]]),
        limit: usize,
        into: &mut Vec<u8>,
    ) -> Result<ServerResponse> {
        if was_sent && let Ok(answer) = self.client.receive(limit, into) {
            return answer;
        }
        self.client.call_with_body(request, body, limit, into)
    }
}

impl RowClient {
    /// Creates the connections of a worker, which `client` makes for an address; none if no server
    /// has rows. Each connects at its first request.
    pub fn new(terms: &RunSpec, member: u64, client: impl Fn(&str) -> RpcClient) -> Option<Self> {
        let width = terms.row_width?;
        let servers = terms.addresses.iter().zip(&terms.pieces).enumerate();
        let servers = servers.filter_map(|(server, (address, pieces))| {
            let ranges: Vec<_> = pieces[..terms.table_ranges(server)]
                .iter()
                .map(|piece| piece.range.start / width..piece.range.end / width)
                .collect();
            (!ranges.is_empty()).then(|| ServerOfRows {
                client: client(address),
                ranges,
                versions: None,
                pushes: 0,
            })
        });
        Some(Self {
            generation: terms.generation,
            member,
            format: terms.config.parameter_server.message_dtype,
            width,
            servers: servers.collect(),
            of: Values::Live,
            body: vec![],
        })
    }

    /// Begins other work, for which these values are pulled.
    pub fn begin(&mut self, of: Values) {
        self.of = of;
        self.servers.iter_mut().for_each(|server| server.versions = None);
    }

    /// Pulls the rows of ascending ids, all servers at the same time.
    ///
    /// # Errors
    /// Returns an error if a server cannot be reached, or the generation is over.
    fn pull(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let Self { generation, format, width, servers, of, body, .. } = self;
        let request = ServerRequest::PullRows { generation: *generation, of: *of };
        let ids = SparseRows { ids: ids.to_vec(), values: vec![] };
        let mut asked = Vec::with_capacity(servers.len());
        for server in &mut *servers {
            let places = server.places(&ids);
            let of_server: Vec<u32> =
                places.iter().flat_map(|places| &ids.ids[places.clone()]).copied().collect();
            let is_sent =
                places.is_empty() || server.send(&request, &[bytemuck::cast_slice(&of_server)]);
            asked.push((places, of_server, is_sent));
        }
        let mut rows = vec![0.0; ids.ids.len() * *width];
        for (server, (places, of_server, is_sent)) in servers.iter_mut().zip(asked) {
            if places.is_empty() {
                continue;
            }
            let elements = of_server.len() * *width;
            let limit = elements * size_of::<f32>();
            let repeated = (&request, &[bytemuck::cast_slice(&of_server)][..]);
            let answer = server.receive(is_sent, repeated, limit, body)?;
            let ServerResponse::Pulled { versions } = answer else { return Err(is_over()) };
            server.versions.get_or_insert(versions);
            let values = codec::decode(*format, body, elements)?;
            let mut rest = &values[..];
            for places in places {
                let of_places;
                (of_places, rest) = rest.split_at(places.len() * *width);
                rows[places.start * *width..places.end * *width].copy_from_slice(of_places);
            }
        }
        Ok(rows)
    }

    /// Sends the gradients of rows to the servers that have them, and a push to each that has any,
    /// so that all count as many updates. `of` describes the samples, given the versions of a
    /// server's ranges. [`RowClient::receive_push`] must be called before the next request.
    pub fn send_push(
        &mut self,
        gradient: &SparseRows,
        of: impl Fn(Vec<u64>) -> Pushed,
    ) -> Vec<SentRows> {
        let Self { generation, member, format, width, servers, .. } = self;
        let send = |server: &mut ServerOfRows| {
            let places = server.places(gradient);
            let ids: Vec<u32> =
                places.iter().flat_map(|places| &gradient.ids[places.clone()]).copied().collect();
            let mut values = vec![];
            for places in places {
                let rows = &gradient.values[places.start * *width..places.end * *width];
                codec::encode(*format, rows, &mut values);
            }
            // Without a row in the batch, the ranges were not pulled.
            let versions = server.versions.clone();
            let request = ServerRequest::PushRows {
                generation: *generation,
                member: *member,
                number: server.pushes + 1,
                of: of(versions.unwrap_or_else(|| vec![u64::MAX; server.ranges.len()])),
                rows: ids.len(),
            };
            let mut sent = SentRows { request, ids, values, was_sent: false };
            sent.was_sent = server.send(&sent.request, &sent.body());
            sent
        };
        servers.iter_mut().map(send).collect()
    }

    /// Waits until the servers have applied rows that were sent. Returns the largest staleness, or
    /// none if the generation is over.
    ///
    /// # Errors
    /// Returns an error if a server cannot be reached.
    pub fn receive_push(&mut self, sent: &[SentRows]) -> Result<Option<u64>> {
        let mut most = 0;
        for (server, sent) in self.servers.iter_mut().zip(sent) {
            let repeated = (&sent.request, &sent.body()[..]);
            match server.receive(sent.was_sent, repeated, 0, &mut vec![])? {
                ServerResponse::Pushed { staleness } => most = most.max(staleness),
                _ => return Ok(None),
            }
            server.pushes += 1;
        }
        Ok(Some(most))
    }
}

/// Rows that were sent to a server.
pub struct SentRows {
    request: ServerRequest,
    ids: Vec<u32>,
    /// The encoded rows.
    values: Vec<u8>,
    /// Whether the connection had not failed.
    was_sent: bool,
}

impl SentRows {
    fn body(&self) -> [&[u8]; 2] {
        [bytemuck::cast_slice(&self.ids), &self.values]
    }
}

/// Returns the error of a worker whose generation is over; it joins again.
fn is_over() -> Error {
    Error::comm("the servers have started another generation")
}

/// A handle to the connections, for the tables of a worker's model and the worker.
#[derive(Clone)]
pub struct SharedRowClient(Arc<Mutex<RowClient>>);

impl SharedRowClient {
    /// Shares the connections.
    pub fn new(client: RowClient) -> Self {
        Self(Arc::new(Mutex::new(client)))
    }

    /// Returns the connections, which no other thread uses at the same time.
    pub fn client(&self) -> MutexGuard<'_, RowClient> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RowSource for SharedRowClient {
    fn rows(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        self.client().pull(ids)
    }
}
