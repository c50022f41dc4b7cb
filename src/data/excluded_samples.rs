//! The samples that a run does not read: `data.exclude`.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::import::hex;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// Numbers of samples that are not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExcludedSamples {
    /// In ascending order, each once.
    numbers: Vec<u64>,
}

/// The number of excluded samples and their digest, as checkpoints record them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExcludedSummary {
    /// The number of excluded samples.
    pub samples: u64,
    /// Sixteen hexadecimal digits that identify them.
    pub digest: String,
}

/// The number of bytes of a digest.
const DIGEST: usize = 8;

/// The form of the file, for hints.
const FORM: &str = "each line has the number of a sample, as hpctrain data which --numbers prints \
                    it; text from # on is a comment";

impl ExcludedSamples {
    /// Creates the set of these numbers.
    pub fn new(mut numbers: Vec<u64>) -> Self {
        numbers.sort_unstable();
        numbers.dedup();
        Self { numbers }
    }

    /// Reads a text file with the number of a sample in each line, of data with `samples` samples.
    /// Empty lines and text from `#` on are ignored.
    ///
    /// # Errors
    /// Returns an error that names the file, the line and its text if a line is not a number below
    /// `samples`, or if the file cannot be read or lists no sample.
    pub fn read(path: &Path, samples: u64) -> Result<Self> {
        let place = format!("data.exclude = {}", path.display());
        let bytes = safe_open::read(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::input(format!("{place} does not exist")).hint("omit it, or give a text file")
            }
            _ => Error::io("read", path, e).at("data.exclude"),
        })?;
        let text = str::from_utf8(&bytes)
            .map_err(|_| Error::input(format!("{place} is not a UTF-8 text file")).hint(FORM))?;
        let mut numbers = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let content = line.split('#').next().unwrap_or_default().trim();
            if content.is_empty() {
                continue;
            }
            let at = format!("{place}, line {}", index + 1);
            let number: u64 = content.parse().map_err(|_| {
                Error::input(format!("{at}: {content:?} is not the number of a sample")).hint(FORM)
            })?;
            if number >= samples {
                return Err(Error::input(format!(
                    "{at}: there is no sample {number}: the training data has {samples} samples"
                ))
                .hint(format!("numbers are from 0 to {}", samples.saturating_sub(1))));
            }
            numbers.push(number);
        }
        if numbers.is_empty() {
            return Err(Error::input(format!("{place} lists no sample")).hint("omit data.exclude"));
        }
        Ok(Self::new(numbers))
    }

    /// Returns the numbers in ascending order.
    pub fn numbers(&self) -> &[u64] {
        &self.numbers
    }

    /// Returns true if sample `number` is excluded.
    pub fn contains(&self, number: u64) -> bool {
        self.numbers.binary_search(&number).is_ok()
    }

    /// Returns how many of the samples `numbers` are excluded.
    pub fn count_in(&self, numbers: Range<u64>) -> u64 {
        let below = |end| self.numbers.partition_point(|number| *number < end);
        (below(numbers.end) - below(numbers.start)) as u64
    }

    /// Returns the number of excluded samples and their digest.
    pub fn summary(&self) -> ExcludedSummary {
        let mut hash = Sha256::new();
        self.numbers.iter().for_each(|number| hash.update(number.to_le_bytes()));
        ExcludedSummary {
            samples: self.numbers.len() as u64,
            digest: hex(&hash.finalize()[..DIGEST]),
        }
    }
}

impl ExcludedSummary {
    /// Returns the difference of the samples that are excluded `now` from those `before`; `None` if
    /// they are the same.
    pub fn difference(now: Option<&Self>, before: Option<&Self>) -> Option<String> {
        let describe = |summary: Option<&Self>| match summary {
            None => "none".to_owned(),
            Some(summary) => summary.to_string(),
        };
        (now != before).then(|| {
            format!(
                "data.exclude: excluded samples: {}, before {}",
                describe(now),
                describe(before)
            )
        })
    }
}

impl fmt::Display for ExcludedSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.samples, self.digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<ExcludedSamples> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("exclude.txt");
        std::fs::write(&path, text).unwrap();
        ExcludedSamples::read(&path, 100)
    }

    #[test]
    fn numbers_are_read_line_by_line() {
        let excluded = read(b"# bad rows\n7\n 99 # twice\n\n0\r\n99\n").unwrap();
        assert_eq!(excluded.numbers(), [0, 7, 99]);
        assert!(excluded.contains(7) && !excluded.contains(8));
        assert_eq!([0..100, 0..7, 1..8, 8..99].map(|range| excluded.count_in(range)), [3, 1, 1, 0]);
        assert_eq!(excluded.summary(), read(b"99\n7\n0").unwrap().summary());
        assert_eq!(excluded.summary().samples, 3);
        assert_ne!(excluded.summary().digest, read(b"99\n8\n0").unwrap().summary().digest);
    }

    #[test]
    fn other_files_are_refused() {
        for (text, wanted) in [
            (&b"1\n100\n"[..], "line 2: there is no sample 100: the training data has 100 samples"),
            (b"1\n\nbooks 3\n", "line 3: \"books 3\" is not the number of a sample\nhint: each"),
            (b"-1\n", "line 1: \"-1\" is not the number of a sample"),
            (b"1.5\n", "line 1: \"1.5\" is not the number of a sample"),
            (b"", "lists no sample\nhint: omit data.exclude"),
            (b"# nothing\n", "lists no sample"),
            (b"\xff\n", "is not a UTF-8 text file"),
        ] {
            let error = read(text).unwrap_err();
            let message = error.to_string();
            assert_eq!(error.exit_code(), 2);
            assert!(message.starts_with("data.exclude = ") && message.contains(wanted), "{error}");
        }
        let error = ExcludedSamples::read(Path::new("/nowhere/x.txt"), 9).unwrap_err();
        let wanted = "data.exclude = /nowhere/x.txt does not exist\nhint: ";
        assert!(error.to_string().starts_with(wanted), "{error}");
        assert_eq!(error.exit_code(), 2);
    }

    #[test]
    fn differences_name_both_sides() {
        let [one, two] = [b"1\n", b"2\n"].map(|text| read(text).unwrap().summary());
        assert_eq!(ExcludedSummary::difference(Some(&one), Some(&one)), None);
        assert_eq!(ExcludedSummary::difference(None, None), None);
        let difference = ExcludedSummary::difference(Some(&two), None).unwrap();
        assert_eq!(
            difference,
            format!("data.exclude: excluded samples: 1 ({}), before none", two.digest)
        );
        let difference = ExcludedSummary::difference(Some(&two), Some(&one)).unwrap();
        assert!(difference.contains(&format!("before 1 ({})", one.digest)), "{difference}");
    }
}
