//! Starts programs as tests should: with a limit on their time, their own process group, and what
//! they print kept.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Long enough for any job of the tests, on a machine whose cores are busy with other work as well.
pub const LIMIT: Duration = Duration::from_secs(180);

/// The end of a program.
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// The exit code; panics with everything printed if a signal ended it.
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

/// The name of the calling test.
pub fn test_name() -> String {
    let name = std::thread::current().name().unwrap().to_string();
    assert_ne!(
        name, "main",
        "a test that starts itself needs a thread of its own: leave out --test-threads=1"
    );
    name
}

/// Processes or threads of a job's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// One process, started by itself.
    Alone,
    /// A process each.
    Mpirun(usize),
    /// Threads of one process.
    Simulate(usize),
    /// A process each, which the program starts itself.
    Spawn(usize),
}

impl Transport {
    /// A command that trains on these ranks; options of `hpctrain train` follow.
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

/// The program under test, with some arguments, in the environment of the tests.
pub fn program<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(super::program());
    command.args(args);
    in_our_environment(&mut command);
    command
}

/// `mpirun -np N`, whoever runs it and however few cores there are. The program to run follows.
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

/// Settings of the user must not decide a test; the bundled data is unpacked among the build's
/// files.
pub fn in_our_environment(command: &mut Command) {
    command.env("XDG_CACHE_HOME", super::target().join("cache"));
    for name in [
        "RUST_LOG",
        "RUST_BACKTRACE",
        "HPCTRAIN_MPI",
        "HPCTRAIN_MEETING",
        "HPCTRAIN_RANKS_PER_NODE",
    ] {
        command.env_remove(name);
    }
}

/// A program that runs.
pub struct Running {
    child: Child,
    /// Holds what it prints.
    folder: tempfile::TempDir,
    /// None of one that runs beside another of the same test.
    _share: Option<Share>,
}

/// Cores that no job of the tests has; more jobs than cores would only take turns. It is filled
/// when the first one starts.
static FREE: Mutex<Option<usize>> = Mutex::new(None);
static FREED: Condvar = Condvar::new();

/// Cores of a job, until it is dropped.
pub struct Share(usize);

impl Share {
    /// Waits for one core for a process, and for half of them for the ranks of a job: jobs wait for
    /// messages much of their time.
    pub fn of(command: &Command) -> Self {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        let mut words = command.get_args().chain([command.get_program()]).filter_map(OsStr::to_str);
        // Also in the script of a shell.
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

impl Drop for Share {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        *free = free.map(|free| free + self.0);
        FREED.notify_all();
    }
}

/// Starts a program in a process group of its own, when there are cores for it.
pub fn start(command: &mut Command) -> Running {
    let share = Share::of(command);
    spawn(command, Some(share))
}

/// As [`start`], on cores that the test has waited for before it took the time.
pub fn start_on(share: Share, command: &mut Command) -> Running {
    spawn(command, Some(share))
}

/// Starts a program that has to do with another one of the same test, which runs already.
pub fn start_beside(_first: &Running, command: &mut Command) -> Running {
    spawn(command, None)
}

fn spawn(command: &mut Command, share: Option<Share>) -> Running {
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

/// HDF5 opens files without close-on-exec: a program that is started meanwhile would hold their
/// locks.
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

/// Runs a program to its end; panics with what it printed if that takes longer than [`LIMIT`].
#[track_caller]
pub fn finish(command: &mut Command) -> Ended {
    start(command).finish(LIMIT)
}

impl Running {
    /// Number of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has not ended.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// The output so far, of standard output and standard error.
    pub fn printed(&self) -> String {
        let ended = self.ended(ExitStatus::default());
        ended.stdout + &ended.stderr
    }

    /// The file that its standard error goes to.
    pub fn stderr(&self) -> PathBuf {
        self.folder.path().join("stderr")
    }

    /// Waits until something is so; panics with what was printed if the program ends before, or it
    /// takes too long.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            let goes_on = self.runs() && begun.elapsed() < LIMIT;
            // It may have come true just before the end.
            assert!(goes_on || is_so(), "never {what}: {}", self.printed());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the end; panics with what was printed if it takes longer than `limit`.
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
        // mpirun passes the end on to the ranks, if it still can.
        signal("TERM", &self.id().to_string());
        if self.exit_within(Duration::from_secs(5)).is_none() {
            signal("KILL", &format!("-{}", self.id()));
            let _ = self.child.wait();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that fails while its program runs leaves nothing behind.
        if self.runs() {
            self.end();
        }
    }
}

/// The processes whose command lines contain `words`, such as the path of a run: those of a job and
/// its launcher.
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

/// The rank of a process that `mpirun` or `--spawn` started.
pub fn rank_of(pid: u32) -> Option<usize> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mut variables =
        environment.split(|&byte| byte == 0).filter_map(|one| std::str::from_utf8(one).ok());
    variables.find_map(|one| match one.strip_prefix("HPCTRAIN_MEETING=") {
        Some(place) => place.split('/').next()?.parse().ok(),
        None => one.strip_prefix("OMPI_COMM_WORLD_RANK=")?.parse().ok(),
    })
}

/// Whether a process has a handler for a signal.
pub fn handles(pid: u32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
    caught.is_some_and(|caught| caught & (1 << (signal - 1)) != 0)
}

/// Sends a signal to a process at once. That it is gone already is no failure.
pub fn send(pid: u32, signal: i32) {
    // SAFETY: touches no memory of this process.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

/// Sends a signal to a process, or to a group of them with a minus before its number.
pub fn signal(name: &str, target: &str) {
    let _ = Command::new("kill").args(["-s", name, "--", target]).status();
}
