//! `hpctrain supervise`: restarts a job until its run has finished.
//!
//! A job that saved and asks to be resumed, that crashed, or whose file system failed is restarted
//! with `--resume auto`; a job with invalid input is not. Starts that save no new checkpoint count
//! against a budget, so that a job which always fails ends; with in-memory checkpoints those that
//! take no new step.
//!
//! With a list of hosts, each start uses the hosts that answer, and as many ranks as the layout
//! allows on them (elastic restart).

mod elastic_hosts;
mod failure_cause;
mod hosts;
mod job;
mod restart_log;
mod run_file;

use std::path::Path;
use std::time::{Duration, Instant};

pub use elastic_hosts::{ElasticHosts, HOST_PLACEHOLDER, launcher_of};
pub use hosts::{
    AGENT, HOSTS_PLACEHOLDER, HostList, HostSlots, Hosts, RANKS_PLACEHOLDER, answering,
};
use job::{Ended, Job};
use restart_log::RestartLog;

use crate::error::Result;
use crate::run_dir::REQUEUE;
use crate::telemetry::restarts::Restart;
use crate::{signals, telemetry};

/// The pause before the first restart; each start without a new checkpoint doubles it.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The exit code of a run that ended because of the file system.
const OUTAGE: i32 = 74;

/// The longest pause before a restart.
const MAX_PAUSE: Duration = Duration::from_secs(120);

/// A job to be supervised.
#[derive(Debug, Clone)]
pub struct SuperviseOptions {
    /// The command: a launcher with its arguments, or this program.
    pub command: Vec<String>,
    /// The number of consecutive starts, besides the first, that may save no new checkpoint.
    pub retries: u32,
    /// Whether a job that saved and asks to be resumed is left to the caller.
    pub requeue: bool,
    /// The hosts that it may use, if the command has placeholders for them.
    pub hosts: Option<Hosts>,
}

/// Starts the job until it has finished successfully, cannot be resumed, or a signal comes; returns
/// the exit code of the last start.
///
/// # Errors
/// Returns an error if the command cannot be started.
pub fn supervise(request: &SuperviseOptions) -> Result<i32> {
    signals::record_signals()?;
    let place = run_file::run_file_of_this_process()?;
    let ended = starts(request, &place);
    // The file does not exist if no trainer has written it.
    let _ = std::fs::remove_file(&place);
    ended
}

/// Starts the job repeatedly. Trainers write their run's directory to the file `place`.
fn starts(request: &SuperviseOptions, place: &Path) -> Result<i32> {
    let mut records = RestartLog::default();
    let mut run = None;
    let mut starts_without_checkpoint = 0;
    let mut pause = FIRST_PAUSE;
    let mut outage = false;
    loop {
        let before = records.reached(run.as_deref());
        let mut command = resuming(&request.command, run.as_deref());
        let allocation = request.hosts.as_ref().map(Hosts::allocate).transpose();
        if let Ok(Some(allocation)) = &allocation {
            command = allocation.fill(&command);
        }
        // A file of the start before must not be taken for that of this one.
        let _ = std::fs::remove_file(place);
        let started = (Instant::now(), telemetry::unix_time());
        let agent = request.hosts.as_ref().and_then(Hosts::agent_name);
        let ended = match &allocation {
            Ok(_) => {
                Job::start(&command, place, agent)?.wait(|| run_file::read_run_directory(place))?
            }
            Err(why) => Ended::before_start(why),
        };
        if let Some(orphan) = find_orphan(&ended)? {
            orphan.wait_for_end();
            if signals::last_signal().is_some() {
                return Ok(REQUEUE);
            }
            continue;
        }
        run = run_file::read_run_directory(place).or(run);
        let gained = records.reached(run.as_deref()) > before;
        (starts_without_checkpoint, pause) =
            if gained { (0, FIRST_PAUSE) } else { (starts_without_checkpoint + 1, pause) };
        // After a failure of the file system the next start may fail with an input that cannot be
        // read, for the same reason.
        outage = ended.code == OUTAGE || outage && ended.code == 2;
        let code = if outage { OUTAGE } else { ended.code };
        let may_restart =
            is_retryable(code) && !ended.asked && !(request.requeue && code == REQUEUE);
        let restarts = may_restart && starts_without_checkpoint <= request.retries;
        let restart = Restart {
            seconds: started.0.elapsed().as_secs_f64(),
            time: started.1,
            pause_seconds: if restarts { pause.as_secs_f64() } else { 0.0 },
            hosts: allocation.ok().flatten().map(|allocation| allocation.hosts),
            ..ended.restart()
        };
        records.add(run.as_deref(), restart).unwrap_or_else(|e| log::warn!("{e}"));
        let mut asked = ended.asked;
        if restarts {
            log::warn!("{}; restarting in {} s", ended.reason(), pause.as_secs());
            asked = job::sleep(pause);
            pause = if gained { pause } else { (2 * pause).min(MAX_PAUSE) };
        } else if may_restart {
            log::error!(
                "{starts_without_checkpoint} consecutive starts saved no new checkpoint: giving up (--retries {})",
                request.retries
            );
        }
        if asked || !restarts {
            if let Some(run) = &run {
                restart_log::record_goodput(run).unwrap_or_else(|e| log::warn!("{e}"));
            }
            // A job that a signal has ended before its run has finished is to be requeued.
            return Ok(if asked && is_retryable(code) { REQUEUE } else { code });
        }
    }
}

/// Returns the job of a killed supervisor, if this start was refused because that job still trains
/// the run.
fn find_orphan(ended: &Ended) -> Result<Option<run_file::Orphan>> {
    let orphan = if ended.code == 2 { run_file::find_orphan(ended.reason())? } else { None };
    if let Some(orphan) = &orphan {
        log::warn!(
            "{} is being trained by a job whose supervisor (process {}) was killed: waiting for its end",
            orphan.run.display(),
            orphan.supervisor
        );
    }
    Ok(orphan)
}

/// Returns true if a job with this exit code may succeed when it is restarted: any code but that of
/// success and that of invalid input.
fn is_retryable(code: i32) -> bool {
    !matches!(code, 0 | 2)
}

/// Returns the command for the next start, which resumes the run if there is one.
fn resuming(command: &[String], run: Option<&Path>) -> Vec<String> {
    let Some(name) = run.and_then(|run| run.file_name()).and_then(|name| name.to_str()) else {
        return command.to_vec();
    };
    let mut words = Vec::with_capacity(command.len() + 4);
    let mut is_value = false;
    for word in command {
        // A checkpoint to resume from would make every start create a new run.
        let is_resume = word == "--resume";
        if !is_resume && !is_value && !word.starts_with("--resume=") {
            words.push(word.clone());
        }
        is_value = is_resume;
    }
    words.extend(["--resume", "auto", "--set"].map(String::from));
    words.push(format!("run.name={name}"));
    words
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn a_restart_resumes_the_run() {
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        let run = PathBuf::from("/x/runs/gpt-char-2");
        let plain = words("mpirun -np 2 hpctrain train");
        assert_eq!(resuming(&plain, None), plain);
        assert_eq!(
            resuming(&plain, Some(&run)),
            words("mpirun -np 2 hpctrain train --resume auto --set run.name=gpt-char-2")
        );
        for from in ["--resume auto", "--resume=auto", "--resume runs/x/checkpoints/best"] {
            let asked = words(&format!("hpctrain {from} --set run.steps=5"));
            let wanted =
                words("hpctrain --set run.steps=5 --resume auto --set run.name=gpt-char-2");
            assert_eq!(resuming(&asked, Some(&run)), wanted);
        }
    }

    #[test]
    fn invalid_input_is_not_retried() {
        assert_eq!(
            [0, 1, 2, 74, REQUEUE, 101, 134, 137].map(is_retryable),
            [false, true, false, true, true, true, true, true]
        );
    }
}
