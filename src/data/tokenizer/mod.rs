//! Conversion of text to token ids and back.

mod huggingface;
mod to_hf;

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use hpctrain_base::error::{Error, Result};

pub use huggingface::HuggingFace;
pub(super) use huggingface::Placed;

/// The text of GPT-2's last token, which separates texts.
const END_OF_TEXT: &str = "<|endoftext|>";

/// The number of ids of GPT-2.
const GPT2_IDS: usize = 50257;

/// The tokenizers as users name them, without a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerKind {
    /// One id for each distinct character of the text.
    Char,
    /// One id for each of the 256 bytes.
    Byte,
    /// The byte-pair encoding of GPT-2, 50257 ids.
    Gpt2,
    /// The tokenizer of a Hugging Face `tokenizer.json`.
    File(PathBuf),
}

impl FromStr for TokenizerKind {
    type Err = String;

    /// Parses `char`, `byte`, `gpt2`, or a path: a text with a slash, or one that ends with
    /// `.json`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "char" => Ok(Self::Char),
            "byte" => Ok(Self::Byte),
            "gpt2" => Ok(Self::Gpt2),
            path if path.contains('/') || path.ends_with(".json") => Ok(Self::File(path.into())),
            _ => Err("char, byte, gpt2, or the path of a tokenizer.json".into()),
        }
    }
}

/// A tokenizer with its vocabulary, stored as JSON in each shard that it encoded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Tokenizer {
    /// One id for each character, which is its index in `chars`.
    Char {
        /// The characters, sorted and distinct.
        chars: Vec<char>,
    },
    /// One id for each byte, which is its value.
    Byte,
    /// The byte-pair encoding of GPT-2.
    Gpt2,
    /// The tokenizer of a Hugging Face `tokenizer.json`.
    HuggingFace(HuggingFace),
}

impl Tokenizer {
    /// Creates the tokenizer of this kind whose vocabulary covers `text`.
    ///
    /// # Errors
    /// Returns an error if `kind` is a file and [`Tokenizer::read`] does.
    pub fn for_text(kind: &TokenizerKind, text: &str) -> Result<Self> {
        Ok(match kind {
            TokenizerKind::Char => {
                let chars: BTreeSet<char> = text.chars().collect();
                Self::Char { chars: chars.into_iter().collect() }
            }
            TokenizerKind::Byte => Self::Byte,
            TokenizerKind::Gpt2 => Self::Gpt2,
            TokenizerKind::File(path) => Self::read(path)?,
        })
    }

    /// Reads the tokenizer of the `tokenizer.json` at `path`. If [`Tokenizer::file`] wrote it, this
    /// is one of this crate's own tokenizers.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or is not a `tokenizer.json`.
    pub fn read(path: &Path) -> Result<Self> {
        let value = HuggingFace::value(path)?;
        match to_hf::recognised(&value) {
            Some(own) => Ok(own),
            None => {
                let file = HuggingFace::new(&value).map_err(|e| e.at(path.display()))?;
                Ok(Self::HuggingFace(file.read_from(path.to_owned())))
            }
        }
    }

    /// Returns the tokenizer with the text of its `tokenizer_config.json`, and with tokens that
    /// begin and end a text. This crate's own tokenizers ignore both.
    pub fn with(self, config: Option<String>, begin: Option<u32>, end: Option<u32>) -> Self {
        match self {
            Self::HuggingFace(file) => Self::HuggingFace(file.with(config, begin, end)),
            own => own,
        }
    }

    /// Returns the tokenizer with a token that ends a text, which only a [`HuggingFace`] one keeps.
    pub(super) fn ended(self, end: Option<u32>) -> Self {
        match (self, end) {
            (Self::HuggingFace(file), Some(end)) => Self::HuggingFace(file.ended(end)),
            (other, _) => other,
        }
    }

    /// Returns the content of its `tokenizer.json`.
    ///
    /// # Errors
    /// Returns an internal error if the tokenizer cannot be serialised.
    pub fn file(&self) -> Result<String> {
        let text = |value: &Value| {
            serde_json::to_string_pretty(value).map_err(|e| Error::internal(e.to_string()))
        };
        match (self, to_hf::written(self)?) {
            (Self::HuggingFace(file), _) => {
                let value: Value = serde_json::from_str(file.text())
                    .map_err(|e| Error::internal(e.to_string()))?;
                text(&value)
            }
            (_, Some(value)) => text(&value),
            (_, None) => Err(Error::internal("a tokenizer without a form in files")),
        }
    }

    /// Returns the content of its `tokenizer_config.json`, for a model of `context` positions.
    ///
    /// # Errors
    /// Returns an internal error if the content cannot be serialised.
    pub fn settings(&self, context: usize) -> Result<String> {
        if let Self::HuggingFace(file) = self
            && let Some(config) = file.config()
        {
            return Ok(config.to_owned());
        }
        let mut settings = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            // Spaces before punctuation are part of the text.
            "clean_up_tokenization_spaces": false,
        });
        for (key, id) in ["bos_token", "eos_token"].into_iter().zip(self.ends()) {
            if let Some(token) = id.and_then(|id| self.spelling(id)) {
                settings[key] = token.into();
            }
        }
        serde_json::to_string_pretty(&settings).map_err(|e| Error::internal(e.to_string()))
    }

    /// Returns the ids of a text to continue: like [`Tokenizer::encode`], but after the token that
    /// begins a text if the tokenizer of an imported model adds one.
    ///
    /// # Errors
    /// Returns an error if [`Tokenizer::encode`] does.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::HuggingFace(file) => file.prompt(text),
            other => other.encode(text),
        }
    }

    /// Returns the tokens that begin and end a text, if there are any.
    pub fn ends(&self) -> [Option<u32>; 2] {
        match self {
            Self::Char { .. } | Self::Byte => [None, None],
            Self::Gpt2 => [Some(GPT2_IDS as u32 - 1); 2],
            Self::HuggingFace(file) => file.ends(),
        }
    }

    fn spelling(&self, id: u32) -> Option<String> {
        match self {
            Self::HuggingFace(file) => file.spelling(id),
            other => Some(other.decode(&[id])),
        }
    }

    /// Returns the only token of `text`: the token of the vocabulary with this spelling, or the one
    /// that the text is encoded to.
    ///
    /// # Errors
    /// Returns an error if there is no such token, or if there are several.
    pub fn token(&self, text: &str) -> Result<u32> {
        let named = match self {
            Self::Char { .. } | Self::Byte => None,
            Self::Gpt2 => (text == END_OF_TEXT).then_some(GPT2_IDS as u32 - 1),
            Self::HuggingFace(file) => file.token(text),
        };
        let ids = named.map_or_else(|| self.encode(text), |id| Ok(vec![id]));
        match ids.as_deref() {
            Ok([id]) => Ok(*id),
            Ok(ids) => Err(Error::input(format!(
                "{text:?} is {} tokens of the tokenizer {}",
                ids.len(),
                self.name()
            ))
            .hint("give the text of one token")),
            Err(e) => Err(Error::input(format!(
                "{text:?} is not a token of the tokenizer {}: {}",
                self.name(),
                e.message()
            ))
            .hint("give the text of one token")),
        }
    }

    /// Parses the output of [`to_json`](Self::to_json).
    pub(super) fn from_json(json: &str) -> Result<Self> {
        let tokenizer: Self = serde_json::from_str(json)
            .map_err(|e| Error::input(format!("tokenizer cannot be parsed: {e}")))?;
        if let Self::Char { chars } = &tokenizer
            && !chars.is_sorted_by(|a, b| a < b)
        {
            return Err(Error::input("tokenizer's characters are not sorted and distinct"));
        }
        Ok(tokenizer)
    }

    /// Returns the form in which shards store the tokenizer.
    pub(super) fn to_json(&self) -> Result<String> {
        serde_json::to_string(self)
            .map_err(|e| Error::internal(format!("tokenizer does not serialise: {e}")))
    }

    /// Returns the ids of `text`. For [`HuggingFace`] tokenizers these are the ids of the crate
    /// `tokenizers`, without tokens before and after the text.
    ///
    /// # Errors
    /// Returns an error if `text` has a character that the vocabulary lacks, or if the tokenizer
    /// fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_from(text, 0)
    }

    /// Encodes a piece of a text like [`Tokenizer::encode`]; its first byte has the position
    /// `place`.
    pub(super) fn encode_from(&self, text: &str, place: usize) -> Result<Vec<u32>> {
        match self {
            Self::Char { chars } => {
                let ids = text.char_indices().map(|(at, c)| match chars.binary_search(&c) {
                    Ok(id) => Ok(id as u32),
                    Err(_) => Err(unknown_character(c, place + at, chars.len())),
                });
                ids.collect()
            }
            Self::Byte => Ok(text.bytes().map(u32::from).collect()),
            // No special token is allowed; unlike `encode_ordinary` this cannot panic.
            Self::Gpt2 => {
                match tiktoken_rs::r50k_base_singleton().encode(text, &HashSet::new()) {
                    Ok((ids, _)) => Ok(ids),
                    Err(e) => Err(Error::input(format!(
                        "the text is too hard for GPT-2's tokenizer: {e}"
                    ))
                    .hint("break up long runs of white space, or use the tokenizer char or byte")),
                }
            }
            Self::HuggingFace(file) => file.encode(text),
        }
    }

    /// Returns the text of `ids`; ids outside the vocabulary and broken UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let replacement = char::REPLACEMENT_CHARACTER;
        match self {
            Self::Char { chars } => ids
                .iter()
                .map(|&id| chars.get(id as usize).copied().unwrap_or(replacement))
                .collect(),
            Self::Byte => decode_bytes(ids, |id| u8::try_from(id).ok().map(|byte| vec![byte])),
            Self::Gpt2 => {
                decode_bytes(ids, |id| tiktoken_rs::r50k_base_singleton().decode_bytes(&[id]).ok())
            }
            Self::HuggingFace(file) => file.decode(ids),
        }
    }

    /// Returns the text that `ids` add to that of the ids `before` them: a tokenizer may drop the
    /// space before the first word of a text.
    pub fn decode_after(&self, before: &[u32], ids: &[u32]) -> String {
        let Self::HuggingFace(file) = self else { return self.decode(ids) };
        let whole = file.decode(&[before, ids].concat());
        whole.strip_prefix(&file.decode(before)).map_or_else(|| file.decode(ids), str::to_owned)
    }

    /// Returns the size of the vocabulary: the largest id plus 1.
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Char { chars } => chars.len(),
            Self::Byte => 256,
            Self::Gpt2 => GPT2_IDS,
            Self::HuggingFace(file) => file.vocabulary(),
        }
    }

    /// Returns the name by which users choose the tokenizer.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Char { .. } => "char",
            Self::Byte => "byte",
            Self::Gpt2 => "gpt2",
            Self::HuggingFace(_) => "huggingface",
        }
    }
}

fn unknown_character(c: char, at: usize, vocabulary: usize) -> Error {
    Error::input(format!(
        "character {c:?} (U+{:04X}) at byte {at} is not among the {vocabulary} characters of the vocabulary",
        u32::from(c)
    ))
    .hint("use only characters of the text that was imported, or import it with tokenizer byte or gpt2")
}

/// Returns the text of the joined bytes of all ids, since characters may span several ids.
fn decode_bytes(ids: &[u32], bytes_of: impl Fn(u32) -> Option<Vec<u8>>) -> String {
    let mut bytes = Vec::new();
    for &id in ids {
        match bytes_of(id) {
            Some(of_id) => bytes.extend(of_id),
            None => bytes.extend("\u{FFFD}".bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "To be — or not?\n\nnaïve 🦀 <|endoftext|>";

    #[test]
    fn all_kinds_give_the_text_back() {
        for kind in [TokenizerKind::Char, TokenizerKind::Byte, TokenizerKind::Gpt2] {
            let tokenizer = Tokenizer::for_text(&kind, TEXT).unwrap();
            let ids = tokenizer.encode(TEXT).unwrap();
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocabulary()), "{kind:?}");
            assert_eq!(tokenizer.decode(&ids), TEXT, "{kind:?}");
            assert_eq!(Tokenizer::from_json(&tokenizer.to_json().unwrap()).unwrap(), tokenizer);
        }
    }

    #[test]
    fn known_ids() {
        assert_eq!(Tokenizer::Gpt2.encode("Hello world").unwrap(), [15496, 995]);
        assert_eq!(Tokenizer::Gpt2.decode(&[50256]), "<|endoftext|>");
        let char = Tokenizer::for_text(&TokenizerKind::Char, "banana").unwrap();
        assert_eq!(char.encode("nab").unwrap(), [2, 0, 1]);
        assert_eq!(char.vocabulary(), 3);
        assert_eq!(Tokenizer::Byte.encode("é").unwrap(), [0xc3, 0xa9]);
    }

    #[test]
    fn unknown_character_is_named_with_its_position() {
        let e = Tokenizer::for_text(&TokenizerKind::Char, "abcé")
            .unwrap()
            .encode("éaX")
            .unwrap_err()
            .to_string();
        assert!(
            e.starts_with("character 'X' (U+0058) at byte 3 is not among the 4 characters"),
            "{e}"
        );
    }

    #[test]
    fn a_run_of_white_space_too_long_for_gpt2_is_an_error() {
        let text = format!("a{}b", " ".repeat(3_000_000));
        let e = Tokenizer::Gpt2.encode(&text).unwrap_err().to_string();
        assert!(e.starts_with("the text is too hard for GPT-2's tokenizer: "), "{e}");
        assert!(e.contains("hint: break up long runs of white space"), "{e}");
    }

    #[test]
    fn decoding_never_fails() {
        assert_eq!(Tokenizer::Byte.decode(&[104, 0xff, 300, 105]), "h\u{FFFD}\u{FFFD}i");
        assert_eq!(Tokenizer::Char { chars: vec!['a'] }.decode(&[0, 1]), "a\u{FFFD}");
        assert_eq!(Tokenizer::Gpt2.decode(&[15496, 60000]), "Hello\u{FFFD}");
    }

    #[test]
    fn unsorted_characters_are_refused() {
        let e = Tokenizer::from_json(r#"{"kind":"char","chars":["b","a"]}"#).unwrap_err();
        assert_eq!(e.to_string(), "tokenizer's characters are not sorted and distinct");
        assert!(
            Tokenizer::from_json(r#"{"kind":"word"}"#).unwrap_err().to_string().contains("word")
        );
    }
}
