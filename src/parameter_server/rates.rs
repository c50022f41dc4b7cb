//! The rate of connections between two hosts, as runs on servers use them: encrypted and not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::address::listen;
use super::rpc_client::RpcClient;
use super::rpc_server::{RpcHandler, RpcServer};
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::{Comm, Credentials, Secret};
use hpctrain_cpu::Cpu;

/// Time that the other end has for an answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Time that a batch of requests takes, at least.
const BATCH: Duration = Duration::from_millis(100);

/// The direction of a request's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the asking end, as gradients go.
    Push,
    /// To the asking end, as parameters come.
    Pull,
}

/// The seconds of a request with its answer: medians.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// The direction of the bytes.
    pub direction: Direction,
    /// The bytes of a request, or of its answer.
    pub bytes: usize,
    /// Seconds without encryption.
    pub plain: f64,
    /// Seconds with encryption.
    pub encrypted: f64,
}

/// The answering end: takes and gives bytes.
struct Bytes {
    limit: usize,
}

impl RpcHandler for Bytes {
    /// The bytes of the answer.
    type Request = usize;
    type Answer = ();
    type Visit = ();

    fn limit(&self) -> usize {
        self.limit
    }

    fn answer(&self, (): &mut (), wanted: usize, body: &mut Vec<u8>) -> Result<()> {
        body.resize(wanted.min(self.limit), 1);
        Ok(())
    }

    fn left(&self, (): ()) {}
}

/// The addresses of the answering end, and the secret of this measurement.
#[derive(Default, Serialize, Deserialize)]
struct Ends {
    host: String,
    secret: Vec<u8>,
    /// Without encryption, and with it.
    addresses: Vec<String>,
}

/// Times requests of rank 1 to rank 0, of each of `sizes` bytes: collective. Encrypted and plain
/// ones take turns; each time is the median of as many batches.
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
    let mut own = Ends { host: comm.node().host.clone(), ..Ends::default() };
    let _listeners = answering.map(|(listeners, ends)| {
        (own.secret, own.addresses) = (ends.secret, ends.addresses);
        listeners
    });
    let own = serde_json::to_vec(&own).map_err(|e| Error::internal(e.to_string()))?;
    let all = world.gather_bytes(own).wait()?;
    let ends =
        all.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<Vec<Ends>, _>>();
    let ends = ends.map_err(|e| Error::comm(e.to_string()))?;
    if ends[0].host == ends[1].host {
        return Err(Error::input(format!(
            "the first two ranks are on one host, {}: nothing is encrypted there",
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

/// Listens twice: without encryption, and with it.
fn answer(interface: Option<&str>, limit: usize) -> Result<(Vec<RpcServer>, Ends)> {
    let mut ends = Ends { secret: Secret::random()?, ..Ends::default() };
    let mut listeners = Vec::new();
    for encrypt in [false, true] {
        let (listener, address) = listen(None, interface)?;
        let credentials = Credentials { secret: Secret::new(ends.secret.clone())?, encrypt };
        listeners.push(RpcServer::open(listener, credentials, Arc::new(Bytes { limit }), TIMEOUT)?);
        ends.addresses.push(address);
    }
    Ok((listeners, ends))
}

/// Times requests to the answering end.
fn measure(ends: &Ends, sizes: &[usize], batches: usize) -> Result<Vec<Rate>> {
    let secret = Secret::new(ends.secret.clone())?;
    let mut lines: Vec<RpcClient> = Vec::new();
    for (address, encrypt) in ends.addresses.iter().zip([false, true]) {
        lines.push(RpcClient::new(
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
                for (line, times) in lines.iter_mut().zip(&mut times) {
                    times.push(batch(line, direction, bytes)?);
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

/// The seconds of a request with its answer: the mean of some.
fn batch(line: &mut RpcClient, direction: Direction, bytes: usize) -> Result<f64> {
    let gradient = vec![1; bytes];
    let (body, wanted): (&[u8], usize) = match direction {
        Direction::Push => (&gradient, 0),
        Direction::Pull => (&[], bytes),
    };
    let mut into = Vec::new();
    // The first one fills caches and buffers.
    line.ask::<()>(&wanted, &[body], bytes, &mut into)?;
    let since = Instant::now();
    let mut count = 0;
    while since.elapsed() < BATCH {
        line.ask::<()>(&wanted, &[body], bytes, &mut into)?;
        count += 1;
    }
    Ok(since.elapsed().as_secs_f64() / f64::from(count))
}
