//! A directory that appears whole or not at all.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::directory::sync;
use hpctrain_base::error::{Error, Result};

/// A directory that is being filled, beside its place. It is removed unless published.
pub struct ExportStaging {
    folder: TempDir,
    place: PathBuf,
}

impl ExportStaging {
    /// A directory that will be at `place`, where there may be nothing but an empty directory.
    ///
    /// # Errors
    /// There is something, or the file system refused.
    pub fn new(place: &Path) -> Result<Self> {
        let taken = match std::fs::read_dir(place) {
            Ok(mut entries) => entries.next().is_some(),
            Err(e) => e.kind() != std::io::ErrorKind::NotFound,
        };
        if taken {
            return Err(Error::input(format!("{} exists already", place.display()))
                .hint("give a directory that does not exist, or an empty one"));
        }
        let name = place.file_name().ok_or_else(|| {
            Error::input(format!("{} cannot be a directory's name", place.display()))
                .hint("give a path such as ./gpt2")
        })?;
        let parent = parent(place);
        std::fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, e))?;
        let prefix = format!(".{}.tmp-", name.to_string_lossy());
        // The permissions of any new directory: those that the user's mask allows.
        let permissions = Permissions::from_mode(0o777);
        let folder =
            tempfile::Builder::new().prefix(&prefix).permissions(permissions).tempdir_in(parent);
        let folder = folder.map_err(|e| Error::io("write to", parent, e))?;
        Ok(Self { folder, place: place.to_path_buf() })
    }

    /// The directory to write to until it is published.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Moves it to its place, durably.
    ///
    /// # Errors
    /// The file system refused, or something is there by now.
    pub fn publish(self) -> Result<()> {
        sync(self.path())?;
        std::fs::rename(self.path(), &self.place)
            .map_err(|e| Error::io("publish", &self.place, e))?;
        // Nothing is left there to remove.
        let _ = self.folder.keep();
        sync(parent(&self.place))
    }
}

/// The directory that a path is in.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
