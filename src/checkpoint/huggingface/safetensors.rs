//! Reading and writing files of the safetensors format one tensor at a time.
//!
//! A file consists of eight bytes with the length of the header, the header in JSON, and the
//! tensors one after another. The crate `safetensors` parses the header, but reads and writes only
//! whole files.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensorError};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// The size of the header's length field in bytes.
const LENGTH: usize = size_of::<u64>();

/// The maximal size of a header in bytes, as in the crate `safetensors`.
const LONGEST_HEADER: u64 = 100_000_000;

/// A safetensors file that is being written.
pub struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Writer {
    /// Creates the file at `path` for f32 tensors with these names and shapes, which are then
    /// written in this order.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created or written.
    pub fn create(path: &Path, tensors: &[(String, Vec<usize>)]) -> Result<Self> {
        // `from_pretrained` requires it to know the conventions of the tensors.
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let header = Metadata::new(Some(metadata), entries(tensors));
        let header = header.map_err(|e| Error::internal(format!("{}: {e}", path.display())))?;
        let mut header = serde_json::to_vec(&header).map_err(|e| Error::internal(e.to_string()))?;
        header.resize(header.len().next_multiple_of(LENGTH), b' ');
        let file = File::create(path).map_err(|e| Error::io("create", path, e))?;
        let mut writer = Self { path: path.to_path_buf(), file: BufWriter::new(file) };
        writer.append(&(header.len() as u64).to_le_bytes())?;
        writer.append(&header)?;
        Ok(writer)
    }

    /// Writes the next tensor.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn tensor(&mut self, values: &[f32]) -> Result<()> {
        self.append(bytemuck::cast_slice(values))
    }

    /// Syncs the file to disk.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written or synced.
    pub fn finish(mut self) -> Result<()> {
        let done = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        done.map_err(|e| Error::io("write", &self.path, e))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| Error::io("write", &self.path, e))
    }
}

/// Returns the header's entries for f32 tensors with these names and shapes, in this order.
fn entries(tensors: &[(String, Vec<usize>)]) -> Vec<(String, TensorInfo)> {
    let mut entries = Vec::with_capacity(tensors.len());
    let mut start = 0;
    for (name, shape) in tensors {
        let end = start + shape.iter().product::<usize>() * size_of::<f32>();
        let data_offsets = (start, end);
        let info = TensorInfo { dtype: Dtype::F32, shape: shape.clone(), data_offsets };
        entries.push((name.clone(), info));
        start = end;
    }
    entries
}

/// An open safetensors file.
pub struct Reader {
    path: PathBuf,
    file: File,
    header: Metadata,
    /// The offset of the first tensor in the file.
    start: u64,
}

impl Reader {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// Returns an error if the file is missing, malformed, or not as long as its header says.
    pub fn open(path: &Path) -> Result<Self> {
        let file = safe_open::open(path).map_err(|e| Error::io("open", path, e))?;
        let length = file.metadata().map_err(|e| Error::io("read", path, e))?.len();
        let malformed = |what: String| {
            Error::input(format!("{}: not a whole safetensors file: {what}", path.display()))
                .hint("copy it again")
        };
        let mut size = [0; LENGTH];
        file.read_exact_at(&mut size, 0).map_err(|e| malformed(e.to_string()))?;
        let size = u64::from_le_bytes(size);
        let start = size.checked_add(LENGTH as u64).filter(|start| *start <= length);
        let start = start
            .ok_or_else(|| malformed(format!("a header of {size} bytes in a file of {length}")))?;
        if size > LONGEST_HEADER {
            return Err(malformed(format!(
                "a header of {size} bytes, more than the {LONGEST_HEADER} of the format"
            )));
        }
        let mut header = vec![0; size as usize];
        file.read_exact_at(&mut header, LENGTH as u64).map_err(|e| Error::io("read", path, e))?;
        let header: Metadata =
            serde_json::from_slice(&header).map_err(|e| malformed(e.to_string()))?;
        let expected = start.saturating_add(header.data_len() as u64);
        if length != expected {
            return Err(malformed(format!("{length} bytes, {expected} by its header")));
        }
        Ok(Self { path: path.to_path_buf(), file, header, start })
    }

    /// Returns the names of all tensors, in the order of their offsets.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// Returns the shape of a tensor, if it exists.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.header.info(name).map(|info| &info.shape[..])
    }

    /// Reads a tensor and widens its values to f32, which is exact.
    ///
    /// # Errors
    /// Returns an error if the tensor does not exist, has another dtype than F32, F16 or BF16, or
    /// cannot be read.
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        let info = self.header.info(name).ok_or_else(|| {
            let absent = SafeTensorError::TensorNotFound(name.into());
            Error::internal(format!("{}: {absent}", self.path.display()))
        })?;
        let (start, end) = info.data_offsets;
        let mut bytes = vec![0; end - start];
        let read = self.file.read_exact_at(&mut bytes, self.start + start as u64);
        read.map_err(|e| Error::io(&format!("read {name} of"), &self.path, e))?;
        let values = match info.dtype {
            Dtype::F32 => {
                bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
            }
            Dtype::F16 => bytes
                .as_chunks()
                .0
                .iter()
                .map(|bytes| f16::from_le_bytes(*bytes).to_f32())
                .collect(),
            Dtype::BF16 => bytes
                .as_chunks()
                .0
                .iter()
                .map(|bytes| bf16::from_le_bytes(*bytes).to_f32())
                .collect(),
            other => {
                return Err(Error::input(format!(
                    "{}: {name} is of type {other}",
                    self.path.display()
                ))
                .hint("import a model of type F32, F16 or BF16"));
            }
        };
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_numbers_widen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let tensors = [("a", "F16", 2, [0, 4]), ("b", "BF16", 1, [4, 6]), ("c", "I16", 1, [6, 8])];
        let entries = tensors.map(|(name, dtype, len, place)| {
            format!(
                r#""{name}": {{"dtype": "{dtype}", "shape": [{len}], "data_offsets": {place:?}}}"#
            )
        });
        let header = format!("{{{}}}", entries.join(", "));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        for bits in [0x3e00u16, 0x0001, 0xc040, 7] {
            bytes.extend(bits.to_le_bytes());
        }
        std::fs::write(&path, &bytes).unwrap();
        let reader = Reader::open(&path).unwrap();
        assert_eq!(reader.read("a").unwrap(), [1.5, 2f32.powi(-24)]);
        assert_eq!(reader.read("b").unwrap(), [-3.0]);
        assert!(reader.read("c").unwrap_err().to_string().contains("c is of type I16"));

        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(Reader::open(&path).is_err());
        for torn in [&bytes[..4], &bytes[..40], &[255; 32]] {
            std::fs::write(&path, torn).unwrap();
            assert!(
                Reader::open(&path)
                    .is_err_and(|e| e.to_string().contains("not a whole safetensors file"))
            );
        }
    }

    /// A sparse file may be as long as its header claims.
    #[test]
    fn long_headers_are_refused_before_they_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let size = 40u64 << 30;
        std::fs::write(&path, size.to_le_bytes()).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(size + 8).unwrap();
        let error = Reader::open(&path).err().unwrap().to_string();
        assert!(
            error.contains("a header of 42949672960 bytes, more than the 100000000 of the format"),
            "{error}"
        );
    }
}
