//! Starting point of a run: step 0, or a checkpoint that proves whole.
//!
//! Loading verifies: together the ranks read every byte under its checksum. Only proven damage
//! (`Kind::Damaged`: a checksum, a length, a missing file) is passed over for an older checkpoint.
//! An error of the file system is retried and then ends the run; another version is refused.
//! Retention relies on the same kinds: an unreadable file does not count as absent, and nothing is
//! removed on doubt.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::branch::{Branch, RestoreScope};
use super::config_diff::Changes;
use super::directory::{Resume, RunDirectory};
use crate::tools::resolve_path;
use crate::{Manifest, Progress, Reader};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::spans::{Doing, span};
use hpctrain_comm::Group;
use hpctrain_config::{Config, ResolvedConfig};
use hpctrain_data::{DataChange, Fingerprint};
use hpctrain_device::Kernels;
use hpctrain_nn::optim::AVERAGE;
use hpctrain_parallel::Sharded;

/// The parts of a checkpoint that are taken, and the data of this start.
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// Parts of the checkpoint.
    pub take: RestoreScope,
    /// Training data of this start, if it is known.
    pub data: Option<Fingerprint>,
    /// The run goes on even if it was trained on other data.
    pub allow_changed_data: bool,
}

impl RestoreOptions {
    /// Everything, of a run whose data is unknown.
    pub fn all() -> Self {
        Self { take: RestoreScope::Everything, data: None, allow_changed_data: false }
    }
}

/// A checkpoint that a run went on from.
#[derive(Debug, Clone, PartialEq)]
pub struct Resumed {
    /// Progress of the run.
    pub progress: Progress,
    /// The checkpoint; none at the start.
    pub from: Option<PathBuf>,
    /// Changes of the run to other data than before, now or earlier.
    pub data_changes: Vec<DataChange>,
}

/// Converts the data of a run to the preprocessing of a checkpoint; an error ends the run.
pub type Conform<'a> = &'a mut dyn FnMut(&Manifest) -> Result<()>;

/// Loads the checkpoint that `resume` asks for: collective over `world`. `conform` is called with
/// every checkpoint that is tried.
///
/// # Errors
/// There is no checkpoint that is whole, it is one of another model or other data, or the data does
/// not go with it.
pub fn resume<B: Kernels>(
    world: &Group<B>,
    sharded: &mut Sharded<B>,
    plan: &ResolvedConfig,
    directory: &RunDirectory,
    resume: &Resume,
    taking: &RestoreOptions,
    conform: Conform<'_>,
) -> Result<Resumed> {
    let start = Resumed { progress: Progress::default(), from: None, data_changes: vec![] };
    let mut load = Load { world, sharded, take: taking.take, conform };
    let (from, manifest) = match resume {
        Resume::No => return Ok(start),
        Resume::From(path) => load.named(path)?,
        Resume::Auto => match (load.newest(directory)?, branch(world, directory)?) {
            (Some(found), _) => found,
            // It began at a checkpoint of another run and was killed before it had saved any of its
            // own.
            (None, Some(Branch { from, take })) => {
                load.take = take;
                load.named(&from)?
            }
            (None, None) => return Ok(start),
        },
    };
    let take = load.take;
    let data_changes = match take {
        RestoreScope::Everything | RestoreScope::NoOptimizer => {
            world.all_ok(data_changes(&from, &manifest, taking))?
        }
        RestoreScope::Weights => vec![],
    };
    if world.rank() == 0
        && data_changes.len() > manifest.data.iter().flat_map(|data| &data.changes).count()
    {
        log::warn!(
            "the run goes on with other training data: {}",
            data_changes[data_changes.len() - 1].what
        );
    }
    if world.rank() == 0 && take == RestoreScope::Everything {
        tell_of_changes(&manifest.config, &plan.config);
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
    Ok(Resumed { progress, from: Some(from), data_changes })
}

/// Changes of a checkpoint's run to other data, this start included.
///
/// # Errors
/// It was trained on other data, and that is not allowed: other samples would stand at the
/// positions to come.
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
                .hint("give the data it was trained on, or go on with these samples: --allow-changed-data"));
        }
    }
    Ok(changes)
}

/// Origin of the run, as rank 0 reads it.
fn branch<B: Kernels>(world: &Group<B>, directory: &RunDirectory) -> Result<Option<Branch>> {
    let mine = world.all_ok(if world.rank() == 0 { directory.branch() } else { Ok(None) })?;
    let mine = serde_json::to_vec(&mine).map_err(|e| Error::internal(format!("branch: {e}")))?;
    let of_root = world.broadcast_bytes(mine).wait()?;
    serde_json::from_slice(&of_root)
        .map_err(|e| Error::comm(format!("rank 0 sent a malformed branch: {e}")))
}

/// Attempts to read a checkpoint when the file system fails.
const ATTEMPTS: usize = 4;

/// Pause between two attempts.
const BETWEEN: Duration = Duration::from_millis(500);

/// Loads checkpoints into the ranges of every rank: collective over `world`.
struct Load<'a, B: Kernels> {
    world: &'a Group<B>,
    sharded: &'a mut Sharded<B>,
    take: RestoreScope,
    conform: Conform<'a>,
}

impl<B: Kernels> Load<'_, B> {
    /// Loads a checkpoint that a user names.
    fn named(&mut self, path: &Path) -> Result<(PathBuf, Manifest)> {
        // Not removed while it is read.
        let (path, _lease) = resolve_path::together(self.world, path)?;
        let manifest = self.load(&path)?;
        Ok((path, manifest))
    }

    /// Loads the newest checkpoint that is whole; names the ones it passed over, with the reasons.
    /// None if there is none at all. Only checkpoints that are proven damaged are passed over: the
    /// run would train again from an older one, and replace the newer ones in the end.
    fn newest(&mut self, directory: &RunDirectory) -> Result<Option<(PathBuf, Manifest)>> {
        let checkpoints = directory.checkpoints();
        // One rank looks, so that all try the same ones.
        let mine = self.world.all_ok(if self.world.rank() == 0 {
            checkpoints.steps()
        } else {
            Ok(vec![])
        })?;
        let steps = self.world.broadcast_numbers(&mine)?;
        let mut last = None;
        for path in steps.iter().rev().map(|step| checkpoints.path(*step)) {
            match self.load(&path) {
                Ok(manifest) => return Ok(Some((path, manifest))),
                Err(e) if e.kind() != Kind::Damaged => return Err(e),
                Err(e) => {
                    if self.world.rank() == 0 {
                        log::warn!(
                            "passing over {}: {}",
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
                .at(format_args!("none of {} checkpoints is whole; the oldest", steps.len()))
                .hint("start again under another run.name, or restore a copy")),
        }
    }

    /// Loads a checkpoint into every rank's ranges. Together the ranks check all of it. Failed
    /// reads are tried again: network file systems fail now and then.
    ///
    /// # Errors
    /// It is proven damaged ([`Kind::Damaged`]), another model's or another version's, or cannot be
    /// read. All ranks have the same.
    fn load(&mut self, path: &Path) -> Result<Manifest> {
        let _span = span(Doing::Restore, None);
        let mut attempt = 1;
        loop {
            match self.load_once(path) {
                Err(e) if e.kind() == Kind::Io && attempt < ATTEMPTS => {
                    if self.world.rank() == 0 {
                        log::warn!("{}: trying again", e.message());
                    }
                    attempt += 1;
                    std::thread::sleep(BETWEEN);
                }
                loaded => return loaded,
            }
        }
    }

    /// As [`Load::load`], once.
    fn load_once(&mut self, path: &Path) -> Result<Manifest> {
        let mut reader = Reader::open_together(self.world, path, || Reader::open(path))?;
        reader.fetch(self.world, &self.sharded.restored())?;
        self.world.all_ok(reader.check_files())?;
        let take = self.take;
        let names = self.sharded.state_names();
        let state = (take == RestoreScope::Everything).then_some(&names[..]);
        // Another tokenizer mostly makes another model, too: the first difference is reported.
        let conforms = (self.conform)(reader.manifest()).map_err(|e| e.at(path.display()));
        let fits =
            conforms.and_then(|()| reader.manifest().check(path, self.sharded.layouts(), state));
        self.world.all_ok(fits)?;
        // Another run begins with the parameters that this one is used with; the same run goes on
        // with the ones it trains.
        let used = if take == RestoreScope::Weights { reader.used() } else { 0 };
        let restored =
            self.sharded.restore(|tensor, part, columns, range, out| match (part, take) {
                (_, RestoreScope::Everything) => reader.read(tensor, part, columns, range, out),
                // A new average begins at the parameters.
                (part, _) if part == 0 || names[part - 1] == AVERAGE => {
                    reader.read(tensor, used, columns, range, out)
                }
                // Other fresh state is zero, as `out` is.
                _ => Ok(()),
            });
        self.world.all_ok(restored)?;
        Ok(reader.into_manifest())
    }
}

/// Reports the differences of the configuration from the one that the checkpoint was trained with.
fn tell_of_changes(before: &Config, now: &Config) {
    let Changes { curve, rounding, layout } = Changes::between(before, now);
    if !curve.is_empty() {
        log::warn!("the run goes on with another configuration: {}", curve.join("; "));
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
