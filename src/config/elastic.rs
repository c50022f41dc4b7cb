//! Checks of `[elastic]`.

use super::range::out_of_range;
use super::{Config, DataOrder, Elastic, EmbeddingPlacement, Interval, MessageDtype, WorkShares};
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Algorithm;
use hpctrain_parallel::Storage;

/// The fewest virtual ranks of a rank with which a loss costs little speed: with 4 of them the
/// busiest of 7 ranks has 1.25 times the work that it had as one of 8.
const VIRTUAL_RANKS_PER_RANK: usize = 4;

/// Checks the keys of `[elastic]`.
///
/// # Errors
/// Returns an error if a key is out of range or has no effect, or another key excludes elastic
/// training.
pub fn check(config: &Config) -> Result<()> {
    let Elastic { on, min_ranks, timeout, rejoin } = &config.elastic;
    let default = Elastic::default();
    if !on {
        let set = [
            ("min_ranks", (*min_ranks != default.min_ranks).then(|| min_ranks.to_string())),
            ("timeout", (*timeout != default.timeout).then(|| timeout.to_string())),
            ("rejoin", (*rejoin != default.rejoin).then(|| rejoin.to_string())),
        ];
        return match set.into_iter().find_map(|(key, value)| Some((key, value?))) {
            None => Ok(()),
            Some((key, value)) => Err(Error::input(format!(
                "elastic.{key} = {value} does nothing with elastic.on = false"
            ))
            .hint(format!("set elastic.on=true, or remove {key}"))),
        };
    }
    if *min_ranks == 0 {
        return Err(out_of_range("elastic.min_ranks", min_ranks, "at least 1"));
    }
    if *timeout == 0 {
        return Err(out_of_range("elastic.timeout", timeout, "at least 1"));
    }
    if let Some(seconds) = config.comm.timeout.number()
        && (1..=*timeout).contains(&seconds)
    {
        return Err(Error::input(format!(
            "comm.timeout = {seconds} ends the job before elastic.timeout = {timeout} finds a lost rank"
        ))
        .hint("set comm.timeout to auto, or to much more than elastic.timeout"));
    }
    if !config.memory_checkpoint.every.is_on() {
        return Err(Error::input("elastic.on = true, but memory_checkpoint.every = 0")
            .hint("set memory_checkpoint.every=1: ranks continue from in-memory checkpoints"));
    }
    if config.parallel.virtual_ranks.is_none() {
        return Err(Error::input("elastic.on = true without parallel.virtual_ranks").hint(
            "set parallel.virtual_ranks to 8 times the number of ranks: they are dealt to the ranks \
             that are there",
        ));
    }
    match excluding(config) {
        None => Ok(()),
        Some(key) => Err(Error::input(format!("elastic.on = true is not supported with {key}"))
            .hint(format!(
                "remove {}, or train without elastic.on under hpctrain supervise",
                key.split(' ').next().unwrap_or_default()
            ))),
    }
}

/// Returns a key, with its value, with which the number of ranks cannot change.
fn excluding(config: &Config) -> Option<String> {
    let parallel = &config.parallel;
    let axes = [
        ("shard", parallel.shard),
        ("replica", parallel.replica),
        ("pipeline", Some(parallel.pipeline).filter(|stages| *stages > 1)),
        ("tensor", Some(parallel.tensor).filter(|ranks| *ranks > 1)),
    ];
    if let Some((key, value)) = axes.into_iter().find_map(|(key, value)| Some((key, value?))) {
        return Some(format!("parallel.{key} = {value}"));
    }
    if parallel.work_shares != WorkShares::Equal {
        return Some("parallel.work_shares".into());
    }
    if parallel.storage == Storage::Central {
        return Some("parallel.storage = central".into());
    }
    // Sums in another order would depend on the number of ranks.
    let algorithm = config.comm.algorithm.fixed();
    if let Some(algorithm) = algorithm.filter(|one| *one != Algorithm::HalvingDoubling) {
        return Some(format!("comm.algorithm = {algorithm}"));
    }
    if !config.comm.deterministic {
        return Some("comm.deterministic = false".into());
    }
    if config.comm.dtype == MessageDtype::Bf16 {
        return Some("comm.dtype = bf16".into());
    }
    if config.data.order == DataOrder::Files {
        return Some("data.order = files".into());
    }
    if config.local_sgd.sync_every != Interval::Steps(0) {
        return Some("local_sgd.sync_every".into());
    }
    (config.model.place.tables == EmbeddingPlacement::Host)
        .then(|| "model.place.tables = host".into())
}

/// Returns a warning if `ranks` ranks have so few virtual ranks that a loss costs much speed.
pub fn few_virtual_ranks(config: &Config, ranks: usize) -> Option<String> {
    let virtual_ranks = config.parallel.virtual_ranks?;
    (config.elastic.on && ranks > 1 && virtual_ranks < VIRTUAL_RANKS_PER_RANK * ranks).then(|| {
        format!(
            "parallel.virtual_ranks = {virtual_ranks} are few for {ranks} ranks: without one of them \
             the busiest rank has {} instead of {} (hint: set it to {} or more)",
            virtual_ranks.div_ceil(ranks - 1),
            virtual_ranks.div_ceil(ranks),
            VIRTUAL_RANKS_PER_RANK * ranks
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sources, load};

    fn checked(settings: &[&str]) -> Result<()> {
        let overrides: Vec<String> = settings.iter().map(ToString::to_string).collect();
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() })?;
        check(&config)
    }

    const ON: [&str; 3] =
        ["elastic.on=true", "memory_checkpoint.every=1", "parallel.virtual_ranks=16"];

    #[test]
    fn what_excludes_elastic_training_is_named() {
        assert_eq!(checked(&[]), Ok(()));
        assert_eq!(checked(&ON), Ok(()));
        for (setting, words) in [
            ("elastic.min_ranks=0", "elastic.min_ranks = 0"),
            ("elastic.timeout=0", "elastic.timeout = 0"),
            ("memory_checkpoint.every=0", "memory_checkpoint.every = 0"),
            ("parallel.shard=2", "parallel.shard = 2"),
            ("parallel.pipeline=2", "parallel.pipeline = 2"),
            ("parallel.storage=central", "parallel.storage = central"),
            ("local_sgd.sync_every=4", "local_sgd.sync_every"),
            ("comm.algorithm=ring", "comm.algorithm = ring"),
            ("comm.deterministic=false", "comm.deterministic = false"),
            ("data.order=files", "data.order = files"),
        ] {
            let error = checked(&[&ON[..], &[setting]].concat()).unwrap_err();
            assert!(error.message().contains(words), "{setting}: {error}");
            assert!(error.advice().is_some() || setting.ends_with("=0"), "{setting}: {error}");
        }
        let error = checked(&ON[..2]).unwrap_err();
        assert!(error.message().contains("without parallel.virtual_ranks"), "{error}");
        let error = checked(&["elastic.timeout=5"]).unwrap_err();
        assert!(error.message().contains("does nothing with elastic.on = false"), "{error}");
    }

    #[test]
    fn few_virtual_ranks_are_noted() {
        let overrides = ON.map(String::from);
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        assert_eq!([1, 2, 4].map(|ranks| few_virtual_ranks(&config, ranks)), [None, None, None]);
        let note = few_virtual_ranks(&config, 8).unwrap();
        assert!(note.contains("the busiest rank has 3 instead of 2"), "{note}");
    }
}
