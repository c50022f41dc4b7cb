//! The error type of all crates: a message, a hint, and the place where it happened.
//!
//! The [`Kind`] of an [`Error`] decides the exit code. Each kind has a constructor, such as
//! [`Error::input`]; [`Error::hint`] and [`Error::at`] add to it. Code outside of tests returns
//! errors and does not `unwrap`, which a lint enforces. Where several ranks work together there are
//! two cases:
//!
//! - **Shared.** Work that may fail on some ranks goes through `Group::all_ok`: all succeed, or all
//!   return the error of the lowest rank, marked as [shared](Error::shared). Rank 0 prints it once,
//!   and all ranks shut down in order.
//! - **On one rank.** After any other error the other ranks may wait for this one for ever. The
//!   error is printed with its rank, and `Comm::abort` ends the job. A panic on any thread does the
//!   same (`config/job.rs`); panics of other crates become errors where they are expected
//!   (`panics.rs`).

use std::fmt;

use serde::{Deserialize, Serialize};

/// The result type of all crates.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The cause of an error, which decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// The user requested something impossible, or gave unusable data.
    Input,
    /// A file operation failed: missing, unreadable, full, read-only.
    Io,
    /// A file of this program is corrupt: it is missing, too short, or fails its checksum.
    Damaged,
    /// File operations failed for longer than a run tolerates; a later restart may succeed.
    Outage,
    /// A message between ranks failed.
    Comm,
    /// Another rank is gone: its process, its node or the network to it.
    Lost,
    /// A GPU or one of its libraries failed.
    Device,
    /// The training diverged: losses or gradients that are not finite.
    Numeric,
    /// A silent-data-corruption (SDC) check found wrong values in memory or arithmetic.
    Corrupted,
    /// A signal requested the end of this process while it waited.
    Interrupted,
    /// The work was cancelled before it had a result.
    Cancelled,
    /// An invariant of this program is broken.
    Internal,
}

/// The reason why a file operation failed.
pub trait Reason: fmt::Display {
    /// Returns true if the reason may be gone at a restart without any action: the device or the
    /// file server failed, and the request was valid.
    fn may_pass(&self) -> bool {
        false
    }

    /// Returns a hint for the user, unless the caller gives a better one.
    fn advice(&self) -> Option<&'static str> {
        None
    }
}

impl Reason for std::io::Error {
    fn may_pass(&self) -> bool {
        matches!(
            self.raw_os_error(),
            Some(libc::EIO | libc::EREMOTEIO | libc::ESTALE | libc::ETIMEDOUT)
        )
    }

    fn advice(&self) -> Option<&'static str> {
        use std::io::ErrorKind;
        Some(match self.kind() {
            ErrorKind::NotFound => "check that the path is right, and that this node can see it",
            ErrorKind::PermissionDenied => {
                "check the owner and the permissions of the path and of the directories above"
            }
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                "make room there, or choose another place"
            }
            ErrorKind::FileTooLarge => {
                "the file exceeds the size limit of ulimit -f; Slurm jobs inherit that of the submitting shell \
                 (sbatch --propagate=NONE prevents it)"
            }
            ErrorKind::ReadOnlyFilesystem => "choose another place: the file system is read-only",
            ErrorKind::NotADirectory => "a component of the path is a file: choose another path",
            ErrorKind::IsADirectory => "the path is a directory: give a file",
            _ => return None,
        })
    }
}

impl Reason for rustix::io::Errno {
    fn may_pass(&self) -> bool {
        std::io::Error::from(*self).may_pass()
    }

    fn advice(&self) -> Option<&'static str> {
        std::io::Error::from(*self).advice()
    }
}

impl<T: Reason + ?Sized> Reason for &T {
    fn may_pass(&self) -> bool {
        (**self).may_pass()
    }

    fn advice(&self) -> Option<&'static str> {
        (**self).advice()
    }
}

impl Reason for str {}
impl Reason for String {}

/// A failure, described in one line and an optional hint.
///
/// Messages are lowercase phrases with the actual values; the hint says what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    kind: Kind,
    message: String,
    hint: Option<String>,
    /// Whether the failure of the file system may be gone at a restart.
    passes: bool,
    /// The rank that it occurred on, set when ranks agree on errors.
    rank: Option<usize>,
    /// Whether every rank returns it.
    shared: bool,
}

impl Error {
    fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None, passes: false, rank: None, shared: false }
    }

    /// Creates the error of wrong user input.
    pub fn input(message: impl Into<String>) -> Self {
        Self::new(Kind::Input, message)
    }

    /// Creates the error of a failure to `action` `path`, where `action` is a verb such as
    /// `"write"`.
    pub fn io(action: &str, path: &std::path::Path, reason: impl Reason) -> Self {
        let message = format!("cannot {action} {}: {reason}", path.display());
        let hint = reason.advice().map(str::to_owned);
        Self { passes: reason.may_pass(), hint, ..Self::new(Kind::Io, message) }
    }

    /// Creates the error of a failed file operation that another process has reported.
    pub fn refused(message: impl Into<String>) -> Self {
        Self::new(Kind::Io, message)
    }

    /// Creates the error of a corrupt or missing file that this program wrote.
    pub fn damaged(message: impl Into<String>) -> Self {
        Self::new(Kind::Damaged, message)
    }

    /// Creates the error of a failure to `action` a file that this program wrote at `path`. The
    /// file is damaged if it does not exist, ends too early, or is not UTF-8 where it should be;
    /// other failures may be temporary.
    pub fn unreadable(action: &str, path: &std::path::Path, source: &std::io::Error) -> Self {
        use std::io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
        let kind = if matches!(source.kind(), NotFound | UnexpectedEof | InvalidData) {
            Kind::Damaged
        } else {
            Kind::Io
        };
        Self { kind, ..Self::io(action, path, source) }
    }

    /// Turns a failure of the file system into one that ends the run, because its last good
    /// checkpoint is `age` old.
    pub fn outage(self, age: std::time::Duration) -> Self {
        const HINT: &str = "continue with --resume auto; checkpoint.io_retry_seconds sets the time";
        let message =
            format!("{}; the last good checkpoint is {} s old", self.message, age.as_secs());
        let hint = match &self.hint {
            Some(hint) => format!("{hint}; {HINT}"),
            None => format!("the last published checkpoint is kept: fix the cause, then {HINT}"),
        };
        Self { kind: Kind::Outage, message, ..self }.hint(hint)
    }

    /// Creates the error of a signal that requested the end of this process while it waited.
    pub fn interrupted(message: impl Into<String>) -> Self {
        Self::new(Kind::Interrupted, message)
    }

    /// Creates the error of work that was cancelled before it had a result.
    pub fn cancelled(message: impl Into<String>) -> Self {
        Self::new(Kind::Cancelled, message)
    }

    /// Creates the error of a failed message between ranks.
    pub fn comm(message: impl Into<String>) -> Self {
        Self::new(Kind::Comm, message)
    }

    /// Creates the error of a rank that is gone: its process, its node or the network to it.
    pub fn lost(message: impl Into<String>) -> Self {
        Self::new(Kind::Lost, message)
    }

    /// Creates the error of a failure of a GPU or one of its libraries.
    pub fn device(message: impl Into<String>) -> Self {
        Self::new(Kind::Device, message)
    }

    /// Creates the error of a diverged training.
    pub fn numeric(message: impl Into<String>) -> Self {
        Self::new(Kind::Numeric, message)
    }

    /// Creates the error of a failed silent-data-corruption (SDC) check: memory has changed, or
    /// arithmetic differs between machines.
    pub fn corrupted(message: impl Into<String>) -> Self {
        Self::new(Kind::Corrupted, message)
    }

    /// Creates the error of a broken invariant, a bug to report.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Kind::Internal, message)
    }

    /// Adds a hint for the user.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Prefixes the message with the place where it happened: `"step 12: …"`.
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// Sets the rank on which it occurred, unless one is set already.
    pub fn on_rank(mut self, rank: usize) -> Self {
        self.rank.get_or_insert(rank);
        self
    }

    /// Marks the error as the same on every rank, so that one rank can print it and all can exit in
    /// an orderly way.
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Returns true if every rank has this error. If not, the other ranks must be aborted.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Returns the message without rank and hint, as one line of a longer report.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the hint for the user.
    pub fn advice(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// Returns the cause.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the exit code of a process that ends with this error: 2 for causes that the user can
    /// fix, 74 where a restart may succeed, 75 after a signal, and 1 otherwise.
    pub fn exit_code(&self) -> i32 {
        match self.kind {
            Kind::Io if self.passes => 74,
            Kind::Input | Kind::Io | Kind::Damaged => 2,
            Kind::Outage => 74,
            Kind::Interrupted => 75,
            Kind::Comm
            | Kind::Lost
            | Kind::Device
            | Kind::Numeric
            | Kind::Corrupted
            | Kind::Cancelled
            | Kind::Internal => 1,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rank) = self.rank {
            write!(f, "rank {rank}: ")?;
        }
        write!(f, "{}", self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_rank_place_and_hint() {
        let e = Error::input("id 70 ≥ vocabulary 65")
            .hint("re-import")
            .at("a.h5")
            .on_rank(3)
            .on_rank(1);
        assert_eq!(e.to_string(), "rank 3: a.h5: id 70 ≥ vocabulary 65\nhint: re-import");
        assert_eq!(e.exit_code(), 2);
        assert_eq!(Error::comm("gone").exit_code(), 1);
        assert_eq!(Error::cancelled("the call was cancelled").exit_code(), 1);
    }

    #[test]
    fn refusals_of_a_file_system_have_advice() {
        let full =
            || Error::io("write", "x".as_ref(), std::io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(full().advice(), Some("make room there, or choose another place"));
        assert_eq!(full().hint("set it lower").advice(), Some("set it lower"));
    }

    #[test]
    fn faults_of_devices_are_worth_another_start() {
        let numbers =
            [libc::EIO, libc::ESTALE, libc::ENOENT, libc::EACCES, libc::ENOSPC, libc::EROFS];
        let codes = numbers.map(|number| {
            Error::io("open", "x".as_ref(), std::io::Error::from_raw_os_error(number)).exit_code()
        });
        assert_eq!(codes, [74, 74, 2, 2, 2, 2]);
    }
}
