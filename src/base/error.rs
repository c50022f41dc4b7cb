//! The one error type: a message, advice, and the place where it happened.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Cause of an error; decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// The user asked for something impossible, or gave unusable data.
    Input,
    /// The file system refused: missing, unreadable, full, read-only.
    Io,
    /// A file of this program is proven to differ from the one written: it is missing, too short,
    /// or fails its checksum.
    Damaged,
    /// The file system refused for longer than a run tolerates: another start may find it mended.
    Outage,
    /// A message between ranks failed, or a rank is gone.
    Comm,
    /// A GPU or one of its libraries failed.
    Device,
    /// The training diverged: losses or gradients that are not finite.
    Numeric,
    /// Memory or arithmetic of a machine gave other values than it should: an audit found it.
    Corrupted,
    /// A signal asked this process to end while it waited.
    Interrupted,
    /// A broken promise inside this program.
    Internal,
}

/// The reason for which a file system refused.
pub trait Reason: fmt::Display {
    /// Whether it may be gone at another start without anybody's doing: the device or the file
    /// server had a fault, which is none of the request.
    fn may_pass(&self) -> bool {
        false
    }

    /// Advice for the user, where the place of the refusal has nothing better to say.
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
            ErrorKind::NotFound => "look whether the path is right, and whether this node sees it",
            ErrorKind::PermissionDenied => {
                "look at the owner and the permissions of the path and of the directories above"
            }
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                "make room there, or choose another place"
            }
            ErrorKind::FileTooLarge => {
                "the limit on the size of files is met: see ulimit -f; Slurm takes that of the shell that submits \
                 (sbatch --propagate=NONE)"
            }
            ErrorKind::ReadOnlyFilesystem => "choose another place: nothing can be written there",
            ErrorKind::NotADirectory => "a part of the path is a file: choose another one",
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

/// A failure, told as one line plus an optional hint.
///
/// Messages are lowercase phrases with the real values in them; the hint gives advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    kind: Kind,
    message: String,
    hint: Option<String>,
    /// The file system's fault may be gone at another start.
    passes: bool,
    /// The rank it was seen on, set when ranks compare notes.
    rank: Option<usize>,
    /// Whether every rank returns it.
    shared: bool,
}

impl Error {
    fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None, passes: false, rank: None, shared: false }
    }

    /// The user's input is wrong.
    pub fn input(message: impl Into<String>) -> Self {
        Self::new(Kind::Input, message)
    }

    /// The file system refused to `action` (a phrase such as `"write"`) `path`.
    pub fn io(action: &str, path: &std::path::Path, reason: impl Reason) -> Self {
        let message = format!("cannot {action} {}: {reason}", path.display());
        let hint = reason.advice().map(str::to_owned);
        Self { passes: reason.may_pass(), hint, ..Self::new(Kind::Io, message) }
    }

    /// The file system refused, as another process tells.
    pub fn refused(message: impl Into<String>) -> Self {
        Self::new(Kind::Io, message)
    }

    /// A file that this program wrote is proven to be gone or changed.
    pub fn damaged(message: impl Into<String>) -> Self {
        Self::new(Kind::Damaged, message)
    }

    /// The file system refused to `action` the file that this program wrote at `path`. A file that
    /// does not exist, ends too early, or is no text although it was is damage; anything else may
    /// be otherwise the next time.
    pub fn unread(action: &str, path: &std::path::Path, source: &std::io::Error) -> Self {
        use std::io::ErrorKind::{InvalidData, NotFound, UnexpectedEof};
        let kind = if matches!(source.kind(), NotFound | UnexpectedEof | InvalidData) {
            Kind::Damaged
        } else {
            Kind::Io
        };
        Self { kind, ..Self::io(action, path, source) }
    }

    /// The same refusal of the file system, after which a run ends: `age` has passed since its last
    /// good checkpoint.
    pub fn outlasted(self, age: std::time::Duration) -> Self {
        const HINT: &str = "continue with --resume auto; checkpoint.io_retry_seconds sets the time";
        let message =
            format!("{}; the last good checkpoint is {} s old", self.message, age.as_secs());
        let hint = match &self.hint {
            Some(hint) => format!("{hint}; {HINT}"),
            None => format!("the last published checkpoint is kept: see why, then {HINT}"),
        };
        Self { kind: Kind::Outage, message, ..self }.hint(hint)
    }

    /// A signal asked this process to end while it waited.
    pub fn interrupted(message: impl Into<String>) -> Self {
        Self::new(Kind::Interrupted, message)
    }

    /// A message between ranks failed.
    pub fn comm(message: impl Into<String>) -> Self {
        Self::new(Kind::Comm, message)
    }

    /// A GPU or one of its libraries failed.
    pub fn device(message: impl Into<String>) -> Self {
        Self::new(Kind::Device, message)
    }

    /// The training diverged.
    pub fn numeric(message: impl Into<String>) -> Self {
        Self::new(Kind::Numeric, message)
    }

    /// An audit found memory that has changed by itself, or arithmetic that differs between
    /// machines.
    pub fn corrupted(message: impl Into<String>) -> Self {
        Self::new(Kind::Corrupted, message)
    }

    /// A promise of this program is broken: please report it.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Kind::Internal, message)
    }

    /// Adds advice for the user.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Prefixes the message with the place where it happened: `"step 12: …"`.
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// Notes the rank that saw it first, unless one is noted already.
    pub fn on_rank(mut self, rank: usize) -> Self {
        self.rank.get_or_insert(rank);
        self
    }

    /// Notes that every rank returns this same error, so that one can print it and all can end in
    /// good order.
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Whether every rank returns it; if not, the others must be told to end.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// The message, without rank and hint: one line for a report that has more of them.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The hint: advice for the user.
    pub fn advice(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// The cause.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The exit code of a process that ends with this error: 2 for causes that the user can mend,
    /// 74 where another start may do, else 1.
    pub fn exit_code(&self) -> i32 {
        match self.kind {
            Kind::Io if self.passes => 74,
            Kind::Input | Kind::Io | Kind::Damaged => 2,
            Kind::Outage => 74,
            Kind::Interrupted => 75,
            Kind::Comm | Kind::Device | Kind::Numeric | Kind::Corrupted | Kind::Internal => 1,
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
        let code = |number| {
            Error::io("open", "x".as_ref(), std::io::Error::from_raw_os_error(number)).exit_code()
        };
        let codes =
            [libc::EIO, libc::ESTALE, libc::ENOENT, libc::EACCES, libc::ENOSPC, libc::EROFS]
                .map(code);
        assert_eq!(codes, [74, 74, 2, 2, 2, 2]);
    }
}
