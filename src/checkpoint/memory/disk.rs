//! Copies of slots on a local disk, which outlive a reboot of the node.
//!
//! A thread of every rank copies a slot while training continues. The next one begins only once all
//! ranks have reported that theirs is written, so of the two files of each rank one is always of a
//! step that all have.

use std::fs;
use std::path::{Path, PathBuf};

use super::node_directory::NodeDirectory;
use crate::save_thread::{SaveTask, SaveThread};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::own_files;

/// The number of files of a rank.
const FILES: usize = 2;

/// Writes slots of this rank to a disk.
pub struct DiskCopies {
    node: NodeDirectory,
    path: PathBuf,
    job: String,
    rank: usize,
    /// The steps between two copies.
    every: u64,
    thread: SaveThread,
    /// The step of the last copy, and the number of its file.
    last: Option<(u64, usize)>,
    underway: Option<Underway>,
    is_first_of_node: bool,
    /// Directories that earlier jobs have used, until all ranks have written a copy.
    earlier: Vec<NodeDirectory>,
}

/// A copy that not all ranks have written yet.
struct Underway {
    /// The slot that is copied, which must not be written.
    slot: usize,
    task: Option<SaveTask<Result<()>>>,
}

impl DiskCopies {
    /// Creates the directory of the job on the disk. Copies in `earlier` stay until the first one
    /// is written.
    ///
    /// # Errors
    /// Returns an error if it cannot be created, or the system refuses a thread.
    pub fn new(
        node: NodeDirectory,
        job: &str,
        outline: &[u8],
        (rank, is_first_of_node): (usize, bool),
        every: u64,
        earlier: Vec<NodeDirectory>,
    ) -> Result<Self> {
        let path = node.create_job(job)?;
        if is_first_of_node {
            node.write_outline(job, outline)?;
        }
        Ok(Self {
            node,
            path,
            job: job.to_string(),
            rank,
            every,
            thread: SaveThread::start()?,
            last: None,
            underway: None,
            is_first_of_node,
            earlier,
        })
    }

    /// Returns the slot that is being copied.
    pub fn locked(&self) -> Option<usize> {
        self.underway.as_ref().map(|underway| underway.slot)
    }

    /// Begins to copy slot `number`, whose file is at `from`, if its step is due and nothing is
    /// under way.
    pub fn begin_if_due(&mut self, step: u64, number: usize, from: &Path) {
        let last = self.last.map_or(0, |(step, _)| step);
        if self.underway.is_some() || step < last + self.every {
            return;
        }
        let file = self.last.map_or(0, |(_, file)| (file + 1) % FILES);
        self.last = Some((step, file));
        let temporary = self.path.join(format!("writing-{:05}", self.rank));
        let to = self.path.join(format!("rank-{:05}.own.{file}", self.rank));
        let from = from.to_path_buf();
        let task = self.thread.begin(move || write(&from, &temporary, &to));
        self.underway = Some(Underway { slot: number, task: Some(task) });
    }

    /// Returns true if a copy is under way and this rank has written its part.
    ///
    /// # Errors
    /// Returns an error if it could not be written.
    pub fn is_written(&mut self) -> Result<bool> {
        let Some(underway) = &mut self.underway else { return Ok(false) };
        match underway.task.take_if(|task| task.is_finished()) {
            Some(task) => task.join().flatten().map(|()| true),
            None => Ok(underway.task.is_none()),
        }
    }

    /// Notes that all ranks have written their parts. Flags of a copy before this one, which this
    /// rank has not written yet, have no effect.
    pub fn commit(&mut self) {
        let written = self.underway.take_if(|underway| underway.task.is_none());
        if written.is_none() {
            return;
        }
        let earlier = std::mem::take(&mut self.earlier);
        if self.is_first_of_node {
            self.node.remove_others(&self.job);
            earlier.iter().for_each(NodeDirectory::remove);
        }
    }

    /// Returns true if copies of earlier jobs in other directories stay for now.
    pub fn has_earlier(&self) -> bool {
        !self.earlier.is_empty()
    }

    /// Waits until the thread has ended its task.
    pub fn abandon(&mut self) {
        let task = self.underway.take().and_then(|underway| underway.task);
        // The copy may be incomplete, as after a kill.
        drop(task.map(SaveTask::join));
    }

    /// Removes all copies of the run on this node's disk.
    pub fn remove(&self) {
        self.node.remove();
        self.earlier.iter().for_each(NodeDirectory::remove);
    }
}

/// Copies a slot durably.
fn write(from: &Path, temporary: &Path, to: &Path) -> Result<()> {
    let refused = |e| {
        Error::io("write the in-memory checkpoint to", to, e)
            .hint("check the disk, or remove memory_checkpoint.disk_dir")
    };
    let mut slot = fs::File::open(from).map_err(|e| Error::io("read", from, e))?;
    let mut file = own_files::create(temporary).map_err(refused)?;
    std::io::copy(&mut slot, &mut file)
        .and_then(|_| file.sync_all())
        .and_then(|()| fs::rename(temporary, to))
        .map_err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_files_alternate_and_a_copy_in_use_is_not_replaced() {
        let root = tempfile::tempdir().unwrap();
        let slot = root.path().join("slot");
        fs::write(&slot, "one").unwrap();
        let node = NodeDirectory::new(&root.path().join("disk"), Path::new("/runs/x"));
        node.create_job("before").unwrap();
        let earlier = NodeDirectory::new(&root.path().join("earlier"), Path::new("/runs/x"));
        earlier.create_job("before").unwrap();
        let others = vec![earlier.clone()];
        let mut disk =
            DiskCopies::new(node.clone(), "job", b"outline", (3, true), 10, others).unwrap();
        let path = |file| node.path().join(format!("job/rank-00003.own.{file}"));
        let until_written = |disk: &mut DiskCopies| {
            while !disk.is_written().unwrap() {
                std::thread::yield_now();
            }
        };
        disk.begin_if_due(9, 0, &slot);
        assert_eq!(disk.locked(), None);
        disk.begin_if_due(10, 0, &slot);
        disk.commit();
        assert_eq!(disk.locked(), Some(0), "it is not written yet");
        until_written(&mut disk);
        assert!(disk.is_written().unwrap() && disk.locked() == Some(0));
        assert_eq!(node.jobs().unwrap(), ["before", "job"]);
        assert!(earlier.path().exists() && disk.has_earlier());
        // Another rank is not done yet.
        fs::write(&slot, "two").unwrap();
        disk.begin_if_due(20, 1, &slot);
        assert_eq!(fs::read_to_string(path(0)).unwrap(), "one");
        disk.commit();
        assert_eq!(node.jobs().unwrap(), ["job"]);
        assert!(!earlier.path().exists() && !disk.has_earlier());
        disk.begin_if_due(20, 1, &slot);
        until_written(&mut disk);
        disk.commit();
        assert_eq!(fs::read_to_string(path(1)).unwrap(), "two");
        assert_eq!(node.slots("job").unwrap(), [path(0), path(1)]);
        // A slot that cannot be read.
        disk.begin_if_due(30, 0, &root.path().join("missing"));
        let error = loop {
            match disk.is_written() {
                Ok(false) => std::thread::yield_now(),
                done => break done.unwrap_err(),
            }
        };
        assert!(error.to_string().contains("missing"), "{error}");
    }
}
