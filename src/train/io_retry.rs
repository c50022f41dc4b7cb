//! File-system failures that a run tolerates for a while.
//!
//! Training goes on and writes are retried while the last good checkpoint is younger than
//! `checkpoint.io_retry_seconds`. A run that has no checkpoint yet has nothing to lose, and ends at
//! once.

use std::time::{Duration, Instant};

use hpctrain_base::error::{Error, Kind, Result};

/// Pause before the first retry of a save. Each pause is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Time between two warnings about records, which are retried with every step.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// The state of records and checkpoints that could not be written.
pub struct IoFailureTolerance {
    tolerate: Duration,
    /// Time of the last good checkpoint, if there is one.
    saved: Option<Instant>,
    /// The ongoing failure to write a checkpoint, and when it began.
    save: Option<(Instant, Error)>,
    /// The ongoing failure to write a record, and when it began.
    record: Option<(Instant, Error)>,
    warned: Option<Instant>,
    pause: Duration,
}

/// Returns when an ongoing failure began, or now if there is none.
fn since(failure: &Option<(Instant, Error)>) -> Instant {
    failure.as_ref().map_or_else(Instant::now, |(since, _)| *since)
}

/// Returns true if a run may tolerate the error: a file that cannot be written, or read back.
pub fn is_outage(error: &Error) -> bool {
    matches!(error.kind(), Kind::Io | Kind::Damaged)
}

impl IoFailureTolerance {
    /// Creates the state of a run that tolerates failures until its last checkpoint is `tolerate`
    /// seconds old. `has_checkpoint` is true if the run began with one.
    pub fn new(tolerate: u64, has_checkpoint: bool) -> Self {
        let tolerate = Duration::from_secs(tolerate);
        let saved = has_checkpoint.then(Instant::now);
        Self { tolerate, saved, save: None, record: None, warned: None, pause: FIRST_PAUSE }
    }

    /// Notes that a checkpoint was published.
    pub fn published(&mut self) {
        (self.saved, self.save, self.pause) = (Some(Instant::now()), None, FIRST_PAUSE);
    }

    /// Notes that a checkpoint could not be written.
    ///
    /// # Errors
    /// Returns the error if the run does not tolerate it any longer.
    pub fn save_refused(&mut self, error: Error) -> Result<()> {
        self.check_tolerated(&error)?;
        log::warn!(
            "{}; training goes on, and saves again in {} s",
            error.message(),
            self.pause.as_secs()
        );
        self.save = Some((since(&self.save), error));
        Ok(())
    }

    /// Returns the pause before the next attempt to save, longer each time.
    pub fn pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (2 * pause).min(LONGEST_PAUSE);
        pause
    }

    /// Notes that a record was written, or that it could not be and is kept in memory.
    ///
    /// # Errors
    /// Returns the error if it is not one of the file system, or if the run does not tolerate it
    /// any longer.
    pub fn record(&mut self, written: Result<()>) -> Result<()> {
        let Err(error) = written else {
            if let Some((since, _)) = self.record.take() {
                log::warn!("records are written again, after {} s", since.elapsed().as_secs());
            }
            return Ok(());
        };
        if !is_outage(&error) {
            return Err(error);
        }
        self.check_tolerated(&error)?;
        if self.warned.is_none_or(|at| at.elapsed() >= WARNING_INTERVAL) {
            log::warn!("{}; training goes on, and keeps the record in memory", error.message());
            self.warned = Some(Instant::now());
        }
        self.record = Some((since(&self.record), error));
        Ok(())
    }

    /// Checks a write at the end of a run, which is not retried: another start may do it.
    ///
    /// # Errors
    /// Returns the given error. One of the file system becomes an outage if there is a checkpoint
    /// to resume from.
    pub fn at_end(&self, written: Result<()>) -> Result<()> {
        written.map_err(|error| match self.saved {
            Some(saved) if is_outage(&error) => error.outage(saved.elapsed()),
            _ => error,
        })
    }

    /// Notes the result of a check of the lease: a lease that cannot be read is not lost.
    ///
    /// # Errors
    /// Returns an error if the lease is lost, or if the run does not tolerate a failed read any
    /// longer.
    pub fn lease_checked(&mut self, checked: Result<()>) -> Result<()> {
        if checked.is_ok() { Ok(()) } else { self.record(checked) }
    }

    /// Stops retrying, because the run was asked to end.
    ///
    /// # Errors
    /// Returns the ongoing failure, if there is one.
    pub fn give_up(&self) -> Result<()> {
        match self.save.as_ref().or(self.record.as_ref()) {
            Some((_, error)) => Err(error
                .clone()
                .outage(self.saved.map_or(Duration::ZERO, |saved| saved.elapsed()))),
            None => Ok(()),
        }
    }

    fn check_tolerated(&self, error: &Error) -> Result<()> {
        let Some(saved) = self.saved else { return Err(error.clone()) };
        let age = saved.elapsed();
        if age < self.tolerate {
            return Ok(());
        }
        Err(error.clone().outage(age))
    }

    /// Returns the ongoing failure for the progress line, if there is one.
    pub fn ongoing_failure(&self) -> Option<String> {
        let describe = |what: &str, failure: &Option<(Instant, Error)>| {
            let (since, error) = failure.as_ref()?;
            let cause = error.message().rsplit(": ").next().unwrap_or_default().to_string();
            Some(format!("{what} since {} s: {cause}", since.elapsed().as_secs()))
        };
        describe("not saved", &self.save).or_else(|| describe("not recorded", &self.record))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> Error {
        Error::io("write", std::path::Path::new("x"), "No space left on device (os error 28)")
    }

    #[test]
    fn a_run_with_a_checkpoint_goes_on_for_a_while() {
        let mut outages = IoFailureTolerance::new(60, true);
        assert_eq!(outages.ongoing_failure(), None);
        outages.save_refused(full()).unwrap();
        assert_eq!(
            outages.ongoing_failure().unwrap(),
            "not saved since 0 s: No space left on device (os error 28)"
        );
        let pauses: Vec<u64> = (0..8).map(|_| outages.pause().as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        outages.published();
        assert_eq!((outages.ongoing_failure(), outages.pause().as_secs()), (None, 1));
        outages.record(Err(full())).unwrap();
        assert!(outages.ongoing_failure().unwrap().starts_with("not recorded since 0 s"));
        outages.record(Ok(())).unwrap();
        assert_eq!(outages.ongoing_failure(), None);
    }

    #[test]
    fn it_ends_at_once_when_it_is_asked_to() {
        let mut outages = IoFailureTolerance::new(600, true);
        outages.give_up().unwrap();
        outages.save_refused(full()).unwrap();
        assert_eq!(outages.give_up().unwrap_err().exit_code(), 74);
        outages.published();
        outages.give_up().unwrap();
        outages.record(Err(full())).unwrap();
        assert_eq!(outages.give_up().unwrap_err().exit_code(), 74);
    }

    #[test]
    fn it_ends_when_its_last_checkpoint_is_old_or_there_is_none() {
        let error = IoFailureTolerance::new(0, true).save_refused(full()).unwrap_err();
        assert_eq!((error.kind(), error.exit_code()), (Kind::Outage, 74));
        assert!(error.to_string().contains("No space left"), "{error}");
        let error = IoFailureTolerance::new(60, false).record(Err(full())).unwrap_err();
        assert_eq!((error.kind(), error.exit_code()), (Kind::Io, 2));
        let broken = Error::internal("x");
        assert_eq!(IoFailureTolerance::new(60, true).record(Err(broken.clone())), Err(broken));
    }
}
