//! Cells of some columns of a table, as they are.

use std::path::{Path, PathBuf};

use csv::StringRecord;

use super::format::{TableFormat, place, refused};
use hpctrain_base::error::Result;

/// Cells of the columns of these names, line by line, of a table whose lines are all as long as its
/// first.
///
/// # Errors
/// There is no such table, no such column or two of its name. Each line has its own.
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
