//! A text that is read a piece at a time, however large it is.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use super::missing;
use crate::data::TokenizerKind;
use crate::error::{Error, Result};

/// Bytes of a piece, at least, where the text goes on.
pub(super) const PIECE: usize = 1 << 20;

/// The pieces of a text. For a tokenizer of bytes they end anywhere, for one of characters between characters. For
/// GPT-2's they end where a white space follows something else: none of its tokens goes on from there, and none looks
/// back, so that the tokens of the pieces are those of the whole.
pub(super) struct Pieces<'a> {
    path: &'a Path,
    file: File,
    kind: TokenizerKind,
    piece: usize,
    /// Read, and not handed out.
    buffer: Vec<u8>,
    /// Bytes that were handed out.
    passed: usize,
    is_at_end: bool,
}

impl<'a> Pieces<'a> {
    /// Opens a text.
    pub fn open(path: &'a Path, kind: TokenizerKind, piece: usize) -> Result<Self> {
        let file = File::open(path).map_err(|e| missing(path, &e, "give the path of a text file"))?;
        Ok(Self { path, file, kind, piece, buffer: Vec::new(), passed: 0, is_at_end: false })
    }

    /// The next piece; none at the end.
    pub fn next(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            if !self.is_at_end {
                let limit = self.piece as u64;
                let read = self.file.by_ref().take(limit).read_to_end(&mut self.buffer);
                let read = read.map_err(|e| Error::io("read", self.path, e))?;
                self.is_at_end = read < self.piece;
            }
            let ready = self.ready()?;
            if ready > 0 {
                let rest = self.buffer.split_off(ready);
                self.passed += ready;
                return Ok(Some(std::mem::replace(&mut self.buffer, rest)));
            }
            if self.is_at_end {
                return Ok(None);
            }
        }
    }

    /// Bytes that may be handed out.
    fn ready(&self) -> Result<usize> {
        if self.kind == TokenizerKind::Byte {
            return Ok(self.buffer.len());
        }
        let valid = match str::from_utf8(&self.buffer) {
            Ok(text) => text,
            // A character may go on in the next piece.
            Err(e) if e.error_len().is_none() && !self.is_at_end => {
                str::from_utf8(&self.buffer[..e.valid_up_to()]).unwrap_or_default()
            }
            Err(e) => {
                let at = self.passed + e.valid_up_to();
                return Err(Error::input(format!("byte {at} is not UTF-8"))
                    .hint("convert the text to UTF-8, or use the tokenizer byte")
                    .at(self.path.display()));
            }
        };
        if self.kind == TokenizerKind::Char || self.is_at_end {
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
    use crate::data::Tokenizer;

    const TEXT: &str =
        "Ünïcode words,  two spaces \n\n and\tlines; don't we'll 123 45.6   \n   end\u{3000}中文 字\r\n  ";

    #[test]
    fn pieces_are_the_text_and_have_its_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, TEXT.repeat(20)).unwrap();
        let whole = TEXT.repeat(20);
        for kind in [TokenizerKind::Byte, TokenizerKind::Char, TokenizerKind::Gpt2] {
            let tokenizer = Tokenizer::for_text(kind, &whole);
            for piece in [1, 2, 3, 7, 64, 1000, 1 << 20] {
                let mut pieces = Pieces::open(&path, kind, piece).unwrap();
                let (mut text, mut ids, mut count) = (Vec::new(), Vec::new(), 0);
                while let Some(bytes) = pieces.next().unwrap() {
                    if kind != TokenizerKind::Byte {
                        ids.extend(tokenizer.encode(str::from_utf8(&bytes).unwrap()).unwrap());
                    }
                    text.extend(bytes);
                    count += 1;
                }
                assert_eq!(text, whole.as_bytes(), "{kind:?}, pieces of {piece}");
                assert!(kind == TokenizerKind::Byte || ids == tokenizer.encode(&whole).unwrap(), "{kind:?}, {piece}");
                assert!(count > 1 || piece > 1000);
            }
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, [&b"0123456789"[..], &[0xff], b"x"].concat()).unwrap();
        let mut pieces = Pieces::open(&path, TokenizerKind::Char, 4).unwrap();
        let error = loop {
            match pieces.next() {
                Ok(Some(_)) => {}
                Ok(None) => panic!(),
                Err(e) => break e.to_string(),
            }
        };
        assert!(error.contains("byte 10 is not UTF-8"), "{error}");
        // Half a character at the end.
        std::fs::write(&path, [0xc3]).unwrap();
        assert!(Pieces::open(&path, TokenizerKind::Char, 4).unwrap().next().is_err());
    }
}
