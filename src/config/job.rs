//! One rank of a job: meeting the others, and ending together.

use std::process::ExitCode;
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};

use crate::telemetry::{logging, say_error};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::panics;
use hpctrain_comm::{self as comm, Algorithm, Comm};
use hpctrain_comm::{Launch, launched};
use hpctrain_cpu::Cpu;

/// The whole of a program that works on ranks: does the work of this one, in a world of its own
/// unless an MPI launcher such as `mpirun` started the process, and ends with the others. Warnings
/// and errors go to standard error, an error that all ranks share once; exit codes are those of the
/// command line.
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
            // A program's own ranks may wait for each other as long as they like.
            run(launch.as_ref(), Duration::ZERO, |comm| work(comm).map(|()| 0))
        }
        Err(e) => fail(&e),
    };
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Sends this rank's warnings to standard error, under its name.
#[doc(hidden)]
pub fn name_console(launch: Option<&Launch>) {
    logging::to_console(&match launch.and_then(|launch| launch.rank) {
        Some(rank) => format!("rank {rank}"),
        None => "hpctrain".to_string(),
    });
}

/// Does the work of one rank, in a world of its own unless a launcher started it; returns the exit
/// code, which is that of the work if it succeeds. A wait for another rank ends the job after
/// `patience`, from the start to the end; zero waits for ever.
#[doc(hidden)]
pub fn run(
    launch: Option<&Launch>,
    patience: Duration,
    work: impl FnOnce(&Comm<Cpu>) -> Result<i32>,
) -> i32 {
    run_boxed(launch, patience, Box::new(work))
}

type Work<'a> = Box<dyn FnOnce(&Comm<Cpu>) -> Result<i32> + 'a>;

/// Not generic, so that it is compiled once.
fn run_boxed(launch: Option<&Launch>, patience: Duration, work: Work<'_>) -> i32 {
    if launch.is_some_and(|launch| launch.meeting.is_some()) {
        // Ranks do not outlive the program that has started them; a system that refuses this loses
        // no more than that.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
    }
    let started = match launch.map(|launch| &launch.meeting) {
        None => Ok(comm::single()),
        Some(None) => comm::start_mpi_within(Algorithm::HalvingDoubling, patience),
        Some(Some(meeting)) => comm::start_tcp(meeting, Algorithm::HalvingDoubling),
    };
    let comm: Comm<Cpu> = match started {
        Ok(comm) => comm,
        Err(e) => return fail(&e),
    };
    abort_on_panic(&comm);
    let watched = if patience.is_zero() { Ok(()) } else { comm.wait_at_most(patience) };
    let code = match watched.and_then(|()| work(&comm)) {
        Ok(code) => code,
        Err(e) if e.is_shared() || comm.size() == 1 => {
            if comm.rank() == 0 {
                fail(&e);
            }
            e.exit_code()
        }
        Err(e) => {
            // The others wait for this rank and would for ever. The console has its name, if the
            // launcher told it.
            let is_named = launch.is_some_and(|launch| launch.rank.is_some());
            let e = if is_named { e } else { e.on_rank(comm.rank()) };
            log::error!("{e}");
            comm.abort(e.exit_code())
        }
    };
    comm.shutdown();
    code
}

/// Prints an error; returns its exit code.
#[doc(hidden)]
pub fn fail(error: &Error) -> i32 {
    say_error(format_args!("error: {error}"));
    error.exit_code()
}

/// From now on a panic on any thread of this process, which has no ranks, ends it with exit code 1
/// and a message: a thread that others wait for would be missed by nobody.
pub fn exit_on_panic(process: &'static str) {
    std::panic::set_hook(Box::new(move |panic| {
        if panics::is_caught() {
            return;
        }
        say_error(format_args!("error: {process}: internal error, please report it: {panic}"));
        std::process::exit(1)
    }));
}

/// A panic on any thread of a rank ends the whole job, with the rank named.
fn abort_on_panic(comm: &Comm<Cpu>) {
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

    /// The variable that makes the test play the process that panics.
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
