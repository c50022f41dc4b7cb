//! Does a configuration give the same result in every layout? Some steps of each, against one rank.
//!
//! Every row is a real run without a directory: the feed, the engine and the step of `hpctrain
//! train`. After each step a row leaves its loss, its norm and a 64-bit digest of each tensor.
//! Elements are compared where digests differ: both sides are computed again up to the first step
//! that differs.

mod compare;
mod launch;
mod layout_matrix;
mod run_layout;
mod snapshot;
mod tensor_entry;

use std::fmt;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;

use compare::{Agreement, Bounds, CLOSE_STEPS, closely, describe, exactly, parting};
use layout_matrix::{REFERENCE, Row, matrix};
use run_layout::{Recording, Then};

use crate::comm::Choice;
use crate::config::{Config, Environment, Interval, Parallel, ResolvedConfig, resolve};
use crate::engine::vocabulary;
use crate::error::{Error, Result};
use crate::optim::UpdateRule;
use crate::parallel::Zero;
use crate::telemetry::say;

pub use launch::{Launcher, rank, task};
pub use run_layout::LayoutTask;

/// The layouts to be verified.
#[derive(Debug, Clone)]
pub struct VerifyOptions {
    /// The configuration; its layout is replaced by those of the matrix.
    pub config: Config,
    /// Its name.
    pub name: String,
    /// Numbers of ranks.
    pub ranks: Vec<usize>,
    /// Numbers of stages of a pipeline.
    pub pipelines: Vec<usize>,
    /// Numbers of ranks that share blocks.
    pub tensors: Vec<usize>,
    /// ZeRO stages.
    pub stages: Vec<Zero>,
    /// Steps of each row.
    pub steps: u64,
    /// The launcher of the ranks.
    pub launcher: Launcher,
    /// Print one JSON object at the end instead of lines.
    pub json: bool,
}

impl VerifyOptions {
    /// Prints a line for people.
    fn say(&self, line: impl fmt::Display) {
        if !self.json {
            say(line);
        }
    }
}

/// The object of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    network: &'a str,
    steps: u64,
    /// Whether all rows that can run agree with one rank.
    agrees: bool,
    rows: &'a [RowReport],
}

/// A row, compared with one rank.
#[derive(Serialize)]
struct RowReport {
    #[serde(flatten)]
    row: Row,
    /// The reason why it cannot run, if it cannot.
    skipped: Option<String>,
    /// Whether it must have the bits of one rank rather than close numbers.
    exact: Option<bool>,
    /// Whether losses and norms agree, then parameters and optimizer state.
    curve: Option<bool>,
    parameters: Option<bool>,
    optimizer: Option<bool>,
    seconds: Option<f64>,
    /// How close it is, or where it differs first.
    said: Option<String>,
}

impl RowReport {
    fn skipped(row: Row, why: String) -> Self {
        let (exact, curve, parameters, optimizer, seconds, said) = Default::default();
        Self { row, skipped: Some(why), exact, curve, parameters, optimizer, seconds, said }
    }
}

/// Compares every row of the matrix with one rank and prints a table; whether all agree.
///
/// # Errors
/// The configuration is wrong, no row can run, or a row failed.
pub fn verify(request: &VerifyOptions) -> Result<bool> {
    let storage = request.config.parallel.storage;
    let rows =
        matrix(&request.ranks, &request.pipelines, &request.tensors, &request.stages, storage);
    // More steps than the run has make it longer, before its schedule is laid out.
    let mut request = request.clone();
    request.config = request.config.of_any_length();
    request.config.run.steps = request.config.run.steps.max(request.steps);
    let vocabulary = vocabulary(&request.config)?;
    request.config.parallel.virtual_ranks = virtual_ranks(&request.config, &rows, vocabulary);
    request.config.batch.micro = micro(&request.config, &rows, vocabulary);
    let request = &request;
    let mut verifier = Verifier::start(request, &rows, vocabulary)?;
    request.say(" ranks  pipeline × replica × shard × tensor  ZeRO  loss, norm  parameters  optimizer  time");
    let mut compared = 0;
    let mut close = 0;
    let mut differ = 0;
    let mut skipped = 0;
    for row in rows {
        match verifier.row(row)? {
            None => skipped += 1,
            Some(agrees) => {
                compared += 1;
                close += usize::from(agrees && !same_bits(&request.config, &row));
                differ += usize::from(!agrees);
            }
        }
    }
    if compared == 0 {
        return Err(Error::input("no row of the matrix can run")
            .hint("each row says why; choose other --ranks"));
    }
    let left_out = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
    let rows = |n: usize| format!("{n} row{}", if n == 1 { "" } else { "s" });
    let steps = if close < compared { request.steps } else { verifier.close_steps() };
    let verdict = match (differ, close) {
        (0, 0) => "0 differing bits".to_string(),
        (0, close) => format!("all agree, {close} of them within bounds"),
        (1, _) => "1 row differs".to_string(),
        _ => format!("{differ} rows differ"),
    };
    request.say(format_args!("{}{left_out}, {steps} steps: {verdict}", rows(compared)));
    if request.json {
        let report =
            Report { network: &request.name, steps, agrees: differ == 0, rows: &verifier.rows };
        say(serde_json::to_string_pretty(&report).map_err(|e| Error::internal(e.to_string()))?);
    }
    Ok(differ == 0)
}

/// The reference, and the bounds that the rows are compared by.
struct Verifier<'a> {
    request: &'a VerifyOptions,
    vocabulary: usize,
    reference: Recording,
    /// For rows that add in another order than the reference; none if there are no such rows.
    bounds: Option<Bounds>,
    /// Holds snapshots and messages; empties itself.
    folder: tempfile::TempDir,
    /// The step of the snapshot on the disk.
    snapshot: Option<u64>,
    /// The rows so far.
    rows: Vec<RowReport>,
}

impl<'a> Verifier<'a> {
    fn start(request: &'a VerifyOptions, rows: &[Row], vocabulary: usize) -> Result<Self> {
        let config = &request.config;
        let folder = tempfile::Builder::new().prefix("hpctrain-verify-").tempdir();
        let folder =
            folder.map_err(|e| Error::io("create a directory in", &std::env::temp_dir(), e))?;
        let plan = plan(config, REFERENCE, vocabulary)?;
        if config.comm.algorithm == Choice::Vendor && request.launcher == Launcher::Threads {
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
            reference: refer(request, request.steps, Then::Forget)?,
            bounds: None,
            folder,
            snapshot: None,
            rows: Vec::new(),
        };
        let seconds = start.elapsed().as_secs_f64();
        let loss = |step: Option<&run_layout::Marks>| {
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
        Ok(verifier.expect(plan.rule, rows))
    }

    /// Prints the agreement expected of the rows.
    fn expect(mut self, rule: UpdateRule, rows: &[Row]) -> Self {
        let config = &self.request.config;
        let are_cut = rows.iter().any(|row| row.tensor > 1);
        match (config.parallel.virtual_ranks, config.parallel.virtual_tensor_ranks.filter(|_| are_cut)) {
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
        if !rows.iter().all(|row| same_bits(config, row)) {
            if config.parallel.virtual_ranks.is_some() {
                self.request.say("             close results where a rank or a copy has no power of two of the virtual ranks");
                if are_cut && config.parallel.virtual_tensor_ranks.is_none() {
                    self.request.say(
                        "             close results of divided blocks: parallel.virtual_tensor_ranks fixes their order too",
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

    /// Steps of the rows that are only close.
    fn close_steps(&self) -> u64 {
        self.request.steps.min(CLOSE_STEPS)
    }

    /// A file with the reference's elements after `step`.
    fn snapshot(&mut self, step: u64) -> Result<PathBuf> {
        let path = self.folder.path().join("elements");
        if self.snapshot != Some(step) {
            refer(self.request, step, Then::Write(path.clone()))?;
            self.snapshot = Some(step);
        }
        Ok(path)
    }

    /// Runs one row and prints its line; none if it cannot run.
    fn row(&mut self, row: Row) -> Result<Option<bool>> {
        let config = &self.request.config;
        if let Err(e) = plan(config, row, self.vocabulary) {
            let why = e.to_string().replace("\nhint: ", "; ");
            self.request.say(format_args!("{row}  skipped: {why}"));
            self.rows.push(RowReport::skipped(row, why));
            return Ok(None);
        }
        let start = Instant::now();
        let exact = same_bits(config, &row);
        let recording = match exact {
            true => self.run(row, self.request.steps, Then::Forget)?,
            false => {
                let snapshot = self.snapshot(self.close_steps())?;
                self.run(row, self.close_steps(), Then::Compare(snapshot))?
            }
        };
        let seconds = start.elapsed().as_secs_f64();
        let (agreement, said) = match self.bounds {
            Some(bounds) if !exact => closely(&bounds, &self.reference, &recording),
            _ => (exactly(&self.reference, &recording), None),
        };
        let Agreement { curve, parameters, state } = agreement;
        let word = |agrees| match (agrees, exact) {
            (true, true) => "equal",
            (true, false) => "close",
            (false, _) => "DIFFER",
        };
        let words = format!("{:<10}  {:<10}  {:<9}", word(curve), word(parameters), word(state));
        self.request.say(format_args!("{row}  {words}  {seconds:.1} s"));
        let said = match parting(&self.reference, &recording) {
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
        Ok(Some(agreement.whole()))
    }

    fn run(&self, row: Row, steps: u64, then: Then) -> Result<Recording> {
        let task =
            LayoutTask { config: row.config(&self.request.config), threads: None, steps, then };
        self.request.launcher.run(row.ranks, task, self.folder.path()).map_err(|e| {
            let Row { ranks, pipeline, tensor, shard, replica, .. } = row;
            let place =
                format!("{ranks} ranks, pipeline {pipeline} × replica {replica} × shard {shard} × tensor {tensor}");
            e.at(format_args!("{place}, ZeRO {}", u8::from(row.zero)))
        })
    }

    /// Computes both sides again up to `step`, the first that differs, and compares elements.
    fn first_difference(&mut self, row: Row, step: u64) -> Result<String> {
        let snapshot = self.snapshot(step)?;
        let recording = self.run(row, step, Then::Compare(snapshot))?;
        let mut reference = self.reference.clone();
        reference.steps.truncate(step as usize);
        Ok(describe(&reference, &recording))
    }
}

/// One rank, in this process.
fn refer(request: &VerifyOptions, steps: u64, then: Then) -> Result<Recording> {
    launch::local(
        1,
        LayoutTask { config: REFERENCE.config(&request.config), threads: None, steps, then },
    )
}

/// Whether a row must give the bits of one rank: with fixed virtual ranks, and fixed slices of blocks,
/// whose trees it keeps.
fn same_bits(config: &Config, row: &Row) -> bool {
    let Parallel { virtual_ranks, virtual_tensor_ranks, .. } = config.parallel;
    let apart = config.local_sgd.replicas;
    let is_fixed = (virtual_ranks.is_some() || row.data() == 1)
        && (virtual_tensor_ranks.is_some() || row.tensor == 1);
    is_fixed
        && row.same_tree(
            virtual_ranks.unwrap_or(row.data()),
            virtual_tensor_ranks.unwrap_or(row.tensor),
            apart,
        )
}

fn plan(config: &Config, row: Row, vocabulary: usize) -> Result<ResolvedConfig> {
    let on_gpu = config.needs_gpu();
    let facts = Environment { ranks: row.ranks, threads: 1, vocabulary: Some(vocabulary), on_gpu };
    resolve(row.config(config), &facts)
}

/// The virtual ranks of all rows: where replicas train apart, those of the row that wants most.
fn virtual_ranks(config: &Config, rows: &[Row], vocabulary: usize) -> Option<usize> {
    if config.parallel.virtual_ranks.is_some() || config.local_sgd.sync_every == Interval::Steps(0)
    {
        return config.parallel.virtual_ranks;
    }
    rows.iter()
        .filter_map(|row| plan(config, *row, vocabulary).ok())
        .map(|plan| plan.virtual_ranks)
        .max()
}

/// The micro-batch of all rows: a pipeline wants smaller ones, of which sums would differ in their
/// last bits.
fn micro(config: &Config, rows: &[Row], vocabulary: usize) -> Option<u64> {
    if config.batch.micro.is_some() || rows.iter().all(|row| row.pipeline == 1) {
        return config.batch.micro;
    }
    rows.iter().filter_map(|row| plan(config, *row, vocabulary).ok()).map(|plan| plan.micro).min()
}
