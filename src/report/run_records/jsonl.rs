//! JSON Lines files of a run. The last line of a file that is being written is incomplete, and
//! lines may be damaged by the disk.

use std::io::{BufRead, BufReader, ErrorKind, Read as _};
use std::path::Path;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;
use hpctrain_config::telemetry::evaluations::is_torn;

/// The maximum length of a line; longer ones are reported as damaged.
const LONGEST: u64 = 64 << 20;

/// A complete line that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedLine {
    /// The number of the line, from 1.
    pub line: u64,
    /// The number of records before it in the file.
    pub after: usize,
    /// The reason.
    pub reason: String,
    /// Whether it is valid JSON, so that another version of the program wrote it.
    pub is_json: bool,
}

/// The records of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonLines<T> {
    /// The readable records, in the order of the file.
    pub records: Vec<T>,
    /// The unreadable lines.
    pub damaged: Vec<DamagedLine>,
}

impl<T> Default for JsonLines<T> {
    fn default() -> Self {
        Self { records: Vec::new(), damaged: Vec::new() }
    }
}

impl<T> JsonLines<T> {
    /// Returns a one-line summary of the damage, if there is any: the first damaged line of `file`,
    /// and the number of the others.
    pub fn damage_summary(&self, file: &str) -> Option<String> {
        let DamagedLine { line, reason: why, .. } = self.damaged.first()?;
        let others = match self.damaged.len() - 1 {
            0 => String::new(),
            others => format!(", and {others} more"),
        };
        Some(format!("{file}: line {line} cannot be read ({why}){others}"))
    }
}

/// Reads the records of a file; none if the file does not exist. Skips a last line without its end
/// unless it can be parsed, and lines that were torn by a kill before another process appended its
/// own.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<JsonLines<T>> {
    let file = match safe_open::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(JsonLines::default()),
        Err(e) => return Err(Error::io("read", path, e)),
    };
    read_from(BufReader::with_capacity(1 << 18, file), LONGEST)
        .map_err(|e| Error::io("read", path, e))
}

fn read_from<T: DeserializeOwned>(
    mut from: impl BufRead,
    longest: u64,
) -> std::io::Result<JsonLines<T>> {
    let mut found = JsonLines::default();
    let mut bytes = Vec::new();
    for line in 1.. {
        bytes.clear();
        if from.by_ref().take(longest).read_until(b'\n', &mut bytes)? == 0 {
            break;
        }
        let mut is_whole = bytes.ends_with(b"\n");
        let too_long = !is_whole && bytes.len() as u64 == longest;
        if too_long {
            is_whole = skip_line(&mut from)?;
        }
        let text = bytes.trim_ascii();
        if text.is_empty() {
            continue;
        }
        let why = match parse(text) {
            _ if too_long => format!("it is longer than {longest} bytes"),
            Ok(record) => {
                found.records.push(record);
                continue;
            }
            Err(why) => why,
        };
        let is_json = !too_long && parse::<IgnoredAny>(text).is_ok();
        let is_beginning = !too_long && is_torn(text);
        // A valid prefix of a record is a torn line rather than a damaged one.
        if is_whole && !is_beginning {
            found.damaged.push(DamagedLine {
                line,
                after: found.records.len(),
                reason: why,
                is_json,
            });
        }
    }
    Ok(found)
}

fn parse<T: for<'de> Deserialize<'de>>(text: &[u8]) -> std::result::Result<T, String> {
    // The whole line must be UTF-8, including strings that are not deserialized.
    let text = std::str::from_utf8(text).map_err(|e| e.to_string())?;
    serde_json::from_str(text).map_err(|e| e.to_string())
}

/// Skips the rest of a line. Returns true if the line has an end.
fn skip_line(from: &mut impl BufRead) -> std::io::Result<bool> {
    loop {
        let there = from.fill_buf()?;
        if there.is_empty() {
            return Ok(false);
        }
        let end = there.iter().position(|byte| *byte == b'\n');
        let read = end.map_or(there.len(), |end| end + 1);
        from.consume(read);
        if end.is_some() {
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Numbered {
        step: u64,
    }

    fn lines_of(text: &[u8]) -> JsonLines<Numbered> {
        read_from(text, 64).unwrap()
    }

    fn steps(lines: &JsonLines<Numbered>) -> Vec<u64> {
        lines.records.iter().map(|one| one.step).collect()
    }

    #[test]
    fn an_unfinished_last_line_is_normal() {
        assert_eq!(lines_of(b""), JsonLines::default());
        let lines = lines_of(b"{\"step\":1}\n{\"step\":2}\n{\"st");
        assert_eq!((steps(&lines), lines.damaged.len()), (vec![1, 2], 0));
        // Complete except for its end, or torn within a character.
        assert_eq!(steps(&lines_of(b"{\"step\":1}\n{\"step\":2}")), [1, 2]);
        assert_eq!(
            lines_of(b"{\"step\":1}\n{\"why\":\"\xe2\x82"),
            JsonLines { records: vec![Numbered { step: 1 }], damaged: vec![] }
        );
        // Another process has appended after it.
        let lines = lines_of(b"{\"step\":1}\n{\"st\n{\"step\":3}\n");
        assert_eq!((steps(&lines), lines.damaged.len()), (vec![1, 3], 0));
    }

    #[test]
    fn a_bad_byte_costs_its_line_and_is_reported() {
        let lines = lines_of(b"{\"step\":1}\n{\"st\xffep\":2}\n{\"step\":3}\n{\"epoch\":4}\n");
        assert_eq!(steps(&lines), [1, 3]);
        let seen: Vec<_> =
            lines.damaged.iter().map(|one| (one.line, one.after, one.is_json)).collect();
        assert_eq!(seen, [(2, 1, false), (4, 2, true)]);
        let summary = lines.damage_summary("metrics.jsonl").unwrap();
        assert!(
            summary.starts_with("metrics.jsonl: line 2 cannot be read (invalid utf-8"),
            "{summary}"
        );
        assert!(summary.ends_with(", and 1 more"), "{summary}");
    }

    #[test]
    fn a_line_without_end_takes_no_memory() {
        let long =
            [&b"{\"step\":1}\n"[..], &[b'x'; 200], b"\n{\"step\":2}\n", &[b'x'; 200]].concat();
        let lines = lines_of(&long);
        assert_eq!((steps(&lines), lines.damaged.len()), (vec![1, 2], 1));
        assert!(lines.damaged[0].reason.contains("longer than 64"), "{lines:?}");
    }
}
