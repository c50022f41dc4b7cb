//! Asynchronous saves: copy, write, publish, apply retention.
//!
//! Every rank has a thread for saves. A save has three stages. First, the thread writes the rank's
//! file. When all ranks have done so, the thread of rank 0 writes the manifest and publishes the
//! checkpoint, and each rank reads its file back. When all ranks have verified what they wrote,
//! rank 0 removes the checkpoints that retention does not keep. Ranks learn that all are done from
//! the control flags that they exchange with every step anyway ([`Saver::is_done`],
//! [`Saver::advance`]), so only the compute thread sends messages, and all ranks enter the next
//! stage at the same step.
//!
//! Training waits only for the copy of the owned ranges into a buffer that is reused for every
//! save. MPI calls belong to the communication thread, whose requests must come in the same order
//! on all ranks, so the save threads send no messages.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::directory::sync;
use super::manifest::ShardFileInfo;
use super::manifest::{Origin, VERSION};
use super::save_thread::{SaveTask, SaveThread};
use super::shard::ShardFile;
use super::snapshot::{Snapshot, write_through};
use super::{Checkpoints, Manifest, Progress, Retention, TensorEntry, refused};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::fault;
use hpctrain_base::layout::UnitLayout;
use hpctrain_base::own_files;
use hpctrain_comm::Group;
use hpctrain_config::{Config, WhenBusy};
use hpctrain_data::{Preprocessing, TrainedOn};
use hpctrain_device::Kernels;
use hpctrain_parallel::Sharded;

/// The directory of a run's checkpoints, and the content that their manifests share.
pub struct SaveContext {
    /// The checkpoints of the run.
    pub checkpoints: Checkpoints,
    /// The resolved configuration.
    pub config: Config,
    /// Preprocessing of the training data, if there is such data.
    pub preprocessing: Option<Preprocessing>,
    /// Training data of the run.
    pub data: Option<TrainedOn>,
    /// The job that writes; version and time are set at each save.
    pub origin: Origin,
    /// The id of the job, equal on all ranks; it is part of the names of staging directories.
    pub id: String,
    /// Log files of the steps before a checkpoint: synced to disk before it is published.
    pub records: Vec<PathBuf>,
    /// Names of the optimizer's buffers.
    pub state: Vec<&'static str>,
}

/// A published checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// The progress of the run.
    pub progress: Progress,
    /// The time from the copy to the end of the publication.
    pub took: Duration,
}

/// Saves this rank's shards of the checkpoints.
pub struct Saver<B: Kernels> {
    job: Arc<SaveContext>,
    world: Group<B>,
    /// `None` without asynchronous saves, and while the save thread has it.
    snapshot: Option<Snapshot<B>>,
    underway: Option<InFlightSave<B>>,
    thread: SaveThread,
    /// The last step at which an SDC check had found replicas equal when the save began.
    sdc_checked: Option<u64>,
}

/// An unfinished save.
struct InFlightSave<B: Kernels> {
    progress: Progress,
    begun: Instant,
    stage: Stage<B>,
}

enum Stage<B: Kernels> {
    /// The save thread writes this rank's file.
    Writing(SaveTask<(Option<Snapshot<B>>, Result<ShardFile>)>),
    /// Rank 0 publishes, and this rank reads its file back.
    Publishing(SaveTask<Result<Instant>>),
    /// Rank 0 applies retention.
    Retaining(Option<SaveTask<()>>),
}

impl<B: Kernels> Saver<B> {
    /// Creates a saver of the tensors in `sharded`. `asynchronous` allocates the buffer for a copy
    /// of them.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails, or the thread cannot be started.
    pub fn new(
        job: SaveContext,
        world: Group<B>,
        backend: &B,
        sharded: &mut Sharded<B>,
        asynchronous: bool,
    ) -> Result<Self> {
        let snapshot = asynchronous.then(|| Snapshot::new(backend, sharded)).transpose()?;
        Ok(Self {
            job: Arc::new(job),
            world,
            snapshot,
            underway: None,
            thread: SaveThread::start()?,
            sdc_checked: None,
        })
    }

    /// Begins a save. Collective. Returns once the state is copied or, without asynchronous saves,
    /// once the checkpoint is published. While another save is in progress this waits for its end,
    /// or returns false without saving, by `checkpoint.if_busy`.
    ///
    /// # Errors
    /// Returns an error if the copy fails on this rank, or, on all ranks, if a save that ends here
    /// failed.
    pub fn save(
        &mut self,
        sharded: &mut Sharded<B>,
        progress: Progress,
    ) -> Result<(bool, Option<Published>)> {
        let mut published = None;
        if let Some(underway) = &self.underway {
            let step = progress.step;
            let before = underway.progress.step;
            match self.job.config.checkpoint.if_busy {
                WhenBusy::Skip => {
                    log::warn!(
                        "step {step}: not saved: the checkpoint of step {before} is still being written"
                    );
                    return Ok((false, None));
                }
                WhenBusy::Wait => published = self.finish()?,
            }
        }
        let begun = Instant::now();
        self.sdc_checked = sharded.last_checked_step();
        let state = self.job.state.clone();
        let rank = self.world.rank();
        let staging = self.job.staging(progress.step);
        let write = match self.snapshot.take() {
            Some(mut snapshot) => {
                snapshot.take(sharded)?;
                log::info!(
                    "step {}: state copied in {:.1} ms",
                    progress.step,
                    begun.elapsed().as_secs_f64() * 1e3
                );
                self.thread.begin(move || {
                    fault::point("save");
                    let written =
                        create(&staging).and_then(|()| snapshot.write(&staging, rank, &state));
                    (Some(snapshot), written)
                })
            }
            None => {
                let written =
                    create(&staging).and_then(|()| write_through(sharded, &staging, rank, &state));
                SaveTask::Ready((None, written))
            }
        };
        let through = matches!(write, SaveTask::Ready(_));
        self.underway = Some(InFlightSave { progress, begun, stage: Stage::Writing(write) });
        if through {
            published = self.finish()?;
        }
        Ok((true, published))
    }

    /// Marks the saves of this job after a step as suspect, including one in progress.
    ///
    /// # Errors
    /// Returns an error if the file system refuses.
    pub fn mark_suspect_after(&self, step: u64, why: &str) -> Result<()> {
        self.job.checkpoints.mark_suspect_after(&self.job.id, step, why)
    }

    /// Returns true if a save is in progress.
    pub fn is_busy(&self) -> bool {
        self.underway.is_some()
    }

    /// Returns the step of the save in progress.
    pub fn step(&self) -> Option<u64> {
        self.underway.as_ref().map(|underway| underway.progress.step)
    }

    /// Returns true if this rank has done its part of the current stage.
    pub fn is_done(&self) -> bool {
        match self.underway.as_ref().map(|underway| &underway.stage) {
            Some(Stage::Writing(task)) => task.is_finished(),
            Some(Stage::Publishing(task)) => task.is_finished(),
            Some(Stage::Retaining(task)) => task.as_ref().is_none_or(SaveTask::is_finished),
            None => false,
        }
    }

    /// Enters the next stage of the save. Call it once all ranks are done with the current one.
    /// Collective.
    ///
    /// # Errors
    /// Returns an error, the same on all ranks, if some rank failed. Then nothing is published, and
    /// published checkpoints are unchanged.
    pub fn advance(&mut self) -> Result<Option<Published>> {
        let Some(InFlightSave { progress, begun, stage }) = self.underway.take() else {
            return Ok(None);
        };
        let at = |e: Error| e.at(format_args!("checkpoint of step {}", progress.step));
        match stage {
            Stage::Writing(task) => {
                let (snapshot, written) = task.join()?;
                self.snapshot = snapshot;
                let publishing = self.meet(progress, written).map_err(at)?;
                self.underway =
                    Some(InFlightSave { progress, begun, stage: Stage::Publishing(publishing) });
                Ok(None)
            }
            Stage::Publishing(task) => {
                let published = self.world.all_ok(task.join().flatten()).map_err(at)?;
                let took = published.saturating_duration_since(begun);
                let path = self.job.checkpoints.path(progress.step);
                log::info!("saved {} in {:.2} s", path.display(), took.as_secs_f64());
                let job = self.job.clone();
                let sdc_checked = self.sdc_checked;
                let root = self.world.rank() == 0;
                let retaining = root.then(|| self.thread.begin(move || job.retain(sdc_checked)));
                self.underway =
                    Some(InFlightSave { progress, begun, stage: Stage::Retaining(retaining) });
                Ok(Some(Published { progress, took }))
            }
            Stage::Retaining(task) => {
                let retained = task.map_or(Ok(()), SaveTask::join);
                self.world.all_ok(retained).map_err(at)?;
                Ok(None)
            }
        }
    }

    /// Waits for the end of the save in progress. Collective.
    ///
    /// # Errors
    /// Returns the errors of [`Saver::advance`].
    pub fn finish(&mut self) -> Result<Option<Published>> {
        let mut published = None;
        while self.is_busy() {
            published = self.advance()?.or(published);
        }
        Ok(published)
    }

    /// Waits until the save thread has ended its task, after which this rank changes nothing more in
    /// the directory of the run. The save in progress is given up, unless it is published already.
    pub fn abandon(&mut self) {
        let Some(InFlightSave { stage, .. }) = self.underway.take() else { return };
        match stage {
            Stage::Writing(task) => drop(task.join()),
            Stage::Publishing(task) => drop(task.join()),
            Stage::Retaining(task) => drop(task.map(SaveTask::join)),
        }
    }

    /// Enters the publishing stage once all files are written, or discards them if a rank failed.
    fn meet(
        &mut self,
        progress: Progress,
        written: Result<ShardFile>,
    ) -> Result<SaveTask<Result<Instant>>> {
        let root = self.world.rank() == 0;
        let staging = self.job.staging(progress.step);
        let written = match self.world.all_ok(written) {
            Ok(written) => written,
            Err(e) => {
                if root {
                    self.job.checkpoints.abandon(&staging);
                }
                return Err(e);
            }
        };
        let everyone = self.world.gather_bytes_to_root(written.table()?).wait()?;
        let job = self.job.clone();
        Ok(self.thread.begin(move || {
            fault::point("publish");
            if root {
                job.publish(progress, &everyone, &staging)
                    .inspect_err(|_| job.checkpoints.abandon(&staging))?;
            }
            let published = Instant::now();
            written.read_back()?;
            Ok(published)
        }))
    }
}

/// Creates the staging directory unless another rank has done so.
fn create(staging: &Path) -> Result<()> {
    own_files::create_directory(staging).map_err(|e| refused("create", staging, e))
}

impl SaveContext {
    /// Returns the directory in which the checkpoint of a step is written.
    fn staging(&self, step: u64) -> PathBuf {
        self.checkpoints.staging(step, &self.id)
    }

    /// Creates the directory in which the checkpoint of a step is written.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be created.
    pub fn create(&self, step: u64) -> Result<PathBuf> {
        let staging = self.staging(step);
        create(&staging).map(|()| staging)
    }

    /// Writes the manifest from the ranks' tables and publishes the checkpoint.
    pub fn publish(&self, progress: Progress, tables: &[Vec<u8>], staging: &Path) -> Result<()> {
        let written: Vec<ShardFileInfo> = tables
            .iter()
            .map(|bytes| serde_json::from_slice(bytes))
            .collect::<Result<_, _>>()
            .map_err(|e| Error::internal(e.to_string()))?;
        let mut manifest = self.manifest(progress);
        manifest.add_files(written)?;
        manifest.write(staging)?;
        self.records.iter().try_for_each(|path| sync(path))?;
        self.checkpoints.publish(progress.step, staging).map(drop)
    }

    /// Returns the manifest of a step, without tensors.
    fn manifest(&self, progress: Progress) -> Manifest {
        Manifest {
            version: VERSION,
            id: format!("{}-{}", self.id, progress.step),
            step: progress.step,
            updates: progress.updates,
            position: progress.position,
            seed: self.config.run.seed,
            config: self.config.clone(),
            tokenizer: self.preprocessing.as_ref().and_then(|known| known.tokenizer.clone()),
            preprocessing: self.preprocessing.clone(),
            data: self.data.clone(),
            origin: Origin {
                hpctrain: env!("CARGO_PKG_VERSION").into(),
                time: hpctrain_config::telemetry::unix_time(),
                ..self.origin.clone()
            },
            state: self.state.iter().map(|name| name.to_string()).collect(),
            files: Default::default(),
            tensors: Default::default(),
        }
    }

    /// Returns what all in-memory checkpoints of the job share, as the text of a manifest without
    /// pieces, for a network of units with these layouts.
    ///
    /// # Errors
    /// Returns an error if it cannot be encoded.
    pub fn outline(&self, layouts: &[UnitLayout]) -> Result<Vec<u8>> {
        let mut manifest = self.manifest(Progress::default());
        for tensor in layouts.iter().flat_map(|layout| &layout.tensors) {
            let entry = TensorEntry { shape: tensor.shape.clone(), pieces: vec![] };
            manifest.tensors.insert(tensor.name.clone(), entry);
        }
        serde_json::to_vec(&manifest).map_err(|e| Error::internal(format!("manifest: {e}")))
    }

    /// Removes the checkpoints that retention does not keep; `sdc_checked` is the step at which an
    /// SDC check last found replicas equal.
    pub fn retain(&self, sdc_checked: Option<u64>) {
        self.checkpoints
            .retain(&Retention { sdc_checked, ..Retention::from_config(&self.config.checkpoint) });
    }
}
