//! Files of predictions, with a row for each sample: CSV, JSON lines or HDF5.

mod hdf5;
mod row_ids;
mod schema;
mod text;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tempfile::{Builder, TempPath};

use hpctrain_base::error::{Error, Result};

use hdf5::Arrays;
use text::Lines;

pub use row_ids::RowIds;
pub use schema::OutputSchema;

/// The format of a file of predictions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Hdf5,
    Csv,
    JsonLines,
}

impl Format {
    /// Returns the format for a file name by its extension.
    fn from_extension(path: &Path) -> Result<Self> {
        let extension =
            path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
        match extension.as_deref() {
            Some("h5" | "hdf5") => Ok(Self::Hdf5),
            Some("csv") => Ok(Self::Csv),
            Some("jsonl" | "ndjson") => Ok(Self::JsonLines),
            _ => Err(Error::input(format!("{}: unknown file extension", path.display()))
                .hint("name it FILE.csv, FILE.jsonl (JSON lines) or FILE.h5 (HDF5)")),
        }
    }
}

enum Sink {
    Arrays(Arrays),
    Lines(Box<Lines>),
}

/// A file of predictions, in the format given by its extension. It is written under a temporary
/// name and renamed when it is complete.
///
/// * `.csv`: a header, then a line for each row;
/// * `.jsonl`: an object for each row;
/// * `.h5`: `/outputs`, the raw outputs, a row for each sample; for classifiers also `/classes`,
///   the index of the likeliest class of each sample, and `/class_names` if classes have names.
pub struct Predictions {
    path: PathBuf,
    /// Removed when dropped, unless it was renamed.
    temporary: TempPath,
    sink: Sink,
    schema: OutputSchema,
    ids: RowIds,
}

impl Predictions {
    /// Creates a file for `rows` rows of outputs with this schema, next to the ids of the rows.
    ///
    /// # Errors
    /// Returns an error if there is a file at `path` already, if its extension is unknown, or if it
    /// cannot be created.
    pub fn create(path: &Path, rows: usize, schema: OutputSchema, ids: RowIds) -> Result<Self> {
        let format = Format::from_extension(path)?;
        if path.exists() {
            return Err(Error::input(format!("{} exists already", path.display()))
                .hint("choose another --out, or remove the file"));
        }
        // The umask applies, as for other new files.
        let temporary = Builder::new()
            .prefix(".predictions")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder(path));
        let (file, temporary) = temporary.map_err(|e| Error::io("create", path, e))?.into_parts();
        let sink = match format {
            Format::Hdf5 => Sink::Arrays(
                Arrays::create(&temporary, rows, &schema, &ids)
                    .map_err(|e| e.at(path.display()))?,
            ),
            Format::Csv => Sink::Lines(Box::new(Lines::table(file, path, &schema, &ids)?)),
            Format::JsonLines => Sink::Lines(Box::new(Lines::json(file, path))),
        };
        Ok(Self { path: path.to_path_buf(), temporary, sink, schema, ids })
    }

    /// Writes the outputs of the rows starting at `first`, which must follow those written before.
    pub(super) fn write(&mut self, first: usize, values: &[f32]) -> Result<()> {
        let rows = values.len() / self.schema.width();
        let names = self.ids.next(rows)?;
        match &mut self.sink {
            Sink::Arrays(arrays) => arrays
                .write(first, values, &self.schema, &self.ids, &names)
                .map_err(|e| Error::io("write", &self.path, e)),
            Sink::Lines(lines) => lines.write(values, &self.schema, &self.ids, &names),
        }
    }

    /// Completes the file and gives it its name.
    pub(super) fn finish(self) -> Result<()> {
        match self.sink {
            Sink::Arrays(arrays) => {
                arrays.close().map_err(|e| Error::io("write", &self.path, e))?
            }
            Sink::Lines(lines) => lines.close()?,
        }
        let durable = std::fs::File::open(&self.temporary).and_then(|file| file.sync_all());
        let named = durable.and_then(|()| self.temporary.persist(&self.path).map_err(|e| e.error));
        named.map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Returns the directory of a file.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
