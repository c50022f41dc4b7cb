//! Checks that the evaluator of a run measures on the run's own validation set.

use hpctrain_base::error::{Error, Result};
use hpctrain_checkpoint::Manifest;
use hpctrain_config::{Config, Data};
use hpctrain_data::{Fingerprint, TrainedOn};
use hpctrain_engine::micro_batches;

/// Refuses custom samples, called `name`, that are not those of the run, and a `config` by which
/// other samples among them would be measured. `fingerprint` is that of the training samples.
///
/// # Errors
/// Returns an error if it is another validation set.
pub fn check_custom(
    manifest: &Manifest,
    config: &Config,
    name: &str,
    fingerprint: Option<&Fingerprint>,
) -> Result<()> {
    let mut run = manifest.config.clone();
    // The custom samples replace these keys.
    run.data = config.data.clone();
    check_keys(&run, config)?;
    let of_run = manifest.data.as_ref().map(|trained| &trained.fingerprint);
    let difference = fingerprint.zip(of_run).and_then(|(own, of_run)| own.difference(of_run));
    difference.map_or(Ok(()), |difference| {
        Err(Error::input(format!("{name} is other data than that of the run: {difference}"))
            .hint("give the evaluator the same Splits as the trainer"))
    })
}

/// Refuses a `config` by which a checkpoint would be measured on another validation set than the
/// run's own. The data may be at another path, if it is the data that the run was trained on.
///
/// # Errors
/// Returns an error if it is another validation set, or if the data cannot be opened.
pub fn check(manifest: &Manifest, config: &Config) -> Result<()> {
    let run = &manifest.config;
    check_keys(run, config)?;
    if run.data.path != config.data.path && !is_copy(manifest.data.as_ref(), config)? {
        return Err(is_other(&format!(
            "data.path = {}, with other data than {}",
            config.data.path, run.data.path
        )));
    }
    Ok(())
}

/// Refuses a `config` with other keys of the validation set than those of the run, except for the
/// path.
fn check_keys(run: &Config, config: &Config) -> Result<()> {
    if set(run) != set(config) {
        return Err(is_other("[data]"));
    }
    if run.eval.samples != config.eval.samples {
        let describe =
            |samples: Option<u64>| samples.map_or("all".into(), |samples| samples.to_string());
        return Err(is_other(&format!(
            "eval.samples = {}, not {}",
            describe(config.eval.samples),
            describe(run.eval.samples)
        )));
    }
    Ok(())
}

/// Returns the error of another validation set.
fn is_other(what: &str) -> Error {
    Error::input(format!(
        "{what}: the evaluator of a run must use the run's own validation set, so that its records are comparable"
    ))
    .hint("hpctrain eval --checkpoint CHECKPOINT --data PATH measures on any set and records nothing")
}

/// Returns the keys that determine the validation samples, except for the path.
fn set(config: &Config) -> Data {
    let Data { shuffle, prefetch, local_cache, augment, weights, verify, exclude, .. } =
        Data::default();
    Data {
        path: String::new(),
        shuffle,
        prefetch,
        local_cache,
        augment,
        weights,
        verify,
        exclude,
        ..config.data.clone()
    }
}

/// Returns true if the data of a configuration is the training data of a run.
fn is_copy(trained: Option<&TrainedOn>, config: &Config) -> Result<bool> {
    let Some(trained) = trained else { return Ok(false) };
    let (here, _) = micro_batches::open(config)?;
    Ok(here.fingerprint().difference(&trained.fingerprint).is_none())
}
