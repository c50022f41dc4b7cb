//! Outputs as text: a table of comma-separated values, or lines of JSON.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use csv::Writer;
use serde_json::{Map, Value};

use super::row_ids::RowIds;
use super::schema::{DecodedRow, OutputSchema};
use hpctrain_base::error::{Error, Result};

/// A file of lines.
pub(super) struct Lines {
    path: PathBuf,
    to: To,
}

enum To {
    Table(Box<Writer<File>>),
    Json(BufWriter<File>),
}

impl Lines {
    /// A table with a line of names.
    pub fn table(file: File, path: &Path, meaning: &OutputSchema, beside: &RowIds) -> Result<Self> {
        let mut table = Writer::from_writer(file);
        let numbers = meaning.names().iter().map(|name| match meaning.is_probable() {
            true => format!("p_{name}"),
            false => name.clone(),
        });
        let class = meaning.has_class().then(|| "class".to_owned());
        let header = beside.names().iter().cloned().chain(class).chain(numbers);
        table.write_record(header).map_err(|e| refused(path, e))?;
        Ok(Self { path: path.to_path_buf(), to: To::Table(Box::new(table)) })
    }

    /// An object for each row.
    pub fn json(file: File, path: &Path) -> Self {
        Self { path: path.to_path_buf(), to: To::Json(BufWriter::new(file)) }
    }

    /// Writes rows of outputs beside their names.
    pub fn write(
        &mut self,
        values: &[f32],
        meaning: &OutputSchema,
        beside: &RowIds,
        names: &[Vec<String>],
    ) -> Result<()> {
        for (outputs, cells) in values.chunks(meaning.width()).zip(names) {
            let told = meaning.tell(outputs);
            match &mut self.to {
                To::Table(table) => {
                    let class = told.class.map(|class| meaning.names()[class].clone());
                    let numbers = told.numbers.iter().map(ToString::to_string);
                    let line = cells.iter().cloned().chain(class).chain(numbers);
                    table.write_record(line).map_err(|e| refused(&self.path, e))?;
                }
                To::Json(to) => {
                    let line = object(&told, meaning, beside, cells);
                    writeln!(to, "{line}").map_err(|e| Error::io("write", &self.path, e))?;
                }
            }
        }
        Ok(())
    }

    /// All is written.
    pub fn close(self) -> Result<()> {
        let flushed = match self.to {
            To::Table(mut table) => table.flush(),
            To::Json(mut to) => to.flush(),
        };
        flushed.map_err(|e| Error::io("write", &self.path, e))
    }
}

/// A row as JSON. Numbers that are not finite are `null`, for which JSON has no other word.
fn object(told: &DecodedRow, meaning: &OutputSchema, beside: &RowIds, cells: &[String]) -> Value {
    let mut object = Map::new();
    for (name, cell) in beside.names().iter().zip(cells) {
        let number = cell.parse().ok().filter(|_| beside.is_number());
        object.insert(
            name.clone(),
            number.map_or_else(|| Value::from(cell.clone()), |number: u64| Value::from(number)),
        );
    }
    if let Some(class) = told.class {
        object.insert("class".into(), Value::from(meaning.names()[class].clone()));
    }
    let numbers = meaning.names().iter().cloned().zip(told.numbers.iter().map(|x| shortest(*x)));
    let of = if meaning.is_probable() { "probabilities" } else { "outputs" };
    object.insert(of.into(), Value::Object(numbers.collect()));
    Value::Object(object)
}

/// The shortest digits that read back to the same f32.
fn shortest(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn refused(path: &Path, e: csv::Error) -> Error {
    match e.into_kind() {
        csv::ErrorKind::Io(e) => Error::io("write", path, e),
        other => Error::internal(format!("{}: a table of predictions: {other:?}", path.display())),
    }
}
