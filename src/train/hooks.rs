//! Callbacks during a run.

use std::ops::ControlFlow::{self, Break, Continue};
use std::path::Path;

use crate::evaluate::Metrics;
use hpctrain_base::error::{Error, Result};
use hpctrain_checkpoint::run_dir::RunOutcome;
use hpctrain_config::telemetry::metrics::Step;

/// Callbacks during a run. Every method does nothing by default.
///
/// Every rank calls its hooks in the given order, at the same points of the run, so a hook may run
/// collectives if every rank has it. Training waits until the hooks return.
///
/// A hook that returns [`Break`] asks the run to stop, with a reason. A request on one rank is
/// enough: it reaches all ranks with the next step, and they end after that step, with a last
/// evaluation and checkpoint ([`RunOutcome::Stopped`]). With local SGD, ranks synchronise only when
/// replicas are averaged: hooks are called for every step of a round, but after its average, and a
/// request reaches all ranks at the end of the next round.
///
/// An error ends the run on all ranks, also after the next step, and names the hook. After a hook
/// has failed, only [`Hook::end`] is called on that rank.
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
#[expect(unused_variables, reason = "named for implementors")]
pub trait Hook {
    /// Returns the name of the hook, for messages.
    fn name(&self) -> &str {
        std::any::type_name::<Self>()
    }

    /// Called after every step, with the record that goes to `metrics.jsonl`. Losses, norms and
    /// learning rates are the same on all ranks; times and memory are this rank's.
    ///
    /// # Errors
    /// Returns an error to end the run.
    fn step(&mut self, step: &Step) -> Result<ControlFlow<String>> {
        Ok(Continue(()))
    }

    /// Called after an evaluation at step `step`, with the same metrics on all ranks. With
    /// `eval.inline = false` the trainer does not evaluate, and this is not called.
    ///
    /// # Errors
    /// Returns an error to end the run.
    fn evaluation(&mut self, step: u64, measures: &Metrics) -> Result<ControlFlow<String>> {
        Ok(Continue(()))
    }

    /// Called when epoch `epoch`, counted from 1, has ended with step `step`: after [`Hook::step`]
    /// of that step, and after [`Hook::evaluation`] if the run was evaluated then, with its result
    /// in `measures`. With local SGD, it is called for all epochs of a round after its average.
    ///
    /// # Errors
    /// Returns an error to end the run.
    fn epoch(
        &mut self,
        epoch: u64,
        step: &Step,
        measures: Option<&Metrics>,
    ) -> Result<ControlFlow<String>> {
        Ok(Continue(()))
    }

    /// Called when the checkpoint of step `step` has been published in `directory`, which may be
    /// some steps later if it is written asynchronously. Later checkpoints replace it
    /// (`checkpoint.keep`).
    ///
    /// # Errors
    /// Returns an error to end the run.
    fn checkpoint(&mut self, step: u64, directory: &Path) -> Result<ControlFlow<String>> {
        Ok(Continue(()))
    }

    /// Called once when the run has ended: successfully, with all its records written, or with an
    /// error that all ranks share. Not called if a rank is lost.
    ///
    /// # Errors
    /// An error that is returned fails a run that ended well; if the run has failed already, it is
    /// only logged.
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
    /// How the run ended, or its error. A run that was stopped or preempted is `Ok`, too.
    pub result: Result<&'a RunOutcome, &'a Error>,
}

/// The hooks of a rank.
pub struct Hooks<'h> {
    hooks: Vec<&'h mut dyn Hook>,
    failure: Option<Error>,
}

impl<'h> Hooks<'h> {
    /// Creates a set of hooks that are called in this order.
    pub fn new(hooks: Vec<&'h mut dyn Hook>) -> Self {
        Self { hooks, failure: None }
    }

    /// Calls the hooks one after the other, up to one that fails; its error is kept for
    /// [`Hooks::failure`]. Returns the first reason to stop, if a hook asks for it.
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

    /// Returns true if a hook has failed.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Returns the failure of the hook that failed, if any.
    ///
    /// # Errors
    /// Returns an error if a hook has failed.
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
