//! Whether all ranks were started with the same configuration: a file may be old on one node, or a script may give each rank its own.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;

use crate::backend::Backend;
use crate::comm::Group;
use crate::config::Config;
use crate::error::{Error, Result};

/// Keys that ranks may have each to themselves: they change no number.
const OWN: [&str; 5] = ["run.threads", "run.memory_limit", "data.stage", "servers.address", "log.level"];

/// Values by their keys, `section.key`.
type Keys = BTreeMap<String, Value>;

/// Compares the configurations of all ranks: collective.
///
/// # Errors
/// A rank has another value than rank 0; the error names the first such rank and key.
pub fn check_alike<B: Backend>(world: &Group<B>, config: &Config) -> Result<()> {
    let own = keys(config)?;
    let text = serde_json::to_vec(&own).map_err(|e| Error::internal(format!("configuration: {e}")))?;
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let hashes = world.gather_numbers(&[hasher.finish()])?;
    let Some(other) = hashes.iter().position(|hash| *hash != hashes[0]) else { return Ok(()) };
    let all = world.gather_bytes(text).wait()?;
    let of = |rank: usize| {
        let keys = serde_json::from_slice::<Keys>(&all[rank]);
        keys.map_err(|e| Error::comm(format!("rank {rank} sent a malformed configuration: {e}")))
    };
    Err(difference(&of(0)?, &of(other)?, other))
}

/// All keys of a configuration but those of a rank's own.
fn keys(config: &Config) -> Result<Keys> {
    let sections = serde_json::to_value(config).map_err(|e| Error::internal(format!("configuration: {e}")))?;
    let mut keys = Keys::new();
    for (section, values) in sections.as_object().into_iter().flatten() {
        for (key, value) in values.as_object().into_iter().flatten() {
            keys.insert(format!("{section}.{key}"), value.clone());
        }
    }
    keys.retain(|key, value| !value.is_null() && !OWN.contains(&&key[..]));
    Ok(keys)
}

/// The error that names the first key in which a rank differs from rank 0.
fn difference(first: &Keys, other: &Keys, rank: usize) -> Error {
    let key = first.keys().chain(other.keys()).find(|key| first.get(*key) != other.get(*key));
    let key = key.map_or("nothing", |key| key);
    let (one, two) = (first.get(key), other.get(key));
    let is_long = |value: Option<&Value>| value.is_some_and(|value| value.is_array() || value.is_object());
    let message = if is_long(one) || is_long(two) {
        format!("rank {rank} has another {key} than rank 0")
    } else {
        let told = |value: Option<&Value>| value.map_or("none".into(), |value| format!("{key} = {value}"));
        format!("ranks differ in {key}: rank 0 has {}, rank {rank} has {}", told(one), told(two))
    };
    let own = OWN.join(", ");
    Error::input(message).hint(format!("start all ranks with the same configuration; only {own} may differ")).shared()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::comm::{Algorithm, start_threads};
    use crate::config::{Sources, load};

    /// The outcomes of ranks with these settings.
    fn outcomes(settings: &[&str]) -> Vec<Result<()>> {
        let configs: Vec<Config> = settings
            .iter()
            .map(|setting| {
                let overrides: Vec<String> = setting.split(' ').map(String::from).collect();
                load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap().0
            })
            .collect();
        let comms = start_threads::<Cpu>(configs.len(), Algorithm::Tree);
        std::thread::scope(|scope| {
            let ranks = comms.into_iter().zip(&configs);
            let ranks: Vec<_> =
                ranks.map(|(comm, config)| scope.spawn(move || check_alike(&comm.world(), config))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_may_differ_in_nothing_that_changes_numbers() {
        let alike = ["run.threads=1 run.steps=9", "run.steps=9 run.threads=2 run.memory_limit=1GiB"];
        assert!(outcomes(&alike).into_iter().all(|outcome| outcome.is_ok()));
        for (settings, says) in [
            (&["optimizer.lr=0.1", "optimizer.lr=0.1", "optimizer.lr=0.2"][..], "rank 2 has optimizer.lr = 0.2"),
            (&["run.name=a", "run.steps=2500"], "differ in run.name: rank 0 has run.name = \"a\", rank 1 has none"),
            (&["model.layers=[{kind='relu'}]", "run.steps=1"], "rank 1 has another model.layers than rank 0"),
        ] {
            for outcome in outcomes(settings) {
                let error = outcome.unwrap_err();
                assert!(error.is_shared() && error.to_string().contains(says), "{error}");
            }
        }
    }
}
