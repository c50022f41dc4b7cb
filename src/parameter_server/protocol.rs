//! Requests and answers between workers, servers and the coordinator.
//!
//! A message is a head, which is JSON, and a body, which is numbers: both lengths come first and
//! are checked before memory is taken. Floats whose bits count travel as bits.

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

/// Most bytes of a head.
const HEAD_LIMIT: usize = 1 << 24;

/// Bytes of a body that are read at a time.
const CHUNK: usize = 1 << 20;

/// A request to a server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ServerRequest {
    /// Of the coordinator: the ranges to hold from now on, and their first values.
    Assign(Box<Assignment>),
    /// The values of ranges whose version differs from the known one.
    Pull {
        /// The generation of the asking worker.
        generation: u64,
        /// The values.
        of: Values,
        /// The ranges, by their place in the assignment.
        pieces: Range<usize>,
        /// The version of each that the worker has.
        known: Vec<Option<u64>>,
    },
    /// The gradients of ranges, in the body.
    Push {
        /// The generation of the worker.
        generation: u64,
        /// The worker.
        member: u64,
        /// The number of the connection among its own.
        line: usize,
        /// The number of the message on it: one that comes twice counts once.
        number: u64,
        /// The samples whose gradient it is.
        of: Pushed,
        /// The ranges, by their place in the assignment.
        pieces: Range<usize>,
    },
    /// Of the coordinator: the squares of the gradients of this step, of which all virtual ranks have come.
    Squares {
        /// The generation of the coordinator.
        generation: u64,
        /// The step.
        step: u64,
    },
    /// Of the coordinator: the squares that scale the steps of tensors.
    Norms {
        /// The generation of the coordinator.
        generation: u64,
        /// The update to come.
        hyper: Constants,
    },
    /// Of the coordinator: update every range by the gradients of this step, or leave it out.
    Update {
        /// The generation of the coordinator.
        generation: u64,
        /// The step, which may be done already.
        step: u64,
        /// The update; none leaves it out.
        hyper: Option<Constants>,
        /// A factor for each tensor of each unit, as bits, where the rule scales steps by norms.
        trust: Vec<Vec<u32>>,
    },
    /// Of the coordinator: pushes of this ticket are no longer to count.
    Revoke {
        /// The generation of the coordinator.
        generation: u64,
        /// The ticket.
        ticket: u64,
    },
    /// Of the coordinator: copy parameters and state as they are now.
    Cut {
        /// The generation of the coordinator.
        generation: u64,
        /// The number of the cut.
        cut: u64,
    },
    /// Of the coordinator: write the cut into a checkpoint's directory.
    Save {
        /// The generation of the coordinator.
        generation: u64,
        /// The number of the cut.
        cut: u64,
        /// The directory.
        staging: PathBuf,
    },
    /// Of the coordinator that was started again: the steps that the ranges have come to.
    At {
        /// The generation of the coordinator before.
        generation: u64,
    },
    /// Of the coordinator: the work of the server so far.
    Load,
}

/// An answer of a server.
#[derive(Debug, Serialize, Deserialize)]
pub enum ServerResponse {
    /// It is done.
    Done,
    /// The versions of the ranges; the body has the values of those that were not known.
    Pulled {
        /// By range.
        versions: Vec<u64>,
    },
    /// The push was taken, or had been; at most so many updates came between its pull and it.
    Pushed {
        /// The staleness.
        staleness: u64,
    },
    /// The asker belongs to an earlier generation of the run, or this server to none yet.
    Stale,
    /// Parameters and state were copied, after so many updates since the start.
    Copied {
        /// Of the range with most.
        updates: u64,
    },
    /// Squares of the gradient: of each range, bits of one number a virtual shard.
    Squares(Vec<Vec<u64>>),
    /// Squares of tensors: virtual shard, tensor counted over all units, bits of both squares.
    Norms(Vec<(usize, usize, [u64; 2])>),
    /// The first and the last step that a range has come to, where all workers take each step
    /// together.
    At(u64, u64),
    /// The file that was written.
    Saved(Box<ShardFileInfo>),
    /// Totals of the server.
    Load(Load),
}

/// The work of a server so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Ranges held.
    pub ranges: usize,
    /// Bytes of their parameters.
    pub bytes: u64,
    /// Pulls answered, and bytes sent.
    pub pulls: u64,
    /// Bytes of values sent.
    pub pulled: u64,
    /// Pushes taken.
    pub pushes: u64,
    /// Bytes of gradients taken.
    pub pushed: u64,
    /// Pushes refused: late, or of workers that count as gone.
    pub refused: u64,
    /// Microseconds spent in updates.
    pub updating: u64,
}

/// The values that a worker wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Values {
    /// The parameters as they are.
    Live,
    /// The parameters to be evaluated, in a cut.
    Cut(u64),
}

/// The samples whose gradient a push has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pushed {
    /// Virtual ranks of a step that all workers take together.
    VirtualRanks {
        /// The step.
        step: u64,
        /// The virtual ranks.
        virtual_ranks: Range<usize>,
    },
    /// A batch of a worker's own.
    Batch {
        /// The ticket of the worker's lease.
        ticket: u64,
        /// The factor on the gradient, as bits: its clip.
        scale: u32,
        /// The versions of the ranges at which the gradient was computed.
        versions: Vec<u64>,
    },
}

/// The constants of an update, as they travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Constants {
    lr: u32,
    weight_decay: u32,
    step: u64,
    grad_scale: u32,
}

impl From<Hyper> for Constants {
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

impl From<Constants> for Hyper {
    fn from(constants: Constants) -> Self {
        let Constants { lr, weight_decay, step, grad_scale } = constants;
        Self {
            lr: f32::from_bits(lr),
            weight_decay: f32::from_bits(weight_decay),
            step,
            grad_scale: f32::from_bits(grad_scale),
        }
    }
}

/// The ranges of a server.
#[derive(Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// The terms of the run.
    pub terms: RunSpec,
    /// The number of this server.
    pub server: usize,
    /// The checkpoint that they begin with; none begins with the seed's values.
    pub from: Option<PathBuf>,
    /// Whether the optimizer's state of the checkpoint is taken.
    pub with_state: bool,
    /// The part of the checkpoint that parameters are taken from.
    pub part: usize,
}

impl Assignment {
    /// The ranges, if there are some for this server.
    pub fn pieces(&self) -> Option<&[ParamRange]> {
        self.terms.pieces.get(self.server).map(Vec::as_slice)
    }
}

/// A request to the coordinator.
#[derive(Debug, Serialize, Deserialize)]
pub enum CoordinatorRequest {
    /// A server offers itself, at this address.
    Serve {
        /// Host and port.
        address: String,
        /// The generation whose ranges it holds, if it does.
        generation: Option<u64>,
        /// Its program.
        program: Program,
    },
    /// A server lives, and asks whether the run goes on.
    Served,
    /// A worker asks for the terms of the run, to get ready.
    Terms {
        /// Its host.
        host: String,
        /// Its process.
        process: u32,
    },
    /// A worker comes.
    Join {
        /// Its host.
        host: String,
        /// Its process.
        process: u32,
        /// Its program.
        program: Program,
    },
    /// A worker is ready, or has done something, and asks for more.
    Next {
        /// The worker.
        member: u64,
        /// The generation in which it works.
        generation: u64,
        /// The digest of its training data, where it is known: told once, before its first work.
        data: Option<String>,
        /// The work that it has done.
        report: Option<WorkerReport>,
    },
    /// A worker lives.
    Beat {
        /// The worker.
        member: u64,
    },
    /// A worker leaves in good order; nothing that it had is done.
    Leave {
        /// The worker.
        member: u64,
    },
    /// The state of the run, for people.
    Status,
    /// The coordinator's clock, for a trace.
    Clock,
    /// Events of a process by thread, for the trace.
    Events {
        /// The process.
        process: String,
        /// The events, on the coordinator's clock.
        events: Vec<(String, TraceEvent)>,
        /// More of them that found no room.
        lost: u64,
    },
}

/// An answer of the coordinator.
#[derive(Debug, Serialize, Deserialize)]
pub enum CoordinatorResponse {
    /// A server is one of the run.
    Serves,
    /// The run is over for servers.
    Over,
    /// A worker is a member.
    Welcome {
        /// Its number.
        member: u64,
        /// The terms of the run.
        terms: Box<RunSpec>,
    },
    /// The terms of the run.
    Terms(Box<RunSpec>),
    /// Not all servers are there yet: ask again.
    NotYet,
    /// The work to do.
    Work(Work),
    /// Heard.
    Heard,
    /// The state of the run, as JSON.
    Status(Box<serde_json::Value>),
    /// The coordinator's time and host.
    Clock {
        /// Nanoseconds since 1970.
        time: u64,
        /// Its host.
        host: String,
    },
}

/// Work of a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Work {
    /// Gradients of virtual ranks of a step that all workers take together.
    VirtualRanks {
        /// Under this ticket.
        ticket: u64,
        /// The step.
        step: u64,
        /// The virtual ranks.
        virtual_ranks: Range<usize>,
    },
    /// Batches to be trained on one after the other.
    Lease {
        /// Under this ticket.
        ticket: u64,
        /// The batches.
        batches: Range<u64>,
    },
    /// The next batch of the lease.
    GoOn,
    /// Chunks of the validation set.
    Evaluate {
        /// Under this ticket.
        ticket: u64,
        /// With the parameters of this cut.
        cut: u64,
        /// The chunks.
        chunks: Range<u64>,
    },
    /// Nothing at the moment: ask again.
    Wait,
    /// The worker counts as gone, or the run began anew: join again.
    Renew,
    /// The run is over: its exit code.
    End(i32),
}

/// Work that was done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum WorkerReport {
    /// The gradients of virtual ranks were pushed.
    VirtualRanks {
        /// The ticket.
        ticket: u64,
        /// Bits of the virtual ranks' losses.
        losses: Vec<u64>,
        /// The worker's time.
        seconds: WorkerTimes,
    },
    /// The gradient of a batch was pushed, or was not finite.
    Batch {
        /// The ticket.
        ticket: u64,
        /// The batch.
        batch: u64,
        /// Bits of its mean loss and of its gradient's norm.
        loss: u64,
        /// Bits of the gradient's norm.
        norm: u64,
        /// Updates between its pull and its push; none if it was not finite, and so not pushed.
        staleness: Option<u64>,
        /// The worker's time.
        seconds: WorkerTimes,
    },
    /// Chunks were evaluated.
    Chunks {
        /// The ticket.
        ticket: u64,
        /// Bits of the sums of each chunk.
        sums: Vec<Vec<u64>>,
    },
    /// The worker cannot go on: its error ends the run.
    Failed {
        /// The error.
        fault: RemoteError,
    },
}

/// Seconds of a worker on a piece of work, by use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerTimes {
    /// Forwards, backwards, and their sums.
    pub compute: f64,
    /// Waiting for data.
    pub loader: f64,
    /// Taking parameters from the servers.
    pub pull: f64,
    /// Giving gradients to them.
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

/// An error on its way.
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
    /// As an error of the one that was asked.
    pub fn error(self) -> Error {
        let Self { message, hint, kind } = self;
        let error = match kind {
            Kind::Input => Error::input(message),
            Kind::Io => Error::refused(message),
            Kind::Damaged => Error::damaged(message),
            _ => Error::comm(message),
        };
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

/// Numbers as their bits: JSON has neither infinities nor NaN.
pub mod bits {
    use serde::{Deserialize as _, Deserializer, Serializer};

    /// Writes the bits.
    ///
    /// # Errors
    /// As the serializer.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the form that serde calls")]
    pub fn serialize<S: Serializer>(value: &f64, into: S) -> Result<S::Ok, S::Error> {
        into.serialize_u64(value.to_bits())
    }

    /// Reads the bits.
    ///
    /// # Errors
    /// As the deserializer.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        u64::deserialize(from).map(f64::from_bits)
    }
}

/// Writes a message.
///
/// # Errors
/// The connection failed.
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

/// Reads a message, with a body of at most `limit` bytes into `body`. None at the end of the
/// connection.
///
/// # Errors
/// The connection failed, or the message is malformed or too long.
pub fn read<T: DeserializeOwned>(
    stream: &mut impl Read,
    limit: usize,
    body: &mut Vec<u8>,
) -> Result<Option<T>> {
    let lost = |e: std::io::Error| Error::comm(e.to_string());
    let mut lens = [0; 12];
    match stream.read(&mut lens[..1]) {
        Ok(0) => return Ok(None),
        Ok(_) => {}
        Err(e) => return Err(lost(e)),
    }
    stream.read_exact(&mut lens[1..]).map_err(lost)?;
    let head_len = u32::from_le_bytes([0, 1, 2, 3].map(|i| lens[i])) as usize;
    let body_len = u64::from_le_bytes([4, 5, 6, 7, 8, 9, 10, 11].map(|i| lens[i]));
    if head_len > HEAD_LIMIT || body_len > limit as u64 {
        return Err(Error::comm(format!(
            "a message of {head_len} and {body_len} bytes is too long"
        )));
    }
    let mut head = vec![0; head_len];
    stream.read_exact(&mut head).map_err(lost)?;
    body.clear();
    let body_len = body_len as usize;
    // Memory is taken with the bytes that arrive, whatever length is announced.
    body.reserve_exact(body_len);
    while body.len() < body_len {
        let begun = body.len();
        body.resize(body_len.min(begun + CHUNK), 0);
        stream.read_exact(&mut body[begun..]).map_err(lost)?;
    }
    serde_json::from_slice(&head)
        .map(Some)
        .map_err(|e| Error::comm(format!("a malformed message: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were() {
        let mut wire = Vec::new();
        let mut body = Vec::new();
        let report = WorkerReport::Batch {
            ticket: 3,
            batch: 7,
            loss: f64::NAN.to_bits(),
            norm: 1,
            staleness: None,
            seconds: WorkerTimes::default(),
        };
        write(&mut wire, &report, &[b"ab", b"", b"cde"]).unwrap();
        write(&mut wire, &Work::Lease { ticket: u64::MAX, batches: 0..5 }, &[]).unwrap();
        let mut stream = &wire[..];
        assert_eq!(read::<WorkerReport>(&mut stream, 5, &mut body).unwrap(), Some(report));
        assert_eq!(body, b"abcde");
        let lease = read::<Work>(&mut stream, 0, &mut body).unwrap();
        assert_eq!((lease, body.len()), (Some(Work::Lease { ticket: u64::MAX, batches: 0..5 }), 0));
        assert_eq!(read::<Work>(&mut stream, 0, &mut body).unwrap(), None);
        let hyper = Hyper { lr: 0.1, weight_decay: 1e-30, step: 9, grad_scale: f32::MIN_POSITIVE };
        let back = Hyper::from(Constants::from(hyper));
        assert_eq!(
            (back.lr, back.weight_decay, back.step, back.grad_scale),
            (0.1, 1e-30, 9, f32::MIN_POSITIVE)
        );
    }

    #[test]
    fn long_and_malformed_ones_are_refused() {
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
