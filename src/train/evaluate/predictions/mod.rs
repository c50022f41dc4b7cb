//! The file of a network's outputs, a row for each sample: a table, lines of JSON, or HDF5.

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

/// The form of a file of predictions, by the end of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Hdf5,
    Csv,
    JsonLines,
}

impl Form {
    fn of(path: &Path) -> Result<Self> {
        let extension =
            path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
        match extension.as_deref() {
            Some("h5" | "hdf5") => Ok(Self::Hdf5),
            Some("csv") => Ok(Self::Csv),
            Some("jsonl" | "ndjson") => Ok(Self::JsonLines),
            _ => Err(Error::input(format!(
                "{}: the form of a file with such a name is not known",
                path.display()
            ))
            .hint("name it FILE.csv (a table), FILE.jsonl (lines of JSON) or FILE.h5 (HDF5)")),
        }
    }
}

enum Sink {
    Arrays(Arrays),
    Lines(Box<Lines>),
}

/// The file that outputs go to, in the form that the end of its name tells. It gets its name when
/// it is whole.
///
/// * `.csv`: a line of names, then a line for each row;
/// * `.jsonl`: an object for each row;
/// * `.h5`: `/outputs`, a row for each sample as the network gives it; where classes are told apart
///   `/classes` with the number of the likeliest of each, and `/class_names` if they have some.
pub struct Predictions {
    path: PathBuf,
    /// Removed unless it gets its name.
    temporary: TempPath,
    sink: Sink,
    meaning: OutputSchema,
    beside: RowIds,
}

impl Predictions {
    /// A file for so many rows of outputs with a meaning, beside names of the rows.
    ///
    /// # Errors
    /// There is a file at `path` already, its name tells no form, or the file system refused.
    pub fn create(path: &Path, rows: usize, meaning: OutputSchema, beside: RowIds) -> Result<Self> {
        let form = Form::of(path)?;
        if path.exists() {
            return Err(Error::input(format!("{} exists", path.display()))
                .hint("choose another --out, or remove it"));
        }
        // As other new files are: the process's mask applies.
        let temporary = Builder::new()
            .prefix(".predictions")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder(path));
        let (file, temporary) = temporary.map_err(|e| Error::io("create", path, e))?.into_parts();
        let sink = match form {
            Form::Hdf5 => Sink::Arrays(
                Arrays::create(&temporary, rows, &meaning, &beside)
                    .map_err(|e| e.at(path.display()))?,
            ),
            Form::Csv => Sink::Lines(Box::new(Lines::table(file, path, &meaning, &beside)?)),
            Form::JsonLines => Sink::Lines(Box::new(Lines::json(file, path))),
        };
        Ok(Self { path: path.to_path_buf(), temporary, sink, meaning, beside })
    }

    /// Writes the outputs of rows from `first` on, which follow those written before.
    pub(super) fn write(&mut self, first: usize, values: &[f32]) -> Result<()> {
        let rows = values.len() / self.meaning.width();
        let names = self.beside.next(rows)?;
        match &mut self.sink {
            Sink::Arrays(arrays) => arrays
                .write(first, values, &self.meaning, &self.beside, &names)
                .map_err(|e| Error::io("write", &self.path, e)),
            Sink::Lines(lines) => lines.write(values, &self.meaning, &self.beside, &names),
        }
    }

    /// Gives the file its name.
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

/// The directory of a file.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
