//! `hpctrain data which`: the samples that a run read in a step.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use crate::checkpoint::tools::resolve_path;
use crate::checkpoint::{Checkpoints, Manifest, Progress, step_of};
use crate::config::{
    Config, Environment, ResolvedConfig, Staleness, at_moved_data, overlay, with_data_path,
};
use crate::data::inspect::table;
use crate::data::{Dataset, Mix, SampleContents, TrainedOn};
use crate::engine::{StepSample, micro_batches, plan_for, samples_of_step};
use crate::error::{Error, Kind, Result};
use crate::replay::check_excluded;
use crate::run_dir::{Branch, RestoreScope, RunDirectory};
use crate::telemetry::say;
use crate::telemetry::starts::{self, Start, StartedJob};

/// Arguments of `hpctrain data which`.
#[derive(Debug, Args)]
pub struct WhichArgs {
    /// A run, or a checkpoint
    run: PathBuf,
    /// The step; the first one is 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    step: u64,
    /// Show only samples of this virtual rank
    #[arg(long, value_name = "V")]
    virtual_rank: Option<usize>,
    /// Show the contents: text, or values by the names of their columns
    #[arg(long)]
    text: bool,
    /// The run's data, if it was moved: a directory of shards, or a file
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Override one key of [data], such as data.mix, or data.exclude to see what a branch of the
    /// run would read; may be repeated
    #[arg(long = "set", value_name = "data.KEY=VALUE")]
    overrides: Vec<String>,
    /// Print one JSON object per line and sample instead of the table
    #[arg(long)]
    json: bool,
    /// Print only the numbers of the samples, one per line, as data.exclude takes them
    #[arg(long, conflicts_with_all = ["json", "text"])]
    numbers: bool,
}

/// The object of a sample for `--json`.
#[derive(Serialize)]
struct SampleLine<'a> {
    step: u64,
    position: u64,
    virtual_rank: usize,
    /// `None` if workers of parameter servers took virtual ranks as they came.
    rank: Option<usize>,
    micro_batch: Option<u64>,
    data_set: &'a str,
    /// The number of completed passes over its data set.
    epoch: u64,
    sample: u64,
    file: String,
    row: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<SampleContents>,
}

/// Prints the samples of a step.
pub fn run(args: &WhichArgs) -> Result<()> {
    let found = RunStep::find(&args.run, args.step)?;
    let RunStep { config, progress, recorded, started, has_ranks } = found;
    let before = config.data.exclude.clone();
    let config = args.overlay(config)?;
    let (train, _) = micro_batches::open(&config).map_err(|e| at_moved_data(e, &config))?;
    let is_recorded = config.data.exclude == before;
    let plan = resolve_as_recorded(config, &train)?;
    let recorded = recorded.as_ref();
    check_data(&train, recorded, started.as_ref())?;
    let of_start = started.as_ref().map(|job| job.excluded.as_ref());
    let excluded = of_start.or_else(|| recorded.map(|recorded| recorded.excluded.as_ref()));
    if let Some(excluded) = excluded.filter(|_| is_recorded) {
        check_excluded(&plan, excluded)?;
    }
    if let Some(virtual_rank) = args.virtual_rank.filter(|it| *it >= plan.virtual_ranks) {
        let all = plan.virtual_ranks;
        return Err(Error::input(format!(
            "--virtual-rank {virtual_rank}: the run has {all} virtual ranks"
        ))
        .hint(format!("give a number from 0 to {}", all - 1)));
    }
    let mut samples = samples_of_step(&plan, &train, progress)?;
    samples.retain(|sample| args.virtual_rank.is_none_or(|wanted| sample.virtual_rank == wanted));
    let data = &plan.config.data;
    let names = match &data.mix[..] {
        [] => vec![data.path.clone()],
        mix => Mix::names(mix),
    };
    let mut stored = train.as_stored();
    let mut lines = Vec::with_capacity(samples.len());
    for StepSample { position, virtual_rank, rank, micro_batch, data_set, draw, file, row } in
        samples
    {
        lines.push(SampleLine {
            step: args.step,
            position,
            virtual_rank,
            rank: Some(rank).filter(|_| has_ranks),
            micro_batch: Some(micro_batch).filter(|_| has_ranks),
            data_set: names.get(data_set).map_or("", String::as_str),
            epoch: draw.epoch,
            sample: draw.sample,
            file: file.display().to_string(),
            row,
            text: match args.text {
                true => Some(SampleContents::read(&mut stored, draw.sample)?),
                false => None,
            },
        });
    }
    args.print(&lines, !data.mix.is_empty())
}

/// Resolves the configuration of a run for the ranks that it had.
pub fn resolve_as_recorded(config: Config, train: &Dataset) -> Result<ResolvedConfig> {
    let parallel = &config.parallel;
    let data = parallel.replica.unwrap_or(1) * parallel.shard.unwrap_or(1);
    let facts = Environment {
        ranks: parallel.pipeline * parallel.tensor * data,
        threads: 1,
        vocabulary: Some(train.vocabulary()).filter(|ids| *ids > 0),
        // The order of samples does not depend on the device, and no key is refused on a GPU.
        on_gpu: true,
    };
    plan_for(config, &facts, train)
}

/// Checks that the data is that of a checkpoint and of a start, as far as they are known.
fn check_data(
    train: &Dataset,
    recorded: Option<&TrainedOn>,
    started: Option<&StartedJob>,
) -> Result<()> {
    let fingerprint = train.fingerprint();
    if let Some(what) = recorded.and_then(|one| fingerprint.difference(&one.fingerprint)) {
        return Err(Error::input(format!("the data of the run has changed: {what}"))
            .hint("give the data that it was trained on: --data PATH"));
    }
    started.map_or(Ok(()), |job| job.check_data(&fingerprint))
}

impl WhichArgs {
    /// Returns the configuration of the run with the overrides of the command line.
    fn overlay(&self, config: Config) -> Result<Config> {
        if let Some(other) = self.overrides.iter().find(|key| !key.starts_with("data.")) {
            return Err(Error::input(format!("--set {other}: only keys of [data] can be set"))
                .hint("hpctrain data order shows the samples of another configuration"));
        }
        let config = overlay(&config, &self.overrides)?;
        match &self.data {
            Some(path) => with_data_path(config, path),
            None => Ok(config),
        }
    }

    /// Prints samples in the form that was asked for.
    fn print(&self, lines: &[SampleLine<'_>], is_mixture: bool) -> Result<()> {
        if self.numbers {
            lines.iter().for_each(|line| say(line.sample));
            return Ok(());
        }
        if self.json {
            for line in lines {
                say(serde_json::to_string(line).map_err(|e| Error::internal(e.to_string()))?);
            }
            return Ok(());
        }
        let mut header = vec!["position", "virtual rank", "rank", "micro-batch"];
        header.extend(is_mixture.then_some("data set"));
        header.extend(["epoch", "sample", "file", "row"]);
        header.extend(self.text.then_some("text"));
        let header: Vec<String> = header.into_iter().map(str::to_owned).collect();
        let rows = lines.iter().map(|line| line.row(is_mixture));
        let rows: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
        say(table(&rows).trim_end());
        Ok(())
    }
}

/// The number of characters of contents in the table.
const MAX_TEXT: usize = 80;

impl SampleLine<'_> {
    /// Returns the row of the table.
    fn row(&self, is_mixture: bool) -> Vec<String> {
        let known = |number: Option<u64>| number.map_or("-".to_owned(), |it| it.to_string());
        let mut row = vec![
            self.position.to_string(),
            self.virtual_rank.to_string(),
            known(self.rank.map(|rank| rank as u64)),
            known(self.micro_batch),
        ];
        row.extend(is_mixture.then(|| self.data_set.to_owned()));
        let name = Path::new(&self.file).file_name().unwrap_or_default();
        row.extend([
            self.epoch.to_string(),
            self.sample.to_string(),
            name.to_string_lossy().into_owned(),
            self.row.to_string(),
        ]);
        row.extend(self.text.as_ref().map(|contents| {
            let text = contents.to_string();
            match text.char_indices().nth(MAX_TEXT) {
                Some((end, _)) => format!("{}…", &text[..end]),
                None => text,
            }
        }));
        row
    }
}

/// The records of a run at one of its steps.
pub struct RunStep {
    /// The resolved configuration of the start of the run that took the step.
    pub config: Config,
    /// The progress before the step.
    pub progress: Progress,
    /// The training data of that start, if a checkpoint has recorded it.
    pub recorded: Option<TrainedOn>,
    /// The job of that start, if it is recorded.
    pub started: Option<StartedJob>,
    /// Whether ranks had fixed parts of a batch, as all have but workers of parameter servers.
    pub has_ranks: bool,
}

impl RunStep {
    /// Finds step `step` of the run at `path`, or of the run of the checkpoint at `path`.
    ///
    /// # Errors
    /// Returns an error if there is no run, if it does not have the step, or if its records do not
    /// determine the samples of the step.
    pub fn find(path: &Path, step: u64) -> Result<Self> {
        let (manifest, directory) = match resolve_path::run(path) {
            Ok(checkpoints) => {
                let directory = checkpoints.root().parent().map(RunDirectory::at);
                (nearest(&checkpoints, step)?, directory)
            }
            Err(_) => {
                let path = resolve_path::checkpoint(path)?;
                let _lease = resolve_path::lease(&path);
                (Some(Manifest::read(&path)?), None)
            }
        };
        let of_start = manifest.as_ref().filter(|manifest| manifest.step >= step);
        let starts = match &directory {
            Some(directory) => starts::read(directory.path())?,
            None => Vec::new(),
        };
        let started = Start::of_step(&starts, step);
        let started = started.and_then(|start| start.job.as_ref().map(|job| (start.step, job)));
        let config = match (started, of_start, &directory) {
            (Some((_, job)), ..) => Some(job.configuration()?),
            (None, None, Some(directory)) => last_config(directory, manifest.as_ref())?,
            (None, Some(manifest), _) => Some(manifest.config.clone()),
            (None, None, None) => manifest.as_ref().map(|manifest| manifest.config.clone()),
        };
        let config = config.ok_or_else(|| {
            Error::input(format!("{} has not begun", path.display()))
                .hint("hpctrain data order shows the samples of a configuration")
        })?;
        let steps = config.run.steps;
        if !(1..=steps).contains(&step) {
            return Err(Error::input(format!("{} has no step {step}", path.display()))
                .hint(format!("its steps are 1 to {steps} (run.steps)")));
        }
        let branch = directory.as_ref().map(RunDirectory::branch).transpose()?.flatten();
        let branch = branch.filter(|branch| branch.take != RestoreScope::Weights);
        if let Some(from) = branch.as_ref().map(|branch| &branch.from)
            && let Some(began) = from.file_name().and_then(|name| step_of(name.to_str()?))
            && began >= step
        {
            let from = from.display();
            return Err(Error::input(format!(
                "{} began after step {began} of {from}",
                path.display()
            ))
            .hint(format!("hpctrain data which {from} --step {step}")));
        }
        let start = match (started, &manifest, branch) {
            (Some((step, job)), ..) => Progress { step, updates: step, position: job.position },
            (None, Some(manifest), _) => manifest.progress(),
            (None, None, Some(Branch { from, .. })) => {
                Manifest::read(&from).map_err(|e| e.at("the origin of the run"))?.progress()
            }
            (None, None, None) => Progress::default(),
        };
        let recorded = of_start.and_then(|manifest| manifest.data.clone());
        check_recorded(path, step, recorded.as_ref())?;
        let has_servers = manifest.as_ref().is_some_and(is_served)
            || directory.is_some_and(|directory| directory.workers_path().exists());
        if has_servers && config.parameter_server.staleness != Staleness::Bound(0) {
            return Err(Error::input(format!(
                "{}: workers of parameter servers took batches as they came, and no record has \
                 the batches of a step",
                path.display()
            ))
            .hint("with parameter_server.staleness=0 the samples of each step are fixed"));
        }
        Ok(Self {
            progress: before(step, start, config.batch.global).ok_or_else(|| {
                Error::input(format!(
                    "{}: batch.global has changed, and the position of step {step} is unknown",
                    path.display()
                ))
                .hint("give a checkpoint that was saved before the change")
            })?,
            config,
            recorded,
            started: started.map(|(_, job)| job.clone()),
            has_ranks: !has_servers,
        })
    }
}

/// Returns the manifest of the first intact checkpoint after `step` steps or more, which the start
/// that took the step has saved; if there is none, of the last one before.
fn nearest(checkpoints: &Checkpoints, step: u64) -> Result<Option<Manifest>> {
    let steps = checkpoints.steps()?;
    let (before, after) = steps.split_at(steps.partition_point(|saved| *saved < step));
    for saved in after.iter().chain(before.iter().rev()) {
        let path = checkpoints.path(*saved);
        let _lease = resolve_path::lease(&path);
        match Manifest::read(&path) {
            Ok(manifest) => return Ok(Some(manifest)),
            Err(e) if e.kind() == Kind::Damaged => log::warn!("skipping {}", e.message()),
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}

/// Returns the configuration of the last start of a run; that of its newest checkpoint if only its
/// checkpoints are left.
fn last_config(directory: &RunDirectory, newest: Option<&Manifest>) -> Result<Option<Config>> {
    let path = directory.config_path();
    match std::fs::read_to_string(&path) {
        Ok(text) => text.parse::<Config>().map(Some).map_err(|e| {
            Error::input(format!("{} cannot be read: {}", path.display(), e.message()))
                .hint("use the version of hpctrain that wrote it")
        }),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            Ok(newest.map(|manifest| manifest.config.clone()))
        }
        Err(e) => Err(Error::io("read", &path, e)),
    }
}

/// Checks that the data of a checkpoint was that of the step.
fn check_recorded(path: &Path, step: u64, recorded: Option<&TrainedOn>) -> Result<()> {
    let Some(TrainedOn { fingerprint, changes, .. }) = recorded else { return Ok(()) };
    if fingerprint.shards.is_empty() {
        return Err(Error::input(format!(
            "{}: the samples of the run come from a program, not from files",
            path.display()
        ))
        .hint("the program that trained it can read them"));
    }
    match changes.iter().find(|change| change.step >= step) {
        None => Ok(()),
        Some(change) => Err(Error::input(format!(
            "{}: the data has changed after step {}, and no checkpoint from before is left: {}",
            path.display(),
            change.step,
            change.what
        ))
        .hint("give a checkpoint that was saved before the change")),
    }
}

/// Returns true if parameter servers wrote a checkpoint.
fn is_served(manifest: &Manifest) -> bool {
    manifest.origin.mpi.starts_with("servers")
}

/// Returns the progress before `step`, from that at another step. It is unknown if that step is a
/// later one, and a batch before it had another size.
fn before(step: u64, known: Progress, global: u64) -> Option<Progress> {
    let taken = step - 1;
    let position = match taken.checked_sub(known.step) {
        Some(later) => known.position.checked_add(later.checked_mul(global)?)?,
        None if known.position != known.step.checked_mul(global)? => return None,
        None => taken.checked_mul(global)?,
    };
    Some(Progress { step: taken, updates: taken, position })
}
