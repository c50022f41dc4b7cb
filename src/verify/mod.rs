//! Verification that a configuration gives the same result in every layout, by running some steps
//! of each and comparing them with one rank.
//!
//! Every layout is a real run without a run directory: it uses the data loader, the engine and the
//! step of `hpctrain train`. After each step it records its loss, its gradient norm and a 64-bit
//! digest of each tensor. If digests differ, both sides run again up to the first step that
//! differs, and their elements are compared.
//!
//! Digests must be equal where all sums have the same tree as on one rank. Elsewhere the first
//! steps must agree within bounds.

mod chaos;
mod compare;
mod launch;
mod layout_matrix;
mod local_ranks;
mod run_layout;
mod snapshot;
mod tensor_entry;

use std::fmt;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use compare::{
    Agreement, Bounds, CLOSE_STEPS, compare_exactly, compare_within_bounds, describe,
    first_differing_step,
};
pub use layout_matrix::{LayoutAxes, LayoutRow};
use layout_matrix::{REFERENCE, matrix};
use run_layout::{AfterRun, Recording};

use crate::comm::AlgorithmChoice;
use crate::config::{
    Config, DataOrder, Environment, Interval, Parallel, ReduceChoice, ResolvedConfig, TableUpdates,
    resolve,
};
use crate::engine::vocabulary;
use crate::error::{Error, Result};
use crate::optim::UpdateRule;
use crate::parallel::{ReduceAfter, Storage};
use crate::telemetry::say;

pub use chaos::{ChaosOptions, survive};
pub use launch::{Launcher, rank, task};
pub use local_ranks::{RankTask, on_local_ranks};
pub use run_layout::LayoutTask;

/// The layouts to verify.
#[derive(Debug, Clone)]
pub struct VerifyOptions {
    /// The configuration, whose layout is replaced by those of the matrix.
    pub config: Config,
    /// The display name of the configuration.
    pub name: String,
    /// The layouts.
    pub axes: LayoutAxes,
    /// The number of steps of each layout.
    pub steps: u64,
    /// How the ranks are launched.
    pub launcher: Launcher,
    /// Whether to print one JSON object at the end instead of lines.
    pub json: bool,
}

impl VerifyOptions {
    /// Prints a line, except with `--json`.
    fn say(&self, line: impl fmt::Display) {
        if !self.json {
            say(line);
        }
    }
}

/// The JSON object of `--json`.
#[derive(Serialize)]
struct VerifyReport<'a> {
    network: &'a str,
    steps: u64,
    /// Whether all layouts that can run agree with one rank.
    agrees: bool,
    rows: &'a [RowReport],
}

/// The comparison of a layout with one rank.
#[derive(Serialize)]
struct RowReport {
    #[serde(flatten)]
    row: LayoutRow,
    /// The reason why the layout cannot run, if it cannot.
    skipped: Option<String>,
    /// Whether it must be bitwise identical rather than close.
    exact: Option<bool>,
    /// Whether losses and norms, parameters, and optimizer state agree.
    curve: Option<bool>,
    parameters: Option<bool>,
    optimizer: Option<bool>,
    seconds: Option<f64>,
    /// The differences beyond the bounds, or the first difference.
    said: Option<String>,
}

impl RowReport {
    fn skipped(row: LayoutRow, why: String) -> Self {
        let (exact, curve, parameters, optimizer, seconds, said) = Default::default();
        Self { row, skipped: Some(why), exact, curve, parameters, optimizer, seconds, said }
    }
}

/// Returns `optimizer.tables` for all layouts: `auto` would choose dense updates for those that do
/// not support sparse ones, and the norms of both differ in their last bits.
fn table_updates(config: &Config, rows: &[LayoutRow]) -> TableUpdates {
    let needs_dense = rows
        .iter()
        .any(|row| row.pipeline > 1 || row.tensor > 1 || row.storage == Storage::Central);
    match config.optimizer.tables {
        TableUpdates::Auto if needs_dense => TableUpdates::Dense,
        given => given,
    }
}

/// Compares every layout of the matrix with one rank and prints a table. Returns true if all agree.
///
/// # Errors
/// Returns an error if the configuration is wrong, no layout can run, or a run fails.
pub fn verify(request: &VerifyOptions) -> Result<bool> {
    let storage = request.config.parallel.storage;
    let rows = matrix(&request.axes, storage);
    // If more steps are asked for than the run has, it becomes longer, before its schedule is
    // resolved.
    let mut request = request.clone();
    if request.config.data.order == DataOrder::Files {
        return Err(Error::input(
            "data.order = files gives other samples, and so other bits, on each number of ranks",
        )
        .hint("verify with data.order=samples"));
    }
    request.config.check_fixed_batch("verify compares numbers of ranks with the same batch")?;
    request.config = request.config.with_any_length();
    request.config.run.steps = request.config.run.steps.max(request.steps);
    request.config.optimizer.tables = table_updates(&request.config, &rows);
    let vocabulary = vocabulary(&request.config)?;
    request.config.parallel.virtual_ranks = virtual_ranks(&request.config, &rows, vocabulary);
    request.config.batch.micro = micro(&request.config, &rows, vocabulary);
    let request = &request;
    let mut verifier = Verifier::start(request, &rows, vocabulary)?;
    request.say(" ranks  pipeline × replica × shard × tensor  ZeRO  reduce  loss, norm  parameters  optimizer  time");
    let mut compared = 0;
    let mut close = 0;
    let mut differ = 0;
    let mut skipped = 0;
    for row in rows {
        match verifier.row(row)? {
            None => skipped += 1,
            Some(agrees) => {
                compared += 1;
                close += usize::from(agrees && !same_bits(&request.config, &row, vocabulary));
                differ += usize::from(!agrees);
            }
        }
    }
    if compared == 0 {
        return Err(Error::input("no row of the matrix can run")
            .hint("each row says why; choose other --ranks"));
    }
    let omitted = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
    let rows = |n: usize| format!("{n} row{}", if n == 1 { "" } else { "s" });
    let steps = if close < compared { request.steps } else { verifier.close_steps() };
    let verdict = match (differ, close) {
        (0, 0) => "0 differing bits".to_string(),
        (0, close) => format!("all agree, {close} of them within bounds"),
        (1, _) => "1 row differs".to_string(),
        _ => format!("{differ} rows differ"),
    };
    request.say(format_args!("{}{omitted}, {steps} steps: {verdict}", rows(compared)));
    if request.json {
        let report = VerifyReport {
            network: &request.name,
            steps,
            agrees: differ == 0,
            rows: &verifier.rows,
        };
        say(serde_json::to_string_pretty(&report).map_err(|e| Error::internal(e.to_string()))?);
    }
    Ok(differ == 0)
}

/// The reference, and the bounds by which layouts are compared.
struct Verifier<'a> {
    request: &'a VerifyOptions,
    vocabulary: usize,
    reference: Recording,
    /// The bounds for layouts with another order of addition than the reference, if there are any.
    bounds: Option<Bounds>,
    /// Holds snapshots and messages; removed when dropped.
    folder: tempfile::TempDir,
    /// The step of the snapshot in `folder`.
    snapshot: Option<u64>,
    /// The results so far.
    rows: Vec<RowReport>,
}

impl<'a> Verifier<'a> {
    fn start(request: &'a VerifyOptions, rows: &[LayoutRow], vocabulary: usize) -> Result<Self> {
        let config = &request.config;
        let folder = tempfile::Builder::new().prefix("hpctrain-verify-").tempdir();
        let folder =
            folder.map_err(|e| Error::io("create a directory in", &std::env::temp_dir(), e))?;
        let plan = plan(config, REFERENCE, vocabulary)?;
        if config.comm.algorithm == AlgorithmChoice::Vendor && request.launcher == Launcher::Threads
        {
            return Err(Error::input("comm.algorithm = vendor requires MPI")
                .hint("add --mpi, or set it to halving-doubling or ring"));
        }
        request.say(format_args!(
            "verify       {} for {} steps: {} samples a step, messages by {}",
            request.name, request.steps, config.batch.global, config.comm.algorithm
        ));
        request
            .say(format_args!("ranks        {}, compared with one rank", request.launcher.name()));
        let start = Instant::now();
        let verifier = Self {
            request,
            vocabulary,
            reference: record_reference(request, request.steps, AfterRun::Forget)?,
            bounds: None,
            folder,
            snapshot: None,
            rows: Vec::new(),
        };
        let seconds = start.elapsed().as_secs_f64();
        let loss = |step: Option<&run_layout::StepRecord>| {
            step.map_or(f64::NAN, |step| f64::from_bits(step.loss))
        };
        let steps = &verifier.reference.steps;
        request.say(format_args!(
            "one rank     loss {:.4} at step 1, {:.4} at step {}, in {:.1} s",
            loss(steps.first()),
            loss(steps.last()),
            steps.len(),
            seconds
        ));
        Ok(verifier.expect(plan.update_rule, rows))
    }

    /// Prints the agreement expected of the layouts.
    fn expect(mut self, rule: UpdateRule, rows: &[LayoutRow]) -> Self {
        let config = &self.request.config;
        let has_tensor_parallelism = rows.iter().any(|row| row.tensor > 1);
        let virtual_tensor_ranks =
            config.parallel.virtual_tensor_ranks.filter(|_| has_tensor_parallelism);
        match (config.parallel.virtual_ranks, virtual_tensor_ranks) {
            (Some(virtual_ranks), None) => {
                self.request.say(format_args!("expected     the same bits: parallel.virtual_ranks = {virtual_ranks} fixes the order of additions"));
            }
            (Some(virtual_ranks), Some(slices)) => self.request.say(format_args!(
                "expected     the same bits: parallel.virtual_ranks = {virtual_ranks} and virtual_tensor_ranks = {slices} fix the order of additions"
            )),
            (None, _) => {
                self.request.say("expected     close results: without parallel.virtual_ranks the order of additions follows the ranks")
            }
        }
        let is_close = |row: &LayoutRow| {
            plan(config, *row, self.vocabulary).is_ok() && !same_bits(config, row, self.vocabulary)
        };
        if rows.iter().any(is_close) {
            if config.parallel.virtual_ranks.is_some() {
                self.request.say("             close results where the sums of a rank or a replica do not occur in the order of one rank");
                if has_tensor_parallelism && config.parallel.virtual_tensor_ranks.is_none() {
                    self.request.say(
                        "             close results of tensor-parallel sums: parallel.virtual_tensor_ranks fixes their order too",
                    );
                }
            }
            let bounds = Bounds::new(rule, config.optimizer.grad_clip, &self.reference);
            self.request.say(format_args!(
                "bounds       in the first {} steps: {bounds}",
                self.close_steps()
            ));
            self.bounds = Some(bounds);
        }
        self.request.say("");
        self
    }

    /// Returns the number of steps of layouts that only need to be close.
    fn close_steps(&self) -> u64 {
        self.request.steps.min(CLOSE_STEPS)
    }

    /// Returns a file with the reference's elements after `step`.
    fn snapshot(&mut self, step: u64) -> Result<PathBuf> {
        let path = self.folder.path().join("elements");
        if self.snapshot != Some(step) {
            record_reference(self.request, step, AfterRun::Write(path.clone()))?;
            self.snapshot = Some(step);
        }
        Ok(path)
    }

    /// Runs one layout and prints its line; returns `None` if it cannot run.
    fn row(&mut self, row: LayoutRow) -> Result<Option<bool>> {
        let config = &self.request.config;
        if let Err(e) = plan(config, row, self.vocabulary) {
            let why = e.to_string().replace("\nhint: ", "; ");
            self.request.say(format_args!("{row}  skipped: {why}"));
            self.rows.push(RowReport::skipped(row, why));
            return Ok(None);
        }
        let start = Instant::now();
        let exact = same_bits(config, &row, self.vocabulary);
        let recording = match exact {
            true => self.run(row, self.request.steps, AfterRun::Forget)?,
            false => {
                let snapshot = self.snapshot(self.close_steps())?;
                self.run(row, self.close_steps(), AfterRun::Compare(snapshot))?
            }
        };
        let seconds = start.elapsed().as_secs_f64();
        let (agreement, said) = match self.bounds {
            Some(bounds) if !exact => compare_within_bounds(&bounds, &self.reference, &recording),
            _ => (compare_exactly(&self.reference, &recording), None),
        };
        let Agreement { curve, parameters, state } = agreement;
        let word = |agrees| match (agrees, exact) {
            (true, true) => "equal",
            (true, false) => "close",
            (false, _) => "DIFFER",
        };
        let words = format!("{:<10}  {:<10}  {:<9}", word(curve), word(parameters), word(state));
        self.request.say(format_args!("{row}  {words}  {seconds:.1} s"));
        let said = match first_differing_step(&self.reference, &recording) {
            Some(step) if exact => Some(self.first_difference(row, step)?),
            _ => said,
        };
        if let Some(said) = &said {
            self.request.say(format_args!("       {said}"));
        }
        let [exact, curve, parameters, optimizer] = [exact, curve, parameters, state].map(Some);
        let seconds = Some(seconds);
        self.rows.push(RowReport {
            row,
            skipped: None,
            exact,
            curve,
            parameters,
            optimizer,
            seconds,
            said,
        });
        Ok(Some(agreement.all()))
    }

    fn run(&self, row: LayoutRow, steps: u64, then: AfterRun) -> Result<Recording> {
        let task = LayoutTask { config: row.config(&self.request.config), steps, then };
        self.request.launcher.run(row.ranks, &task, self.folder.path()).map_err(|e| {
            let LayoutRow { ranks, pipeline, tensor, shard, replica, .. } = row;
            let place =
                format!("{ranks} ranks, pipeline {pipeline} × replica {replica} × shard {shard} × tensor {tensor}");
            e.at(format_args!("{place}, ZeRO {}", u8::from(row.zero)))
        })
    }

    /// Runs both sides again up to `step`, the first that differs, and compares elements.
    fn first_difference(&mut self, row: LayoutRow, step: u64) -> Result<String> {
        let snapshot = self.snapshot(step)?;
        let recording = self.run(row, step, AfterRun::Compare(snapshot))?;
        let mut reference = self.reference.clone();
        reference.steps.truncate(step as usize);
        Ok(describe(&reference, &recording))
    }
}

/// Records the reference on one rank in this process.
fn record_reference(request: &VerifyOptions, steps: u64, then: AfterRun) -> Result<Recording> {
    on_local_ranks(1, &LayoutTask { config: REFERENCE.config(&request.config), steps, then })
}

/// Returns true if a layout must be bitwise identical to one rank: if virtual ranks and virtual
/// tensor ranks are fixed, and its sums have the same trees.
fn same_bits(config: &Config, row: &LayoutRow, vocabulary: usize) -> bool {
    let Parallel { virtual_ranks, virtual_tensor_ranks, .. } = config.parallel;
    let local_sgd_replicas = config.local_sgd.replicas;
    // Without a number, gradients that are reduced after each micro-batch have more virtual ranks.
    let has_one = row.data() == 1 && row.reduce != ReduceChoice::Micro;
    let is_fixed =
        (virtual_ranks.is_some() || has_one) && (virtual_tensor_ranks.is_some() || row.tensor == 1);
    let reduces_in_blocks = || {
        plan(config, *row, vocabulary)
            .is_ok_and(|plan| plan.reduce_after == ReduceAfter::StepInBlocks)
    };
    is_fixed
        && row.same_tree(
            reduces_in_blocks(),
            virtual_ranks.unwrap_or(row.data()),
            virtual_tensor_ranks.unwrap_or(row.tensor),
            local_sgd_replicas,
        )
}

fn plan(config: &Config, row: LayoutRow, vocabulary: usize) -> Result<ResolvedConfig> {
    let on_gpu = config.needs_gpu();
    let facts = Environment { ranks: row.ranks, threads: 1, vocabulary: Some(vocabulary), on_gpu };
    resolve(row.config(config), &facts)
}

/// Returns the virtual ranks of all layouts: with local SGD, the largest number that a layout
/// requires.
fn virtual_ranks(config: &Config, rows: &[LayoutRow], vocabulary: usize) -> Option<usize> {
    if config.parallel.virtual_ranks.is_some() || config.local_sgd.sync_every == Interval::Steps(0)
    {
        return config.parallel.virtual_ranks;
    }
    rows.iter()
        .filter_map(|row| plan(config, *row, vocabulary).ok())
        .map(|plan| plan.virtual_ranks)
        .max()
}

/// Returns the micro-batch size of all layouts: a pipeline requires smaller ones, whose sums would
/// differ in the last bits.
fn micro(config: &Config, rows: &[LayoutRow], vocabulary: usize) -> Option<u64> {
    if config.batch.micro.is_some() || rows.iter().all(|row| row.pipeline == 1) {
        return config.batch.micro;
    }
    rows.iter().filter_map(|row| plan(config, *row, vocabulary).ok()).map(|plan| plan.micro).min()
}
