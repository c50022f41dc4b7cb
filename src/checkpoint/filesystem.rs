//! Probes a file system for the operations that checkpoints need: atomic renames, links, durable
//! directories.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::pointer::lacks_links;
use hpctrain_base::error::{Error, Result};

/// File systems over object stores, where a rename copies one object after another, visible to
/// readers.
const OBJECT_STORES: [&str; 7] = [
    "fuse.s3fs",
    "fuse.mount-s3",
    "fuse.goofys",
    "fuse.gcsfuse",
    "fuse.rclone",
    "fuse.blobfuse",
    "fuse.blobfuse2",
];

/// The result of probing a file system.
#[derive(Debug)]
pub struct FileSystem {
    /// Its type as in /proc/mounts, such as `ext4`; `None` if it is not listed.
    pub kind: Option<String>,
    /// Whether files can be locked, or the reason why not.
    pub locks: Result<(), String>,
    /// Whether there are symbolic links; without them `latest` and `best` are files.
    pub links: bool,
}

/// Probes `dir`, which must exist, and warns if there are no locks.
///
/// # Errors
/// Returns an error that names the first required operation that fails.
pub(super) fn check(dir: &Path) -> Result<()> {
    if let Err(e) = probe(dir)?.locks {
        log::warn!(
            "{} has no file locks ({e}): let only one evaluator at a time write eval.jsonl",
            dir.display()
        );
    }
    Ok(())
}

/// Tries the operations that checkpoints need in `dir`, which must exist. Ranks may do so at the
/// same time.
///
/// # Errors
/// Returns an error that names the first required operation that fails.
pub fn probe(dir: &Path) -> Result<FileSystem> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let real = fs::canonicalize(dir).map_err(|e| Error::io("open", dir, e))?;
    let kind = kind(&mounts, &real);
    if let Some(kind) = kind.filter(|kind| OBJECT_STORES.contains(kind)) {
        return Err(unfit(
            dir,
            &format!(
                "is on {kind}, where a rename copies the files one by one, visible to readers"
            ),
        ));
    }
    let probe =
        tempfile::Builder::new().prefix(".probe-").suffix(".tmp").tempdir_in(dir).map_err(|e| {
            Error::io("create a directory in", dir, e)
                .hint("choose a directory that can be written with --set run.root=…")
        })?;
    let tried = try_all(probe.path());
    let path = probe.path().to_owned();
    probe.close().map_err(|e| Error::io("remove", &path, e))?;
    let Tried { locks, links } = tried.map_err(|(what, e)| match e.kind() {
        // Any file system can be full.
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            Error::io("write into", dir, e)
                .hint("make room there, or choose another directory with --set run.root=…")
        }
        _ => unfit(dir, &format!("is on a file system that cannot {what}: {e}")),
    })?;
    Ok(FileSystem { kind: kind.map(str::to_owned), locks, links })
}

fn unfit(dir: &Path, what: &str) -> Error {
    let hint = "choose a run.root on a file system with POSIX renames: a local disk, NFS, Lustre, GPFS, BeeGFS";
    Error::input(format!("{} {what}", dir.display())).hint(hint)
}

/// The operation that failed, and its error.
type Failure = (&'static str, io::Error);

/// Whether the operations that checkpoints can do without work.
struct Tried {
    locks: Result<(), String>,
    links: bool,
}

/// Tries all operations.
fn try_all(probe: &Path) -> Result<Tried, Failure> {
    let named = |what| move |e| (what, e);
    let path = |name: &str| -> PathBuf { probe.join(name) };

    rename_directory(&path("before"), &path("after")).map_err(named("rename a directory"))?;
    let links = match symlink("one", path("link")) {
        Err(e) if lacks_links(&e) => false,
        made => made.map(|()| true).map_err(named("make a symbolic link"))?,
    };
    let replace = |is_two: fn(&Path) -> bool| -> io::Result<()> {
        fs::rename(path("new"), path("link"))?;
        if is_two(&path("link")) { Ok(()) } else { Err(io::Error::other("the old one stays")) }
    };
    if links {
        let is_two =
            |link: &Path| fs::read_link(link).is_ok_and(|target| target == Path::new("two"));
        let replaced = symlink("two", path("new")).and_then(|()| replace(is_two));
        replaced.map_err(named("replace a symbolic link"))?;
    } else {
        let is_two = |file: &Path| fs::read_to_string(file).is_ok_and(|text| text == "two");
        let written = fs::write(path("link"), "one").and_then(|()| fs::write(path("new"), "two"));
        written.and_then(|()| replace(is_two)).map_err(named("replace a file"))?;
    }
    let synced = File::open(probe).and_then(|directory| directory.sync_all());
    synced.map_err(named("make a directory durable"))?;
    let locks = lock_file(&path("lock")).map_err(|e| e.to_string());
    Ok(Tried { locks, links })
}

/// Renames a directory with a file, and checks that the file is seen under the new name only.
fn rename_directory(before: &Path, after: &Path) -> io::Result<()> {
    fs::create_dir(before)?;
    fs::write(before.join("file"), "x")?;
    fs::rename(before, after)?;
    let is_moved =
        !before.exists() && fs::read_to_string(after.join("file")).is_ok_and(|text| text == "x");
    if is_moved { Ok(()) } else { Err(io::Error::other("it is not seen afterwards")) }
}

/// Creates a file, locks it, and unlocks it.
fn lock_file(path: &Path) -> io::Result<()> {
    let file = File::create(path)?;
    file.lock()?;
    file.unlock()
}

/// Returns the type of the file system that holds `path`, as in /proc/mounts: the last mount with
/// the longest matching prefix.
fn kind<'a>(mounts: &'a str, path: &Path) -> Option<&'a str> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        // Spaces are written as \040.
        Some((words.next()?.replace("\\040", " "), words.next()?))
    });
    let holding = mounts.filter(|(point, _)| path.starts_with(point));
    holding.max_by_key(|(point, _)| point.len()).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usual_directory_will_do_and_stays_clean() {
        let dir = tempfile::tempdir().unwrap();
        check(dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(check(&dir.path().join("missing")).is_err());
    }

    #[test]
    fn what_fails_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("before"), "in the way").unwrap();
        let (what, _) = try_all(dir.path()).map(drop).unwrap_err();
        let error = unfit(Path::new("runs/x"), &format!("cannot {what}")).to_string();
        assert!(
            error.contains("runs/x cannot rename a directory\nhint: choose a run.root"),
            "{error}"
        );
    }

    #[test]
    fn mounts_are_found_by_their_longest_prefix() {
        let mounts = "/dev/sda / ext4 rw 0 0\nbucket /mnt/my\\040data fuse.s3fs rw 0 0\nnone /mnt tmpfs rw 0 0\n";
        assert_eq!(kind(mounts, Path::new("/mnt/my data/runs")), Some("fuse.s3fs"));
        assert_eq!(kind(mounts, Path::new("/mnt/other")), Some("tmpfs"));
        assert_eq!(kind(mounts, Path::new("/home/x")), Some("ext4"));
        assert_eq!(kind("", Path::new("/")), None);
    }
}
