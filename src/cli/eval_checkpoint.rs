//! `hpctrain eval --checkpoint`: the loss and metrics of a checkpoint on any data. Nothing is
//! written into a run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::with_checkpoint::{self, LoadedCheckpoint, SplitChoice, Work};
use crate::backend::Kernels;
use crate::checkpoint::Reader;
use crate::comm::Launch;
use crate::config::{Config, ResolvedConfig};
use crate::data::{Mix, Split};
use crate::engine::micro_batches;
use crate::error::{Error, Result};
use crate::evaluate::{Evaluator, Metrics, model};
use crate::telemetry::classes::Classes;
use crate::telemetry::{grouped, say};

/// Arguments of a measurement.
pub struct EvalOptions {
    /// A checkpoint, or a run, of which the newest is taken.
    pub checkpoint: PathBuf,
    /// The data; that of the checkpoint's run without.
    pub data: Option<PathBuf>,
    /// The part of it.
    pub split: Option<SplitChoice>,
    /// Print one JSON object instead of the table
    pub json: bool,
    /// Settings over those of the checkpoint.
    pub overrides: Vec<String>,
}

/// The object of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    checkpoint: &'a Path,
    id: &'a str,
    step: u64,
    data: &'a str,
    split: &'a str,
    /// Digest of the data, as records of runs have it.
    fingerprint: Option<&'a str>,
    samples: u64,
    /// Null if it is not finite.
    loss: f64,
    /// Of language models.
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<f64>,
    /// Of other networks, by name.
    metrics: &'a BTreeMap<String, f64>,
    /// Of a mixture, the loss of each data set.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    sets: &'a BTreeMap<String, f64>,
    /// Of classifiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    classes: Option<&'a Classes>,
}

impl Work for EvalOptions {
    fn config(&self, reader: &Reader) -> Result<Config> {
        let config = model::config_on(reader, &self.overrides, self.data.as_deref())?;
        if config.data.path.is_empty() && config.data.mix.is_empty() {
            return Err(Error::input(format!(
                "{}: the checkpoint was imported and tells no data",
                reader.dir().display()
            ))
            .hint("give some with --data PATH: shards of hpctrain data import, or an HDF5 file"));
        }
        Ok(config)
    }

    fn on<B: Kernels>(&self, mut found: LoadedCheckpoint<'_, B>) -> Result<()> {
        let data = found.data(|catalogue, plan| {
            micro_batches::measured(
                catalogue,
                &plan.config,
                with_checkpoint::split(&plan.config, self.split)?,
            )
        })?;
        let mut model = found.network()?;
        let LoadedCheckpoint { reader, plan, world, .. } = &found;
        let split = world.all_ok(with_checkpoint::split(&plan.config, self.split))?;
        let evaluator = Evaluator::new(data, plan.config.eval.samples, plan.config.eval.batch);
        let mut evaluator = evaluator.naming(Mix::names(&plan.config.data.mix));
        let measured = evaluator.measure(&mut model, world, || false)?;
        let measures = measured.ok_or_else(|| {
            Error::internal("an evaluation that nobody interrupts was interrupted")
        })?;
        if world.rank() == 0 {
            say(told(reader, plan, split, &evaluator, &measures, self.json)?);
        }
        Ok(())
    }
}

/// Runs one rank; returns the exit code.
pub fn run(request: &EvalOptions, launch: Option<&Launch>) -> i32 {
    with_checkpoint::run(request, &request.checkpoint, &request.overrides, launch)
}

/// The result as a line of text, or as JSON.
fn told(
    reader: &Reader,
    plan: &ResolvedConfig,
    split: Split,
    set: &Evaluator,
    found: &Metrics,
    json: bool,
) -> Result<String> {
    let checkpoint = reader.dir();
    let data = plan.config.data.told();
    let samples = set.samples();
    if !json {
        let measures = found.told();
        let samples = grouped(samples);
        let line = format!(
            "{}: {measures} over {samples} samples of {data} ({split})",
            checkpoint.display()
        );
        let classes =
            found.classes.as_ref().map(|classes| format!("\n\n{}", classes.told().trim_end()));
        return Ok(line + &classes.unwrap_or_default());
    }
    let manifest = reader.manifest();
    let id = &manifest.id[..];
    let step = manifest.step;
    let split = split.name();
    let Metrics { loss, metrics, sets, classes } = found;
    let perplexity = plan.network.is_language().then(|| loss.exp());
    let data = &data[..];
    let fingerprint = set.digest();
    let loss = *loss;
    let classes = classes.as_ref();
    let report = Report {
        checkpoint,
        id,
        step,
        data,
        split,
        fingerprint,
        samples,
        loss,
        perplexity,
        metrics,
        sets,
        classes,
    };
    serde_json::to_string(&report).map_err(|e| Error::internal(format!("report: {e}")))
}
