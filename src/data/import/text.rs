//! Import of texts into token shards.

use std::io::Read;
use std::path::PathBuf;

use super::documents::Documents;
use super::ids::{IdSpooler, Ids};
use super::overlap_encode::{Sizes, Windows};
use super::stream::{Imported, Stream, StreamShards};
use super::text_chunks::{Cut, PIECE, Pieces};
use crate::{Tokenizer, TokenizerKind};
use hpctrain_base::error::{Error, Result};

/// The input and options of an import.
#[derive(Debug, Clone)]
pub struct ImportText {
    /// Texts, which may be larger than memory: files, directories, or `-` for the standard input.
    pub inputs: Vec<PathBuf>,
    /// The field with the text of a document, if every line of the inputs is a JSON object;
    /// otherwise every file is a document.
    pub field: Option<String>,
    /// The text of a token that follows each document.
    pub end_of_text: Option<String>,
    /// The tokenizer of the texts.
    pub tokenizer: TokenizerKind,
    /// The validation split, the shards and the destination.
    pub to: StreamShards,
}

impl ImportText {
    /// Creates the options for one file as one document, with one training shard and one for
    /// validation.
    pub fn new(
        input: impl Into<PathBuf>,
        tokenizer: TokenizerKind,
        out: impl Into<PathBuf>,
    ) -> Self {
        Self {
            inputs: vec![input.into()],
            field: None,
            end_of_text: None,
            tokenizer,
            to: StreamShards::new(out),
        }
    }
}

/// Imports the tokens of the texts, one document after the other. Each text is read once, a piece
/// at a time; the ids are kept in a temporary file.
///
/// # Errors
/// Returns an error if a text cannot be read or tokenized, or if a shard cannot be written.
pub fn import_text(import: &ImportText) -> Result<Imported> {
    import.to.check()?;
    let mut documents = Documents::find(&import.inputs)?;
    let mut encoder = Encoder::new(&import.tokenizer)?;
    let end = import.end_of_text.as_deref().map(|text| encoder.token(text)).transpose();
    let end = end.map_err(|e| e.at("--end-of-text"))?;

    let mut spooler = IdSpooler::create(&import.to.out)?;
    let mut ids = Vec::new();
    let mut of_texts = 0;
    documents.each(import.field.as_deref(), |name, from| {
        encoder.document(name, from, &mut |some| {
            of_texts += some.len();
            spooler.push(some)
        })?;
        ids.clear();
        ids.extend(end);
        spooler.push(&ids)
    })?;
    let source = documents.source();
    if of_texts == 0 {
        let empty = Error::input("the text is empty").hint("give a file with some text");
        return Err(if let [input] = &import.inputs[..] {
            empty.at(input.display())
        } else {
            empty
        });
    }
    let spooled = spooler.finish()?;
    let (tokenizer, renumbered) = encoder.finish();
    let tokenizer = tokenizer.ended(end);
    let of = Stream {
        count: spooled.len(),
        tokenizer: Some(&tokenizer),
        vocabulary: tokenizer.vocabulary(),
        source: &source,
        source_sha256: documents.sha256(),
    };
    import.to.write(of, |first, count| renumber(&spooled, &renumbered, first, count))
}

/// Returns ids from `first` on, by their final numbers.
fn renumber(ids: &Ids, renumbered: &[u32], first: usize, count: usize) -> Result<Vec<u32>> {
    let mut found = ids.get(first, count)?;
    if !renumbered.is_empty() {
        // All of them are in the table.
        found.iter_mut().for_each(|id| *id = renumbered[*id as usize]);
    }
    Ok(found)
}

/// Encodes texts to ids.
enum Encoder {
    /// Encodes by the characters of the texts, which are all known at the end.
    Characters(Characters),
    Fixed(Tokenizer),
}

impl Encoder {
    fn new(kind: &TokenizerKind) -> Result<Self> {
        Ok(match kind {
            TokenizerKind::Char => Self::Characters(Characters::new()),
            fixed => Self::Fixed(Tokenizer::for_text(fixed, "")?),
        })
    }

    /// Returns the only token of `text`.
    fn token(&mut self, text: &str) -> Result<u32> {
        match self {
            Self::Fixed(tokenizer) => tokenizer.token(text),
            Self::Characters(characters) => {
                let mut chars = text.chars();
                match (chars.next(), chars.next()) {
                    (Some(c), None) => Ok(characters.id(c)),
                    _ => Err(Error::input(format!(
                        "{text:?} is not one character, as tokens of the tokenizer char are"
                    ))
                    .hint("give a character that no text has, or use another tokenizer")),
                }
            }
        }
    }

    /// Passes the ids of a document to `push`, some at a time.
    fn document(
        &mut self,
        name: &str,
        from: &mut dyn Read,
        push: &mut dyn FnMut(&[u32]) -> Result<()>,
    ) -> Result<()> {
        let cut = match self {
            Self::Fixed(Tokenizer::Byte) => Cut::Bytes,
            Self::Fixed(Tokenizer::Gpt2) => Cut::Words,
            _ => Cut::Characters,
        };
        let in_windows = match self {
            Self::Fixed(Tokenizer::HuggingFace(tokenizer)) => Some(tokenizer.clone()),
            _ => None,
        };
        let mut windows =
            in_windows.as_ref().map(|tokenizer| Windows::new(tokenizer, Sizes::IMPORT));
        let mut pieces = Pieces::new(name, from, cut, PIECE);
        let mut ids = Vec::new();
        while let Some((place, piece)) = pieces.next()? {
            ids.clear();
            match (&mut *self, &mut windows) {
                (_, Some(windows)) => {
                    windows.push(text(piece)?, &mut ids).map_err(|e| e.at(name))?
                }
                (Self::Characters(characters), _) => characters.encode(text(piece)?, &mut ids),
                (Self::Fixed(Tokenizer::Byte), _) => {
                    ids.extend(piece.iter().map(|&byte| u32::from(byte)))
                }
                (Self::Fixed(tokenizer), _) => {
                    ids = tokenizer.encode_from(text(piece)?, place).map_err(|e| e.at(name))?;
                }
            }
            push(&ids)?;
        }
        if let Some(windows) = windows {
            ids.clear();
            windows.finish(&mut ids).map_err(|e| e.at(name))?;
            push(&ids)?;
        }
        Ok(())
    }

    /// Returns the tokenizer, and the final number of each id if that was not known before.
    fn finish(self) -> (Tokenizer, Vec<u32>) {
        match self {
            Self::Fixed(tokenizer) => (tokenizer, vec![]),
            Self::Characters(characters) => characters.finish(),
        }
    }
}

/// Returns a piece as text, which it must be.
fn text(piece: &[u8]) -> Result<&str> {
    str::from_utf8(piece).map_err(|e| Error::internal(format!("a piece of text is none: {e}")))
}

/// Characters, numbered in order of appearance.
pub(super) struct Characters {
    /// The number of each character, by its code point; [`NEW`] if it has none.
    numbers: Vec<u32>,
    seen: Vec<char>,
}

/// Stands for a character without a number.
const NEW: u32 = u32::MAX;

impl Characters {
    pub fn new() -> Self {
        Self { numbers: vec![NEW; char::MAX as usize + 1], seen: Vec::new() }
    }

    /// Returns the number of a character, assigning one if it is new.
    fn id(&mut self, c: char) -> u32 {
        let number = &mut self.numbers[c as usize];
        if *number == NEW {
            *number = self.seen.len() as u32;
            self.seen.push(c);
        }
        *number
    }

    /// Appends the numbers of the characters of a text to `ids`.
    pub fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        let mut rest = text;
        while !rest.is_empty() {
            let ascii = rest.bytes().position(|byte| !byte.is_ascii()).unwrap_or(rest.len());
            let (head, tail) = rest.split_at(ascii);
            let first = ids.len();
            ids.extend(head.bytes().map(|byte| self.numbers[usize::from(byte)]));
            if ids[first..].contains(&NEW) {
                ids.truncate(first);
                ids.extend(head.chars().map(|c| self.id(c)));
            }
            let others = tail.bytes().position(|byte| byte.is_ascii()).unwrap_or(tail.len());
            ids.extend(tail[..others].chars().map(|c| self.id(c)));
            rest = &tail[others..];
        }
    }

    /// Returns the tokenizer, whose characters are sorted, and the id of each number.
    pub fn finish(self) -> (Tokenizer, Vec<u32>) {
        let mut chars = self.seen.clone();
        chars.sort_unstable();
        let ids =
            self.seen.iter().map(|c| chars.partition_point(|other| other < c) as u32).collect();
        (Tokenizer::Char { chars }, ids)
    }
}
