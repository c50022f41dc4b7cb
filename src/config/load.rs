//! From preset, file and overrides to one [`Config`].
//!
//! Each layer is checked by itself first, so that an error names the layer it came from.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serialize};
use toml::Table;

use super::Config;
use super::aliases::rename;
use super::did_you_mean::did_you_mean;
use super::epochs::replace_partners;
use super::paths::expand_paths;
use super::unknown_keys::{self, place};
use hpctrain_base::error::{Error, Result};

/// The presets, by name.
pub const PRESETS: [(&str, &str); 10] = [
    ("gpt-char", include_str!("presets/gpt-char.toml")),
    ("gpt-baby", include_str!("presets/gpt-baby.toml")),
    ("gpt2-124m", include_str!("presets/gpt2-124m.toml")),
    ("llama-char", include_str!("presets/llama-char.toml")),
    ("tinyllama-1.1b", include_str!("presets/tinyllama-1.1b.toml")),
    ("mlp-mnist", include_str!("presets/mlp-mnist.toml")),
    ("cnn-mnist", include_str!("presets/cnn-mnist.toml")),
    ("resnet-18-cifar", include_str!("presets/resnet-18-cifar.toml")),
    ("resnet-18", include_str!("presets/resnet-18.toml")),
    ("dlrm", include_str!("presets/dlrm.toml")),
];

/// The preset that runs when nothing is said.
pub const DEFAULT_PRESET: &str = "gpt-char";

/// Sources of a configuration.
#[derive(Debug, Clone, Default)]
pub struct Sources<'a> {
    /// A compiled-in preset.
    pub preset: Option<&'a str>,
    /// A file.
    pub file: Option<&'a Path>,
    /// `section.key=value`, in order.
    pub overrides: &'a [String],
}

/// Reads and merges all layers. With neither preset nor file, the default preset is the base.
///
/// Returns the configuration and the name that a run without `run.name` gets.
///
/// # Errors
/// Returns an error that names the mistake, its layer, and the nearest key that exists.
pub fn load(sources: &Sources<'_>) -> Result<(Config, String)> {
    let mut merged = Table::new();
    let mut name = DEFAULT_PRESET.to_string();
    if let Some(preset) = sources.preset.or(sources.file.is_none().then_some(DEFAULT_PRESET)) {
        let mut layer = parse_layer(self::preset(preset)?, &format!("preset {preset}"))?.table;
        replace_partners(&mut layer)?;
        merge(&mut merged, layer);
        name = preset.to_string();
    }
    let mut given = BTreeSet::new();
    let mut aliases = BTreeMap::new();
    if let Some(path) = sources.file {
        let text = std::fs::read_to_string(path).map_err(|e| {
            Error::io("read the configuration", path, e)
                .hint("hpctrain config show prints one to start from")
        })?;
        let mut layer = parse_layer(&text, &path.display().to_string())?;
        replace_partners(&mut layer.table).map_err(|e| e.at(path.display()))?;
        given.extend(layout_keys(&layer.table));
        merge(&mut merged, layer.table);
        aliases.append(&mut layer.aliases);
        if let Some(stem) = path.file_stem() {
            name = stem.to_string_lossy().into_owned();
        }
    }
    let mut layer = overriding(sources.overrides)?;
    given.extend(layout_keys(&layer.table));
    merge(&mut merged, layer.table);
    aliases.append(&mut layer.aliases);
    let mut config = Config::deserialize_table(merged)?;
    config.parallel.given = given;
    config.aliases = aliases;
    Ok((config, name))
}

/// Returns the keys of `keys`, each as `section.key`, that the file or the overrides of `sources`
/// give, as overrides. Presets do not count.
///
/// # Errors
/// Returns an error under the conditions of [`load`].
pub fn given_keys(sources: &Sources<'_>, keys: &[&str]) -> Result<Vec<String>> {
    let mut merged = Table::new();
    if let Some(path) = sources.file {
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::io("read the configuration", path, e))?;
        merge(&mut merged, parse_layer(&text, &path.display().to_string())?.table);
    }
    merge(&mut merged, overriding(sources.overrides)?.table);
    let given = keys.iter().filter_map(|key| {
        let (section, name) = key.split_once('.')?;
        Some(format!("{key}={}", merged.get(section)?.get(name)?))
    });
    Ok(given.collect())
}

/// The layer of all overrides together.
fn overriding(overrides: &[String]) -> Result<Layer> {
    let mut all = Layer::default();
    for item in overrides {
        let mut layer = parse_override(item)?;
        merge(&mut all.table, layer.table);
        all.aliases.append(&mut layer.aliases);
    }
    replace_partners(&mut all.table)?;
    Ok(all)
}

/// The keys of a layer that a choice of the layout keeps.
fn layout_keys(layer: &Table) -> impl Iterator<Item = String> + '_ {
    let keys = move |section: &'static str| {
        let table = layer.get(section).and_then(toml::Value::as_table);
        table.into_iter().flat_map(Table::keys).map(move |key| format!("{section}.{key}"))
    };
    let all = ["parallel", "local_sgd", "offload", "batch"].into_iter().flat_map(keys);
    all.filter(|key| {
        key != "parallel.layout" && (!key.starts_with("batch.") || key == "batch.micro")
    })
}

/// Returns a configuration with some of its keys overridden, each as `section.key=value`.
///
/// # Errors
/// Returns an error under the conditions of [`load`].
pub fn overlay(config: &Config, overrides: &[String]) -> Result<Config> {
    let mut merged = config.to_table()?;
    merge(&mut merged, overriding(overrides)?.table);
    Config::deserialize_table(merged)
}

/// Returns the configuration of a run whose data was moved to `path`.
///
/// # Errors
/// Returns an error if its data is a mixture, which has several paths.
pub fn with_data_path(mut config: Config, path: &Path) -> Result<Config> {
    let path = path.display();
    if !config.data.mix.is_empty() {
        return Err(Error::input(format!("--data {path}: the run's data is a mixture"))
            .hint("give all its data sets: --set data.mix=[{path='…', weight=…}, …]"));
    }
    config.data.path = path.to_string();
    Ok(config)
}

/// Returns an error of opening the data of a run, with the option for data that was moved.
#[must_use]
pub fn at_moved_data(error: Error, config: &Config) -> Error {
    let data = &config.data;
    let is_missing = |path: &str| !path.starts_with("bundled:") && !Path::new(path).exists();
    let error = error.at("the data of the run");
    if data.mix.iter().any(|one| is_missing(&one.path)) {
        error.hint("if it was moved, give its place: --set data.mix=[{path='…', weight=…}, …]")
    } else if data.mix.is_empty() && is_missing(&data.path) {
        error.hint("if it was moved, give its place: --data PATH")
    } else {
        error
    }
}

/// Returns a section as a TOML table: numbers of 32 bits have no more digits than they need.
///
/// # Errors
/// Returns an error if it cannot be serialized.
pub fn written(section: &impl Serialize) -> Result<Table> {
    let text = toml::to_string(section).map_err(|e| internal(&e))?;
    toml::from_str(&text).map_err(|e| internal(&e))
}

pub(super) fn internal(error: &impl Display) -> Error {
    Error::internal(format!("configuration: {error}"))
}

/// Deserializes a configuration inside a JSON document, for `#[serde(deserialize_with)]`.
///
/// Converts it to TOML first, so that the deserializers of all keys are compiled for one format
/// only.
///
/// # Errors
/// Returns an error if a key is unknown or a value is invalid.
pub fn deserialize_json<'de, D: Deserializer<'de>>(json: D) -> Result<Config, D::Error> {
    let mut value = serde_json::Value::deserialize(json)?;
    remove_nulls(&mut value);
    let text = toml::to_string(&value).map_err(D::Error::custom)?;
    text.parse::<Config>().map_err(|e| D::Error::custom(e.message()))
}

/// Removes members that are null, which TOML cannot represent.
fn remove_nulls(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(members) => {
            members.retain(|_, member| !member.is_null());
            members.values_mut().for_each(remove_nulls);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

/// Parses a TOML file, in which every key is optional. Unlike [`load`], expands no paths and merges
/// no presets. Records of older versions are read: keys may have their former names.
impl FromStr for Config {
    type Err = toml::de::Error;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        toml::from_str(text).or_else(|e| {
            let mut table: Table = toml::from_str(text)?;
            match rename(&mut table) {
                Ok(renamed) if !renamed.is_empty() => toml::from_str(&table.to_string()),
                _ => Err(e),
            }
        })
    }
}

impl Config {
    /// Logs the other names by which keys were given, at level info.
    pub fn log_aliases(&self) {
        for (alias, key) in &self.aliases {
            log::info!("{alias} is read as {key}");
        }
    }

    /// Serializes all keys that have a value, as a TOML file.
    ///
    /// # Errors
    /// Returns an error if it cannot be serialized.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| internal(&e))
    }

    /// Returns the same as a table. Numbers of 32 bits have no more digits than they need.
    ///
    /// # Errors
    /// Returns an error if it cannot be serialized.
    pub fn to_table(&self) -> Result<Table> {
        toml::from_str(&self.to_toml()?).map_err(|e| internal(&e))
    }

    fn deserialize_table(mut table: Table) -> Result<Config> {
        expand_paths(&mut table, &|name| std::env::var(name).ok())?;
        // By way of its text: reading a configuration from a table is as much code again.
        table.to_string().parse::<Config>().map_err(|e| explain(&e, "", "configuration"))
    }
}

/// The text of a preset.
fn preset(name: &str) -> Result<&'static str> {
    PRESETS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text).ok_or_else(|| {
        let names = PRESETS.map(|(name, _)| name);
        let error = Error::input(format!("there is no preset {name}"));
        error.hint(format!("{}presets are {}", did_you_mean(name, &names), names.join(", ")))
    })
}

/// One source of keys.
#[derive(Default)]
pub(super) struct Layer {
    /// The keys, by their present names.
    pub table: Table,
    /// See [`Config::aliases`].
    pub aliases: BTreeMap<String, String>,
}

/// Parses one layer, refusing keys and values that the schema does not know.
pub(super) fn parse_layer(text: &str, origin: &str) -> Result<Layer> {
    let mut table: Table = toml::from_str(text).map_err(|e| explain(&e, text, origin))?;
    unknown_keys::check(text, origin)?;
    let aliases = rename(&mut table).map_err(|e| e.at(origin))?;
    if aliases.is_empty() {
        text.parse::<Config>().map_err(|e| explain(&e, text, origin))?;
    } else {
        // Without the lines of the file, of which keys have moved.
        table.to_string().parse::<Config>().map_err(|e| explain(&e, "", origin))?;
    }
    table.iter().try_for_each(|(key, value)| check_finite(key, value)).map_err(|e| e.at(origin))?;
    Ok(Layer { table, aliases })
}

/// Refuses numbers that TOML can say, and neither training nor a manifest has a use for.
fn check_finite(key: &str, value: &toml::Value) -> Result<()> {
    match value {
        toml::Value::Float(number) if !number.is_finite() => {
            Err(Error::input(format!("{key} = {number}")).hint("give a finite number"))
        }
        toml::Value::Table(table) => {
            table.iter().try_for_each(|(name, value)| check_finite(&format!("{key}.{name}"), value))
        }
        toml::Value::Array(values) => values
            .iter()
            .enumerate()
            .try_for_each(|(i, value)| check_finite(&format!("{key}[{i}]"), value)),
        _ => Ok(()),
    }
}

/// `a.b=c` as a table, or `a.b.d=c` where a section has sections; `c` may be TOML or a bare word.
fn parse_override(item: &str) -> Result<Layer> {
    let origin = format!("--set {item}");
    let malformed = || {
        Error::input(format!("{origin}: not of the form section.key=value"))
            .hint("--set run.steps=500")
    };
    let (key, value) = item.split_once('=').ok_or_else(malformed)?;
    let key = key.trim();
    let value = value.trim();
    if !(2..=3).contains(&key.split('.').count()) || key.split('.').any(str::is_empty) {
        return Err(malformed());
    }
    let line = format!("{key} = {value}\n");
    let quoted = value.replace('\\', "\\\\").replace('"', "\\\"");
    let as_text = || parse_layer(&format!("{key} = \"{quoted}\"\n"), &origin);
    match toml::from_str::<Table>(&line) {
        Err(_) => as_text(),
        // A text that looks like a number, a date or a truth value, such as the number of a job for
        // run.name.
        Ok(_) => parse_layer(&line, &origin).or_else(|e| as_text().map_err(|_| e)),
    }
}

/// Overlays `layer` on `base`, section by section.
fn merge(base: &mut Table, layer: Table) {
    for (key, value) in layer {
        match (base.get_mut(&key), value) {
            (Some(toml::Value::Table(old)), toml::Value::Table(new)) => merge(old, new),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

/// One line from the parser's error, with the number of the line and the nearest known value.
fn explain(error: &toml::de::Error, text: &str, origin: &str) -> Error {
    let message = error.message().lines().next().unwrap_or_default().to_string();
    let place = error.span().map_or(origin.to_owned(), |span| place(text, origin, span.start));
    // Serde reports known values, and keys in lists and tables of a key, in its message only:
    // "unknown variant `cosin`, expected one of `constant`, `cosine`".
    let names: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    match names.as_slice() {
        [name, known @ ..] if message.starts_with("unknown field") => {
            unknown_name(&format!("{place}: unknown key"), name, known, "keys here are")
        }
        [name, known @ ..] if message.starts_with("unknown variant") => {
            unknown_name(&format!("{place}: unknown value"), name, known, "it can be")
        }
        _ => {
            let quoted = error.span().and_then(|span| quoted(text, span));
            let hint = match quoted {
                Some(quoted) => format!("write a text in quotes, such as {quoted}"),
                None => "hpctrain config show prints every key with its value".to_owned(),
            };
            Error::input(format!("{place}: {message}")).hint(hint)
        }
    }
}

/// Returns an error that begins with `what`, for a name that is not among `known`.
fn unknown_name(what: &str, name: &str, known: &[&str], they: &str) -> Error {
    let near = did_you_mean(name, known);
    Error::input(format!("{what} `{name}`")).hint(format!("{near}{they} {}", known.join(", ")))
}

/// Returns the refused value at `span` in quotes, if the configuration is valid with the quotes.
fn quoted(text: &str, span: Range<usize>) -> Option<String> {
    let quoted = format!("\"{}\"", text.get(span.clone())?);
    let corrected = [&text[..span.start], &quoted[..], &text[span.end..]].concat();
    corrected.parse::<Config>().is_ok().then_some(quoted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(overrides: &[&str]) -> Result<Config> {
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        load(&Sources { overrides: &overrides, ..Sources::default() }).map(|(config, _)| config)
    }

    #[test]
    fn layers_override_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.toml");
        std::fs::write(&path, "[run]\nsteps = 7\n[model]\nwidth = 64\n").unwrap();
        let wrong = |item: &str| {
            load(&Sources { overrides: &[item.to_string()], ..Sources::default() })
                .unwrap_err()
                .to_string()
        };
        let error = wrong("model.layers=[{kind='relu'}, {kind='dens', units=3}]");
        assert!(error.contains("layer 1 of the list: unknown variant `dens`"), "{error}");
        let error = wrong("model.layers=[{kind='conv2d', filters=3, kernel='big'}]");
        assert!(error.contains("layer 0 of the list: a number, or [rows, columns]"), "{error}");
        assert!(wrong("model.layers=-1").contains("a number of blocks or a list of layers"));

        let overrides = ["model.width=32".to_string(), "run.name=a b".to_string()];
        let sources =
            Sources { preset: Some("gpt-char"), file: Some(&path), overrides: &overrides };
        let (config, name) = load(&sources).unwrap();
        assert_eq!((config.run.steps, config.model.width, config.model.bias), (7, 32, Some(false)));
        assert_eq!((name.as_str(), config.run.name.as_deref()), ("mine", Some("a b")));
    }

    #[test]
    fn every_preset_parses() {
        for (name, _) in PRESETS {
            load(&Sources { preset: Some(name), ..Sources::default() }).unwrap();
        }
    }

    #[test]
    fn a_configuration_in_json_is_read_with_every_digit() {
        let read = |text: &str| deserialize_json(&mut serde_json::Deserializer::from_str(text));
        let odd = [
            "optimizer.lr=0.1",
            "model.dropout=1e-9",
            "run.seed=9223372036854775807",
            "run.root='a = \"b\" é'",
        ];
        for preset in PRESETS.map(|(name, _)| Some(name)) {
            for overrides in [vec![], odd.map(str::to_string).to_vec()] {
                let (config, _) =
                    load(&Sources { preset, overrides: &overrides, ..Sources::default() }).unwrap();
                assert_eq!(read(&serde_json::to_string(&config).unwrap()).unwrap(), config);
            }
        }
        let error = read("{\"run\": {\"stepz\": 1}}").unwrap_err().to_string();
        assert!(error.contains("unknown field `stepz`"), "{error}");
    }

    #[test]
    fn unknown_keys_name_the_nearest() {
        let error = set(&["run.stps=5"]).unwrap_err().to_string();
        assert!(error.contains("--set run.stps=5: unknown key `stps`"), "{error}");
        assert!(error.contains("did you mean `steps`?"), "{error}");
        let error = set(&["lr_schedule.kind=cosin"]).unwrap_err().to_string();
        assert!(error.contains("unknown value `cosin`") && error.contains("`cosine`"), "{error}");
    }

    #[test]
    fn numbers_are_finite() {
        for (item, says) in [
            (
                "eval.min_delta=inf",
                "--set eval.min_delta=inf: eval.min_delta = inf\nhint: give a finite number",
            ),
            ("optimizer.lr=nan", "optimizer.lr = NaN"),
            ("data.mix=[{path='a', weight=-inf}]", "data.mix[0].weight = -inf"),
            ("model.layers=[{kind='layer_norm', epsilon=1e300}]", "layer 0 of the list: "),
            ("model.layers=[{kind='layer_norm', epsilon=-1.0}]", "0 or more, not -1"),
        ] {
            let error = set(&[item]).unwrap_err().to_string();
            assert!(error.contains(says), "{item}: {error}");
        }
    }

    #[test]
    fn keys_of_other_programs_get_their_names_here() {
        for (item, ours) in [
            ("optimizer.betas=1", "optimizer.beta1"),
            ("lr_schedule.min_lr=0.1", "lr_schedule.min_ratio"),
            ("batch.gradient_accumulation_steps=2", "batch.micro"),
            ("train.batch_size=8", "batch.global"),
            ("training.weight_decay=0.1", "optimizer.weight_decay"),
            ("train.n_layer=2", "model.layers"),
        ] {
            let error = set(&[item]).unwrap_err().to_string();
            assert!(
                error.contains(&format!("hint: did you mean `{ours}`? keys here are ")),
                "{item}: {error}"
            );
        }
        for (text, ours) in [
            ("[batch]\nmicro = 8\nbs = 2\n", "batch.global"),
            ("[run]\nsteps = 1\n\n[train]\n# of a step\nbatch_size = 2\n", "batch.global"),
            ("optimizer.decay = 1\n", "optimizer.weight_decay"),
        ] {
            let error = parse_layer(text, "x.toml").err().unwrap().to_string();
            assert!(error.contains(&format!("hint: did you mean `{ours}`? ")), "{text}: {error}");
        }
    }

    #[test]
    fn numbers_are_written_with_the_digits_they_need() {
        let mut config = Config::default();
        config.model.dropout = 0.1;
        assert_eq!(written(&config.model).unwrap()["dropout"].to_string(), "0.1");
        assert_eq!(config.to_table().unwrap()["optimizer"]["beta2"].to_string(), "0.99");
    }

    #[test]
    fn a_file_error_has_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bad.toml");
        std::fs::write(&path, "[run]\nsteps = 7\n\n[modle]\nwidth = 64\n").unwrap();
        let error =
            load(&Sources { file: Some(&path), ..Sources::default() }).unwrap_err().to_string();
        assert!(
            error.contains("bad.toml:4: unknown key `modle`") && error.contains("`model`"),
            "{error}"
        );
        let error =
            load(&Sources { file: Some(Path::new("no.toml")), ..Sources::default() }).unwrap_err();
        assert!(error.to_string().contains("no.toml") && error.exit_code() == 2);
    }

    #[test]
    fn texts_may_look_like_numbers() {
        for text in ["123456", "1e5", "0x1f", "true", "2024-01-01", "inf", "'7'"] {
            let name = set(&[&format!("run.name={text}")]).unwrap().run.name;
            assert_eq!(name.as_deref(), Some(text.trim_matches('\'')));
        }
        assert_eq!(set(&["data.path=2024"]).unwrap().data.path, "2024");
        // Other keys take no text.
        assert!(set(&["run.steps=1.5"]).unwrap_err().to_string().contains("floating point `1.5`"));
        let error = parse_layer("[run]\nname = 123\n", "x.toml").err().unwrap().to_string();
        assert!(
            error.starts_with("x.toml:2: ")
                && error.ends_with("hint: write a text in quotes, such as \"123\""),
            "{error}"
        );
    }

    #[test]
    fn malformed_overrides_are_refused() {
        for item in [
            "steps",
            "steps=5",
            "run.=5",
            "a.b.c=1",
            "run.steps.c=1",
            "data.augment.flop=true",
            "a.b.c.d=1",
            "run.steps=many",
        ] {
            let error = set(&[item]).unwrap_err().to_string();
            assert!(error.contains(&format!("--set {item}")), "{error}");
        }
    }
}
