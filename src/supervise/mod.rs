//! `hpctrain supervise`: starts a job again until its run has ended.
//!
//! A job that saved and asks to go on, that crashed, or whose file system failed is started again
//! with `--resume auto`; one whose input is at fault is not. Starts that gained no checkpoint count
//! against a budget, so that a job which always fails ends.
//!
//! With a list of hosts each start has those that answer, and as many ranks as the layout allows on
//! them.

mod failure_cause;
mod hosts;
mod job;
mod place;
mod restart_log;

use std::path::Path;
use std::time::{Duration, Instant};

pub use hosts::{AGENT, HOSTS, HostList, Hosts, RANKS};
use job::{Ended, Job};
use restart_log::RestartLog;

use crate::error::Result;
use crate::run_dir::REQUEUE;
use crate::telemetry::restarts::Restart;
use crate::{signals, telemetry};

/// Pause before the first restart; each that gained nothing doubles it.
const FIRST: Duration = Duration::from_secs(1);

/// Exit code of a run that the file system has ended.
const OUTAGE: i32 = 74;

/// The longest pause.
const LONGEST: Duration = Duration::from_secs(120);

/// A job to be supervised.
#[derive(Debug, Clone)]
pub struct SuperviseOptions {
    /// The command: a launcher with its arguments, or this program.
    pub command: Vec<String>,
    /// Starts in a row that may gain no checkpoint, besides the first.
    pub retries: u32,
    /// Whether a job that saved, and asks to go on, is left to the caller.
    pub requeue: bool,
    /// The hosts that it may have, if the command has places for them.
    pub hosts: Option<Hosts>,
}

/// Starts the job until it has ended in good order, cannot go on, or a signal came; returns the
/// exit code of the last start.
///
/// # Errors
/// The command cannot be started.
pub fn supervise(request: &SuperviseOptions) -> Result<i32> {
    signals::listen()?;
    let place = place::of_this_process()?;
    let ended = starts(request, &place);
    // A job that never came to its run has not written it.
    let _ = std::fs::remove_file(&place);
    ended
}

/// All starts. Trainers write their run's directory to `place`.
fn starts(request: &SuperviseOptions, place: &Path) -> Result<i32> {
    let mut account = RestartLog::default();
    let mut run = None;
    let mut fruitless = 0;
    let mut pause = FIRST;
    let mut outage = false;
    loop {
        let before = account.checkpoint(run.as_deref());
        let mut command = again(&request.command, run.as_deref());
        let seats = request.hosts.as_ref().map(Hosts::seats).transpose();
        if let Ok(Some(seats)) = &seats {
            command = seats.fill(&command);
        }
        // Only what this start tells counts as a sign of its ranks.
        let _ = std::fs::remove_file(place);
        let started = (Instant::now(), telemetry::unix_time());
        let agent = request.hosts.as_ref().and_then(Hosts::agent_name);
        let ended = match &seats {
            Ok(_) => Job::start(&command, place, agent)?.wait(|| place::run_in(place))?,
            Err(why) => Ended::before_start(why),
        };
        if let Some(orphan) = orphan_of(&ended)? {
            orphan.outlast();
            if signals::came().is_some() {
                return Ok(REQUEUE);
            }
            continue;
        }
        run = place::run_in(place).or(run);
        let gained = account.checkpoint(run.as_deref()) > before;
        (fruitless, pause) = if gained { (0, FIRST) } else { (fruitless + 1, pause) };
        // A job that the file system has ended may find it refuse at the start as well, as an input
        // that cannot be read.
        outage = ended.code == OUTAGE || outage && ended.code == 2;
        let code = if outage { OUTAGE } else { ended.code };
        let may = is_worth_another(code) && !ended.asked && !(request.requeue && code == REQUEUE);
        let goes_on = may && fruitless <= request.retries;
        let restart = Restart {
            seconds: started.0.elapsed().as_secs_f64(),
            time: started.1,
            pause_seconds: if goes_on { pause.as_secs_f64() } else { 0.0 },
            hosts: seats.ok().flatten().map(|seats| seats.hosts),
            ..ended.restart()
        };
        account.add(run.as_deref(), restart).unwrap_or_else(|e| log::warn!("{e}"));
        let mut asked = ended.asked;
        if goes_on {
            log::warn!("{}; starting again in {} s", ended.told(), pause.as_secs());
            asked = job::sleep(pause);
            pause = if gained { pause } else { (2 * pause).min(LONGEST) };
        } else if may {
            log::error!(
                "{fruitless} starts in a row gained no checkpoint: giving up (--retries {})",
                request.retries
            );
        }
        if asked || !goes_on {
            if let Some(run) = &run {
                restart_log::sum_up(run).unwrap_or_else(|e| log::warn!("{e}"));
            }
            // One that was asked to end, and has more to do, is to be started again.
            return Ok(if asked && is_worth_another(code) { REQUEUE } else { code });
        }
    }
}

/// The job of a supervisor that was killed, if this start was refused because that job still trains
/// the run.
fn orphan_of(ended: &Ended) -> Result<Option<place::Orphan>> {
    let orphan = if ended.code == 2 { place::orphan_named_by(ended.told())? } else { None };
    if let Some(orphan) = &orphan {
        log::warn!(
            "{} is being trained by a job that has outlived its supervisor (process {}): waiting for its end",
            orphan.run.display(),
            orphan.supervisor
        );
    }
    Ok(orphan)
}

/// Whether a job with this exit code may fare better the next time: all but success and faults that
/// the user must mend.
fn is_worth_another(code: i32) -> bool {
    !matches!(code, 0 | 2)
}

/// The command for the next start: it goes on with the run, once there is one.
fn again(command: &[String], run: Option<&Path>) -> Vec<String> {
    let Some(name) = run.and_then(|run| run.file_name()).and_then(|name| name.to_str()) else {
        return command.to_vec();
    };
    let mut words = Vec::with_capacity(command.len() + 4);
    let mut is_value = false;
    for word in command {
        // A checkpoint that the first start began at would make a run of its own.
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
    fn a_start_goes_on_with_the_run() {
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        let run = PathBuf::from("/x/runs/gpt-char-2");
        let plain = words("mpirun -np 2 hpctrain train");
        assert_eq!(again(&plain, None), plain);
        assert_eq!(
            again(&plain, Some(&run)),
            words("mpirun -np 2 hpctrain train --resume auto --set run.name=gpt-char-2")
        );
        for from in ["--resume auto", "--resume=auto", "--resume runs/x/checkpoints/best"] {
            let asked = words(&format!("hpctrain {from} --set run.steps=5"));
            let wanted =
                words("hpctrain --set run.steps=5 --resume auto --set run.name=gpt-char-2");
            assert_eq!(again(&asked, Some(&run)), wanted);
        }
    }

    #[test]
    fn faults_of_the_input_end_it() {
        assert_eq!(
            [0, 1, 2, 74, REQUEUE, 101, 134, 137].map(is_worth_another),
            [false, true, false, true, true, true, true, true]
        );
    }
}
