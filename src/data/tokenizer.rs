//! Text to token ids and back.

use std::collections::{BTreeSet, HashSet};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The tokenizers by name, before a text has given them their vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TokenizerKind {
    /// One id for each distinct character of the text.
    Char,
    /// One id for each of the 256 bytes.
    Byte,
    /// The byte-pair encoding of GPT-2, 50257 ids.
    Gpt2,
}

/// A tokenizer with its vocabulary; stored as JSON in each shard it wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Tokenizer {
    /// The id of a character is its place in `chars`.
    Char {
        /// Sorted and distinct.
        chars: Vec<char>,
    },
    /// The id of a byte is its value.
    Byte,
    /// The byte-pair encoding of GPT-2.
    Gpt2,
}

impl Tokenizer {
    /// The tokenizer of this kind whose vocabulary covers `text`.
    pub fn for_text(kind: TokenizerKind, text: &str) -> Self {
        match kind {
            TokenizerKind::Char => {
                let chars: BTreeSet<char> = text.chars().collect();
                Self::Char { chars: chars.into_iter().collect() }
            }
            TokenizerKind::Byte => Self::Byte,
            TokenizerKind::Gpt2 => Self::Gpt2,
        }
    }

    /// Reads the output of [`to_json`](Self::to_json).
    pub(super) fn from_json(json: &str) -> Result<Self> {
        let tokenizer: Self =
            serde_json::from_str(json).map_err(|e| Error::input(format!("tokenizer is not understood: {e}")))?;
        if let Self::Char { chars } = &tokenizer
            && !chars.is_sorted_by(|a, b| a < b)
        {
            return Err(Error::input("tokenizer's characters are not sorted and distinct"));
        }
        Ok(tokenizer)
    }

    /// The form in which shards carry it.
    pub(super) fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|e| Error::internal(format!("tokenizer does not serialise: {e}")))
    }

    /// The ids of `text`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Char { chars } => {
                let id = |(at, c): (usize, char)| match chars.binary_search(&c) {
                    Ok(id) => Ok(id as u32),
                    Err(_) => Err(unknown_character(c, at, chars.len())),
                };
                text.char_indices().map(id).collect()
            }
            Self::Byte => Ok(text.bytes().map(u32::from).collect()),
            // No special token is allowed in; unlike `encode_ordinary` this cannot panic.
            Self::Gpt2 => match tiktoken_rs::r50k_base_singleton().encode(text, &HashSet::new()) {
                Ok((ids, _)) => Ok(ids),
                Err(e) => Err(Error::input(format!("the text is too hard for GPT-2's tokenizer: {e}"))
                    .hint("break up long runs of white space, or use the tokenizer char or byte")),
            },
        }
    }

    /// The text of `ids`; ids outside the vocabulary and broken UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let replacement = char::REPLACEMENT_CHARACTER;
        match self {
            Self::Char { chars } => {
                ids.iter().map(|&id| chars.get(id as usize).copied().unwrap_or(replacement)).collect()
            }
            Self::Byte => decode_bytes(ids, |id| u8::try_from(id).ok().map(|byte| vec![byte])),
            Self::Gpt2 => decode_bytes(ids, |id| tiktoken_rs::r50k_base_singleton().decode_bytes(&[id]).ok()),
        }
    }

    /// Size of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Char { chars } => chars.len(),
            Self::Byte => 256,
            Self::Gpt2 => 50257,
        }
    }

    /// The name by which users choose it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Char { .. } => "char",
            Self::Byte => "byte",
            Self::Gpt2 => "gpt2",
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

/// Joins the bytes of all ids before looking for characters, which may span several ids.
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
            let tokenizer = Tokenizer::for_text(kind, TEXT);
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
        let char = Tokenizer::for_text(TokenizerKind::Char, "banana");
        assert_eq!(char.encode("nab").unwrap(), [2, 0, 1]);
        assert_eq!(char.vocabulary(), 3);
        assert_eq!(Tokenizer::Byte.encode("é").unwrap(), [0xc3, 0xa9]);
    }

    #[test]
    fn unknown_character_is_named_with_its_position() {
        let e = Tokenizer::for_text(TokenizerKind::Char, "abcé").encode("éaX").unwrap_err().to_string();
        assert!(e.starts_with("character 'X' (U+0058) at byte 3 is not among the 4 characters"), "{e}");
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
        assert!(Tokenizer::from_json(r#"{"kind":"word"}"#).unwrap_err().to_string().contains("word"));
    }
}
