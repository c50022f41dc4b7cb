//! Where a run begins: at step 0, or at a checkpoint that proves whole.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::directory::{Resume, RunDirectory};
use crate::activity::{Doing, span};
use crate::backend::Kernels;
use crate::checkpoint::tools::find;
use crate::checkpoint::{Manifest, Progress, Reader};
use crate::comm::Group;
use crate::config::{Config, Plan};
use crate::error::{Error, Result};
use crate::optim::AVERAGE;
use crate::parallel::Sharded;

/// What of a checkpoint is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Take {
    /// All: the run goes on as if it had not been interrupted.
    Everything,
    /// Parameters and progress; the optimizer begins anew.
    NoOptimizer,
    /// The parameters: another run begins at step 0 with them.
    Weights,
}

/// A checkpoint that a run went on from.
#[derive(Debug, Clone, PartialEq)]
pub struct Resumed {
    /// How far the run is now.
    pub progress: Progress,
    /// The checkpoint; none at the start.
    pub from: Option<PathBuf>,
}

/// Loads what `resume` asks for: collective over `world`.
///
/// # Errors
/// There is no checkpoint that is whole, or it is one of another model.
pub fn resume<B: Kernels>(
    world: &Group<B>,
    sharded: &mut Sharded<B>,
    plan: &Plan,
    directory: &RunDirectory,
    resume: &Resume,
    mut take: Take,
) -> Result<Resumed> {
    let start = Resumed { progress: Progress::default(), from: None };
    let (from, manifest) = match resume {
        Resume::No => return Ok(start),
        Resume::From(path) => elsewhere(world, sharded, path, take)?,
        Resume::Auto => match (newest(world, sharded, directory, take)?, branch(world, directory)?) {
            (Some(found), _) => found,
            // It began at a checkpoint of another run and was killed before it had saved any of its own.
            (None, Some(Branch { from, take: asked })) => {
                take = asked;
                elsewhere(world, sharded, &from, asked)?
            }
            (None, None) => return Ok(start),
        },
    };
    if world.rank() == 0 && take == Take::Everything {
        warn_of_changes(&manifest.config, &plan.config);
    }
    let progress = match take {
        Take::Everything => manifest.progress(),
        Take::NoOptimizer => Progress { updates: 0, ..manifest.progress() },
        Take::Weights => Progress::default(),
    };
    let (at, asked) = (progress.step, plan.config.run.steps);
    let fits = match at <= asked {
        true => Ok(()),
        false => Err(Error::input(format!("{} is at step {at}, beyond run.steps = {asked}", from.display()))
            .hint("raise run.steps")),
    };
    world.agree(fits)?;
    Ok(Resumed { progress, from: Some(from) })
}

/// Where a run began that began at a checkpoint of another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Branch {
    /// The checkpoint.
    pub from: PathBuf,
    /// What of it was taken.
    pub take: Take,
}

/// Where the run began, as rank 0 reads it.
fn branch<B: Kernels>(world: &Group<B>, directory: &RunDirectory) -> Result<Option<Branch>> {
    let mine = if world.rank() == 0 { directory.branch() } else { None };
    let mine = serde_json::to_vec(&mine).map_err(|e| Error::internal(format!("branch: {e}")))?;
    let told = world.gather_bytes(mine).wait()?;
    serde_json::from_slice(&told[0]).map_err(|e| Error::comm(format!("rank 0 sent a malformed branch: {e}")))
}

/// Loads a checkpoint that a user names.
fn elsewhere<B: Kernels>(
    world: &Group<B>,
    sharded: &mut Sharded<B>,
    path: &Path,
    take: Take,
) -> Result<(PathBuf, Manifest)> {
    // One rank looks: a link such as `latest` may move meanwhile. What it finds is not removed while it is read.
    let found = if world.rank() == 0 { find::checkpoint(path).map(Some) } else { Ok(None) };
    let found = world.agree(found)?;
    let _lease = found.as_deref().and_then(find::hold);
    let path = told(world, found)?;
    let manifest = load(world, sharded, &path, take).map_err(Refusal::why)?;
    Ok((path, manifest))
}

/// Rank 0's path, on every rank.
fn told<B: Kernels>(world: &Group<B>, mine: Option<PathBuf>) -> Result<PathBuf> {
    let mine = mine.map(|path| path.into_os_string().into_encoded_bytes()).unwrap_or_default();
    let all = world.gather_bytes(mine).wait()?;
    Ok(PathBuf::from(String::from_utf8_lossy(&all[0]).into_owned()))
}

/// Loads the newest checkpoint that is whole; says which ones it passed over, and why. None if there is none at all.
fn newest<B: Kernels>(
    world: &Group<B>,
    sharded: &mut Sharded<B>,
    directory: &RunDirectory,
    take: Take,
) -> Result<Option<(PathBuf, Manifest)>> {
    let checkpoints = directory.checkpoints();
    // One rank looks, so that all try the same ones.
    let mine = if world.rank() == 0 { checkpoints.steps() } else { vec![] };
    let bytes = mine.iter().flat_map(|step| step.to_le_bytes()).collect();
    let told = world.gather_bytes(bytes).wait()?;
    let steps: Vec<u64> = told[0].as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let mut last = None;
    for path in steps.iter().rev().map(|step| checkpoints.path(*step)) {
        match load(world, sharded, &path, take) {
            Ok(manifest) => return Ok(Some((path, manifest))),
            Err(Refusal::Unfit(e)) => return Err(e),
            Err(Refusal::Damaged(e)) => {
                if world.rank() == 0 {
                    log::warn!("passing over {}: {}", path.display(), e.to_string().replace("\nhint: ", "; "));
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

/// Why a checkpoint was not loaded. All ranks have the same.
enum Refusal {
    /// It is not whole: an older one may be.
    Damaged(Error),
    /// It is another model's: so are the older ones.
    Unfit(Error),
}

impl Refusal {
    fn why(self) -> Error {
        match self {
            Self::Damaged(e) | Self::Unfit(e) => e,
        }
    }
}

/// Loads a checkpoint into every rank's ranges. Together the ranks check all of it.
fn load<B: Kernels>(world: &Group<B>, sharded: &mut Sharded<B>, path: &Path, take: Take) -> Result<Manifest, Refusal> {
    let _span = span(Doing::Restore, None);
    let open = || {
        let mut reader = Reader::open(path)?;
        reader.check_files(world.rank(), world.size())?;
        Ok(reader)
    };
    let mut reader = world.agree(open()).map_err(Refusal::Damaged)?;
    let names = sharded.state_names();
    let state = (take == Take::Everything).then_some(&names[..]);
    let fits = reader.manifest().check(path, sharded.layouts(), state);
    world.agree(fits).map_err(Refusal::Unfit)?;
    // Another run begins with what this one is used as; the same run goes on with what it trains.
    let used = if take == Take::Weights { reader.used() } else { 0 };
    let restored = sharded.restore(|tensor, part, range, out| match (part, take) {
        (_, Take::Everything) => reader.read(tensor, part, range, out),
        // A new average begins at the parameters.
        (part, _) if part == 0 || names[part - 1] == AVERAGE => reader.read(tensor, used, range, out),
        // Other fresh state is zero, as `out` is.
        _ => Ok(()),
    });
    world.agree(restored).map_err(Refusal::Damaged)?;
    Ok(reader.manifest().clone())
}

/// Says which of the keys that shape the curve differ from those that the checkpoint was trained with.
fn warn_of_changes(before: &Config, now: &Config) {
    let table = |config: &Config| toml::Table::try_from(config).unwrap_or_default();
    let (before, now) = (table(before), table(now));
    let mut changes = Vec::new();
    for (section, keys) in
        [("run", &["steps", "seed"][..]), ("batch", &["global"]), ("data", &[]), ("optimizer", &[]), ("schedule", &[])]
    {
        let of = |table: &toml::Table| table.get(section).and_then(toml::Value::as_table).cloned().unwrap_or_default();
        let (before, now) = (of(&before), of(&now));
        for (key, value) in now.iter().filter(|(key, _)| keys.is_empty() || keys.contains(&key.as_str())) {
            match before.get(key) {
                Some(old) if old == value => {}
                Some(old) => changes.push(format!("{section}.{key} was {old}, is {value}")),
                None => changes.push(format!("{section}.{key} was left out, is {value}")),
            }
        }
    }
    if !changes.is_empty() {
        log::warn!("the run goes on with another configuration: {}", changes.join("; "));
    }
}
