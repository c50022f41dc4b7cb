//! Predictions as text: CSV or JSON lines.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use csv::Writer;
use serde_json::{Map, Value};

use super::row_ids::RowIds;
use super::schema::{DecodedRow, OutputSchema};
use hpctrain_base::error::{Error, Result};

/// A text file of predictions.
pub(super) struct Lines {
    path: PathBuf,
    to: To,
}

enum To {
    Table(Box<Writer<File>>),
    Json(BufWriter<File>),
}

impl Lines {
    /// Creates a CSV file and writes its header.
    pub fn table(file: File, path: &Path, schema: &OutputSchema, ids: &RowIds) -> Result<Self> {
        let mut table = Writer::from_writer(file);
        let numbers = schema.names().iter().map(|name| match schema.is_probable() {
            true => format!("p_{name}"),
            false => name.clone(),
        });
        let class = schema.has_class().then(|| "class".to_owned());
        let header = ids.names().iter().cloned().chain(class).chain(numbers);
        table.write_record(header).map_err(|e| csv_error(path, e))?;
        Ok(Self { path: path.to_path_buf(), to: To::Table(Box::new(table)) })
    }

    /// Creates a JSON lines file, with an object for each row.
    pub fn json(file: File, path: &Path) -> Self {
        Self { path: path.to_path_buf(), to: To::Json(BufWriter::new(file)) }
    }

    /// Writes rows of outputs with their ids.
    pub fn write(
        &mut self,
        values: &[f32],
        schema: &OutputSchema,
        ids: &RowIds,
        names: &[Vec<String>],
    ) -> Result<()> {
        for (outputs, cells) in values.chunks(schema.width()).zip(names) {
            let row = schema.decode(outputs);
            match &mut self.to {
                To::Table(table) => {
                    let class = row.class.map(|class| schema.names()[class].clone());
                    let numbers = row.numbers.iter().map(ToString::to_string);
                    let line = cells.iter().cloned().chain(class).chain(numbers);
                    table.write_record(line).map_err(|e| csv_error(&self.path, e))?;
                }
                To::Json(to) => {
                    let line = object(&row, schema, ids, cells);
                    writeln!(to, "{line}").map_err(|e| Error::io("write", &self.path, e))?;
                }
            }
        }
        Ok(())
    }

    /// Flushes the file, after all rows are written.
    pub fn close(self) -> Result<()> {
        let flushed = match self.to {
            To::Table(mut table) => table.flush(),
            To::Json(mut to) => to.flush(),
        };
        flushed.map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Returns a row as JSON. Numbers that are not finite are `null`, since JSON cannot express them.
fn object(row: &DecodedRow, schema: &OutputSchema, ids: &RowIds, cells: &[String]) -> Value {
    let mut object = Map::new();
    for (name, cell) in ids.names().iter().zip(cells) {
        let number = cell.parse().ok().filter(|_| ids.is_number());
        object.insert(
            name.clone(),
            number.map_or_else(|| Value::from(cell.clone()), |number: u64| Value::from(number)),
        );
    }
    if let Some(class) = row.class {
        object.insert("class".into(), Value::from(schema.names()[class].clone()));
    }
    let numbers = schema.names().iter().cloned().zip(row.numbers.iter().map(|x| shortest(*x)));
    let key = if schema.is_probable() { "probabilities" } else { "outputs" };
    object.insert(key.into(), Value::Object(numbers.collect()));
    Value::Object(object)
}

/// Returns the number with the fewest digits that reads back as the same f32.
fn shortest(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn csv_error(path: &Path, e: csv::Error) -> Error {
    match e.into_kind() {
        csv::ErrorKind::Io(e) => Error::io("write", path, e),
        other => Error::internal(format!("{}: a table of predictions: {other:?}", path.display())),
    }
}
