//! Messages between the processes of an elastic job: a request and its answer, as JSON after their
//! length.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Member, Membership};
use crate::transport::tcp::{Connection, Credentials, PeerId, call};
use hpctrain_base::error::{Error, Result};

/// The channel of control connections, by which they differ from those of ranks.
const CONTROL: u32 = 2;

/// The most bytes of a message: a membership of 100,000 ranks has fewer.
const MOST: usize = 64 << 20;

/// A request to another process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Request {
    /// Asks whether the process runs.
    Ping,
    /// Says that the members with these ids are gone, and why, and that the ranks of this
    /// membership are to report.
    Lost {
        /// The number of the membership.
        membership: u64,
        /// The lost members: the id, and how it was lost.
        lost: Vec<(String, String)>,
    },
    /// Reports to the coordinator, which answers once all have.
    MemberReport(MemberReport),
    /// Asks rank 0 to become a member. It answers when that is so.
    Join(Member),
}

/// A rank's report after a loss, or for a planned change.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemberReport {
    /// The number of the membership that the rank is of.
    pub membership: u64,
    /// The rank, with the address at which it listens for the next one.
    pub member: Member,
    /// The members that it knows to be lost: the id, and how it was lost.
    pub lost: Vec<(String, String)>,
}

/// An answer to a request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// The process runs.
    Runs {
        /// The number of its membership.
        membership: u64,
        /// Whether it collects reports.
        coordinates: bool,
    },
    /// The next membership.
    Membership(Membership),
    /// The process is not a member of the newest membership, which has this number.
    Expelled(u64),
    /// This process does not answer that: ask again later, or another one.
    AskAgain,
    /// The job ends with this message and exit code.
    End {
        /// The message.
        message: String,
        /// The exit code.
        interrupted: bool,
    },
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoAnswer {
    /// The process has ended: its host refuses connections, or it has closed one.
    Gone(String),
    /// Nothing was received in time, or the host cannot be reached.
    Silent(String),
}

impl NoAnswer {
    fn from_io(e: &std::io::Error) -> Self {
        let is_gone = matches!(
            e.kind(),
            ErrorKind::ConnectionRefused
                | ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::BrokenPipe
                | ErrorKind::UnexpectedEof
        );
        if is_gone {
            Self::Gone("its process has ended".into())
        } else {
            Self::Silent(e.to_string())
        }
    }
}

/// Connects to a process at its control address.
pub fn connect(
    to: &Member,
    credentials: &Credentials,
    timeout: Duration,
) -> Result<Connection, NoAnswer> {
    let until = Instant::now() + timeout;
    let stream =
        TcpStream::connect_timeout(&to.control, timeout).map_err(|e| NoAnswer::from_io(&e))?;
    let caller = PeerId { rank: 0, ranks: 0, channel: CONTROL };
    // A process that ends during the handshake refuses the next connection.
    call(stream, credentials, caller, until).map_err(|e| NoAnswer::Silent(e.message().into()))
}

/// Sends a request on a connection and returns the answer, which must come within `timeout`.
pub fn ask(
    connection: &mut Connection,
    request: &Request,
    timeout: Duration,
) -> Result<Answer, NoAnswer> {
    let set = connection.stream().set_read_timeout(Some(timeout));
    set.map_err(|e| NoAnswer::from_io(&e))?;
    send(connection, request).map_err(|e| NoAnswer::from_io(&e))?;
    receive(connection).map_err(|e| NoAnswer::from_io(&e))
}

/// Sends a message.
pub fn send(connection: &mut Connection, message: &impl Serialize) -> std::io::Result<()> {
    let text = serde_json::to_vec(message).map_err(std::io::Error::other)?;
    connection.write_all(&(text.len() as u64).to_le_bytes())?;
    connection.write_all(&text)?;
    connection.flush()
}

/// Receives a message.
pub fn receive<T: DeserializeOwned>(connection: &mut Connection) -> std::io::Result<T> {
    let mut len = [0; 8];
    connection.read_exact(&mut len)?;
    let len = usize::try_from(u64::from_le_bytes(len)).unwrap_or(usize::MAX);
    if len > MOST {
        return Err(std::io::Error::other(format!("a message of {len} bytes")));
    }
    let mut text = vec![0; len];
    connection.read_exact(&mut text)?;
    serde_json::from_slice(&text).map_err(std::io::Error::other)
}

/// Returns the error of an end of the job.
pub fn ended(message: String, interrupted: bool) -> Error {
    if interrupted { Error::interrupted(message) } else { Error::internal(message) }
}
