//! Start and end of a rank: connects it to the others of its job, and ends with them.

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};

use crate::Elastic;
#[doc(hidden)]
pub use crate::elastic_ranks::{NO_RANKS, RUN_FILE, SIGNAL_FILE};
use crate::local_launcher;
use crate::telemetry::{logging, say_error};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::panics;
use hpctrain_comm::{self as comm, Algorithm, Comm};
use hpctrain_comm::{Launch, launched};
use hpctrain_cpu::Cpu;

/// Runs a program that works on ranks: calls `work` with the world of ranks that an MPI launcher
/// such as `mpirun` started, or with a single rank, and ends together with the others. Warnings
/// and errors go to standard error; an error that all ranks share is printed once. Returns the exit
/// code, which has the meaning of those of the command line.
///
/// ```no_run
/// fn main() -> std::process::ExitCode {
///     hpctrain_config::job::start(|comm| {
///         println!("rank {} of {}", comm.rank(), comm.size());
///         Ok(())
///     })
/// }
/// ```
pub fn start(work: impl FnOnce(&Comm<Cpu>) -> Result<()>) -> ExitCode {
    let code = match launched(|name| std::env::var(name).ok()) {
        Ok(launch) => {
            name_console(launch.as_ref());
            // Ranks of a custom program may wait for each other for any time.
            run(launch.as_ref(), Duration::ZERO, |comm| work(comm).map(|()| 0))
        }
        Err(e) => fail(&e),
    };
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Runs a program on `ranks` ranks of this machine, without a launcher: starts this program `ranks`
/// times with its arguments, as processes that communicate over TCP, and calls `work` in each as
/// [`start`] does. Statements before this call run in the launching process as well. Returns the
/// exit code of the job: that of the first rank that fails. A failed rank ends the others, and
/// signals reach all ranks.
///
/// In a process that is a rank already, of `mpirun` or of `hpctrain spawn` for example, it is the
/// same as [`start`], whatever the number of ranks is there.
///
/// ```no_run
/// fn main() -> std::process::ExitCode {
///     hpctrain_config::job::spawn(4, |comm| {
///         println!("rank {} of {}", comm.rank(), comm.size());
///         Ok(())
///     })
/// }
/// ```
pub fn spawn(ranks: usize, work: impl FnOnce(&Comm<Cpu>) -> Result<()>) -> ExitCode {
    match launched(|name| std::env::var(name).ok()) {
        Ok(None) => {
            name_console(None);
            ExitCode::from(u8::try_from(launch_self(ranks, None)).unwrap_or(1))
        }
        // An error is reported there.
        Ok(Some(_)) | Err(_) => start(work),
    }
}

/// Starts `ranks` processes of this program with its arguments and returns the exit code of the
/// job. With `elastic` the job goes on without ranks that are lost.
#[doc(hidden)]
pub fn launch_self(ranks: usize, elastic: Option<&Elastic>) -> i32 {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let launched = std::env::current_exe()
        .map_err(|e| Error::internal(format!("cannot find this program: {e}")))
        .and_then(|program| {
            local_launcher::launch(ranks, program.as_os_str(), &arguments, elastic)
        });
    launched.unwrap_or_else(|e| fail(&e))
}

/// Starts `ranks` processes of a program and returns the exit code of the job.
#[doc(hidden)]
pub fn launch_program(ranks: usize, program: &OsStr, arguments: &[OsString]) -> i32 {
    local_launcher::launch(ranks, program, arguments, None).unwrap_or_else(|e| fail(&e))
}

/// Sends this rank's warnings to standard error, prefixed with its name.
#[doc(hidden)]
pub fn name_console(launch: Option<&Launch>) {
    logging::to_console(&match launch.and_then(|launch| launch.rank) {
        Some(rank) => format!("rank {rank}"),
        None => "hpctrain".to_string(),
    });
}

/// Runs the work of one rank, as a single rank unless a launcher started it; returns the exit
/// code, which is that of the work if it succeeds. A wait for another rank ends the job after
/// `timeout`; zero waits for ever.
#[doc(hidden)]
pub fn run(
    launch: Option<&Launch>,
    timeout: Duration,
    work: impl FnOnce(&Comm<Cpu>) -> Result<i32>,
) -> i32 {
    run_boxed(launch, timeout, Box::new(work))
}

type Work<'a> = Box<dyn FnOnce(&Comm<Cpu>) -> Result<i32> + 'a>;

/// Implements [`run`] without generics, so that it is compiled once.
fn run_boxed(launch: Option<&Launch>, timeout: Duration, work: Work<'_>) -> i32 {
    if launch.is_some_and(|launch| launch.meeting.is_some()) {
        // Ranks end with the program that has started them, if the system supports it.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
    }
    let started = match launch.map(|launch| &launch.meeting) {
        None => Ok(comm::single()),
        Some(None) => comm::start_mpi_within(Algorithm::HalvingDoubling, timeout),
        Some(Some(meeting)) => comm::start_tcp(meeting, Algorithm::HalvingDoubling),
    };
    let comm: Comm<Cpu> = match started {
        Ok(comm) => comm,
        Err(e) => return fail(&e),
    };
    abort_on_panic(&comm);
    if comm.is_renumbered() && launch.is_some_and(|launch| launch.rank.is_some()) {
        logging::rename_console(&format!("rank {}", comm.rank()));
    }
    let watched = if timeout.is_zero() { Ok(()) } else { comm.set_watchdog_timeout(timeout) };
    let code = match watched.and_then(|()| work(&comm)) {
        Ok(code) => code,
        // The console names the rank if the launcher has set its number.
        Err(e) => end_failed(&comm, e, launch.is_some_and(|launch| launch.rank.is_some())),
    };
    comm.shutdown();
    code
}

/// Ends a rank whose work has failed, and returns its exit code. The other ranks are aborted unless
/// they have the same error. `is_named` is whether messages on the console name the rank.
#[doc(hidden)]
pub fn end_failed(comm: &Comm<Cpu>, error: Error, is_named: bool) -> i32 {
    if error.is_shared() || comm.size() == 1 {
        if comm.rank() == 0 {
            fail(&error);
        }
        return error.exit_code();
    }
    // The others would wait for this rank for ever.
    let error = if is_named { error } else { error.on_rank(comm.rank()) };
    log::error!("{error}");
    comm.abort(error.exit_code())
}

/// Prints an error; returns its exit code.
#[doc(hidden)]
pub fn fail(error: &Error) -> i32 {
    say_error(format_args!("error: {error}"));
    error.exit_code()
}

/// Installs a panic hook for a process without ranks: a panic on any thread prints a message and
/// exits with code 1, because nothing else would notice a thread that others wait for.
pub fn exit_on_panic(process: &'static str) {
    std::panic::set_hook(Box::new(move |panic| {
        if panics::is_caught() {
            return;
        }
        say_error(format_args!("error: {process}: internal error, please report it: {panic}"));
        std::process::exit(1)
    }));
}

/// Installs a panic hook for a rank: a panic on any thread names the rank and ends the whole job.
#[doc(hidden)]
pub fn abort_on_panic(comm: &Comm<Cpu>) {
    let comm = comm.clone();
    std::panic::set_hook(Box::new(move |panic| {
        if panics::is_caught() {
            return;
        }
        say_error(format_args!(
            "error: rank {}: internal error, please report it: {panic}",
            comm.rank()
        ));
        comm.abort(1)
    }));
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    /// The environment variable that makes the test run as the process that panics.
    const PLAYS: &str = "HPCTRAIN_TEST_PANICS";

    #[test]
    fn a_panic_on_any_thread_ends_the_process() {
        if std::env::var_os(PLAYS).is_some() {
            exit_on_panic("server");
            std::thread::spawn(|| panic!("as planned"));
            std::thread::sleep(Duration::from_secs(60));
            return;
        }
        let mut again = Command::new(std::env::current_exe().unwrap());
        again
            .args(["--exact", "job::tests::a_panic_on_any_thread_ends_the_process", "--nocapture"])
            .env(PLAYS, "1");
        let ended = again.output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{stderr}");
        assert!(
            stderr.contains("error: server: internal error") && stderr.contains("as planned"),
            "{stderr}"
        );
    }
}
