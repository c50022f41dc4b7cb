//! Conversion of this crate's tokenizers to a `tokenizer.json` that Hugging Face's libraries read.
//!
//! All three become byte-pair encodings: of characters or bytes, without merges; or GPT-2's.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{END_OF_TEXT, GPT2_IDS, Tokenizer};
use hpctrain_base::error::{Error, Result};

/// Returns the content of the `tokenizer.json` of a tokenizer; `None` if it came from such a file.
///
/// # Errors
/// Returns an internal error if the vocabulary of GPT-2 is not as expected.
pub(super) fn written(tokenizer: &Tokenizer) -> Result<Option<Value>> {
    Ok(match tokenizer {
        Tokenizer::Char { chars } => {
            let vocabulary =
                chars.iter().enumerate().map(|(id, c)| (c.to_string(), id.into())).collect();
            // The whole text is one word.
            Some(file(vocabulary, &[], Value::Null, json!({ "type": "Fuse" }), &[]))
        }
        Tokenizer::Byte => {
            let vocabulary = (0..=u8::MAX).map(|byte| (spelling(&[byte]), byte.into())).collect();
            Some(file(vocabulary, &[], byte_level(false), byte_level(false), &[]))
        }
        Tokenizer::Gpt2 => {
            let (vocabulary, merges) = gpt2()?;
            Some(file(
                vocabulary,
                &merges,
                byte_level(true),
                byte_level(true),
                &[(END_OF_TEXT, GPT2_IDS as u32 - 1)],
            ))
        }
        Tokenizer::HuggingFace(_) => None,
    })
}

/// Returns the tokenizer of this crate that is written as this content, if there is one.
pub(super) fn recognised(value: &Value) -> Option<Tokenizer> {
    let vocabulary = value.get("model")?.get("vocab")?.as_object()?;
    let candidate = match vocabulary.len() {
        GPT2_IDS => Tokenizer::Gpt2,
        256 if vocabulary.contains_key(&spelling(b" ")) && !vocabulary.contains_key(" ") => {
            Tokenizer::Byte
        }
        _ => {
            let mut chars = Vec::with_capacity(vocabulary.len());
            for token in vocabulary.keys() {
                let mut of_token = token.chars();
                let (Some(c), None) = (of_token.next(), of_token.next()) else { return None };
                chars.push(c);
            }
            chars.sort_unstable();
            Tokenizer::Char { chars }
        }
    };
    (written(&candidate).ok()??.eq(value)).then_some(candidate)
}

fn file(
    vocabulary: Map<String, Value>,
    merges: &[String],
    pre_tokenizer: Value,
    decoder: Value,
    special: &[(&str, u32)],
) -> Value {
    let added = special.iter().map(|(content, id)| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges,
        },
    })
}

/// Returns a step that turns bytes into characters, and splits words by GPT-2's pattern if
/// `is_cut`.
fn byte_level(is_cut: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": is_cut })
}

/// Returns GPT-2's spelling of bytes (`bytes_to_unicode` of its `encoder.py`): bytes of printable
/// characters of Latin-1 become those, the others become the characters from U+0100 on.
fn spelling(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| byte_spelling(*byte)).collect()
}

/// Returns GPT-2's spelling of a byte.
fn byte_spelling(byte: u8) -> char {
    let is_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_itself(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !is_itself(*other)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Returns the vocabulary and the merges of GPT-2. Its ids are ranks: a token is the merge of the
/// two parts that remain of it after the merges of lower rank.
fn gpt2() -> Result<(Map<String, Value>, Vec<String>)> {
    let ids = GPT2_IDS as u32 - 1;
    let tokens = (0..ids).map(|id| {
        let bytes = tiktoken_rs::r50k_base_singleton().decode_bytes(&[id]);
        bytes.map_err(|e| Error::internal(format!("GPT-2's vocabulary lacks id {id}: {e}")))
    });
    let tokens = tokens.collect::<Result<Vec<_>>>()?;
    let ranks: HashMap<&[u8], usize> =
        tokens.iter().enumerate().map(|(id, bytes)| (&bytes[..], id)).collect();
    let mut merges = Vec::with_capacity(tokens.len());
    for (id, bytes) in tokens.iter().enumerate().filter(|(_, bytes)| bytes.len() > 1) {
        // The ends of the parts.
        let mut ends: Vec<usize> = (0..=bytes.len()).collect();
        while ends.len() > 3 {
            let possible = (0..ends.len() - 2).filter_map(|at| {
                let rank = *ranks.get(&bytes[ends[at]..ends[at + 2]])?;
                (rank < id).then_some((rank, at))
            });
            let (_, at) = possible.min().ok_or_else(|| {
                Error::internal(format!("GPT-2's token {id} is not a merge of other tokens"))
            })?;
            ends.remove(at + 1);
        }
        merges.push(format!("{} {}", spelling(&bytes[..ends[1]]), spelling(&bytes[ends[1]..])));
    }
    let vocabulary = tokens.iter().enumerate().map(|(id, bytes)| (spelling(bytes), id.into()));
    Ok((vocabulary.chain([(END_OF_TEXT.to_owned(), ids.into())]).collect(), merges))
}

#[cfg(test)]
mod tests {
    use super::super::huggingface::HuggingFace;
    use super::*;

    const TEXT: &str = "First Citizen:\n\nWe'll  see, 3.14 naïve — 🦀\tdon't!\r\n   中文   ";

    #[test]
    fn written_tokenizers_give_the_same_ids_and_text() {
        let chars: std::collections::BTreeSet<char> = TEXT.chars().collect();
        for tokenizer in [
            Tokenizer::Char { chars: chars.into_iter().collect() },
            Tokenizer::Byte,
            Tokenizer::Gpt2,
        ] {
            let value = written(&tokenizer).unwrap().unwrap();
            let theirs = HuggingFace::new(&value).unwrap();
            let ids = tokenizer.encode(TEXT).unwrap();
            assert_eq!(theirs.encode(TEXT).unwrap(), ids, "{}", tokenizer.name());
            assert_eq!(theirs.decode(&ids), TEXT, "{}", tokenizer.name());
            assert_eq!(theirs.vocabulary(), tokenizer.vocabulary(), "{}", tokenizer.name());
            assert_eq!(recognised(&value), Some(tokenizer));
        }
        let mut other = written(&Tokenizer::Byte).unwrap().unwrap();
        other["normalizer"] = json!({ "type": "NFC" });
        assert_eq!(recognised(&other), None);
    }

    #[test]
    fn bytes_are_spelled_as_gpt2_spells_them() {
        assert_eq!(spelling(b"a \n\x00\xad\xff"), "aĠĊĀŃÿ");
    }
}
