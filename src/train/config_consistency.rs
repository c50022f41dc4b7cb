//! Checks that all ranks were started with the same configuration: a file may be old on one node,
//! or a script may give each rank a different one.

use std::hash::{DefaultHasher, Hash, Hasher};

use hpctrain_base::error::{Error, Result};
use hpctrain_checkpoint::run_dir::differences;
use hpctrain_comm::Group;
use hpctrain_config::Config;
use hpctrain_device::Backend;

/// Keys that may differ between ranks, because they do not change any result.
const RANK_LOCAL_KEYS: [&str; 5] = [
    "run.threads",
    "run.memory_limit",
    "data.local_cache",
    "parameter_server.address",
    "log.level",
];

/// Checks that all ranks have the same configuration, apart from rank-local keys. Collective.
///
/// # Errors
/// Returns an error if a rank has another value than rank 0 (the error names the first such rank
/// and key), or if a message between ranks fails.
pub fn check_same_config<B: Backend>(world: &Group<B>, config: &Config) -> Result<()> {
    let hashes = world.all_gather_u64(&[config_digest(config)?])?;
    let Some(rank) = hashes.iter().position(|hash| *hash != hashes[0]) else { return Ok(()) };
    let all = world.gather_bytes(shared_keys(config)?.into_bytes()).wait()?;
    let first = differences(&parsed(0, &all[0])?, &parsed(rank, &all[rank])?, |_, _| true)
        .into_iter()
        .next();
    let first =
        first.ok_or_else(|| Error::internal("equal configurations of different texts").shared())?;
    let message = format!(
        "ranks differ in {}: {} on rank 0, {} on rank {rank}",
        first.key, first.before, first.now
    );
    let keys = RANK_LOCAL_KEYS.join(", ");
    Err(Error::input(message)
        .hint(format!("start all ranks with the same configuration; only {keys} may differ"))
        .shared())
}

/// Returns a digest of what [`check_same_config`] compares.
///
/// # Errors
/// Returns an error if the configuration cannot be serialized.
pub fn config_digest(config: &Config) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    shared_keys(config)?.hash(&mut hasher);
    Ok(hasher.finish())
}

/// Returns the configuration that rank `rank` has sent as TOML.
fn parsed(rank: usize, text: &[u8]) -> Result<Config> {
    let config = String::from_utf8_lossy(text).parse::<Config>();
    config.map_err(|e| {
        Error::comm(format!("rank {rank} sent a malformed configuration: {}", e.message()))
    })
}

/// Returns the configuration as TOML, without the keys that may differ between ranks.
fn shared_keys(config: &Config) -> Result<String> {
    let mut file = config.to_table()?;
    for (section, key) in RANK_LOCAL_KEYS.iter().filter_map(|key| key.split_once('.')) {
        file.get_mut(section)
            .and_then(toml::Value::as_table_mut)
            .map(|section| section.remove(key));
    }
    Ok(file.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_comm::{Algorithm, start_threads};
    use hpctrain_config::{Sources, load};
    use hpctrain_cpu::Cpu;

    /// Returns the outcome of each rank with these settings.
    fn outcomes(settings: &[&str]) -> Vec<Result<()>> {
        let configs: Vec<Config> = settings
            .iter()
            .map(|setting| {
                let overrides: Vec<String> = setting.split(' ').map(String::from).collect();
                load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap().0
            })
            .collect();
        let comms = start_threads::<Cpu>(configs.len(), Algorithm::HalvingDoubling).unwrap();
        std::thread::scope(|scope| {
            let ranks = comms.into_iter().zip(&configs);
            let ranks: Vec<_> = ranks
                .map(|(comm, config)| scope.spawn(move || check_same_config(&comm.world(), config)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_may_differ_in_nothing_that_changes_numbers() {
        let same = ["run.threads=1 run.steps=9", "run.steps=9 run.threads=2 run.memory_limit=1GiB"];
        assert!(outcomes(&same).into_iter().all(|outcome| outcome.is_ok()));
        for (settings, says) in [
            (
                &["optimizer.lr=0.1", "optimizer.lr=0.1", "optimizer.lr=0.2"][..],
                "ranks differ in optimizer.lr: 0.1 on rank 0, 0.2 on rank 2",
            ),
            (
                &["run.name=a", "run.steps=2500"],
                "ranks differ in run.name: \"a\" on rank 0, omitted on rank 1",
            ),
            (&["model.layers=[{kind='relu'}]", "run.steps=1"], "ranks differ in model.layers: [{ "),
        ] {
            for outcome in outcomes(settings) {
                let error = outcome.unwrap_err();
                assert!(error.is_shared() && error.to_string().contains(says), "{error}");
            }
        }
    }
}
