//! Rows without targets, in any format that can be imported, for prediction.

use std::path::{Path, PathBuf};

use super::csv::{Categories, ImportCsv, Missing, TableFormat, import_csv};
use super::images::{ImportImages, file_names_of, import_images};
use super::numpy::{Arrays, ImportNumpy, import_numpy};
use super::row_writer::{ImportOptions, NotFinite};
use super::unknown_values::UnknownValues;
use crate::Preprocessing;
use crate::spec::file_names;
use hpctrain_base::error::{Error, Result};

/// The format of rows without targets, detected by the name of their file or the contents of their
/// folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputFormat {
    /// A table of text.
    Table,
    /// A NumPy array.
    Array,
    /// A folder of PNG and JPEG images.
    Images,
    /// An HDF5 file or a directory of shards, which are read without an import.
    Hdf5,
}

/// Rows without targets, and what is needed to convert them to the form that a network was trained
/// on.
#[derive(Debug, Clone)]
pub struct Unlabelled {
    /// The table, array or folder.
    pub input: PathBuf,
    /// The format of a table.
    pub format: TableFormat,
    /// The treatment of a table's missing numbers. Default: that of the training table.
    pub missing: Option<Missing>,
    /// The preprocessing of the training data.
    pub learned: Preprocessing,
    /// The shape of a row of the network's inputs.
    pub shape: Vec<usize>,
}

impl InputFormat {
    /// Detects the format of the input at `path`.
    ///
    /// # Errors
    /// Returns an error if the name of the file does not identify a format, or the directory cannot
    /// be read.
    pub fn from_path(path: &Path) -> Result<Self> {
        if path.is_dir() {
            let has_shards = file_names(path)?.iter().any(|name| name.ends_with(".h5"));
            return Ok(if has_shards { Self::Hdf5 } else { Self::Images });
        }
        let extension =
            path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
        match extension.as_deref() {
            Some("csv" | "tsv") => Ok(Self::Table),
            Some("npy") => Ok(Self::Array),
            Some("h5" | "hdf5") => Ok(Self::Hdf5),
            // A path that does not exist is reported when it is opened.
            _ if !path.exists() => Ok(Self::Hdf5),
            _ => Err(Error::input(format!("{}: the format of a file with such a name is not known", path.display())).hint(
                "name it FILE.csv or FILE.tsv (a table), FILE.npy (an array of NumPy) or FILE.h5 (HDF5), or give a folder of images",
            )),
        }
    }
}

impl Unlabelled {
    /// Imports the rows, in order, as one shard in the directory `out`, which is created. Returns
    /// the values of a table that the network does not know.
    ///
    /// # Errors
    /// Returns an error if the import of that format does, or if the network does not take images
    /// but the input is a folder.
    pub fn import(&self, form: InputFormat, out: &Path) -> Result<Vec<UnknownValues>> {
        let input = &self.input;
        let options = ImportOptions {
            not_finite: NotFinite::Error,
            every: 0,
            shards: 1,
            normalize: false,
            out: out.to_path_buf(),
        };
        match form {
            InputFormat::Table => {
                let categories = match self.learned.columns {
                    Some(_) => Categories::Learned(Box::new(self.learned.clone())),
                    // The classes of the network have no names.
                    None => Categories::NONE,
                };
                if self.missing == Some(Missing::Skip) {
                    return Err(Error::input("--missing skip: every row gets a prediction")
                        .hint("fill missing numbers: --missing mean, or a number such as --missing 0"));
                }
                let format = self.format.clone();
                let missing = self.missing;
                import_csv(&ImportCsv { format, missing, categories, needs_all: true, ..ImportCsv::new(input, options) })
            }
            InputFormat::Array => {
                let arrays = Arrays::Files { features: input.clone(), labels: None, weights: None };
                import_numpy(&ImportNumpy { arrays, regression: false, options })
            }
            InputFormat::Images => {
                let [height, width, channels @ (1 | 3)] = self.shape[..] else {
                    let input = input.display();
                    let shape = &self.shape;
                    return Err(Error::input(format!(
                        "{input} is a folder, but the network takes rows of {shape:?}, not images"
                    ))
                    .hint("give a table (.csv), an array (.npy), an HDF5 file (.h5) or a directory of shards"));
                };
                let size = Some([height as u32, width as u32]);
                import_images(&ImportImages { folder: input.clone(), no_target: true, size, grey: channels == 1, options })
            }
            InputFormat::Hdf5 => return Ok(vec![]),
        }
        .map(|imported| imported.unknown)
    }

    /// Returns the names of the images in the order of their rows.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read.
    pub fn images(&self) -> Result<Vec<String>> {
        file_names_of(&self.input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_told_by_names() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["a.csv", "a.TSV", "a.npy", "a.h5", "a.txt"] {
            std::fs::write(at(name), "").unwrap();
        }
        let of = |name: &str| InputFormat::from_path(&at(name));
        assert_eq!(["a.csv", "a.TSV"].map(|name| of(name).unwrap()), [InputFormat::Table; 2]);
        assert_eq!(
            ["a.npy", "a.h5", "gone"].map(|name| of(name).unwrap()),
            [InputFormat::Array, InputFormat::Hdf5, InputFormat::Hdf5]
        );
        assert!(
            of("a.txt").unwrap_err().to_string().contains("is not known\nhint: name it FILE.csv")
        );
        assert_eq!(InputFormat::from_path(folder.path()).unwrap(), InputFormat::Hdf5);
        let images = tempfile::tempdir().unwrap();
        assert_eq!(InputFormat::from_path(images.path()).unwrap(), InputFormat::Images);
    }
}
