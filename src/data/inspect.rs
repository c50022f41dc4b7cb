//! Content of HDF5 files, as a table for people or an object for programs.

use std::fmt;
use std::path::{Path, PathBuf};

use hdf5::filters::Filter;
use serde::{Deserialize, Serialize};

use super::columns::COLUMNS;
use super::dtype::Dtype;
use super::format::{CHECKSUMS, Format, Header, TOKENIZER};
use super::h5;
use super::import::{class_names, numbered};
use super::packing::is_dimension_scale;
use super::sandbox::Sandbox;
use super::spec::file_names;
use super::walk::dataset_names;
use crate::error::{Error, Result};
use crate::visible::in_one_line;

/// Contents of HDF5 files.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Contents {
    /// The files, sorted.
    pub files: Vec<Inspected>,
}

/// An HDF5 file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inspected {
    /// Its name.
    pub file: String,
    /// Its datasets.
    pub datasets: Vec<Stored>,
    /// Origin of its content, as far as it names it.
    pub origin: String,
    /// Names of classes, where it has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<Vec<String>>,
}

/// A dataset of a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stored {
    /// Its path in the file.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Type of its elements.
    #[serde(rename = "type")]
    pub dtype: String,
    /// Contiguous, compact, or chunks of a shape.
    pub layout: String,
    /// Filters, or `none`.
    pub compression: String,
    /// Bytes in the file.
    pub bytes: u64,
}

/// Looks at one HDF5 file, or all `.h5` files of a directory.
///
/// # Errors
/// There is none, or one cannot be read.
pub fn inspect(path: &Path) -> Result<Contents> {
    let mut sandbox = Sandbox::default();
    let files = h5_files(path)?.iter().map(|path| sandbox.inspect(path)).collect::<Result<_>>()?;
    Ok(Contents { files })
}

/// Lists the content of a file.
pub(super) fn one(path: &Path) -> Result<Inspected> {
    let file = h5::open_file(path, None)?;
    let header = Header::read(&file).map_err(|e| e.at(path.display()))?;
    let look = || -> hdf5::Result<_> {
        let names = dataset_names(&file)?;
        let datasets = names.iter().filter(|name| !is_about(name)).map(|name| describe(&file, name));
        let datasets = datasets.filter_map(hdf5::Result::transpose).collect::<hdf5::Result<Vec<_>>>()?;
        Ok((datasets, class_names(&file)?))
    };
    let (datasets, classes) = look().map_err(|e| unreadable(path, &e))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Inspected { file: name, datasets, origin: origin(&header), classes })
}

/// A table for people, and notes below it, each with the files that it applies to.
impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![["file", "dataset", "shape", "type", "layout", "compression", "bytes"].map(str::to_owned)];
        let mut notes: Vec<(String, Vec<String>)> = Vec::new();
        for Inspected { file, datasets, origin, classes } in &self.files {
            for Stored { name, shape, dtype, layout, compression, bytes } in datasets {
                let cells = [file, name, &h5::shape(shape), dtype, layout, compression, &bytes.to_string()];
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
        notes
            .iter()
            .try_for_each(|(note, files)| writeln!(f, "\n{}", in_one_line(&format!("{}: {note}", files.join(", ")))))
    }
}

/// Whether a dataset tells of others rather than hold samples.
fn is_about(name: &str) -> bool {
    [COLUMNS, TOKENIZER].contains(&name)
        || name.strip_prefix(CHECKSUMS).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The file itself, or the `.h5` files of a directory, sorted; at least one.
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
    let files: Vec<PathBuf> = names.iter().filter(|name| name.ends_with(".h5")).map(|name| path.join(name)).collect();
    if files.is_empty() {
        return Err(Error::input(format!("no .h5 file in {}", path.display()))
            .hint("give an HDF5 file or a directory of .h5 files"));
    }
    Ok(files)
}

fn unreadable(path: &Path, error: &hdf5::Error) -> Error {
    Error::io("read", path, h5::one_line(error))
}

/// Describes a dataset; none for coordinates of the axes of others.
fn describe(file: &hdf5::File, name: &str) -> hdf5::Result<Option<Stored>> {
    let dataset = file.dataset(name)?;
    if is_dimension_scale(&dataset)? {
        return Ok(None);
    }
    let dtype = Dtype::of(&dataset.dtype()?)?.to_string();
    let layout = match dataset.chunk() {
        Some(chunk) => format!("chunks of {}", h5::shape(&chunk)),
        None => format!("{:?}", dataset.layout()).to_lowercase(),
    };
    let filters: Vec<String> = dataset.filters().iter().map(filter).collect();
    let compression = if filters.is_empty() { "none".to_owned() } else { filters.join(" + ") };
    let (shape, bytes) = (dataset.get_shape()?.to_vec(), dataset.storage_size());
    Ok(Some(Stored { name: name.to_owned(), shape, dtype, layout, compression, bytes }))
}

fn filter(filter: &Filter) -> String {
    match filter {
        Filter::Deflate(level) => format!("deflate {level}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// Origin of the content of a file, as far as the file names it.
fn origin(header: &Header) -> String {
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "unknown".to_owned());
    let number = |n: Option<u64>| or_unknown(n.map(|n| n.to_string()));
    let checksums = if header.has_checksums() { "" } else { ", no checksums" };
    let (split, source) = (or_unknown(header.split.clone()), or_unknown(header.source.clone()));
    match header.format {
        None => "not written by hpctrain, no provenance, no checksums".to_owned(),
        Some((Format::Tokens, version)) => format!(
            "format version {version}, tokenizer {}, vocabulary {}, split {split}, num_shards {}, source {source} (sha256 {})",
            header.tokenizer.as_ref().map_or("unknown", |tokenizer| tokenizer.name()),
            number(header.vocabulary_size),
            number(header.num_shards),
            or_unknown(header.source_sha256.clone()),
        ),
        Some((Format::Rows, version)) => format!(
            "rows, format version {version}, split {split}, num_shards {}, source {source}{checksums}",
            number(header.num_shards),
        ),
    }
}

/// Columns as wide as their widest cell, two spaces apart. Rows have equally many cells, and a row is one line, whatever
/// is in its cells.
pub(crate) fn table(rows: &[impl AsRef<[String]>]) -> String {
    let seen = |row: &[String]| row.iter().map(|cell| in_one_line(cell).into_owned()).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(|row| seen(row.as_ref())).collect();
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
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
