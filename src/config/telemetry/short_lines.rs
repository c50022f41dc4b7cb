//! Short files of JSON lines, such as `starts.jsonl`, which are read whole.

use std::io::{ErrorKind, Write as _};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::long_lines::parse_record;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};

/// Reads the records of a file, which are none if it is missing. Lines that cannot be read are
/// skipped.
///
/// # Errors
/// Returns an error if the file is there and cannot be read.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    Ok(parse(&content(path)?))
}

/// Parses the records in these lines; lines that cannot be read are skipped.
pub fn parse<T: DeserializeOwned>(lines: &[u8]) -> Vec<T> {
    lines.split(|byte| *byte == b'\n').filter_map(parse_record).collect()
}

/// Appends a record to a file, which is created if it is missing.
///
/// # Errors
/// Returns an error if the file cannot be read or written.
pub fn append(path: &Path, record: &impl Serialize) -> Result<()> {
    let line =
        serde_json::to_string(record).map_err(|e| Error::internal(format!("record: {e}")))?;
    // A line that was cut short by a kill must not make this one unreadable.
    let is_torn = content(path)?.last().is_some_and(|byte| *byte != b'\n');
    let line = format!("{}{line}\n", if is_torn { "\n" } else { "" });
    own_files::append(path)
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .map_err(|e| Error::io("write", path, e))
}

fn content(path: &Path) -> Result<Vec<u8>> {
    match safe_open::read(path) {
        Ok(content) => Ok(content),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Error::io("read", path, e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_cut_short_damages_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("numbers.jsonl");
        assert!(read::<u32>(&path).unwrap().is_empty());
        append(&path, &1).unwrap();
        let mut file = own_files::append(&path).unwrap();
        file.write_all(b"[\"cut").unwrap();
        append(&path, &2).unwrap();
        append(&path, &3).unwrap();
        assert_eq!(read::<u32>(&path).unwrap(), [1, 2, 3]);
        let refused = read::<u32>(&path.join("below")).unwrap_err();
        assert!(refused.to_string().contains("below"), "{refused}");
    }
}
