//! The content of HDF5 files, as a human-readable table or a serialisable object.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::h5;
use super::import::numbered;
pub use super::listing::{Inspected, StoredDataset};
use super::sandbox::Sandbox;
use super::spec::file_names;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::escape::in_one_line;

/// The contents of HDF5 files.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Contents {
    /// The files, sorted.
    pub files: Vec<Inspected>,
}

/// Describes one HDF5 file, or all `.h5` files of a directory.
///
/// # Errors
/// Returns an error if there is no such file, or if one cannot be read.
pub fn inspect(path: &Path) -> Result<Contents> {
    let mut sandbox = Sandbox::default();
    let files = h5_files(path)?.iter().map(|path| sandbox.inspect(path)).collect::<Result<_>>()?;
    Ok(Contents { files })
}

/// Formats a table for display, and notes below it, each with the files that it applies to.
impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![
            ["file", "dataset", "shape", "type", "layout", "compression", "bytes"]
                .map(str::to_owned),
        ];
        let mut notes: Vec<(String, Vec<String>)> = Vec::new();
        for Inspected { file, datasets, origin, classes } in &self.files {
            for StoredDataset { name, shape, dtype, layout, compression, bytes } in datasets {
                let cells =
                    [file, name, &h5::shape(shape), dtype, layout, compression, &bytes.to_string()];
                rows.push(cells.map(String::clone));
            }
            let classes = classes.iter().map(|names| format!("classes {}", numbered(names)));
            for note in std::iter::once(origin.clone()).chain(classes) {
                match notes.iter_mut().find(|(known, _)| *known == note) {
                    Some((_, files)) => files.push(file.clone()),
                    None => notes.push((note, vec![file.clone()])),
                }
            }
        }
        f.write_str(&table(&rows))?;
        notes.iter().try_for_each(|(note, files)| {
            writeln!(f, "\n{}", in_one_line(&format!("{}: {note}", files.join(", "))))
        })
    }
}

/// Returns the file itself, or the `.h5` files of a directory, sorted; at least one.
pub(super) fn h5_files(path: &Path) -> Result<Vec<PathBuf>> {
    let metadata = std::fs::metadata(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => Error::input(format!("{} does not exist", path.display()))
            .hint("give an HDF5 file or a directory of .h5 files"),
        _ => Error::io("read", path, e),
    })?;
    if metadata.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let names = file_names(path)?;
    let files: Vec<PathBuf> =
        names.iter().filter(|name| name.ends_with(".h5")).map(|name| path.join(name)).collect();
    if files.is_empty() {
        return Err(Error::input(format!("no .h5 file in {}", path.display()))
            .hint("give an HDF5 file or a directory of .h5 files"));
    }
    Ok(files)
}

/// Formats columns as wide as their widest cell, separated by two spaces. All rows have the same
/// number of cells, and each becomes one line, whatever its cells contain.
pub fn table(rows: &[impl AsRef<[String]>]) -> String {
    let seen = |row: &[String]| row.iter().map(|cell| in_one_line(cell).into_owned()).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(|row| seen(row.as_ref())).collect();
    let columns = rows.first().map_or(0, Vec::len);
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
        text += cells.join("  ").trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [["a", "bb", "c"], ["aaa", "b", "ccc"]].map(|row| row.map(str::to_owned));
        assert_eq!(table(&rows), "a    bb  c\naaa  b   ccc\n");
    }
}
