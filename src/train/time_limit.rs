//! The time limit of a job, and the time at which it must begin its shutdown.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hpctrain_base::error::{Error, Result};
use hpctrain_config::Time;

/// Environment variable in which Slurm gives the end time of the job, in seconds since 1970.
const SLURM_END: &str = "SLURM_JOB_END_TIME";

/// Margin before the deadline for messages, slow I/O and process exit.
const RESERVE: Duration = Duration::from_secs(5);

/// Assumed write speed of a checkpoint in bytes per second, until one is measured.
const ASSUMED_WRITE_SPEED: f64 = 100e6;

/// The time limit of a job.
#[derive(Debug, Clone)]
pub struct TimeLimit {
    end: Option<Instant>,
    /// Whether the end comes from Slurm.
    is_from_slurm: bool,
    /// The value of [`SLURM_END`], if it is not a time.
    malformed: Option<String>,
    /// The longest step so far.
    step: Duration,
    /// The longest save so far, or a guess.
    save: Duration,
}

impl TimeLimit {
    /// Creates the limit of a job that began at `started`, from the configuration or else from
    /// Slurm. `saved` is the size of a checkpoint in bytes.
    pub fn new(limit: Option<Time>, started: Instant, saved: u64) -> Self {
        let budget = Self {
            end: None,
            is_from_slurm: false,
            malformed: None,
            step: Duration::ZERO,
            save: Duration::from_secs_f64(saved as f64 / ASSUMED_WRITE_SPEED),
        };
        match limit {
            Some(Time(limit)) if limit.is_zero() => budget,
            Some(Time(limit)) => Self { end: started.checked_add(limit), ..budget },
            None => std::env::var_os(SLURM_END)
                .map_or(budget.clone(), |text| budget.ends(&text.to_string_lossy())),
        }
    }

    /// Sets the end to that of Slurm, in seconds since 1970.
    fn ends(self, text: &str) -> Self {
        match text.trim().parse() {
            Ok(seconds) => Self { end: slurm_end(seconds), is_from_slurm: true, ..self },
            Err(_) => Self { malformed: Some(text.to_owned()), ..self },
        }
    }

    /// Notes that a step took this long.
    pub fn note_step(&mut self, took: Duration) {
        self.step = self.step.max(took);
    }

    /// Notes that a save took this long. The first one that is measured replaces the guess.
    pub fn note_save(&mut self, took: Duration, first: bool) {
        self.save = if first { took } else { self.save.max(took) };
    }

    /// Returns the time needed to shut down: for the step under way and one more, the save under
    /// way and the last one, and as long again to verify it and remove older checkpoints.
    fn needed(&self) -> Duration {
        2 * self.step + 3 * self.save + RESERVE
    }

    /// Returns true if it is time to save and end.
    pub fn is_up(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() + self.needed() >= end)
    }

    /// Refuses a job that would have to end before its first step, and would be restarted for ever.
    ///
    /// # Errors
    /// Returns an error if the time is up, or if Slurm's end time cannot be parsed.
    pub fn check(&self) -> Result<()> {
        if let Some(text) = &self.malformed {
            return Err(Error::input(format!(
                "{SLURM_END}={text:?} is not a time in seconds since 1970"
            ))
            .hint(format!("unset {SLURM_END}, or set run.time_limit, with 0s for no limit")));
        }
        match self.describe() {
            Some(left) if self.is_up() && self.is_from_slurm => {
                Err(Error::input(format!("no time to train: {left}, by {SLURM_END}")).hint(format!(
                    "raise the time limit of the Slurm job; outside of one, unset {SLURM_END} or set run.time_limit=0s"
                )))
            }
            Some(left) if self.is_up() => {
                Err(Error::input(format!("no time to train: {left}")).hint("raise run.time_limit"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the remaining time and the part of it that the shutdown takes, for display, or
    /// `None` if there is no limit.
    pub fn describe(&self) -> Option<String> {
        let left = self.end?.saturating_duration_since(Instant::now());
        let seconds = |span: Duration| {
            humantime::format_duration(Duration::from_secs(span.as_secs())).to_string()
        };
        Some(format!(
            "{} left, of which the shutdown takes {}",
            seconds(left),
            seconds(self.needed())
        ))
    }
}

/// Converts Slurm's end time. Returns `None` if it is beyond the range of the clock.
fn slurm_end(seconds: u64) -> Option<Instant> {
    let end = UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?;
    let left = end.duration_since(SystemTime::now()).unwrap_or_default();
    Instant::now().checked_add(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(seconds: u64) -> TimeLimit {
        TimeLimit::new(Some(Time(Duration::from_secs(seconds))), Instant::now(), 1_000_000_000)
    }

    #[test]
    fn the_end_begins_early_enough() {
        // 35 seconds are needed: three times a save of 1 GB at 100 MB/s, and the reserve.
        assert!(!limit(40).is_up() && limit(34).is_up());
        assert!(limit(40).check().is_ok());
        assert!(
            limit(34)
                .check()
                .unwrap_err()
                .to_string()
                .contains("no time to train: 33s left, of which the shutdown takes 35s")
        );
        let mut slow = limit(65);
        slow.note_step(Duration::from_secs(20));
        slow.note_step(Duration::from_secs(1));
        assert!(slow.is_up());
        slow.note_save(Duration::from_secs(1), true);
        assert!(!slow.is_up());
        slow.note_save(Duration::from_secs(8), false);
        slow.note_save(Duration::from_secs(2), false);
        assert!(
            slow.is_up() && slow.describe().unwrap().contains("takes 1m 9s"),
            "{:?}",
            slow.describe()
        );
        // Zero means no limit.
        assert!(!limit(0).is_up() && limit(0).describe().is_none());
    }

    #[test]
    fn slurm_says_when() {
        let in_an_hour = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() + 3600;
        let left = slurm_end(in_an_hour).unwrap().duration_since(Instant::now());
        assert!(left > Duration::from_secs(3590) && left <= Duration::from_secs(3600));
        let error = |text: &str| limit(0).ends(text).check().err().map(|e| e.to_string());
        assert_eq!(error(&in_an_hour.to_string()), None);
        // Farther than any clock.
        assert_eq!(error("18446744073709551615"), None);
        assert_eq!(error("9223372036854775807"), None);
        let past = error("1").unwrap();
        assert!(
            past.contains("0s left") && past.contains("by SLURM_JOB_END_TIME\nhint: "),
            "{past}"
        );
        for text in ["soon", "", "-1", "1.5", "99999999999999999999"] {
            let error = error(text).unwrap();
            assert!(
                error.starts_with(&format!("SLURM_JOB_END_TIME={text:?} is not a time")),
                "{error}"
            );
        }
    }
}
