//! Text as rows of a fixed number of token ids, for networks that begin with an embedding.

use super::tokenizer::Tokenizer;
use hpctrain_base::error::{Error, Result};

/// Turns texts into rows of ids of a fixed length, as Keras's layer `TextVectorization` does. The
/// ids of a longer text are truncated; a shorter one is padded at its end.
///
/// Id 0 is padding, id 1 stands for a character that the tokenizer `char` does not have, and token
/// `t` of the tokenizer has id `t + 2`.
///
/// ```
/// use hpctrain_data::{TextVectorizer, Tokenizer, TokenizerKind};
///
/// let tokenizer = Tokenizer::for_text(&TokenizerKind::Char, "abc")?;
/// let vectorizer = TextVectorizer::new(tokenizer, 4)?;
/// assert_eq!(vectorizer.ids_of("cab")?, [4, 2, 3, 0]);
/// assert_eq!(vectorizer.ids_of("a-cabc")?, [2, 1, 4, 2]);
/// // The layer `embedding` needs this number of ids.
/// assert_eq!(vectorizer.ids(), 5);
/// # Ok::<(), hpctrain_base::error::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextVectorizer {
    tokenizer: Tokenizer,
    length: usize,
}

/// The counts of an encoded text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EncodedText {
    /// The number of its tokens, before it was truncated.
    pub tokens: usize,
    /// The first of its characters that the tokenizer does not have, and the number of such
    /// characters among those that were kept.
    pub unknown: Option<(char, usize)>,
}

impl TextVectorizer {
    /// The id after the last token of a text.
    pub const PAD: u32 = 0;

    /// The id of a character that the tokenizer `char` does not have.
    pub const UNKNOWN: u32 = 1;

    /// The id of the tokenizer's token 0.
    pub const FIRST: u32 = 2;

    /// Creates rows of `length` ids with the tokens of `tokenizer`.
    ///
    /// # Errors
    /// Returns an error if `length` is 0.
    pub fn new(tokenizer: Tokenizer, length: usize) -> Result<Self> {
        if length == 0 {
            return Err(Error::input("texts of 0 ids").hint("give each text 1 id or more"));
        }
        Ok(Self { tokenizer, length })
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the number of ids of a text.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Returns the number of different ids, which is the number of rows of the embedding.
    pub fn ids(&self) -> usize {
        self.tokenizer.vocabulary() + Self::FIRST as usize
    }

    /// Returns the ids of a text.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses the text.
    pub fn ids_of(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(self.length);
        self.encode(text, &mut ids).map(|_| ids)
    }

    /// Appends the ids of a text to `to`.
    pub(super) fn encode(&self, text: &str, to: &mut Vec<u32>) -> Result<EncodedText> {
        let end = to.len() + self.length;
        let mut encoded = EncodedText::default();
        match &self.tokenizer {
            Tokenizer::Char { chars } => {
                for c in text.chars() {
                    if encoded.tokens < self.length {
                        to.push(match chars.binary_search(&c) {
                            Ok(token) => Self::FIRST + token as u32,
                            Err(_) => {
                                encoded.unknown.get_or_insert((c, 0)).1 += 1;
                                Self::UNKNOWN
                            }
                        });
                    }
                    encoded.tokens += 1;
                }
            }
            tokenizer => {
                let tokens = tokenizer.encode(text)?;
                encoded.tokens = tokens.len();
                to.extend(tokens.iter().take(self.length).map(|token| Self::FIRST + token));
            }
        }
        to.resize(end, Self::PAD);
        Ok(encoded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerKind;

    #[test]
    fn texts_are_truncated_and_padded() {
        let bytes = TextVectorizer::new(Tokenizer::Byte, 3).unwrap();
        assert_eq!((bytes.ids(), bytes.length()), (258, 3));
        for (text, ids) in [
            ("", [0, 0, 0]),
            ("ab", [99, 100, 0]),
            ("abc", [99, 100, 101]),
            ("abcd", [99, 100, 101]),
        ] {
            assert_eq!(bytes.ids_of(text).unwrap(), ids, "{text:?}");
        }
        let gpt2 = TextVectorizer::new(Tokenizer::Gpt2, 3).unwrap();
        assert_eq!(gpt2.ids_of("Hello world").unwrap(), [15498, 997, 0]);
        assert!(TextVectorizer::new(Tokenizer::Byte, 0).is_err());
    }

    #[test]
    fn unknown_characters_are_counted() {
        let tokenizer = Tokenizer::for_text(&TokenizerKind::Char, "ab").unwrap();
        let chars = TextVectorizer::new(tokenizer, 4).unwrap();
        let mut ids = vec![7];
        let encoded = chars.encode("aéxbé", &mut ids).unwrap();
        assert_eq!(ids, [7, 2, 1, 1, 3]);
        assert_eq!(encoded, EncodedText { tokens: 5, unknown: Some(('é', 2)) });
    }
}
