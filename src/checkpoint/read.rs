//! Reading of any range of any tensor from the files that hold it.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use ndarray::ArrayD;

use super::excerpt::{self, Excerpt, Index, outline};
use super::manifest::{BLOCK, FileEntry};
use super::piece_source::PieceSource;
use super::shard::rest_crc32;
use super::{Manifest, PARAMS, ShardSlice, suspect};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::fd_limit;
use hpctrain_base::layout::TensorRange;
use hpctrain_base::safe_open;
use hpctrain_comm::Group;
use hpctrain_device::Backend;
use hpctrain_nn::optim::EMA;

/// An open checkpoint. Reading does not need HDF5: the manifest has the offset of every piece.
pub struct Reader {
    /// The manifest, on a rank that received it without the entries that the rank does not need.
    manifest: Manifest,
    files: Files,
    /// Buffer for a block of which only a part is read.
    block: Vec<f32>,
    /// Names of the files that [`Reader::check_files`] checks.
    checked: Vec<String>,
    /// The size of the manifest's outline in bytes, if this rank received it.
    received: usize,
}

/// Limit of open files: a checkpoint may have more than a process may open.
const MAX_OPEN: usize = 128;

/// The number of open checkpoint files in this process, which may have several ranks.
static OPEN_FILES: AtomicUsize = AtomicUsize::new(0);

/// The files of a checkpoint, opened on demand.
struct Files {
    dir: PathBuf,
    /// Open files by name, each with the time of its last use.
    open: HashMap<String, (u64, File)>,
    uses: u64,
    most: usize,
}

impl Reader {
    /// Opens the checkpoint in `dir`.
    ///
    /// # Errors
    /// Returns an error if the manifest is missing or damaged, or an SDC check has marked the
    /// checkpoint as suspect.
    pub fn open(dir: &Path) -> Result<Self> {
        let manifest = Manifest::read(dir)?;
        suspect::check(dir, manifest.step, &manifest.id)?;
        let checked = manifest.files.keys().cloned().collect();
        Ok(Self::new(dir, manifest, checked))
    }

    /// Opens the checkpoint in `dir` on all ranks of `world`. Collective. Only rank 0 opens it, by
    /// calling `open`; the others receive the manifest without files and pieces, which
    /// [`Reader::fetch`] delivers.
    ///
    /// # Errors
    /// Returns the error of `open`, the same on all ranks, or an error if a message between ranks
    /// fails.
    pub fn open_collective<B: Backend>(
        world: &Group<B>,
        dir: &Path,
        open: impl FnOnce() -> Result<Self>,
    ) -> Result<Self> {
        if world.size() == 1 {
            return open();
        }
        let opened = || {
            let reader = open()?;
            let outline = reader.outline()?;
            Ok((Some(reader), outline))
        };
        let opened = if world.rank() == 0 { opened() } else { Ok((None, vec![])) };
        let (reader, mine) = world.all_ok(opened)?;
        let received = world.broadcast_bytes(mine).wait()?;
        world.all_ok(match reader {
            Some(reader) => Ok(reader),
            None => Self::of_outline(dir, &received),
        })
    }

    // Messages are encoded and decoded in functions that are not generic, so that serde's code is
    // compiled once.

    /// Encodes the manifest without files and pieces as a message.
    fn outline(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(&outline(&self.manifest)).map_err(unencoded)
    }

    /// Creates the reader of a rank that has received the outline.
    fn of_outline(dir: &Path, received: &[u8]) -> Result<Self> {
        excerpt::record_received(received.len());
        let manifest = serde_json::from_slice(received).map_err(malformed)?;
        Ok(Self { received: received.len(), ..Self::new(dir, manifest, vec![]) })
    }

    /// Receives the manifest's entries for the ranges `wanted` of this rank, and for its share of
    /// the files, which [`Reader::check_files`] checks. Collective over `world`.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn fetch<B: Backend>(&mut self, world: &Group<B>, wanted: &[TensorRange]) -> Result<()> {
        if world.size() == 1 {
            return Ok(());
        }
        let requests = world.gather_bytes_to_root(Self::request(wanted)?).wait()?;
        let answers = world.all_ok(self.excerpts(&requests))?;
        let received = world.scatter_bytes(answers).wait()?;
        world.all_ok(self.enter(&received, world.rank() == 0))
    }

    fn request(wanted: &[TensorRange]) -> Result<Vec<u8>> {
        serde_json::to_vec(wanted).map_err(unencoded)
    }

    /// Adds the entries that the root has sent. The root itself has the whole manifest already.
    fn enter(&mut self, received: &[u8], is_root: bool) -> Result<()> {
        let excerpt: Excerpt = serde_json::from_slice(received).map_err(malformed)?;
        self.checked.clone_from(&excerpt.checked);
        if !is_root {
            excerpt::record_received(self.received + received.len());
            excerpt.enter(&mut self.manifest);
        }
        Ok(())
    }

    /// Encodes excerpts for the ranks that sent `requests`.
    fn excerpts(&self, requests: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        let index = Index::new(&self.manifest);
        let excerpts = requests.iter().enumerate().map(|(rank, request)| {
            let wanted: Vec<TensorRange> = serde_json::from_slice(request).map_err(malformed)?;
            serde_json::to_vec(&index.excerpt(&wanted, rank, requests.len())).map_err(unencoded)
        });
        excerpts.collect()
    }

    fn new(dir: &Path, manifest: Manifest, checked: Vec<String>) -> Self {
        let files = Files {
            dir: dir.to_path_buf(),
            open: HashMap::new(),
            uses: 0,
            most: fd_limit::share(MAX_OPEN),
        };
        Self { manifest, files, block: Vec::new(), checked, received: 0 }
    }

    /// Returns the manifest of the checkpoint.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the manifest and closes the files.
    pub fn into_manifest(self) -> Manifest {
        self.manifest
    }

    /// Returns the checkpoint's directory.
    pub fn dir(&self) -> &Path {
        &self.files.dir
    }

    /// Returns the part to use for inference: the running average of the parameters if there is
    /// one, else the parameters.
    pub fn inference_part(&self) -> usize {
        self.manifest.state.iter().position(|name| name == EMA).map_or(0, |k| k + 1)
    }

    /// Reads elements `range` of a tensor, or of the matrix `tensor[:, columns]` if columns are
    /// given, into `out`, which has the same length. Part 0 is the parameters, part k the k-th
    /// state buffer. The tensor may be stored whole or in any slices. Every block needed is read
    /// once and its checksum verified.
    ///
    /// # Errors
    /// Returns an error that names the file and the tensor if a file is missing or damaged or the
    /// tensor does not exist, and an internal error if the tensor has no such elements.
    pub fn read(
        &mut self,
        tensor: &str,
        part: usize,
        columns: Option<&Range<usize>>,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let Self { manifest, files, block, .. } = self;
        let entry = manifest.tensors.get(tensor).ok_or_else(|| {
            Error::input(format!("{} has no tensor {tensor}", files.dir.display()))
        })?;
        let group = part.checked_sub(1).map_or(PARAMS, |k| &manifest.state[k]);
        let all = 0..entry.shape.last().copied().unwrap_or(1);
        let of_wanted = columns.unwrap_or(&all);
        let is_matrix = entry.shape.len() == 2 && !of_wanted.is_empty() && of_wanted.end <= all.end;
        let is_there = range.len() == out.len() && (columns.is_none() || is_matrix);
        let pieces = if is_there { &entry.pieces[..] } else { &[] };
        let mut written = 0;
        for (number, piece) in pieces.iter().enumerate() {
            // If the columns are the same, elements are numbered as if they were one row.
            let (of_stored, of_wanted) = match piece.columns.as_ref().unwrap_or(&all) {
                of_stored if of_stored == of_wanted => (&ONE_ROW, &ONE_ROW),
                of_stored => (of_stored, of_wanted),
            };
            let wanted = Slice { columns: of_wanted, range: range.clone() };
            let end = piece.start + piece.len;
            for (index, first) in (piece.start..end).step_by(BLOCK).enumerate() {
                let stored = Slice { columns: of_stored, range: first..end.min(first + BLOCK) };
                let mut runs = stored.common(&wanted).peekable();
                let Some(run) = runs.peek() else { continue };
                let name = || format!("/{group}/{}", entry.dataset(tensor, number));
                if run.len == stored.range.len() {
                    written += run.len;
                    files.read_block(piece, part, index, name, &mut out[run.there..][..run.len])?;
                    continue;
                }
                block.resize(stored.range.len(), 0.0);
                files.read_block(piece, part, index, name, block)?;
                for Run { here, there, len } in runs {
                    out[there..][..len].copy_from_slice(&block[here..][..len]);
                    written += len;
                }
            }
        }
        if !is_there || written != range.len() {
            let within =
                columns.map_or_else(String::new, |columns| format!("columns {columns:?} of "));
            let what = format!(
                "elements {range:?} of {within}{tensor} {:?} into {}",
                entry.shape,
                out.len()
            );
            return Err(Error::internal(format!(
                "{}: {what}: {written} were there",
                files.dir.display()
            )));
        }
        Ok(())
    }

    /// Returns a whole tensor with its shape. Part 0 is the parameters, part k the k-th state buffer
    /// of the optimizer; [`Reader::inference_part`] is the one that evaluations use. The array is
    /// one of `ndarray` 0.17.
    ///
    /// ```no_run
    /// use std::path::Path;
    ///
    /// let mut reader = hpctrain_checkpoint::Reader::open(Path::new("runs/x/checkpoints/latest"))?;
    /// let part = reader.inference_part();
    /// let weight = reader.tensor("layers.0.weight", part)?;
    /// println!("{:?}, mean {:?}", weight.shape(), weight.mean());
    /// # Ok::<(), hpctrain_base::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the checkpoint has no such tensor or part, or if a file is missing or
    /// damaged.
    pub fn tensor(&mut self, name: &str, part: usize) -> Result<ArrayD<f32>> {
        let dir = self.dir().display();
        let Some(entry) = self.manifest.tensors.get(name) else {
            return Err(Error::input(format!("{dir} has no tensor {name}"))
                .hint("manifest().tensors has the names; hpctrain checkpoint inspect lists them"));
        };
        let parts = 1 + self.manifest.state.len();
        if part >= parts {
            return Err(Error::input(format!("{dir} has no part {part} of {name}"))
                .hint(format!("it has {parts}: the parameters, then {:?}", self.manifest.state)));
        }
        let mut array = ArrayD::zeros(entry.shape.clone());
        let all = 0..array.len();
        let values =
            array.as_slice_mut().ok_or_else(|| Error::internal("a new array is not contiguous"))?;
        self.read(name, part, None, all, values)?;
        Ok(array)
    }

    /// Assigns every `step`-th file from `first` on to [`Reader::check_files`].
    pub fn share_checks(&mut self, first: usize, step: usize) {
        self.checked = self.manifest.files.keys().skip(first).step_by(step).cloned().collect();
    }

    /// Checks the lengths of the files, and their bytes outside of tensors: of all files, or of
    /// this process's share.
    ///
    /// # Errors
    /// Returns an error that names the first file that is missing or damaged.
    pub fn check_files(&mut self) -> Result<()> {
        let Self { manifest, files, checked, .. } = self;
        let mut pieces: HashMap<&str, Vec<&ShardSlice>> = HashMap::new();
        for piece in manifest.tensors.values().flat_map(|tensor| &tensor.pieces) {
            pieces.entry(&piece.file).or_default().push(piece);
        }
        let none = Vec::new();
        checked.iter().try_for_each(|name| {
            files.check(name, &manifest.files[name], pieces.get(&name[..]).unwrap_or(&none))
        })
    }

    /// Reads and checks everything in the file `name`.
    ///
    /// # Errors
    /// Returns an error that names the first damaged part.
    pub fn verify(&mut self, name: &str) -> Result<()> {
        let Self { manifest, files, block, .. } = self;
        let pieces = manifest.tensors.values().flat_map(|tensor| &tensor.pieces);
        let pieces: Vec<&ShardSlice> = pieces.filter(|piece| piece.file == *name).collect();
        files.check(name, &manifest.files[name], &pieces)?;
        for (tensor, entry) in &manifest.tensors {
            for (number, piece) in
                entry.pieces.iter().enumerate().filter(|(_, piece)| piece.file == name)
            {
                for part in 0..piece.parts.len() {
                    let group = part.checked_sub(1).map_or(PARAMS, |k| &manifest.state[k]);
                    for index in 0..piece.len.div_ceil(BLOCK) {
                        block.resize(BLOCK.min(piece.len - index * BLOCK), 0.0);
                        let name = || format!("/{group}/{}", entry.dataset(tensor, number));
                        files.read_block(piece, part, index, name, block)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl PieceSource for Reader {
    fn read(
        &mut self,
        tensor: &str,
        part: usize,
        columns: Option<&Range<usize>>,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        Self::read(self, tensor, part, columns, range, out)
    }
}

/// Elements of some columns of a matrix.
pub(crate) struct Slice<'a> {
    /// The columns; there is at least one.
    pub columns: &'a Range<usize>,
    /// The elements, numbered row-major in the matrix of these columns.
    pub range: Range<usize>,
}

/// Columns that make any number of elements a single row.
pub(crate) const ONE_ROW: Range<usize> = 0..usize::MAX;

/// Consecutive elements that two slices have in common.
pub(crate) struct Run {
    /// Offset of the first element in the range of this slice.
    pub here: usize,
    /// Offset of the first element in the range of the other slice.
    pub there: usize,
    /// The number of elements.
    pub len: usize,
}

impl Slice<'_> {
    /// Returns the rows that contain elements of the slice.
    fn rows(&self) -> Range<usize> {
        self.range.start / self.columns.len()..self.range.end.div_ceil(self.columns.len())
    }

    /// Returns the columns of the slice's elements in one row.
    fn in_row(&self, row: usize) -> Range<usize> {
        let width = self.columns.len();
        let column =
            |element: usize| self.columns.start + element.saturating_sub(row * width).min(width);
        column(self.range.start)..column(self.range.end)
    }

    /// Returns the elements that it has in common with another slice of the same matrix, row by
    /// row.
    pub fn common(&self, other: &Self) -> impl Iterator<Item = Run> {
        let [here, there] = [self.rows(), other.rows()];
        (here.start.max(there.start)..here.end.min(there.end)).filter_map(move |row| {
            let [here, there] = [self.in_row(row), other.in_row(row)];
            let columns = here.start.max(there.start)..here.end.min(there.end);
            let at = |of: &Self| {
                row * of.columns.len() + (columns.start - of.columns.start) - of.range.start
            };
            (!columns.is_empty()).then(|| Run {
                here: at(self),
                there: at(other),
                len: columns.len(),
            })
        })
    }
}

impl Files {
    /// Checks a file outside of the tensors in it, which are at `pieces`.
    fn check(&mut self, name: &str, entry: &FileEntry, pieces: &[&ShardSlice]) -> Result<()> {
        let path = self.dir.join(name);
        let file = self.get(name)?;
        let length = file.metadata().map_err(|e| unread("read", &path, &e))?.len();
        if length != entry.bytes {
            return Err(damaged(
                &path,
                format!("{length} bytes where the manifest says {}", entry.bytes),
            ));
        }
        let found = rest_crc32(file, length, pieces).map_err(|e| unread("read", &path, &e))?;
        if found != entry.rest_crc32 {
            return Err(damaged(
                &path,
                format!("HDF5 structure: checksum {found:08x} is not the manifest's"),
            ));
        }
        Ok(())
    }

    /// Reads a whole block of a piece and checks it. `name` returns the path of its dataset, for
    /// errors.
    fn read_block(
        &mut self,
        piece: &ShardSlice,
        part: usize,
        index: usize,
        name: impl Fn() -> String,
        out: &mut [f32],
    ) -> Result<()> {
        let stored = &piece.parts[part];
        let path = self.dir.join(&piece.file);
        let offset = stored.offset + (index * BLOCK * size_of::<f32>()) as u64;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(out);
        let file = self.get(&piece.file)?;
        file.read_exact_at(bytes, offset)
            .map_err(|e| unread(&format!("read {} in", name()), &path, &e))?;
        let found = crc32fast::hash(bytes);
        if found != stored.crc32[index] {
            return Err(damaged(
                &path,
                format!("{}: checksum {found:08x} is not the manifest's", name()),
            ));
        }
        Ok(())
    }

    /// Returns the open file called `name`. At the limit of open files, it closes the least
    /// recently used one.
    fn get(&mut self, name: &str) -> Result<&File> {
        self.uses += 1;
        let file = match self.open.remove(name) {
            Some((_, file)) => file,
            None => {
                let path = self.dir.join(name);
                let longest = self
                    .open
                    .iter()
                    .min_by_key(|(_, (used, _))| *used)
                    .map(|(name, _)| name.clone());
                if let Some(name) =
                    longest.filter(|_| OPEN_FILES.load(Ordering::Relaxed) >= self.most)
                {
                    self.open.remove(&name);
                    OPEN_FILES.fetch_sub(1, Ordering::Relaxed);
                }
                let file = safe_open::open(&path).map_err(|e| unread("open", &path, &e))?;
                OPEN_FILES.fetch_add(1, Ordering::Relaxed);
                file
            }
        };
        let (_, file) =
            &*self.open.entry(name.to_string()).insert_entry((self.uses, file)).into_mut();
        Ok(file)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        OPEN_FILES.fetch_sub(self.open.len(), Ordering::Relaxed);
    }
}

fn unencoded(e: serde_json::Error) -> Error {
    Error::internal(format!("manifest: {e}"))
}

fn malformed(e: serde_json::Error) -> Error {
    Error::comm(format!("a rank sent a malformed part of a manifest: {e}"))
}

/// The hint of errors about damaged files.
const HINT: &str = "the file is damaged: resume from an older checkpoint";

fn damaged(path: &Path, what: String) -> Error {
    Error::damaged(format!("{}: {what}", path.display())).hint(HINT)
}

/// Returns the error for a file that cannot be read, because it is damaged or the file system
/// fails.
fn unread(action: &str, path: &Path, e: &std::io::Error) -> Error {
    let error = Error::unreadable(action, path, e);
    match error.kind() {
        Kind::Damaged => error.hint(HINT),
        _ => error.hint("the checkpoint may well be intact: find out why it cannot be read"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::manifest::tests::empty;
    use crate::shard::{Extent, ShardWriter, file_name};

    /// A piece: the number of its file, columns, elements.
    type Placed = (usize, Option<Range<usize>>, Range<usize>);

    /// Columns and elements to read, each given by its ends in either order.
    type Wanted = (Option<[Index; 2]>, [Index; 2]);

    /// Returns the value of an element, different for every element of the parameters and the
    /// buffer.
    fn value(part: usize, element: usize) -> f32 {
        element as f32 + 0.25 * part as f32
    }

    /// Returns the indices in the matrix of the elements that `range` selects in some of its
    /// columns.
    fn elements(
        [rows, width]: [usize; 2],
        columns: Option<&Range<usize>>,
        range: &Range<usize>,
    ) -> Vec<usize> {
        let columns = columns.cloned().unwrap_or(0..width);
        let all = (0..rows).flat_map(|row| columns.clone().map(move |column| row * width + column));
        all.skip(range.start).take(range.len()).collect()
    }

    /// Returns the parts of `0..len` between these indices.
    fn cut(len: usize, at: &[Index]) -> Vec<Range<usize>> {
        let mut ends: Vec<usize> = at.iter().map(|at| at.index(len + 1)).chain([0, len]).collect();
        ends.sort_unstable();
        ends.dedup();
        ends.windows(2).map(|ends| ends[0]..ends[1]).collect()
    }

    /// Writes a checkpoint of a matrix `w` of this shape and a buffer `m`, each piece into the file
    /// with its number.
    fn write(dir: &Path, shape: [usize; 2], pieces: &[Placed]) -> Reader {
        let files = pieces.iter().map(|(file, ..)| *file).max().unwrap() + 1;
        let written = (0..files).map(|file| {
            let here: Vec<_> = pieces.iter().filter(|piece| piece.0 == file).collect();
            let extents: Vec<Extent> = here.iter().map(|piece| extent(shape, piece)).collect();
            let mut writer = ShardWriter::create(dir, &file_name(file), &["m"], &extents).unwrap();
            for (i, (_, columns, range)) in here.into_iter().enumerate() {
                let elements = elements(shape, columns.as_ref(), range);
                for part in 0..2 {
                    let values: Vec<f32> =
                        elements.iter().map(|element| value(part, *element)).collect();
                    writer.write(i, part, &values).unwrap();
                }
            }
            let file = writer.finish().unwrap();
            file.read_back().unwrap();
            file.written().clone()
        });
        let mut manifest = empty(1);
        manifest.add_files(written.collect()).unwrap();
        manifest.write(dir).unwrap();
        Reader::open(dir).unwrap()
    }

    /// Returns the extent of a piece of the matrix `w` of this shape.
    fn extent(shape: [usize; 2], (_, columns, range): &Placed) -> Extent {
        Extent {
            tensor: "w".into(),
            shape: shape.to_vec(),
            columns: columns.clone(),
            range: range.clone(),
        }
    }

    /// Checks that every piece is in its own dataset at the recorded place, and that the files are
    /// intact.
    fn assert_documented(reader: &mut Reader) {
        let manifest = reader.manifest().clone();
        let entry = &manifest.tensors["w"];
        for (number, piece) in entry.pieces.iter().enumerate() {
            let file = hdf5::File::open(reader.dir().join(&piece.file)).unwrap();
            for (group, part) in ["params", "m"].into_iter().zip(&piece.parts) {
                let dataset =
                    file.group(group).unwrap().dataset(&entry.dataset("w", number)).unwrap();
                assert_eq!((dataset.offset(), dataset.size()), (Some(part.offset), piece.len));
                assert_eq!(
                    dataset.attr("start").unwrap().read_scalar::<u64>().unwrap(),
                    piece.start as u64
                );
                let columns =
                    dataset.attr("columns").ok().map(|columns| columns.read_raw::<u64>().unwrap());
                assert_eq!(
                    columns,
                    piece.columns.as_ref().map(|of| vec![of.start as u64, of.end as u64])
                );
            }
        }
        reader.check_files().unwrap();
        manifest.files.keys().for_each(|name| reader.verify(name).unwrap());
    }

    /// Writes a matrix in these slices, or whole, each cut at `pieces`, into the `files`, and reads
    /// the wanted ranges.
    fn check(
        shape: [usize; 2],
        slices: &[Range<usize>],
        pieces: &[Index],
        files: &[Index],
        wanted: &[Wanted],
    ) {
        let [rows, width] = shape;
        let mut extents = Vec::new();
        let whole = [(None, width)];
        let of =
            slices.iter().map(|columns| (Some(columns.clone()), columns.len())).collect::<Vec<_>>();
        for (columns, width) in if of.is_empty() { &whole[..] } else { &of } {
            for range in cut(rows * width, pieces) {
                let file = files[extents.len() % files.len()].index(3);
                extents.push((file, columns.clone(), range));
            }
        }
        // A writer may number its extents in any order.
        let by = pieces[0].index(extents.len());
        extents.rotate_left(by);
        let dir = tempfile::tempdir().unwrap();
        let mut reader = write(dir.path(), shape, &extents);
        assert_documented(&mut reader);
        for (columns, ends) in wanted {
            let ordered = |len: usize, ends: &[Index; 2]| {
                let [a, b] = ends.map(|end| end.index(len + 1));
                a.min(b)..a.max(b)
            };
            let columns =
                columns.map(|ends| ordered(width, &ends)).filter(|columns| !columns.is_empty());
            let range = ordered(rows * columns.as_ref().map_or(width, Range::len), ends);
            // Reads as a rank does that has only an excerpt.
            let mut narrow = narrowed(&reader, columns.clone(), &range, files.len() % 3);
            narrow.check_files().unwrap();
            for (part, reader) in [(0, &mut reader), (1, &mut narrow)] {
                let mut out = vec![f32::NAN; range.len()];
                reader.read("w", part, columns.as_ref(), range.clone(), &mut out).unwrap();
                let want = elements(shape, columns.as_ref(), &range)
                    .into_iter()
                    .map(|element| value(part, element));
                assert!(
                    out.into_iter().eq(want),
                    "{columns:?} {range:?} of {shape:?} in {extents:?}"
                );
            }
        }
    }

    /// Returns the reader of rank `rank` of three, which reads this range of these columns.
    fn narrowed(
        reader: &Reader,
        columns: Option<Range<usize>>,
        range: &Range<usize>,
        rank: usize,
    ) -> Reader {
        let wanted = TensorRange { tensor: "w".into(), columns, range: range.clone() };
        let excerpt = excerpt::Index::new(reader.manifest()).excerpt(&[wanted], rank, 3);
        let checked = excerpt.checked.clone();
        let mut manifest = outline(reader.manifest());
        excerpt.enter(&mut manifest);
        Reader::new(reader.dir(), manifest, checked)
    }

    /// Returns the first column and the first element of each piece.
    fn starts(reader: &Reader) -> Vec<(usize, usize)> {
        let pieces = reader.manifest.tensors["w"].pieces.iter();
        pieces.map(|piece| (piece.columns.clone().unwrap().start, piece.start)).collect()
    }

    #[test]
    fn an_excerpt_has_the_pieces_of_its_ranges_and_of_its_files() {
        let dir = tempfile::tempdir().unwrap();
        // A matrix of 4 x 6 in two slices, each in four files; the first file has two pieces of the
        // second slice.
        let first = (0..4).map(|i| (i, Some(0..2), 2 * i..2 * i + 2));
        let second = (0..4).map(|i| (i % 3, Some(2..6), 4 * i..4 * i + 4));
        let reader = write(dir.path(), [4, 6], &first.chain(second).collect::<Vec<_>>());
        let found = |columns: Option<Range<usize>>, range: Range<usize>, rank| {
            let narrow = narrowed(&reader, columns, &range, rank);
            (starts(&narrow), narrow.manifest.files.len(), narrow.checked.len())
        };
        // Rank 0 checks two of the four files, each with two or three pieces.
        assert_eq!(found(Some(0..2), 0..0, 0), (vec![(0, 0), (0, 6), (2, 0), (2, 12)], 2, 2));
        assert_eq!(found(Some(0..2), 0..0, 1), (vec![(0, 2), (2, 4)], 1, 1));
        // Ranges of the same columns, of the others, and of some of each: with their neighbours in
        // the file.
        assert_eq!(found(Some(0..2), 4..5, 1), (vec![(0, 2), (0, 4), (2, 4), (2, 8)], 2, 1));
        assert_eq!(
            found(Some(2..6), 8..16, 1).0,
            [(0, 0), (0, 2), (0, 4), (2, 0), (2, 4), (2, 8), (2, 12)]
        );
        assert_eq!(found(Some(1..3), 4..6, 1).0, [(0, 2), (0, 4), (2, 4), (2, 8)]);
        assert_eq!(found(None, 12..18, 1).0, [(0, 2), (0, 4), (2, 4), (2, 8)]);
        assert_eq!(found(None, 0..24, 1).0.len(), 8);
    }

    fn wanted() -> impl Strategy<Value = Vec<Wanted>> {
        vec((any::<Option<[Index; 2]>>(), any::<[Index; 2]>()), 1..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_range_is_read_from_any_pieces(
            shape in (1usize..14, 1usize..14),
            slices in any::<Option<[Index; 3]>>(),
            pieces in vec(any::<Index>(), 1..6),
            files in vec(any::<Index>(), 1..6),
            wanted in wanted(),
        ) {
            let slices = slices.map_or_else(Vec::new, |at| cut(shape.1, &at));
            check([shape.0, shape.1], &slices, &pieces, &files, &wanted);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4))]
        /// The pieces and the wanted ranges span several blocks each.
        #[test]
        fn any_range_is_read_from_long_pieces(
            height in 2000usize..2500,
            slices in any::<Option<[Index; 1]>>(),
            pieces in vec(any::<Index>(), 1..2),
            files in vec(any::<Index>(), 1..2),
            wanted in wanted(),
        ) {
            let slices = slices.map_or_else(Vec::new, |at| cut(1999, &at));
            check([height, 1999], &slices, &pieces, &files, &wanted);
        }
    }

    #[test]
    fn damage_is_found_in_slices_and_only_where_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        // Two blocks each, in one file.
        let shape = [2000, 1500];
        let slices = [(0, Some(750..1500), 0..1_500_000), (0, Some(0..750), 0..1_500_000)];
        let mut reader = write(dir.path(), shape, &slices);
        assert_documented(&mut reader);
        let piece = reader.manifest().tensors["w"].pieces[1].clone();
        assert_eq!((piece.columns, piece.parts[1].crc32.len()), (Some(750..1500), 2));
        // The last value of the second slice's buffer.
        let path = dir.path().join(&piece.file);
        let mut content = std::fs::read(&path).unwrap();
        content[piece.parts[1].offset as usize + 4 * piece.len - 1] ^= 1;
        std::fs::write(&path, content).unwrap();

        let mut read = |part, columns: Option<Range<usize>>, range: Range<usize>| {
            let mut out = vec![0.0; range.len()];
            reader.read("w", part, columns.as_ref(), range, &mut out)
        };
        let in_second_block = BLOCK.div_ceil(750);
        for (columns, range) in [
            (None, 1500 * in_second_block + 749..1500 * in_second_block + 751),
            (None, 0..3_000_000),
            (Some(750..1500), BLOCK..BLOCK + 1),
            (Some(700..751), 51 * 1999..51 * 2000),
        ] {
            let error = read(1, columns.clone(), range.clone()).unwrap_err();
            let words = "/m/w@1: checksum ";
            assert!(error.kind() == Kind::Damaged && error.to_string().contains(words), "{error}");
            read(0, columns, range).unwrap();
        }
        // Blocks without wanted elements are not read.
        for (columns, range) in [
            (None, 1500 * in_second_block..1500 * in_second_block + 750),
            (None, 0..1500 * (BLOCK / 750)),
            (Some(0..750), 0..1_500_000),
            (Some(700..751), 0..51 * (BLOCK / 750)),
        ] {
            read(1, columns, range).unwrap();
        }
        assert!(reader.verify(&piece.file).unwrap_err().to_string().contains("/m/w@1: checksum "));
    }

    #[test]
    fn a_tensor_is_an_array_of_its_shape() {
        let dir = tempfile::tempdir().unwrap();
        let mut reader =
            write(dir.path(), [4, 6], &[(0, Some(0..2), 0..8), (1, Some(2..6), 0..16)]);
        for part in 0..2 {
            let array = reader.tensor("w", part).unwrap();
            assert_eq!(array.shape(), [4, 6]);
            for (place, x) in array.indexed_iter() {
                assert_eq!(*x, value(part, 6 * place[0] + place[1]));
            }
        }
        let error = reader.tensor("w", 2).unwrap_err();
        assert!(error.to_string().contains("has no part 2 of w\nhint: it has 2"), "{error}");
        let error = reader.tensor("v", 0).unwrap_err();
        assert!(error.to_string().contains("has no tensor v\n"), "{error}");
    }

    #[test]
    fn elements_that_are_not_there_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let mut reader =
            write(dir.path(), [4, 6], &[(0, Some(0..2), 0..8), (1, Some(2..6), 0..16)]);
        let mut read = |columns: Option<Range<usize>>, range: Range<usize>, len: usize| {
            reader.read("w", 0, columns.as_ref(), range, &mut vec![0.0; len])
        };
        read(None, 0..24, 24).unwrap();
        read(Some(1..3), 7..8, 1).unwrap();
        read(Some(1..3), 8..8, 0).unwrap();
        for (columns, range, len) in [
            (None, 0..25, 25),
            (None, 0..24, 23),
            (None, 0..0, 1),
            (Some(1..3), 7..9, 2),
            (Some(5..7), 0..2, 2),
            (Some(3..3), 0..1, 1),
        ] {
            let error = read(columns.clone(), range.clone(), len).unwrap_err();
            assert_eq!(error.kind(), Kind::Internal, "{columns:?} {range:?}: {error}");
        }
    }
}
