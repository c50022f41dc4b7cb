//! `hpctrain eval --checkpoint`: prints the loss and metrics of a checkpoint on any data, without
//! writing into a run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::with_checkpoint::{self, CheckpointCommand, LoadedCheckpoint, SplitChoice};
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

/// Options of `hpctrain eval --checkpoint`.
pub struct EvalOptions {
    /// A checkpoint, or a run whose newest checkpoint is evaluated.
    pub checkpoint: PathBuf,
    /// The data; default: the data that the checkpoint was trained on.
    pub data: Option<PathBuf>,
    /// The shards of the data to evaluate on.
    pub split: Option<SplitChoice>,
    /// Whether to print one JSON object instead of the table.
    pub json: bool,
    /// Overrides of keys of the checkpoint's configuration.
    pub overrides: Vec<String>,
}

/// The object of `--json`.
#[derive(Serialize)]
struct EvalReport<'a> {
    checkpoint: &'a Path,
    id: &'a str,
    step: u64,
    data: &'a str,
    split: &'a str,
    /// The digest of the data, as in the records of runs.
    fingerprint: Option<&'a str>,
    samples: u64,
    /// The mean loss; null if it is not finite.
    loss: f64,
    /// The perplexity of a language model.
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<f64>,
    /// The metrics of other models, by name.
    metrics: &'a BTreeMap<String, f64>,
    /// The loss on each data set of a mixture.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    sets: &'a BTreeMap<String, f64>,
    /// The metrics of a classifier by class.
    #[serde(skip_serializing_if = "Option::is_none")]
    classes: Option<&'a Classes>,
}

impl CheckpointCommand for EvalOptions {
    fn config(&self, reader: &Reader) -> Result<Config> {
        let config = model::config_on(reader, &self.overrides, self.data.as_deref())?;
        if config.data.path.is_empty() && config.data.mix.is_empty() {
            return Err(Error::input(format!(
                "{}: the checkpoint was imported, so its training data is not known",
                reader.dir().display()
            ))
            .hint("give data with --data PATH: shards of hpctrain data import, or an HDF5 file"));
        }
        Ok(config)
    }

    fn execute<B: Kernels>(&self, mut found: LoadedCheckpoint<'_, B>) -> Result<()> {
        let data = found.data(|index, plan| {
            micro_batches::open_for_eval(
                index,
                &plan.config,
                with_checkpoint::split(&plan.config, self.split)?,
            )
        })?;
        let mut model = found.network()?;
        let LoadedCheckpoint { reader, plan, world, .. } = &found;
        let split = world.all_ok(with_checkpoint::split(&plan.config, self.split))?;
        let evaluator = Evaluator::new(data, plan.config.eval.samples, plan.config.eval.batch);
        let mut evaluator = evaluator.with_set_names(Mix::names(&plan.config.data.mix));
        let measured = evaluator.measure(&mut model, world, || false)?;
        let measures = measured
            .ok_or_else(|| Error::internal("the evaluation was interrupted without a request"))?;
        if world.rank() == 0 {
            say(result_text(reader, plan, split, &evaluator, &measures, self.json)?);
        }
        Ok(())
    }
}

/// Runs one rank and returns its exit code.
pub fn run(request: &EvalOptions, launch: Option<&Launch>) -> i32 {
    with_checkpoint::run(request, &request.checkpoint, &request.overrides, launch)
}

/// Returns the result as a line of text, or as JSON.
fn result_text(
    reader: &Reader,
    plan: &ResolvedConfig,
    split: Split,
    set: &Evaluator,
    found: &Metrics,
    json: bool,
) -> Result<String> {
    let checkpoint = reader.dir();
    let data = plan.config.data.display_location();
    let samples = set.samples();
    if !json {
        let measures = found.describe();
        let samples = grouped(samples);
        let line = format!(
            "{}: {measures} over {samples} samples of {data} ({split})",
            checkpoint.display()
        );
        let classes =
            found.classes.as_ref().map(|classes| format!("\n\n{}", classes.to_text().trim_end()));
        return Ok(line + &classes.unwrap_or_default());
    }
    let manifest = reader.manifest();
    let id = &manifest.id[..];
    let step = manifest.step;
    let split = split.name();
    let Metrics { loss, metrics, sets, classes, perplexity } = found;
    let perplexity = *perplexity;
    let data = &data[..];
    let fingerprint = set.digest();
    let loss = *loss;
    let classes = classes.as_ref();
    let report = EvalReport {
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
