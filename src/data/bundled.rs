//! The data set that is built into the program, for first runs without a download.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use sha2::{Digest, Sha256};

use super::import::hex;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::user_dirs;

struct Bundle {
    name: &'static str,
    /// The names and contents of the files.
    files: &'static [(&'static str, &'static [u8])],
}

const BUNDLES: &[Bundle] = &[Bundle {
    name: "tiny-shakespeare",
    files: &[
        ("train-00000.h5", include_bytes!("bundle/train-00000.h5")),
        ("train-00001.h5", include_bytes!("bundle/train-00001.h5")),
        ("train-00002.h5", include_bytes!("bundle/train-00002.h5")),
        ("train-00003.h5", include_bytes!("bundle/train-00003.h5")),
        ("val-00000.h5", include_bytes!("bundle/val-00000.h5")),
    ],
}];

/// Returns the directory with the shards of the bundled data set `name`, and writes them if they
/// are not there yet.
///
/// The directory lies in the user's cache directory, or, if that is not writable, in a per-user
/// directory below the temporary one. Any number of processes may call this at once.
pub fn locate(name: &str) -> Result<PathBuf> {
    match BUNDLES.iter().find(|bundle| bundle.name == name) {
        Some(bundle) => bundle.unpack(&user_dirs::cache_roots()),
        None => {
            let names: Vec<&str> = BUNDLES.iter().map(|bundle| bundle.name).collect();
            Err(Error::input(format!("no bundled data set is named {name:?}"))
                .hint(format!("available: {}", names.join(", "))))
        }
    }
}

impl Bundle {
    /// Writes the files below the first of `roots` that is writable, in a directory with the name
    /// that is paired with it.
    fn unpack(&self, roots: &[(PathBuf, String)]) -> Result<PathBuf> {
        let mut failure = Error::internal("there is no directory to unpack data into");
        for (root, name) in roots {
            // The hash separates programs of different versions.
            let unpacked = user_dirs::below(root, &[name, &self.hash()])
                .and_then(|directory| self.unpack_into(&directory).map(|()| directory));
            match unpacked {
                Ok(directory) => return Ok(directory),
                Err(e) => failure = e,
            }
        }
        Err(failure.hint("set XDG_CACHE_HOME to a directory that can be written"))
    }

    fn unpack_into(&self, directory: &Path) -> Result<()> {
        for (name, content) in self.files {
            let path = directory.join(name);
            if fs::read(&path).is_ok_and(|existing| existing == *content) {
                continue;
            }
            // Ranks race here, on one node or many: each renames a complete file of its own.
            let temporary = directory.join(format!(".{name}.{}.tmp", unique()));
            fs::write(&temporary, content)
                .and_then(|()| fs::rename(&temporary, &path))
                .inspect_err(|_| {
                    // Leaves nothing behind on a full disk; the write's error matters more.
                    let _ = fs::remove_file(&temporary);
                })
                .map_err(|e| Error::io("write", &path, e))?;
        }
        Ok(())
    }

    fn hash(&self) -> String {
        let mut hash = Sha256::new();
        for (name, content) in self.files {
            hash.update(name);
            hash.update(content);
        }
        hex(&hash.finalize()[..8])
    }
}

/// Returns a string that no other thread, process or node uses at this time.
fn unique() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let time = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
    format!("{}-{time}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUNDLE: Bundle = Bundle { name: "x", files: &[("a", b"one"), ("b", b"two")] };

    fn named(root: &Path) -> (PathBuf, String) {
        (root.to_owned(), "hpctrain".to_owned())
    }

    fn names(directory: &Path) -> Vec<String> {
        crate::spec::file_names(directory).unwrap()
    }

    #[test]
    fn damaged_files_are_replaced_and_whole_ones_kept() {
        let root = tempfile::tempdir().unwrap();
        let roots = [named(root.path())];
        let directory = BUNDLE.unpack(&roots).unwrap();
        fs::write(directory.join("a"), "oen").unwrap();
        let kept = fs::metadata(directory.join("b")).unwrap().modified().unwrap();
        assert_eq!(BUNDLE.unpack(&roots).unwrap(), directory);
        assert_eq!(fs::read(directory.join("a")).unwrap(), b"one");
        assert_eq!(fs::metadata(directory.join("b")).unwrap().modified().unwrap(), kept);
        assert_eq!(names(&directory), ["a", "b"]);
    }

    #[test]
    fn an_unusable_cache_falls_back_to_the_next() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        let other = root.path().join("other");
        let directory = BUNDLE.unpack(&[named(&file), named(&other)]).unwrap();
        assert!(directory.starts_with(&other));
        assert!(BUNDLE.unpack(&[named(&file)]).unwrap_err().to_string().contains("cannot create"));
    }

    #[test]
    fn racing_threads_all_succeed() {
        let root = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| BUNDLE.unpack(&[named(root.path())]).unwrap());
            }
        });
        let directory = BUNDLE.unpack(&[named(root.path())]).unwrap();
        assert_eq!(names(&directory), ["a", "b"]);
    }

    #[test]
    fn unknown_names_are_answered_with_the_known() {
        let e = locate("huge-shakespeare").unwrap_err().to_string();
        assert_eq!(
            e,
            "no bundled data set is named \"huge-shakespeare\"\nhint: available: tiny-shakespeare"
        );
    }
}
