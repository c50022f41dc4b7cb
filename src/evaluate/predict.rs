//! Outputs of a network for every sample of a data set, in the order of its rows.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use hdf5::File;
use tempfile::{Builder, TempPath};

use super::tally::likeliest;
use crate::backend::Kernels;
use crate::data::{Batch, Source, one_line};
use crate::engine::{Model, feed};
use crate::error::{Error, Result};
use crate::hdf5_files;

/// The file that outputs go to: `/outputs`, a row for each sample, and where the network tells classes apart, `/classes` with
/// the likeliest of each. It gets its name when it is whole.
pub struct Predictions {
    path: PathBuf,
    /// Removed unless it gets its name.
    temporary: TempPath,
    file: File,
    outputs: hdf5::Dataset,
    classes: Option<hdf5::Dataset>,
}

impl Predictions {
    /// A file for so many rows of so many outputs.
    ///
    /// # Errors
    /// There is a file at `path` already, or the file system refused.
    pub fn create(path: &Path, rows: usize, width: usize, with_classes: bool) -> Result<Self> {
        if path.exists() {
            return Err(Error::input(format!("{} exists", path.display())).hint("choose another --out, or remove it"));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // As other new files are: the process's mask applies.
        let temporary =
            Builder::new().prefix(".predictions").permissions(Permissions::from_mode(0o666)).tempfile_in(folder);
        let temporary = temporary.map_err(|e| Error::io("create", path, e))?.into_temp_path();
        let create = || -> hdf5::Result<_> {
            let file = hdf5_files::create(&temporary)?;
            let outputs = file.new_dataset::<f32>().shape([rows, width]).create("outputs")?;
            let classes = match with_classes {
                true => Some(file.new_dataset::<u32>().shape(rows).create("classes")?),
                false => None,
            };
            Ok((file, outputs, classes))
        };
        let (file, outputs, classes) = create().map_err(|e| Error::io("create", path, one_line(&e)))?;
        Ok(Self { path: path.to_path_buf(), temporary, file, outputs, classes })
    }

    /// Writes the outputs of rows from `first` on.
    fn write(&self, first: usize, values: &[f32]) -> Result<()> {
        let width = self.outputs.shape()[1];
        let rows = values.len() / width;
        let write = || -> hdf5::Result<()> {
            let block = ndarray::ArrayView2::from_shape((rows, width), values).map_err(|e| e.to_string())?;
            self.outputs.write_slice(block, ndarray::s![first..first + rows, ..])?;
            if let Some(classes) = &self.classes {
                let likeliest: Vec<u32> = values.chunks(width).map(|row| likeliest(row) as u32).collect();
                classes.write_slice(&likeliest, ndarray::s![first..first + rows])?;
            }
            Ok(())
        };
        write().map_err(|e| Error::io("write", &self.path, one_line(&e)))
    }

    /// Gives the file its name.
    fn finish(self) -> Result<()> {
        self.file.close().map_err(|e| Error::io("write", &self.path, one_line(&e)))?;
        let durable = std::fs::File::open(&self.temporary).and_then(|file| file.sync_all());
        let named = durable.and_then(|()| self.temporary.persist(&self.path).map_err(|e| e.error));
        named.map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Computes the outputs of all samples of `dataset`, `chunk` at a time. Collective over the ranks of the model: chunks go round
/// those with different data, and the rank of the last stage with `to` writes all of them in the order of the rows, each once.
///
/// # Errors
/// A failure of the data, the device, the file system, or a message between ranks.
pub fn predict<B: Kernels>(
    model: &mut Model<B>,
    mut dataset: impl Source,
    chunk: u64,
    to: Option<Predictions>,
) -> Result<()> {
    let data = model.sharded.data().clone();
    let (samples, ranks) = (dataset.samples(), data.size() as u64);
    let chunks = samples.div_ceil(chunk);
    for round in 0..chunks.div_ceil(ranks) {
        // Every rank computes in every round, because gathers of parameters are collective; results beyond the last
        // chunk do not count.
        let mine = round * ranks + data.rank() as u64;
        let at = mine.min(chunks - 1) * chunk;
        let batch = Batch::read(&mut dataset, at..samples.min(at + chunk), at..);
        let micro = feed::micro(&model.backend, &data.agree(batch)?, 1, 0, model.sharded.stage())?;
        let Some(output) = model.output(&micro)? else { continue };
        let mut values = vec![0.0; B::len(&output)];
        model.backend.download(B::all(&output), &mut values)?;
        let message = if mine < chunks { bytemuck::cast_slice(&values).to_vec() } else { vec![] };
        let all = data.gather_bytes(message).wait()?;
        let written = to.as_ref().map_or(Ok(()), |to| {
            for (bytes, chunk_number) in all.iter().zip(round * ranks..).filter(|(bytes, _)| !bytes.is_empty()) {
                let numbers: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
                to.write((chunk_number * chunk) as usize, &numbers)?;
            }
            Ok(())
        });
        data.agree(written)?;
    }
    data.agree(to.map_or(Ok(()), Predictions::finish))
}
