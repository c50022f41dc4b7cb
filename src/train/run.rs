//! A training run from the first message to the last checkpoint.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::advance::{Taken, advance};
use super::collectives::{self, Exchange};
use super::directory::{Resume, RunDirectory};
use super::feed::{self, Feed};
use super::step::{Engine, Geometry};
use super::{fits, memory};
use crate::activity::{Doing, Track, span};
use crate::backend::{Kernels, Memory};
use crate::checkpoint::{self, Manifest, Reader};
use crate::comm::{Comm, Group, Stats, Watch};
use crate::config::{Config, Facts, Plan, resolve};
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Sampling, generate};
use crate::parallel::{Lanes, Sharded};
use crate::telemetry::metrics::{Evaluation, JsonLines, Step};
use crate::telemetry::progress::Progress;
use crate::telemetry::run_card::RunCard;
use crate::telemetry::straggler::{Straggler, Stragglers};
use crate::telemetry::times::{Spent, Times};
use crate::telemetry::trace::Trace;
use crate::telemetry::{banner, logging, say, unix_time};
use crate::topology::Topology;

/// What is asked of a run.
#[derive(Debug, Clone)]
pub struct Request {
    /// The configuration, not yet resolved.
    pub config: Config,
    /// Name of the run unless the configuration has one.
    pub name: String,
    /// Where it begins.
    pub resume: Resume,
    /// Where a trace goes, if one is wanted.
    pub trace: Option<PathBuf>,
    /// Compute threads a rank, where the launcher knows better than the affinity mask.
    pub threads: Option<usize>,
}

/// Trains: collective over the world of `comm`. `backend` makes the device of a rank with so many threads.
///
/// # Errors
/// Whatever ends the run early. An error that all ranks share says so ([`Error::is_shared`]).
pub fn train<B: Kernels>(comm: &Comm<B>, request: &Request, backend: impl FnOnce(usize) -> B) -> Result<()> {
    comm.activity().here(Track::Compute);
    let trace = request.trace.as_deref().map(|path| Trace::start(comm, path)).transpose()?;
    let result = run(comm, request, backend);
    match (trace, &result) {
        (Some(trace), Err(e)) if e.is_shared() || comm.size() == 1 => {
            let written = trace.finish(comm);
            result.and(written)
        }
        (Some(trace), Ok(())) => trace.finish(comm),
        // Ranks that do not agree on an error would not meet to write a trace either.
        _ => result,
    }
}

/// A run from its preparation to its end.
fn run<B: Kernels>(comm: &Comm<B>, request: &Request, backend: impl FnOnce(usize) -> B) -> Result<()> {
    let mut run = Run::prepare(comm, request, backend)?;
    while run.progress.step < run.plan.config.run.steps {
        run.step()?;
        run.evaluate_if_due()?;
        run.save_if_due()?;
    }
    run.finish()
}

/// A run under way on one rank.
struct Run<'a, B: Kernels> {
    comm: &'a Comm<B>,
    world: Group<B>,
    data: Group<B>,
    plan: Plan,
    topology: Topology,
    directory: RunDirectory,
    engine: Engine<B>,
    feed: Feed<B>,
    evaluator: Evaluator,
    tokenizer: Option<Tokenizer>,
    train_samples: u64,
    progress: checkpoint::Progress,
    /// Steps in a row that were skipped, and in all.
    skipped: (u64, u64),
    /// Step and loss of the last evaluation.
    evaluated: Option<(u64, f64)>,
    /// Step of the last checkpoint.
    saved: Option<u64>,
    started: Instant,
    step_ms: Vec<f64>,
    /// Time in optimizer updates.
    updating: Duration,
    /// Where the time of this start's steps went.
    times: Times,
    /// On rank 0 only.
    records: Option<Records>,
    _watch: Option<Watch>,
}

/// What rank 0 writes and shows.
struct Records {
    metrics: JsonLines,
    evaluations: JsonLines,
    progress: Progress,
    stragglers: Stragglers,
}

impl<'a, B: Kernels> Run<'a, B> {
    fn prepare(comm: &'a Comm<B>, request: &Request, backend: impl FnOnce(usize) -> B) -> Result<Self> {
        let started = Instant::now();
        let world = comm.world();
        let root = world.rank() == 0;
        let topology = Topology::gather(&world, comm.node().host)?;

        let (train, validation) = world.agree(feed::open(&request.config))?;
        let facts = Facts {
            ranks: world.size(),
            threads: request.threads.unwrap_or_else(|| topology.threads()),
            vocabulary: Some(train.vocabulary()),
        };
        let mut plan = world.agree(resolve(request.config.clone(), &facts))?;
        world.agree(feed::check_size(&plan, &train))?;
        // Nobody allocates before all have looked.
        world.agree(fits::check::<B>(&plan, &topology, comm.staging(), memory::resident().0))?;

        let prepared =
            || RunDirectory::prepare(&plan.config, &request.name, &request.resume).map(|d| d.path().to_path_buf());
        let directory = share(&world, root.then(prepared))?;
        let directory = RunDirectory::at(directory);
        plan.config.run.name = directory.path().file_name().map(|name| name.to_string_lossy().into_owned());
        world.agree(logging::to_file(&directory.log_path(world.rank()), plan.config.log.level.into()))?;
        log::info!("rank {} of {} on {}", world.rank(), world.size(), topology.here().host);
        let watch = match plan.config.comm.timeout {
            0 => None,
            timeout => comm.watch(&directory.logs_path(), Duration::from_secs(timeout))?,
        };

        let backend = backend(plan.threads);
        comm.count_memory(backend.clone());
        let resident = memory::resident().0;
        let (mut engine, exchange) = engine(comm, &plan, backend, Some(&directory.collectives_path()))?;
        let data = engine.sharded.data().clone();
        let (progress, resumed) = resume(&world, &mut engine, &plan, &directory, &request.resume)?;
        let records = if root { Some(Records::open(&directory, &plan, progress.step, exchange.found)) } else { None };
        let records = world.agree(records.transpose())?;
        if root {
            let facts = banner::Facts {
                ranks: world.size(),
                hosts: topology.host_count(),
                host: &topology.here().host,
                cores: topology.here().cores.len(),
                spare_cores: topology.has_spare_cores(),
                library: comm.library(),
                shares_memory: comm.shares_memory(),
                collectives: exchange.told,
                directory: directory.path(),
                parameters: engine.sharded.parameters(),
                train: (train.samples(), train.tokens()),
                validation: validation.samples(),
                memory: &memory::estimate(&plan, &engine.blocks, comm.staging(), resident),
                resumed: resumed.as_deref().map(|path| (progress.step, path)),
            };
            say(banner::banner(&plan, &facts));
        }

        let train_samples = train.samples();
        let tokenizer = train.tokenizer().cloned();
        let backend = engine.backend.clone();
        let feed = world.agree(Feed::start(backend, train, &plan, data.rank(), progress))?;
        let evaluator = Evaluator::new(validation, plan.config.eval.samples, plan.config.eval.batch);
        Ok(Self {
            comm,
            world,
            data,
            plan,
            topology,
            directory,
            engine,
            feed,
            evaluator,
            tokenizer,
            train_samples,
            progress,
            skipped: (0, 0),
            evaluated: None,
            saved: (request.resume == Resume::Auto).then_some(progress.step),
            started,
            step_ms: Vec::new(),
            updating: Duration::ZERO,
            times: Times::default(),
            records,
            _watch: watch,
        })
    }

    /// One optimizer step and its record.
    fn step(&mut self) -> Result<()> {
        let before = self.spent();
        let step = self.progress.step;
        let taken = advance(&self.plan, &mut self.engine, &mut self.feed, &mut self.progress)?;
        self.updating += taken.updating;
        if taken.skipped {
            self.skipped = (self.skipped.0 + 1, self.skipped.1 + 1);
            log::warn!("step {}: loss {}, gradient norm {}: update skipped", step + 1, taken.loss, taken.norm);
        } else {
            self.skipped.0 = 0;
        }
        self.record(&taken, before)?;
        self.warn_of_stragglers(&taken.compute);
        if self.skipped.0 >= self.plan.config.run.max_skipped {
            let message = format!("step {}: {} steps in a row were not finite", step + 1, self.skipped.0);
            return Err(Error::numeric(message)
                .hint("lower optimizer.lr, lengthen schedule.warmup, or lower optimizer.grad_clip")
                .shared());
        }
        Ok(())
    }

    /// The counters of this rank's time.
    fn spent(&self) -> Spent {
        let Stats { busy, blocked, .. } = self.comm.stats();
        Spent {
            total: self.started.elapsed().as_secs_f64(),
            blocked,
            busy,
            loader: self.feed.waited().as_secs_f64(),
            optimizer: self.updating.as_secs_f64(),
        }
    }

    fn record(&mut self, taken: &Taken, before: Spent) -> Result<()> {
        let after = self.spent();
        let (seconds, times) = (after.total - before.total, Times::between(before, after));
        self.step_ms.push(seconds * 1e3);
        self.times += times;
        let Some(records) = &mut self.records else { return Ok(()) };
        let tokens = self.plan.tokens_per_step();
        let record = Step {
            step: self.progress.step,
            epoch: self.progress.position as f64 / self.train_samples as f64,
            tokens: self.progress.position * self.plan.gpt.context as u64,
            loss: taken.loss,
            lr: taken.lr,
            grad_norm: taken.norm,
            skipped: taken.skipped,
            step_ms: seconds * 1e3,
            tokens_per_second: tokens as f64 / seconds,
            peak_bytes: self.engine.backend.ledger().total_peak(),
            time: unix_time(),
            ..Step::default()
        };
        let record = record.with(times);
        records.metrics.write(&record)?;
        records.progress.step(&record);
        Ok(())
    }

    /// Names ranks that others wait for. `compute` is the seconds that each rank computed in the last step.
    fn warn_of_stragglers(&mut self, compute: &[f64]) {
        let Some(records) = &mut self.records else { return };
        for Straggler { rank, times } in records.stragglers.step(compute) {
            log::warn!(
                "rank {rank} (host {}) computes {times:.1} times as long as the median rank over the last {} steps",
                self.topology.host(rank),
                self.plan.config.log.straggler_window
            );
        }
    }

    fn evaluate_if_due(&mut self) -> Result<()> {
        let every = self.plan.config.eval.every;
        if every > 0 && self.progress.step.is_multiple_of(every) { self.evaluate() } else { Ok(()) }
    }

    fn evaluate(&mut self) -> Result<()> {
        let step = self.progress.step;
        let _span = span(Doing::Evaluation, None);
        let loss = self.evaluator.loss(&mut self.engine, &self.data)?;
        self.evaluated = Some((step, loss));
        log::info!("step {step}: validation loss {loss}");
        if let Some(records) = &mut self.records {
            let perplexity = loss.exp();
            records.evaluations.write(&Evaluation { step, loss, perplexity, checkpoint: None, time: unix_time() })?;
            records.progress.say(&format!("step {step:>6}  validation loss {loss:.4}, perplexity {perplexity:.2}"));
        }
        Ok(())
    }

    fn save_if_due(&mut self) -> Result<()> {
        let every = self.plan.config.checkpoint.every;
        if every > 0 && self.progress.step.is_multiple_of(every) { self.save() } else { Ok(()) }
    }

    fn save(&mut self) -> Result<()> {
        let _span = span(Doing::Checkpoint, None);
        let checkpoints = self.directory.checkpoints();
        let (sharded, tokenizer) = (&mut self.engine.sharded, self.tokenizer.as_ref());
        checkpoint::save(&checkpoints, &self.world, sharded, self.progress, &self.plan.config, tokenizer)
            .map_err(|e| e.at(format_args!("checkpoint of step {}", self.progress.step)))?;
        self.saved = Some(self.progress.step);
        log::info!("saved {}", checkpoints.path(self.progress.step).display());
        Ok(())
    }

    /// Last evaluation, last checkpoint, a sample of text, the run card.
    fn finish(mut self) -> Result<()> {
        if self.evaluated.is_none_or(|(step, _)| step != self.progress.step) {
            self.evaluate()?;
        }
        if self.saved != Some(self.progress.step) {
            self.save()?;
        }
        let text = self.sample()?;
        if let (Some(records), Some((_, loss))) = (&self.records, self.evaluated) {
            records.progress.finish();
            say(format_args!("\nvalidation loss {loss:.4} over {} samples", self.evaluator.samples()));
            if !self.step_ms.is_empty() {
                say(format_args!("time  {}", self.times));
            }
            let latest = self.directory.checkpoints().latest();
            say(format_args!("checkpoint in {}", latest.display()));
            if let Some(text) = text {
                say(format_args!("\n{text}\n\nmore text: hpctrain sample --checkpoint {}", latest.display()));
            }
            // A finished run that was resumed had nothing left to measure.
            if !self.step_ms.is_empty() {
                self.card(loss).write(&self.directory.card_path())?;
            }
        }
        log::info!("finished");
        Ok(())
    }

    /// Text from the trained model. Every rank computes it, because gathers of parameters are collective.
    fn sample(&mut self) -> Result<Option<String>> {
        let tokens = self.plan.config.log.sample;
        let Some(tokenizer) = self.tokenizer.as_ref().filter(|_| tokens > 0) else { return Ok(None) };
        // A line break begins a text; byte and GPT-2 tokenizers know it, and most character sets.
        let Ok(prompt) = tokenizer.encode("\n") else { return Ok(None) };
        let sampling = Sampling { tokens, temperature: 0.8, top_k: None, seed: self.plan.config.run.seed };
        let _span = span(Doing::Sampling, None);
        let drawn = generate(&mut self.engine, &prompt, self.plan.gpt.context, sampling)?;
        Ok(Some(tokenizer.decode(&drawn)))
    }

    fn card(&self, validation_loss: f64) -> RunCard {
        let mut step_ms = self.step_ms.clone();
        step_ms.sort_by(f64::total_cmp);
        let median = step_ms.get(step_ms.len() / 2).copied().unwrap_or(f64::INFINITY);
        let ledger = self.engine.backend.ledger();
        RunCard {
            version: env!("CARGO_PKG_VERSION").into(),
            mpi: self.comm.library().into(),
            ranks: self.world.size(),
            threads: self.plan.threads,
            hosts: self.topology.hosts(),
            parameters: self.engine.sharded.parameters(),
            steps: self.progress.step,
            skipped: self.skipped.1,
            validation_loss,
            tokens_per_second: self.plan.tokens_per_step() as f64 / (median * 1e-3),
            seconds: self.started.elapsed().as_secs_f64(),
            step_seconds: self.times,
            loader_wait_seconds: self.feed.waited().as_secs_f64(),
            comm_wait_seconds: self.comm.stats().blocked,
            peak_bytes: Memory::ALL.iter().map(|what| (what.name().to_string(), ledger.peak(*what))).collect(),
            peak_resident_bytes: memory::resident().1,
            time: unix_time(),
        }
    }
}

impl Records {
    fn open(directory: &RunDirectory, plan: &Plan, step: u64, choices: Option<String>) -> Result<Self> {
        directory.write_config(&plan.config)?;
        if let Some(choices) = choices {
            let path = directory.collectives_path();
            std::fs::write(&path, choices).map_err(|e| Error::io("write", &path, e))?;
        }
        // A finished run that is resumed has no step left, but evaluates again.
        let evaluated = if step == plan.config.run.steps { step.saturating_sub(1) } else { step };
        Ok(Self {
            metrics: JsonLines::open(&directory.metrics_path(), step)?,
            evaluations: JsonLines::open(&directory.evaluations_path(), evaluated)?,
            progress: Progress::new(step, plan.config.run.steps, plan.config.log.every),
            stragglers: Stragglers::new(plan.config.log.straggler_factor, plan.config.log.straggler_window),
        })
    }
}

/// Rank 0's path, or its error, on every rank.
fn share<B: Kernels>(world: &Group<B>, mine: Option<Result<PathBuf>>) -> Result<PathBuf> {
    let mine = world.agree(mine.transpose())?;
    let text = mine.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default();
    let all = world.gather_bytes(text.into_bytes()).wait()?;
    let path = all.first().map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    path.map(PathBuf::from).ok_or_else(|| Error::internal("no rank 0"))
}

/// The network on its mesh. Collective over the world. `choices` is where a measurement of collectives may be kept.
///
/// # Errors
/// Out of memory, or a message between ranks failed.
pub fn engine<B: Kernels>(
    comm: &Comm<B>,
    plan: &Plan,
    backend: B,
    choices: Option<&Path>,
) -> Result<(Engine<B>, Exchange)> {
    let blocks = plan.gpt.blocks();
    let (groups, exchange) = collectives::groups(comm, plan, &backend, &blocks, choices)?;
    let data = &groups.data;
    let lanes = Lanes { total: plan.lanes, ranks: data.size(), rank: data.rank() };
    let (keep, seed) = (plan.residency(), plan.config.run.seed);
    let sharded = Sharded::new(backend.clone(), groups, keep, lanes, Some(plan.rule), &blocks, Some(seed))?;
    let geometry = Geometry {
        lanes: lanes.mine().len(),
        micros_per_lane: plan.micros_per_lane(),
        predictions: plan.tokens_per_step(),
        recompute: plan.config.parallel.recompute,
        seed,
    };
    Ok((Engine { backend, blocks, sharded, geometry }, exchange))
}

/// Where the run begins, and the checkpoint that it begins from. Collective.
fn resume<B: Kernels>(
    world: &Group<B>,
    engine: &mut Engine<B>,
    plan: &Plan,
    directory: &RunDirectory,
    resume: &Resume,
) -> Result<(checkpoint::Progress, Option<PathBuf>)> {
    let from = match resume {
        Resume::No => return Ok(Default::default()),
        Resume::Auto => {
            // One rank looks, so that all take the same one.
            let newest = || directory.checkpoints().newest().map(|(path, _)| path);
            share(world, (world.rank() == 0).then(newest))?
        }
        Resume::From(path) => path.clone(),
    };
    let span = span(Doing::Restore, None);
    let manifest = world.agree(restore(&mut engine.sharded, &from))?;
    drop(span);
    let progress = manifest.progress();
    if world.rank() == 0 {
        warn_of_changes(&manifest.config, &plan.config);
    }
    let (at, asked) = (progress.step, plan.config.run.steps);
    let fits = match at <= asked {
        true => Ok(()),
        false => Err(Error::input(format!("{} is at step {at}, beyond run.steps = {asked}", from.display()))
            .hint("raise run.steps")),
    };
    world.agree(fits)?;
    Ok((progress, Some(from)))
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

/// Loads a checkpoint into this rank's ranges.
fn restore<B: Kernels>(sharded: &mut Sharded<B>, path: &Path) -> Result<Manifest> {
    let mut reader = Reader::open(path)?;
    reader.manifest().check(path, sharded.layouts(), sharded.state_names())?;
    let manifest = reader.manifest().clone();
    sharded.restore(|tensor, part, range, out| reader.read(tensor, part, range, out))?;
    Ok(manifest)
}
