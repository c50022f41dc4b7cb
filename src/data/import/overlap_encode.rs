//! Encoding of a document that is too long to be encoded at once, by a tokenizer whose rules are
//! not known.
//!
//! The document is encoded in windows that overlap. In the middle of an overlap both windows have
//! many characters around them, and their tokens are the same, ids and positions: the result
//! switches from one window to the next where a run of tokens is equal. Tokenizers decide by nearby
//! text, so the ids are those of the whole document; if no run is equal, the document is an error.

use crate::tokenizer::{HuggingFace, Placed};
use hpctrain_base::error::{Error, Result};

/// The number of equal tokens at which two windows are joined.
const EQUAL: usize = 16;

/// The bytes of windows and their overlaps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub window: usize,
    pub overlap: usize,
}

impl Sizes {
    /// The sizes for imports: encoding a window takes some 100 times its size in memory.
    pub const IMPORT: Self = Self { window: 256 << 10, overlap: 16 << 10 };
}

/// Returns the last character boundary up to byte `at`.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// A document that arrives in pieces.
pub(super) struct Windows<'a> {
    tokenizer: &'a HuggingFace,
    sizes: Sizes,
    /// The document from byte `start` on.
    text: String,
    start: usize,
    /// The tokens of the last window that lie in the overlap and were not returned yet, with
    /// positions in the document.
    held: Vec<Placed>,
}

impl<'a> Windows<'a> {
    /// Creates the state before a document.
    pub fn new(tokenizer: &'a HuggingFace, sizes: Sizes) -> Self {
        Self { tokenizer, sizes, text: String::new(), start: 0, held: Vec::new() }
    }

    /// Appends text to the document, and to `ids` the ids that are already known.
    pub fn push(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        self.text.push_str(text);
        while self.text.len() >= self.sizes.window + self.sizes.overlap {
            let window = boundary(&self.text, self.sizes.window);
            let tokens = self.joined(window, ids)?;
            let next = boundary(&self.text, window - self.sizes.overlap);
            let kept = tokens.partition_point(|token| token.start < self.start + next);
            ids.extend(tokens[..kept].iter().map(|token| token.id));
            self.held = tokens[kept..].to_vec();
            self.text.drain(..next);
            self.start += next;
        }
        Ok(())
    }

    /// Ends the document, and appends its last ids to `ids`.
    pub fn finish(mut self, ids: &mut Vec<u32>) -> Result<()> {
        if self.start == 0 {
            ids.extend(self.tokenizer.encode(&self.text)?);
            return Ok(());
        }
        let tokens = self.joined(self.text.len(), ids)?;
        ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }

    /// Returns the tokens of the next window, of `window` bytes, from where it is joined with the
    /// window before; appends the ids before that to `ids`.
    fn joined(&mut self, window: usize, ids: &mut Vec<u32>) -> Result<Vec<Placed>> {
        let mut tokens = self.tokenizer.placed(&self.text[..window])?;
        for token in &mut tokens {
            token.start += self.start;
            token.end += self.start;
        }
        if self.start == 0 {
            return Ok(tokens);
        }
        let held = std::mem::take(&mut self.held);
        let middle = self.start + self.sizes.overlap / 2;
        let from = held.partition_point(|token| token.start < middle);
        // Before the middle if no run after it is equal.
        let found = (from..held.len())
            .find_map(|old| meeting(&held, &tokens, old))
            .or_else(|| (0..from).rev().find_map(|old| meeting(&held, &tokens, old)));
        let Some((old, new)) = found else {
            return Err(Error::input(format!("the ids near byte {middle} depend on distant text"))
                .hint("split it into several documents, such as JSON lines with --field"));
        };
        ids.extend(held[..old].iter().map(|token| token.id));
        tokens.drain(..new);
        Ok(tokens)
    }
}

/// Returns `old` and the index in `tokens` from which a run of both is equal, if there is one.
fn meeting(held: &[Placed], tokens: &[Placed], old: usize) -> Option<(usize, usize)> {
    let run = held.get(old..old + EQUAL)?;
    // Several tokens of one character have the same position.
    let is_first = old == 0 || held[old - 1].start < run[0].start;
    let new = tokens.partition_point(|token| token.start < run[0].start);
    (is_first && tokens.get(new..new + EQUAL) == Some(run)).then_some((old, new))
}

#[cfg(test)]
mod tests {
    use tokenizers::models::TrainerWrapper;
    use tokenizers::models::bpe::{BPE, BpeTrainer};
    use tokenizers::models::unigram::{Unigram, UnigramTrainer};
    use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
    use tokenizers::normalizers::{BertNormalizer, NFKC, Prepend, Replace, Sequence};
    use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
    use tokenizers::{NormalizerWrapper, Tokenizer as Parsed};

    use super::*;
    use crate::Tokenizer;
    use hpctrain_base::random::Stream;

    /// Returns words, numbers, other scripts, composed and decomposed letters, and white space of
    /// all kinds.
    fn text() -> String {
        let words = [
            "the",
            "trainer",
            "reads",
            "ﬁne",
            "naïve",
            "e\u{301}te\u{301}",
            "中文字",
            "данные",
            "🦀🦀",
            "3.14159",
            "x_y",
            "don't",
            "\n",
            "\n\n",
            "\t",
            "  ",
            ".",
            "—",
            "\r\n",
            "antidisestablishmentarianism",
        ];
        let random = Stream::new(5);
        let word = |at: usize| words[(random.uniform(at as u64) * words.len() as f64) as usize];
        (0..6000).map(|at| format!("{}{}", word(at), if at % 3 == 0 { "" } else { " " })).collect()
    }

    fn trained(mut parsed: Parsed, mut trainer: TrainerWrapper) -> HuggingFace {
        parsed.train(&mut trainer, text().split_inclusive(' ')).unwrap();
        HuggingFace::new(&serde_json::from_str(&parsed.to_string(false).unwrap()).unwrap()).unwrap()
    }

    /// Returns tokenizers like those of GPT-2, Llama 2, T5 and BERT.
    fn tokenizers() -> [(&'static str, HuggingFace); 4] {
        let bpe = || BpeTrainer::builder().show_progress(false).vocab_size(400).build().into();
        let mut gpt = Parsed::new(BPE::default());
        gpt.with_pre_tokenizer(Some(ByteLevel::default()));
        // Without pre-tokenization: the whole text is one word.
        let mut llama = Parsed::new(BPE::default());
        let normalizers: Vec<NormalizerWrapper> =
            vec![Prepend::new("▁".into()).into(), Replace::new(" ", "▁").unwrap().into()];
        llama.with_normalizer(Some(Sequence::new(normalizers))).unwrap();
        let mut t5 = Parsed::new(Unigram::default());
        t5.with_normalizer(Some(NFKC)).unwrap();
        t5.with_pre_tokenizer(Some(Metaspace::new('▁', PrependScheme::Always, true)));
        let unigram = UnigramTrainer::builder()
            .show_progress(false)
            .vocab_size(300)
            .unk_token(Some("?".into()))
            .build();
        let mut bert = Parsed::new(WordPiece::default());
        bert.with_normalizer(Some(BertNormalizer::default())).unwrap();
        bert.with_pre_tokenizer(Some(BertPreTokenizer));
        let pieces = WordPieceTrainer::builder().show_progress(false).vocab_size(200).build();
        [
            ("gpt", trained(gpt, bpe())),
            ("llama", trained(llama, bpe())),
            ("t5", trained(t5, unigram.unwrap().into())),
            ("bert", trained(bert, pieces.into())),
        ]
    }

    fn windowed(
        tokenizer: &HuggingFace,
        text: &str,
        piece: usize,
        sizes: Sizes,
    ) -> Result<Vec<u32>> {
        let mut windows = Windows::new(tokenizer, sizes);
        let mut ids = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, others) = rest.split_at(boundary(rest, (piece + 3).min(rest.len())));
            windows.push(piece, &mut ids)?;
            rest = others;
        }
        windows.finish(&mut ids)?;
        Ok(ids)
    }

    #[test]
    fn windows_have_the_ids_of_the_whole() {
        let text = text();
        for (name, tokenizer) in tokenizers() {
            let whole = tokenizer.encode(&text).unwrap();
            assert!(whole.len() > 5000, "{name}: {}", whole.len());
            for (piece, window, overlap) in
                [(100, 2000, 500), (5000, 1000, 400), (1, 9000, 900), (1 << 20, 4096, 512)]
            {
                let sizes = Sizes { window, overlap };
                let ids = windowed(&tokenizer, &text, piece, sizes).unwrap();
                let same = ids.iter().zip(&whole).take_while(|(a, b)| a == b).count();
                assert!(
                    ids == whole,
                    "{name}, {sizes:?}: equal up to {same} of {} and {}",
                    ids.len(),
                    whole.len()
                );
            }
        }
    }

    #[test]
    fn ids_that_hang_on_far_text_are_refused() {
        let mut value: serde_json::Value =
            serde_json::from_str(&Tokenizer::Byte.file().unwrap()).unwrap();
        // Pairs are formed from the left: which ones depends on where a window begins.
        value["model"]["vocab"]["aa"] = 256.into();
        value["model"]["merges"] = serde_json::json!(["a a"]);
        let tokenizer = HuggingFace::new(&value).unwrap();
        let sizes = Sizes { window: 1001, overlap: 200 };
        let error = windowed(&tokenizer, &"a".repeat(5000), 100, sizes).unwrap_err().to_string();
        assert!(error.contains("depend on distant text\nhint: "), "{error}");
        assert_eq!(windowed(&tokenizer, &"a".repeat(1000), 100, sizes).unwrap(), vec![256; 500]);
    }
}
