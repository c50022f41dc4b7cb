//! Outputs as datasets of an HDF5 file.

use std::path::Path;

use hdf5::File;
use hdf5::types::VarLenUnicode;

use super::row_ids::RowIds;
use super::schema::OutputSchema;
use hpctrain_base::error::{Error, Result};
use hpctrain_data::hdf5_open;
use hpctrain_data::one_line;

/// An HDF5 file of outputs.
pub(super) struct Arrays {
    file: File,
    outputs: hdf5::Dataset,
    classes: Option<hdf5::Dataset>,
    /// Columns beside, but for numbers of rows, which are those of the datasets.
    beside: Vec<hdf5::Dataset>,
}

impl Arrays {
    /// A file for so many rows. Errors have no path.
    pub fn create(
        path: &Path,
        rows: usize,
        meaning: &OutputSchema,
        beside: &RowIds,
    ) -> Result<Self> {
        let names: &[String] = if beside.is_number() { &[] } else { beside.names() };
        if let Some(name) = names.iter().find(|name| name.is_empty() || name.contains(['/', '.'])) {
            return Err(Error::input(format!("HDF5 has no dataset of the name {name:?}"))
                .hint("write a table or lines of JSON: --out FILE.csv or FILE.jsonl"));
        }
        let create = || -> hdf5::Result<_> {
            let file = hdf5_open::create(path)?;
            let outputs =
                file.new_dataset::<f32>().shape([rows, meaning.width()]).create("outputs")?;
            let classes = match meaning.has_class() {
                true => Some(file.new_dataset::<u32>().shape(rows).create("classes")?),
                false => None,
            };
            let given = texts(meaning.given_classes().iter())?;
            if !given.is_empty() {
                file.new_dataset::<VarLenUnicode>()
                    .shape(given.len())
                    .create("class_names")?
                    .write_raw(&given)?;
            }
            let group =
                if names.is_empty() { None } else { Some(hdf5_open::create_group(&file, "rows")?) };
            let column = |name: &String| {
                group.as_ref().map(|group| {
                    group.new_dataset::<VarLenUnicode>().shape(rows).create(name.as_str())
                })
            };
            let beside = names.iter().filter_map(column).collect::<hdf5::Result<Vec<_>>>()?;
            Ok(Self { file, outputs, classes, beside })
        };
        create().map_err(|e| Error::input(format!("cannot be created: {}", one_line(&e))))
    }

    /// Writes rows from `first` on; returns HDF5's words if it refuses.
    pub fn write(
        &mut self,
        first: usize,
        values: &[f32],
        meaning: &OutputSchema,
        beside: &RowIds,
        names: &[Vec<String>],
    ) -> std::result::Result<(), String> {
        let width = meaning.width();
        let rows = names.len();
        let write = || -> hdf5::Result<()> {
            let block = ndarray::ArrayView2::from_shape((rows, width), values)
                .map_err(|e| e.to_string())?;
            self.outputs.write_slice(block, (first..first + rows, ..))?;
            if let Some(classes) = &self.classes {
                let likeliest: Vec<u32> =
                    values.chunks(width).map(|row| meaning.class(row) as u32).collect();
                classes.write_slice(&likeliest, first..first + rows)?;
            }
            for (place, column) in self.beside.iter().enumerate().filter(|_| !beside.is_number()) {
                let cells = texts(names.iter().map(|cells| &cells[place]))?;
                column.write_slice(&cells, first..first + rows)?;
            }
            Ok(())
        };
        write().map_err(|e| one_line(&e))
    }

    /// All is written.
    pub fn close(self) -> std::result::Result<(), String> {
        let Self { file, outputs, classes, beside } = self;
        drop((outputs, classes, beside));
        file.close().map_err(|e| one_line(&e))
    }
}

fn texts<'a>(all: impl Iterator<Item = &'a String>) -> hdf5::Result<Vec<VarLenUnicode>> {
    all.map(|text| text.parse().map_err(|_| format!("{text:?} is no text of HDF5").into()))
        .collect()
}
