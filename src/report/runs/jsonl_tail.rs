//! The end of a JSON Lines file, which may be written at the same time.

use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use serde::de::{DeserializeOwned, IgnoredAny};

use hpctrain_base::safe_open;

/// The last records of a file.
#[derive(Debug, PartialEq)]
pub struct Tail<T> {
    /// The records, in the order of the file.
    pub records: Vec<T>,
    /// The number of complete lines that cannot be read.
    pub damaged: usize,
    /// The number of lines that are valid JSON but other records, so of another version of the
    /// program.
    pub foreign: usize,
    /// Whether the file has more lines before them.
    pub is_cut: bool,
}

/// Reads the records in the last `most` bytes of a file, from the first complete line on. Skips a
/// last line without an end unless it can be parsed. Returns no records if the file does not exist.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn read<T: DeserializeOwned>(path: &Path, most: u64) -> std::io::Result<Tail<T>> {
    let mut tail = Tail { records: Vec::new(), damaged: 0, foreign: 0, is_cut: false };
    let mut file = match safe_open::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(tail),
        Err(e) => return Err(e),
    };
    let start = file.metadata()?.len().saturating_sub(most);
    tail.is_cut = start > 0;
    // The byte before shows whether a line begins here.
    file.seek(SeekFrom::Start(start.saturating_sub(1)))?;
    let mut bytes = Vec::new();
    // Lines appended in the meantime are not read.
    file.take(most + 1).read_to_end(&mut bytes)?;
    let mut lines = bytes.split(|byte| *byte == b'\n').peekable();
    if tail.is_cut {
        lines.next();
    }
    while let Some(line) = lines.next() {
        let is_whole = lines.peek().is_some();
        if line.is_empty() {
            continue;
        }
        // The whole line must be UTF-8, including strings that are not deserialized.
        let text = std::str::from_utf8(line);
        match text.map(serde_json::from_str) {
            Ok(Ok(record)) => tail.records.push(record),
            _ if !is_whole => {}
            Ok(Err(_))
                if text.is_ok_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok()) =>
            {
                tail.foreign += 1
            }
            // Torn by a kill before another process appended, or damaged.
            _ => tail.damaged += 1,
        }
    }
    Ok(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Numbered {
        step: u64,
    }

    fn tail_of(text: &[u8], most: u64) -> (Vec<u64>, usize, usize, bool) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl");
        std::fs::write(&path, text).unwrap();
        let Tail { records, damaged, foreign, is_cut } = read::<Numbered>(&path, most).unwrap();
        (records.into_iter().map(|one| one.step).collect(), damaged, foreign, is_cut)
    }

    #[test]
    fn the_end_is_read_from_the_first_whole_line_on() {
        let text = b"{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n";
        assert_eq!(tail_of(text, 1000), (vec![1, 2, 3], 0, 0, false));
        assert_eq!(tail_of(text, 33), (vec![1, 2, 3], 0, 0, false));
        assert_eq!(tail_of(text, 32), (vec![2, 3], 0, 0, true));
        assert_eq!(tail_of(text, 22), (vec![2, 3], 0, 0, true));
        assert_eq!(tail_of(text, 21), (vec![3], 0, 0, true));
        assert_eq!(tail_of(text, 5), (vec![], 0, 0, true));
        assert_eq!(tail_of(b"", 5), (vec![], 0, 0, false));
        assert_eq!(read::<Numbered>(Path::new("/nowhere/x"), 5).unwrap().records, []);
    }

    #[test]
    fn torn_and_damaged_lines_cost_themselves_alone() {
        assert_eq!(tail_of(b"{\"step\":1}\n{\"st", 100), (vec![1], 0, 0, false));
        // Complete except for its end.
        assert_eq!(tail_of(b"{\"step\":1}\n{\"step\":2}", 100), (vec![1, 2], 0, 0, false));
        assert_eq!(
            tail_of(b"{\"step\":1}\n{\"st\xff\":2}\n{\"iteration\":3}\n{\"step\":4}\n", 100),
            (vec![1, 4], 1, 1, false)
        );
    }
}
