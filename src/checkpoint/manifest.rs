//! The manifest: everything in a checkpoint except the tensors' elements, described in
//! `docs/checkpoint-format.md`.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

use super::{Progress, refused, writeback};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::layout::UnitLayout;
use hpctrain_base::own_files;
use hpctrain_base::safe_open;
use hpctrain_base::safe_open::is_plain_name;
use hpctrain_config::Config;
use hpctrain_data::{Preprocessing, Source, Tokenizer, TrainedOn};

/// The version of the format that this program writes and reads.
pub const VERSION: u32 = 3;

/// File name of the manifest.
pub const FILE: &str = "manifest.json";

/// Name of the file with the manifest's own checksum, in the format of checksum tools: eight
/// hexadecimal digits of CRC-32.
pub const CHECKSUM_FILE: &str = "manifest.crc32";

/// The maximal number of elements under one checksum: 4 MiB, so that reading a small range need not
/// read the whole piece.
pub const BLOCK: usize = 1 << 20;

/// The number of manifests that this process has parsed.
static PARSED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of manifests that this process has parsed, for tests of scale.
#[doc(hidden)]
pub fn parsed() -> u64 {
    PARSED.load(Relaxed)
}

/// The content of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The version of the format.
    pub version: u32,
    /// Identifies this save: two saves of one step have different ids.
    pub id: String,
    /// The number of finished steps.
    pub step: u64,
    /// The number of optimizer updates: steps less the skipped ones.
    pub updates: u64,
    /// The number of samples consumed, which is the whole state of the data loader.
    pub position: u64,
    /// The seed of all random streams. A stream is a function of its name and a counter, so the
    /// seed, `step` and `position` are the whole state of the generators.
    pub seed: u64,
    /// The resolved configuration.
    #[serde(deserialize_with = "hpctrain_config::deserialize_json")]
    pub config: Config,
    /// The tokenizer from text to token ids, if the data names one.
    pub tokenizer: Option<Tokenizer>,
    /// The training data of the run; `None` in imported checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<TrainedOn>,
    /// Preprocessing except the tokenizer; `None` in imported checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preprocessing: Option<Preprocessing>,
    /// The job that wrote it.
    pub origin: Origin,
    /// The names of the optimizer's state buffers, which are groups next to `params` in the files.
    pub state: Vec<String>,
    /// The files with tensors, by name.
    pub files: BTreeMap<String, FileEntry>,
    /// The tensors, by name.
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// The job that wrote a checkpoint. For information only.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// The version of the program.
    pub hpctrain: String,
    /// The transport between ranks: the MPI library, threads, or none.
    pub mpi: String,
    /// The number of ranks.
    pub ranks: usize,
    /// The node of every rank.
    pub hosts: Vec<String>,
    /// The time of the save, in seconds since 1970.
    pub time: f64,
}

/// A file with tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The length of the file.
    pub bytes: u64,
    /// CRC-32 of all bytes outside of tensors, in order: HDF5's metadata.
    pub rest_crc32: u32,
}

/// A tensor and its pieces.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// The extent of every dimension, row-major.
    pub shape: Vec<usize>,
    /// The pieces in order of columns, then of elements; together they cover the tensor exactly
    /// once.
    pub pieces: Vec<ShardSlice>,
}

/// A range of a tensor, or of some columns of a matrix, in one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardSlice {
    /// The name of the file in the checkpoint's directory.
    pub file: String,
    /// The columns of a matrix in which `start` and `len` count elements; `None` if they count
    /// those of the whole tensor.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "columns")]
    pub columns: Option<Range<usize>>,
    /// The first row-major element of the tensor, or of the matrix `tensor[:, columns]`.
    pub start: usize,
    /// The number of elements.
    pub len: usize,
    /// The parameters, then each buffer of [`Manifest::state`].
    pub parts: Vec<StoredPart>,
}

/// Serialization of columns as `[first, end]`.
mod columns {
    use std::ops::Range;

    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub fn serialize<S: Serializer>(
        columns: &Option<Range<usize>>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        columns.as_ref().map(|columns| [columns.start, columns.end]).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Range<usize>>, D::Error> {
        Ok(Option::<[usize; 2]>::deserialize(from)?.map(|[start, end]| start..end))
    }
}

/// The elements of a piece in the file: contiguous little-endian f32.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredPart {
    /// The offset of the first byte in the file.
    pub offset: u64,
    /// CRC-32 of every 2^20 elements; the last block may be shorter.
    pub crc32: Vec<u32>,
}

/// The description of a rank's file that is sent to rank 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardFileInfo {
    /// The name of the file.
    pub file: String,
    /// Its entry in the manifest.
    pub entry: FileEntry,
    /// For each piece in the file, the name and shape of its tensor; a tensor may have several.
    pub ranges: Vec<(String, Vec<usize>, ShardSlice)>,
}

impl Manifest {
    /// Reads the manifest of the checkpoint in `dir`, verifies its checksum and checks its
    /// consistency.
    ///
    /// # Errors
    /// Returns an error if it is missing or damaged, or its pieces do not cover every tensor
    /// exactly once ([`Kind::Damaged`](hpctrain_base::error::Kind::Damaged)); if another version of
    /// the format or the program wrote it; or if it cannot be read.
    pub fn read(dir: &Path) -> Result<Self> {
        Self::parse(dir, &sealed_text(dir)?)
    }

    /// Parses the text of a manifest whose checksum is right: if it cannot be parsed, a program
    /// that knows other keys wrote it.
    fn parse(dir: &Path, text: &str) -> Result<Self> {
        PARSED.fetch_add(1, Relaxed);
        let path = dir.join(FILE);
        let manifest: Self = serde_json::from_str(text).map_err(|e| {
            Error::input(format!("{}: malformed manifest: {e}", path.display()))
                .hint("use the version of hpctrain that wrote it")
        })?;
        manifest.check_cover().map_err(|e| damaged(&path, format!("malformed manifest: {e}")))?;
        Ok(manifest)
    }

    /// Writes the manifest and its checksum durably, and drops them from the page cache, so that
    /// the next reader, which is the retention of this save, reads them from the disk.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let text =
            serde_json::to_string(self).map_err(|e| Error::internal(format!("manifest: {e}")))?;
        let seal = sealed_as(&format!("{:08x}", crc32fast::hash(text.as_bytes())));
        for (name, text) in [(FILE, &text), (CHECKSUM_FILE, &seal)] {
            let path = dir.join(name);
            own_files::create(&path)
                .and_then(|mut file| {
                    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map(|()| file)
                })
                .map(|file| writeback::forget(&file, &path))
                .map_err(|e| refused("write", &path, e))?;
        }
        Ok(())
    }

    /// Adds the files that ranks wrote, and checks that their pieces cover every tensor exactly
    /// once.
    ///
    /// # Errors
    /// Returns an error if they do not.
    pub fn add_files(&mut self, written: Vec<ShardFileInfo>) -> Result<()> {
        for ShardFileInfo { file, entry, ranges } in written {
            self.files.insert(file, entry);
            for (tensor, shape, piece) in ranges {
                self.tensors
                    .entry(tensor)
                    .or_insert(TensorEntry { shape, pieces: vec![] })
                    .pieces
                    .push(piece);
            }
        }
        self.tensors.values_mut().for_each(|entry| entry.pieces.sort_by_key(ShardSlice::place));
        self.check_cover().map_err(|e| Error::internal(format!("the ranks' ranges: {e}")))
    }

    /// Checks that every element of every tensor is in exactly one piece, and every piece within
    /// its file, which is next to the manifest.
    fn check_cover(&self) -> Result<(), String> {
        // A manifest may come from others: it may only name files next to it.
        if let Some(name) = self.files.keys().find(|name| !is_plain_name(name)) {
            return Err(format!("{name:?} is not the name of a file beside it"));
        }
        if self.files.values().map(|file| file.bytes).try_fold(0, u64::checked_add).is_none() {
            return Err("its files have more bytes than any file system".into());
        }
        for (name, entry) in &self.tensors {
            entry.check_cover(name)?;
            entry.pieces.iter().try_for_each(|piece| self.check_place(name, piece))?;
        }
        Ok(())
    }

    /// Checks that a piece of the tensor `name` lies within its file.
    fn check_place(&self, name: &str, piece: &ShardSlice) -> Result<(), String> {
        let file = self.files.get(&piece.file);
        let file = file
            .ok_or_else(|| format!("tensor {name} is in the file {}, unknown there", piece.file))?;
        if piece.parts.len() != 1 + self.state.len() {
            return Err(format!("a piece of tensor {name} has {} parts", piece.parts.len()));
        }
        for part in &piece.parts {
            let end =
                (piece.len as u64).checked_mul(4).and_then(|bytes| bytes.checked_add(part.offset));
            if end.is_none_or(|end| end > file.bytes)
                || part.crc32.len() != piece.len.div_ceil(BLOCK)
            {
                return Err(format!("a piece of tensor {name} does not fit into {}", piece.file));
            }
        }
        Ok(())
    }

    /// Makes `data` preprocess samples as in training. Returns human-readable notes about what the
    /// checkpoint does not record.
    ///
    /// # Errors
    /// Returns an error if the data has another tokenizer, or a column, a category or a class is
    /// unknown.
    pub fn conform(&self, data: &mut dyn Source) -> Result<Vec<String>> {
        let own = data.preprocessing();
        // Imported checkpoints, and those of programs with their own samples, have no scales.
        let is_known = self.preprocessing.as_ref().is_some_and(|known| !known.scales.is_empty());
        let is_unknown = !own.scales.is_empty() && !is_known;
        let tokenizer =
            own.tokenizer.as_ref().filter(|_| self.tokenizer.is_none()).map(Tokenizer::name);
        let known = self.preprocessing.clone().unwrap_or(own);
        let mut notes =
            data.conform(&Preprocessing { tokenizer: self.tokenizer.clone(), ..known })?;
        if is_unknown {
            notes.push(
                "the checkpoint does not record the scale of its inputs: using that of the data"
                    .into(),
            );
        }
        if let Some(name) = tokenizer {
            notes.push(format!(
                "the checkpoint does not record its tokenizer: using that of the data, {name}"
            ));
        }
        Ok(notes)
    }

    /// Returns the progress of the run.
    pub fn progress(&self) -> Progress {
        Progress { step: self.step, updates: self.updates, position: self.position }
    }

    /// Returns the number of elements of all tensors.
    pub fn parameters(&self) -> u64 {
        self.tensors.values().map(|entry| entry.shape.iter().product::<usize>() as u64).sum()
    }

    /// Returns the size of all files with tensors in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|file| file.bytes).sum()
    }

    /// Checks that the tensors are those of the model, and the state buffers those of the
    /// optimizer.
    ///
    /// # Errors
    /// Returns an error that names the first tensor that is missing or has another shape, or the
    /// differing optimizer state.
    pub fn check(&self, dir: &Path, layouts: &[UnitLayout], state: Option<&[&str]>) -> Result<()> {
        let other = |what: String| {
            Err(Error::input(format!("{}: checkpoint of another model: {what}", dir.display()))
                .hint("resume with the configuration it was saved with"))
        };
        let mut expected = 0;
        for tensor in layouts.iter().flat_map(|layout| &layout.tensors) {
            expected += 1;
            match self.tensors.get(&tensor.name) {
                None => return other(format!("it has no tensor {}", tensor.name)),
                Some(entry) if entry.shape != tensor.shape => {
                    return other(format!(
                        "{} is {:?} there, {:?} here",
                        tensor.name, entry.shape, tensor.shape
                    ));
                }
                Some(_) => {}
            }
        }
        if expected != self.tensors.len() {
            return other(format!("it has {} tensors, the model {expected}", self.tensors.len()));
        }
        match state {
            Some(state) if self.state != state => {
                let message =
                    format!("its optimizer state is {:?}, here it is {state:?}", self.state);
                Err(Error::input(format!(
                    "{}: checkpoint of another optimizer: {message}",
                    dir.display()
                ))
                .hint("resume with the optimizer it was saved with, or with --skip-optimizer"))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the text of the manifest in `dir` after verifying its checksum.
fn sealed_text(dir: &Path) -> Result<String> {
    let path = dir.join(FILE);
    let text = safe_open::read_to_string(&path).map_err(|e| {
        let error = Error::unreadable("read the manifest", &path, &e);
        match error.kind() {
            Kind::Io => {
                error.hint("the checkpoint may well be intact: find out why it cannot be read")
            }
            _ => error.hint("a checkpoint is a directory such as runs/<name>/checkpoints/latest"),
        }
    })?;
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let seal = dir.join(CHECKSUM_FILE);
    let sealed = safe_open::read_to_string(&seal);
    let found = format!("{:08x}", crc32fast::hash(text.as_bytes()));
    // If the checksum is wrong, the version itself may be damaged. A format of another version may
    // have no checksum.
    let is_broken = sealed
        .as_ref()
        .is_ok_and(|seal| seal.len() == sealed_as(&found).len() && *seal != sealed_as(&found));
    if let Ok(Version { version }) = serde_json::from_str(&text)
        && version != VERSION
        && !is_broken
    {
        let age = if version > VERSION { "newer" } else { "older" };
        return Err(Error::input(format!(
            "{}: format version {version} is {age} than {VERSION}",
            path.display()
        ))
        .hint("use the version of hpctrain that wrote it"));
    }
    let sealed = sealed.map_err(|e| {
        Error::unreadable("read the manifest's checksum", &seal, &e)
            .hint("resume from an older checkpoint")
    })?;
    if sealed != sealed_as(&found) {
        return Err(damaged(
            &path,
            format!("malformed manifest: checksum {found} is not the one in {CHECKSUM_FILE}"),
        ));
    }
    Ok(text)
}

fn damaged(path: &Path, what: String) -> Error {
    Error::damaged(format!("{}: {what}", path.display())).hint("resume from an older checkpoint")
}

impl TensorEntry {
    /// Returns the dataset of piece `number` of the tensor `name`, which is the same in each group
    /// of its file. Further pieces in the same file are called `name@1` and so on; names of tensors
    /// never end so.
    pub(super) fn dataset(&self, name: &str, number: usize) -> String {
        let (before, rest) = self.pieces.split_at(number);
        dataset(name, before.iter().filter(|piece| piece.file == rest[0].file).count())
    }

    /// Checks that every element of the tensor `name` is in exactly one piece: all pieces are of
    /// the whole tensor, or every column is in one slice, and every element of a slice in one
    /// piece.
    fn check_cover(&self, name: &str) -> Result<(), String> {
        let Self { shape, pieces } = self;
        let len = shape.iter().try_fold(1, |len: usize, extent| len.checked_mul(*extent));
        let len = len.ok_or_else(|| format!("tensor {name} is too long"))?;
        if pieces.iter().all(|piece| piece.columns.is_none()) {
            return check_once(pieces, len, &format!("tensor {name}"));
        }
        let &[rows, width] = &shape[..] else {
            return Err(format!(
                "a piece of tensor {name} has columns, and its shape is {shape:?}"
            ));
        };
        if pieces.iter().any(|piece| piece.columns.is_none()) {
            return Err(format!("some pieces of tensor {name} have columns, others none"));
        }
        let mut next = 0;
        let slices = pieces.chunk_by(|a, b| a.columns == b.columns);
        for (slice, columns) in slices.filter_map(|slice| Some((slice, slice[0].columns.as_ref()?)))
        {
            let of = format!("columns {columns:?} of tensor {name}");
            if columns.is_empty() || columns.end > width {
                return Err(format!("there are no {of}, which has {width}"));
            }
            match columns.start.cmp(&next) {
                Ordering::Less => {
                    return Err(format!(
                        "slices of tensor {name} overlap at column {}",
                        columns.start
                    ));
                }
                Ordering::Greater => {
                    return Err(format!("no piece of tensor {name} holds column {next}"));
                }
                Ordering::Equal => next = columns.end,
            }
            check_once(slice, rows * columns.len(), &of)?;
        }
        if next != width {
            return Err(format!("no piece of tensor {name} holds column {next}"));
        }
        Ok(())
    }
}

impl ShardSlice {
    /// Returns the sort key of the piece within its tensor.
    fn place(&self) -> (usize, usize) {
        place(self.columns.as_ref(), self.start)
    }
}

/// Returns the sort key of a piece: its columns, then its first element.
pub fn place(columns: Option<&Range<usize>>, start: usize) -> (usize, usize) {
    (columns.map_or(0, |columns| columns.start), start)
}

/// Returns the dataset of a piece of the tensor `name` which `before` other pieces of it precede in
/// the same file.
pub fn dataset(name: &str, before: usize) -> String {
    match before {
        0 => name.to_string(),
        _ => format!("{name}@{before}"),
    }
}

/// Checks that each of the `len` elements is in exactly one of `pieces`, which are in order.
fn check_once(pieces: &[ShardSlice], len: usize, of: &str) -> Result<(), String> {
    let mut next = 0;
    for piece in pieces {
        match piece.start.cmp(&next) {
            Ordering::Less => {
                return Err(format!("pieces of {of} overlap at element {}", piece.start));
            }
            Ordering::Greater => return Err(format!("no piece of {of} holds element {next}")),
            Ordering::Equal => {}
        }
        next = piece
            .start
            .checked_add(piece.len)
            .ok_or_else(|| format!("a piece of {of} is too long"))?;
    }
    match next.cmp(&len) {
        Ordering::Less => Err(format!("no piece of {of} holds element {next}")),
        Ordering::Greater => Err(format!("a piece of {of} ends at element {next} of {len}")),
        Ordering::Equal => Ok(()),
    }
}

/// Returns the text of the checksum file.
fn sealed_as(crc32: &str) -> String {
    format!("{crc32}  {FILE}\n")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a manifest without tensors.
    pub fn empty(step: u64) -> Manifest {
        Manifest {
            version: VERSION,
            id: format!("test-{step}"),
            step,
            updates: step,
            position: step * 8,
            seed: 1,
            config: Config::default(),
            tokenizer: None,
            data: None,
            preprocessing: None,
            origin: Origin::default(),
            state: vec!["m".into()],
            files: BTreeMap::new(),
            tensors: BTreeMap::new(),
        }
    }

    fn written(file: &str, start: usize, len: usize) -> ShardFileInfo {
        slice(file, None, start, len)
    }

    fn slice(file: &str, columns: Option<Range<usize>>, start: usize, len: usize) -> ShardFileInfo {
        let part = |offset| StoredPart { offset, crc32: vec![0; len.div_ceil(BLOCK)] };
        let piece = ShardSlice {
            file: file.into(),
            columns,
            start,
            len,
            parts: vec![part(100), part(100 + 4 * len as u64)],
        };
        let entry = FileEntry { bytes: 100 + 8 * len as u64, rest_crc32: 0 };
        ShardFileInfo { file: file.into(), entry, ranges: vec![("w".into(), vec![3, 4], piece)] }
    }

    #[test]
    fn pieces_must_cover_every_tensor_once() {
        let enter = |written: &[ShardFileInfo]| {
            let mut manifest = empty(1);
            manifest.add_files(written.to_vec()).map_err(|e| e.to_string()).map(|()| manifest)
        };
        let whole = enter(&[written("b", 5, 7), written("a", 0, 5)]).unwrap();
        assert_eq!((whole.parameters(), whole.tensors["w"].pieces[1].start), (12, 5));
        for (pieces, words) in [
            (&[written("a", 0, 5)][..], "no piece of tensor w holds element 5"),
            (&[written("a", 0, 5), written("b", 6, 6)], "no piece of tensor w holds element 5"),
            (&[written("a", 0, 6), written("b", 5, 7)], "overlap at element 5"),
            (&[written("a", 0, 13)], "a piece of tensor w ends at element 13 of 12"),
        ] {
            let error = enter(pieces).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let mut short = whole;
        short.files.get_mut("a").unwrap().bytes -= 1;
        assert!(short.check_cover().unwrap_err().contains("does not fit into a"));
    }

    #[test]
    fn slices_must_cover_every_column_once() {
        let enter = |written: &[ShardFileInfo]| {
            let mut manifest = empty(1);
            manifest.add_files(written.to_vec()).map_err(|e| e.to_string()).map(|()| manifest)
        };
        // Slices of a matrix of 3 x 4.
        let left = slice("a", Some(0..1), 0, 3);
        let right = slice("b", Some(1..4), 0, 9);
        let whole = enter(&[right.clone(), left.clone()]).unwrap();
        assert_eq!(
            whole.tensors["w"].pieces.iter().map(|piece| &piece.file[..]).collect::<String>(),
            "ab"
        );
        enter(&[slice("a", Some(0..4), 7, 5), slice("b", Some(0..4), 0, 7)]).unwrap();
        let [l, r] = [&left, &right];
        #[expect(clippy::reversed_empty_ranges, reason = "it is refused")]
        let backward = slice("c", Some(4..1), 0, 9);
        for (pieces, words) in [
            (
                &[l, &slice("b", Some(1..4), 0, 8)][..],
                "no piece of columns 1..4 of tensor w holds element 8",
            ),
            (
                &[l, &slice("b", Some(1..4), 1, 8)],
                "no piece of columns 1..4 of tensor w holds element 0",
            ),
            (
                &[l, r, &slice("c", Some(1..4), 8, 1)],
                "pieces of columns 1..4 of tensor w overlap at element 8",
            ),
            (
                &[l, &slice("b", Some(1..4), 0, 10)],
                "columns 1..4 of tensor w ends at element 10 of 9",
            ),
            (&[l], "no piece of tensor w holds column 1"),
            (&[r], "no piece of tensor w holds column 0"),
            (&[l, &slice("b", Some(2..4), 0, 6)], "no piece of tensor w holds column 1"),
            (&[l, r, &slice("c", Some(3..4), 0, 3)], "slices of tensor w overlap at column 3"),
            (&[r, &slice("c", Some(0..2), 0, 6)], "slices of tensor w overlap at column 1"),
            (
                &[l, &slice("b", Some(1..5), 0, 12)],
                "there are no columns 1..5 of tensor w, which has 4",
            ),
            (&[l, &slice("b", Some(1..usize::MAX), 0, 9)], "there are no columns"),
            (&[l, r, &slice("c", Some(4..4), 0, 0)], "there are no columns 4..4 of tensor w"),
            (&[l, &backward], "there are no columns 4..1 of tensor w"),
            (&[l, r, &written("c", 0, 12)], "some pieces of tensor w have columns, others none"),
            (&[&written("c", 0, 3), r], "some pieces of tensor w have columns, others none"),
        ] {
            let pieces: Vec<ShardFileInfo> = pieces.iter().copied().cloned().collect();
            let error = enter(&pieces).unwrap_err();
            assert!(error.contains(words), "{error}, not {words}");
        }
        // Numbers that other programs may have written.
        let refusal = |change: fn(&mut TensorEntry)| {
            let mut manifest = whole.clone();
            change(manifest.tensors.get_mut("w").unwrap());
            manifest.check_cover().unwrap_err()
        };
        assert!(
            refusal(|w| w.shape = vec![12])
                .contains("a piece of tensor w has columns, and its shape is [12]")
        );
        assert!(refusal(|w| w.shape = vec![1, 3, 4]).contains("its shape is [1, 3, 4]"));
        assert!(refusal(|w| w.shape = vec![usize::MAX, 4]).contains("tensor w is too long"));
        assert!(
            refusal(|w| w.shape[0] = usize::MAX / 4)
                .contains("columns 0..1 of tensor w holds element 3")
        );
        assert!(
            refusal(|w| w.pieces[0].len = usize::MAX)
                .contains("columns 0..1 of tensor w ends at element")
        );
        assert!(
            refusal(|w| w.pieces.push(ShardSlice {
                start: 9,
                len: usize::MAX,
                ..w.pieces[1].clone()
            }))
            .contains("too long")
        );
    }

    #[test]
    fn columns_are_two_numbers_or_omitted() {
        let piece = slice("a", Some(2..4), 0, 6).ranges.remove(0).2;
        let text = serde_json::to_value(&piece).unwrap();
        assert_eq!(text["columns"], serde_json::json!([2, 4]));
        assert_eq!(serde_json::from_value::<ShardSlice>(text).unwrap(), piece);
        let text = serde_json::to_value(written("a", 0, 6).ranges.remove(0).2).unwrap();
        assert!(
            text.get("columns").is_none()
                && serde_json::from_value::<ShardSlice>(text).unwrap().columns.is_none()
        );
    }

    /// Writes `text` as the manifest in `dir`, and returns the error of reading it.
    fn damage(dir: &Path, text: &str) -> String {
        std::fs::write(dir.join(FILE), text).unwrap();
        let error = Manifest::read(dir).unwrap_err();
        assert_eq!(error.kind(), Kind::Damaged, "{error}");
        error.to_string()
    }

    #[test]
    fn any_change_of_the_file_is_found() {
        let dir = tempfile::tempdir().unwrap();
        empty(7).write(dir.path()).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap(), empty(7));
        let path = dir.path().join(FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            damage(dir.path(), &text.replace("\"position\":56", "\"position\":57"))
                .contains("malformed manifest: checksum")
        );
        assert!(damage(dir.path(), "").contains("malformed manifest"));
        // A version that does not match the checksum is damage; one that does was written by
        // another program.
        let newer = text.replace("\"version\":3", "\"version\":4");
        assert_ne!(newer, text);
        assert!(damage(dir.path(), &newer).contains("malformed manifest: checksum"));
        for (version, words) in
            [(4, "format version 4 is newer than 3"), (2, "format version 2 is older than 3")]
        {
            Manifest { version, ..empty(7) }.write(dir.path()).unwrap();
            let error = Manifest::read(dir.path()).unwrap_err();
            assert!(error.kind() == Kind::Input && error.to_string().contains(words), "{error}");
        }
        std::fs::remove_file(dir.path().join(CHECKSUM_FILE)).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap_err().kind(), Kind::Input);
        std::fs::write(&path, text).unwrap();
        std::fs::write(dir.path().join(CHECKSUM_FILE), "00000000  manifest.json\n").unwrap();
        assert!(Manifest::read(dir.path()).is_err());
        std::fs::remove_file(dir.path().join(CHECKSUM_FILE)).unwrap();
        let error = Manifest::read(dir.path()).unwrap_err();
        assert!(
            error.kind() == Kind::Damaged && error.to_string().contains(CHECKSUM_FILE),
            "{error}"
        );
        // A directory in place of the file does not mean that the file is damaged.
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap_err().kind(), Kind::Damaged);
        std::fs::create_dir(&path).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap_err().kind(), Kind::Io);
    }
}
