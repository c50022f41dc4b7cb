//! Tokenizers of Hugging Face's `tokenizer.json`, by the crate `tokenizers`.
//!
//! The file is kept with its keys in alphabetical order and without white space, so that two copies
//! of it are equal. It is parsed when a text is first encoded or decoded: most ranks of a job never
//! do that.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{Encoding, Tokenizer as Parsed};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::time_limit::within;
use hpctrain_base::{panics, safe_open};

/// A `tokenizer.json`, and what its neighbours say of the tokens that begin and end a text. Two are
/// equal if the files are.
#[derive(Clone, Serialize, Deserialize)]
#[serde(into = "Stored", from = "Stored")]
pub struct HuggingFace {
    file: Arc<File>,
    /// The text of `tokenizer_config.json`, if one came along.
    config: Option<Arc<str>>,
    begin: Option<u32>,
    end: Option<u32>,
    /// The path that it was read from; none of one that was kept in shards or a manifest.
    path: Option<Arc<Path>>,
}

/// The form in shards and manifests.
#[derive(Serialize, Deserialize)]
struct Stored {
    vocabulary: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    begin: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    end: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    config: Option<String>,
    file: String,
}

/// A `tokenizer.json`.
struct File {
    text: String,
    /// The largest id and one more.
    vocabulary: usize,
    /// Parsed on first use; else the reason why that failed.
    parsed: OnceLock<Result<Parsed, String>>,
}

/// The way in which a text is encoded.
#[derive(Debug, Clone, Copy)]
enum How {
    /// Ids alone.
    Plain,
    /// Ids alone, with those that the post-processor adds.
    Processed,
    /// Ids and their places.
    Placed,
}

/// Files in use: the shards of a data set mostly have the same one, which is kept once.
static FILES: Mutex<Vec<Weak<File>>> = Mutex::new(Vec::new());

impl File {
    fn shared(text: String, vocabulary: usize) -> Arc<Self> {
        let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|file| file.strong_count() > 0);
        let same = |file: &Arc<Self>| file.vocabulary == vocabulary && file.text == text;
        if let Some(file) = files.iter().filter_map(Weak::upgrade).find(same) {
            return file;
        }
        let file = Arc::new(Self { text, vocabulary, parsed: OnceLock::new() });
        files.push(Arc::downgrade(&file));
        file
    }

    fn parsed(&self) -> Result<&Parsed, String> {
        let parsed = self.parsed.get_or_init(|| parse(&self.text));
        parsed
            .as_ref()
            .map_err(|e| format!("the tokenizer.json that was kept is not understood: {e}"))
    }

    /// Encodes a text without the places of its tokens, or with them.
    fn encode(&self, text: &str, how: How) -> Result<Encoding, String> {
        let parsed = self.parsed()?;
        let encoding = match how {
            How::Plain => parsed.encode_fast(text, false),
            How::Processed => parsed.encode_fast(text, true),
            How::Placed => parsed.encode(text, false),
        };
        encoding.map_err(|e| format!("the tokenizer refuses the text: {e}"))
    }
}

impl From<Stored> for HuggingFace {
    fn from(stored: Stored) -> Self {
        let Stored { vocabulary, begin, end, config, file } = stored;
        Self {
            file: File::shared(file, vocabulary),
            config: config.map(Into::into),
            begin,
            end,
            path: None,
        }
    }
}

impl From<HuggingFace> for Stored {
    fn from(of: HuggingFace) -> Self {
        let HuggingFace { file, config, begin, end, .. } = of;
        let config = config.map(|config| config.to_string());
        Self { vocabulary: file.vocabulary, begin, end, config, file: file.text.clone() }
    }
}

impl PartialEq for HuggingFace {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.file, &other.file) || self.file.text == other.file.text
    }
}

impl Eq for HuggingFace {}

impl fmt::Debug for HuggingFace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, begin, end, .. } = self;
        let vocabulary = file.vocabulary;
        let bytes = file.text.len();
        f.debug_struct("HuggingFace")
            .field("vocabulary", &vocabulary)
            .field("bytes", &bytes)
            .field("begin", begin)
            .field("end", end)
            .finish()
    }
}

/// A token of a text with its place, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub id: u32,
    pub start: usize,
    pub end: usize,
}

impl HuggingFace {
    /// The JSON value of the file at `path`.
    ///
    /// # Errors
    /// It cannot be read, or is no JSON.
    pub(super) fn value(path: &Path) -> Result<Value> {
        let text = safe_open::read(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::input(format!("{} does not exist", path.display())).hint(GIVE)
            }
            _ => Error::io("read", path, e),
        })?;
        serde_json::from_slice(&text).map_err(|e| {
            Error::input(format!("{} is no tokenizer.json: {e}", path.display())).hint(GIVE)
        })
    }

    /// The tokenizer of the content of a `tokenizer.json`.
    ///
    /// # Errors
    /// The crate `tokenizers` does not understand it, or it has no ids.
    pub(crate) fn new(value: &Value) -> Result<Self> {
        let text = value.to_string();
        let parsed = parse(&text).map_err(|e| {
            Error::input(format!("not understood as a tokenizer.json: {e}")).hint(GIVE)
        })?;
        let largest = parsed.get_vocab(true).into_values().max();
        let vocabulary =
            largest.ok_or_else(|| Error::input("the tokenizer has no ids").hint(GIVE))? as usize
                + 1;
        let file = File::shared(text, vocabulary);
        // Another thread's is the same.
        let _ = file.parsed.set(Ok(parsed));
        Ok(Self { file, config: None, begin: None, end: None, path: None })
    }

    /// The same tokenizer with the path that it was read from, which errors name.
    pub(super) fn read_from(self, path: PathBuf) -> Self {
        Self { path: Some(path.into()), ..self }
    }

    /// The same tokenizer with the text of its `tokenizer_config.json`, and with tokens that begin
    /// and end a text.
    pub(super) fn with(self, config: Option<String>, begin: Option<u32>, end: Option<u32>) -> Self {
        Self { config: config.map(Into::into), begin, end, ..self }
    }

    /// The same tokenizer, with a token that ends a text.
    pub(super) fn ended(self, end: u32) -> Self {
        Self { end: Some(end), ..self }
    }

    /// The largest id and one more.
    pub(super) fn vocabulary(&self) -> usize {
        self.file.vocabulary
    }

    /// The text of the file.
    pub(super) fn text(&self) -> &str {
        &self.file.text
    }

    /// The text of its `tokenizer_config.json`, if one came along.
    pub(super) fn config(&self) -> Option<&str> {
        self.config.as_deref()
    }

    /// Tokens that begin and end a text, where they are known.
    pub(super) fn ends(&self) -> [Option<u32>; 2] {
        [self.begin, self.end]
    }

    /// Encodes a text in at most `seconds`.
    ///
    /// Expressions of a file are unknown. Oniguruma gives up one that backtracks more than ten
    /// million times from one place, by a panic of its crate. It does not count the characters that
    /// an expression reads again and again in between, so only time limits those.
    fn encoded(&self, text: &str, how: How, seconds: u64) -> Result<Encoding> {
        let file = self.file.clone();
        let copy = text.to_owned();
        match within(seconds, move || panics::caught(|| file.encode(&copy, how)))? {
            Some(Ok(encoding)) => encoding.map_err(Error::input),
            Some(Err(panic)) => Err(self.failed(&format!("fails: {panic}"))),
            None => Err(self.failed(&format!(
                "has not encoded {} bytes of text within {seconds} s",
                text.len()
            ))),
        }
    }

    /// The error of a text that the tokenizer does not encode.
    fn failed(&self, how: &str) -> Error {
        let name = self
            .path
            .as_deref()
            .map_or("the tokenizer.json that was kept".into(), Path::to_string_lossy);
        Error::input(format!("{name} {how}")).hint(
            "an expression of its pre_tokenizer or normalizer probably backtracks too much on this text: simplify it, take the text \
             out, or give another tokenizer",
        )
    }

    /// The ids of a text, which is a whole: no token is added before or behind it. Texts of special
    /// tokens become those.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.encoded(text, How::Plain, TIMEOUT)?;
        let ids = encoding.get_ids().to_vec();
        self.check(ids.iter().copied())?;
        Ok(ids)
    }

    /// The ids of a text to continue, as `transformers` encodes it: behind the token that begins a
    /// text, if the file's post-processor or `add_bos_token` in `tokenizer_config.json` puts it
    /// there.
    pub(super) fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?;
        if let Some(begin) = self.begin.filter(|begin| ids.first() != Some(begin))
            && (self.is_processed_to_begin_with(begin, text)? || self.config_adds_begin())
        {
            ids.insert(0, begin);
        }
        Ok(ids)
    }

    fn is_processed_to_begin_with(&self, begin: u32, text: &str) -> Result<bool> {
        let encoding = self.encoded(text, How::Processed, TIMEOUT)?;
        Ok(encoding.get_ids().first() == Some(&begin))
    }

    fn config_adds_begin(&self) -> bool {
        let config = self.config().and_then(|config| serde_json::from_str::<Value>(config).ok());
        config.is_some_and(|config| config["add_bos_token"] == true)
    }

    /// As [`HuggingFace::encode`], with the places of the tokens.
    pub(crate) fn placed(&self, text: &str) -> Result<Vec<Placed>> {
        let encoding = self.encoded(text, How::Placed, TIMEOUT)?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let tokens: Vec<Placed> =
            tokens.map(|(&id, &(start, end))| Placed { id, start, end }).collect();
        self.check(tokens.iter().map(|token| token.id))?;
        Ok(tokens)
    }

    /// Shards and manifests tell the number of ids beside the file.
    fn check(&self, mut ids: impl Iterator<Item = u32>) -> Result<()> {
        match ids.find(|id| *id as usize >= self.file.vocabulary) {
            None => Ok(()),
            Some(id) => Err(Error::input(format!(
                "the tokenizer gives id {id}, but is said to have {}",
                self.file.vocabulary
            ))
            .hint("import the data again, with its tokenizer.json")),
        }
    }

    /// The text of `ids`, special tokens included; U+FFFD where there is none.
    pub(super) fn decode(&self, ids: &[u32]) -> String {
        let replaced = || char::REPLACEMENT_CHARACTER.to_string().repeat(ids.len());
        let decode = || self.file.parsed().ok()?.decode(ids, false).ok();
        panics::caught(decode).ok().flatten().unwrap_or_else(replaced)
    }

    /// The id of a token by its text, as the vocabulary spells it.
    pub(super) fn token(&self, text: &str) -> Option<u32> {
        self.file.parsed().ok()?.token_to_id(text)
    }

    /// The spelling of a token.
    pub(super) fn spelling(&self, id: u32) -> Option<String> {
        self.file.parsed().ok()?.id_to_token(id)
    }
}

/// Seconds that a text may take: windows of an import take less than one.
const TIMEOUT: u64 = 60;

const GIVE: &str = "give the tokenizer.json of a model, as Hugging Face's libraries write it";

/// The file's own limits of lengths are those of a model's inputs, not of texts to learn from.
fn parse(text: &str) -> Result<Parsed, String> {
    let mut parsed = panics::caught(|| Parsed::from_bytes(text))?.map_err(|e| e.to_string())?;
    parsed.with_truncation(None).map_err(|e| e.to_string())?;
    parsed.with_padding(None);
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_takes_too_long_is_refused() {
        let value = super::super::to_hf::written(&super::super::Tokenizer::Byte).unwrap().unwrap();
        let tokenizer = HuggingFace::new(&value).unwrap();
        assert_eq!(tokenizer.encoded("ab", How::Plain, TIMEOUT).unwrap().len(), 2);
        let error = tokenizer.encoded("ab", How::Plain, 0).unwrap_err().to_string();
        assert!(
            error.starts_with("the tokenizer.json that was kept has not encoded 2 bytes of text within 0 s\nhint: "),
            "{error}"
        );
        let error = tokenizer
            .read_from("a/tokenizer.json".into())
            .encoded("ab", How::Placed, 0)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("a/tokenizer.json has not encoded 2 bytes"), "{error}");
    }
}
