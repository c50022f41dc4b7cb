//! Copies of shards on a node's local disk, made once and used by all ranks there.

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::statvfs;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::import::hex;
use super::spec::file_names;
use super::{DataSpec, Split, ValidationSource};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::user_dirs;
use hpctrain_base::user_dirs::Trust;

/// The name of the record of the copies in a directory.
const RECORD: &str = "staged.json";
/// The name of the lock file of a directory of copies. Only its holder may change the directory,
/// since two jobs may copy the same data.
const LOCK: &str = ".lock";
/// The number of bytes copied at a time.
const PIECE: usize = 1 << 20;

/// The result of [`stage`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Staged {
    /// The number of files that were copied, and their bytes.
    pub copied: (usize, u64),
    /// The number of files whose copies already existed and were intact.
    pub reused: usize,
}

/// The state of a shard when it was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Copied {
    bytes: u64,
    /// Nanoseconds since 1970.
    modified: u128,
    crc32: u32,
}

/// Returns the location of the copies of a data set below `root`, whether they exist yet or not.
///
/// # Errors
/// Returns an error if the data set does not exist.
pub fn place(spec: &DataSpec, root: &Path) -> Result<DataSpec> {
    let (folder, file) = folder(spec, root)?;
    let path = file.map_or(folder.clone(), |name| folder.join(name));
    Ok(DataSpec { path, ..spec.clone() })
}

/// Copies all shards of a data set to a separate directory below `root`, unless copies of the same
/// size, time and checksum exist. A copy is read again and compared before it gets its name. Other
/// processes that copy the same data set wait.
///
/// # Errors
/// Returns an error if there is not enough space, the data set or `root` does not exist, the
/// directory of copies does not belong to the user, a file cannot be read or written, or a copy
/// differs from its source.
pub fn stage(spec: &DataSpec, root: &Path) -> Result<Staged> {
    let place = root.display();
    if !root.is_dir() {
        return Err(Error::input(format!("data.local_cache = {place} is not a directory"))
            .hint("name a directory that exists on every node, such as /tmp"));
    }
    let mut files = spec.files(Split::Train)?;
    if spec.validation_source()? == ValidationSource::Shards {
        files.extend(spec.files(Split::Validation)?);
    }
    files.sort();
    files.dedup();
    let (folder, _) = folder(spec, root)?;
    let found = user_dirs::private_directory(&folder).map_err(|e| e.at("data.local_cache"))?;
    let lock_path = folder.join(LOCK);
    let lock = user_dirs::lock_file(&lock_path)?;
    lock.lock().map_err(|e| Error::io("lock", &lock_path, e))?;
    let record = folder.join(RECORD);
    // A record that cannot be read counts as missing, and so does one that other users could write.
    let text = if found == Trust::Trusted { fs::read(&record).ok() } else { None };
    let mut known: BTreeMap<String, Copied> =
        text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    let mut missing = Vec::new();
    let mut kept = BTreeMap::new();
    for from in &files {
        let name = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (bytes, modified) = described(from)?;
        let to = folder.join(&name);
        match known.remove(&name) {
            Some(copied)
                if (copied.bytes, copied.modified) == (bytes, nanoseconds(modified))
                    && is_intact(&to, copied) =>
            {
                kept.insert(name, copied);
            }
            _ => missing.push((from, to, name, bytes, modified)),
        }
    }
    let reused = kept.len();
    // Remove shards that no longer exist, and leftovers of an interrupted copy: they would be taken
    // for data.
    let is_ours = |name: &str| [RECORD, LOCK].contains(&name);
    for name in
        file_names(&folder)?.iter().filter(|name| !kept.contains_key(*name) && !is_ours(name))
    {
        let path = folder.join(name);
        fs::remove_file(&path).map_err(|e| Error::io("remove", &path, e))?;
    }
    let needed = missing.iter().map(|(_, _, _, bytes, _)| bytes).sum();
    let room = statvfs(&folder).map_err(|e| Error::io("look for room in", &folder, e))?;
    check_room(root, needed, room.f_bavail.saturating_mul(room.f_frsize))?;
    for (from, to, name, bytes, modified) in &missing {
        let crc32 = copy(from, to, *modified)?;
        kept.insert(
            name.clone(),
            Copied { bytes: *bytes, modified: nanoseconds(*modified), crc32 },
        );
        // The record is written after each copy, so that an interrupted start need not begin again.
        let text = serde_json::to_vec(&kept).map_err(|e| Error::internal(e.to_string()))?;
        let temporary = folder.join(format!(".{RECORD}.tmp"));
        fs::write(&temporary, text).map_err(|e| Error::io("write", &temporary, e))?;
        fs::rename(&temporary, &record).map_err(|e| Error::io("write", &record, e))?;
    }
    drop(lock);
    Ok(Staged { copied: (missing.len(), needed), reused })
}

/// Returns the directory of copies, which belongs to the user, and the name of the file if the data
/// set is a single one.
fn folder(spec: &DataSpec, root: &Path) -> Result<(PathBuf, Option<PathBuf>)> {
    let source = fs::canonicalize(&spec.path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            Error::input(format!("{} does not exist", spec.path.display()))
                .hint("data.path is a directory of .h5 shards or one .h5 file")
        }
        _ => Error::io("read", &spec.path, e),
    })?;
    let hash = hex(&Sha256::digest(source.as_os_str().as_encoded_bytes())[..8]);
    let file = if source.is_file() { source.file_name().map(PathBuf::from) } else { None };
    Ok((root.join(format!("hpctrain-data-{}-{hash}", user_dirs::user())), file))
}

fn check_room(root: &Path, needed: u64, room: u64) -> Result<()> {
    if needed <= room {
        return Ok(());
    }
    let message = format!(
        "data.local_cache = {} has {room} bytes free, but {needed} are to be copied",
        root.display()
    );
    Err(Error::input(message)
        .hint("free space there, name another directory, or omit data.local_cache"))
}

/// Returns the bytes of a file and the time when it was written.
fn described(path: &Path) -> Result<(u64, SystemTime)> {
    let metadata =
        fs::metadata(path).and_then(|metadata| Ok((metadata.len(), metadata.modified()?)));
    metadata.map_err(|e| Error::io("read", path, e))
}

fn nanoseconds(time: SystemTime) -> u128 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos())
}

/// Returns whether a copy still has its size, time and checksum.
fn is_intact(path: &Path, copied: Copied) -> bool {
    described(path)
        .is_ok_and(|(bytes, time)| (bytes, nanoseconds(time)) == (copied.bytes, copied.modified))
        && checksum(path).is_ok_and(|crc32| crc32 == copied.crc32)
}

fn checksum(path: &Path) -> Result<u32> {
    File::open(path)
        .and_then(|mut file| pass(&mut file, &mut std::io::sink()))
        .map_err(|e| Error::io("read", path, e))
}

/// Copies `from` to `to`, and returns the checksum of the bytes.
fn pass(from: &mut impl Read, to: &mut impl Write) -> std::io::Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece)? {
            0 => return Ok(hasher.finalize()),
            count => {
                hasher.update(&piece[..count]);
                to.write_all(&piece[..count])?;
            }
        }
    }
}

/// Copies a file under a temporary name, reads the copy again, and gives it its name. Returns its
/// checksum.
fn copy(from: &Path, to: &Path, modified: SystemTime) -> Result<u32> {
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let temporary = to.with_file_name(format!(".{name}.tmp"));
    let mut source = File::open(from).map_err(|e| Error::io("read", from, e))?;
    let crc32 = write_copy(&mut source, &temporary, modified)
        .map_err(|e| Error::io(&format!("copy {} to", from.display()), &temporary, e))?;
    let copied = checksum(&temporary)?;
    if copied != crc32 {
        let what =
            format!("the copy of {} has checksum {copied:08x}, not {crc32:08x}", from.display());
        return Err(Error::io("use", &temporary, what)
            .hint("name another directory as data.local_cache; this disk may be broken"));
    }
    fs::rename(&temporary, to).map_err(|e| Error::io("write", to, e))?;
    Ok(crc32)
}

/// Writes a copy of an open file, and returns its checksum.
fn write_copy(source: &mut File, to: &Path, modified: SystemTime) -> std::io::Result<u32> {
    let mut target = File::create(to)?;
    let crc32 = pass(source, &mut target)?;
    target.set_times(FileTimes::new().set_modified(modified))?;
    Ok(crc32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates two shards for training and one for validation, whose content is never parsed, and a
    /// root.
    fn shards() -> (tempfile::TempDir, DataSpec, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        let root = folder.path().join("disk");
        fs::create_dir(&data).unwrap();
        fs::create_dir(&root).unwrap();
        for (name, text) in
            [("train-0.h5", "zero"), ("train-1.h5", "one"), ("val-0.h5", "two"), ("else.txt", "")]
        {
            fs::write(data.join(name), text).unwrap();
        }
        (folder, DataSpec::new(data), root)
    }

    #[test]
    fn copies_are_made_once_and_again_where_something_differs() {
        let (_folder, spec, root) = shards();
        let copied = |files, bytes, reused| Staged { copied: (files, bytes), reused };
        assert_eq!(stage(&spec, &root).unwrap(), copied(3, 10, 0));
        let to = place(&spec, &root).unwrap().path;
        assert_eq!(
            file_names(&to).unwrap(),
            [LOCK, RECORD, "train-0.h5", "train-1.h5", "val-0.h5"]
        );
        assert_eq!(fs::read(to.join("train-1.h5")).unwrap(), b"one");
        assert_eq!(stage(&spec, &root).unwrap(), copied(0, 0, 3));

        // Other bytes of the same size and time: only a checksum detects them.
        let time = fs::metadata(to.join("val-0.h5")).unwrap().modified().unwrap();
        fs::write(to.join("val-0.h5"), "bad").unwrap();
        File::options().write(true).open(to.join("val-0.h5")).unwrap().set_modified(time).unwrap();
        assert_eq!(stage(&spec, &root).unwrap(), copied(1, 3, 2));
        // A new source of the same size.
        File::options()
            .write(true)
            .open(spec.path.join("train-0.h5"))
            .unwrap()
            .set_modified(UNIX_EPOCH)
            .unwrap();
        assert_eq!(stage(&spec, &root).unwrap(), copied(1, 4, 2));
        // A source that is gone, and the leftovers of an interrupted copy.
        fs::remove_file(spec.path.join("train-1.h5")).unwrap();
        fs::write(to.join(".train-9.h5.tmp"), "half").unwrap();
        assert_eq!(stage(&spec, &root).unwrap(), copied(0, 0, 2));
        assert_eq!(file_names(&to).unwrap(), [LOCK, RECORD, "train-0.h5", "val-0.h5"]);
        fs::write(to.join(RECORD), "garbage").unwrap();
        assert_eq!(stage(&spec, &root).unwrap(), copied(2, 7, 0));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let (folder, spec, root) = shards();
        let error = stage(&spec, &folder.path().join("nowhere")).unwrap_err().to_string();
        assert!(error.contains("nowhere is not a directory\nhint: "), "{error}");
        let error = check_room(&root, 11, 10).unwrap_err().to_string();
        assert!(
            error.contains("has 10 bytes free, but 11 are to be copied\nhint: free space"),
            "{error}"
        );
        assert!(check_room(&root, 10, 10).is_ok());
        let error = place(&DataSpec::new("/nowhere"), &root).unwrap_err().to_string();
        assert!(error.contains("/nowhere does not exist"), "{error}");
    }
}
