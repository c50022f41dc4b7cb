//! The content of one HDF5 file: its datasets and its origin.

use std::path::Path;

use hdf5::filters::Filter;
use serde::{Deserialize, Serialize};

use super::columns::COLUMNS;
use super::dtype::Dtype;
use super::format::{CHECKSUMS, Format, Header, TOKENIZER};
use super::h5;
use super::import::class_names;
use super::packing::is_dimension_scale;
use super::walk::dataset_names;
use hpctrain_base::error::{Error, Result};

/// A description of an HDF5 file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inspected {
    /// The name of the file.
    pub file: String,
    /// The datasets of the file.
    pub datasets: Vec<StoredDataset>,
    /// The origin of the content, as far as the file records it.
    pub origin: String,
    /// The names of the classes, if the file has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<Vec<String>>,
}

/// A description of a dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoredDataset {
    /// The path of the dataset in the file.
    pub name: String,
    /// The shape of the dataset.
    pub shape: Vec<usize>,
    /// The type of the elements.
    #[serde(rename = "type")]
    pub dtype: String,
    /// `contiguous`, `compact`, or the shape of the chunks.
    pub layout: String,
    /// The filters, or `none`.
    pub compression: String,
    /// The number of bytes in the file.
    pub bytes: u64,
}

/// Lists the content of a file.
pub(super) fn list_file(path: &Path) -> Result<Inspected> {
    let file = h5::open_file(path, None)?;
    let header = Header::read(&file).map_err(|e| e.at(path.display()))?;
    let datasets = describe_all(&file).map_err(|e| unreadable(path, &e))?;
    let classes = class_names(&file).map_err(|e| unreadable(path, &e))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Inspected { file: name, datasets, origin: origin(&header), classes })
}

/// Describes the datasets of samples.
fn describe_all(file: &hdf5::File) -> hdf5::Result<Vec<StoredDataset>> {
    let names = dataset_names(file)?;
    let datasets = names.iter().filter(|name| !is_about(name)).map(|name| describe(file, name));
    datasets.filter_map(hdf5::Result::transpose).collect()
}

/// Returns whether a dataset describes others rather than holding samples.
fn is_about(name: &str) -> bool {
    [COLUMNS, TOKENIZER].contains(&name)
        || name.strip_prefix(CHECKSUMS).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn unreadable(path: &Path, error: &hdf5::Error) -> Error {
    Error::io("read", path, h5::one_line(error))
}

/// Describes a dataset; returns `None` for coordinates of the axes of others.
fn describe(file: &hdf5::File, name: &str) -> hdf5::Result<Option<StoredDataset>> {
    let dataset = file.dataset(name)?;
    if is_dimension_scale(&dataset)? {
        return Ok(None);
    }
    let dtype = Dtype::from_datatype(&dataset.dtype()?)?.to_string();
    let layout = match dataset.chunk() {
        Some(chunk) => format!("chunks of {}", h5::shape(&chunk)),
        None => format!("{:?}", dataset.layout()).to_lowercase(),
    };
    let filters: Vec<String> = dataset.filters().iter().map(filter).collect();
    let compression = if filters.is_empty() { "none".to_owned() } else { filters.join(" + ") };
    let shape = dataset.get_shape()?.to_vec();
    let bytes = dataset.storage_size();
    Ok(Some(StoredDataset { name: name.to_owned(), shape, dtype, layout, compression, bytes }))
}

fn filter(filter: &Filter) -> String {
    match filter {
        Filter::Deflate(level) => format!("deflate {level}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// Returns the origin of the content of a file, as far as the file records it.
fn origin(header: &Header) -> String {
    let or_unknown = |text: Option<String>| text.unwrap_or_else(|| "unknown".to_owned());
    let number = |n: Option<u64>| or_unknown(n.map(|n| n.to_string()));
    let checksums = if header.has_checksums() { "" } else { ", no checksums" };
    let split = or_unknown(header.split.clone());
    let source = or_unknown(header.source.clone());
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
            "rows, format version {version}{}, split {split}, num_shards {}, source {source}{checksums}",
            header
                .tokenizer
                .as_ref()
                .map_or(String::new(), |of| format!(", tokenizer {}", of.name())),
            number(header.num_shards),
        ),
    }
}
