//! Resolves a user's path to a run, its checkpoints, or one of them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::lease::LeaseGuard;
use crate::names::step_of;
use crate::{Checkpoints, Pointer, Target, manifest};
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_device::Backend;

/// Returns the checkpoints of the run at `path`, which is its directory or its `checkpoints`
/// directory.
///
/// # Errors
/// Returns an error if `path` does not exist or is not a run.
pub fn run(path: &Path) -> Result<Checkpoints> {
    exists(path)?;
    let not_a_run = |what| {
        Err(Error::input(format!("{} is {what}", path.display()))
            .hint("give the directory of a run, such as runs/<name>, or its checkpoints directory"))
    };
    match checkpoints(path)? {
        Some(checkpoints) => Ok(checkpoints),
        None if is_checkpoint(path) => not_a_run("one checkpoint, not a run"),
        None => not_a_run("not the directory of a run"),
    }
}

/// Returns the directory of the checkpoint at `path`, which may be the checkpoint, a link to it, a
/// file `latest` or `best` that names it, or a run, whose latest checkpoint is meant. The returned
/// path does not go through `latest` and `best`, which a trainer may move.
///
/// # Errors
/// Returns an error if there is no checkpoint, or `best` is a directory next to checkpoints.
pub fn checkpoint(path: &Path) -> Result<PathBuf> {
    exists(path)?;
    let found = match checkpoints(path)? {
        Some(checkpoints) => current(&checkpoints)?,
        None => followed(path)?,
    };
    if is_checkpoint(&found) {
        return Ok(found);
    }
    Err(Error::input(format!("{} is neither a checkpoint nor a run", path.display())).hint(
        "give a checkpoint such as runs/<name>/checkpoints/latest, or the directory of a run",
    ))
}

/// Like [`checkpoint`], for all ranks of `world`. Collective. Only rank 0 resolves the path,
/// because a link such as `latest` may move in the meantime, and takes the lease of [`lease`].
///
/// # Errors
/// Returns an error, the same on all ranks, if there is no checkpoint.
pub fn checkpoint_collective<B: Backend>(
    world: &Group<B>,
    path: &Path,
) -> Result<(PathBuf, Option<LeaseGuard>)> {
    let found = if world.rank() == 0 { checkpoint(path).map(Some) } else { Ok(None) };
    let found = world.all_ok(found)?;
    let lease = found.as_deref().and_then(lease);
    let mine = found.map(|path| path.into_os_string().into_encoded_bytes()).unwrap_or_default();
    let of_root = world.broadcast_bytes(mine).wait()?;
    Ok((PathBuf::from(OsStr::from_bytes(&of_root)), lease))
}

/// Takes a lease on the checkpoint in `dir`, so that a concurrent trainer does not remove it while
/// it is read. Returns `None` outside of a run, or if the lease cannot be taken.
pub fn lease(dir: &Path) -> Option<LeaseGuard> {
    let name = dir.file_name()?.to_str()?;
    step_of(name)?;
    let leases = Checkpoints::new(dir.parent()?).leases();
    leases.share(name).unwrap_or_else(|e| {
        log::warn!("a trainer may remove the checkpoint while it is read: {e}");
        None
    })
}

fn exists(path: &Path) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            Err(Error::input(format!("{} does not exist", path.display()))
                .hint("runs are below run.root, their checkpoints in runs/<name>/checkpoints"))
        }
        Err(e) => Err(Error::io("read", path, e)),
    }
}

/// Returns the checkpoints of a run or of a `checkpoints` directory; `None` if `path` is neither.
fn checkpoints(path: &Path) -> Result<Option<Checkpoints>> {
    let below = path.join("checkpoints");
    if below.is_dir() {
        return Ok(Some(Checkpoints::new(below)));
    }
    if !path.is_dir() {
        return Ok(None);
    }
    let here = Checkpoints::new(path);
    let named = path.file_name().is_some_and(|name| name == "checkpoints");
    Ok((named || !here.steps()?.is_empty()).then_some(here))
}

/// Returns true if `dir` is a checkpoint or what is left of one.
fn is_checkpoint(dir: &Path) -> bool {
    let named = dir.file_name().and_then(|name| step_of(name.to_str()?)).is_some();
    dir.is_dir()
        && (named
            || [manifest::FILE, manifest::CHECKSUM_FILE].iter().any(|file| dir.join(file).exists()))
}

/// Returns the checkpoint that readers of a run use.
fn current(checkpoints: &Checkpoints) -> Result<PathBuf> {
    let alone = checkpoints.latest();
    let found = match checkpoints.current_step()? {
        Some(step) => Some(checkpoints.path(step)),
        // Only `latest` was copied, as a directory or as a link that points elsewhere.
        None => alone.exists().then(|| followed(&alone)).transpose()?,
    };
    found.ok_or_else(|| {
        Error::input(format!("there is no checkpoint in {}", checkpoints.root().display()))
            .hint("the first one is saved after checkpoint.every steps")
    })
}

/// Returns the directory that a path leads to by its last component: a link, a file that names a
/// checkpoint, or a directory. A directory called `latest` or `best` next to checkpoints is a copy
/// that may be stale.
fn followed(path: &Path) -> Result<PathBuf> {
    let parent = path.parent().unwrap_or(Path::new(""));
    let name = path.file_name().unwrap_or_default();
    if path.is_symlink() {
        let target = std::fs::read_link(path).map_err(|e| Error::io("read", path, e))?;
        return Ok(parent.join(target));
    }
    if name != "latest" && name != "best" {
        return Ok(path.to_path_buf());
    }
    let pointer = Pointer::at(path);
    let checkpoints = Checkpoints::new(parent);
    match pointer.target()? {
        Target::Step(step) => Ok(checkpoints.path(step)),
        Target::Directory if checkpoints.steps()?.is_empty() => Ok(path.to_path_buf()),
        Target::Directory if name == "latest" => current(&checkpoints),
        Target::Directory => Err(pointer.taken()),
        Target::Absent | Target::Elsewhere => Ok(path.to_path_buf()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::tests::empty;

    #[test]
    fn runs_and_checkpoints_are_distinguished() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("x/checkpoints");
        let one = root.join("step-00000001");
        std::fs::create_dir_all(&root).unwrap();
        assert!(checkpoint(&root).unwrap_err().to_string().contains("no checkpoint in"));
        std::fs::create_dir(&one).unwrap();
        empty(1).write(&one).unwrap();
        std::os::unix::fs::symlink("step-00000001", root.join("latest")).unwrap();
        for path in [dir.path().join("x"), root.clone(), root.join("latest"), one.clone()] {
            assert_eq!(checkpoint(&path).unwrap(), one);
        }
        for path in [dir.path().join("x"), root.clone()] {
            assert_eq!(run(&path).unwrap().root(), root);
        }
        assert!(run(&one).unwrap_err().to_string().contains("one checkpoint, not a run"));
        assert!(run(dir.path()).unwrap_err().to_string().contains("not the directory of a run"));
        assert!(checkpoint(dir.path()).unwrap_err().to_string().contains("neither"));
        assert!(checkpoint(&root.join("y")).unwrap_err().to_string().contains("does not exist"));
        // Without symbolic links, and after a copy that followed them, with a later save.
        std::fs::remove_file(root.join("latest")).unwrap();
        std::fs::write(root.join("latest"), "step-00000001\n").unwrap();
        assert_eq!(checkpoint(&root.join("latest")).unwrap(), one);
        for name in ["latest", "best"] {
            let _ = std::fs::remove_file(root.join(name));
            std::fs::create_dir(root.join(name)).unwrap();
            empty(1).write(&root.join(name)).unwrap();
        }
        let two = root.join("step-00000002");
        std::fs::create_dir(&two).unwrap();
        empty(2).write(&two).unwrap();
        std::fs::create_dir(root.join("step-00000003")).unwrap();
        for path in [dir.path().join("x"), root.join("latest")] {
            assert_eq!(checkpoint(&path).unwrap(), two);
        }
        assert!(
            checkpoint(&root.join("best"))
                .unwrap_err()
                .to_string()
                .contains("hint: a copy that follows links")
        );
        // A copy elsewhere, under another name.
        let copy = dir.path().join("mine");
        std::fs::rename(&one, &copy).unwrap();
        assert_eq!(checkpoint(&copy).unwrap(), copy);
        assert!(lease(&copy).is_none() && lease(&one).is_some());
    }
}
