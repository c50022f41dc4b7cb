//! Repeats steps of a run from a checkpoint, and compares them bit for bit with its records.
//!
//! A replay is a resumed run on other ranks without a run directory: it uses the configuration of
//! the run, the data loader, the engine and the step of `hpctrain train`. With `StopAt` it
//! also records the tensors of each step ([`TensorObserver`](crate::engine::TensorObserver)) and
//! stops at the first one with bad values; then it runs the micro-batch of that tensor sample by
//! sample.

mod conditions;
mod float_bits;
mod options;
mod range;
mod recorder;
mod report;
mod session;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use conditions::ReplayedJob;
pub use options::ReplayOptions;
pub use recorder::StopAt;
use report::{Located, ReplayReport};
pub use session::ReplayTask;
use session::{FirstBad, ReplayOutcome};

use crate::checkpoint::{Manifest, Progress};
use crate::comm::AlgorithmChoice;
use crate::config::{
    Config, DataOrder, Environment, Parallel, ReduceChoice, ResolvedConfig, Staleness,
    at_moved_data,
};
use crate::data::{Dataset, ExcludedSummary};
use crate::engine::{micro_batches, plan_for, samples_of_step};
use crate::error::{Error, Kind, Result};
use crate::parallel::{PipelineSchedule, Storage, Zero};
use crate::run_dir::RunDirectory;
use crate::run_records::RunRecords;
use crate::verify::{Launcher, LayoutRow};

/// Replays steps of a run and prints a report. Returns true if all steps have the bits of the
/// records.
///
/// # Errors
/// Returns an error if the run cannot be replayed, no checkpoint is old enough, or a step fails.
pub fn replay(options: &ReplayOptions) -> Result<bool> {
    let records = RunRecords::open(&options.run)?;
    let directory = RunDirectory::at(&options.run);
    check_run(&records, &directory, options)?;
    let steps = range::steps(&records, options.steps.clone(), options.stop)?;
    let first = *steps.start();
    let mut below = u64::MAX;
    loop {
        let start = match options.from_start || first == 1 {
            true => range::beginning(&directory, first)?,
            false => range::newest_before(&directory, &records, first, below)?,
        };
        match (replay_from(options, &records, &start, steps.clone()), start.own_manifest()) {
            // Its elements are checked only when they are read. Nothing is before a run's
            // beginning.
            (Err(e), Some(manifest)) if e.kind() == Kind::Damaged => {
                log::warn!("skipping a checkpoint: {}", e.message());
                below = manifest.step;
            }
            (replayed, _) => return replayed,
        }
    }
}

/// Refuses runs whose steps depend on more than their ranks.
fn check_run(
    records: &RunRecords,
    directory: &RunDirectory,
    options: &ReplayOptions,
) -> Result<()> {
    let staleness = records.config.parameter_server.staleness;
    if staleness != Staleness::Bound(0) && directory.workers_path().exists() {
        return Err(Error::input(format!(
            "{}: parameter_server.staleness = {staleness}: its steps depend on the times at which \
             workers pushed gradients",
            records.path.display()
        ))
        .hint("train with parameter_server.staleness=0 to be able to replay"));
    }
    if options.stop.is_some() && records.config.local_sgd.replicas.is_some() {
        return Err(Error::input("--stop-at-first does not support local SGD")
            .hint("omit it to compare the steps with their records"));
    }
    Ok(())
}

/// Replays from a state.
fn replay_from(
    options: &ReplayOptions,
    records: &RunRecords,
    start: &range::Start,
    steps: RangeInclusive<u64>,
) -> Result<bool> {
    let manifest = start.checkpoint.as_ref().map(|(_, manifest, _)| manifest);
    let directory = RunDirectory::at(&options.run);
    let recorded = range::jobs(&directory, start.step(), *steps.end())?;
    let of_last = match recorded.last() {
        Some((_, job)) => job.configuration()?,
        None => range::configuration(&directory, records, *steps.end())?,
    };
    let config = options.overlay(&of_last)?;
    let mut data = config.clone();
    data.data.local_cache = None;
    let (mut train, _) = micro_batches::open(&data).map_err(|e| at_moved_data(e, &data))?;
    let own = start.own_manifest();
    check_data(&train, own)?;
    let fingerprint = train.fingerprint();
    if let Some(manifest) = manifest {
        manifest.conform(&mut train)?;
    }
    let of_run = plan_of_run(&config, &train)?;
    if recorded.is_empty()
        && let Some(Manifest { config, data: Some(trained), .. }) = own
        && config.data.exclude == of_last.data.exclude
    {
        check_excluded(&of_run, trained.excluded.as_ref())?;
    }
    let mut jobs = Vec::with_capacity(recorded.len());
    for (since, job) in recorded {
        job.check_data(&fingerprint)?;
        let config = job.configuration()?;
        let plan = plan_of_run(&options.overlay(&config)?, &train)?;
        check_excluded(&plan, job.excluded.as_ref())?;
        jobs.push(ReplayedJob { since, job, config, plan });
    }
    check_ranks(&of_run, options.ranks)?;
    let layouts = layouts(&of_run.config, options);
    let bounds = match options.stop {
        Some(StopAt::Spike(factor)) => range::spike_bounds(&records.steps, &steps, factor),
        _ => BTreeMap::new(),
    };
    let task = ReplayTask {
        run: options.run.clone(),
        layouts: layouts.clone(),
        from: start.checkpoint.as_ref().map(|(path, ..)| path.clone()),
        take: start.take,
        steps: steps.clone(),
        stop: options.stop,
        bounds,
        mixing: conditions::mixing(&of_run).map(str::to_owned),
    };
    let folder = tempfile::Builder::new().prefix("hpctrain-replay-").tempdir();
    let folder =
        folder.map_err(|e| Error::io("create a directory in", &std::env::temp_dir(), e))?;
    let outcome: ReplayOutcome = options.launcher.run(options.ranks, &task, folder.path())?;
    let located = outcome
        .first_bad
        .as_ref()
        .map(|found| locate(found, &of_run, &mut train, &jobs))
        .transpose()?;
    let unmet = conditions::unmet(&of_run, &jobs, start.step(), &layouts[0], options.ranks);
    let report = ReplayReport::new(options, records, &of_run, &task, &outcome, located, unmet);
    report.print(options.json)?;
    Ok(report.is_same())
}

/// Refuses data that differs from that of the checkpoint.
fn check_data(train: &Dataset, manifest: Option<&Manifest>) -> Result<()> {
    let trained = manifest.and_then(|manifest| manifest.data.as_ref());
    match trained.and_then(|trained| train.fingerprint().difference(&trained.fingerprint)) {
        None => Ok(()),
        Some(what) => Err(Error::input(format!("the training data has changed: {what}"))
            .hint("give the data that the run was trained on: --data PATH")),
    }
}

/// Refuses other excluded samples than those that a start of the run recorded.
///
/// # Errors
/// Returns an error if the list of `data.exclude` has changed.
pub fn check_excluded(plan: &ResolvedConfig, recorded: Option<&ExcludedSummary>) -> Result<()> {
    let now = plan.excluded.as_ref().map(|excluded| excluded.summary());
    match ExcludedSummary::difference(now.as_ref(), recorded) {
        None => Ok(()),
        Some(what) => {
            let file = plan.config.data.exclude.as_deref().unwrap_or("data.exclude");
            Err(Error::input(format!("{file} has changed since the run: {what}"))
                .hint("give the file that it was trained with: --set data.exclude=FILE"))
        }
    }
}

/// Resolves the configuration for the ranks of the run.
fn plan_of_run(config: &Config, train: &Dataset) -> Result<ResolvedConfig> {
    let Parallel { pipeline, tensor, shard, replica, .. } = config.parallel;
    let ranks = pipeline * tensor * shard.unwrap_or(1) * replica.unwrap_or(1);
    let vocabulary = Some(train.vocabulary()).filter(|ids| *ids > 0);
    let on_gpu = config.needs_gpu();
    plan_for(config.clone(), &Environment { ranks, threads: 1, vocabulary, on_gpu }, train)
}

/// Refuses numbers of ranks on which the run has other samples or other sums.
fn check_ranks(of_run: &ResolvedConfig, ranks: usize) -> Result<()> {
    let data = of_run.mesh.data();
    let why = if of_run.config.data.order == DataOrder::Files {
        "data.order = files gives other samples on other numbers of ranks"
    } else if conditions::has_synchronised(&of_run.config) {
        "a synchronised batch_norm takes its statistics over the ranks"
    } else {
        return Ok(());
    };
    if ranks == data {
        return Ok(());
    }
    Err(Error::input(format!("--ranks {ranks}: {why}")).hint(format!("--ranks {data}")))
}

/// Returns the layouts of a replay, those that need less memory last. All ranks are data-parallel,
/// which changes no bits.
fn layouts(config: &Config, options: &ReplayOptions) -> Vec<Config> {
    let ranks = options.ranks;
    let mut base = config.clone();
    base.data.local_cache = None;
    base.run.sdc_check_every = 0;
    base.run.threads = Config::default().run.threads;
    base.parallel.stages = None;
    base.parallel.schedule = PipelineSchedule::OneForwardOneBackward;
    if base.comm.algorithm == AlgorithmChoice::Vendor && options.launcher == Launcher::Threads {
        // Threads have no library with collectives.
        base.comm.algorithm = AlgorithmChoice::HalvingDoubling;
    }
    let row = |zero: Zero| {
        let shard = if zero == Zero::Zero { 1 } else { ranks };
        let replica = ranks / shard;
        LayoutRow {
            ranks,
            pipeline: 1,
            tensor: 1,
            zero,
            shard,
            replica,
            storage: Storage::Ranks,
            reduce: ReduceChoice::Blocks,
        }
    };
    let zero = if ranks == 1 || config.local_sgd.replicas.is_some() {
        Zero::Zero
    } else {
        config.parallel.zero
    };
    let mut rows = vec![row(zero)];
    if zero != Zero::Three && ranks > 1 && config.local_sgd.replicas.is_none() {
        rows.push(row(Zero::Three));
    }
    rows.into_iter().map(|row| row.config(&base)).collect()
}

/// Returns the rank of the run that computed a bad tensor, and the samples that cause it.
fn locate(
    found: &FirstBad,
    of_run: &ResolvedConfig,
    train: &mut Dataset,
    jobs: &[ReplayedJob],
) -> Result<Located> {
    let Some(micro) = found.seen.samples.clone() else { return Ok(Located::default()) };
    let progress = Progress { step: found.step - 1, updates: 0, position: found.position };
    let job = jobs.iter().rev().find(|job| job.since < found.step);
    let all = samples_of_step(job.map_or(of_run, |job| &job.plan), train, progress)?;
    let in_micro = |position: u64| micro.contains(&(position - found.position));
    let samples: Vec<_> = all.into_iter().filter(|one| in_micro(one.position)).collect();
    let mut located = Located::default();
    if let Some(first) = samples.first() {
        located.virtual_rank = Some(first.virtual_rank);
        located.rank = Some(first.rank);
        located.micro_batch = Some(first.micro_batch);
        let hosts = job.map_or(&[][..], |job| &job.job.hosts);
        located.host = hosts.get(first.rank).cloned();
    }
    for sample in samples {
        let contents = train.describe_sample(sample.draw.sample)?;
        located.samples.push((sample, contents));
    }
    Ok(located)
}
