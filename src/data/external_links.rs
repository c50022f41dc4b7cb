//! Links of HDF5 files to objects of other files.
//!
//! HDF5 opens those files by itself, and would block on a pipe: all external links of a file are
//! checked when it is opened.
//!
//! `unsafe` code calls the HDF5 functions that return the target of a link, which the binding
//! lacks.

use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::ptr;

use hdf5::Group;
use hdf5_sys::h5l::{H5Lget_val, H5Lunpack_elink_val};
use hdf5_sys::h5p::H5P_DEFAULT;

use super::walk::{DEEPEST, LinkTarget, Walk};
use hpctrain_base::error::{Error, Result};

/// The environment variable with the directories of files that external links refer to.
pub(super) const PREFIX: &str = "HDF5_EXT_PREFIX";

/// Checks that no link of a file refers to a pipe, a socket or a device, and that its groups are
/// not nested too deeply to check all links.
///
/// # Errors
/// Returns an error that names the link and its target, or the group.
pub(super) fn check(file: &Group, path: &Path) -> Result<()> {
    let mut walk = Walk::new(file);
    while let Some(visited) = walk.next() {
        // A group that cannot be listed is reported when its content is read.
        for name in visited.group.member_names().unwrap_or_default() {
            match link(&visited.group, &name) {
                Some(Link::Soft(_)) => {}
                Some(Link::External { file, object }) => check_target(&name, &file, &object, path)?,
                None => {
                    if walk.follow(&visited, &name) == LinkTarget::TooDeep {
                        let at = path.display();
                        return Err(Error::input(format!(
                            "{at}: groups are nested more than {DEEPEST} deep"
                        ))
                        .hint(
                            "write the datasets into groups near the root, or into a separate file",
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

/// Returns an error if an external link refers to a file that is not regular.
fn check_target(name: &str, file: &str, object: &str, path: &Path) -> Result<()> {
    let found = candidates(file, path, PREFIX).find(|place| place.exists());
    match found.filter(|place| !place.is_file() && !place.is_dir()) {
        None => Ok(()),
        Some(place) => {
            let at = path.display();
            let place = place.display();
            Err(Error::input(format!(
                "{at}: {name} is an external link to {object} of {place}, which is a pipe, a socket or a device"
            ))
            .hint("remove the link, or replace it by one to an HDF5 file"))
        }
    }
}

/// The target of a link that is not a hard link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Link {
    /// A path in the same file.
    Soft(String),
    /// An object of another file.
    External { file: String, object: String },
}

/// Returns the target of the link `name`, unless it is a hard link.
pub(super) fn link(file: &Group, name: &str) -> Option<Link> {
    /// More bytes than a path can have.
    const CAPACITY: usize = 64 << 10;
    let name = CString::new(name).ok()?;
    let mut value = vec![0u8; CAPACITY + 1];
    hdf5::sync::sync(|| {
        // SAFETY: HDF5 writes at most `CAPACITY` bytes, and nothing for a hard link, for which it
        // returns an error.
        let got = unsafe {
            H5Lget_val(file.id(), name.as_ptr(), value.as_mut_ptr().cast(), CAPACITY, H5P_DEFAULT)
        };
        if got < 0 {
            return None;
        }
        // SAFETY: `value` ends with a zero that HDF5 has not overwritten.
        let text = |at: *const c_char| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned();
        let soft = text(value.as_ptr().cast());
        if !soft.is_empty() {
            return Some(Link::Soft(soft));
        }
        let mut flags = 0;
        let mut target = ptr::null();
        let mut object = ptr::null();
        // The value of an external link begins with a zero: its version. SAFETY: HDF5 looks for two
        // strings within `CAPACITY` bytes, and sets `target` and `object` to their addresses in
        // `value`.
        let unpacked = unsafe {
            H5Lunpack_elink_val(
                value.as_ptr().cast(),
                CAPACITY,
                &mut flags,
                &mut target,
                &mut object,
            )
        };
        let is_external = unpacked >= 0 && !target.is_null() && !object.is_null();
        is_external.then(|| Link::External { file: text(target), object: text(object) })
    })
}

/// Returns the path at which HDF5 finds a file that the file at `path` refers to: the absolute
/// path, else its last component, in the directories of an environment variable, beside the
/// referring file, or in the current directory.
pub(super) fn find(name: &str, path: &Path, variable: &str) -> Option<PathBuf> {
    candidates(name, path, variable).find(|path| path.is_file())
}

/// Returns the paths at which HDF5 looks for a file, in order.
fn candidates(name: &str, path: &Path, variable: &str) -> impl Iterator<Item = PathBuf> {
    let absolute = Path::new(name).is_absolute().then(|| PathBuf::from(name));
    let relative = match &absolute {
        Some(path) => path.file_name().map(PathBuf::from),
        None => Some(PathBuf::from(name)),
    };
    let prefixes = std::env::var(variable).unwrap_or_default();
    let parent = |path: &Path| path.parent().map(Path::to_path_buf);
    let mut folders: Vec<PathBuf> =
        prefixes.split(':').filter(|prefix| !prefix.is_empty()).map(PathBuf::from).collect();
    folders.extend(parent(path));
    folders.push(PathBuf::new());
    folders.extend(path.canonicalize().ok().as_deref().and_then(parent));
    let below =
        relative.map(|relative| folders.into_iter().map(move |folder| folder.join(&relative)));
    absolute.into_iter().chain(below.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_found_where_the_library_looks() {
        let root = tempfile::tempdir().unwrap();
        let main = root.path().join("main.h5");
        std::fs::write(root.path().join("part.h5"), "").unwrap();
        let part = Some(root.path().join("part.h5"));
        assert_eq!(find("part.h5", &main, "NO_SUCH_PREFIX"), part);
        assert_eq!(find("/elsewhere/part.h5", &main, "NO_SUCH_PREFIX"), part);
        assert_eq!(find("lost.h5", &main, "NO_SUCH_PREFIX"), None);
        assert_eq!(find("/", &main, "NO_SUCH_PREFIX"), None);
    }
}
