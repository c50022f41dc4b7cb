//! The JSON schema of the configuration file, for editors: keys, explanations, defaults, and the types
//! of those that have one type.

use serde_json::{Map, Value, json};
use toml::Table;

use super::Config;
use super::keys::{keys, sections};
use super::schema::Key;
use hpctrain_base::error::{Error, Result};

/// Returns the JSON schema of the configuration file (draft 2020-12). Values of keys with several
/// forms, such as a number or `auto`, are left to hpctrain.
///
/// # Errors
/// Returns an error if the defaults cannot be serialized.
pub fn json_schema() -> Result<Value> {
    let defaults = Config::default().to_table()?;
    let mut properties = Map::new();
    for section in sections() {
        let defaults = defaults.get(section.name).and_then(toml::Value::as_table);
        properties.insert(section.name.into(), object(section.name, section, defaults)?);
    }
    Ok(json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpctrain configuration",
        "type": "object",
        "additionalProperties": false,
        "properties": properties,
    }))
}

/// Returns the schema of a section.
fn object(name: &str, section: &Key, defaults: Option<&Table>) -> Result<Value> {
    let mut properties = Map::new();
    for key in keys(name).unwrap_or_default().iter().filter(|key| key.is_in_files()) {
        let default = defaults.and_then(|defaults| defaults.get(key.name));
        let inner = format!("{name}.{}", key.name);
        let schema = match keys(&inner) {
            Some(_) => object(&inner, key, default.and_then(toml::Value::as_table))?,
            None => value(key, default)?,
        };
        properties.insert(key.name.into(), schema);
    }
    Ok(json!({
        "type": "object",
        "description": text(section),
        "additionalProperties": false,
        "properties": properties,
    }))
}

/// Returns the schema of a key that is not a section.
fn value(key: &Key, default: Option<&toml::Value>) -> Result<Value> {
    let mut schema = Map::new();
    schema.insert("description".into(), text(key).into());
    let rust = key.rust_type.replace(' ', "");
    let inner = rust.strip_prefix("Option<").and_then(|rest| rest.strip_suffix('>'));
    let json_type = match inner.unwrap_or(&rust) {
        "u64" | "usize" | "u32" => Some("integer"),
        "f64" | "f32" => Some("number"),
        "bool" => Some("boolean"),
        "String" => Some("string"),
        _ => None,
    };
    if let Some(json_type) = json_type {
        schema.insert("type".into(), json_type.into());
    }
    if json_type == Some("integer") {
        schema.insert("minimum".into(), 0.into());
    }
    if let Some(default) = default {
        let default = serde_json::to_value(default)
            .map_err(|e| Error::internal(format!("the default of {}: {e}", key.name)))?;
        schema.insert("default".into(), default);
    }
    Ok(schema.into())
}

/// Returns the explanation of a key on one line.
fn text(key: &Key) -> String {
    key.text.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PRESETS, Sources, load};

    /// Checks values against the properties and types of a schema.
    fn check(schema: &Value, value: &toml::Value, place: &str) {
        let is_one = |json_type: &str| match json_type {
            "object" => value.is_table(),
            "integer" => value.as_integer().is_some_and(|number| number >= 0),
            "number" => value.is_float() || value.is_integer(),
            "boolean" => value.is_bool(),
            "string" => value.is_str(),
            other => panic!("{place}: {other}"),
        };
        assert!(schema["type"].as_str().is_none_or(is_one), "{place} = {value}");
        if let (Some(properties), Some(table)) =
            (schema["properties"].as_object(), value.as_table())
        {
            for (key, value) in table {
                let schema = properties.get(key).unwrap_or_else(|| panic!("{place}.{key}"));
                check(schema, value, &format!("{place}.{key}"));
            }
        }
    }

    #[test]
    fn all_presets_fit_the_schema() {
        let schema = json_schema().unwrap();
        for (preset, _) in PRESETS {
            let sources = Sources { preset: Some(preset), ..Sources::default() };
            let (config, _) = load(&sources).unwrap();
            check(&schema, &config.to_table().unwrap().into(), preset);
        }
        let lr = &schema["properties"]["optimizer"]["properties"]["lr"];
        assert_eq!((&lr["type"], &lr["default"]), (&"number".into(), &0.001.into()), "{lr}");
        // A number of steps, or auto.
        let every = &schema["properties"]["checkpoint"]["properties"]["every"];
        assert!(every["type"].is_null() && every["description"].is_string(), "{every}");
    }
}
