//! From a table with a header to shards.

use std::path::PathBuf;

use csv::{Reader, StringRecord};

use super::content;
use super::samples::{Imported, Inputs, Kept, Rows, Targets};
use crate::error::{Error, Result};

/// What to import, and how.
#[derive(Debug, Clone)]
pub struct ImportCsv {
    /// The table: a line of names, then a line for each sample.
    pub input: PathBuf,
    /// Names of the columns to predict. All others are inputs.
    pub targets: Vec<String>,
    /// Targets are numbers, even where they look like classes.
    pub regression: bool,
    /// Where the rows go.
    pub kept: Kept,
}

/// Writes every line as a sample. Targets are classes if there is one column of them that holds integers from 0 on.
///
/// # Errors
/// The file is missing, a line has not as many cells as the header or a cell is no number, there is no such column, or as
/// for every import.
pub fn import_csv(import: &ImportCsv) -> Result<Imported> {
    let path = import.input.display();
    let malformed = |what: String| Error::input(format!("{path}: {what}")).hint("mend the line, or leave it out");
    let table = content(&import.input, "give the path of a table of numbers with a header")?;
    let mut reader = Reader::from_reader(&table[..]);
    let header = reader.headers().map_err(|e| malformed(e.to_string()))?.clone();
    let place = |name: &String| {
        header.iter().position(|column| column.trim() == name).ok_or_else(|| {
            let names: Vec<&str> = header.iter().collect();
            Error::input(format!("{path}: there is no column {name:?}"))
                .hint(format!("its columns: {}", names.join(", ")))
        })
    };
    let of_targets = import.targets.iter().map(place).collect::<Result<Vec<usize>>>()?;
    let width = header.len() - of_targets.len();
    if of_targets.is_empty() || width == 0 {
        return Err(Error::input(format!("{path}: {} columns, {} of them targets", header.len(), of_targets.len()))
            .hint("name the columns to predict with --target, and leave some as inputs"));
    }
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    let (mut record, mut rows) = (StringRecord::new(), 0);
    while reader.read_record(&mut record).map_err(|e| malformed(e.to_string()))? {
        let line = record.position().map_or(0, csv::Position::line);
        for (column, cell) in record.iter().enumerate() {
            let number: Option<f32> = cell.trim().parse().ok().filter(|x: &f32| x.is_finite());
            let number = number.ok_or_else(|| {
                malformed(format!(
                    "line {line}, column {:?}: {cell:?} is no number",
                    header.get(column).unwrap_or_default()
                ))
            })?;
            if !of_targets.contains(&column) {
                inputs.push(number);
            }
        }
        let cell = |column: &usize| record.get(*column).and_then(|cell| cell.trim().parse::<f32>().ok()).unwrap_or(0.0);
        targets.extend(of_targets.iter().map(cell));
        rows += 1;
    }
    if rows == 0 {
        return Err(Error::input(format!("{path}: no lines after the header")).hint("give a table with some samples"));
    }
    // Up to 2²⁴ an f32 is exact.
    let is_class = |x: &f32| *x >= 0.0 && x.fract() == 0.0 && *x < 16_777_216.0;
    let targets = match of_targets.len() {
        1 if !import.regression && targets.iter().all(is_class) => {
            Targets::Classes(targets.into_iter().map(|x| x as u32).collect())
        }
        columns => Targets::Values(targets, columns),
    };
    let source = import.input.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Rows { inputs: Inputs::Numbers(inputs), shape: vec![width], targets, source }.write(&import.kept)
}
