//! Import of files of other formats into shards.
//!
//! The shards of an import get their names only after all of them are written.

mod csv;
mod documents;
mod id_sets;
mod ids;
mod idx;
mod images;
mod inference_input;
mod npy;
mod numpy;
mod overlap_encode;
mod row_writer;
mod spool;
mod stream;
mod text;
mod text_chunks;
mod unknown_values;

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::spec::{Split, file_names};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

pub use csv::{
    Categories, CategoryIds, ImportCsv, Missing, TableFormat, TextOptions, column_texts, import_csv,
};
pub use id_sets::{IdVocabulary, ImportIds, import_ids};
pub use idx::{ImportIdx, import_idx};
pub use images::{ImportImages, import_images};
pub use inference_input::{InputFormat, Unlabelled};
pub use numpy::{Arrays, ImportNumpy, import_numpy};
pub(crate) use row_writer::{CLASSES, class_names, is_of_samples, numbered, skipped_note};
pub use row_writer::{ImportOptions, Imported as ImportedSamples, ImportedText, NotFinite};
pub use stream::{Imported, StreamShards};
pub use text::{ImportText, import_text};
pub use unknown_values::{UnknownValues, unknown_note};

/// Opens a file to import.
fn open(path: &Path, hint: &str) -> Result<std::fs::File> {
    safe_open::open(path).map_err(|e| missing(path, &e, hint))
}

/// Returns the error of a file to import that cannot be read.
fn missing(path: &Path, e: &std::io::Error, hint: &str) -> Error {
    match e.kind() {
        std::io::ErrorKind::NotFound => {
            Error::input(format!("{} does not exist", path.display())).hint(hint)
        }
        _ => Error::io("read", path, e),
    }
}

/// Returns the file name of a shard.
pub(crate) fn shard_name(split: Split, shard: u64) -> String {
    let prefix = if split == Split::Train { "train" } else { "val" };
    format!("{prefix}-{shard:05}.h5")
}

/// Returns an error if a directory holds shards.
fn refuse_shards(out: &Path) -> Result<()> {
    if !out.exists() {
        return Ok(());
    }
    match file_names(out)?.iter().find(|name| name.ends_with(".h5")) {
        Some(shard) => {
            Err(Error::input(format!("{} holds shards already, such as {shard}", out.display()))
                .hint("choose another directory, or remove the shards first"))
        }
        None => Ok(()),
    }
}

/// Returns the `index`-th of `parts` ranges that divide `0..len`, whose lengths differ by at most
/// one.
fn part(len: usize, parts: usize, index: usize) -> Range<usize> {
    let share = len / parts;
    let rest = len % parts;
    let start = index * share + index.min(rest);
    start..start + share + usize::from(index < rest)
}

/// Formats bytes as lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Files under temporary names, which are removed on drop unless published.
#[derive(Default)]
struct Staged {
    /// The temporary and final names.
    files: Vec<(PathBuf, PathBuf)>,
}

impl Staged {
    /// Returns the temporary name for `path`, hidden and in the same directory.
    fn add(&mut self, path: PathBuf) -> &Path {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
        self.files.push((temporary, path));
        &self.files[self.files.len() - 1].0
    }

    /// Renames all files to their final names. If two imports write into one directory at once, the
    /// later one gets an error.
    fn publish(&self) -> Result<()> {
        let out = self.files.first().and_then(|(_, path)| path.parent());
        let directory = out
            .map(|out| std::fs::File::open(out).map_err(|e| Error::io("open", out, e)))
            .transpose()?;
        // Held until all files are renamed. If directories cannot be locked, the time between the
        // check and the last rename is short.
        if let Some(Err(e)) = directory.as_ref().map(std::fs::File::lock) {
            log::debug!("an import proceeds without a lock: {e}");
        }
        out.map_or(Ok(()), refuse_shards)?;
        for (temporary, path) in &self.files {
            std::fs::rename(temporary, path).map_err(|e| Error::io("write", path, e))?;
        }
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        for (temporary, _) in &self.files {
            // Already renamed if published; otherwise nothing better can be done.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_nearly_equally() {
        for (len, parts) in [(10, 3), (9, 3), (3, 3), (1000, 7)] {
            let ranges: Vec<_> = (0..parts).map(|index| part(len, parts, index)).collect();
            assert_eq!((ranges[0].start, ranges[parts - 1].end), (0, len));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(ranges.iter().all(|range| range.len() - len / parts <= 1));
        }
    }

    /// Returns an import of one shard with this content, not yet published.
    fn stage(dir: &Path, text: &str) -> Staged {
        let mut staged = Staged::default();
        let temporary = staged.add(dir.join("train-00000.h5")).with_extension(text);
        std::fs::write(&temporary, text).unwrap();
        staged.files[0].0 = temporary;
        staged
    }

    #[test]
    fn of_two_imports_into_one_directory_the_later_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let one = stage(dir.path(), "one");
        let other = stage(dir.path(), "other");
        one.publish().unwrap();
        let error = other.publish().unwrap_err().to_string();
        assert!(error.contains("holds shards already, such as train-00000.h5"), "{error}");
        drop(other);
        assert_eq!(std::fs::read_to_string(dir.path().join("train-00000.h5")).unwrap(), "one");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn failed_imports_leave_no_files() {
        let dir = tempfile::tempdir().unwrap();
        let mut staged = Staged::default();
        std::fs::write(staged.add(dir.path().join("a.h5")), "half").unwrap();
        drop(staged);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
