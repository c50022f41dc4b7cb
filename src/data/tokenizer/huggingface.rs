//! Tokenizers of Hugging Face's `tokenizer.json`, by the crate `tokenizers`.
//!
//! The file is kept with its keys in alphabetical order and without white space, so that two copies of it are equal. It is parsed
//! when a text is first encoded or decoded: most ranks of a job never do that.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::Tokenizer as Parsed;

use crate::error::{Error, Result};
use crate::regular_files;

/// A `tokenizer.json`, and what its neighbours say of the tokens that begin and end a text. Two are equal if the files are.
#[derive(Clone, Serialize, Deserialize)]
#[serde(into = "Stored", from = "Stored")]
pub struct HuggingFace {
    file: Arc<File>,
    /// The text of `tokenizer_config.json`, if one came along.
    config: Option<Arc<str>>,
    begin: Option<u32>,
    end: Option<u32>,
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
}

impl From<Stored> for HuggingFace {
    fn from(stored: Stored) -> Self {
        let Stored { vocabulary, begin, end, config, file } = stored;
        Self { file: File::shared(file, vocabulary), config: config.map(Into::into), begin, end }
    }
}

impl From<HuggingFace> for Stored {
    fn from(of: HuggingFace) -> Self {
        let HuggingFace { file, config, begin, end } = of;
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
        let (vocabulary, bytes) = (file.vocabulary, file.text.len());
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
        let text = regular_files::read(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::input(format!("{} does not exist", path.display())).hint(GIVE),
            _ => Error::io("read", path, e),
        })?;
        serde_json::from_slice(&text)
            .map_err(|e| Error::input(format!("{} is no tokenizer.json: {e}", path.display())).hint(GIVE))
    }

    /// The tokenizer of the content of a `tokenizer.json`.
    ///
    /// # Errors
    /// The crate `tokenizers` does not understand it, or it has no ids.
    pub(crate) fn new(value: &Value) -> Result<Self> {
        let text = value.to_string();
        let parsed =
            parse(&text).map_err(|e| Error::input(format!("not understood as a tokenizer.json: {e}")).hint(GIVE))?;
        let largest = parsed.get_vocab(true).into_values().max();
        let vocabulary = largest.ok_or_else(|| Error::input("the tokenizer has no ids").hint(GIVE))? as usize + 1;
        let file = File::shared(text, vocabulary);
        // Another thread's is the same.
        let _ = file.parsed.set(Ok(parsed));
        Ok(Self { file, config: None, begin: None, end: None })
    }

    /// The same tokenizer with the text of its `tokenizer_config.json`, and with tokens that begin and end a text.
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

    fn parsed(&self) -> Result<&Parsed> {
        let parsed = self.file.parsed.get_or_init(|| parse(&self.file.text));
        parsed.as_ref().map_err(|e| Error::input(format!("the tokenizer.json that was kept is not understood: {e}")))
    }

    /// The ids of a text, which is a whole: no token is added before or behind it. Texts of special tokens become those.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.parsed()?.encode_fast(text, false).map_err(|e| refused(&e))?;
        let ids = encoding.get_ids().to_vec();
        self.check(ids.iter().copied())?;
        Ok(ids)
    }

    /// The ids of a text to continue, as `transformers` encodes it: behind the token that begins a text, if the file's
    /// post-processor or `add_bos_token` in `tokenizer_config.json` puts it there.
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
        let encoding = self.parsed()?.encode_fast(text, true).map_err(|e| refused(&e))?;
        Ok(encoding.get_ids().first() == Some(&begin))
    }

    fn config_adds_begin(&self) -> bool {
        let config = self.config().and_then(|config| serde_json::from_str::<Value>(config).ok());
        config.is_some_and(|config| config["add_bos_token"] == true)
    }

    /// As [`HuggingFace::encode`], with the places of the tokens.
    pub(crate) fn placed(&self, text: &str) -> Result<Vec<Placed>> {
        let encoding = self.parsed()?.encode(text, false).map_err(|e| refused(&e))?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let tokens: Vec<Placed> = tokens.map(|(&id, &(start, end))| Placed { id, start, end }).collect();
        self.check(tokens.iter().map(|token| token.id))?;
        Ok(tokens)
    }

    /// Shards and manifests tell the number of ids beside the file.
    fn check(&self, mut ids: impl Iterator<Item = u32>) -> Result<()> {
        match ids.find(|id| *id as usize >= self.file.vocabulary) {
            None => Ok(()),
            Some(id) => {
                Err(Error::input(format!("the tokenizer gives id {id}, but is said to have {}", self.file.vocabulary))
                    .hint("import the data again, with its tokenizer.json"))
            }
        }
    }

    /// The text of `ids`, special tokens included; U+FFFD where there is none.
    pub(super) fn decode(&self, ids: &[u32]) -> String {
        let replaced = || char::REPLACEMENT_CHARACTER.to_string().repeat(ids.len());
        self.parsed().ok().and_then(|parsed| parsed.decode(ids, false).ok()).unwrap_or_else(replaced)
    }

    /// The id of a token by its text, as the vocabulary spells it.
    pub(super) fn token(&self, text: &str) -> Option<u32> {
        self.parsed().ok()?.token_to_id(text)
    }

    /// The spelling of a token.
    pub(super) fn spelling(&self, id: u32) -> Option<String> {
        self.parsed().ok()?.id_to_token(id)
    }
}

const GIVE: &str = "give the tokenizer.json of a model, as Hugging Face's libraries write it";

fn refused(e: &tokenizers::Error) -> Error {
    Error::input(format!("the tokenizer refuses the text: {e}"))
}

/// The file's own limits of lengths are those of a model's inputs, not of texts to learn from.
fn parse(text: &str) -> Result<Parsed, String> {
    let mut parsed = Parsed::from_bytes(text).map_err(|e| e.to_string())?;
    parsed.with_truncation(None).map_err(|e| e.to_string())?;
    parsed.with_padding(None);
    Ok(parsed)
}
