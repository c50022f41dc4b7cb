//! Refusals of the file system that a run survives for a while.
//!
//! Training goes on while the last good checkpoint is younger than `checkpoint.io_retry_seconds`:
//! what was refused is tried again. A run that has no checkpoint yet has nothing to lose, and ends
//! at once.

use std::time::{Duration, Instant};

use hpctrain_base::error::{Error, Kind, Result};

/// Pause before the first further attempt to save; each is twice as long as the one before.
const FIRST: Duration = Duration::from_secs(1);

/// The longest pause.
const LONGEST: Duration = Duration::from_secs(60);

/// Time between two warnings about records, which are tried again with every step.
const QUIET: Duration = Duration::from_secs(60);

/// Records and checkpoints that could not be written.
pub struct IoFailureTolerance {
    tolerate: Duration,
    /// Time of the last good checkpoint, if there is one.
    saved: Option<Instant>,
    /// The refusal of a checkpoint, and that of a record, since when.
    save: Option<(Instant, Error)>,
    record: Option<(Instant, Error)>,
    warned: Option<Instant>,
    pause: Duration,
}

/// The beginning of a refusal that lasts, or begins now.
fn since(refusal: &Option<(Instant, Error)>) -> Instant {
    refusal.as_ref().map_or_else(Instant::now, |(since, _)| *since)
}

/// Whether a run may survive an error: files that cannot be written, or read back.
pub fn is_outage(error: &Error) -> bool {
    matches!(error.kind(), Kind::Io | Kind::Damaged)
}

impl IoFailureTolerance {
    /// Of a run that tolerates them for so many seconds after a checkpoint, and began with one or
    /// not.
    pub fn new(tolerate: u64, has_checkpoint: bool) -> Self {
        let tolerate = Duration::from_secs(tolerate);
        let saved = has_checkpoint.then(Instant::now);
        Self { tolerate, saved, save: None, record: None, warned: None, pause: FIRST }
    }

    /// A checkpoint was published.
    pub fn published(&mut self) {
        (self.saved, self.save, self.pause) = (Some(Instant::now()), None, FIRST);
    }

    /// A checkpoint was refused.
    ///
    /// # Errors
    /// The run is to end.
    pub fn save_refused(&mut self, error: Error) -> Result<()> {
        self.bear(&error)?;
        log::warn!(
            "{}; training goes on, and saves again in {} s",
            error.message(),
            self.pause.as_secs()
        );
        self.save = Some((since(&self.save), error));
        Ok(())
    }

    /// The pause before the next attempt to save, longer each time.
    pub fn pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (2 * pause).min(LONGEST);
        pause
    }

    /// A record was written, or refused: then it is kept in memory.
    ///
    /// # Errors
    /// The run is to end; or another error than one of the file system.
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
        self.bear(&error)?;
        if self.warned.is_none_or(|at| at.elapsed() >= QUIET) {
            log::warn!("{}; training goes on, and keeps the record in memory", error.message());
            self.warned = Some(Instant::now());
        }
        self.record = Some((since(&self.record), error));
        Ok(())
    }

    /// Passes what is written at the end of a run, which is not tried again: another start may do
    /// it.
    ///
    /// # Errors
    /// As given; one of the file system is an outage, if there is a checkpoint to go on from.
    pub fn at_end(&self, written: Result<()>) -> Result<()> {
        written.map_err(|error| match self.saved {
            Some(saved) if is_outage(&error) => error.outlasted(saved.elapsed()),
            _ => error,
        })
    }

    /// Passes a look at a lease: one that cannot be read is not lost.
    ///
    /// # Errors
    /// The lease is lost, or the run is to end.
    pub fn held(&mut self, checked: Result<()>) -> Result<()> {
        if checked.is_ok() { Ok(()) } else { self.record(checked) }
    }

    /// Ends the wait for a file system that refuses, as the run was asked to end: nothing is tried
    /// again.
    ///
    /// # Errors
    /// Returns the refusal that lasts, if one does.
    pub fn give_up(&self) -> Result<()> {
        match self.save.as_ref().or(self.record.as_ref()) {
            Some((_, error)) => Err(error
                .clone()
                .outlasted(self.saved.map_or(Duration::ZERO, |saved| saved.elapsed()))),
            None => Ok(()),
        }
    }

    fn bear(&self, error: &Error) -> Result<()> {
        let Some(saved) = self.saved else { return Err(error.clone()) };
        let age = saved.elapsed();
        if age < self.tolerate {
            return Ok(());
        }
        Err(error.clone().outlasted(age))
    }

    /// For the progress line: the refusal that lasts.
    pub fn told(&self) -> Option<String> {
        let told = |what: &str, of: &Option<(Instant, Error)>| {
            let (since, error) = of.as_ref()?;
            let cause = error.message().rsplit(": ").next().unwrap_or_default().to_string();
            Some(format!("{what} since {} s: {cause}", since.elapsed().as_secs()))
        };
        told("not saved", &self.save).or_else(|| told("not recorded", &self.record))
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
        assert_eq!(outages.told(), None);
        outages.save_refused(full()).unwrap();
        assert_eq!(
            outages.told().unwrap(),
            "not saved since 0 s: No space left on device (os error 28)"
        );
        let pauses: Vec<u64> = (0..8).map(|_| outages.pause().as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        outages.published();
        assert_eq!((outages.told(), outages.pause().as_secs()), (None, 1));
        outages.record(Err(full())).unwrap();
        assert!(outages.told().unwrap().starts_with("not recorded since 0 s"));
        outages.record(Ok(())).unwrap();
        assert_eq!(outages.told(), None);
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
