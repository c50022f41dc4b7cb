//! From a table with a header to shards.

use std::path::PathBuf;

use csv::{Reader, StringRecord};

use super::content;
use super::samples::{Imported, Inputs, Kept, NotFinite, Rows};
use crate::error::{Error, Result};

/// What to import, and how.
#[derive(Debug, Clone)]
pub struct ImportCsv {
    /// The table: a line of names, then a line for each sample.
    pub input: PathBuf,
    /// Names of the columns to predict. All others are inputs.
    pub targets: Vec<String>,
    /// Name of the column with the weights of samples, neither input nor target.
    pub weight: Option<String>,
    /// Targets are numbers, even where they look like classes.
    pub regression: bool,
    /// Where the rows go.
    pub kept: Kept,
}

/// Writes every line as a sample. Targets are classes if there is one column of them that holds integers from 0 on.
///
/// # Errors
/// The file is missing, a line has not as many cells as the header, a cell is no number or a weight less than 0, there is no
/// such column, or as for every import.
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
    let of_weight = import.weight.as_ref().map(place).transpose()?;
    if let (Some(name), Some(column)) = (&import.weight, of_weight)
        && of_targets.contains(&column)
    {
        return Err(Error::input(format!("{path}: column {name:?} is a target and the weight"))
            .hint("name another column with --weight, or leave it out"));
    }
    let inputs_of_row = header.len() - of_targets.len() - usize::from(of_weight.is_some());
    if of_targets.is_empty() || inputs_of_row == 0 {
        return Err(Error::input(format!("{path}: {} columns, {} of them targets", header.len(), of_targets.len()))
            .hint("name the columns to predict with --target, and leave some as inputs"));
    }
    let skips = import.kept.not_finite == NotFinite::Skip;
    let number = |cell: &str| match cell.trim() {
        // How tables have what is missing.
        "" if skips => Some(f64::NAN),
        cell => cell.parse().ok().filter(|x: &f64| skips || (*x as f32).is_finite()),
    };
    let (mut inputs, mut targets, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    let (mut record, mut row) = (StringRecord::new(), vec![0.0; header.len()]);
    let mut rows = 0;
    while reader.read_record(&mut record).map_err(|e| malformed(e.to_string()))? {
        let line = record.position().map_or(0, csv::Position::line);
        for (column, cell) in record.iter().enumerate() {
            row[column] = number(cell).ok_or_else(|| {
                malformed(format!(
                    "line {line}, column {:?}: {cell:?} is no number",
                    header.get(column).unwrap_or_default()
                ))
            })?;
            if of_weight == Some(column) {
                if row[column] < 0.0 {
                    return Err(malformed(format!("line {line}: a weight of {}, less than 0", row[column])));
                }
                weights.push(row[column]);
            } else if !of_targets.contains(&column) {
                inputs.push(row[column] as f32);
            }
        }
        targets.extend(of_targets.iter().map(|column| row[*column]));
        rows += 1;
    }
    if rows == 0 {
        return Err(Error::input(format!("{path}: no lines after the header")).hint("give a table with some samples"));
    }
    let source = import.input.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let places = std::array::from_fn(|_| path.to_string());
    let (inputs, shape, width) = (Inputs::Numbers(inputs), vec![inputs_of_row], of_targets.len());
    let regression = import.regression;
    Rows { inputs, shape, targets, width, weights, regression, source, places, files: None }.write(&import.kept)
}
