//! The cells of some columns of a table as text.

use std::path::{Path, PathBuf};

use csv::StringRecord;

use super::format::{TableFormat, place, refused};
use hpctrain_base::error::Result;

/// Returns the cells of the columns with these names, line by line. All lines of the table must be
/// as long as the first.
///
/// # Errors
/// Returns an error if the table does not exist, or if a column does not exist or exists twice.
/// Each item is an error if its line cannot be read.
pub fn column_texts(
    path: &Path,
    format: &TableFormat,
    names: &[String],
) -> Result<impl Iterator<Item = Result<Vec<String>>> + Send + 'static> {
    let (mut reader, header) = format.open(path)?;
    let places =
        names.iter().map(|name| place(path, &header, name)).collect::<Result<Vec<usize>>>()?;
    let path: PathBuf = path.to_owned();
    let mut record = StringRecord::new();
    Ok(std::iter::from_fn(move || match reader.read_record(&mut record) {
        Ok(false) => None,
        Ok(true) => Some(Ok(places
            .iter()
            .map(|place| record.get(*place).unwrap_or_default().to_owned())
            .collect())),
        Err(e) => Some(Err(refused(&path, &e))),
    }))
}
