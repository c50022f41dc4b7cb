//! A text of any size, read a piece at a time.

use std::io::Read;
use std::path::Path;

use hpctrain_base::error::{Error, Result};

/// The least number of bytes of a piece that is not the last.
pub(super) const PIECE: usize = 256 << 10;

/// Where pieces may end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// Anywhere.
    Bytes,
    /// Between characters.
    Characters,
    /// Where white space follows something else: none of GPT-2's tokens spans such a place, and
    /// none depends on text before it, so that the tokens of the pieces are those of the whole.
    Words,
}

/// The pieces of a text.
pub(super) struct Pieces<'a> {
    /// The name of the text in errors.
    name: &'a str,
    from: &'a mut dyn Read,
    cut: Cut,
    piece: usize,
    /// The bytes that were read: first those that were returned, then those that were not.
    buffer: Vec<u8>,
    given: usize,
    /// The number of returned bytes that are no longer in the buffer.
    passed: usize,
    is_at_end: bool,
}

impl<'a> Pieces<'a> {
    /// Creates the state before the first piece of a text.
    pub fn new(name: &'a str, from: &'a mut dyn Read, cut: Cut, piece: usize) -> Self {
        Self { name, from, cut, piece, buffer: Vec::new(), given: 0, passed: 0, is_at_end: false }
    }

    /// Returns the next piece and the position of its first byte; `None` at the end. It is UTF-8
    /// unless `cut` is [`Cut::Bytes`].
    pub fn next(&mut self) -> Result<Option<(usize, &[u8])>> {
        self.buffer.drain(..self.given);
        self.passed += std::mem::take(&mut self.given);
        loop {
            if !self.is_at_end {
                let read = (&mut *self.from).take(self.piece as u64).read_to_end(&mut self.buffer);
                let read = read.map_err(|e| Error::io("read", Path::new(self.name), e))?;
                self.is_at_end = read < self.piece;
            }
            self.given = self.ready()?;
            if self.given > 0 {
                return Ok(Some((self.passed, &self.buffer[..self.given])));
            }
            if self.is_at_end {
                return Ok(None);
            }
        }
    }

    /// Returns the number of bytes that may be returned.
    fn ready(&self) -> Result<usize> {
        if self.cut == Cut::Bytes {
            return Ok(self.buffer.len());
        }
        let valid = match str::from_utf8(&self.buffer) {
            Ok(text) => text,
            // A character may continue in the next piece.
            Err(e) if e.error_len().is_none() && !self.is_at_end => {
                str::from_utf8(&self.buffer[..e.valid_up_to()]).unwrap_or_default()
            }
            Err(e) => {
                let at = self.passed + e.valid_up_to();
                return Err(Error::input(format!("byte {at} is not UTF-8"))
                    .hint("convert the text to UTF-8, or use the tokenizer byte")
                    .at(self.name));
            }
        };
        if self.cut == Cut::Characters || self.is_at_end {
            return Ok(valid.len());
        }
        let mut after = None;
        let end = valid.char_indices().rev().find(|(_, c)| {
            let is_end = !c.is_whitespace() && after.is_some_and(char::is_whitespace);
            after = Some(*c);
            is_end
        });
        Ok(end.map_or(0, |(at, c)| at + c.len_utf8()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokenizer;

    const TEXT: &str = "Ünïcode words,  two spaces \n\n and\tlines; don't we'll 123 45.6   \n   end\u{3000}中文 字\r\n  ";

    #[test]
    fn pieces_are_the_text_and_have_its_tokens() {
        let whole = TEXT.repeat(20);
        for cut in [Cut::Bytes, Cut::Characters, Cut::Words] {
            for piece in [1, 2, 3, 7, 64, 1000, 1 << 20] {
                let mut from = whole.as_bytes();
                let mut pieces = Pieces::new("text", &mut from, cut, piece);
                let mut text = Vec::<u8>::new();
                let mut ids = Vec::new();
                let mut count = 0;
                while let Some((place, bytes)) = pieces.next().unwrap() {
                    assert_eq!(place, text.len());
                    if cut == Cut::Words {
                        ids.extend(Tokenizer::Gpt2.encode(str::from_utf8(bytes).unwrap()).unwrap());
                    }
                    assert!(cut == Cut::Bytes || str::from_utf8(bytes).is_ok());
                    text.extend(bytes);
                    count += 1;
                }
                assert_eq!(text, whole.as_bytes(), "{cut:?}, pieces of {piece}");
                assert!(
                    cut != Cut::Words || ids == Tokenizer::Gpt2.encode(&whole).unwrap(),
                    "{piece}"
                );
                assert!(count > 1 || piece > 1000);
            }
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_named() {
        let bytes = [&b"0123456789"[..], &[0xff], b"x"].concat();
        let mut from = &bytes[..];
        let mut pieces = Pieces::new("text", &mut from, Cut::Characters, 4);
        let error = loop {
            match pieces.next() {
                Ok(Some(_)) => {}
                Ok(None) => panic!(),
                Err(e) => break e.to_string(),
            }
        };
        assert!(error.contains("text: byte 10 is not UTF-8"), "{error}");
        // An incomplete character at the end.
        assert!(Pieces::new("text", &mut &[0xc3][..], Cut::Characters, 4).next().is_err());
    }
}
