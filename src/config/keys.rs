//! Description of the keys of the configuration file: their explanations and defaults.

use std::fmt::Write as _;

use toml::{Table, Value};

use super::did_you_mean::did_you_mean;
use super::schema::Key;
use super::*;
use hpctrain_base::error::{Error, Result};

/// Returns the keys of a section of the file, or of a section in one (`model.place`).
pub(super) fn keys(section: &str) -> Option<&'static [Key]> {
    Some(match section {
        "run" => Run::KEYS,
        "model" => Model::KEYS,
        "model.rope_scaling" => RopeScaling::KEYS,
        "model.place" => Place::KEYS,
        "loss" => Loss::KEYS,
        "data" => Data::KEYS,
        "batch" => Batch::KEYS,
        "optimizer" => Optimizer::KEYS,
        "lr_schedule" => LrSchedule::KEYS,
        "parallel" => Parallel::KEYS,
        "local_sgd" => LocalSgdConfig::KEYS,
        "offload" => Offload::KEYS,
        "parameter_server" => ParameterServer::KEYS,
        "precision" => Precision::KEYS,
        "device" => Device::KEYS,
        "checkpoint" => Checkpoint::KEYS,
        "memory_checkpoint" => MemoryCheckpoint::KEYS,
        "elastic" => Elastic::KEYS,
        "eval" => Eval::KEYS,
        "comm" => Comm::KEYS,
        "log" => Log::KEYS,
        _ => return None,
    })
}

/// Returns the sections of the file.
pub(super) fn sections() -> impl Iterator<Item = &'static Key> {
    Config::KEYS.iter().filter(|key| key.is_in_files())
}

/// Returns a configuration file with all keys of a section, or of all sections, each with its
/// explanation. Defaults are commented out, because `parallel.layout = auto` keeps the keys of a
/// layout that are given fixed.
///
/// # Errors
/// Returns an error if there is no such section.
pub fn describe_keys(section: Option<&str>) -> Result<String> {
    let names: Vec<&str> = sections().map(|key| key.name).collect();
    if let Some(unknown) = section.filter(|section| !names.contains(section)) {
        let hint = format!("{}sections are {}", did_you_mean(unknown, &names), names.join(", "));
        return Err(Error::input(format!("there is no section {unknown}")).hint(hint));
    }
    let defaults = Config::default().to_table()?;
    let mut text = String::new();
    for key in sections().filter(|key| section.is_none_or(|section| section == key.name)) {
        explain(&mut text, key);
        let Some(Value::Table(defaults)) = defaults.get(key.name) else { continue };
        describe(&mut text, key.name, defaults);
    }
    Ok(text.trim_end().to_owned())
}

/// Appends a section, and after its keys the sections in it.
fn describe(text: &mut String, section: &str, defaults: &Table) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "[{section}]");
    let mut inside = Vec::new();
    let keys = keys(section).unwrap_or_default();
    for key in keys.iter().filter(|key| key.is_in_files()) {
        match defaults.get(key.name) {
            Some(Value::Table(defaults)) => inside.push((key, defaults)),
            Some(value) => {
                explain(text, key);
                let _ = writeln!(text, "#{} = {value}", key.name);
            }
            None => {
                explain(text, key);
                let _ = writeln!(text, "#{} =", key.name);
            }
        }
    }
    text.push('\n');
    for (key, defaults) in inside {
        explain(text, key);
        let name = format!("{section}.{}", key.name);
        if self::keys(&name).is_some() {
            describe(text, &name, defaults);
        } else {
            let _ = writeln!(text, "[{name}]");
            for (name, value) in defaults {
                let _ = writeln!(text, "#{name} = {value}");
            }
            text.push('\n');
        }
    }
}

/// Appends the explanation of a key.
fn explain(text: &mut String, key: &Key) {
    for line in key.text {
        let _ = writeln!(text, "# {}", line.trim());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sources, load};

    #[test]
    fn all_keys_are_explained_in_a_file_that_sets_the_defaults() {
        let text = describe_keys(None).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("all.toml");
        // The text as it is, and with all defaults uncommented.
        let all: Vec<&str> = text
            .lines()
            .filter(|line| !line.starts_with("# ") && !line.ends_with(" ="))
            .map(|line| line.strip_prefix('#').unwrap_or(line))
            .collect();
        for text in [text.clone(), all.join("\n")] {
            std::fs::write(&file, &text).unwrap();
            let (mut config, _) =
                load(&Sources { file: Some(&file), ..Sources::default() }).unwrap();
            config.parallel.given.clear();
            assert_eq!(config, Config::default(), "{text}");
        }
        for key in sections() {
            for own in keys(key.name).unwrap().iter().filter(|own| own.is_in_files()) {
                assert!(!own.text.is_empty(), "{}.{}", key.name, own.name);
                let set = text.contains(&format!("\n#{} =", own.name));
                assert!(
                    set || text.contains(&format!("[{}.{}]", key.name, own.name)),
                    "{}.{}",
                    key.name,
                    own.name
                );
            }
        }
    }

    #[test]
    fn a_section_is_described_alone() {
        let text = describe_keys(Some("batch")).unwrap();
        assert!(
            text.starts_with("# Batch sizes.\n[batch]\n# ") && !text.contains("[optimizer]"),
            "{text}"
        );
        let error = describe_keys(Some("optimiser")).unwrap_err().to_string();
        assert!(
            error.contains("there is no section optimiser\nhint: did you mean `optimizer`? "),
            "{error}"
        );
    }
}
