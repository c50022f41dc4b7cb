//! Ranks that are killed or stopped at random moments.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::options::ChaosOptions;
use super::trainer::Trainer;
use crate::comm::membership::{Membership, MembershipDirectory};
use crate::config::Config;
use crate::error::Result;
use crate::random::Stream;
use crate::telemetry::elastic;
use crate::telemetry::unix_time;

/// The part of the losses at which a rank is stopped instead of killed.
const STOPS: f64 = 0.25;

/// The part of the losses at which a second rank is killed while the others recover.
const SECOND_LOSSES: f64 = 0.25;

/// The longest time between the two.
const SECOND_DELAY: Duration = Duration::from_millis(500);

/// The time that processes have to join after the last loss.
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// A rank that was killed or stopped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Strike {
    /// When, in seconds since 1970.
    pub time: f64,
    /// Its process.
    pub pid: u32,
    /// Whether it was stopped.
    pub is_stop: bool,
}

/// Random numbers from 0 to 1.
struct Dice {
    stream: Stream,
    next: u64,
}

impl Dice {
    fn new() -> Self {
        Self { stream: Stream::new(unix_time().to_bits()), next: 0 }
    }

    fn throw(&mut self) -> f64 {
        self.next += 1;
        self.stream.uniform(self.next)
    }
}

/// Kills and stops ranks of a job for the time that `options` give, and waits until processes have
/// joined for the last of them. Returns the losses.
///
/// # Errors
/// Returns an error if the job ends, hangs or cannot be observed.
pub fn disturb(job: &mut Trainer, options: &ChaosOptions, config: &Config) -> Result<Vec<Strike>> {
    while job.poll()? == 0 {}
    let mut losses = Losses { dice: Dice::new(), strikes: vec![], least: config.elastic.min_ranks };
    let began = Instant::now();
    let mut next = began + options.every.mul_f64(losses.dice.throw());
    while began.elapsed() < options.time {
        let step = job.poll()?;
        if Instant::now() >= next && losses.strike(job, step)? {
            next = Instant::now() + losses.pause(options.every);
        }
    }
    let ended = Instant::now();
    let is_complete = |membership: &Membership| membership.members.len() == options.ranks;
    while ended.elapsed() < JOIN_TIMEOUT {
        let step = job.poll()?;
        let trains = losses.trains(job, step)?;
        if trains.is_some_and(|now| !config.elastic.rejoin || is_complete(&now)) {
            break;
        }
    }
    Ok(losses.strikes)
}

/// The losses so far.
struct Losses {
    dice: Dice,
    strikes: Vec<Strike>,
    /// The number of ranks that must be left.
    least: usize,
}

impl Losses {
    /// Returns a random pause around `mean`.
    fn pause(&mut self, mean: Duration) -> Duration {
        mean.mul_f64(0.5 + self.dice.throw())
    }

    /// Returns the membership if its ranks have finished a step, of which `step` is the last, and
    /// none of them was killed or stopped.
    fn trains(&self, job: &Trainer, step: u64) -> Result<Option<Membership>> {
        let Some(membership) = MembershipDirectory::of_run(job.run()).newest()? else {
            return Ok(None);
        };
        let changes = elastic::read(job.run())?;
        let has_continued = match changes.last() {
            Some(last) => last.membership == membership.number && step > last.resumed,
            None => membership.number == 1,
        };
        let struck: BTreeSet<u32> = self.strikes.iter().map(|strike| strike.pid).collect();
        let is_whole = membership.members.iter().all(|member| !struck.contains(&member.pid));
        Ok((has_continued && is_whole).then_some(membership))
    }

    /// Kills or stops a rank, and sometimes kills another one soon after. Returns false if the job
    /// cannot lose a rank now.
    fn strike(&mut self, job: &Trainer, step: u64) -> Result<bool> {
        let Some(membership) = self.trains(job, step)? else { return Ok(false) };
        let mut pids: Vec<u32> = membership.members.iter().map(|member| member.pid).collect();
        if pids.len() <= self.least.max(1) {
            return Ok(false);
        }
        let is_stop = self.dice.throw() < STOPS;
        self.send(&mut pids, is_stop);
        if self.dice.throw() < SECOND_LOSSES && pids.len() > self.least.max(1) {
            std::thread::sleep(SECOND_DELAY.mul_f64(self.dice.throw()));
            self.send(&mut pids, false);
        }
        Ok(true)
    }

    /// Kills or stops one of the processes.
    fn send(&mut self, pids: &mut Vec<u32>, is_stop: bool) {
        let index = (self.dice.throw() * pids.len() as f64) as usize;
        let pid = pids.swap_remove(index);
        let signal = if is_stop { Signal::STOP } else { Signal::KILL };
        let Some(process) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return };
        if kill_process(process, signal).is_ok() {
            self.strikes.push(Strike { time: unix_time(), pid, is_stop });
        }
    }
}
