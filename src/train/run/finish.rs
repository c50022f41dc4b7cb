//! The end of a run: the last evaluation and checkpoint, and the summaries for users and programs.

use std::time::Instant;

use super::Run;
use super::in_memory::InMemory;
use crate::evaluate::{Sampling, generate};
use crate::hang_timeout::Phase;
use crate::hooks::Outcome;
use crate::records::Records;
use crate::save_interval::SaveInterval;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::signals;
use hpctrain_base::spans::{ActivityKind, span};
use hpctrain_checkpoint::run_dir::RunOutcome;
use hpctrain_checkpoint::run_dir::markers::{End, RunStatus};
use hpctrain_config::telemetry::epoch_loss::EpochLoss;
use hpctrain_config::telemetry::goodput::Goodput;
use hpctrain_config::telemetry::run_record::{EnergyUse, RunRecord, StageMemory};
use hpctrain_config::telemetry::{say, unix_time};
use hpctrain_device::{Kernels, MemoryKind};
use hpctrain_engine::memory;

impl<B: Kernels> Run<'_, B> {
    /// Makes the last evaluation and checkpoint, generates a sample of text, and writes the run
    /// summary.
    pub(super) fn finish(&mut self) -> Result<RunOutcome> {
        self.enter(Phase::End)?;
        self.save_interval.iter_mut().for_each(SaveInterval::end);
        let inline = self.plan.config.eval.inline;
        let evaluated = self.schedule.evaluated.is_some_and(|(step, _)| step == self.progress.step);
        if inline && !evaluated && !matches!(self.schedule.ending, Some(RunOutcome::Preempted(_))) {
            self.evaluate()?;
        }
        // A save under way ends first, so that the last one need not wait for it.
        self.end_save()?;
        loop {
            if self.schedule.saved != Some(self.progress.step) {
                self.save()?;
                self.end_save()?;
            }
            if self.schedule.saved == Some(self.progress.step) && self.all_is_recorded()? {
                break;
            }
            self.end_if_asked()?;
            signals::pause(self.outages.pause());
        }
        let ending = self.schedule.ending.take().unwrap_or(RunOutcome::Finished);
        let text = if matches!(ending, RunOutcome::Preempted(_)) { None } else { self.sample()? };
        let sampled = match (&mut self.records, &text) {
            // If this start took no step, the text is that of the previous start.
            (Some(records), Some(text)) if !self.meters.is_empty() => {
                records.record_sample(self.progress.step, text)
            }
            _ => Ok(()),
        };
        self.world.all_ok(self.outages.at_end(sampled))?;
        let stages = self.memory_of_stages()?;
        let joules = self.energy.joules()?;
        let failure = self.hooks.failure();
        self.world.all_ok(failure)?;
        // The end is reported only after it is on record.
        let summarised = if self.world.rank() == 0 {
            self.write_summary(&ending, text, stages, joules)
        } else {
            Ok(())
        };
        self.world.all_ok(self.outages.at_end(summarised))?;
        // The last checkpoint is published.
        self.in_memory.iter_mut().for_each(InMemory::remove);
        log::info!("ended at step {}: {ending:?}", self.progress.step);
        Ok(ending)
    }

    /// Waits for the end of the save under way.
    fn end_save(&mut self) -> Result<()> {
        let start = Instant::now();
        let ended = self.saver.finish();
        let published = self.tolerated(ended)?;
        self.note_published(published.flatten());
        self.note_save_pause(start);
        Ok(())
    }

    /// Ends a run that waits for its file system if any rank was asked to end, after at least one
    /// attempt to write. Collective.
    fn end_if_asked(&self) -> Result<()> {
        let flags =
            self.world.gather_bytes(vec![u8::from(self.stop_requests.must_end())]).wait()?;
        let is_asked = flags.contains(&vec![1]);
        let verdict =
            if is_asked && self.records.is_some() { self.outages.give_up() } else { Ok(()) };
        self.world.all_ok(verdict)
    }

    /// Returns true if no record waits for the file system. The same on all ranks.
    fn all_is_recorded(&mut self) -> Result<bool> {
        let written = self.records.as_mut().map_or(Ok(()), Records::flush);
        let waits = written.is_err();
        let recorded = self.recorded(written);
        self.world.all_ok(recorded)?;
        let flags = self.world.gather_bytes(vec![u8::from(waits)]).wait()?;
        Ok(flags.first() == Some(&vec![0]))
    }

    /// Prints the end of the run and writes the run summary. On rank 0.
    fn write_summary(
        &self,
        ending: &RunOutcome,
        text: Option<String>,
        stages: Vec<StageMemory>,
        joules: Option<f64>,
    ) -> Result<()> {
        let Some(records) = &self.records else { return Ok(()) };
        self.directory.check()?;
        records.progress.finish();
        let step = self.progress.step;
        let energy = joules.map(|joules| records.energy.total(joules, step, self.energy.sources()));
        let (status, why) = match ending {
            RunOutcome::Finished => (RunStatus::Finished, None),
            RunOutcome::Stopped(why) => (RunStatus::Finished, Some(why.clone())),
            RunOutcome::Preempted(why) => (RunStatus::Preempted, Some(why.clone())),
        };
        if let Some(why) = &why {
            say(format_args!("\nended at step {step}: {why}"));
        }
        if let (Some((at, loss)), Some(evaluator)) =
            (self.schedule.evaluated.filter(|(at, _)| *at == step), &self.evaluator)
        {
            say(format_args!(
                "\nvalidation loss {loss:.4} over {} samples at step {at}",
                evaluator.samples()
            ));
        }
        if let Some(loss) = records.epoch_loss.as_ref().and_then(EpochLoss::mean) {
            say(format_args!("\nmean training loss {loss:.4} over the last epoch at step {step}"));
        }
        if !self.meters.is_empty() {
            say(format_args!("time  {}", self.meters.times()));
            if let Some(counts) = self.meters.requests_per_step().filter(|_| !B::ON_HOST) {
                say(format_args!("work  {counts}"));
            }
            if let Some(EnergyUse { kwh, joules_per_token, .. }) = &energy {
                let one = self.plan.network.predictions().trim_end_matches('s');
                say(format_args!("energy  {kwh:.3} kWh, {joules_per_token:.2e} J/{one}"));
            }
        }
        // A finished run that was resumed had nothing left to measure.
        let goodput = match status == RunStatus::Preempted || self.meters.is_empty() {
            true => None,
            false => Goodput::measure(
                self.directory.path(),
                &self.directory.metrics_path(),
                unix_time(),
                self.pauses,
            )?,
        };
        if let Some(goodput) = goodput.filter(Goodput::shows_a_loss) {
            say(format_args!("goodput  {goodput}"));
        }
        if let Some(report) = self.meters.profile(self.plan.threads, !B::ON_HOST) {
            let report = report.with_hooks(self.hooks.times());
            report.write(&self.directory.profile_path())?;
            log::info!("profile of {} steps:\n{report}", report.steps);
            say(format_args!(
                "\n{report}\n\nprofile in {}",
                self.directory.profile_path().display()
            ));
        }
        let latest = self.directory.checkpoints().latest();
        if latest.exists() {
            say(format_args!("checkpoint in {}", latest.display()));
        }
        if let Some(text) = text {
            say(format_args!(
                "\n{text}\n\nmore text: hpctrain sample --checkpoint {}",
                latest.display()
            ));
        }
        if status == RunStatus::Preempted {
            say(format_args!(
                "continue with --resume auto --set run.name={}",
                self.directory.name()
            ));
        } else if !self.meters.is_empty() {
            self.card(stages, energy, goodput).write(&self.directory.summary_path())?;
        }
        self.directory.markers().end(&End { step, status, reason: why })
    }

    /// Reports the outcome of the run to the hooks.
    pub(super) fn notify_hooks(&mut self, result: Result<&RunOutcome, &Error>) -> Result<()> {
        self.hooks.end(&Outcome {
            step: self.progress.step,
            directory: self.directory.path(),
            result,
        })
    }

    /// Marks the run as failed, so that evaluators do not wait for more checkpoints.
    pub(super) fn mark_failed(&self, error: &Error) {
        let why = Some(error.message().to_string());
        let end = End { step: self.progress.step, status: RunStatus::Failed, reason: why };
        // A run that another trainer has taken over has not ended.
        if self.records.is_some()
            && let Err(e) = self.directory.check().and_then(|()| self.directory.markers().end(&end))
        {
            log::warn!("{e}");
        }
    }

    /// Generates text from the trained model. Every rank computes it, because all-gathers of
    /// parameters are collective.
    fn sample(&mut self) -> Result<Option<String>> {
        let tokens = self.plan.config.log.sample_tokens;
        // Texts of tables have a tokenizer, too, but their network predicts no tokens.
        let generates = tokens > 0 && self.plan.network.is_language();
        let Some(tokenizer) = self.tokenizer.as_ref().filter(|_| generates) else {
            return Ok(None);
        };
        // The prompt is a line break, which byte and GPT-2 tokenizers have, and most character
        // sets. Some tokenizers drop it.
        let Some(prompt) = tokenizer.encode("\n").ok().filter(|ids| !ids.is_empty()) else {
            return Ok(None);
        };
        let sampling =
            Sampling { tokens, temperature: 0.8, top_k: None, seed: self.plan.config.run.seed };
        let _span = span(ActivityKind::Sampling, None);
        let drawn = generate(
            &mut self.engine.model,
            &prompt,
            self.plan.network.context(),
            sampling,
            |_| false,
        )?;
        Ok(Some(tokenizer.decode(&drawn)))
    }

    /// Returns the memory of each pipeline stage. The same on all ranks.
    fn memory_of_stages(&self) -> Result<Vec<StageMemory>> {
        let stats = self.engine.model.backend.memory_stats();
        let peaks = MemoryKind::ALL.map(|what| stats.peak(what) as u64);
        let peaks = self.world.all_gather_u64(&peaks)?;
        Ok((0..self.plan.mesh.pipeline).map(|stage| self.stage_memory(stage, &peaks)).collect())
    }

    /// Returns the memory of a pipeline stage from the peaks of all ranks.
    fn stage_memory(&self, stage: usize, peaks: &[Vec<u64>]) -> StageMemory {
        let named = |bytes: &[usize]| {
            MemoryKind::ALL.iter().map(|what| what.name().into()).zip(bytes.to_vec()).collect()
        };
        let estimated = memory::estimate::<B>(&self.plan, stage, self.held).categories();
        let mut most = [0; MemoryKind::ALL.len()];
        let ranks =
            peaks.iter().enumerate().filter(|(rank, _)| self.plan.mesh.stage(*rank) == stage);
        for (_, rank_peaks) in ranks {
            most.iter_mut()
                .zip(rank_peaks)
                .for_each(|(most, peak)| *most = (*peak as usize).max(*most));
        }
        StageMemory { estimated_bytes: named(&estimated), peak_bytes: named(&most) }
    }

    fn card(
        &self,
        stages: Vec<StageMemory>,
        energy: Option<EnergyUse>,
        goodput: Option<Goodput>,
    ) -> RunRecord {
        let memory_stats = self.engine.model.backend.memory_stats();
        let stats = self.comm.stats();
        let tokens_per_second =
            self.plan.tokens_per_step() as f64 / (self.meters.median_ms() * 1e-3);
        RunRecord {
            version: env!("CARGO_PKG_VERSION").into(),
            mpi: self.comm.library().into(),
            device_path: self.comm.device_transport().filter(|_| self.world.size() > 1),
            device_path_reason: self.comm.transport_reason().map(str::to_owned),
            reduce: (self.plan.mesh.shard > 1).then_some(self.plan.config.parallel.reduce),
            ranks: self.world.size(),
            threads: Some(self.plan.threads),
            hosts: self.topology.hosts(),
            parameters: self.engine.model.sharded.parameters(),
            steps: self.progress.step,
            skipped: self.meters.skipped(),
            data: self.trained_on.as_ref().map(|data| data.fingerprint.digest()),
            data_changes: self.trained_on.as_ref().map_or(vec![], |data| data.changes.clone()),
            validation_loss: self.schedule.evaluated.map(|(_, loss)| loss),
            tokens_per_second,
            tflops_per_rank: Some(self.efficiency.tflops_per_rank(tokens_per_second)),
            mfu: self.efficiency.mfu(tokens_per_second),
            energy,
            seconds: self.meters.seconds(),
            step_seconds: self.meters.times(),
            loader_wait_seconds: self.feed.waited().as_secs_f64(),
            comm_wait_seconds: stats.blocked,
            comm_sent_bytes: Some(stats.sent),
            per_step: self.meters.requests_per_step(),
            comm_rounds: Some(stats.rounds).filter(|rounds| *rounds > 0),
            peak_gpu_bytes: self.engine.model.backend.peak_device_bytes(),
            peak_bytes: MemoryKind::ALL
                .iter()
                .map(|what| (what.name().to_string(), memory_stats.peak(*what)))
                .collect(),
            stages,
            peak_resident_bytes: memory::resident().1,
            time: unix_time(),
            checkpoint_interval: self.save_interval.as_ref().and_then(SaveInterval::chosen),
            goodput,
        }
    }
}
