//! The end of a run: the last evaluation and checkpoint, and the final output and records.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Session;
use crate::coordinator_service::SessionError;
use hpctrain_base::error::Result;
use hpctrain_base::layout::UnitLayout;
use hpctrain_base::signals;
use hpctrain_checkpoint::run_dir::RunOutcome;
use hpctrain_checkpoint::run_dir::markers::{End, RunStatus};
use hpctrain_config::telemetry::goodput::Goodput;
use hpctrain_config::telemetry::run_record::RunRecord;
use hpctrain_config::telemetry::{say, unix_time};
use hpctrain_engine::memory::resident;

impl Session<'_, '_> {
    /// Runs the last evaluation, saves the last checkpoint, and records the end of the run.
    pub(super) fn finish(&mut self, outcome: RunOutcome) -> Result<RunOutcome, SessionError> {
        let step = self.progress.step;
        let is_evaluated = self.last_evaluation.is_some_and(|(at, _)| at == step);
        if self.plan.config.eval.inline
            && !is_evaluated
            && !matches!(outcome, RunOutcome::Preempted(_))
        {
            let began = Instant::now();
            self.evaluate()?;
            self.pauses.eval_ms += began.elapsed().as_secs_f64() * 1e3;
        }
        self.await_saving()?;
        loop {
            if self.last_save != Some(step) {
                self.save()?;
                self.await_saving()?;
            }
            let written = self.records.flush().and_then(|()| self.worker_metrics.flush());
            let is_recorded = written.is_ok();
            self.tolerate_outage(written)?;
            if is_recorded && self.last_save == Some(step) {
                break;
            }
            if self.stop_requests.must_end() {
                self.outages.give_up()?;
            }
            signals::pause(self.outages.pause());
        }
        self.hooks.hooks.failure()?;
        self.outages.at_end(self.directory.check())?;
        self.records.progress.finish();
        let (status, why) = match &outcome {
            RunOutcome::Finished => (RunStatus::Finished, None),
            RunOutcome::Stopped(why) => (RunStatus::Finished, Some(why.clone())),
            RunOutcome::Preempted(why) => (RunStatus::Preempted, Some(why.clone())),
        };
        if let Some(why) = &why {
            say(format_args!("\nended at step {step}: {why}"));
        }
        if let (Some((_, loss)), Some(evaluator)) =
            (self.last_evaluation.filter(|(at, _)| *at == step), &self.evaluator)
        {
            say(format_args!(
                "\nvalidation loss {loss:.4} over {} samples at step {step}",
                evaluator.samples()
            ));
        }
        if !self.terms.is_synchronous() {
            say(format_args!(
                "staleness  {}",
                self.hub.with(|state| staleness_text(state.scheduler.histogram()))
            ));
        }
        let latest = self.directory.checkpoints().latest();
        if latest.exists() {
            say(format_args!("checkpoint in {}", latest.display()));
        }
        if status == RunStatus::Preempted {
            say(format_args!(
                "continue with --resume auto --set run.name={}",
                self.directory.name()
            ));
        } else if let Some(step_time) = self.worker_metrics.mean_step_time() {
            // A finished run that was resumed has no steps to summarize.
            let written = self
                .goodput()
                .map(|goodput| self.run_summary(step_time, goodput))
                .and_then(|summary| summary.write(&self.directory.summary_path()));
            self.outages.at_end(written)?;
        }
        // The servers end with the run, so there is nothing to resume from.
        self.outages.at_end(self.journal.clear())?;
        self.outages.at_end(self.directory.markers().end(&End { step, status, reason: why }))?;
        log::info!("ended at step {step}: {outcome:?}");
        Ok(outcome)
    }

    /// Measures the goodput, and prints it if it shows a loss.
    fn goodput(&self) -> Result<Option<Goodput>> {
        let metrics = self.directory.metrics_path();
        let found = Goodput::measure(self.directory.path(), &metrics, unix_time(), self.pauses)?;
        if let Some(goodput) = found.filter(Goodput::shows_a_loss) {
            say(format_args!("goodput  {goodput}"));
        }
        Ok(found)
    }

    fn run_summary(&self, step_time: Duration, goodput: Option<Goodput>) -> RunRecord {
        let times = self.worker_metrics.times();
        let job = &self.job;
        let parameters =
            |unit: &UnitLayout| unit.tensors.iter().map(|tensor| tensor.len() as u64).sum::<u64>();
        RunRecord {
            version: env!("CARGO_PKG_VERSION").into(),
            mpi: job.origin.mpi.clone(),
            device_path: None,
            device_path_reason: None,
            reduce: None,
            ranks: self.terms.workers,
            threads: self.plan.config.run.threads,
            hosts: self.worker_metrics.hosts(),
            parameters: self.layouts.iter().map(parameters).sum(),
            steps: self.progress.step,
            skipped: self.worker_metrics.skipped(),
            data: job.data.as_ref().map(|data| data.fingerprint.digest()),
            data_changes: job.data.as_ref().map_or(vec![], |data| data.changes.clone()),
            validation_loss: self.last_evaluation.map(|(_, loss)| loss),
            tokens_per_second: self.plan.tokens_per_step() as f64 / step_time.as_secs_f64(),
            tflops_per_rank: None,
            mfu: None,
            energy: None,
            seconds: self.started.elapsed().as_secs_f64(),
            step_seconds: times,
            loader_wait_seconds: times.loader,
            comm_wait_seconds: times.comm_exposed,
            comm_sent_bytes: None,
            per_step: None,
            comm_rounds: None,
            peak_gpu_bytes: None,
            peak_bytes: BTreeMap::new(),
            stages: vec![],
            peak_resident_bytes: resident().1,
            time: unix_time(),
            checkpoint_interval: None,
            goodput,
        }
    }
}

/// Describes a histogram of staleness: the mean, and the fraction of each value.
fn staleness_text(histogram: &BTreeMap<u64, u64>) -> String {
    let all: u64 = histogram.values().sum();
    if all == 0 {
        return "no pushes".into();
    }
    let mean = histogram.iter().map(|(staleness, count)| staleness * count).sum::<u64>() as f64
        / all as f64;
    let shares = histogram.iter().take(8).map(|(staleness, count)| {
        format!("{staleness}: {:.1} %", 100.0 * *count as f64 / all as f64)
    });
    let most: Vec<String> = shares.collect();
    format!("{mean:.2} updates on average ({})", most.join(", "))
}
