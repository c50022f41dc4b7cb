//! Predictions as datasets of an HDF5 file.

use std::path::Path;

use hdf5::File;
use hdf5::types::VarLenUnicode;

use super::row_ids::RowIds;
use super::schema::OutputSchema;
use hpctrain_base::error::{Error, Result};
use hpctrain_data::hdf5_open;
use hpctrain_data::one_line;

/// An HDF5 file of predictions.
pub(super) struct Arrays {
    file: File,
    outputs: hdf5::Dataset,
    classes: Option<hdf5::Dataset>,
    /// The columns that identify rows. Empty if rows are identified by their numbers, which are
    /// the indices of the datasets.
    id_columns: Vec<hdf5::Dataset>,
}

impl Arrays {
    /// Creates a file for `rows` rows. The path is not part of error messages.
    pub fn create(path: &Path, rows: usize, schema: &OutputSchema, ids: &RowIds) -> Result<Self> {
        let names: &[String] = if ids.is_number() { &[] } else { ids.names() };
        if let Some(name) = names.iter().find(|name| name.is_empty() || name.contains(['/', '.'])) {
            return Err(Error::input(format!("a dataset of HDF5 cannot have the name {name:?}"))
                .hint("write CSV or JSON lines instead: --out FILE.csv or FILE.jsonl"));
        }
        Self::create_datasets(path, rows, schema, names)
            .map_err(|e| Error::input(format!("cannot be created: {}", one_line(&e))))
    }

    /// Creates the file and its datasets, with columns of these names for the ids of rows.
    fn create_datasets(
        path: &Path,
        rows: usize,
        schema: &OutputSchema,
        names: &[String],
    ) -> hdf5::Result<Self> {
        let file = hdf5_open::create(path)?;
        let outputs = file.new_dataset::<f32>().shape([rows, schema.width()]).create("outputs")?;
        let classes = match schema.has_class() {
            true => Some(file.new_dataset::<u32>().shape(rows).create("classes")?),
            false => None,
        };
        let given = texts(schema.given_classes().iter())?;
        if !given.is_empty() {
            file.new_dataset::<VarLenUnicode>()
                .shape(given.len())
                .create("class_names")?
                .write_raw(&given)?;
        }
        let mut id_columns = Vec::with_capacity(names.len());
        if !names.is_empty() {
            let group = hdf5_open::create_group(&file, "rows")?;
            for name in names {
                let column = group.new_dataset::<VarLenUnicode>().shape(rows);
                id_columns.push(column.create(name.as_str())?);
            }
        }
        Ok(Self { file, outputs, classes, id_columns })
    }

    /// Writes rows starting at `first`. An error is the message of HDF5.
    pub fn write(
        &mut self,
        first: usize,
        values: &[f32],
        schema: &OutputSchema,
        ids: &RowIds,
        names: &[Vec<String>],
    ) -> std::result::Result<(), String> {
        self.write_datasets(first, values, schema, ids, names).map_err(|e| one_line(&e))
    }

    /// Does the work of [`Self::write`].
    fn write_datasets(
        &self,
        first: usize,
        values: &[f32],
        schema: &OutputSchema,
        ids: &RowIds,
        names: &[Vec<String>],
    ) -> hdf5::Result<()> {
        let width = schema.width();
        let rows = names.len();
        let block =
            ndarray::ArrayView2::from_shape((rows, width), values).map_err(|e| e.to_string())?;
        self.outputs.write_slice(block, (first..first + rows, ..))?;
        if let Some(classes) = &self.classes {
            let likeliest: Vec<u32> =
                values.chunks(width).map(|row| schema.class(row) as u32).collect();
            classes.write_slice(&likeliest, first..first + rows)?;
        }
        for (place, column) in self.id_columns.iter().enumerate().filter(|_| !ids.is_number()) {
            let cells = texts(names.iter().map(|cells| &cells[place]))?;
            column.write_slice(&cells, first..first + rows)?;
        }
        Ok(())
    }

    /// Closes the file, after all rows are written.
    pub fn close(self) -> std::result::Result<(), String> {
        let Self { file, outputs, classes, id_columns } = self;
        drop((outputs, classes, id_columns));
        file.close().map_err(|e| one_line(&e))
    }
}

fn texts<'a>(all: impl Iterator<Item = &'a String>) -> hdf5::Result<Vec<VarLenUnicode>> {
    all.map(|text| {
        text.parse().map_err(|_| {
            format!("{text:?} contains a NUL character, which HDF5 text cannot have").into()
        })
    })
    .collect()
}
