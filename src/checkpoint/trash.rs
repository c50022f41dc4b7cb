//! Removal of checkpoints in two steps: a checkpoint is renamed away, and removed once every lease
//! on it is visible.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::directory::{TRASH, one_line};
use super::lease::TrashStatus;
use super::names::{name_of, step_of};
use super::{Checkpoints, refused};
use hpctrain_base::error::{Error, Result};

/// The outcome of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The checkpoint is removed.
    Removed,
    /// A process holds a lease on it: it stays.
    Leased,
    /// It is renamed away; a later [`Checkpoints::sweep`] removes or restores it.
    Pending,
}

impl Checkpoints {
    /// Removes the checkpoint of a step unless a process takes a lease on it in the meantime. A
    /// reader creates its lease first and then looks for the checkpoint: either its lease is seen
    /// here, or it finds no checkpoint.
    ///
    /// # Errors
    /// Returns an error if the checkpoint cannot be renamed, removed or restored, or another
    /// trainer has taken over the run.
    pub fn discard_unless_leased(&self, step: u64) -> Result<Removal> {
        self.check_lease()?;
        let path = self.path(step);
        let trash = self.trash_of(&name_of(step));
        self.leases().move_to_trash(&path, &trash).map_err(|e| refused("remove", &path, e))?;
        self.sweep_one(&trash)
    }

    /// Removes the checkpoints of `steps` like [`Checkpoints::discard_unless_leased`], and waits
    /// until each is removed or found leased. Returns the removed steps and the leased ones.
    ///
    /// # Errors
    /// Returns an error if a checkpoint cannot be renamed, removed or restored, or another trainer
    /// has taken over the run.
    pub fn discard_all(&self, steps: &[u64]) -> Result<(Vec<u64>, Vec<u64>)> {
        let mut gone = Vec::new();
        let mut held = Vec::new();
        let mut begun = Vec::new();
        for &step in steps {
            match self.discard_unless_leased(step) {
                Ok(Removal::Removed) => gone.push(step),
                Ok(Removal::Leased) => held.push(step),
                Ok(Removal::Pending) => begun.push(step),
                // Another process was faster.
                Err(_) if !self.path(step).exists() => {}
                Err(e) => return Err(e),
            }
        }
        if !begun.is_empty() {
            let time = self.leases().trash_delay();
            log::info!("waiting {} s until leases of all nodes are visible", time.as_secs());
            std::thread::sleep(time);
            self.sweep()?;
        }
        let (back, removed): (Vec<u64>, Vec<u64>) =
            begun.into_iter().partition(|step| self.path(*step).exists());
        gone.extend(removed);
        held.extend(back);
        Ok((gone, held))
    }

    /// Continues removals that have begun.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn sweep(&self) -> Result<()> {
        let unreadable = |e| Error::io("list", self.root(), e);
        for entry in fs::read_dir(self.root()).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            let is_trash =
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TRASH));
            if is_trash && let Err(e) = self.sweep_one(&path) {
                log::warn!("{}", one_line(&e));
            }
        }
        Ok(())
    }

    /// Removes a directory in the trash unless it is leased.
    pub(super) fn sweep_one(&self, trash: &Path) -> Result<Removal> {
        self.check_lease()?;
        let name = trash.file_name().unwrap_or_default().to_string_lossy();
        let name = name.strip_prefix(TRASH).unwrap_or(&name);
        let checkpoint = name.split('.').next().unwrap_or(name);
        // Only a directory with the exact name of a checkpoint is a complete one, which readers
        // know by that name.
        let path = step_of(name).map(|step| self.path(step));
        let leases = self.leases();
        let status = leases.trash_status(trash, checkpoint);
        match status {
            Ok(TrashStatus::Free) => leases
                .remove_retired(trash)
                .map_err(|e| refused("remove", trash, e))
                .map(|()| Removal::Removed),
            Ok(TrashStatus::Leased) => restore(trash, path.as_deref()),
            Ok(TrashStatus::Pending) => Ok(Removal::Pending),
            Err(e) => restore(trash, path.as_deref()).and(Err(e)),
        }
    }

    /// Removes a directory of this trainer that no reader knows, if it exists. It is renamed first,
    /// so that no reader sees a part of it under its name.
    pub(super) fn discard(&self, path: &Path) -> Result<()> {
        let trash = self.set_aside(path)?;
        let removed = trash.map(|trash| {
            self.leases().remove_retired(&trash).map_err(|e| refused("remove", &trash, e))
        });
        removed.unwrap_or(Ok(()))
    }

    /// Removes a checkpoint that a newer save of the same step has replaced, unless it is leased.
    pub(super) fn discard_replaced(&self, path: &Path) -> Result<()> {
        let is_aside =
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TRASH));
        let trash = if is_aside { Some(path.to_path_buf()) } else { self.set_aside(path)? };
        trash.map_or(Ok(()), |trash| self.sweep_one(&trash).map(drop))
    }

    /// Renames a directory into the trash; returns `None` if it does not exist.
    pub(super) fn set_aside(&self, path: &Path) -> Result<Option<PathBuf>> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let trash = self.trash_of(&name);
        match self.leases().move_to_trash(path, &trash) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(refused("remove", path, e)),
            Ok(()) => Ok(Some(trash)),
        }
    }

    /// Returns a free name in the trash.
    fn trash_of(&self, name: &str) -> PathBuf {
        let numbered = |number: usize| match number {
            1 => self.root().join(format!("{TRASH}{name}")),
            _ => self.root().join(format!("{TRASH}{name}.{number}")),
        };
        (1..).map(numbered).find(|path| !path.exists()).unwrap_or_else(|| numbered(1))
    }
}

/// Renames a leased directory in the trash to the `path` of its checkpoint, if it has one that is
/// free; returns [`Removal::Leased`].
fn restore(trash: &Path, path: Option<&Path>) -> Result<Removal> {
    match path {
        Some(path) if !path.exists() => fs::rename(trash, path)
            .map_err(|e| refused("restore", path, e))
            .map(|()| Removal::Leased),
        _ => Ok(Removal::Leased),
    }
}
