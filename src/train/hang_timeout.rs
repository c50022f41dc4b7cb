//! `comm.timeout = "auto"`: the time that a rank may wait for the others, from measured times.
//!
//! A rank waits in a collective for as long as the slowest rank takes to reach it. That is at most
//! the longest step, evaluation or save, which each rank measures and sends with its control flags
//! in every step. All ranks take the longest of all: 20 times that, at least 120 seconds. While
//! something has not been measured yet, a wait may take 600 seconds at least: before the first
//! steps, which include compilation, in the first evaluation and the first save until it is written,
//! in a save that waits for the one before, and at the end of the run.

use std::time::Duration;

use hpctrain_config::{Comm, OrAuto};

/// The least timeout once steps are measured.
const LEAST: Duration = Duration::from_secs(120);

/// The timeout as a multiple of the longest step, evaluation or save.
const FACTOR: u32 = 20;

/// The number of rounds at the start that are not measured: they load kernels and fill caches.
const WARM_UP: u64 = 2;

/// A part of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// A round of steps.
    Steps,
    /// An evaluation.
    Evaluation,
    /// A save.
    Save,
    /// A save that first waits for the end of the one before.
    BusySave,
    /// All that comes after the last step.
    End,
}

/// The watchdog's timeout of one rank.
#[derive(Debug)]
pub struct HangTimeout {
    /// The timeout while nothing is measured.
    unmeasured: Duration,
    /// The least timeout once steps are measured; `None` if the timeout is fixed.
    least: Option<Duration>,
    phase: Phase,
    rounds: u64,
    has_evaluated: bool,
    has_saved: bool,
    /// Whether a checkpoint is being written while training goes on.
    is_writing: bool,
    /// Whether a checkpoint was published.
    has_published: bool,
    /// The longest step, evaluation or save: of this rank, or of all as far as they have sent theirs.
    longest: Duration,
    /// The timeout that is set.
    current: Duration,
}

impl HangTimeout {
    /// Creates the timeout of a rank that starts. With `has_hooks`, which may take any time, it
    /// never falls below that of the start.
    pub fn new(comm: &Comm, has_hooks: bool) -> Self {
        let unmeasured = comm.unmeasured_timeout();
        let least = if has_hooks { unmeasured } else { LEAST };
        Self {
            unmeasured,
            least: (comm.timeout == OrAuto::Auto).then_some(least),
            phase: Phase::Steps,
            rounds: 0,
            has_evaluated: false,
            has_saved: false,
            is_writing: false,
            has_published: false,
            longest: Duration::ZERO,
            current: unmeasured,
        }
    }

    /// Notes that a part of the run took this long on this rank.
    pub fn note(&mut self, phase: Phase, took: Duration) {
        match phase {
            Phase::Steps => self.rounds += 1,
            Phase::Evaluation => self.has_evaluated = true,
            Phase::Save | Phase::BusySave => self.has_saved = true,
            Phase::End => {}
        }
        if phase != Phase::Steps || self.rounds > WARM_UP {
            self.longest = self.longest.max(took);
        }
    }

    /// Notes whether a checkpoint is being written while training goes on.
    pub fn note_writing(&mut self, is_writing: bool) {
        self.is_writing = is_writing;
    }

    /// Notes that a checkpoint was published.
    pub fn note_published(&mut self) {
        self.has_published = true;
    }

    /// Notes the longest part that another rank has measured.
    pub fn note_of_others(&mut self, longest: Duration) {
        self.longest = self.longest.max(longest);
    }

    /// Returns the longest step, evaluation or save so far.
    pub fn longest(&self) -> Duration {
        self.longest
    }

    /// Enters a part of the run. Returns the timeout for it if it is another than before. The end
    /// of a run is not left again.
    pub fn enter(&mut self, phase: Phase) -> Option<Duration> {
        if self.phase != Phase::End {
            self.phase = phase;
        }
        let timeout = self.timeout();
        (std::mem::replace(&mut self.current, timeout) != timeout).then_some(timeout)
    }

    /// Returns the timeout in the present part of the run.
    fn timeout(&self) -> Duration {
        let Some(least) = self.least else { return self.unmeasured };
        // The first save may slow the steps beside it, or ranks that share its file system.
        let is_first_save = self.is_writing && !self.has_published;
        let is_measured = self.rounds > WARM_UP
            && !is_first_save
            && match self.phase {
                Phase::Steps => true,
                Phase::Evaluation => self.has_evaluated,
                Phase::Save => self.has_saved,
                Phase::BusySave | Phase::End => false,
            };
        let derived = self.longest.saturating_mul(FACTOR).max(least);
        if is_measured { derived } else { derived.max(self.unmeasured) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn auto(has_hooks: bool) -> HangTimeout {
        HangTimeout::new(&Comm::default(), has_hooks)
    }

    /// Takes a round of steps and returns the timeout if it changes.
    fn round(timeout: &mut HangTimeout, took: u64) -> Option<Duration> {
        timeout.note(Phase::Steps, seconds(took));
        timeout.enter(Phase::Steps)
    }

    /// Takes three short rounds.
    fn three(timeout: &mut HangTimeout) {
        (0..3).for_each(|_| timeout.note(Phase::Steps, seconds(1)));
        timeout.enter(Phase::Steps);
    }

    #[test]
    fn measured_steps_replace_the_timeout_of_the_start() {
        let mut timeout = auto(false);
        // The first rounds compile, and do not count.
        assert_eq!([100, 50].map(|took| round(&mut timeout, took)), [None, None]);
        assert_eq!(timeout.timeout(), seconds(600));
        assert_eq!(round(&mut timeout, 1), Some(seconds(120)));
        assert_eq!(round(&mut timeout, 6), None);
        assert_eq!(round(&mut timeout, 7), Some(seconds(140)));
        assert_eq!(round(&mut timeout, 1), None);
        // Another rank was slower.
        timeout.note_of_others(seconds(30));
        assert_eq!(round(&mut timeout, 1), Some(seconds(600)));
        timeout.note_of_others(seconds(40));
        assert_eq!(round(&mut timeout, 1), Some(seconds(800)));
        assert_eq!(timeout.longest(), seconds(40));
    }

    #[test]
    fn the_first_evaluation_and_save_keep_the_timeout_of_the_start() {
        for phase in [Phase::Evaluation, Phase::Save] {
            let mut timeout = auto(false);
            // Before the first steps.
            assert_eq!(timeout.enter(phase), None);
            timeout.note(phase, seconds(1));
            three(&mut timeout);
            assert_eq!(timeout.timeout(), seconds(120));
            assert_eq!(timeout.enter(phase), None);

            let mut timeout = auto(false);
            three(&mut timeout);
            assert_eq!(timeout.enter(phase), Some(seconds(600)));
            timeout.note(phase, seconds(10));
            assert_eq!(timeout.enter(Phase::Steps), Some(seconds(200)));
            assert_eq!(timeout.enter(phase), None);
            assert_eq!(timeout.enter(Phase::BusySave), Some(seconds(600)));
            assert_eq!(timeout.enter(Phase::Steps), Some(seconds(200)));
            assert_eq!(timeout.enter(Phase::End), Some(seconds(600)));
            // The last evaluation and save do not shorten the end.
            assert_eq!(timeout.enter(phase), None);
        }
    }

    #[test]
    fn the_first_save_lasts_until_it_is_written() {
        let mut timeout = auto(false);
        three(&mut timeout);
        assert_eq!(timeout.enter(Phase::Save), Some(seconds(600)));
        timeout.note(Phase::Save, seconds(1));
        timeout.note_writing(true);
        assert_eq!([1, 1].map(|took| round(&mut timeout, took)), [None, None]);
        // It fails, and is made again; another save is skipped meanwhile.
        timeout.note_writing(false);
        assert_eq!(round(&mut timeout, 1), Some(seconds(120)));
        timeout.note_writing(true);
        timeout.note_writing(true);
        assert_eq!([1, 1].map(|took| round(&mut timeout, took)), [Some(seconds(600)), None]);
        timeout.note_published();
        timeout.note_writing(false);
        assert_eq!(round(&mut timeout, 1), Some(seconds(120)));
        // The next one is measured.
        timeout.note_writing(true);
        assert_eq!(round(&mut timeout, 1), None);
    }

    #[test]
    fn hooks_and_given_numbers_keep_the_timeout() {
        let mut hooked = auto(true);
        assert!((0..9).all(|_| round(&mut hooked, 1).is_none()));
        assert_eq!(round(&mut hooked, 31), Some(seconds(620)));
        for given in [0, 5] {
            let comm = Comm { timeout: OrAuto::Number(given), ..Comm::default() };
            let mut fixed = HangTimeout::new(&comm, false);
            assert!((0..9).all(|_| round(&mut fixed, 100).is_none()));
            assert_eq!(fixed.enter(Phase::Evaluation), None);
            assert_eq!(fixed.timeout(), seconds(given));
        }
    }
}
