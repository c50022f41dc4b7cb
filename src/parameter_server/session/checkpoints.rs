//! Snapshots of the parameters, and checkpoints of them.

use std::sync::PoisonError;

use super::Session;
use crate::checkpoint_task::begin;
use crate::coordinator_service::SessionError;
use crate::protocol::{ServerRequest, ServerResponse};
use hpctrain_base::error::Result;
use hpctrain_base::spans::now;
use hpctrain_checkpoint::Published;
use hpctrain_config::telemetry::evaluations::Evaluation;
use hpctrain_config::{Checkpoint, WhenBusy};
use hpctrain_train::{Records, is_outage};

impl Session<'_, '_> {
    /// Takes a snapshot of the current parameters, unless there is one, and returns its number.
    pub(super) fn snapshot(&mut self) -> Result<u64, SessionError> {
        if let Some((step, number)) = self.cut
            && step == self.progress.step
            && self.terms.is_synchronous()
        {
            return Ok(number);
        }
        let generation = self.terms.generation;
        let number = self.cut.map_or(1, |(_, number)| number + 1);
        let copied = self.clients.all(|_| ServerRequest::Cut { generation, cut: number })?;
        // In asynchronous training the snapshot includes updates of later steps.
        let updates = copied.iter().filter_map(|answer| match answer {
            ServerResponse::Copied { updates } => Some(self.terms.start.updates + updates),
            _ => None,
        });
        self.progress.updates = updates.max().unwrap_or(self.progress.updates);
        self.cut = Some((self.progress.step, number));
        Ok(number)
    }

    /// Starts a save if one is due, and records the end of a previous save.
    pub(super) fn save_if_due(&mut self) -> Result<(), SessionError> {
        self.finish_save(false)?;
        let Checkpoint { every, every_epochs, .. } = self.plan.config.checkpoint;
        let every = every.number().unwrap_or(0);
        let due = self.is_due(every, every_epochs) || std::mem::take(&mut self.save_now);
        // The end of training always saves.
        if !due || self.outcome.is_some() {
            return Ok(());
        }
        let start = now();
        self.save()?;
        self.trace("checkpoint", start);
        Ok(())
    }

    /// Starts to save the current parameters and optimizer state.
    pub(super) fn save(&mut self) -> Result<(), SessionError> {
        let step = self.progress.step;
        if self.saving.is_some() {
            if self.plan.config.checkpoint.if_busy == WhenBusy::Skip {
                log::warn!("step {step}: not saved: an earlier checkpoint is still being written");
                return Ok(());
            }
            self.await_saving()?;
        }
        self.record_epoch_loss()?;
        let cut = self.snapshot()?;
        self.saving = Some(begin(
            &self.save_thread,
            &self.job,
            &self.save_clients,
            self.terms.generation,
            cut,
            self.progress,
        ));
        (self.last_save, self.save_now) = (Some(step), false);
        self.stop_requests.save_begun();
        if !self.plan.config.checkpoint.async_save {
            self.await_saving()?;
        }
        Ok(())
    }

    /// Without validation data, records the mean training loss of the epoch, by which the
    /// checkpoint of this step is compared with others.
    fn record_epoch_loss(&mut self) -> Result<()> {
        let step = self.progress.step;
        let Records { epoch_loss: Some(epoch), .. } = &self.records else { return Ok(()) };
        // A save that failed is retried at the same step.
        if self.epoch_recorded.replace(step) == Some(step) {
            return Ok(());
        }
        let evaluation = Evaluation::training_epoch(step, epoch.mean());
        let written = self.records.record_evaluation(evaluation);
        self.tolerate_outage(written)
    }

    /// Tolerates failed writes of records for a limited time, and reopens the files if this process
    /// still owns the run.
    pub(super) fn tolerate_outage(&mut self, written: Result<()>) -> Result<()> {
        if written.is_err() && self.directory.check().is_ok() {
            // A file that cannot be opened fails with the next write, too.
            let _ = self.records.reopen().and_then(|()| self.worker_metrics.reopen());
        }
        self.outages.record(written)
    }

    /// Waits for the current save to end.
    pub(super) fn await_saving(&mut self) -> Result<(), SessionError> {
        self.finish_save(true)
    }

    /// Records the end of the current save, for which it waits if `waits`. A save that failed to
    /// write is retried later.
    fn finish_save(&mut self, waits: bool) -> Result<(), SessionError> {
        if self.saving.is_none() {
            let mut fleet = self.save_clients.lock().unwrap_or_else(PoisonError::into_inner);
            return fleet.keep_alive(self.terms.generation);
        }
        let Some(saving) = self.saving.take_if(|saving| waits || saving.is_done()) else {
            return Ok(());
        };
        let Published { took, progress } = match saving.wait() {
            Ok(published) => published,
            Err(SessionError::Failed(e)) if is_outage(&e) => {
                self.outages.save_refused(e)?;
                self.last_save = None;
                self.stop_requests.save_failed(self.outages.pause());
                return Ok(());
            }
            Err(halt) => return Err(halt),
        };
        self.outages.published();
        let path = self.directory.checkpoints().path(progress.step);
        let stop = self.hooks.hooks.call(|hook| hook.checkpoint(progress.step, &path));
        self.stop_requests.stop_for(stop);
        self.stop_requests.note_published(took);
        log::info!("saved {} in {:.2} s", path.display(), took.as_secs_f64());
        Ok(())
    }
}
