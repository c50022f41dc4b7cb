//! Callbacks of a program during a run.

use std::ops::ControlFlow::{self, Break, Continue};
use std::path::Path;

use crate::evaluate::Metrics;
use hpctrain_base::error::{Error, Result};
use hpctrain_checkpoint::run_dir::RunOutcome;
use hpctrain_config::telemetry::metrics::Step;

/// Callbacks of a run. All do nothing unless written.
///
/// Every rank calls its own hooks, in the order given, at the same points of the run; so a hook may
/// itself ask for collectives if every rank has it. A step waits for its hooks.
///
/// A hook that returns [`Break`] asks the run to stop, with a reason. One rank that asks is enough:
/// all ranks hear of it with the step that follows, and end after that one, with a last evaluation
/// and checkpoint ([`RunOutcome::Stopped`]). Where replicas train apart, ranks meet at averages
/// only: hooks are called for each step, but all steps of a round after its average, and all ranks
/// hear of a request at the end of the next round.
///
/// An error ends the run on all ranks, likewise after the step that follows, and names the hook.
/// After an error of a hook, no hook of that rank is called any more but for [`Hook::end`].
///
/// ```
/// use std::ops::ControlFlow;
///
/// use hpctrain_base::error::Result;
/// use hpctrain_config::telemetry::metrics::Step;
/// use hpctrain_train::Hook;
///
/// /// Ends a run once its loss is low enough.
/// struct Enough(f64);
///
/// impl Hook for Enough {
///     fn step(&mut self, step: &Step) -> Result<ControlFlow<String>> {
///         Ok(match step.loss < self.0 {
///             true => ControlFlow::Break(format!("the loss is {:.3}", step.loss)),
///             false => ControlFlow::Continue(()),
///         })
///     }
/// }
/// ```
#[expect(unused_variables, reason = "names for those who write one")]
pub trait Hook {
    /// Its name in messages.
    fn name(&self) -> &str {
        std::any::type_name::<Self>()
    }

    /// A step was taken. It is told as in `metrics.jsonl`; losses, norms and rates are the same on
    /// all ranks, times and memory are this rank's.
    ///
    /// # Errors
    /// Any error, to end the run.
    fn step(&mut self, step: &Step) -> Result<ControlFlow<String>> {
        Ok(Continue(()))
    }

    /// The run has evaluated itself after step `step`: the same on all ranks. With `eval.inline =
    /// false` it does not.
    ///
    /// # Errors
    /// Any error, to end the run.
    fn evaluation(&mut self, step: u64, measures: &Metrics) -> Result<ControlFlow<String>> {
        Ok(Continue(()))
    }

    /// Epoch number `epoch`, from 1, has ended: step `step` has seen the last of its samples. After
    /// [`Hook::step`] of that step, and after [`Hook::evaluation`] if the run has evaluated itself
    /// then: `measures`. Where replicas train apart, it is called for all epochs of a round after
    /// its average.
    ///
    /// # Errors
    /// Any error, to end the run.
    fn epoch(
        &mut self,
        epoch: u64,
        step: &Step,
        measures: Option<&Metrics>,
    ) -> Result<ControlFlow<String>> {
        Ok(Continue(()))
    }

    /// The checkpoint of step `step` has been published in `directory`, some steps later where it
    /// is written beside training. It stays until newer ones take its place (`checkpoint.keep`).
    ///
    /// # Errors
    /// Any error, to end the run.
    fn checkpoint(&mut self, step: u64, directory: &Path) -> Result<ControlFlow<String>> {
        Ok(Continue(()))
    }

    /// The run has ended: well, with all its records written, or by an error that all ranks share.
    /// Called once, unless a rank is lost.
    ///
    /// # Errors
    /// An error replaces a good end; after a bad one it is only logged.
    fn end(&mut self, outcome: &Outcome<'_>) -> Result<()> {
        Ok(())
    }
}

/// Outcome of a run.
#[derive(Debug, Clone, Copy)]
pub struct Outcome<'a> {
    /// Steps finished.
    pub step: u64,
    /// The run's directory.
    pub directory: &'a Path,
    /// The ending or the error: a run that was stopped or preempted ends well, too.
    pub result: Result<&'a RunOutcome, &'a Error>,
}

/// The hooks of a rank.
pub struct Hooks<'h> {
    hooks: Vec<&'h mut dyn Hook>,
    failure: Option<Error>,
}

impl<'h> Hooks<'h> {
    /// Hooks to be called in this order.
    pub fn new(hooks: Vec<&'h mut dyn Hook>) -> Self {
        Self { hooks, failure: None }
    }

    /// Calls one after the other; returns the reason to stop, if one asks. A failure is kept for
    /// [`Hooks::failure`].
    pub fn call(
        &mut self,
        call: impl Fn(&mut dyn Hook) -> Result<ControlFlow<String>>,
    ) -> Option<String> {
        let mut stop = None;
        for hook in &mut self.hooks {
            if self.failure.is_some() {
                break;
            }
            match call(&mut **hook) {
                Ok(Continue(())) => {}
                Ok(Break(why)) => stop = stop.or(Some(why)),
                Err(e) => self.failure = Some(e.at(format_args!("hook {}", hook.name()))),
            }
        }
        stop
    }

    /// Reports the outcome of the run to all hooks; returns the first failure.
    pub fn end(&mut self, outcome: &Outcome<'_>) -> Result<()> {
        let ended = self.hooks.iter_mut().map(|hook| {
            let ended = hook.end(outcome);
            ended.map_err(|e| e.at(format_args!("hook {}", hook.name())))
        });
        // Each is called, even after a failure of another.
        ended.collect::<Vec<_>>().into_iter().collect()
    }

    /// Whether one has failed.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Passes the failure of one on, if one has failed.
    ///
    /// # Errors
    /// The failure of the hook.
    pub fn failure(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts its calls; the third asks to stop, the fourth fails.
    #[derive(Default)]
    struct Counts(usize);

    impl Hook for Counts {
        fn name(&self) -> &str {
            "counts"
        }

        fn checkpoint(&mut self, _: u64, _: &Path) -> Result<ControlFlow<String>> {
            self.0 += 1;
            match self.0 {
                3 => Ok(Break("three".into())),
                4 => Err(Error::input("four")),
                _ => Ok(Continue(())),
            }
        }

        fn end(&mut self, outcome: &Outcome<'_>) -> Result<()> {
            self.0 += outcome.step as usize;
            Err(Error::input("it is over"))
        }
    }

    #[test]
    fn a_failure_is_kept_and_nothing_is_called_after_it() {
        let mut one = Counts::default();
        let mut other = Counts(1);
        let mut hooks = Hooks::new(vec![&mut one, &mut other]);
        let mut save = || hooks.call(|hook| hook.checkpoint(1, Path::new("x")));
        assert_eq!(
            [save(), save(), save(), save()],
            [None, Some("three".into()), Some("three".into()), None]
        );
        assert!(hooks.has_failed());
        assert_eq!(hooks.failure().unwrap_err().to_string(), "hook counts: four");
        let outcome =
            Outcome { step: 10, directory: Path::new("x"), result: Ok(&RunOutcome::Finished) };
        assert_eq!(hooks.end(&outcome).unwrap_err().to_string(), "hook counts: it is over");
        assert_eq!((one.0, other.0), (13, 14));
    }
}
