//! Callbacks during a run.

use std::ops::ControlFlow::{self, Break, Continue};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::evaluate::Metrics;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::spans::{ActivityKind, span};
use hpctrain_checkpoint::run_dir::RunOutcome;
use hpctrain_config::telemetry::metrics::Step;
use hpctrain_config::telemetry::profile::HookTime;

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
    /// `eval.inline = false` the trainer does not evaluate, and this is not called; an evaluator
    /// calls it for each of its evaluations ([`evaluate_run`](crate::evaluate_run)).
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

/// A hook whose calls are timed, each as a span of its thread.
struct TimedHook<'h> {
    hook: &'h mut dyn Hook,
    /// The times by event, each with the name of its spans.
    times: Vec<(Arc<str>, HookTime)>,
    /// The seconds of all calls since [`Hooks::take_ms`].
    recent: f64,
}

impl TimedHook<'_> {
    /// Calls the hook for an event.
    fn timed<R>(&mut self, event: &'static str, call: impl FnOnce(&mut dyn Hook) -> R) -> R {
        let known = self.times.iter().position(|(_, time)| time.event == event);
        let index = known.unwrap_or_else(|| {
            let hook = self.hook.name().to_owned();
            let span: Arc<str> = format!("{hook} {event}").into();
            self.times.push((span, HookTime { hook, event, calls: 0, seconds: 0.0, slowest: 0.0 }));
            self.times.len() - 1
        });
        let (name, time) = &mut self.times[index];
        let begun = Instant::now();
        let result = {
            let _span = span(ActivityKind::Hook, Some(name));
            call(self.hook)
        };
        let seconds = begun.elapsed().as_secs_f64();
        time.calls += 1;
        time.seconds += seconds;
        time.slowest = time.slowest.max(seconds);
        self.recent += seconds;
        result
    }
}

impl Hook for TimedHook<'_> {
    fn name(&self) -> &str {
        self.hook.name()
    }

    fn step(&mut self, step: &Step) -> Result<ControlFlow<String>> {
        self.timed("step", |hook| hook.step(step))
    }

    fn evaluation(&mut self, step: u64, measures: &Metrics) -> Result<ControlFlow<String>> {
        self.timed("evaluation", |hook| hook.evaluation(step, measures))
    }

    fn epoch(
        &mut self,
        epoch: u64,
        step: &Step,
        measures: Option<&Metrics>,
    ) -> Result<ControlFlow<String>> {
        self.timed("epoch", |hook| hook.epoch(epoch, step, measures))
    }

    fn checkpoint(&mut self, step: u64, directory: &Path) -> Result<ControlFlow<String>> {
        self.timed("checkpoint", |hook| hook.checkpoint(step, directory))
    }

    fn end(&mut self, outcome: &Outcome<'_>) -> Result<()> {
        self.timed("end", |hook| hook.end(outcome))
    }
}

/// The hooks of a rank.
pub struct Hooks<'h> {
    hooks: Vec<TimedHook<'h>>,
    failure: Option<Error>,
}

impl<'h> Hooks<'h> {
    /// Creates a set of hooks that are called in this order.
    pub fn new(hooks: Vec<&'h mut dyn Hook>) -> Self {
        let hooks = hooks
            .into_iter()
            .map(|hook| TimedHook { hook, times: Vec::new(), recent: 0.0 })
            .collect();
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
            match call(hook) {
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

    /// Returns the milliseconds that hooks have taken since the last call, or `None` if there are no
    /// hooks.
    pub fn take_ms(&mut self) -> Option<f64> {
        let recent = self.hooks.iter_mut().map(|hook| std::mem::take(&mut hook.recent));
        let seconds: f64 = recent.sum();
        (!self.hooks.is_empty()).then_some(1e3 * seconds)
    }

    /// Returns the time of all calls so far, by hook and event.
    pub fn times(&self) -> Vec<HookTime> {
        let all = self.hooks.iter().flat_map(|hook| &hook.times);
        all.map(|(_, time)| time.clone()).collect()
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
        let calls: Vec<_> = hooks.times().iter().map(|time| (time.event, time.calls)).collect();
        assert_eq!(calls, [("checkpoint", 3), ("checkpoint", 3)]);
        assert!(hooks.take_ms().is_some_and(|ms| ms > 0.0) && hooks.take_ms() == Some(0.0));
        assert_eq!(hooks.failure().unwrap_err().to_string(), "hook counts: four");
        let outcome =
            Outcome { step: 10, directory: Path::new("x"), result: Ok(&RunOutcome::Finished) };
        assert_eq!(hooks.end(&outcome).unwrap_err().to_string(), "hook counts: it is over");
        assert_eq!(hooks.times().iter().filter(|time| time.event == "end").count(), 2);
        assert_eq!(Hooks::new(vec![]).take_ms(), None);
        assert_eq!((one.0, other.0), (13, 14));
    }
}
