//! Benchmarks connections between two hosts as parameter servers use them, encrypted and plain.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::address::listen;
use super::rpc_client::RpcClient;
use super::rpc_server::{RpcHandler, RpcServer};
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::{Comm, Credentials, Secret};
use hpctrain_cpu::Cpu;

/// The time in which the peer must answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The minimum duration of a batch of requests.
const BATCH: Duration = Duration::from_millis(100);

/// The direction in which the bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From client to server, as gradients do.
    Push,
    /// From server to client, as parameters do.
    Pull,
}

/// The median round-trip times of requests of one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// The direction of the bytes.
    pub direction: Direction,
    /// The size of the request or of its answer in bytes.
    pub bytes: usize,
    /// The seconds without encryption.
    pub plain: f64,
    /// The seconds with encryption.
    pub encrypted: f64,
}

/// The server: receives and returns bytes.
struct EchoHandler {
    limit: usize,
}

impl RpcHandler for EchoHandler {
    /// The size of the answer in bytes.
    type Request = usize;
    type Answer = ();
    type ConnectionState = ();

    fn max_body_bytes(&self) -> usize {
        self.limit
    }

    fn answer(&self, (): &mut (), size: usize, _: &[u8], into: &mut Vec<u8>) -> Result<()> {
        into.resize(size.min(self.limit), 1);
        Ok(())
    }

    fn disconnected(&self, (): ()) {}
}

/// The addresses of the servers, and the secret of this benchmark.
#[derive(Default, Serialize, Deserialize)]
struct Endpoints {
    host: String,
    secret: Vec<u8>,
    /// The addresses without and with encryption.
    addresses: Vec<String>,
}

/// Times requests of rank 1 to rank 0 for each of `sizes` in bytes. Encrypted and plain requests
/// alternate, and each time is the median of `batches` batches. Collective.
///
/// # Errors
/// Returns an error if the first two ranks are on one host, where nothing is encrypted, or a
/// connection fails.
pub fn rates(
    comm: &Comm<Cpu>,
    interface: Option<&str>,
    sizes: &[usize],
    batches: usize,
) -> Result<Vec<Rate>> {
    let world = comm.world();
    let limit = sizes.iter().copied().max().unwrap_or(0);
    let answering = (comm.rank() == 0).then(|| answer(interface, limit)).transpose();
    let answering = world.all_ok(answering)?;
    let mut own = Endpoints { host: comm.node().host.clone(), ..Endpoints::default() };
    let _listeners = answering.map(|(listeners, ends)| {
        (own.secret, own.addresses) = (ends.secret, ends.addresses);
        listeners
    });
    let own = serde_json::to_vec(&own).map_err(|e| Error::internal(e.to_string()))?;
    let all = world.gather_bytes(own).wait()?;
    let ends = all
        .iter()
        .map(|bytes| serde_json::from_slice(bytes))
        .collect::<Result<Vec<Endpoints>, _>>();
    let ends = ends.map_err(|e| Error::comm(e.to_string()))?;
    if ends[0].host == ends[1].host {
        return Err(Error::input(format!(
            "the first two ranks are both on host {}, where connections are not encrypted",
            ends[0].host
        ))
        .hint("mpirun -np 2 --host node1,node2 hpctrain bench connection"));
    }
    let measured = (comm.rank() == 1).then(|| measure(&ends[0], sizes, batches)).transpose();
    let measured = world.all_ok(measured)?.unwrap_or_default();
    let measured = serde_json::to_vec(&measured).map_err(|e| Error::internal(e.to_string()))?;
    let all = world.gather_bytes(measured).wait()?;
    serde_json::from_slice(&all[1]).map_err(|e| Error::comm(e.to_string()))
}

/// Starts two servers, without and with encryption.
fn answer(interface: Option<&str>, limit: usize) -> Result<(Vec<RpcServer>, Endpoints)> {
    let mut ends = Endpoints { secret: Secret::random()?, ..Endpoints::default() };
    let mut listeners = Vec::new();
    for encrypt in [false, true] {
        let (listener, address) = listen(None, interface)?;
        let credentials = Credentials { secret: Secret::new(ends.secret.clone())?, encrypt };
        listeners.push(RpcServer::open(
            listener,
            credentials,
            Arc::new(EchoHandler { limit }),
            TIMEOUT,
        )?);
        ends.addresses.push(address);
    }
    Ok((listeners, ends))
}

/// Times requests to the servers.
fn measure(ends: &Endpoints, sizes: &[usize], batches: usize) -> Result<Vec<Rate>> {
    let secret = Secret::new(ends.secret.clone())?;
    let mut clients: Vec<RpcClient> = Vec::new();
    for (address, encrypt) in ends.addresses.iter().zip([false, true]) {
        clients.push(RpcClient::new(
            "rank 0",
            address,
            Credentials { secret: secret.clone(), encrypt },
            TIMEOUT,
        ));
    }
    let mut rates = Vec::new();
    for &bytes in sizes {
        for direction in [Direction::Push, Direction::Pull] {
            let mut times = [(); 2].map(|()| Vec::with_capacity(batches));
            for _ in 0..batches {
                for (client, times) in clients.iter_mut().zip(&mut times) {
                    times.push(batch(client, direction, bytes)?);
                }
            }
            let [plain, encrypted] = times.map(|mut times| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2]
            });
            rates.push(Rate { direction, bytes, plain, encrypted });
        }
    }
    Ok(rates)
}

/// Returns the mean round-trip time of a batch of requests, in seconds.
fn batch(client: &mut RpcClient, direction: Direction, bytes: usize) -> Result<f64> {
    let gradient = vec![1; bytes];
    let (body, answer_size): (&[u8], usize) = match direction {
        Direction::Push => (&gradient, 0),
        Direction::Pull => (&[], bytes),
    };
    let mut into = Vec::new();
    // The first request warms up caches and buffers.
    client.call_with_body::<()>(&answer_size, &[body], bytes, &mut into)?;
    let since = Instant::now();
    let mut count = 0;
    while since.elapsed() < BATCH {
        client.call_with_body::<()>(&answer_size, &[body], bytes, &mut into)?;
        count += 1;
    }
    Ok(since.elapsed().as_secs_f64() / f64::from(count))
}
