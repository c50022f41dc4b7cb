//! Starts programs for tests, with a time limit, their own process group, and captured output.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time limit of any job of the tests, also on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(180);

/// The exit status and the output of a program.
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Returns the exit code; panics with the output if a signal ended the program.
    #[track_caller]
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("{self}"))
    }

    /// Panics unless the exit code is 0.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        assert!(self.status.success(), "{self}");
        self
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n--- stdout\n{}--- stderr\n{}---", self.status, self.stdout, self.stderr)
    }
}

/// Returns the name of the calling test.
pub fn test_name() -> String {
    let name = std::thread::current().name().unwrap().to_string();
    assert_ne!(
        name, "main",
        "a test that starts itself needs its own thread: run it without --test-threads=1"
    );
    name
}

/// How the ranks of a job are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// One process without a launcher.
    Alone,
    /// Processes, started by mpirun.
    Mpirun(usize),
    /// Threads of one process.
    Simulate(usize),
    /// Processes, started by the program itself (`--spawn`).
    Spawn(usize),
}

impl Transport {
    /// Returns a command that trains on these ranks, to which options of `hpctrain train` can be
    /// added.
    pub fn train(self) -> Command {
        match self {
            Self::Alone => program(["train"]),
            Self::Simulate(ranks) => program(["simulate", "--ranks", &ranks.to_string()]),
            Self::Spawn(ranks) => program(["train", "--spawn", &ranks.to_string()]),
            Self::Mpirun(ranks) => {
                let mut command = mpirun(ranks);
                command.arg(super::program()).arg("train");
                command
            }
        }
    }
}

/// Returns a command of the program under test, in the environment of the tests.
pub fn program<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(super::program());
    command.args(args);
    in_our_environment(&mut command);
    command
}

/// Returns `mpirun -np N`, which works for any user and number of cores, and to which the program
/// to run must be added.
pub fn mpirun(ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["-np", &ranks.to_string()]);
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    // Several jobs share the cores.
    command.env("OMPI_MCA_mpi_yield_when_idle", "1");
    in_our_environment(&mut command);
    command
}

/// Removes settings of the user from the environment of a command, and lets it unpack the bundled
/// data in the build directory.
pub fn in_our_environment(command: &mut Command) {
    command.env("XDG_CACHE_HOME", super::target().join("cache"));
    for name in [
        "RUST_LOG",
        "RUST_BACKTRACE",
        "HPCTRAIN_MPI",
        "HPCTRAIN_RENDEZVOUS",
        "HPCTRAIN_RANKS_PER_NODE",
    ] {
        command.env_remove(name);
    }
}

/// A running program.
pub struct Running {
    child: Child,
    /// The folder with its output.
    folder: tempfile::TempDir,
    /// Its cores; none for a program that runs together with another one of the same test.
    _share: Option<CoreShare>,
}

/// The number of cores that no job of the tests uses. It is set when the first job starts.
static FREE: Mutex<Option<usize>> = Mutex::new(None);
static FREED: Condvar = Condvar::new();

/// The cores of a job, which are freed when this is dropped.
pub struct CoreShare(usize);

impl CoreShare {
    /// Waits for one core for a process, or for half of all cores for the ranks of a job, which
    /// often wait for messages.
    pub fn acquire(command: &Command) -> Self {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        let mut words = command.get_args().chain([command.get_program()]).filter_map(OsStr::to_str);
        // The words may also be in a shell script.
        let has_ranks = words.any(|word| {
            word.contains("mpirun")
                || word.contains("simulate")
                || word == "--spawn"
                || word.ends_with(".sbatch")
        });
        let cores = if has_ranks { all.div_ceil(2) } else { 1 };
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        while *free.get_or_insert(all) < cores {
            free = FREED.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free = free.map(|free| free - cores);
        Self(cores)
    }
}

impl Drop for CoreShare {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        *free = free.map(|free| free + self.0);
        FREED.notify_all();
    }
}

/// Waits for free cores, and starts a program in its own process group.
pub fn start(command: &mut Command) -> Running {
    let share = CoreShare::acquire(command);
    spawn(command, Some(share))
}

/// Starts a program on cores that the test has already waited for, so that it can measure time.
pub fn start_on(share: CoreShare, command: &mut Command) -> Running {
    spawn(command, Some(share))
}

/// Starts a program that runs together with another one of the same test, without waiting for
/// cores.
pub fn start_without_waiting(_first: &Running, command: &mut Command) -> Running {
    spawn(command, None)
}

fn spawn(command: &mut Command, share: Option<CoreShare>) -> Running {
    let folder = tempfile::tempdir().unwrap();
    let file = |name| File::create(folder.path().join(name)).unwrap();
    command
        .stdin(std::process::Stdio::null())
        .stdout(file("stdout"))
        .stderr(file("stderr"))
        .process_group(0);
    inherits_nothing(command);
    let child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    Running { child, folder, _share: share }
}

/// Closes all descriptors in a command. HDF5 opens files without close-on-exec, so a program
/// started meanwhile would hold their locks.
pub fn inherits_nothing(command: &mut Command) -> &mut Command {
    // SAFETY: touches no memory.
    let close = || match unsafe {
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    };
    // SAFETY: one system call, on descriptors of the child.
    unsafe { command.pre_exec(close) }
}

/// Runs a program to its end; panics with its output if that takes longer than [`LIMIT`].
#[track_caller]
pub fn finish(command: &mut Command) -> Ended {
    start(command).finish(LIMIT)
}

impl Running {
    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether the program has not ended.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Returns the output so far: standard output, then standard error.
    pub fn printed(&self) -> String {
        let ended = self.ended(ExitStatus::default());
        ended.stdout + &ended.stderr
    }

    /// Returns the file with its standard error.
    pub fn stderr(&self) -> PathBuf {
        self.folder.path().join("stderr")
    }

    /// Waits until a condition is true; panics with the output if the program ends before, or it
    /// takes too long.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut is_so: impl FnMut() -> bool) {
        let started = Instant::now();
        while !is_so() {
            let continues = self.runs() && started.elapsed() < LIMIT;
            // The condition may have become true just before the end.
            assert!(continues || is_so(), "never {what}: {}", self.printed());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the end; panics with the output if it takes longer than `limit`.
    #[track_caller]
    pub fn finish(mut self, limit: Duration) -> Ended {
        match self.exit_within(limit) {
            Some(status) => self.ended(status),
            None => {
                self.end();
                panic!("hangs: {}", self.ended(ExitStatus::default()));
            }
        }
    }

    fn ended(&self, status: ExitStatus) -> Ended {
        let text = |name| {
            String::from_utf8_lossy(&std::fs::read(self.folder.path().join(name)).unwrap())
                .into_owned()
        };
        Ended { status, stdout: text("stdout"), stderr: text("stderr") }
    }

    fn exit_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        while start.elapsed() < limit {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }

    fn end(&mut self) {
        // mpirun forwards the signal to the ranks, if it still can.
        signal("TERM", &self.id().to_string());
        if self.exit_within(Duration::from_secs(5)).is_none() {
            signal("KILL", &format!("-{}", self.id()));
            let _ = self.child.wait();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that fails while its program runs leaves no processes behind.
        if self.runs() {
            self.end();
        }
    }
}

/// Returns the processes whose command lines contain `words`, such as the path of a run: those of a
/// job and its launcher.
pub fn processes(words: &str) -> Vec<u32> {
    let numbers = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // A process that has ended but was not waited for has an empty command line.
    let is_one = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(words)
    };
    numbers.filter(is_one).collect()
}

/// Returns the rank of a process that `mpirun` or `--spawn` started.
pub fn rank_of(pid: u32) -> Option<usize> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mut variables =
        environment.split(|&byte| byte == 0).filter_map(|one| std::str::from_utf8(one).ok());
    variables.find_map(|one| match one.strip_prefix("HPCTRAIN_RENDEZVOUS=") {
        Some(place) => place.split('/').next()?.parse().ok(),
        None => one.strip_prefix("OMPI_COMM_WORLD_RANK=")?.parse().ok(),
    })
}

/// Returns whether a process has a handler for a signal.
pub fn handles(pid: u32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
    caught.is_some_and(|caught| caught & (1 << (signal - 1)) != 0)
}

/// Sends a signal to a process; does nothing if the process has ended.
pub fn send(pid: u32, signal: i32) {
    // SAFETY: touches no memory of this process.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

/// Sends a signal to a process, or with a minus before its id to a process group.
pub fn signal(name: &str, target: &str) {
    let _ = Command::new("kill").args(["-s", name, "--", target]).status();
}
