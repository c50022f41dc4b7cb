//! The time limit of a job, and the time at which it must begin to end.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::config::Time;
use crate::error::{Error, Result};

/// Environment variable in which Slurm tells when it will end the job, in seconds since 1970.
const SLURM_END: &str = "SLURM_JOB_END_TIME";

/// Margin before the deadline: messages, slow I/O, process exit.
const RESERVE: Duration = Duration::from_secs(5);

/// Assumed bytes a second of a checkpoint's write, until one is measured.
const SLOW_DISK: f64 = 100e6;

/// The time of a job.
#[derive(Debug, Clone)]
pub struct Budget {
    end: Option<Instant>,
    /// The longest step so far.
    step: Duration,
    /// The longest save so far, or a guess.
    save: Duration,
}

impl Budget {
    /// The time that the configuration gives a job that began at `started`, or else Slurm. `saved` is the bytes of a
    /// checkpoint.
    pub fn new(limit: Option<Time>, started: Instant, saved: u64) -> Self {
        let end = match limit {
            Some(Time(limit)) if limit.is_zero() => None,
            Some(Time(limit)) => started.checked_add(limit),
            None => std::env::var(SLURM_END).ok().and_then(|text| slurm_end(&text)),
        };
        Self { end, step: Duration::ZERO, save: Duration::from_secs_f64(saved as f64 / SLOW_DISK) }
    }

    /// A step took so long.
    pub fn stepped(&mut self, took: Duration) {
        self.step = self.step.max(took);
    }

    /// A save took so long. The first that is measured replaces the guess.
    pub fn saved(&mut self, took: Duration, first: bool) {
        self.save = if first { took } else { self.save.max(took) };
    }

    /// Time needed to end: the step under way and one more; a save under way and the last one, and once more as long
    /// for reading back and removing older checkpoints.
    fn needed(&self) -> Duration {
        2 * self.step + 3 * self.save + RESERVE
    }

    /// Whether it is time to save and end.
    pub fn is_up(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() + self.needed() >= end)
    }

    /// A job that must end before its first step would be started again for ever.
    ///
    /// # Errors
    /// Its time is up.
    pub fn check(&self) -> Result<()> {
        match self.told() {
            Some(told) if self.is_up() => Err(Error::input(format!("no time to train: {told}"))
                .hint("raise run.time_limit, or the time limit of the Slurm job")),
            _ => Ok(()),
        }
    }

    /// For people: the time left, and the part of it that is reserved for the end.
    pub fn told(&self) -> Option<String> {
        let left = self.end?.saturating_duration_since(Instant::now());
        let seconds = |span: Duration| humantime::format_duration(Duration::from_secs(span.as_secs())).to_string();
        Some(format!("{} left, of which the end takes {}", seconds(left), seconds(self.needed())))
    }
}

/// The moment that Slurm names.
fn slurm_end(text: &str) -> Option<Instant> {
    let end = UNIX_EPOCH + Duration::from_secs(text.parse().ok()?);
    let left = end.duration_since(SystemTime::now()).unwrap_or_default();
    Instant::now().checked_add(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(seconds: u64) -> Budget {
        Budget::new(Some(Time(Duration::from_secs(seconds))), Instant::now(), 1_000_000_000)
    }

    #[test]
    fn the_end_begins_early_enough() {
        // 35 seconds are needed: three times a save of 1 GB at 100 MB/s, and the reserve.
        assert!(!of(40).is_up() && of(34).is_up());
        assert!(of(40).check().is_ok());
        assert!(
            of(34).check().unwrap_err().to_string().contains("no time to train: 33s left, of which the end takes 35s")
        );
        let mut slow = of(65);
        slow.stepped(Duration::from_secs(20));
        slow.stepped(Duration::from_secs(1));
        assert!(slow.is_up());
        slow.saved(Duration::from_secs(1), true);
        assert!(!slow.is_up());
        slow.saved(Duration::from_secs(8), false);
        slow.saved(Duration::from_secs(2), false);
        assert!(slow.is_up() && slow.told().unwrap().contains("takes 1m 9s"), "{:?}", slow.told());
        // Zero is no limit.
        assert!(!of(0).is_up() && of(0).told().is_none());
    }

    #[test]
    fn slurm_says_when() {
        let in_an_hour = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() + 3600;
        let left = slurm_end(&in_an_hour.to_string()).unwrap().duration_since(Instant::now());
        assert!(left > Duration::from_secs(3590) && left <= Duration::from_secs(3600));
        assert_eq!(slurm_end("soon"), None);
        assert!(slurm_end("1").is_some());
    }
}
