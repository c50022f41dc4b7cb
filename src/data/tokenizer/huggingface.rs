//! Tokenizers in the format of Hugging Face's `tokenizer.json`, with the crate `tokenizers`.
//!
//! The file is kept with its keys in alphabetical order and without white space, so that two copies
//! of it are equal. It is parsed when a text is first encoded or decoded: most ranks of a job never
//! do that.
//!
//! `tokenizers` is built with Oniguruma, the reference for its regular expressions: with
//! `fancy-regex` an expression that gives up would end a text silently. Its default features are
//! off: they add downloads and progress bars. Its panics become errors, and its time is limited.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{Encoding, Tokenizer as Parsed};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::time_limit::within;
use hpctrain_base::{panics, safe_open};

/// A `tokenizer.json`, and the tokens that begin and end a text according to the files next to it.
/// Two are equal if the files are.
#[derive(Clone, Serialize, Deserialize)]
#[serde(into = "Stored", from = "Stored")]
pub struct HuggingFace {
    file: Arc<File>,
    /// The text of `tokenizer_config.json`, if there is one.
    config: Option<Arc<str>>,
    begin: Option<u32>,
    end: Option<u32>,
    /// The path that it was read from; `None` if it was stored in shards or a manifest.
    path: Option<Arc<Path>>,
}

/// The form in which shards and manifests store a tokenizer.
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
    /// The largest id plus 1.
    vocabulary: usize,
    /// The parsed file, or the error of parsing it; set on first use.
    parsed: OnceLock<Result<Parsed, String>>,
}

/// How a text is encoded.
#[derive(Debug, Clone, Copy)]
enum How {
    /// Ids only.
    Plain,
    /// Ids, including those that the post-processor adds.
    Processed,
    /// Ids and their positions.
    Placed,
}

/// The files in use: the shards of a data set usually have the same one, which is stored once.
static FILES: Mutex<Vec<Weak<File>>> = Mutex::new(Vec::new());

impl File {
    fn shared(text: String, vocabulary: usize) -> Arc<Self> {
        let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|file| file.strong_count() > 0);
        let mut in_use = files.iter().filter_map(Weak::upgrade);
        let same = in_use.find(|file| file.vocabulary == vocabulary && file.text == text);
        if let Some(file) = same {
            return file;
        }
        let file = Arc::new(Self { text, vocabulary, parsed: OnceLock::new() });
        files.push(Arc::downgrade(&file));
        file
    }

    fn parsed(&self) -> Result<&Parsed, String> {
        let parsed = self.parsed.get_or_init(|| parse(&self.text));
        parsed.as_ref().map_err(|e| format!("the stored tokenizer.json cannot be parsed: {e}"))
    }

    /// Encodes a text as `how` specifies.
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

/// A token of a text with its position in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub id: u32,
    pub start: usize,
    pub end: usize,
}

impl HuggingFace {
    /// Reads the JSON value of the file at `path`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or is not JSON.
    pub(super) fn value(path: &Path) -> Result<Value> {
        let text = safe_open::read(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::input(format!("{} does not exist", path.display())).hint(GIVE)
            }
            _ => Error::io("read", path, e),
        })?;
        serde_json::from_slice(&text).map_err(|e| {
            Error::input(format!("{} is not a valid tokenizer.json: {e}", path.display()))
                .hint(GIVE)
        })
    }

    /// Creates a tokenizer from the content of a `tokenizer.json`.
    ///
    /// # Errors
    /// Returns an error if the crate `tokenizers` cannot parse it, or if it has no ids.
    pub(crate) fn new(value: &Value) -> Result<Self> {
        let text = value.to_string();
        let parsed = parse(&text).map_err(|e| {
            Error::input(format!("cannot be parsed as a tokenizer.json: {e}")).hint(GIVE)
        })?;
        let largest = parsed.get_vocab(true).into_values().max();
        let vocabulary =
            largest.ok_or_else(|| Error::input("the tokenizer has no ids").hint(GIVE))? as usize
                + 1;
        let file = File::shared(text, vocabulary);
        // If another thread has set it, the value is the same.
        let _ = file.parsed.set(Ok(parsed));
        Ok(Self { file, config: None, begin: None, end: None, path: None })
    }

    /// Returns the tokenizer with the path that it was read from, which errors name.
    pub(super) fn read_from(self, path: PathBuf) -> Self {
        Self { path: Some(path.into()), ..self }
    }

    /// Returns the tokenizer with the text of its `tokenizer_config.json`, and with tokens that
    /// begin and end a text.
    pub(super) fn with(self, config: Option<String>, begin: Option<u32>, end: Option<u32>) -> Self {
        Self { config: config.map(Into::into), begin, end, ..self }
    }

    /// Returns the tokenizer with a token that ends a text.
    pub(super) fn ended(self, end: u32) -> Self {
        Self { end: Some(end), ..self }
    }

    /// Returns the largest id plus 1.
    pub(super) fn vocabulary(&self) -> usize {
        self.file.vocabulary
    }

    /// Returns the text of the file.
    pub(super) fn text(&self) -> &str {
        &self.file.text
    }

    /// Returns the text of its `tokenizer_config.json`, if there is one.
    pub(super) fn config(&self) -> Option<&str> {
        self.config.as_deref()
    }

    /// Returns the tokens that begin and end a text, if they are known.
    pub(super) fn ends(&self) -> [Option<u32>; 2] {
        [self.begin, self.end]
    }

    /// Encodes a text in at most `seconds`.
    ///
    /// The regular expressions of a file may be anything. Oniguruma gives up one that backtracks
    /// more than ten million times from one position, by a panic of its crate. It does not count
    /// the characters that an expression reads repeatedly in between, so only the time limit stops
    /// those.
    fn encoded(&self, text: &str, how: How, seconds: u64) -> Result<Encoding> {
        let file = self.file.clone();
        let copy = text.to_owned();
        match within(seconds, move || panics::catch_panic(|| file.encode(&copy, how)))? {
            Some(Ok(encoding)) => encoding.map_err(Error::input),
            Some(Err(panic)) => Err(self.failed(&format!("fails: {panic}"))),
            None => Err(self.failed(&format!(
                "has not encoded {} bytes of text within {seconds} s",
                text.len()
            ))),
        }
    }

    /// Returns the error of a text that the tokenizer does not encode.
    fn failed(&self, how: &str) -> Error {
        let name =
            self.path.as_deref().map_or("the stored tokenizer.json".into(), Path::to_string_lossy);
        Error::input(format!("{name} {how}")).hint(
            "an expression of its pre_tokenizer or normalizer probably backtracks too much on this text: simplify it, remove the text, \
             or give another tokenizer",
        )
    }

    /// Returns the ids of a complete text, without adding tokens before or after it. Texts of
    /// special tokens become those.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.encoded(text, How::Plain, TIMEOUT)?;
        let ids = encoding.get_ids().to_vec();
        self.check(ids.iter().copied())?;
        Ok(ids)
    }

    /// Returns the ids of a text to continue, as `transformers` encodes it: after the token that
    /// begins a text, if the file's post-processor or `add_bos_token` in `tokenizer_config.json`
    /// adds one.
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

    /// Encodes a text like [`HuggingFace::encode`], with the positions of the tokens.
    pub(crate) fn placed(&self, text: &str) -> Result<Vec<Placed>> {
        let encoding = self.encoded(text, How::Placed, TIMEOUT)?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let tokens: Vec<Placed> =
            tokens.map(|(&id, &(start, end))| Placed { id, start, end }).collect();
        self.check(tokens.iter().map(|token| token.id))?;
        Ok(tokens)
    }

    /// Returns an error if an id is not below the number of ids that shards and manifests record.
    fn check(&self, mut ids: impl Iterator<Item = u32>) -> Result<()> {
        match ids.find(|id| *id as usize >= self.file.vocabulary) {
            None => Ok(()),
            Some(id) => Err(Error::input(format!(
                "the tokenizer gives id {id}, but is recorded to have {} ids",
                self.file.vocabulary
            ))
            .hint("import the data again, with its tokenizer.json")),
        }
    }

    /// Returns the text of `ids`, special tokens included; U+FFFD if there is none.
    pub(super) fn decode(&self, ids: &[u32]) -> String {
        let decoded = panics::catch_panic(|| self.file.parsed().ok()?.decode(ids, false).ok());
        decoded
            .ok()
            .flatten()
            .unwrap_or_else(|| char::REPLACEMENT_CHARACTER.to_string().repeat(ids.len()))
    }

    /// Returns the id of a token by its text, as the vocabulary spells it.
    pub(super) fn token(&self, text: &str) -> Option<u32> {
        self.file.parsed().ok()?.token_to_id(text)
    }

    /// Returns the spelling of a token.
    pub(super) fn spelling(&self, id: u32) -> Option<String> {
        self.file.parsed().ok()?.id_to_token(id)
    }
}

/// The seconds that encoding a text may take: windows of an import take less than one.
const TIMEOUT: u64 = 60;

const GIVE: &str = "give the tokenizer.json of a model, as Hugging Face's libraries write it";

/// Parses a file, and disables its limits of lengths, which are those of a model's inputs rather
/// than of texts to train on.
fn parse(text: &str) -> Result<Parsed, String> {
    let mut parsed =
        panics::catch_panic(|| Parsed::from_bytes(text))?.map_err(|e| e.to_string())?;
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
            error.starts_with(
                "the stored tokenizer.json has not encoded 2 bytes of text within 0 s\nhint: "
            ),
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
