//! Whether an evaluator of a run would measure on the run's own validation set, which alone is
//! worth a record.

use hpctrain_base::error::{Error, Result};
use hpctrain_checkpoint::Manifest;
use hpctrain_config::{Config, Data};
use hpctrain_data::TrainedOn;
use hpctrain_engine::micro_batches;

/// Refuses settings by which `config` would have the checkpoint of a run measured on another set
/// than the run's own. The data may lie at another path, if they are those that the run was trained
/// on.
///
/// # Errors
/// It would be another set, or the data cannot be opened.
pub fn check(manifest: &Manifest, config: &Config) -> Result<()> {
    let run = &manifest.config;
    let what = if set(run) != set(config) {
        "[data]".into()
    } else if run.eval.samples != config.eval.samples {
        let told =
            |samples: Option<u64>| samples.map_or("all".into(), |samples| samples.to_string());
        format!("eval.samples = {}, not {}", told(config.eval.samples), told(run.eval.samples))
    } else if run.data.path != config.data.path && !is_copy(manifest.data.as_ref(), config)? {
        format!("data.path = {}, with other data than {}", config.data.path, run.data.path)
    } else {
        return Ok(());
    };
    Err(Error::input(format!(
        "{what}: the evaluator of a run measures on the run's own validation set, or its records would not compare"
    ))
    .hint("hpctrain eval --checkpoint CHECKPOINT --data PATH measures on any set and records nothing"))
}

/// The keys that determine the measured samples, besides the path.
fn set(config: &Config) -> Data {
    let Data { shuffle, prefetch, local_cache, augment, weights, verify, .. } = Data::default();
    Data {
        path: String::new(),
        shuffle,
        prefetch,
        local_cache,
        augment,
        weights,
        verify,
        ..config.data.clone()
    }
}

/// Whether the data of a configuration is the training data of a run.
fn is_copy(trained: Option<&TrainedOn>, config: &Config) -> Result<bool> {
    let Some(trained) = trained else { return Ok(false) };
    let (here, _) = micro_batches::open(config)?;
    Ok(here.fingerprint().difference(&trained.fingerprint).is_none())
}
