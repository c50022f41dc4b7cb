//! The largest integers of a configuration. Sizes multiply several of them and must not overflow,
//! and no key of a file may request an absurd amount of memory before sizes are known.

use serde::Serialize;
use serde_json::Value;

use super::range::out_of_range;
use super::{Config, Model};
use hpctrain_base::error::{Error, Result};

/// The most blocks of a transformer.
const BLOCKS: u64 = 1 << 14;

/// The largest extent of a network.
const EXTENT: u64 = 1 << 20;

/// The most positions of a sequence, and the largest extent of a sample.
const CONTEXT: u64 = 1 << 24;

/// The most ids.
const IDS: u64 = 1 << 31;

/// The most threads of a rank: more than any machine has cores.
const THREADS: u64 = 1 << 12;

/// The most samples, virtual ranks or ranks: memory is allocated for each.
const COUNT: u64 = 1 << 24;

/// The largest value of all other integers, such as steps and seconds.
const ANY: u64 = 1 << 48;

/// Checks that no integer of a configuration is too large.
///
/// # Errors
/// Returns an error for the first integer that is too large, with its key and the largest value.
pub fn check(config: &Config) -> Result<()> {
    walk(&mut String::new(), &value(config)?)
}

/// Checks a `[model]` section as [`check`] does.
///
/// # Errors
/// Returns an error for the first integer that is too large.
pub fn check_model(model: &Model) -> Result<()> {
    walk(&mut "model".to_owned(), &value(model)?)
}

fn value(section: &impl Serialize) -> Result<Value> {
    serde_json::to_value(section).map_err(|e| Error::internal(format!("configuration: {e}")))
}

fn walk(path: &mut String, value: &Value) -> Result<()> {
    match value {
        Value::Object(all) => all.iter().try_for_each(|(key, value)| {
            let dot = if path.is_empty() { "" } else { "." };
            walk_part(path, &format!("{dot}{key}"), value)
        }),
        Value::Array(all) => all
            .iter()
            .enumerate()
            .try_for_each(|(i, value)| walk_part(path, &format!("[{i}]"), value)),
        Value::Number(number) => {
            let most = most(path);
            match number.as_u64().filter(|number| *number > most) {
                Some(number) => Err(out_of_range(path, number, &format!("at most {most}"))),
                None => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// Checks the value of a part of `path`, and restores `path`.
fn walk_part(path: &mut String, part: &str, value: &Value) -> Result<()> {
    let length = path.len();
    path.push_str(part);
    let walked = walk(path, value);
    path.truncate(length);
    walked
}

/// Returns the largest integer of a key.
fn most(path: &str) -> u64 {
    let (section, key) = path.split_once('.').unwrap_or((path, ""));
    match (section, key) {
        // The seed is not a size.
        ("run", "seed") => u64::MAX,
        ("model", "layers") => BLOCKS,
        ("model", "context") => CONTEXT,
        ("model", key)
            if key.starts_with("input") || key.ends_with("original_max_position_embeddings") =>
        {
            CONTEXT
        }
        ("model", key) if key.ends_with("vocabulary") || key.contains("ids") => IDS,
        ("model", _) => EXTENT,
        ("run", "threads") => THREADS,
        ("batch" | "parallel" | "local_sgd" | "data" | "device" | "log", _) | ("eval", "batch") => {
            COUNT
        }
        _ => ANY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sources, load};

    /// Returns the error for a setting.
    fn refused(setting: &str) -> String {
        let overrides = [setting.to_string()];
        let (config, _) = load(&Sources { overrides: &overrides, ..Sources::default() }).unwrap();
        check(&config).unwrap_err().to_string()
    }

    #[test]
    fn integers_are_bounded_by_their_keys() {
        for (setting, expected) in [
            (
                "model.layers=1000000000000",
                "model.layers = 1000000000000 is out of range\nhint: model.layers must be at most 16384",
            ),
            ("model.width=1048577", "model.width must be at most 1048576"),
            ("model.vocabulary=2147483649", "model.vocabulary must be at most 2147483648"),
            (
                "model.layers=[{kind='conv2d', filters=3, kernel=[3, 9999999]}]",
                "model.layers[0].kernel[1] = 9999999",
            ),
            ("model.input=[4, 99999999]", "model.input[1] = 99999999"),
            ("batch.global=9223372036854775807", "batch.global must be at most 16777216"),
            ("run.steps=9223372036854775807", "run.steps must be at most 281474976710656"),
        ] {
            let error = refused(setting);
            assert!(error.contains(expected), "{setting}: {error}");
        }
        let all = [
            "run.seed=9223372036854775807",
            "model.vocabulary=2147483648",
            "run.steps=281474976710656",
        ];
        let (config, _) =
            load(&Sources { overrides: &all.map(String::from), ..Sources::default() }).unwrap();
        check(&config).unwrap();
    }
}
