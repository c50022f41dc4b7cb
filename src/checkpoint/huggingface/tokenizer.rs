//! The tokenizer of a Hugging Face model: `tokenizer.json`, its settings in
//! `tokenizer_config.json`, and `generation_config.json`.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::CONFIG;
use super::architecture::Tokens;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;
use hpctrain_data::Tokenizer;

/// Name of the tokenizer file.
pub const TOKENIZER: &str = "tokenizer.json";

/// Name of the file with the tokenizer's settings.
pub const SETTINGS: &str = "tokenizer_config.json";

/// Name of the file with the defaults for generation.
pub const GENERATION: &str = "generation_config.json";

/// The content of `generation_config.json`.
#[derive(Serialize)]
pub struct GenerationConfig {
    #[serde(flatten)]
    tokens: Tokens,
    /// The maximal length of prompt and continuation together: the model's learned positions.
    max_length: usize,
}

impl GenerationConfig {
    /// Creates the configuration for a model with `context` positions.
    pub fn new(tokenizer: Option<&Tokenizer>, context: usize) -> Self {
        Self { tokens: Tokens::new(tokenizer), max_length: context }
    }
}

/// Reads the tokenizer of the model in the directory `from`, with its settings. Returns `None` if
/// there is no `tokenizer.json`.
///
/// # Errors
/// Returns an error if a file is malformed or cannot be read.
pub fn tokenizer(from: &Path) -> Result<Option<Tokenizer>> {
    let path = from.join(TOKENIZER);
    if !path.exists() {
        return Ok(None);
    }
    let tokenizer = Tokenizer::read(&path)?;
    let [settings, generation, config] =
        [SETTINGS, GENERATION, CONFIG].map(|name| optional(&from.join(name)));
    let settings = settings?;
    let others = [generation?, config?];
    let named = |key| id_of_token(&tokenizer, &settings.as_ref()?.1, key);
    let begin = named("bos_token").or_else(|| first_id(&others, "bos_token_id"));
    let end = named("eos_token").or_else(|| first_id(&others, "eos_token_id"));
    Ok(Some(tokenizer.with(settings.map(|(text, _)| text), begin, end)))
}

/// Returns the id of the token that the settings name under `key`: by its text, or by an object
/// that contains it.
fn id_of_token(tokenizer: &Tokenizer, settings: &Value, key: &str) -> Option<u32> {
    let token = settings.get(key)?;
    let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
    tokenizer.token(text).ok()
}

/// Returns the first number, or first number of an array, under `key` in these files.
fn first_id(files: &[Option<(String, Value)>], key: &str) -> Option<u32> {
    let ids = files.iter().flatten().filter_map(|(_, value)| value.get(key));
    // Some models have several end-of-text tokens.
    let id = ids
        .map(|id| id.as_array().and_then(|ids| ids.first()).unwrap_or(id))
        .find_map(Value::as_u64);
    id.and_then(|id| u32::try_from(id).ok())
}

/// Reads the text of a file and its JSON value, if the file exists.
fn optional(path: &Path) -> Result<Option<(String, Value)>> {
    if !path.exists() {
        return Ok(None);
    }
    let text = safe_open::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let value = serde_json::from_str(&text);
    let value = value.map_err(|e| {
        Error::input(format!("{}: {e}", path.display()))
            .hint("copy it again, or name a tokenizer with --tokenizer")
    })?;
    Ok(Some((text, value)))
}
