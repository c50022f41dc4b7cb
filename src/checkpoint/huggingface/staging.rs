//! A directory that appears completely or not at all.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::directory::sync;
use hpctrain_base::error::{Error, Result};

/// A staging directory next to its destination. It is removed unless published.
pub struct ExportStaging {
    folder: TempDir,
    place: PathBuf,
}

impl ExportStaging {
    /// Creates a staging directory for `place`, which must not exist or be an empty directory.
    ///
    /// # Errors
    /// Returns an error if `place` exists and is not empty, or the staging directory cannot be
    /// created.
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
        // As for any new directory, subject to the umask.
        let permissions = Permissions::from_mode(0o777);
        let folder =
            tempfile::Builder::new().prefix(&prefix).permissions(permissions).tempdir_in(parent);
        let folder = folder.map_err(|e| Error::io("write to", parent, e))?;
        Ok(Self { folder, place: place.to_path_buf() })
    }

    /// Returns the directory to write to before publishing.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Renames it to its destination, durably.
    ///
    /// # Errors
    /// Returns an error if the file system fails, or the destination has been filled in the
    /// meantime.
    pub fn publish(self) -> Result<()> {
        sync(self.path())?;
        std::fs::rename(self.path(), &self.place)
            .map_err(|e| Error::io("publish", &self.place, e))?;
        // After the rename, dropping the staging directory must not remove it.
        let _ = self.folder.keep();
        sync(parent(&self.place))
    }
}

/// Returns the directory that contains a path.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
