//! Requests and responses between workers, servers and the coordinator.
//!
//! A message consists of a JSON head and a body of numbers. Both lengths come first and are checked
//! before memory is allocated. Floats that must be exact are sent as their bits.

use std::io::{IoSlice, Read, Write};
use std::ops::{AddAssign, Range};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::partitioner::ParamRange;
use super::program::Program;
use super::run_spec::RunSpec;
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_checkpoint::ShardFileInfo;
use hpctrain_config::telemetry::trace_file::TraceEvent;
use hpctrain_parallel::Hyper;

/// The size limit of a head in bytes.
const HEAD_LIMIT: usize = 1 << 24;

/// The number of bytes of a body that are read at a time.
const CHUNK: usize = 1 << 20;

/// A request to a server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ServerRequest {
    /// Assigns ranges to the server, with their initial values. Sent by the coordinator.
    Assign(Box<Assignment>),
    /// Requests the values of ranges whose version differs from the known one.
    Pull {
        /// The generation of the requesting worker.
        generation: u64,
        /// Which values.
        of: Values,
        /// The ranges, by index in the assignment.
        pieces: Range<usize>,
        /// The version of each range that the worker has.
        known: Vec<Option<u64>>,
    },
    /// Pushes the gradients of ranges, which are in the body.
    Push {
        /// The generation of the worker.
        generation: u64,
        /// The worker.
        member: u64,
        /// The index of the worker's connection to this server.
        line: usize,
        /// The number of the message on that connection, by which repeated messages are recognized.
        number: u64,
        /// The samples whose gradient it is.
        of: Pushed,
        /// The ranges, by index in the assignment.
        pieces: Range<usize>,
    },
    /// Requests rows of embedding tables, whose ids are in the body, ascending.
    PullRows {
        /// The generation of the requesting worker.
        generation: u64,
        /// Which values.
        of: Values,
    },
    /// Pushes the gradients of rows of embedding tables. The body has the ids, ascending, then the
    /// rows.
    PushRows {
        /// The generation of the worker.
        generation: u64,
        /// The worker.
        member: u64,
        /// The number of the message of this worker to this server, by which repeated messages are
        /// recognized.
        number: u64,
        /// The samples whose gradient it is.
        of: Pushed,
        /// The number of rows.
        rows: usize,
    },
    /// Replaces the values of ranges, which are in the body, and clears their optimizer state. Sent
    /// by the coordinator of custom functions.
    Set {
        /// The generation of the coordinator.
        generation: u64,
        /// The ranges, by index in the assignment.
        pieces: Range<usize>,
    },
    /// Requests the squared norms of the gradients of a step. Sent by the coordinator after all
    /// virtual ranks were pushed.
    Squares {
        /// The generation of the coordinator.
        generation: u64,
        /// The step.
        step: u64,
    },
    /// Requests the squared norms for trust ratios. Sent by the coordinator.
    Norms {
        /// The generation of the coordinator.
        generation: u64,
        /// The constants of the next update.
        hyper: HyperBits,
    },
    /// Updates every range with the gradients of a step, or skips the update. Sent by the
    /// coordinator.
    Update {
        /// The generation of the coordinator.
        generation: u64,
        /// The step; if it has already ended, the request does nothing.
        step: u64,
        /// The constants of the update; none skips it.
        hyper: Option<HyperBits>,
        /// The trust ratio of each tensor of each unit, as bits, for optimizers that use them.
        trust: Vec<Vec<u32>>,
    },
    /// Ignores later pushes of a ticket. Sent by the coordinator.
    Revoke {
        /// The generation of the coordinator.
        generation: u64,
        /// The ticket.
        ticket: u64,
    },
    /// Takes a snapshot of parameters and optimizer state. Sent by the coordinator.
    Cut {
        /// The generation of the coordinator.
        generation: u64,
        /// The number of the snapshot.
        cut: u64,
    },
    /// Writes a snapshot into the directory of a checkpoint. Sent by the coordinator.
    Save {
        /// The generation of the coordinator.
        generation: u64,
        /// The number of the snapshot.
        cut: u64,
        /// The directory.
        staging: PathBuf,
    },
    /// Requests the steps that the ranges have reached. Sent by the coordinator, for instance after
    /// a restart.
    At {
        /// The generation of the ranges.
        generation: u64,
    },
    /// Requests the work of the server so far. Sent by the coordinator.
    Load,
}

/// A response of a server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ServerResponse {
    /// The request was executed.
    Done,
    /// The versions of the ranges; the body has the values of those whose version was not known.
    Pulled {
        /// The version of each range.
        versions: Vec<u64>,
    },
    /// The push was applied, by this message or an earlier one.
    Pushed {
        /// The largest staleness of a range: the number of updates between pull and push.
        staleness: u64,
    },
    /// The request belongs to an earlier generation of the run, or this server has no ranges yet.
    Stale,
    /// A snapshot was taken.
    Copied {
        /// The largest number of updates of a range since the start.
        updates: u64,
    },
    /// The squared norms of the gradient: for each range, the bits of one number per virtual shard,
    /// or of the numbers of a [`SquareSum`](hpctrain_parallel::SquareSum) for rows of tables.
    Squares(Vec<Vec<u64>>),
    /// The squared norms of tensors: the virtual shard, the index of the tensor over all units, and
    /// the bits of both squares.
    Norms(Vec<(usize, usize, [u64; 2])>),
    /// The smallest and the largest step that a range has reached, with synchronous training.
    At(u64, u64),
    /// The file that was written.
    Saved(Box<ShardFileInfo>),
    /// The work of the server so far.
    Load(ServerLoad),
}

/// The work of a server so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerLoad {
    /// The number of ranges.
    pub ranges: usize,
    /// The size of their parameters in bytes.
    pub bytes: u64,
    /// The number of pulls.
    pub pulls: u64,
    /// The number of bytes of values sent.
    pub pulled: u64,
    /// The number of pushes applied.
    pub pushes: u64,
    /// The number of bytes of gradients received.
    pub pushed: u64,
    /// The number of pushes refused, because their ticket was revoked.
    pub refused: u64,
    /// The time spent in updates in microseconds.
    pub updating: u64,
}

/// The values that a worker pulls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Values {
    /// The current parameters.
    Live,
    /// The parameters for evaluation in a snapshot.
    Cut(u64),
}

/// The samples whose gradient is pushed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pushed {
    /// Virtual ranks of a synchronous step.
    VirtualRanks {
        /// The step.
        step: u64,
        /// The virtual ranks.
        virtual_ranks: Range<usize>,
    },
    /// The batch of one worker, in asynchronous training.
    Batch {
        /// The ticket of the worker's lease.
        ticket: u64,
        /// The clipping factor of the gradient, as bits.
        scale: u32,
        /// The versions of the ranges at which the gradient was computed.
        versions: Vec<u64>,
    },
}

/// The constants of an update, with floats as bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HyperBits {
    lr: u32,
    weight_decay: u32,
    step: u64,
    grad_scale: u32,
}

impl From<Hyper> for HyperBits {
    fn from(hyper: Hyper) -> Self {
        let Hyper { lr, weight_decay, step, grad_scale } = hyper;
        Self {
            lr: lr.to_bits(),
            weight_decay: weight_decay.to_bits(),
            step,
            grad_scale: grad_scale.to_bits(),
        }
    }
}

impl From<HyperBits> for Hyper {
    fn from(constants: HyperBits) -> Self {
        let HyperBits { lr, weight_decay, step, grad_scale } = constants;
        Self {
            lr: f32::from_bits(lr),
            weight_decay: f32::from_bits(weight_decay),
            step,
            grad_scale: f32::from_bits(grad_scale),
        }
    }
}

/// The ranges assigned to a server.
#[derive(Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// The specification of the run.
    pub terms: RunSpec,
    /// The index of the server.
    pub server: usize,
    /// The checkpoint to load; without one, values are initialized from the seed.
    pub from: Option<PathBuf>,
    /// Whether to load the optimizer state of the checkpoint.
    pub with_state: bool,
    /// The part of the checkpoint that parameters are loaded from.
    pub part: usize,
}

impl Assignment {
    /// Returns the ranges of this server, if there are any.
    pub fn pieces(&self) -> Option<&[ParamRange]> {
        self.terms.pieces.get(self.server).map(Vec::as_slice)
    }
}

/// A request to the coordinator.
#[derive(Debug, Serialize, Deserialize)]
pub enum CoordinatorRequest {
    /// Registers a server.
    Serve {
        /// The host and port of the server.
        address: String,
        /// The generation whose ranges it holds, if any.
        generation: Option<u64>,
        /// The program of the server.
        program: Program,
    },
    /// A heartbeat of a server, which asks whether the run continues.
    Served,
    /// Requests the specification of the run, before a worker joins.
    Terms {
        /// The host of the worker.
        host: String,
        /// The process id of the worker.
        process: u32,
    },
    /// Joins a worker.
    Join {
        /// The host of the worker.
        host: String,
        /// The process id of the worker.
        process: u32,
        /// The program of the worker.
        program: Program,
    },
    /// Reports the work that a worker has done, if any, and requests more.
    Next {
        /// The worker.
        member: u64,
        /// The generation in which it works.
        generation: u64,
        /// The digest of its training data, if it is known; sent once, before the first work.
        data: Option<String>,
        /// The work that it has done since the last request.
        report: Option<WorkerReport>,
    },
    /// A heartbeat of a worker.
    Beat {
        /// The worker.
        member: u64,
    },
    /// Leaves the run gracefully; the unfinished work of the worker is reassigned.
    Leave {
        /// The worker.
        member: u64,
    },
    /// Requests the status of the run.
    Status,
    /// Requests the coordinator's time, for a trace.
    Clock,
    /// Sends events of a process by thread, for the trace.
    Events {
        /// The process.
        process: String,
        /// The events, on the coordinator's clock.
        events: Vec<(String, TraceEvent)>,
        /// The number of events that were dropped.
        lost: u64,
    },
}

/// A response of the coordinator.
#[derive(Debug, Serialize, Deserialize)]
pub enum CoordinatorResponse {
    /// The server is registered.
    Serves,
    /// The run is over; sent to servers.
    Over,
    /// The worker has joined.
    Welcome {
        /// The number of the worker.
        member: u64,
        /// The specification of the run.
        terms: Box<RunSpec>,
    },
    /// The specification of the run.
    Terms(Box<RunSpec>),
    /// The run has not started yet: ask again.
    NotYet,
    /// The work to do.
    Work(Work),
    /// The request was received.
    Heard,
    /// The status of the run, as JSON.
    Status(Box<serde_json::Value>),
    /// The coordinator's time and host.
    Clock {
        /// The time in nanoseconds since 1970.
        time: u64,
        /// The host of the coordinator.
        host: String,
    },
}

/// Work assigned to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Work {
    /// Compute the gradients of virtual ranks of a synchronous step.
    VirtualRanks {
        /// The ticket.
        ticket: u64,
        /// The step.
        step: u64,
        /// The virtual ranks.
        virtual_ranks: Range<usize>,
    },
    /// Train on these batches, one after the other.
    Lease {
        /// The ticket.
        ticket: u64,
        /// The batches.
        batches: Range<u64>,
    },
    /// Continue with the next batch of the lease.
    ContinueLease,
    /// Evaluate chunks of the validation set.
    Evaluate {
        /// The ticket.
        ticket: u64,
        /// The snapshot whose parameters are evaluated.
        cut: u64,
        /// The chunks.
        chunks: Range<u64>,
    },
    /// No work is available at the moment: ask again.
    Wait,
    /// The worker was considered lost, or the run restarted: join again.
    Renew,
    /// The run is over, with this exit code.
    End(i32),
}

/// The result of work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum WorkerReport {
    /// The gradients of virtual ranks were pushed.
    VirtualRanks {
        /// The ticket.
        ticket: u64,
        /// The bits of the virtual ranks' losses.
        losses: Vec<u64>,
        /// The times of the worker.
        seconds: WorkerTimes,
    },
    /// The gradient of a batch was pushed, or was not finite.
    Batch {
        /// The ticket.
        ticket: u64,
        /// The batch.
        batch: u64,
        /// The bits of the mean loss.
        loss: u64,
        /// The bits of the gradient norm.
        norm: u64,
        /// The staleness; none if the gradient was not finite and therefore not pushed.
        staleness: Option<u64>,
        /// The times of the worker.
        seconds: WorkerTimes,
    },
    /// Chunks were evaluated.
    Chunks {
        /// The ticket.
        ticket: u64,
        /// The bits of the sums of each chunk.
        sums: Vec<Vec<u64>>,
    },
    /// The worker failed, which ends the run.
    Failed {
        /// The error.
        fault: RemoteError,
    },
}

/// The time that a worker spent on a piece of work, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerTimes {
    /// Forward and backward passes.
    pub compute: f64,
    /// Waiting for data.
    pub loader: f64,
    /// Pulling parameters.
    pub pull: f64,
    /// Pushing gradients.
    pub push: f64,
}

impl AddAssign for WorkerTimes {
    fn add_assign(&mut self, other: Self) {
        self.compute += other.compute;
        self.loader += other.loader;
        self.pull += other.pull;
        self.push += other.push;
    }
}

/// An error in serializable form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteError {
    message: String,
    hint: Option<String>,
    kind: Kind,
}

impl From<&Error> for RemoteError {
    fn from(error: &Error) -> Self {
        Self {
            message: error.message().into(),
            hint: error.advice().map(Into::into),
            kind: error.kind(),
        }
    }
}

impl RemoteError {
    /// Converts this back to an error.
    pub fn error(self) -> Error {
        let Self { message, hint, kind } = self;
        let error = match kind {
            Kind::Input => Error::input(message),
            Kind::Io => Error::refused(message),
            Kind::Damaged => Error::damaged(message),
            Kind::Numeric => Error::numeric(message),
            Kind::Cancelled => Error::cancelled(message),
            _ => Error::comm(message),
        };
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

/// Serializes floats as their bits, because JSON has neither infinities nor NaN.
pub mod bits {
    use serde::{Deserialize as _, Deserializer, Serializer};

    /// Serializes the bits of a float.
    ///
    /// # Errors
    /// Returns an error if the serializer fails.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the form that serde calls")]
    pub fn serialize<S: Serializer>(value: &f64, into: S) -> Result<S::Ok, S::Error> {
        into.serialize_u64(value.to_bits())
    }

    /// Deserializes a float from its bits.
    ///
    /// # Errors
    /// Returns an error if the deserializer fails.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        u64::deserialize(from).map(f64::from_bits)
    }
}

/// Writes a message.
///
/// # Errors
/// Returns an error if the connection fails.
pub fn write(stream: &mut impl Write, head: &impl Serialize, body: &[&[u8]]) -> Result<()> {
    let head = serde_json::to_vec(head).map_err(|e| Error::internal(format!("a message: {e}")))?;
    let len: usize = body.iter().map(|part| part.len()).sum();
    let mut start = Vec::with_capacity(12 + head.len());
    start.extend((head.len() as u32).to_le_bytes());
    start.extend((len as u64).to_le_bytes());
    start.extend(&head);
    let parts = std::iter::once(&start[..]).chain(body.iter().copied());
    let mut slices: Vec<IoSlice<'_>> =
        parts.filter(|part| !part.is_empty()).map(IoSlice::new).collect();
    let mut left = &mut slices[..];
    while !left.is_empty() {
        match stream.write_vectored(left) {
            Ok(0) => return Err(Error::comm("the connection ended")),
            Ok(sent) => IoSlice::advance_slices(&mut left, sent),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::comm(e.to_string())),
        }
    }
    stream.flush().map_err(|e| Error::comm(e.to_string()))
}

/// Reads a message whose body, of at most `limit` bytes, `take_body` reads whole; it gets the head
/// and the length. Returns none at the end of the connection.
///
/// # Errors
/// Returns an error if the connection fails, the message is malformed or too long, or the error of
/// `take_body`.
pub fn read_with<S: Read, T: DeserializeOwned>(
    stream: &mut S,
    limit: usize,
    take_body: impl FnOnce(&T, usize, &mut S) -> Result<()>,
) -> Result<Option<T>> {
    let mut lens = [0; 12];
    let first = stream.read(&mut lens).map_err(lost)?;
    if first == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut lens[first..]).map_err(lost)?;
    let head_len = u32::from_le_bytes([0, 1, 2, 3].map(|i| lens[i])) as usize;
    let body_len = u64::from_le_bytes([4, 5, 6, 7, 8, 9, 10, 11].map(|i| lens[i]));
    if head_len > HEAD_LIMIT || body_len > limit as u64 {
        return Err(Error::comm(format!(
            "a message with a head of {head_len} bytes and a body of {body_len} is too long"
        )));
    }
    let mut head = vec![0; head_len];
    stream.read_exact(&mut head).map_err(lost)?;
    let head = serde_json::from_slice(&head)
        .map_err(|e| Error::comm(format!("a malformed message: {e}")))?;
    take_body(&head, body_len as usize, stream)?;
    Ok(Some(head))
}

/// Reads a body of `len` bytes into `body`.
///
/// # Errors
/// Returns an error if the connection fails.
pub fn read_body(len: usize, stream: &mut (impl Read + ?Sized), body: &mut Vec<u8>) -> Result<()> {
    // Bytes of an earlier body are overwritten, which saves zeros.
    body.truncate(len);
    stream.read_exact(body).map_err(lost)?;
    // Pages are touched only as bytes arrive, whatever length is announced.
    body.reserve_exact(len - body.len());
    while body.len() < len {
        let read = body.len();
        body.resize(len.min(read + CHUNK), 0);
        stream.read_exact(&mut body[read..]).map_err(lost)?;
    }
    Ok(())
}

/// Returns the error of a connection that fails.
pub fn lost(e: std::io::Error) -> Error {
    Error::comm(e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: DeserializeOwned>(
        stream: &mut impl Read,
        limit: usize,
        body: &mut Vec<u8>,
    ) -> Result<Option<T>> {
        read_with(stream, limit, |_, len, stream| read_body(len, stream, body))
    }

    #[test]
    fn messages_are_read_as_written() {
        let mut bytes = Vec::new();
        let mut body = Vec::new();
        let report = WorkerReport::Batch {
            ticket: 3,
            batch: 7,
            loss: f64::NAN.to_bits(),
            norm: 1,
            staleness: None,
            seconds: WorkerTimes::default(),
        };
        write(&mut bytes, &report, &[b"ab", b"", b"cde"]).unwrap();
        write(&mut bytes, &Work::Lease { ticket: u64::MAX, batches: 0..5 }, &[]).unwrap();
        let mut stream = &bytes[..];
        assert_eq!(read::<WorkerReport>(&mut stream, 5, &mut body).unwrap(), Some(report));
        assert_eq!(body, b"abcde");
        let lease = read::<Work>(&mut stream, 0, &mut body).unwrap();
        assert_eq!((lease, body.len()), (Some(Work::Lease { ticket: u64::MAX, batches: 0..5 }), 0));
        assert_eq!(read::<Work>(&mut stream, 0, &mut body).unwrap(), None);
        let hyper = Hyper { lr: 0.1, weight_decay: 1e-30, step: 9, grad_scale: f32::MIN_POSITIVE };
        let back = Hyper::from(HyperBits::from(hyper));
        assert_eq!(
            (back.lr, back.weight_decay, back.step, back.grad_scale),
            (0.1, 1e-30, 9, f32::MIN_POSITIVE)
        );
    }

    #[test]
    fn long_and_malformed_messages_are_refused() {
        let refused = |bytes: &[u8]| {
            read::<Work>(&mut &bytes[..], 4, &mut Vec::new()).unwrap_err().to_string()
        };
        let lens = |head: u32, body: u64| [&head.to_le_bytes()[..], &body.to_le_bytes()].concat();
        assert!(refused(&lens(2, 5)).contains("is too long"));
        assert!(refused(&lens(2, 1 << 63)).contains("is too long"));
        assert!(refused(&lens(u32::MAX, 0)).contains("is too long"));
        assert!(refused(&[&lens(2, 0)[..], b"{}"].concat()).contains("a malformed message"));
        assert!(!refused(&[&lens(9, 0)[..], b"{}"].concat()).is_empty());
    }
}
