//! The starting point of a run: step 0, or an intact checkpoint.
//!
//! Loading verifies: together the ranks read every byte and verify its checksum. Only provably
//! damaged checkpoints (`Kind::Damaged`: a checksum, a length, a missing file) are skipped in
//! favour of an older one. A file system error is retried and then ends the run; another version is
//! refused. Retention relies on the same error kinds: an unreadable file does not count as absent,
//! and nothing is removed while its state is unknown.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::branch::{Branch, RestoreScope};
use super::config_diff::Changes;
use super::directory::{Resume, RunDirectory};
use crate::memory::{self, Candidate, NodeSlots};
use crate::tools::resolve_path;
use crate::{Manifest, PieceSource, Progress, Reader};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::spans::{ActivityKind, span};
use hpctrain_comm::Group;
use hpctrain_config::telemetry::long_lines::last_step;
use hpctrain_config::{Config, DataOrder, Parallel, ResolvedConfig};
use hpctrain_data::{DataChange, ExcludedSummary, Fingerprint};
use hpctrain_device::Kernels;
use hpctrain_nn::optim::EMA;
use hpctrain_parallel::Sharded;

/// The parts of a checkpoint to restore, and the data of this start.
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// The parts of the checkpoint to restore.
    pub take: RestoreScope,
    /// The training data of this start, if known.
    pub data: Option<Fingerprint>,
    /// The training samples that this start does not read.
    pub excluded: Option<ExcludedSummary>,
    /// Whether the run may resume with other data than it was trained on.
    pub allow_changed_data: bool,
    /// The in-memory checkpoints of the run, if it takes some.
    pub memory: Option<NodeSlots>,
}

impl RestoreOptions {
    /// Returns options that restore everything, for a run whose data is unknown.
    pub fn all() -> Self {
        Self {
            take: RestoreScope::Everything,
            data: None,
            excluded: None,
            allow_changed_data: false,
            memory: None,
        }
    }
}

/// The result of resuming.
#[derive(Debug, Clone, PartialEq)]
pub struct Resumed {
    /// The progress of the run.
    pub progress: Progress,
    /// The checkpoint; `None` if the run starts at step 0.
    pub from: Option<PathBuf>,
    /// The in-memory checkpoint, if it is one.
    pub memory: Option<Candidate>,
    /// All changes of the run to other data, now or earlier.
    pub data_changes: Vec<DataChange>,
}

/// Adapts the data of a run to the preprocessing of a checkpoint; an error ends the run.
pub type Conform<'a> = &'a mut dyn FnMut(&Manifest) -> Result<()>;

/// Loads the checkpoint that `resume` asks for. Collective over `world`. `conform` is called with
/// every checkpoint that is tried.
///
/// # Errors
/// Returns an error if no checkpoint is intact, it is of another model, optimizer or data, it is
/// beyond the last step, or the data does not fit it.
pub fn resume<B: Kernels>(
    world: &Group<B>,
    sharded: &mut Sharded<B>,
    plan: &ResolvedConfig,
    directory: &RunDirectory,
    resume: &Resume,
    taking: &RestoreOptions,
    conform: Conform<'_>,
) -> Result<Resumed> {
    let start =
        Resumed { progress: Progress::default(), from: None, memory: None, data_changes: vec![] };
    let take = taking.take;
    let mut load = Load { world, sharded, take, conform, memory: None, overwritten: None };
    let (from, manifest) = match resume {
        Resume::No => return Ok(start),
        Resume::From(path) => load.named(path)?,
        Resume::Auto => match (load.newest(directory, taking)?, branch(world, directory)?) {
            (Some(found), _) => found,
            // The run began at a checkpoint of another run and was killed before its first save.
            // State that is not taken becomes zero, so nothing that was overwritten in part stays.
            (None, Some(Branch { from, take })) => {
                load.take = take;
                load.named(&from)?
            }
            (None, None) => return unless_overwritten(load.overwritten).map(|()| start),
        },
    };
    let Load { take, memory, .. } = load;
    let data_changes = match take {
        RestoreScope::Everything | RestoreScope::NoOptimizer => {
            world.all_ok(data_changes(&from, &manifest, taking))?
        }
        RestoreScope::Weights => vec![],
    };
    let known = manifest.data.iter().flat_map(|data| &data.changes).count();
    if world.rank() == 0 {
        for change in data_changes.iter().skip(known) {
            log::warn!("the run resumes with other training data: {}", change.what);
        }
    }
    if world.rank() == 0 && take == RestoreScope::Everything {
        log_changes(&manifest.config, &plan.config);
    }
    if take != RestoreScope::Weights {
        world.all_ok(check_order(&from, &manifest.config, plan))?;
    }
    let progress = match take {
        RestoreScope::Everything => manifest.progress(),
        RestoreScope::NoOptimizer => Progress { updates: 0, ..manifest.progress() },
        RestoreScope::Weights => Progress::default(),
    };
    let at = progress.step;
    let asked = plan.config.run.steps;
    let fits = match at <= asked {
        true => Ok(()),
        false => Err(Error::input(format!(
            "{} is at step {at}, beyond run.steps = {asked}",
            from.display()
        ))
        .hint("raise run.steps")),
    };
    world.all_ok(fits)?;
    Ok(Resumed { progress, from: Some(from), memory, data_changes })
}

/// Refuses to deal shards to another number of ranks in the middle of an epoch, of which samples
/// would then be seen twice or never.
fn check_order(from: &Path, before: &Config, plan: &ResolvedConfig) -> Result<()> {
    let Parallel { replica, shard, .. } = before.parallel;
    let ranks_before = replica.unwrap_or(1) * shard.unwrap_or(1);
    let ranks = plan.mesh.data();
    let both_deal = [before.data.order, plan.config.data.order] == [DataOrder::Files; 2];
    if !both_deal || ranks == ranks_before {
        return Ok(());
    }
    Err(Error::input(format!(
        "{}: data.order = files has dealt the shards to {ranks_before} data-parallel ranks, but \
         there are {ranks} now",
        from.display()
    ))
    .hint(format!(
        "resume on {ranks_before} data-parallel ranks, or continue in another order with \
         data.order=samples"
    )))
}

/// Returns the changes of a checkpoint's run to other data, or to other excluded samples, including
/// this start.
///
/// # Errors
/// Returns an error if the run was trained on other data, so that the following positions hold
/// other samples, and `--allow-changed-data` is not given.
pub fn data_changes(
    from: &Path,
    manifest: &Manifest,
    taking: &RestoreOptions,
) -> Result<Vec<DataChange>> {
    let Some(trained) = &manifest.data else { return Ok(vec![]) };
    let mut changes = trained.changes.clone();
    let what = taking.data.as_ref().and_then(|now| now.difference(&trained.fingerprint));
    match what {
        None => {}
        Some(what) if taking.allow_changed_data => {
            changes.push(DataChange {
                step: manifest.step,
                before: trained.fingerprint.digest(),
                what,
            });
        }
        Some(what) => {
            return Err(Error::input(format!("{}: the training data has changed: {what}", from.display()))
                .hint("give the data it was trained on, or resume with the new data: --allow-changed-data"));
        }
    }
    let excluded = ExcludedSummary::difference(taking.excluded.as_ref(), trained.excluded.as_ref());
    changes.extend(excluded.map(|what| DataChange {
        step: manifest.step,
        before: trained.fingerprint.digest(),
        what,
    }));
    Ok(changes)
}

/// Returns the origin of the run, read by rank 0.
fn branch<B: Kernels>(world: &Group<B>, directory: &RunDirectory) -> Result<Option<Branch>> {
    let mine = world.all_ok(if world.rank() == 0 { directory.branch() } else { Ok(None) })?;
    let mine = serde_json::to_vec(&mine).map_err(|e| Error::internal(format!("branch: {e}")))?;
    let of_root = world.broadcast_bytes(mine).wait()?;
    serde_json::from_slice(&of_root)
        .map_err(|e| Error::comm(format!("rank 0 sent a malformed branch: {e}")))
}

/// The number of attempts to read a checkpoint when the file system fails.
const ATTEMPTS: usize = 4;

/// The pause between two attempts.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Loads checkpoints into the owned ranges of every rank. Collective over `world`.
struct Load<'a, B: Kernels> {
    world: &'a Group<B>,
    sharded: &'a mut Sharded<B>,
    take: RestoreScope,
    conform: Conform<'a>,
    /// The in-memory checkpoint that was loaded.
    memory: Option<Candidate>,
    /// The failure of an in-memory checkpoint that has overwritten a part of the state.
    overwritten: Option<Error>,
}

/// Refuses to start at step 0 with a state of which an in-memory checkpoint has overwritten a part.
fn unless_overwritten(failed: Option<Error>) -> Result<()> {
    failed.map_or(Ok(()), |e| {
        Err(e
            .at("the in-memory checkpoint was restored in part, and there is no other")
            .hint("start the run once more with --resume auto, or under another run.name"))
    })
}

impl<B: Kernels> Load<'_, B> {
    /// Loads a checkpoint that the user has named.
    fn named(&mut self, path: &Path) -> Result<(PathBuf, Manifest)> {
        // The lease keeps it from being removed while it is read.
        let (path, _lease) = resolve_path::checkpoint_collective(self.world, path)?;
        let manifest = self.load(&path)?;
        Ok((path, manifest))
    }

    /// Loads the newest intact checkpoint, and logs the skipped ones with the reasons. Returns
    /// `None` if there are no checkpoints. Only provably damaged checkpoints are skipped, since the
    /// run trains again from an older one and finally replaces the newer ones.
    fn newest(
        &mut self,
        directory: &RunDirectory,
        taking: &RestoreOptions,
    ) -> Result<Option<(PathBuf, Manifest)>> {
        let memory = taking.memory.as_ref().filter(|_| self.take == RestoreScope::Everything);
        let mut in_memory = match memory {
            Some(here) => memory::find(self.world, here, self.last_recorded(directory)?)?,
            None => vec![],
        }
        .into_iter()
        .peekable();
        let checkpoints = directory.checkpoints();
        // One rank lists them, so that all try the same ones.
        let mine = self.world.all_ok(if self.world.rank() == 0 {
            checkpoints.steps()
        } else {
            Ok(vec![])
        })?;
        let steps = self.world.broadcast_numbers(&mine)?;
        let mut last = None;
        for step in steps.iter().rev().copied().map(Some).chain([None]) {
            while let Some(candidate) =
                in_memory.next_if(|one| step.is_none_or(|step| one.progress.step > step))
                && let Some(here) = memory
            {
                if let Some(loaded) = self.load_memory(here, candidate)? {
                    return Ok(Some(loaded));
                }
            }
            let Some(step) = step else { break };
            let path = checkpoints.path(step);
            match self.load(&path) {
                Ok(manifest) => return Ok(Some((path, manifest))),
                Err(e) if e.kind() != Kind::Damaged => return Err(e),
                Err(e) => {
                    if self.world.rank() == 0 {
                        log::warn!(
                            "skipping {}: {}",
                            path.display(),
                            e.to_string().replace("\nhint: ", "; ")
                        );
                    }
                    last = Some(e);
                }
            }
        }
        match last {
            None => Ok(None),
            Some(e) => Err(e
                .at(format_args!("none of {} checkpoints is intact; the oldest", steps.len()))
                .hint("start again under another run.name, or restore a copy")),
        }
    }

    /// Returns the last step that rank 0 has recorded. A job may be killed between the copy of a step
    /// and its record, which would then be missing for ever.
    fn last_recorded(&self, directory: &RunDirectory) -> Result<u64> {
        let path = directory.metrics_path();
        let mine = if self.world.rank() == 0 {
            last_step(&path).map_err(|e| Error::io("read", &path, e))
        } else {
            Ok(0)
        };
        self.world.all_ok(mine)
    }

    /// Loads an in-memory checkpoint. Returns `None` if it is incomplete or damaged, which is
    /// logged.
    ///
    /// # Errors
    /// Returns an error, the same on all ranks, if it is of another model, optimizer or data, as
    /// for a checkpoint in files.
    fn load_memory(
        &mut self,
        here: &NodeSlots,
        candidate: Candidate,
    ) -> Result<Option<(PathBuf, Manifest)>> {
        let _span = span(ActivityKind::Restore, None);
        let path = candidate.place(here);
        let step = candidate.progress.step;
        let root = self.world.rank() == 0;
        let passed_over = |why: &str| {
            if root {
                log::warn!(
                    "passing over the in-memory checkpoint of step {step} in {}: {why}",
                    path.display()
                );
            }
        };
        let Some(manifest) = candidate.manifest(self.world, here)? else {
            passed_over("its outline is missing");
            return Ok(None);
        };
        let names = self.sharded.state_names();
        let conforms = (self.conform)(&manifest).map_err(|e| e.at(path.display()));
        let fits =
            conforms.and_then(|()| manifest.check(&path, self.sharded.layouts(), Some(&names[..])));
        self.world.all_ok(fits)?;
        let wanted = self.sharded.restored();
        let opened = candidate.open(self.world, here, &wanted, 1 + names.len());
        let mut source = match opened {
            Err(e) if e.is_shared() || self.world.size() == 1 => {
                passed_over(e.message());
                return Ok(None);
            }
            opened => opened?,
        };
        let restored = self.restore(&mut source, &names, 0);
        if let Err(e) = self.world.all_ok(restored) {
            passed_over(e.message());
            self.overwritten = Some(e);
            return Ok(None);
        }
        self.memory = Some(candidate);
        Ok(Some((path, manifest)))
    }

    /// Restores from a source whose parameters of another run are part `used`.
    fn restore(&mut self, source: &mut dyn PieceSource, names: &[&str], used: usize) -> Result<()> {
        let take = self.take;
        self.sharded.restore(|tensor, part, columns, range, out| match (part, take) {
            (_, RestoreScope::Everything) => source.read(tensor, part, columns, range, out),
            // A new average starts from the parameters.
            (part, _) if part == 0 || names[part - 1] == EMA => {
                source.read(tensor, used, columns, range, out)
            }
            // Other fresh state is zero, as `out` already is.
            _ => Ok(()),
        })
    }

    /// Loads a checkpoint into the owned ranges of every rank. Together the ranks check all of it.
    /// Failed reads are retried, since network file systems may fail temporarily.
    ///
    /// # Errors
    /// Returns an error, the same on all ranks, if the checkpoint is provably damaged
    /// ([`Kind::Damaged`]), is of another model or version, or cannot be read.
    fn load(&mut self, path: &Path) -> Result<Manifest> {
        let _span = span(ActivityKind::Restore, None);
        let mut attempt = 1;
        loop {
            match self.load_once(path) {
                Err(e) if e.kind() == Kind::Io && attempt < ATTEMPTS => {
                    if self.world.rank() == 0 {
                        log::warn!("{}: trying again", e.message());
                    }
                    attempt += 1;
                    std::thread::sleep(RETRY_DELAY);
                }
                loaded => return loaded,
            }
        }
    }

    /// Tries once to load a checkpoint.
    fn load_once(&mut self, path: &Path) -> Result<Manifest> {
        let mut reader = Reader::open_collective(self.world, path, || Reader::open(path))?;
        reader.fetch(self.world, &self.sharded.restored())?;
        self.world.all_ok(reader.check_files())?;
        let take = self.take;
        let names = self.sharded.state_names();
        let state = (take == RestoreScope::Everything).then_some(&names[..]);
        // Another tokenizer usually means another model, too: the first difference is reported.
        let conforms = (self.conform)(reader.manifest()).map_err(|e| e.at(path.display()));
        let fits =
            conforms.and_then(|()| reader.manifest().check(path, self.sharded.layouts(), state));
        self.world.all_ok(fits)?;
        // Another run begins with the parameters meant for inference; the same run continues with
        // the trained ones.
        let used = if take == RestoreScope::Weights { reader.inference_part() } else { 0 };
        let restored = self.restore(&mut reader, &names, used);
        self.world.all_ok(restored)?;
        Ok(reader.into_manifest())
    }
}

/// Logs the differences from the configuration that the checkpoint was trained with.
fn log_changes(before: &Config, now: &Config) {
    let Changes { curve, rounding, layout } = Changes::between(before, now);
    if !curve.is_empty() {
        log::warn!("the run resumes with another configuration: {}", curve.join("; "));
    }
    if !rounding.is_empty() {
        log::warn!(
            "sums are added in another order, and may differ in their last bits: {}",
            rounding.join("; ")
        );
    }
    if !layout.is_empty() {
        log::info!("another layout, which changes no numbers: {}", layout.join("; "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_was_overwritten_in_part_is_not_trained() {
        unless_overwritten(None).unwrap();
        let error = unless_overwritten(Some(Error::damaged("slot: cut short"))).unwrap_err();
        assert!(error.to_string().contains("restored in part") && error.advice().is_some());
        assert!(error.to_string().contains("slot: cut short"), "{error}");
    }
}
