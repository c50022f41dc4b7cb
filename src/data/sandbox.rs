//! A child process that opens HDF5 files before any rank does.
//!
//! libhdf5 follows addresses and lengths of a file, and a damaged or hostile file can end the
//! process that opens it, or make it read other data. So a file is first opened, described and
//! prepared for reading in a child with limits of memory and time. The child answers one request
//! after another, and a file that ends it becomes one error with the file's name. Only rank 0 has a
//! child: other ranks get its descriptions ([`ShardIndex`](super::ShardIndex)).
//!
//! The child is this program with a hidden subcommand, which [`enable`] names. In a program that
//! has not called it, files are opened without a child.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use signal_hook::consts::signal::{
    SIGABRT, SIGBUS, SIGFPE, SIGHUP, SIGILL, SIGINT, SIGSEGV, SIGSYS, SIGTERM, SIGTRAP, SIGUSR1,
    SIGXCPU,
};
use signal_hook::low_level::signal_name;

use super::block_checksums::Scratch;
use super::listing::{self, Inspected};
use super::raw_path;
use super::shard::Shard;
use super::shard_delta::{PreviousShard, ShardDelta};
use super::spec::DataSpec;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spawn::spawn;

/// The hidden subcommand of the program that is the child.
pub const COMMAND: &str = "data-sandbox";

/// Address space of the child. One row of a filtered dataset may take 1 GiB of it.
const MEMORY: u64 = 8 << 30;

/// The seconds that the child may take for a file, of CPU time and of elapsed time.
const TIMEOUT: u64 = 60;

/// The program that is started as the child, and its arguments.
static PROGRAM: OnceLock<(PathBuf, Vec<String>)> = OnceLock::new();

/// Makes this process open HDF5 files first in a child: `program`, started with `arguments`, which
/// calls [`serve`]. Later calls have no effect.
pub fn enable(program: PathBuf, arguments: Vec<String>) {
    let _ = PROGRAM.set((program, arguments));
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    /// Describes a shard of a data set.
    Shard {
        #[serde(with = "raw_path")]
        path: PathBuf,
        spec: Box<DataSpec>,
    },
    /// Lists the content of any file.
    Inspect {
        #[serde(with = "raw_path")]
        path: PathBuf,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Shard(ShardDelta),
    Inspected(Inspected),
    Refused(Error),
}

/// Answers requests from standard input until it ends. The child calls this.
///
/// # Errors
/// Returns an error if a limit cannot be set, or a request or reply cannot be read or written.
pub fn serve() -> Result<()> {
    limit(Resource::As, MEMORY)?;
    limit(Resource::Core, 0)?;
    let mut before = PreviousShard::default();
    for line in std::io::stdin().lines() {
        let line = line.map_err(|e| Error::internal(format!("a request cannot be read: {e}")))?;
        let request = serde_json::from_str(&line)
            .map_err(|e| Error::internal(format!("{line:?} is malformed: {e}")))?;
        let elapsed = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs();
        limit(Resource::Cpu, elapsed + TIMEOUT)?;
        let reply = answer(request, &mut before);
        let reply =
            serde_json::to_string(&reply).map_err(|e| Error::internal(format!("a reply: {e}")))?;
        let mut stdout = std::io::stdout().lock();
        let written = writeln!(stdout, "{reply}").and_then(|()| stdout.flush());
        written.map_err(|e| Error::internal(format!("a reply cannot be written: {e}")))?;
    }
    Ok(())
}

/// Lowers the soft limit of a resource to `most`, or to the hard limit if that is less.
fn limit(resource: Resource, most: u64) -> Result<()> {
    let hard = getrlimit(resource).maximum;
    let soft = hard.map_or(most, |hard| hard.min(most));
    setrlimit(resource, Rlimit { current: Some(soft), maximum: hard })
        .map_err(|e| Error::internal(format!("cannot set a limit of the process: {e}")))
}

fn answer(request: Request, before: &mut PreviousShard) -> Reply {
    match request {
        Request::Shard { path, spec } => match Shard::open(&path, &spec) {
            Ok(mut shard) => {
                // Ranks do the same before they read rows, and report an error then.
                let _ = shard.readers(0, spec.verify, &Scratch::default());
                Reply::Shard(before.shorten(&mut shard))
            }
            Err(e) => Reply::Refused(e),
        },
        Request::Inspect { path } => {
            listing::list_file(&path).map_or_else(Reply::Refused, Reply::Inspected)
        }
    }
}

/// Opens files in a child, if the program has enabled one: the first file starts it, and it runs
/// until this is dropped.
#[derive(Debug, Default)]
pub(super) struct Sandbox {
    helper: Option<Helper>,
    /// Whether no child can be started, so that this process opens files itself.
    is_without: bool,
}

#[derive(Debug)]
struct Helper {
    child: Child,
    /// The child's standard input; `None` once the child is to end.
    requests: Option<ChildStdin>,
    replies: Receiver<Reply>,
    before: PreviousShard,
    /// The signal that has ended the child.
    ended_by: Option<i32>,
}

/// Signals that launchers send to the process group of a rank. One that comes while a child is
/// created, before the child has a process group of its own, ends the child.
const OF_THE_JOB: [i32; 4] = [SIGHUP, SIGINT, SIGTERM, SIGUSR1];

/// The number of children that are started for a file if such signals end them.
const ATTEMPTS: usize = 3;

impl Sandbox {
    /// Describes a shard of a data set.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is refused, or if reading it ends the child.
    pub(super) fn shard(&mut self, path: &Path, spec: &DataSpec) -> Result<Shard> {
        let request = Request::Shard { path: path.to_owned(), spec: Box::new(spec.clone()) };
        match self.ask(path, &request)? {
            None => Shard::open(path, spec),
            Some(Reply::Shard(brief)) => {
                let shard = self.helper.as_mut().and_then(|helper| helper.before.complete(brief));
                shard.ok_or_else(|| unexpected(path))
            }
            Some(Reply::Refused(e)) => Err(e),
            Some(Reply::Inspected(_)) => Err(unexpected(path)),
        }
    }

    /// Lists the content of a file.
    ///
    /// # Errors
    /// Returns an error if [`Sandbox::shard`] would.
    pub(super) fn inspect(&mut self, path: &Path) -> Result<Inspected> {
        match self.ask(path, &Request::Inspect { path: path.to_owned() })? {
            None => listing::list_file(path),
            Some(Reply::Inspected(inspected)) => Ok(inspected),
            Some(Reply::Refused(e)) => Err(e),
            Some(Reply::Shard(_)) => Err(unexpected(path)),
        }
    }

    /// Returns the reply to a request about the file at `path`; `None` if there is no child. After
    /// an error the next request starts another child.
    fn ask(&mut self, path: &Path, request: &Request) -> Result<Option<Reply>> {
        let start = || PROGRAM.get().and_then(|(program, arguments)| start(program, arguments));
        self.ask_child_of(start, path, request)
    }

    /// Returns the reply of a child that `start` starts, unless there is one already.
    fn ask_child_of(
        &mut self,
        start: impl Fn() -> Option<Helper>,
        path: &Path,
        request: &Request,
    ) -> Result<Option<Reply>> {
        let mut attempts = 0;
        loop {
            if self.helper.is_none() && !self.is_without {
                self.helper = start();
                self.is_without = self.helper.is_none();
            }
            let Some(helper) = &mut self.helper else { return Ok(None) };
            let reply = helper.ask(path, request);
            let by_job = helper.ended_by.is_some_and(|signal| OF_THE_JOB.contains(&signal));
            if reply.is_err() {
                self.helper = None;
            }
            attempts += 1;
            if reply.is_ok() || !by_job || attempts == ATTEMPTS {
                return reply.map(Some);
            }
        }
    }
}

/// Starts a child. If that fails, logs a warning and returns `None`.
fn start(program: &Path, arguments: &[String]) -> Option<Helper> {
    // The child does not get the job's signals; it ends when its standard input is closed.
    let spawned = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(e) => {
            log::warn!(
                "data: HDF5 files are opened without a child process, which cannot be started: {e}"
            );
            return None;
        }
    };
    let requests = child.stdin.take()?;
    let stdout = child.stdout.take()?;
    let (sender, replies) = channel();
    if let Err(e) = spawn("data sandbox", move || read_replies(stdout, &sender)) {
        drop(requests);
        // It ends with its standard input; without `wait` it would remain as a zombie.
        drop(child.wait());
        log::warn!("data: HDF5 files are opened without a child process: {}", e.message());
        return None;
    }
    let before = PreviousShard::default();
    Some(Helper { child, requests: Some(requests), replies, before, ended_by: None })
}

/// Reads the replies of a child until it ends or nothing receives them any more.
fn read_replies(stdout: ChildStdout, sender: &Sender<Reply>) {
    for line in BufReader::new(stdout).split(b'\n').map_while(std::io::Result::ok) {
        // HDF5 plugins may print, too. Strings of a file need not be UTF-8, whatever their type is.
        let Ok(reply) = serde_json::from_str(&String::from_utf8_lossy(&line)) else { continue };
        if sender.send(reply).is_err() {
            return;
        }
    }
}

impl Helper {
    fn ask(&mut self, path: &Path, request: &Request) -> Result<Reply> {
        let mut request =
            serde_json::to_vec(request).map_err(|e| Error::internal(format!("a request: {e}")))?;
        request.push(b'\n');
        // A child that has ended reads no request, and sends no reply either.
        let _ = self.requests.as_mut().map(|requests| requests.write_all(&request));
        match self.replies.recv_timeout(Duration::from_secs(TIMEOUT)) {
            Ok(reply) => Ok(reply),
            Err(RecvTimeoutError::Timeout) => Err(too_long(path)),
            Err(RecvTimeoutError::Disconnected) => {
                self.requests = None;
                match self.child.wait() {
                    Ok(status) => {
                        self.ended_by = status.signal();
                        Err(ended(path, status))
                    }
                    Err(e) => Err(Error::internal(format!(
                        "the process that opens {} is lost: {e}",
                        path.display()
                    ))),
                }
            }
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // The child ends when its standard input is closed, unless it hangs.
        self.requests = None;
        if let Err(RecvTimeoutError::Disconnected) =
            self.replies.recv_timeout(Duration::from_secs(1))
        {
            let _ = self.child.wait();
        } else {
            // A process that is blocked on an unresponsive file system ends only when that
            // responds.
            let _ = self.child.kill();
            let _ = self.child.try_wait();
        }
    }
}

/// Returns the error of a file that made the child end.
fn ended(path: &Path, status: ExitStatus) -> Error {
    let name = path.display();
    let Some(signal) = status.signal() else {
        return Error::internal(format!("the process that opens {name} ended with {status}"));
    };
    let how = format!(
        "ended a process by signal {signal} ({})",
        signal_name(signal).unwrap_or("unknown")
    );
    match signal {
        SIGXCPU => too_long(path),
        SIGSEGV | SIGBUS | SIGABRT | SIGFPE | SIGILL | SIGTRAP | SIGSYS => Error::input(format!(
            "{name} is damaged: reading it {how}"
        ))
        .hint(
            "copy or import it again; newer versions of libhdf5 detect more such files themselves",
        ),
        _ => Error::refused(format!("{name} cannot be read: the attempt {how}"))
            .hint("the node may be out of memory: look at its kernel log, and start again"),
    }
}

fn too_long(path: &Path) -> Error {
    Error::input(format!("{} cannot be opened within {TIMEOUT} s", path.display())).hint(
        "the file system does not answer, or the file is damaged: check whether `h5ls` opens it",
    )
}

fn unexpected(path: &Path) -> Error {
    Error::internal(format!("the process that opens {} sent an unexpected reply", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the error of the first file if the child is a shell script.
    fn error_of(script: &str) -> Error {
        let mut helper = start(Path::new("sh"), &["-c".to_owned(), script.to_owned()]).unwrap();
        let path = Path::new("train-7.h5");
        helper.ask(path, &Request::Inspect { path: path.to_owned() }).err().unwrap()
    }

    #[test]
    fn a_signal_of_the_job_starts_another_child() {
        use std::cell::Cell;

        let path = Path::new("train-7.h5");
        let request = Request::Inspect { path: path.to_owned() };
        let answer = serde_json::to_string(&Reply::Refused(Error::input("refused"))).unwrap();
        for (hits, starts) in [(0, 1), (2, 3), (9, ATTEMPTS)] {
            let started = Cell::new(0);
            let start_child = || {
                started.set(started.get() + 1);
                let script = match started.get() > hits {
                    true => format!("read request; echo '{answer}'; read end"),
                    false => "kill -USR1 $$".into(),
                };
                start(Path::new("sh"), &["-c".to_owned(), script])
            };
            let reply = Sandbox::default().ask_child_of(start_child, path, &request);
            assert_eq!(started.get(), starts);
            match reply {
                Ok(Some(Reply::Refused(e))) => assert!(hits < 9 && e.message() == "refused"),
                Ok(_) => panic!("another reply"),
                Err(e) => assert!(hits == 9 && e.message().contains("SIGUSR1"), "{e}"),
            }
        }
    }

    #[test]
    fn the_end_of_a_child_is_an_error_with_file_and_cause() {
        let error = error_of("read request; kill -SEGV $$");
        let expected = "train-7.h5 is damaged: reading it ended a process by signal 11 (SIGSEGV)\nhint: copy or import it again";
        assert!(error.to_string().starts_with(expected), "{error}");
        assert_eq!(error.exit_code(), 2);
        let error = error_of("read request; kill -XCPU $$").to_string();
        assert!(error.starts_with("train-7.h5 cannot be opened within 60 s\nhint: "), "{error}");
        // Here the file is not at fault.
        let error = error_of("read request; kill -KILL $$").to_string();
        assert!(
            error.starts_with(
                "train-7.h5 cannot be read: the attempt ended a process by signal 9 (SIGKILL)"
            ),
            "{error}"
        );
        let error = error_of("echo noise; exit 3").to_string();
        assert!(
            error.contains("the process that opens train-7.h5 ended with exit status: 3"),
            "{error}"
        );
    }
}
