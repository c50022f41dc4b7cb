//! The texts of a table as rows of ids.

use std::path::Path;

use super::options::TextOptions;
use crate::columns::TextColumns;
use crate::import::row_writer::ImportedText;
use crate::import::spool::Elements;
use crate::import::text::Characters;
use crate::import::unknown_values::UnknownValues;
use crate::{TextVectorizer, Tokenizer, TokenizerKind};
use hpctrain_base::error::{Error, Result};

/// Columns of text while their cells are read.
pub(super) struct TextReader {
    /// The indices of the columns.
    pub columns: Vec<usize>,
    length: usize,
    encoder: Encoder,
    /// The unknown characters of each column.
    unknown: Vec<UnknownValues>,
    /// Whether a network may be trained on the texts, which are those of a first table.
    is_first: bool,
    /// The number of texts, of those that were truncated, and of the tokens of the longest one.
    texts: usize,
    truncated: usize,
    longest: usize,
}

enum Encoder {
    /// Encodes by the characters of the texts, which are all known at the end.
    Characters(Characters),
    Known(TextVectorizer),
}

/// The texts of a table whose cells have all been read.
pub(super) struct FinishedText {
    /// The final ids, row after row.
    pub ids: Elements<u32>,
    pub tokenizer: Tokenizer,
    pub columns: TextColumns,
    pub unknown: Vec<UnknownValues>,
    pub summary: ImportedText,
}

impl TextReader {
    /// Creates the reader of the columns with these indices, by the tokenizer of `options`.
    pub fn new(columns: Vec<usize>, options: &TextOptions) -> Result<Self> {
        if columns.is_empty() || options.length == 0 {
            let columns = columns.len();
            let length = options.length;
            return Err(Error::input(format!("{columns} columns of text of {length} ids"))
                .hint("name a column, and give each text 1 id or more"));
        }
        let encoder = match &options.tokenizer {
            TokenizerKind::Char => Encoder::Characters(Characters::new()),
            kind => {
                Encoder::Known(TextVectorizer::new(Tokenizer::for_text(kind, "")?, options.length)?)
            }
        };
        Ok(Self { is_first: true, ..Self::with_encoder(columns, options.length, encoder) })
    }

    /// Creates the reader of columns that are encoded as those of an earlier table.
    pub fn like(columns: Vec<usize>, length: usize, tokenizer: Tokenizer) -> Result<Self> {
        let encoder = Encoder::Known(TextVectorizer::new(tokenizer, length)?);
        Ok(Self::with_encoder(columns, length, encoder))
    }

    fn with_encoder(columns: Vec<usize>, length: usize, encoder: Encoder) -> Self {
        let unknown =
            vec![UnknownValues { is_text: true, ..UnknownValues::default() }; columns.len()];
        Self {
            columns,
            length,
            encoder,
            unknown,
            is_first: false,
            texts: 0,
            truncated: 0,
            longest: 0,
        }
    }

    /// Returns the number of ids of a row.
    pub fn row_len(&self) -> usize {
        self.columns.len() * self.length
    }

    /// Appends the ids of a cell of the `place`-th column to `ids`.
    pub fn encode(&mut self, place: usize, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let tokens = match &mut self.encoder {
            Encoder::Characters(characters) => {
                let end = ids.len() + self.length;
                let kept = text.char_indices().nth(self.length).map_or(text.len(), |(at, _)| at);
                let first = ids.len();
                characters.encode(&text[..kept], ids);
                ids[first..].iter_mut().for_each(|id| *id += TextVectorizer::FIRST);
                ids.resize(end, TextVectorizer::PAD);
                text.chars().count()
            }
            Encoder::Known(vectorizer) => {
                let encoded = vectorizer.encode(text, ids)?;
                if matches!(vectorizer.tokenizer(), Tokenizer::Char { .. }) {
                    let unknown = &mut self.unknown[place];
                    unknown.values += encoded.tokens.min(self.length) as u64;
                    if let Some((first, count)) = encoded.unknown {
                        unknown.add(first.encode_utf8(&mut [0; 4]), count as u64);
                    }
                }
                encoded.tokens
            }
        };
        self.texts += 1;
        self.truncated += usize::from(tokens > self.length);
        self.longest = self.longest.max(tokens);
        Ok(())
    }

    /// Returns the final ids of `ids`, which [`TextReader::encode`] has appended, and the rest of
    /// what is known of the columns with these names.
    pub fn finish(
        self,
        names: Vec<String>,
        ids: Elements<u32>,
        out: &Path,
    ) -> Result<FinishedText> {
        let Self { length, encoder, mut unknown, is_first, texts, truncated, longest, .. } = self;
        if is_first && longest == 0 {
            return Err(Error::input(format!("no text in column {:?}", names.join(", ")))
                .hint("name the column of text with --text"));
        }
        let (tokenizer, ids) = match encoder {
            Encoder::Known(vectorizer) => (vectorizer.tokenizer().clone(), ids),
            Encoder::Characters(characters) => {
                let (tokenizer, renumbered) = characters.finish();
                let ids = ids.map(out, |id| match id.checked_sub(TextVectorizer::FIRST) {
                    Some(token) => renumbered[token as usize] + TextVectorizer::FIRST,
                    None => id,
                })?;
                (tokenizer, ids)
            }
        };
        for (unknown, name) in unknown.iter_mut().zip(&names) {
            unknown.column.clone_from(name);
        }
        let vocabulary = TextVectorizer::new(tokenizer.clone(), length)?.ids();
        let summary = ImportedText { vocabulary, length, texts, truncated, longest };
        Ok(FinishedText {
            ids,
            tokenizer,
            columns: TextColumns { names, length },
            unknown,
            summary,
        })
    }
}
