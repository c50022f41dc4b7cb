//! The files of memberships: `membership/000001.json` in the directory of the run.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use super::Membership;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::{own_files, safe_open};

/// The directory of the memberships of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MembershipDirectory(PathBuf);

impl MembershipDirectory {
    /// Returns the directory of the run at `run`. Nothing is created.
    pub fn of_run(run: &Path) -> Self {
        Self(run.join("membership"))
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of a membership.
    fn file(&self, number: u64) -> PathBuf {
        self.0.join(format!("{number:06}.json"))
    }

    /// Returns the number of the newest membership, 0 if there is none.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn newest_number(&self) -> Result<u64> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(0),
            Err(e) => return Err(Error::io("read", &self.0, e)),
        };
        let numbers = entries.flatten().filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.strip_suffix(".json")?.parse::<u64>().ok()
        });
        Ok(numbers.max().unwrap_or(0))
    }

    /// Returns the newest membership; `None` if there is none.
    ///
    /// # Errors
    /// Returns an error if it cannot be read.
    pub fn newest(&self) -> Result<Option<Membership>> {
        match self.newest_number()? {
            0 => Ok(None),
            number => self.read(number).map(Some),
        }
    }

    /// Returns the membership with this number.
    ///
    /// # Errors
    /// Returns an error if it does not exist or cannot be read.
    pub fn read(&self, number: u64) -> Result<Membership> {
        let path = self.file(number);
        let bytes = safe_open::read(&path).map_err(|e| Error::unreadable("read", &path, &e))?;
        serde_json::from_slice(&bytes)
            .map_err(|e| Error::damaged(format!("{}: {e}", path.display())))
    }

    /// Writes a membership if there is none with its number, atomically. Returns the one that has
    /// the number afterwards.
    ///
    /// # Errors
    /// Returns an error if the file system fails.
    pub fn create(&self, membership: &Membership, writer: &str) -> Result<Membership> {
        let path = self.file(membership.number);
        let refused = |e| Error::io("write", &path, e);
        own_files::create_directory(&self.0).map_err(refused)?;
        let text = serde_json::to_vec_pretty(membership)
            .map_err(|e| Error::internal(format!("membership: {e}")))?;
        let new = self.0.join(format!(".{writer}.new"));
        // A link is created once on all file systems, also network file systems, and shows the
        // whole content.
        let written = own_files::create(&new)
            .and_then(|mut file| {
                file.set_len(0)?;
                file.write_all(&text)?;
                file.sync_all()
            })
            .and_then(|()| fs::hard_link(&new, &path));
        // The link has the content.
        let _ = fs::remove_file(&new);
        match written {
            Ok(()) => Ok(membership.clone()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => self.read(membership.number),
            Err(e) => Err(refused(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn membership(number: u64, time: f64) -> Membership {
        Membership { number, members: vec![], lost: vec![], joined: vec![], time }
    }

    #[test]
    fn a_number_is_written_once() {
        let run = tempfile::tempdir().unwrap();
        let directory = MembershipDirectory::of_run(run.path());
        assert_eq!(directory.newest(), Ok(None));
        assert_eq!(directory.newest_number(), Ok(0));
        let first = membership(7, 1.0);
        assert_eq!(directory.create(&first, "a"), Ok(first.clone()));
        assert_eq!(directory.create(&membership(7, 2.0), "b"), Ok(first.clone()));
        assert_eq!(directory.newest(), Ok(Some(first)));
        let next = membership(8, 3.0);
        directory.create(&next, "b").unwrap();
        assert_eq!(directory.newest(), Ok(Some(next)));
        // Only the memberships are left.
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn of_many_writers_one_succeeds() {
        let run = tempfile::tempdir().unwrap();
        let directory = MembershipDirectory::of_run(run.path());
        let created: Vec<Membership> = std::thread::scope(|scope| {
            let writers = (0..8).map(|writer| {
                let directory = &directory;
                scope.spawn(move || {
                    let mine = membership(1, f64::from(writer));
                    directory.create(&mine, &writer.to_string()).unwrap()
                })
            });
            let writers: Vec<_> = writers.collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        assert!(created.iter().all(|one| *one == created[0]), "{created:?}");
    }
}
