//! The preparation of a run: its data, its directory, its state, and its startup summary.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::in_memory::{self, InMemory, bytes_before, config_before, node_slots};
use super::shared_ids::{fresh_id, share};
use super::work_shares::divide_by_speed;
use super::{Customization, Run, Schedule, TrainRequest};
use crate::elastic::ElasticJob;
use crate::energy::Energy;
use crate::evaluate::{Evaluator, RunAnnouncement};
use crate::hang_timeout::HangTimeout;
use crate::hooks::Hooks;
use crate::io_retry::IoFailureTolerance;
use crate::records::{Records, record_start};
use crate::save_interval::SaveInterval;
use crate::step_timers::StepTimers;
use crate::stop_requests::StopRequests;
use crate::time_limit::TimeLimit;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::fault;
use hpctrain_checkpoint::memory::foreign_ranks;
use hpctrain_checkpoint::run_dir::{
    Branch, RestoreOptions, RestoreScope, Resume, Resumed, RunDirectory, resume,
};
use hpctrain_checkpoint::{Checkpoints, Manifest, Origin, SaveContext, Saver};
use hpctrain_comm::{self as comm, Comm, DeviceTransport, Group};
use hpctrain_config::telemetry::efficiency::Efficiency;
use hpctrain_config::telemetry::epoch_loss::EpochLoss;
use hpctrain_config::telemetry::goodput::Pauses;
use hpctrain_config::telemetry::starts::{Failures, StartedJob};
use hpctrain_config::telemetry::{logging, say, startup_summary};
use hpctrain_config::topology::Topology;
use hpctrain_config::{
    Batch, Config, EpochLength, Eval, ModelKind, OrAuto, Parallel, ReduceChoice, ResolvedConfig,
    few_virtual_ranks,
};
use hpctrain_data::{Mix, TrainedOn};
use hpctrain_device::{Kernels, format_bytes};
use hpctrain_engine::micro_batches;
use hpctrain_engine::micro_batches::MicroBatches;
use hpctrain_engine::{Model, Splits, autotune_matmuls, connect_devices, engine, memory, plan};
use hpctrain_parallel::PipelineSchedule;

/// The directory of a run that has not begun. A start that fails leaves it as it was.
struct Starting(RunDirectory);

impl Starting {
    /// Returns the directory once the run begins.
    fn started(mut self) -> RunDirectory {
        std::mem::replace(&mut self.0, RunDirectory::at(PathBuf::new()))
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        std::mem::replace(&mut self.0, RunDirectory::at(PathBuf::new())).abandon();
    }
}

/// Refuses an elastic run whose ranks cannot be replaced.
fn check_elastic(request: &TrainRequest) -> Result<()> {
    if !request.config.elastic.on || request.elastic.is_some() {
        return Ok(());
    }
    Err(Error::input("elastic.on = true, but its ranks are not processes of hpctrain train")
        .hint("start them with hpctrain train --spawn N, or remove elastic.on"))
}

impl<'h, B: Kernels> Run<'h, B> {
    /// Does all that comes before the first step. Collective over the world of `comm`.
    pub(super) fn prepare(
        comm: &Comm<B>,
        request: &TrainRequest,
        custom: Customization<'h>,
        announcement: Option<&RunAnnouncement>,
        backend: impl FnOnce(&ResolvedConfig) -> Result<B>,
    ) -> Result<Self> {
        let started = Instant::now();
        let world = comm.world();
        let root = world.rank() == 0;
        let topology = Topology::gather(&world, comm.node().host)?;
        world.all_ok(check_elastic(request))?;

        let mut config = request.config.clone();
        let is_custom = custom.data.is_some();
        let metrics = custom.metrics;
        let mut splits = match custom.data {
            Some(splits) => splits,
            None => Splits::open(&config, &world, &topology)?,
        };
        config.data.path = splits.name.clone();
        let threads = request.threads.unwrap_or_else(|| topology.threads());
        // The batch of the run is kept, and its checks are of that batch. The directory of a run
        // without a name is found later.
        let named = config.run.name.as_ref().map(|name| Path::new(&config.run.root).join(name));
        if config.batch.per_rank > 0
            && (named.is_some() || matches!(request.resume, Resume::From(_)))
        {
            let mut resolved = config.clone();
            world.all_ok(resolved.resolve_batch(comm.size()))?;
            let directory = RunDirectory::at(named.clone().unwrap_or_default());
            if let Some(before) = batch_before(&world, &directory, request, &resolved)? {
                (config.batch.global, config.batch.per_rank) = (before, 0);
            }
        }
        let may_cut = config.parallel.pipeline > 1 && config.parallel.stages.is_none();
        let mut plan = plan(comm, config.clone(), &splits.train, Some(threads))?;
        if is_custom {
            splits = world.all_ok(splits.checked(&plan))?;
        }
        let without = splits.validation.is_none() && plan.config.eval.patience > 0;
        world.all_ok(if without {
            Err(micro_batches::no_validation("eval.patience requires it", &plan.config))
        } else {
            Ok(())
        })?;
        // From here on messages may reach the device.
        let comm = comm.select_transport(plan.config.comm.transport, comm::probe_cuda_aware)?;
        let world = comm.world();
        // No rank allocates before all have measured the available memory.
        let gpu_memory = request.gpu.as_ref().map(|gpu| gpu.memory);
        let settings = plan.config.memory_checkpoint.clone();
        let foreign_ranks = foreign_ranks(&topology.hosts(), &topology.here().host);
        let foreign_ranks = foreign_ranks.div_ceil(topology.ranks_here());
        let mut held = memory::BaselineMemory {
            foreign_ranks,
            replaced: match &named {
                Some(named) => bytes_before(&world, &settings, named)?,
                None => 0,
            },
            ..memory::BaselineMemory::now(&comm, &splits.sources())
        };
        // The directory of a run without a name is not known yet, nor how much memory its in-memory
        // checkpoints take.
        let is_known = named.is_some() || request.resume != Resume::Auto || !settings.every.is_on();
        if is_known
            && may_cut
            && memory::fit_stages(&world, &mut plan, &topology, held, gpu_memory)?
            && root
        {
            let cut: Vec<usize> = plan.stages.iter().map(Range::len).collect();
            log::warn!(
                "the stages with the least work do not fit into memory: stages of {cut:?} blocks are used"
            );
        }
        if is_known {
            world.all_ok(memory::check::<B>(&plan, &topology, held, gpu_memory))?;
        }

        // A dead trainer's lease may take minutes to take over.
        let claimed =
            world.with_keepalive(root.then_some(|| {
                RunDirectory::prepare(&plan.config, &request.name, &request.resume)
            }))?;
        let path =
            claimed.as_ref().map(|directory| Ok(directory.path().to_string_lossy().into_owned()));
        let path = share(&world, path)?;
        let starting = Starting(claimed.unwrap_or_else(|| RunDirectory::at(path)));
        let directory = &starting.0;
        held.replaced = bytes_before(&world, &settings, directory.path())?;
        let mut is_new_plan = !is_known;
        if let Some(before) = batch_before(&world, directory, request, &plan.config)? {
            (config.batch.global, config.batch.per_rank) = (before, 0);
            plan = self::plan(&comm, config.clone(), &splits.train, Some(threads))?;
            is_new_plan = true;
        }
        if config.parallel.virtual_ranks.is_none()
            && config.parallel.reduce == ReduceChoice::Auto
            && plan.config.parallel.reduce == ReduceChoice::Micro
            && let Some(before) = number_before(&world, directory, request, virtual_ranks)?
            && before != plan.virtual_ranks as u64
        {
            // The default for gradients that are reduced after each micro-batch would add in
            // another order than the run has so far.
            log::info!(
                "gradients are reduced once per step, as with {before} virtual ranks before"
            );
            config.parallel.reduce = ReduceChoice::Step;
            plan = self::plan(&comm, config, &splits.train, Some(threads))?;
            is_new_plan = true;
        }
        if is_new_plan {
            if may_cut {
                memory::fit_stages(&world, &mut plan, &topology, held, gpu_memory)?;
            }
            world.all_ok(memory::check::<B>(&plan, &topology, held, gpu_memory))?;
        }
        plan.config.run.name = Some(directory.name());
        world.all_ok(plan.set_metrics(metrics))?;
        let log_to =
            if request.elastic.is_some() { logging::to_another_file } else { logging::to_file };
        world.all_ok(log_to(&directory.log_path(world.rank()), plan.config.log.level.into()))?;
        log::info!("rank {} of {} on {}", world.rank(), world.size(), topology.here().host);
        let was_asked = request.elastic.as_ref().is_some_and(ElasticJob::is_planned);
        let is_regrouping = request.elastic.as_ref().is_some_and(ElasticJob::is_regrouping);
        if let Some(job) = &request.elastic {
            job.publish(&comm, directory.path())?;
        }
        if world.rank() == 0 {
            plan.config.log_aliases();
        }
        // Hooks of any rank may take longer than all that is measured.
        let hooked = world.gather_bytes(vec![u8::from(!custom.hooks.is_empty())]).wait()?;
        let hang_timeout = HangTimeout::new(&plan.config.comm, hooked.contains(&vec![1]));
        let watch = match plan.config.comm.unmeasured_timeout() {
            Duration::ZERO => None,
            timeout => comm.watch(&directory.logs_path(), timeout)?,
        };
        // The evaluators write their heartbeats to the same directory, which was cleared before.
        if let Some(announcement) = announcement {
            announcement.announce(Some(directory.path()))?;
        }

        let backend = world.all_ok(backend(&plan))?;
        comm.count_memory(backend.clone());
        let held = memory::BaselineMemory {
            foreign_ranks,
            replaced: held.replaced,
            ..memory::BaselineMemory::now(&comm, &splits.sources())
        };
        let nccl_memory = connect_devices(&comm, &plan, &backend)?;
        let room = request.gpu.as_ref().map(|gpu| gpu.memory_without(nccl_memory));
        let fits = match nccl_memory {
            0 => Ok(()),
            _ => memory::check::<B>(&plan, &topology, held, room),
        };
        world.all_ok(fits.map_err(|error| {
            error.at(format!("NCCL has taken {} of the GPU", format_bytes(nccl_memory)))
        }))?;
        let taken = gpu_memory.zip(room).map_or(0, |(before, now)| before - now);
        world.all_ok(backend.reserve_memory(taken))?;
        let Splits { mut train, mut validation, .. } = splits;
        let (mut engine, exchange) =
            engine(&comm, &plan, backend, Some(&directory.collectives_path()))?;
        if plan.config.log.placement {
            let here = &topology.here().host;
            for block in memory::placement::<B>(&plan, world.rank()) {
                log::info!("placement: {block} of rank {} ({here})", world.rank());
            }
        }
        fault::point("build");
        let take = request.take;
        let allow_changed_data = request.allow_changed_data;
        let data_now = train.fingerprint();
        let memory = node_slots(&world, &plan, &topology, directory, &request.resume)?;
        let excluded = plan.excluded.as_ref().map(|excluded| excluded.summary());
        let taking = RestoreOptions {
            take,
            data: data_now.clone(),
            excluded: excluded.clone(),
            allow_changed_data,
            memory: memory.clone(),
        };
        let mut notes = Vec::new();
        let resume_from = &request.resume;
        let Resumed { progress, from, memory: candidate, data_changes } = resume(
            &world,
            &mut engine.model.sharded,
            &plan,
            directory,
            resume_from,
            &taking,
            &mut |manifest: &Manifest| {
                notes = manifest.conform(&mut train)?;
                validation
                    .as_mut()
                    .map_or(Ok(()), |validation| manifest.conform(validation).map(drop))
            },
        )?;
        divide_by_speed(&world, &mut plan, &mut engine)?;
        let is_in_memory = candidate.is_some();
        let (memory, earlier_slots) = match memory {
            Some(here) if settings.every.is_on() => {
                here.keep_only(candidate.as_ref());
                (Some(here), None)
            }
            // Those of a run that takes no more stay until it has published a checkpoint.
            Some(here) if is_in_memory => (None, Some(here)),
            Some(here) => {
                in_memory::remove(&world, directory, &here, true);
                (None, None)
            }
            None => (None, None),
        };
        if root {
            notes.iter().for_each(|note| log::info!("data: {note}"));
        }
        let trained_on =
            data_now.map(|fingerprint| TrainedOn { fingerprint, excluded, changes: data_changes });
        // A branch from another run's checkpoint is recorded, since the next start of this run
        // reads its own directory only.
        let branched = from
            .as_deref()
            .filter(|from| !is_in_memory && from.parent() != Some(directory.checkpoints().root()));
        let branch = branched.filter(|_| root && request.resume != Resume::Auto);
        let branch = branch.map(|from| Branch { from: from.to_path_buf(), take: request.take });
        world.all_ok(branch.map_or(Ok(()), |branch| directory.write_branch(branch)))?;
        let branched = branched.is_some();
        let gpu = request.gpu.as_ref();
        let peak = engine
            .model
            .backend
            .peak_flops()
            .map(|peak| peak / gpu.map_or(1, |gpu| gpu.sharers) as f64);
        let efficiency = Efficiency::gather(&world, &plan.network, peak)?;
        let energy = Energy::open(&world, &topology.here().host, gpu.map(|gpu| &gpu.id[..]))?;
        let products = autotune_matmuls(&world, &plan, &mut engine, &directory.matmuls_path())?;
        world.all_ok(products.to_save.map_or(Ok(()), |found| directory.write_matmuls(&found)))?;
        let epoch_length = EpochLength::new(&plan.config, train.samples());
        let epoch_loss = validation
            .is_none()
            .then(|| EpochLoss::new(epoch_length.steps(plan.config.batch.global)));
        let excluded = plan.excluded.as_ref().map(|excluded| excluded.summary());
        let starts = root.then(|| {
            let data = trained_on.as_ref().map(|trained_on| &trained_on.fingerprint);
            StartedJob::new(&plan.config, topology.hosts(), progress.position, excluded, data)
                .and_then(|job| record_start(directory, progress.step, started, job, was_asked))
        });
        let starts = world.all_ok(starts.transpose())?;
        let failures = Failures::from_starts(starts.as_deref().unwrap_or_default());
        let is_auto = plan.config.checkpoint.every == OrAuto::Auto;
        let records = root
            .then(|| Records::open(directory, &plan, progress.step, exchange.to_save, epoch_loss));
        let mut records = world.all_ok(records.transpose())?;
        let budget = TimeLimit::new(
            plan.config.run.time_limit,
            request.elastic.as_ref().map_or(started, ElasticJob::started),
            12 * engine.model.sharded.parameters(),
        );
        // A run that continues with other ranks saves and ends if there is no time left.
        world.all_ok(if root && !is_regrouping { budget.check() } else { Ok(()) })?;
        let stop_requests = StopRequests::new(
            root,
            budget,
            directory.markers(),
            plan.config.checkpoint.every_seconds,
        );
        if root {
            let facts = startup_summary::StartupFacts {
                ranks: world.size(),
                hosts: topology.host_count(),
                host: &topology.here().host,
                cores: topology.here().cores.len(),
                quota: topology.here().quota.map(|quota| quota.to_string()),
                spare_cores: topology.has_spare_cores(),
                library: comm.library(),
                devices: &request.devices.ranks,
                device_notes: &request.devices.notes,
                is_renumbered: comm.is_renumbered(),
                shares_memory: comm.shares_memory(),
                transport: match comm.is_mixed() {
                    true => Some(DeviceTransport::HostStaged),
                    false => comm.device_transport().filter(|_| world.size() > 1),
                },
                transport_reason: comm.transport_reason(),
                collectives: exchange.summary,
                matmuls: products.summary,
                directory: directory.path(),
                parameters: engine.model.sharded.parameters(),
                train: (train.samples(), train.tokens()),
                validation: validation.as_ref().map(|validation| validation.samples()),
                notes: train.skipped_note().into_iter().chain(notes).collect(),
                memory: &memory::worst::<B>(&plan, held),
                nccl_memory,
                resumed: (request.resume != Resume::No).then_some((progress.step, from.as_deref())),
                time: stop_requests.time_left(),
            };
            let summary = startup_summary::startup_summary(&plan, &facts);
            if let Some(board) = records.as_mut().and_then(|records| records.tensorboard.as_mut()) {
                board.text(progress.step + 1, "texts/startup_summary", &summary);
            }
            if !is_regrouping {
                say(summary);
                train.unscaled().iter().for_each(|warning| log::warn!("{warning}"));
                let few = few_virtual_ranks(&plan.config, world.size());
                let notes = [few_micros(&plan), idle_schedule(&plan), rare_sdc_checks(&plan), few];
                notes.iter().flatten().for_each(|note| log::warn!("{note}"));
            }
        }

        let job = SaveContext {
            checkpoints: directory.checkpoints(),
            config: plan.config.clone(),
            preprocessing: Some(train.preprocessing()),
            data: trained_on.clone(),
            origin: Origin {
                ranks: world.size(),
                hosts: topology.hosts(),
                mpi: comm.library().into(),
                ..Origin::default()
            },
            id: share(&world, root.then(|| Ok(fresh_id())))?,
            records: vec![directory.metrics_path()],
            state: engine.model.sharded.state_names(),
        };
        let in_memory = memory
            .map(|here| {
                let Model { backend, sharded, .. } = &mut engine.model;
                InMemory::start(here, &comm, &plan, &topology, &job, backend, sharded)
            })
            .transpose()?;
        let asynchronous = plan.config.checkpoint.async_save;
        let saver = Saver::new(
            job,
            world.clone(),
            &engine.model.backend,
            &mut engine.model.sharded,
            asynchronous,
        )?;
        let outages = IoFailureTolerance::new(
            plan.config.checkpoint.io_retry_seconds,
            progress.step > 0 || branched,
        );
        let train_samples = train.samples();
        let tokenizer = train.tokenizer().cloned();
        let feed = world.all_ok(MicroBatches::start(&engine.model, train, &plan, progress))?;
        let samples = plan.config.eval.samples;
        let chunk = plan.config.eval.batch;
        let evaluator = validation.map(|validation| Evaluator::new(validation, samples, chunk));
        let evaluator =
            evaluator.map(|evaluator| evaluator.with_set_names(Mix::names(&plan.config.data.mix)));
        let eval_every =
            if evaluator.is_some() { best_period(&plan.config, epoch_length) } else { 0 };
        if let Some(job) = &request.elastic {
            world.all_ok(job.resumed(&comm, progress.step))?;
        }
        let save_interval = (root && is_auto)
            .then(|| SaveInterval::new(failures, topology.host_count(), eval_every, progress.step));
        Ok(Self {
            comm,
            world,
            plan,
            topology,
            engine,
            feed,
            evaluator,
            tokenizer,
            train_samples,
            trained_on,
            progress,
            saver,
            in_memory,
            earlier_slots,
            // Step 0 needs no checkpoint: it can be recreated.
            schedule: Schedule {
                saved: (!branched && !is_in_memory).then_some(progress.step),
                is_in_memory,
                ..Schedule::default()
            },
            counted: None,
            stop_requests,
            elastic: request.elastic.clone(),
            save_interval,
            pauses: Pauses::default(),
            outages,
            hooks: Hooks::new(custom.hooks),
            meters: StepTimers::new(started, request.profile && root),
            efficiency,
            energy,
            hang_timeout,
            held,
            records,
            _watch: watch,
            directory: starting.started(),
        })
    }
}

/// Returns the number of virtual ranks of a resolved configuration.
fn virtual_ranks(config: &Config) -> Option<u64> {
    config.parallel.virtual_ranks.map(|ranks| ranks as u64)
}

/// Returns a number above 0 of the configuration of the checkpoint that a run resumes from, on all
/// ranks; `None` if there is none, it cannot be read, which [`resume`] reports, or only its weights
/// are taken.
fn number_before<B: Kernels>(
    world: &Group<B>,
    directory: &RunDirectory,
    request: &TrainRequest,
    number: impl Fn(&Config) -> Option<u64>,
) -> Result<Option<u64>> {
    if request.resume == Resume::No || request.take == RestoreScope::Weights {
        return Ok(None);
    }
    let mine = (world.rank() == 0).then(|| config_of_checkpoint(directory, &request.resume));
    let in_memory = match request.resume {
        Resume::Auto => config_before(world, directory)?,
        Resume::No | Resume::From(_) => None,
    };
    // Rank 0 may be on a node without slots.
    let newest = [mine.flatten(), in_memory].into_iter().flatten().max_by_key(|(step, _)| *step);
    let numbers = newest.map(|(step, config)| [step, number(&config).unwrap_or(0)]);
    let all = world.all_gather_u64(&numbers.map_or(vec![], Vec::from))?;
    let newest = all.iter().filter(|numbers| !numbers.is_empty()).max_by_key(|numbers| numbers[0]);
    Ok(newest.map(|numbers| numbers[1]).filter(|before| *before > 0))
}

/// Returns the global batch of the run so far, if `batch.per_rank` was given and would change it on
/// these ranks. Rank 0 warns of it. Collective.
fn batch_before<B: Kernels>(
    world: &Group<B>,
    directory: &RunDirectory,
    request: &TrainRequest,
    resolved: &Config,
) -> Result<Option<u64>> {
    let Batch { of_rank, global, .. } = resolved.batch;
    if of_rank == 0 {
        return Ok(None);
    }
    let before = number_before(world, directory, request, |before| Some(before.batch.global))?;
    let before = before.filter(|before| *before != global);
    if let (Some(before), 0) = (before, world.rank()) {
        log::warn!(
            "batch.global = {before} of the run is kept: batch.per_rank = {of_rank} would make it \
             {global} on these ranks"
        );
    }
    Ok(before)
}

/// Returns the step and the configuration of the checkpoint that a run resumes from, if it can be
/// read. The step is 0 if it is one of another run, so that every in-memory checkpoint is newer.
fn config_of_checkpoint(directory: &RunDirectory, resume: &Resume) -> Option<(u64, Config)> {
    let newest = |checkpoints: Checkpoints| {
        let step = checkpoints.current_step().ok()??;
        Manifest::read(&checkpoints.path(step)).ok()
    };
    let of = |manifest: Manifest| (manifest.step, manifest.config);
    let named = |path: &Path| {
        let of_run = || newest(RunDirectory::at(path).checkpoints());
        Manifest::read(path).ok().or_else(of_run)
    };
    match resume {
        Resume::No => None,
        Resume::From(path) => named(path).map(of),
        Resume::Auto => newest(directory.checkpoints()).map(of).or_else(|| {
            // The run began at a checkpoint of another run.
            let Branch { from, take } = directory.branch().ok()??;
            let origin = (take != RestoreScope::Weights).then(|| named(&from)).flatten()?;
            Some((0, origin.config))
        }),
    }
}

/// Returns the steps between two evaluations of the trainer, if one of them may have the best
/// checkpoint; otherwise 0.
fn best_period(config: &Config, epoch_length: EpochLength) -> u64 {
    let Eval { every, every_epochs, inline, .. } = config.eval;
    match inline && config.checkpoint.keep_best > 0 {
        true if every > 0 => every,
        true => every_epochs.saturating_mul(epoch_length.steps(config.batch.global)),
        false => 0,
    }
}

/// Returns a warning if there are fewer micro-batches than pipeline stages.
fn few_micros(plan: &ResolvedConfig) -> Option<String> {
    let schedule = plan.step_schedule(0);
    let micros = schedule.micros();
    let stages = schedule.stages;
    (micros < stages).then(|| {
        let idle = 100.0 * schedule.bubble_fraction();
        let batch = 4 * stages as u64 * (plan.replicas() * plan.mesh.shard) as u64;
        format!(
            "{micros} micro-batches a rank for {stages} stages leave {idle:.0} % of a step idle; \
             hint: batch.micro=1 with batch.global={batch} or more, or a smaller parallel.pipeline"
        )
    })
}

fn rare_sdc_checks(plan: &ResolvedConfig) -> Option<String> {
    let Config { run, checkpoint, .. } = &plan.config;
    // With auto the steps between checkpoints are not known yet.
    let every = checkpoint.every.number().unwrap_or(0);
    let kept = (checkpoint.keep as u64).saturating_mul(every);
    let is_rare = plan.mesh.replica > 1 && every > 0 && run.sdc_check_every > kept;
    is_rare.then(|| {
        format!(
            "run.sdc_check_every = {} is more than checkpoint.keep × checkpoint.every = {kept}: an SDC check may mark all \
             checkpoints but one as suspect, and that one may be {} steps old; hint: run.sdc_check_every={kept} or less",
            run.sdc_check_every,
            run.sdc_check_every + every
        )
    })
}

/// Returns a warning if the schedule has no deferred wgrad to schedule.
fn idle_schedule(plan: &ResolvedConfig) -> Option<String> {
    let Parallel { schedule, pipeline, .. } = plan.config.parallel;
    let why = match plan.config.model.kind {
        _ if schedule == PipelineSchedule::OneForwardOneBackward => return None,
        // Custom blocks may support deferred wgrad.
        _ if pipeline > 1 && plan.config.model.own.is_some() => return None,
        _ if pipeline == 1 => "there is one stage",
        ModelKind::Layers => "layer-list models do not support deferred wgrad",
        _ => return None,
    };
    Some(format!("parallel.schedule = {schedule} has no effect: {why}; hint: remove it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the manifest of a checkpoint without tensors.
    fn write(dir: &Path, step: u64, batch: u64) {
        let mut config = Config::default();
        config.batch.global = batch;
        let manifest = Manifest {
            version: 3,
            id: format!("test-{step}"),
            step,
            updates: step,
            position: step * batch,
            seed: 1,
            config,
            tokenizer: None,
            data: None,
            preprocessing: None,
            origin: Origin::default(),
            state: vec![],
            files: Default::default(),
            tensors: Default::default(),
        };
        std::fs::create_dir_all(dir).unwrap();
        manifest.write(dir).unwrap();
    }

    /// A branch from a late checkpoint has in-memory checkpoints of earlier steps.
    #[test]
    fn the_origin_of_a_run_is_older_than_all_its_steps() {
        let root = tempfile::tempdir().unwrap();
        let directory = RunDirectory::at(root.path().join("run"));
        std::fs::create_dir(directory.path()).unwrap();
        let before = || {
            let (step, config) = config_of_checkpoint(&directory, &Resume::Auto)?;
            Some((step, config.batch.global))
        };
        assert_eq!(before(), None);
        let from = root.path().join("origin/checkpoints/step-00000090");
        write(&from, 90, 16);
        for (take, expected) in [
            (RestoreScope::NoOptimizer, Some((0, 16))),
            // Its batch does not count, either.
            (RestoreScope::Weights, None),
        ] {
            directory.write_branch(Branch { from: from.clone(), take }).unwrap();
            assert_eq!(before(), expected);
        }
    }
}
